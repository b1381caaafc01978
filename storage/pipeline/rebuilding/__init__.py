"""Rebuild a room from its received bytes while a live store uses it, and swap in the result.

    bytes, in the order of arrival
        │  plan, with the planner of an append
        ▼
    shadow tables: temporary tables of a session
        │  with the room locked: plan what came in the meantime, then compare
        ▼
    live tables

arrivals        the input: bytes, positions, origins, and states that no event gives
shadow_tables   temporary tables that hide the live ones under the same names
replan          plan a room again, under the nids that it has
match           which of the new states the room has already
swap            move the differences from the shadow tables into the live ones
run             the order of these: `Rebuilder`

Writers wait only for the swap. Readers see the room before or after it, because it is one
transaction. A rebuild that ends early ends its session, and drops the shadow tables: nothing
changes.
"""

from storage.pipeline.rebuilding.run import Rebuilder, Rebuilt

__all__ = ["Rebuilder", "Rebuilt"]
