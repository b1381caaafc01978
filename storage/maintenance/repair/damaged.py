"""Find the events whose derived columns are wrong: they are taken out and appended again.

Their columns, topological positions and states then follow from the bytes, as those of a new event
do. Digests and sizes of state groups are mended in place before, because a state that is resolved
again is looked for by its digest.
"""

from collections.abc import AsyncIterator
from typing import Final, LiteralString

from storage.database.array_text import transposed
from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.maintenance.verify.auth_results import check_auth_results
from storage.maintenance.verify.event_columns import check_contents
from storage.maintenance.verify.event_loader import SQL_NIDS_OF, IdRow
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.graph import SQL_AFTER_GAPS, AfterGapRow, check_order
from storage.maintenance.verify.groups import SQL_GROUPS
from storage.maintenance.verify.room import BATCH, VerifiedRoom
from storage.maintenance.verify.states import check_states

SQL_SET_FACTS: Final[LiteralString] = """
UPDATE state_groups g
SET digest = CASE WHEN g.digest IS NOT NULL THEN i.digest END,
    entry_count = i.entry_count
FROM unnest($1::bigint[], $2::bigint[], $3::int[]) AS i (state_group, digest, entry_count)
WHERE g.state_group = i.state_group
    AND (g.digest <> i.digest OR g.entry_count <> i.entry_count)
"""

SQL_SET_APART: Final[LiteralString] = compose(
    """
UPDATE state_groups g
SET key_nids = i.key_nids,
    event_nids = i.event_nids,
    member_key_nids = i.member_key_nids,
    member_event_nids = i.member_event_nids,
    key_nid = i.key_nid,
    member_key_nid = i.member_key_nid
FROM (
    SELECT g.state_group,
        array_agg(x.state_key_nid) FILTER (WHERE g.event_nid IS NULL AND k.type_nid <> 2)
            AS key_nids,
        array_agg(x.event_nid) FILTER (WHERE g.event_nid IS NULL AND k.type_nid <> 2)
            AS event_nids,
        array_agg(x.state_key_nid) FILTER (WHERE g.event_nid IS NULL AND k.type_nid = 2)
            AS member_key_nids,
        array_agg(x.event_nid) FILTER (WHERE g.event_nid IS NULL AND k.type_nid = 2)
            AS member_event_nids,
        min(x.state_key_nid) FILTER (WHERE g.event_nid IS NOT NULL AND k.type_nid <> 2) AS key_nid,
        min(x.state_key_nid) FILTER (WHERE g.event_nid IS NOT NULL AND k.type_nid = 2)
            AS member_key_nid
    FROM state_groups g
    CROSS JOIN LATERAL :own_entries.call(g) AS x
    JOIN state_keys k ON k.state_key_nid = x.state_key_nid
    WHERE g.room_nid = $1::int
    GROUP BY g.state_group
    HAVING bool_or((k.type_nid = 2) <> x.is_member)
) AS i
WHERE g.state_group = i.state_group
""",
    OWN_ENTRIES,
).sql

SQL_SET_AFTER_GAPS: Final[LiteralString] = """
UPDATE events e
SET after_gap = NULLIF(i.after_gap, false)
FROM unnest($2::text[], $3::boolean[]) AS i (event_id, after_gap)
WHERE e.event_id = i.event_id AND e.room_nid = $1::int
"""

MENDED: Final = frozenset(
    {"columns", "topological_ordering", "state_before", "state_after", "state_groups", "rejected"}
)
"""Checks with findings that name events first, or last, that appending again mends."""


async def repair_group_facts(conn: Connection, room: VerifiedRoom) -> None:
    """Set the digest and the size of each state group by its entries, and members apart."""
    await conn.execute(SQL_SET_APART, room.nid)
    numbers: list[int] = await conn.fetchvals(SQL_GROUPS, room.nid)
    for start in range(0, len(numbers), BATCH):
        groups = await room.states.load(conn, numbers[start : start + BATCH])
        facts = [(group.state_group, group.digest, len(group.entries)) for group in groups.values()]
        await conn.execute(SQL_SET_FACTS, *transposed(facts, 3))


async def repair_after_gaps(conn: Connection, room_nid: int) -> None:
    """Set the flag of the events that arrived before one of their parents."""
    rows = await conn.fetch(SQL_AFTER_GAPS, room_nid, row=AfterGapRow)
    await conn.execute(
        SQL_SET_AFTER_GAPS, room_nid, *transposed(((row[0], row.expected) for row in rows), 2)
    )


async def damaged_events(conn: Connection, room: VerifiedRoom) -> set[int]:
    """Return the events of a room whose columns, position, states or auth result are wrong."""
    found = [
        finding.subject[0 if finding.check == "topological_ordering" else -1]
        async for finding in _findings(conn, room)
        if finding.check in MENDED
    ]
    return {row.event_nid for row in await conn.fetch(SQL_NIDS_OF, found, row=IdRow)}


async def _findings(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    for check in (check_contents, check_order, check_states, check_auth_results):
        async for finding in check(conn, room):
            yield finding
