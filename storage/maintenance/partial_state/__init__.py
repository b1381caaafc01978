"""Complete a partial state: the members of a room that this server joined without them (MSC3706).

  completion store the join and everything after it again, on the whole state
  replayed   the events to store again, in the order in which they arrived
  positions  put back what clients know, and publish the difference at one new position

The mark of such a room is set before its join is stored (storage/persist/partial_marks.py). The
planner adds the members that events cite (storage/persist/plan/partial_state.py).
"""

from storage.maintenance.partial_state.completion import complete

__all__ = ["complete"]
