"""Rebuild a room from its received bytes, while a live store uses it, and swap the result in at the end.

    bytes, in the order of arrival ── plan (the planner of an append) ──> shadow tables, in a session's temporary tables
                                          then, with the room locked: what came meanwhile; differences go into the live tables

arrivals        the input: bytes, positions, origins, and the state where none of the events tells it
shadow_tables   temporary tables that stand before the live ones under the same names
replan          planning a room anew, under the numbers that it has
match           which of the new states the room has already
swap            the differences, from the shadow tables into the live ones
run             the order of it all: `Rebuilder`

Writers wait for the swap alone. Readers see the room before or after it, as both are one transaction apart. A rebuild that ends early ends its
session, and with it the shadow tables: nothing has changed.
"""

from storage.pipeline.rebuilding.run import Rebuilder, Rebuilt

__all__ = ["Rebuilder", "Rebuilt"]
