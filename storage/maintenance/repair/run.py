"""Run the parts of a repair, in the order of their dependencies."""

import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, OWN_ENTRIES, PREV_NIDS
from storage.database.connection import Connection, Database
from storage.database.placeholders import compose, fill, transposed
from storage.errors import PermissionRefused, StorageCorrupt
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.purge.removal import delete
from storage.maintenance.repair.current import (
    repair_current,
    repair_deltas,
    repair_member_positions,
    repair_state_tables,
)
from storage.maintenance.repair.graph import (
    rebuild_cover,
    repair_extremities,
    repair_gaps,
    repair_redactions,
    repair_relations,
    repair_reorderings,
    repair_time_order,
)
from storage.maintenance.repair.reauthorise import (
    RemovedEvents,
    append_again,
    drop_groups,
    take_out,
)
from storage.maintenance.repair.replay import RepairPlanner, replay
from storage.maintenance.room_states import PART_ROOM_EVENTS, RoomStates
from storage.maintenance.verify.auth_results import check_auth_results, wrongly_superseded
from storage.maintenance.verify.event_columns import check_contents
from storage.maintenance.verify.event_loader import (
    BATCH,
    SQL_NIDS_OF,
    Finding,
    IdRow,
    VerifiedRoom,
    read_room,
)
from storage.maintenance.verify.graph import (
    SQL_AFTER_GAPS,
    AfterGapRow,
    check_order,
    doubled_events,
)
from storage.maintenance.verify.states import SQL_GROUPS, check_states
from storage.observability.counters import Report, silent
from storage.persist.room_lock import lock_room
from storage.streams.caches import CURRENT_STATE
from storage.streams.invalidate_caches import invalidate_caches, register_writer

# --------------------------------------------------------------------------------------------------
# Find the events whose derived columns are wrong: they are taken out and appended again.
#
# Their columns, topological positions and states then follow from the bytes, as those of a new
# event do. Digests and sizes of state groups are mended in place before, because a state that is
# resolved again is looked for by its digest.

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


# --------------------------------------------------------------------------------------------------
# Make one row of an event that is stored twice.
#
# Mostly nothing refers to one of the two rows, which is deleted. Where edges or states refer to
# both, both are taken out, and the event is appended again with its descendants
# (storage/maintenance/repair/reauthorise.py).

SQL_TWINS: Final[LiteralString] = compose(
    """
WITH
named AS (
    SELECT n.event_nid
    FROM events e
    CROSS JOIN unnest(:prev_nids.call(e) || :auth_nids.call(e)) AS n (event_nid)
    WHERE e.room_nid = $1::int AND (e.outlier OR NOT e.outlier) AND n.event_nid = ANY($2::bigint[])
    UNION
    SELECT x.event_nid
    FROM state_groups g
    CROSS JOIN LATERAL :own_entries.call(g) AS x
    WHERE g.room_nid = $1::int AND x.event_nid = ANY($2::bigint[])
)
SELECT e.event_nid, e.event_nid IN (SELECT event_nid FROM named) AS is_named
FROM events e
WHERE e.event_nid = ANY($2::bigint[]) AND e.room_nid = $1::int
-- the row that the others are copies of
ORDER BY is_named DESC, e.event_nid IN (
    SELECT event_nid FROM memberships WHERE room_nid = $1::int
) DESC, e.outlier, e.stream_ordering, e.event_nid
""",
    PREV_NIDS,
    AUTH_NIDS,
    OWN_ENTRIES,
).sql


class TwinRow(NamedTuple):
    """One row of a doubled event. ``is_named``: an edge or a state refers to it."""

    event_nid: int
    is_named: bool


async def drop_doubled(conn: Connection, room_nid: int) -> set[int]:
    """Delete rows of doubled events to which nothing refers, so that one of each is left.

    Return the rows of events that have several to which something refers. The room must be locked,
    and the derived data be rebuilt afterwards.
    """
    left: set[int] = set()
    for nids in (await doubled_events(conn, room_nid)).values():
        first, *others = await conn.fetch(SQL_TWINS, room_nid, nids, row=TwinRow)
        named = [row.event_nid for row in others if row.is_named]
        if named:
            left |= {first.event_nid, *named}
        gone = [row.event_nid for row in others if not row.is_named]
        await delete(conn, room_nid, gone, gone)
    return left


# --------------------------------------------------------------------------------------------------
# Repair the marks of refused events that are superseded.

SQL_SET_SUPERSEDED: Final[LiteralString] = """
UPDATE events e
SET superseded = NULLIF(i.superseded, false)
FROM unnest($1::text[], $2::boolean[]) AS i (event_id, superseded)
WHERE e.event_id = i.event_id
"""


