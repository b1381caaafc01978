"""Plan a room again from its received bytes while stores use it, and swap in the result.

    bytes, in the order of arrival
        │  plan, with the planner of an append
        ▼
    shadow tables: temporary tables of a session
        │  with the room locked: plan what came in the meantime, then compare
        ▼
    live tables, and new positions for what clients lack

arrivals         the input: bytes, positions, origins, and states that no event gives
interned         nids of names
planner          plan a room in memory, and write it in bulk; imports use it, too
shadow_tables    temporary tables that hide the live ones under the same names
replan           plan a room again, under the nids that it has
match            which of the new states the room has already
swap             move the differences from the shadow tables into the live ones
client_positions positions and changes that clients know: they stay, and get what they lack
run              the order of these: `Rebuilder`, `rebuild`; `repair` does so with all findings
completion       the same for a partial room, on the whole state before its join
shared           known names, sequences and positions, which all rooms share; rows of no room

Writers wait only for the swap. Readers see the room before or after it, because it is one
transaction. A rebuild that ends early ends its session, and drops the shadow tables: nothing
changes. Nothing here needs Spark: `storage.pipeline` deals rooms out to tasks that each have a
`Rebuilder`.
"""

from storage.rebuild.run import Rebuilder, Rebuilt, complete, rebuild, repair
from storage.rebuild.shared import repair_positions

__all__ = ["Rebuilder", "Rebuilt", "complete", "rebuild", "repair", "repair_positions"]
