"""Check the graph of prev_events: topological order, missing events, forward extremities."""

from collections.abc import AsyncIterator, Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.maintenance.indexes import IndexMismatch
from storage.maintenance.verify.event_columns import SQL_NIDS
from storage.maintenance.verify.event_loader import BATCH, Finding, VerifiedRoom, event_ids
from storage.streams.published_facts import sequences

SQL_OUT_OF_ORDER: Final[LiteralString] = compose(
    """
SELECT c.event_id AS child_id, c.topological_ordering AS child, p.event_id AS parent_id,
    p.topological_ordering AS parent
FROM events c
CROSS JOIN unnest(:prev_nids.call(c)) AS n (event_nid)
JOIN events p ON p.event_nid = n.event_nid
WHERE c.room_nid = $1::int AND NOT c.outlier AND NOT p.outlier
    AND p.topological_ordering >= c.topological_ordering
""",
    PREV_NIDS,
).sql

SQL_ROOM_MAXIMA: Final[LiteralString] = """
SELECT COALESCE(max(topological_ordering), 0) AS topological_ordering,
    GREATEST(max(stream_ordering) FILTER (WHERE NOT backfilled),
        (SELECT completed_at FROM rooms WHERE room_nid = $1::int)) AS stream_ordering
FROM events
WHERE room_nid = $1::int AND NOT outlier
"""

SQL_GAPS: Final[LiteralString] = compose(
    """
WITH RECURSIVE
named AS (  -- by an accepted live event, also through events that can be no extremity
    SELECT n.event_nid
    FROM events e
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE e.room_nid = $1::int AND NOT e.outlier AND e.rejected IS NULL AND NOT e.soft_failed
        AND NOT e.backfilled
    UNION
    SELECT n.event_nid
    FROM named
    JOIN events e USING (event_nid)
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
),
gap AS (  -- the expected rows
    SELECT n.event_nid,
        array_agg(DISTINCT c.event_nid ORDER BY c.event_nid) AS child_nids,
        n.event_nid IN (SELECT event_nid FROM named) AS superseded
    FROM events c
    CROSS JOIN unnest(:prev_nids.call(c)) AS n (event_nid)
    LEFT JOIN events p ON p.event_nid = n.event_nid
    WHERE c.room_nid = $1::int AND NOT c.outlier AND p.outlier IS NOT FALSE
    GROUP BY n.event_nid
),
found AS (
    SELECT m.event_nid, m.event_id, m.superseded, m.child_nids
    FROM missing_events m
    WHERE m.room_nid = $1::int
)
SELECT event_nid, COALESCE(f.event_id, e.event_id) AS event_id, f.child_nids AS found_nids,
    g.child_nids AS expected_nids,
    f.superseded AS found_superseded, g.superseded AS expected_superseded,
        f.event_id = e.event_id AS same_id
FROM gap g
FULL JOIN found f USING (event_nid)
LEFT JOIN events e USING (event_nid)
WHERE f.event_nid IS NULL
    OR g.event_nid IS NULL
    OR NOT (f.child_nids @> g.child_nids AND g.child_nids @> f.child_nids)
    OR g.superseded > f.superseded
    OR (f.superseded > g.superseded
        AND NOT EXISTS (SELECT FROM purge_jobs j WHERE j.room_nid = $1::int))
    OR f.event_id <> e.event_id
""",
    PREV_NIDS,
).sql

SQL_AFTER_GAPS: Final[LiteralString] = compose(
    """
SELECT e.event_id, COALESCE(e.after_gap, false) AS found, correct.expected
FROM events e
CROSS JOIN LATERAL (
    SELECT NOT e.backfilled AND EXISTS (
        SELECT
        FROM unnest(:prev_nids.call(e)) AS n (event_nid)
        LEFT JOIN events p ON p.event_nid = n.event_nid AND p.room_nid = e.room_nid
            AND COALESCE(p.arrival_ordering, p.stream_ordering)
                < COALESCE(e.arrival_ordering, e.stream_ordering)
        WHERE p.event_nid IS NULL
    )
) AS correct (expected)
WHERE e.room_nid = $1::int AND NOT e.outlier AND COALESCE(e.after_gap, false) <> correct.expected
""",
    PREV_NIDS,
).sql

