"""Rebuilding a room from its received bytes, beside a live store, switched in at the end.

    bytes, in the order of arrival ── plan (the planner of an append) ──> tables aside, in a session's temporary tables
                                          then, holding the room: what came meanwhile; what differs goes into the live tables

arrivals    what there is to go by: bytes, positions, origins, and the state where none of the events tells it
aside       temporary tables that stand before the live ones under the same names
replaying   planning a room anew, under the numbers that it has
matching    which of the new states the room has already
switching   what differs, from the tables aside into the live ones
run         the order of it all: `Rebuilder`

Writers wait for the switch alone. Whoever reads sees the room as it was or as it is to be, as both are one transaction apart. What ends a
rebuild before, ends its session, and with it the tables aside: nothing has changed.
"""

from storage.pipeline.rebuilding.run import Rebuilder, Rebuilt

__all__ = ["Rebuilder", "Rebuilt"]
