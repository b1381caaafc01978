"""Recompute everything that can be recomputed, and report every difference.

It only reads, one room after the other.

  version            the room's version, against its create event
  doubled            events that are stored twice
  event_columns      the received bytes, and the columns derived from them
  graph              topological order, missing events, forward extremities
  reorderings        the positions of events before they were reordered
  groups             rows of state groups
  states             state before and after each event, current state; state_resolution resolves
                     again
  auth_results       which events the auth rules reject
  current            current state by key, memberships of local users
  deltas             changes of the current state; current_replay replays the extremities
  chain_cover        the chain cover, against auth_graph
  redactions         which redaction took effect
  visibility         the visibility table against the states; visibility_model says whom they admit
  audience_numbers   the lines of numbers of audiences
  names              names whose numbers the code knows; rows of unknown rooms
  indexes            indexes that do not agree with their tables, before everything else
  archive            packs of the cold archive, against the tables
  positions          stream positions and sequences of the whole database
"""

from storage.maintenance.verify.event_loader import REPAIRABLE, Finding
from storage.maintenance.verify.run import (
    DATABASE_CHECKS,
    ROOM_CHECKS,
    all_rooms,
    verify,
    verify_database,
    verify_room,
)

__all__ = [
    "DATABASE_CHECKS",
    "REPAIRABLE",
    "ROOM_CHECKS",
    "Finding",
    "all_rooms",
    "verify",
    "verify_database",
    "verify_room",
]