SQL_EXTREMITIES: Final[LiteralString] = compose(
    """
WITH RECURSIVE
live AS (
    SELECT event_nid, :prev_nids.call AS prev_events
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND rejected IS NULL AND NOT soft_failed
        AND NOT backfilled
),
named AS (
    SELECT n.event_nid
    FROM live
    CROSS JOIN unnest(live.prev_events) AS n (event_nid)
    UNION
    SELECT n.event_nid
    FROM named
    JOIN events e USING (event_nid)
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
)
SELECT l.event_nid
FROM live l
WHERE NOT EXISTS (SELECT FROM named n WHERE n.event_nid = l.event_nid)
    AND NOT EXISTS (SELECT FROM dropped_extremities d
        WHERE d.room_nid = $1::int AND d.event_nid = l.event_nid)
""",
    PREV_NIDS,
).sql

SQL_NO_EXTREMITIES: Final[LiteralString] = """
SELECT d.event_nid
FROM dropped_extremities d
LEFT JOIN LATERAL (
    SELECT * FROM events WHERE event_nid = d.event_nid AND room_nid = d.room_nid OFFSET 0
) AS e ON true
WHERE d.room_nid = $1::int
    AND (e.outlier OR e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled) IS NOT FALSE
ORDER BY d.event_nid
"""


class AfterGapRow(NamedTuple):
    """An event whose flag `after_gap` differs: as stored, and as it should be."""

    event_id: str
    found: bool
    expected: bool


class OutOfOrderRow(NamedTuple):
    """An edge whose child is not above its parent."""

    child_id: str
    child: int
    parent_id: str
    parent: int


class MaximaRow(NamedTuple):
    """The largest orderings of a room."""

    topological_ordering: int
    stream_ordering: int | None


class WrongGapRow(NamedTuple):
    """A missing event whose row differs: as stored and as expected; either may be None."""

    event_nid: int
    event_id: str | None
    found_nids: list[int] | None
    expected_nids: list[int] | None
    found_superseded: bool | None
    expected_superseded: bool | None
    same_id: bool | None


