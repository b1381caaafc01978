"""Partial states: rooms that this server has joined with the members omitted (MSC3706).

  begin      mark a room before its join is stored, or take the mark back
  completion store the join and everything after it again, on the whole state
  replayed   the events to store again, in the order in which they arrived
  positions  put back what clients know, and publish the difference at one new position

The planner adds the members that events cite (storage/persist/plan/partial_state.py).
"""

from storage.maintenance.partial_state.begin import abandon, begin, drop_lost_marks, own_members
from storage.maintenance.partial_state.completion import complete

__all__ = ["abandon", "begin", "complete", "drop_lost_marks", "own_members"]