async def repair_superseded(conn: Connection, room_nid: int) -> None:
    """Set the marks by the events that are stored."""
    rows = await wrongly_superseded(conn, room_nid)
    await conn.execute(SQL_SET_SUPERSEDED, *transposed(((row[0], row[2]) for row in rows), 2))


logger: logging.Logger = logging.getLogger(__name__)

TEMPLATE_NAMELESS: Final[LiteralString] = """
SELECT DISTINCT e.state_key_nid
FROM {events} AS e
LEFT JOIN LATERAL (
    SELECT true AS is_named FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k ON true
WHERE e.state_key_nid IS NOT NULL AND k.is_named IS NULL
"""

SQL_NAMELESS: Final[LiteralString] = fill(
    TEMPLATE_NAMELESS,
    events=PART_ROOM_EVENTS,
)


async def repair(
    database: Database,
    room_id: str,
    *,
    server_name: str,
    indexes_compared: bool = False,
    report: Report = silent,
) -> None:
    """Rebuild everything that follows from a room's events and their states, in one transaction.

    Events whose columns, positions, states or auth results are wrong are appended again first
    (`storage.maintenance.repair.reauthorise`). Writers of the room wait meanwhile. ``server_name``:
    its users are local. ``indexes_compared``: the caller has called `refuse_corrupt_indexes`.

    Raise `UnknownRoom`. Raise `StorageCorrupt` if an index is corrupt, a state key has lost its
    row, or required states cannot be read: nothing has changed then.
    """

    async def work(conn: Connection, *, reauthorise: bool = True) -> None:
        room_nid = await lock_room(conn, room_id)
        room = await read_room(conn, room_id, server_name)
        await _check_names(conn, room_nid)
        await repair_group_facts(conn, room)
        again = await drop_doubled(conn, room_nid) | await damaged_events(conn, room)
        taken = await take_out(conn, room, again) if reauthorise else RemovedEvents()
        await rebuild_cover(conn, room_nid)
        await repair_reorderings(conn, room_nid)
        await repair_time_order(conn, room_nid)
        await repair_gaps(conn, room)
        await repair_redactions(conn, room)
        await repair_relations(conn, room)
        ends = await repair_extremities(conn, room_nid)
        planner = await RepairPlanner.of(conn, room_id, server_name, room.states)
        await repair_current(conn, planner, room.states, ends)
        await repair_state_tables(conn, room_nid, server_name)
        if taken:
            await drop_groups(conn, room_nid)
        await replay(conn, room_id, server_name, RoomStates(), report=report)
        if taken:
            await append_again(
                conn, taken, server_name, extremities_max=database.config.forward_extremities_max
            )
            await invalidate_caches(conn, "events")
        await repair_superseded(conn, room_nid)
        await repair_after_gaps(conn, room_nid)
        await repair_deltas(conn, await read_room(conn, room_id, server_name))
        await repair_member_positions(conn, room_nid)
        await invalidate_caches(conn)

    if not indexes_compared:
        await refuse_corrupt_indexes(database, "a repair", report=report)
    await register_writer(database)
    try:
        await database.run(work)
    except (PermissionRefused, StorageCorrupt):
        logger.warning(
            "events of a room cannot be appended again, the rest is repaired",
            exc_info=True,
            extra={"room_id": room_id},
        )
        await database.run(partial(work, reauthorise=False))


async def rebuild_visibility(
    database: Database, room_id: str, *, server_name: str, report: Report = silent
) -> None:
    """Rebuild the visibility table and the audiences of a room from its states, in one transaction.

    A fact of the stream "caches" names the room. Raise `UnknownRoom`, or `StorageCorrupt` if an
    index is corrupt: nothing has changed then.
    """

    async def work(conn: Connection) -> None:
        await lock_room(conn, room_id)
        await replay(conn, room_id, server_name, RoomStates(), report=report)
        await invalidate_caches(conn, CURRENT_STATE, [room_id])

    await refuse_corrupt_indexes(database, "a rebuild of visibility", report=report)
    await register_writer(database)
    await database.run(work)


async def _check_names(conn: Connection, room_nid: int) -> None:
    """Raise `StorageCorrupt` if rows of state keys are lost.

    Everything that a repair derives from the states would be wrong.
    """
    if nameless := await conn.fetchvals(SQL_NAMELESS, room_nid):
        raise StorageCorrupt(
            "state keys without a row in state_keys: restore these rows", state_key_nids=nameless
        )
