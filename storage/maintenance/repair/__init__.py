"""Rebuild what is derived, of one room, in one transaction: everything but the received bytes.

The flags of events, and the states at them, are rebuilt only where an event was wrongly rejected.

run            the order of the parts, and the transaction
reauthorise    events that were wrongly rejected, or read by another room version, are appended
               again
chain_cover    the chain cover
graph          gaps, forward extremities, redactions that wait
relations      what events relate to, from their bytes
current        current state, and memberships of local users
positions      not of a room: sequences and positions of streams
replay         visibility and audiences, by going through the states again; main_line says in which
               order
room_planner   planning for a locked room: the same pure functions as an append, the same loading,
               writes of its own
"""

from storage.maintenance.repair.positions import repair_positions
from storage.maintenance.repair.run import rebuild_visibility, repair

__all__ = ["rebuild_visibility", "repair", "repair_positions"]
