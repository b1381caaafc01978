"""Rebuild what is derived, of one room, in one transaction: everything except the received bytes.

The flags of events, and the states at them, are rebuilt only where an event was wrongly rejected.

  run            the order of the parts, and the transaction
  reauthorise    append again the events that were wrongly rejected, or read by another room version
  damaged        events with wrong columns or states, which are appended again, too
  doubled        events that are stored twice
  chain_cover    the chain cover
  graph          missing events, forward extremities, waiting redactions
  relations      relations of events, from their bytes
  current        current state, and memberships of local users
  deltas         the changes of the current state; what they lack gets a new position
  positions      not of a room: sequences and positions of streams
  replay         visibility and audiences, by replaying the states; main_line gives the order
  room_planner   plans for a locked room: the same pure functions and loading as an append, but
                 separate writes
"""

from storage.maintenance.repair.graph import repair_positions
from storage.maintenance.repair.run import rebuild_visibility, repair

__all__ = ["rebuild_visibility", "repair", "repair_positions"]