async def check_order(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that a child sorts after its stored parents ("topological_ordering").

    Check also the latest orderings in the room's row ("rooms").
    """
    for row in await conn.fetch(SQL_OUT_OF_ORDER, room.nid, row=OutOfOrderRow):
        yield room.finding(
            "topological_ordering",
            [row.child_id, row.parent_id],
            row.child,
            f"more than the parent's {row.parent}",
        )
    maxima = await conn.fetchrow(SQL_ROOM_MAXIMA, room.nid, row=MaximaRow)
    if maxima is not None and room.row.max_topological_ordering < maxima.topological_ordering:
        found = f"max_topological_ordering {room.row.max_topological_ordering}"
        yield room.finding(
            "rooms", [room.row.room_id], found, f"at least {maxima.topological_ordering}"
        )
    if maxima is not None and room.row.last_stream_ordering != maxima.stream_ordering:
        found = f"last_stream_ordering {room.row.last_stream_ordering}"
        yield room.finding("rooms", [room.row.room_id], found, maxima.stream_ordering)


async def check_gaps(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that `missing_events` has exactly the parents that are not in the timeline.

    Each must have its children ("missing_events").
    """
    rows = await conn.fetch(SQL_GAPS, room.nid, row=WrongGapRow)
    ids = await event_ids(
        conn,
        (
            nid
            for row in rows
            for nid in (row.event_nid, *(row.found_nids or ()), *(row.expected_nids or ()))
        ),
    )
    for row in rows:
        found = _gap(row.found_nids, ids, superseded=row.found_superseded)
        expected = _gap(row.expected_nids, ids, superseded=row.expected_superseded)
        if row.same_id is False:
            expected += f", as {ids[row.event_nid]}"
        yield room.finding("missing_events", [row.event_id or ids[row.event_nid]], found, expected)


def _gap(child_nids: list[int] | None, ids: dict[int, str], *, superseded: bool | None) -> str:
    if child_nids is None:
        return "no gap"
    children = ", ".join(sorted(ids[nid] for nid in child_nids))
    return f"{'superseded ' if superseded else ''}gap below {children}"


async def check_after_gaps(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the flag of live events that arrived before one of their parents ("after_gap")."""
    for row in await conn.fetch(SQL_AFTER_GAPS, room.nid, row=AfterGapRow):
        yield room.finding("after_gap", [row.event_id], row.found, row.expected)


async def check_extremities(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the extremities are the accepted live events that no such event names.

    The finding is "forward_extremities". An event named only through events that can be no
    extremity counts as named, too (`storage.persist.plan.topology.extremities_after`). Dropped
    extremities (`storage.persist.plan.topology`) are left out. The check does not verify
    that they were superseded at the time, only that they could be extremities.
    """
    never = await conn.fetchvals(SQL_NO_EXTREMITIES, room.nid)
    names = await event_ids(conn, never)
    for nid in never:
        yield room.finding(
            "dropped_extremities", [names[nid]], "dropped", "an accepted live event of the room"
        )
    expected = set(await conn.fetchvals(SQL_EXTREMITIES, room.nid))
    found = set(room.row.forward_extremities)
    if found != expected:
        ids = await event_ids(conn, found | expected)
        actual = ", ".join(sorted(ids[nid] for nid in found)) or "none"
        right = ", ".join(sorted(ids[nid] for nid in expected)) or "none"
        yield room.finding("forward_extremities", [room.row.room_id], actual, right)


# --------------------------------------------------------------------------------------------------
# Check what all rooms share: stream positions, sequences, invalid indexes.

SQL_LAGGING_POSITIONS: Final[LiteralString] = """
SELECT f.stream_name, f.instance_name, f.latest, p.stream_id AS position
FROM (
    SELECT CASE WHEN e.backfilled THEN 'backfill' ELSE 'events' END AS stream_name, w.instance_name,
        max(e.stream_ordering) AS latest
    FROM events e
    LEFT JOIN writers w USING (writer_nid)
    WHERE NOT e.outlier
    GROUP BY 1, 2
    UNION ALL
    SELECT s.stream_name, w.instance_name, max(s.stream_id)
    FROM (
        SELECT 'account_data' AS stream_name, writer_nid, stream_id FROM account_data
        UNION ALL SELECT 'to_device', writer_nid, stream_id FROM to_device
        UNION ALL SELECT 'receipts', writer_nid, stream_id FROM receipts
        UNION ALL SELECT 'caches', writer_nid, stream_id FROM cache_invalidations
        UNION ALL SELECT stream_name, writer_nid, stream_id FROM published_facts
    ) AS s
    LEFT JOIN writers w USING (writer_nid)
    GROUP BY 1, 2
) AS f
LEFT JOIN stream_positions p USING (stream_name, instance_name)
WHERE p.stream_id IS NULL OR p.stream_id < f.latest
ORDER BY 1, 2
"""

SQL_SEQUENCES: Final[LiteralString] = fill("""
SELECT s.name, max(s.largest) AS largest,
    max(CASE WHEN q.last_value IS NULL THEN 0 ELSE q.last_value + q.increment_by END) AS next
FROM (
    SELECT 'event_nids' AS name,
        GREATEST((SELECT max(event_nid) FROM events),
            (SELECT max(event_nid) FROM missing_events)) AS largest
    UNION ALL SELECT 'events_stream',
        GREATEST((SELECT max(stream_ordering) FROM events),
            (SELECT max(stream_id) FROM outlier_memberships))
    UNION ALL SELECT 'account_data_stream', (SELECT max(stream_id) FROM account_data)
    UNION ALL SELECT 'to_device_stream', (SELECT max(stream_id) FROM to_device)
    UNION ALL SELECT 'receipts_stream', (SELECT max(stream_id) FROM receipts)
    UNION ALL SELECT 'caches_stream', (SELECT max(stream_id) FROM cache_invalidations)
    UNION ALL SELECT 'published_facts_stream', (SELECT max(stream_id) FROM published_facts)
    UNION ALL SELECT 'writer_nids', (SELECT max(writer_nid) FROM writers)
    UNION ALL SELECT 'sliding_connection_nids',
        (SELECT max(connection_nid) FROM sliding_connections)
    UNION ALL
    SELECT d.sequence_name, max(p.stream_id)  -- readers have passed these
    FROM unnest($1::text[], $2::text[]) AS d (stream_name, sequence_name)
    JOIN stream_positions p USING (stream_name)
    WHERE p.stream_id > 1
    GROUP BY d.sequence_name
    UNION ALL SELECT 'state_group_nids', (SELECT max(state_group) FROM state_groups)
    UNION ALL SELECT 'room_nids', (SELECT max(room_nid) FROM rooms)
    UNION ALL SELECT 'principal_nids',
        (SELECT max(principal_nid) FROM principals WHERE principal_nid >= {ASSIGNED_FROM})
    UNION ALL SELECT 'type_nids',
        (SELECT max(type_nid) FROM event_types WHERE type_nid >= {ASSIGNED_FROM})
    UNION ALL SELECT 'state_key_nids',
        (SELECT max(state_key_nid) FROM state_keys WHERE state_key_nid >= {ASSIGNED_FROM})
) AS s
LEFT JOIN pg_sequences q ON q.schemaname = current_schema() AND q.sequencename = s.name
WHERE s.largest IS NOT NULL
    AND s.largest >= CASE WHEN q.last_value IS NULL THEN 0 ELSE q.last_value + q.increment_by END
GROUP BY s.name
ORDER BY 1
""")


SQL_INVALID_INDEXES: Final[LiteralString] = """
SELECT c.relname
FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid
WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND NOT i.indisvalid
ORDER BY 1
"""


class LaggingWriterRow(NamedTuple):
    """A writer whose position is behind its facts."""

    stream_name: str
    instance_name: str | None
    latest: int
    position: int | None


class LaggingIdSequenceRow(NamedTuple):
    """A sequence that would return a used number again."""

    name: str
    largest: int
    next: int


async def check_positions(conn: Connection) -> AsyncIterator[Finding]:
    """Check that no writer's position is behind one of its facts ("stream_positions")."""
    for row in await conn.fetch(SQL_LAGGING_POSITIONS, row=LaggingWriterRow):
        subject = (row.stream_name, row.instance_name or "unknown writer")
        yield Finding(
            "stream_positions", None, subject, str(row.position), f"at least {row.latest}"
        )


async def check_sequences(conn: Connection) -> AsyncIterator[Finding]:
    """Check that no sequence returns a number that is in use ("sequences")."""
    declared = await sequences(conn)
    for row in await conn.fetch(
        SQL_SEQUENCES, list(declared), list(declared.values()), row=LaggingIdSequenceRow
    ):
        yield Finding(
            "sequences", None, (row.name,), f"next {row.next}", f"more than {row.largest}"
        )


async def check_indexes(conn: Connection) -> AsyncIterator[Finding]:
    """Check that no interrupted build left an invalid index ("indexes").

    Such an index slows down writes and serves no query. To remove it, migrate again.
    """
    for name in await conn.fetchvals(SQL_INVALID_INDEXES):
        yield Finding(
            "indexes", None, (name,), "invalid", "valid: run the migration again, or drop it"
        )


# --------------------------------------------------------------------------------------------------
# Check the stored positions of events that were reordered.

SQL_WRONG_REORDERINGS: Final[LiteralString] = """
SELECT m.moves, m.event_nid, m.topological_before, e.event_id,
    COALESCE(m.next, e.topological_ordering) AS after
FROM (
    SELECT m.*, lead(m.topological_before) OVER (PARTITION BY m.event_nid ORDER BY m.moves) AS next
    FROM reordered_events m
    WHERE m.room_nid = $1::int
) AS m
LEFT JOIN events e ON e.event_nid = m.event_nid AND e.room_nid = m.room_nid AND NOT e.outlier
WHERE e.event_nid IS NULL OR m.topological_before >= COALESCE(m.next, e.topological_ordering)
ORDER BY m.moves, m.event_nid
"""

SQL_MOVES: Final[LiteralString] = """
SELECT r.moves AS found,
    (SELECT COALESCE(max(m.moves), 0) FROM reordered_events m
        WHERE m.room_nid = r.room_nid) AS expected
FROM rooms r
WHERE r.room_nid = $1::int
"""


class WrongReorderingRow(NamedTuple):
    """A reordering of no event of the room, or one that does not go up."""

    moves: int
    event_nid: int
    topological_before: int
    event_id: str | None
    after: int | None


class ReorderCountRow(NamedTuple):
    """The room's count of reorderings, and the least that it can be."""

    found: int
    expected: int


async def check_reorderings(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that reordered events are events of the room and went up ("reordered_events").

    Check also that the room counts the reorderings ("rooms").
    """
    for row in await conn.fetch(SQL_WRONG_REORDERINGS, room.nid, row=WrongReorderingRow):
        found = f"{row.topological_before} before move {row.moves}"
        expected = "an event of the room" if row.after is None else f"less than {row.after}"
        yield room.finding(
            "reordered_events", [row.event_id or f"nid {row.event_nid}"], found, expected
        )
    counted = await conn.fetchrow(SQL_MOVES, room.nid, row=ReorderCountRow)
    if counted is not None and counted.found < counted.expected:
        yield room.finding(
            "rooms", [room.row.room_id], f"moves {counted.found}", f"at least {counted.expected}"
        )


# --------------------------------------------------------------------------------------------------
# Check which events are left out of the index of times (storage/persist/plan/fast_path.py).
#
# Each live event says which time the events in time order have reached: `in_order_ts`, or its own
# time if it is one of them. In the order of the stream, that never falls, and an event in time
# order raises it. Deletions may leave larger steps. Backfilled events are not in the order of the
# stream.

SQL_TIME_ORDER: Final[LiteralString] = """
SELECT event_nid, event_id, origin_server_ts, in_order_ts, before
FROM (
    SELECT event_nid, event_id, origin_server_ts, in_order_ts, backfilled,
        COALESCE(max(COALESCE(in_order_ts, origin_server_ts)) FILTER (WHERE NOT backfilled) OVER (
            ORDER BY stream_ordering
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ), -9223372036854775808) AS before
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
) AS e
WHERE CASE WHEN in_order_ts IS NULL THEN backfilled OR origin_server_ts <= before
    ELSE in_order_ts < before AND NOT backfilled END
"""

SQL_REACHED: Final[LiteralString] = """
SELECT max(origin_server_ts)
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND in_order_ts IS NULL
"""


class TimeOrderRow(NamedTuple):
    """An event whose `in_order_ts` is not possible; ``before``: the time reached before it."""

    event_nid: int
    event_id: str
    origin_server_ts: int
    in_order_ts: int | None
    before: int


async def check_time_order(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the events outside of the index of times are in time order ("time_order").

    Check also the time that they have reached, in the room's row ("rooms").
    """
    for row in await conn.fetch(SQL_TIME_ORDER, room.nid, row=TimeOrderRow):
        found = "in time order" if row.in_order_ts is None else f"in_order_ts {row.in_order_ts}"
        yield room.finding(
            "time_order",
            [row.event_id],
            f"{found}, at {row.origin_server_ts}",
            f"after {row.before}",
        )
    reached = await conn.fetchval(SQL_REACHED, room.nid)
    if reached is not None and room.row.in_order_ts < reached:
        found = f"in_order_ts {room.row.in_order_ts}"
        yield room.finding("rooms", [room.row.room_id], found, f"at least {reached}")


# --------------------------------------------------------------------------------------------------
# Find events that are stored twice.
#
# The index of event ids is not unique. A write looks for its events, and the writers of a room take
# turns, so no event is stored twice, unless the index did not find it then: it was damaged.

SQL_DOUBLED: Final[LiteralString] = """
SELECT e.event_id, array_agg(other.event_nid ORDER BY other.event_nid) AS event_nids
FROM unnest($1::bigint[]) AS n (event_nid)
CROSS JOIN LATERAL (SELECT event_id FROM events WHERE event_nid = n.event_nid OFFSET 0) AS e
CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = e.event_id OFFSET 0) AS other
GROUP BY n.event_nid, e.event_id
HAVING count(*) > 1
"""


class DoubledRow(NamedTuple):
    """An event id, and the rows that have it."""

    event_id: str
    event_nids: list[int]


async def check_doubled(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that no event of the room is stored twice ("doubled_events")."""
    for event_id, nids in (await doubled_events(conn, room.nid)).items():
        found = f"stored {_times(len(nids))}: nids {', '.join(map(str, nids))}"
        yield room.finding("doubled_events", [event_id], found, "stored once")


async def doubled_events(conn: Connection, room_nid: int) -> dict[str, list[int]]:
    """Return the ids that several rows have, one of them in this room, with these rows."""
    nids: list[int] = await conn.fetchvals(SQL_NIDS, room_nid)
    doubled: dict[str, list[int]] = {}
    for start in range(0, len(nids), BATCH):
        rows = await conn.fetch(SQL_DOUBLED, nids[start : start + BATCH], row=DoubledRow)
        doubled.update((row.event_id, row.event_nids) for row in rows)
    return doubled


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


# --------------------------------------------------------------------------------------------------
# Report corrupt indexes as findings, and decide which checks may still run.

APART: Final = frozenset(
    {
        "account_data",
        "alembic_version",
        "archive_garbage",
        "background_jobs",
        "cache_invalidations",
        "cursors",
        "defined_streams",
        "deployment",
        "gap_failures",
        "import_events",
        "lost_positions",
        "published_facts",
        "purged_streams",
        "receipts",
        "schema_compatibility",
        "stream_positions",
        "to_device",
        "writers",
    }
)
"""Tables that no check of a room reads: their corrupt indexes do not prevent checks of rooms."""


def finding_of(mismatch: IndexMismatch) -> Finding:
    """Return the finding that names a corrupt index ("indexes")."""
    left_out = "positions and sequences" if mismatch.table_name in APART else "everything else"
    expected = (
        f"the rows of {mismatch.table_name}: run REINDEX INDEX CONCURRENTLY {mismatch.name},"
        f" then verify again; {left_out} was not checked"
    )
    return Finding("indexes", None, (mismatch.name,), mismatch.found, expected)


def hide_facts(mismatches: Iterable[IndexMismatch]) -> bool:
    """Return whether a check of a room would read through one of these indexes."""
    return any(mismatch.table_name not in APART for mismatch in mismatches)


# --------------------------------------------------------------------------------------------------
# Check the connections of sliding sync.

SQL_CONNECTIONS: Final[LiteralString] = """
SELECT s.connection_nid, count(*) AS rooms, CASE
        WHEN c.connection_nid IS NULL THEN 'an unknown connection'
        WHEN r.room_nid IS NULL THEN 'an unknown room'
        WHEN s.required_state NOT BETWEEN 1 AND cardinality(c.required_states)
            THEN 'an unknown required_state'
        ELSE 'an unknown state'
    END AS problem
FROM sliding_rooms s
LEFT JOIN sliding_connections c USING (connection_nid)
LEFT JOIN rooms r USING (room_nid)
WHERE c.connection_nid IS NULL OR r.room_nid IS NULL
    OR s.required_state NOT BETWEEN 1 AND cardinality(c.required_states)
    OR (s.number > c.base AND s.number <> ALL(c.unconfirmed))
GROUP BY 1, 3
ORDER BY 1, 3
"""


class MistakenConnectionRow(NamedTuple):
    """A connection with rows that refer to something unknown."""

    connection_nid: int
    rooms: int
    problem: str


async def check_connections(conn: Connection) -> AsyncIterator[Finding]:
    """Check that rooms of connections refer to known rows ("sliding_rooms")."""
    for row in await conn.fetch(SQL_CONNECTIONS, row=MistakenConnectionRow):
        found = f"{row.rooms} rows of {row.problem}"
        yield Finding("sliding_rooms", None, (f"connection {row.connection_nid}",), found, "none")


# --------------------------------------------------------------------------------------------------
# Check the transactions of local users by their events.

SQL_TRANSACTIONS: Final[LiteralString] = """
SELECT t.event_nid, t.event_id, e.event_id AS stored_id
FROM local_transactions t
JOIN events e USING (event_nid)
WHERE t.room_nid = $1::int
    AND (e.event_id <> t.event_id OR e.room_nid <> t.room_nid OR e.sender_nid <> t.sender_nid)
ORDER BY t.event_nid
"""


class MistakenTransactionRow(NamedTuple):
    """A transaction whose event is another one, or of another user or room."""

    event_nid: int
    event_id: str
    stored_id: str


async def check_transactions(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that each transaction names an event of its user ("local_transactions").

    An event that was purged is not compared.
    """
    for row in await conn.fetch(SQL_TRANSACTIONS, room.nid, row=MistakenTransactionRow):
        found = f"event nid {row.event_nid}, which is {row.stored_id}"
        yield room.finding("local_transactions", [row.event_id], found, "an event of its user")
