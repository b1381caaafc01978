"""Unread counts: the visible events of others after a user's receipts, by room and thread.

The main timeline of a room are the events that are in no thread. It is read up to the later of the
receipt without a thread and the one for "main". A thread is read up to the later of the receipt
without a thread and its own one. Without such a receipt, all since the user's last join is unread:
its first event, before changes of the profile. "After" means in the order of /sync, so only live
events count (storage/streams/receipts.py). Of these only those count at which the user was joined.

An event is in a thread if it has the relation m.thread, or if it relates to such an event, over up
to three events (client-server API, "Threaded read receipts"). Only the bytes of an event name the
event that it relates to. So the statement returns one event for each event that unread ones relate
to. Where there are any, the relations are followed from there, and the rooms are counted again with
the threads that were found.

A message of the user is a receipt for its timeline or thread, which other users do not get: sending
an event marks what is before it as read (client-server API, "Receiving notifications"). State,
edits and reactions are not: they do not say which thread was read.

Redacted events, edits, and events of ignored users do not count. A count ends at `COUNT_MAX`, and
reads at most `rows_max` events of a room, the latest ones. One statement serves any number of
rooms, unless relations are followed. A room without news after its receipts costs two probes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes
from storage.database.columns import AUTH_NIDS, USER_SEES, WHOLE
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.database.prepared import prepare_ahead
from storage.errors import StorageCorrupt
from storage.event.model import target_key
from storage.ids import EventId, RoomId, UserId
from storage.queries.events import related_id
from storage.queries.filters import PART_IGNORED, TEMPLATE_RELATION_IS_VISIBLE
from storage.streams.receipts import TEMPLATE_READ_UPTO

UNREAD_TYPES: Final = (
    "m.room.message",
    "m.room.encrypted",
    "m.sticker",
    "m.poll.start",
    "org.matrix.msc3381.poll.start",
)
"""The event types that count by default: those that a client shows as messages."""

REACTION: Final = "m.reaction"
COUNT_MAX: Final = 100
ROWS_MAX: Final = 20_000
HOPS_MAX: Final = 3
"""So many relations are followed from an event to one of a thread."""

PART_LAST_JOIN: Final[LiteralString] = """
WITH RECURSIVE stay AS (
    SELECT e.stream_ordering, e.state_key_nid,
        :auth_nids.call(e) AS auth_events
    FROM events e
    WHERE e.event_nid = r.member_nid
    UNION ALL
    SELECT before.stream_ordering, stay.state_key_nid, before.auth_events
    FROM stay
    CROSS JOIN LATERAL (
        SELECT e.stream_ordering, :auth_nids.call(e) AS auth_events
        FROM unnest(stay.auth_events) AS a (event_nid)
        JOIN events e USING (event_nid)
        WHERE e.type_nid = {TYPE_MEMBER} AND e.state_key_nid = stay.state_key_nid
            AND e.membership = {JOIN}
        LIMIT 1
    ) AS before
)
SELECT COALESCE(min(stream_ordering), 0) FROM stay
"""
"""The stream ordering of the join that began the stay of `r.member_nid`."""

TEMPLATE_UNREAD: Final[LiteralString] = """
WITH RECURSIVE
-- More than 150 lines: the condition of an event that counts is there three times, as each of the
-- three indexes needs a part of its own.
reader AS MATERIALIZED (
    SELECT p.principal_nid,
        ARRAY(SELECT type_nid FROM event_types WHERE type = ANY(:types)) AS types,
        {ignored} AS ignored
    FROM principals p
    WHERE p.name = :user_id
),
named AS MATERIALIZED (  -- by number or by id; all that the user has joined if neither is given
    SELECT unnest(:room_nids) AS room_nid
    UNION ALL
    SELECT room_nid FROM rooms WHERE room_id = ANY(:room_ids)
    UNION ALL
    SELECT m.room_nid
    FROM reader u
    JOIN memberships m USING (principal_nid)
    WHERE :room_nids IS NULL AND :room_ids IS NULL AND m.membership = {JOIN}
),
room AS MATERIALIZED (  -- the receipts of each room, by thread, as stream orderings
    SELECT n.room_nid, r.room_id, r.last_stream_ordering, m.event_nid AS member_nid, c.*
    FROM reader u
    CROSS JOIN named n
    -- room by room: otherwise all memberships of the user would be read for a few of them
    CROSS JOIN LATERAL (
        SELECT m.event_nid FROM memberships m
            WHERE m.principal_nid = u.principal_nid AND m.room_nid = n.room_nid
                AND m.membership = {JOIN} OFFSET 0
    ) AS m
    CROSS JOIN LATERAL (
        SELECT r.room_id, r.last_stream_ordering FROM rooms r WHERE r.room_nid = n.room_nid OFFSET 0
    ) AS r
    CROSS JOIN LATERAL (
        SELECT max(upto) FILTER (WHERE thread_id = '') AS whole,
            max(upto) FILTER (WHERE thread_id = 'main') AS main,
            min(upto) FILTER (WHERE thread_id NOT IN ('', 'main')) AS first_thread,
            array_agg(relation_key(thread_id)) FILTER (WHERE thread_id NOT IN ('', 'main'))
                AS threads,
            array_agg(upto) FILTER (WHERE thread_id NOT IN ('', 'main')) AS threads_upto
        FROM (
            SELECT c.thread_id, {read_upto} AS upto
            FROM receipts c
            CROSS JOIN LATERAL (
                SELECT * FROM events e WHERE e.event_id = c.event_id OFFSET 0
            ) AS e
            WHERE c.room_nid = n.room_nid AND c.principal_nid = u.principal_nid
                AND c.receipt_type IN ('m.read', 'm.read.private')
                AND e.room_nid = n.room_nid AND NOT e.outlier
        ) AS c
    ) AS c
),
has_news AS MATERIALIZED (  -- the others are read to their end
    SELECT r.*, joined.since
    FROM room r
    CROSS JOIN LATERAL (
        -- the last join: back over changes of the profile, which name their predecessor
        SELECT CASE WHEN r.whole IS NULL AND (r.main IS NULL OR :counts_reactions OR EXISTS (
            SELECT FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, 0)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND e.rel_type_nid NOT IN ({REL_REPLACE}, {REL_ANNOTATION})
                AND NOT e.outlier AND NOT e.backfilled
        )) THEN (
            {last_join}
        ) END AS since
        OFFSET 0
    ) AS joined
    WHERE r.last_stream_ordering > COALESCE(GREATEST(r.whole, r.main), 0)
        OR r.last_stream_ordering > COALESCE(r.whole, joined.since)
),
open AS MATERIALIZED (
    SELECT r.*, COALESCE(GREATEST(r.whole, r.main), r.since) AS main_upto,
        LEAST(COALESCE(r.whole, LEAST(r.since, r.first_thread)), GREATEST(r.whole, r.main))
            AS related_upto,
        u.principal_nid, u.types, u.ignored, v.*
    FROM has_news r
    CROSS JOIN reader u
    CROSS JOIN LATERAL visibility_of(r.room_nid, u.principal_nid) AS v
),
related AS MATERIALIZED (  -- what is in a thread, or may be
    SELECT r.room_id, r.whole, r.since, r.threads, r.threads_upto, e.*,
        CASE WHEN e.rel_type_nid = {REL_THREAD} THEN e.relates_to
            ELSE known.thread_key END AS thread_key
    FROM open r
    CROSS JOIN LATERAL (
        ({related})
        UNION ALL
        ({annotations})
    ) AS e
    LEFT JOIN unnest(:related_to, :thread_keys) AS known (relates_to, thread_key)
        ON known.relates_to = e.relates_to AND e.rel_type_nid <> {REL_THREAD}
    WHERE e.counts OR e.is_own
)
SELECT 'room' AS kind, r.room_id, NULL::bigint AS key, 0 AS events, NULL::text AS event_id,
    NULL::bytea AS json
FROM room r
UNION ALL
SELECT 'room', r.room_id, NULL, timeline.events, NULL, NULL
FROM open r
CROSS JOIN LATERAL (
    SELECT count(*)::int AS events
    FROM (  -- the latest ones: the user has read those before the own one
        SELECT e.stream_ordering,
            max(e.stream_ordering) FILTER (WHERE e.is_own) OVER () AS said
        FROM (
            SELECT e.stream_ordering, e.counts, e.is_own
            FROM (
                {main}
            ) AS e
            WHERE e.counts OR e.is_own
            LIMIT :count_max
        ) AS e
    ) AS counted
    WHERE counted.stream_ordering > COALESCE(counted.said, 0)
) AS timeline
WHERE timeline.events > 0
UNION ALL
SELECT 'thread', t.room_id, t.thread_key, LEAST(t.events, :count_max)::int, x.event_id, x.json
FROM (
    SELECT e.room_id, e.thread_key, count(*) AS events, max(e.event_nid) AS event_nid
    FROM (
        SELECT e.*, max(e.stream_ordering) FILTER (WHERE e.is_own)
            OVER (PARTITION BY e.room_id, e.thread_key) AS said
        FROM related e
        WHERE e.thread_key IS NOT NULL
    ) AS e
    WHERE e.counts AND e.stream_ordering > COALESCE(e.said, 0)
        AND e.stream_ordering > COALESCE(GREATEST(e.whole, (
            SELECT max(o.upto)
            FROM unnest(e.threads, e.threads_upto) AS o (key, upto)
            WHERE o.key = e.thread_key
        )), e.since)
    GROUP BY e.room_id, e.thread_key
) AS t
CROSS JOIN LATERAL (
    SELECT e.event_id, e.json FROM events e WHERE e.event_nid = t.event_nid OFFSET 0
) AS x
UNION ALL
SELECT 'related', t.room_id, t.relates_to, 0, x.event_id, x.json
FROM (
    SELECT e.room_id, e.relates_to, max(e.event_nid) AS event_nid
    FROM related e
    WHERE :related_to IS NULL AND e.rel_type_nid <> {REL_THREAD}
    GROUP BY e.room_id, e.relates_to
) AS t
CROSS JOIN LATERAL (
    SELECT e.event_id, e.json FROM events e WHERE e.event_nid = t.event_nid OFFSET 0
) AS x
"""
"""`:related_to` and `:thread_keys`: events that unread ones relate to, and their threads."""

TEMPLATE_MAIN: Final[LiteralString] = """
SELECT e.stream_ordering, {counts} AND is_main AS counts, {is_own} AND is_main AS is_own
FROM events e
CROSS JOIN LATERAL (
    SELECT COALESCE(e.rel_type_nid NOT IN ({REL_REPLACE}, {REL_THREAD})
        AND (e.relates_to = ANY(:related_to)) IS NOT TRUE, true) AS is_main
) AS place
WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, r.main_upto)
    AND e.room_nid BETWEEN r.room_nid AND r.room_nid
    AND NOT e.outlier AND NOT e.backfilled
ORDER BY e.room_nid DESC, e.stream_ordering DESC
LIMIT :rows_max
"""

TEMPLATE_RELATED: Final[LiteralString] = """
SELECT e.relates_to, e.rel_type_nid, e.event_nid, e.stream_ordering, {counts} AS counts,
    {is_own} AS is_own
FROM events e
WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, r.related_upto)
    AND e.room_nid BETWEEN r.room_nid AND r.room_nid
    AND {which} AND NOT e.outlier AND NOT e.backfilled
ORDER BY e.room_nid DESC, e.stream_ordering DESC
LIMIT :rows_max
"""

TEMPLATE_COUNTS: Final[LiteralString] = """
e.type_nid = ANY(r.types) AND e.sender_nid <> r.principal_nid AND {is_visible}
AND (was_there(e, r.joined_since, r.joined_audiences)
    OR was_there_before(e, r.reader_nid, r.unread))
"""

PART_IS_OWN: Final[LiteralString] = """
e.sender_nid = r.principal_nid AND e.state_key_nid IS NULL
AND COALESCE(e.rel_type_nid NOT IN ({REL_REPLACE}, {REL_ANNOTATION}), true)
"""
"""Whether the event is a receipt for what is before it."""

PART_COUNTS: Final[LiteralString] = fill(
    TEMPLATE_COUNTS, is_visible=fill(TEMPLATE_RELATION_IS_VISIBLE, reader="r")
)

SQL_UNREAD: Final[LiteralString] = compose(
    fill(
        TEMPLATE_UNREAD,
        last_join=PART_LAST_JOIN,
        ignored=PART_IGNORED,
        read_upto=fill(TEMPLATE_READ_UPTO, event="e"),
        related=fill(
            TEMPLATE_RELATED,
            counts=PART_COUNTS,
            is_own=PART_IS_OWN,
            which="e.rel_type_nid NOT IN ({REL_REPLACE}, {REL_ANNOTATION})",
        ),
        annotations=fill(
            TEMPLATE_RELATED,
            counts=PART_COUNTS,
            is_own="false",
            which=":counts_reactions AND e.rel_type_nid = {REL_ANNOTATION}",
        ),
        main=fill(TEMPLATE_MAIN, counts=PART_COUNTS, is_own=PART_IS_OWN),
    ),
    AUTH_NIDS,
    USER_SEES,
    WHOLE,
    user_id="text",
    room_nids="int[]",
    types="text[]",
    ignored="text[]",
    count_max="bigint",
    rows_max="bigint",
    room_ids="text[]",
    related_to="bigint[]",
    counts_reactions="boolean",
    thread_keys="bigint[]",
).sql
prepare_ahead(SQL_UNREAD)

SQL_RELATIONS: Final[LiteralString] = fill("""
SELECT r.room_id, e.event_id, e.rel_type_nid = {REL_THREAD} AS in_thread, e.json
FROM unnest($1::text[]) AS one (id)
CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.event_id = one.id OFFSET 0) AS e
JOIN rooms r USING (room_nid)
WHERE e.rel_type_nid IS NOT NULL AND e.redacted_by IS NULL AND e.rejected IS NULL
""")


class UnreadRow(NamedTuple):
    """A count of a room's main timeline or of a thread, or an event that may be in a thread.

    `kind` is "room", "thread" or "related". The bytes are those of an event of the thread, or of
    the one event that relates to the event of the ``key``.
    """

    kind: str
    room_id: str
    key: int | None
    events: int
    event_id: str | None
    json: StoredBytes | None


class RelationRow(NamedTuple):
    """An event that relates to another, in its bytes."""

    room_id: str
    event_id: str
    in_thread: bool
    json: StoredBytes


@dataclass(frozen=True, slots=True)
class Unread:
    """The unread counts of a room: of the main timeline, and of each thread with unread events.

    A count of the maximum means as many or more.
    """

    main: int = 0
    threads: Mapping[EventId, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Return the sum of the counts."""
        return self.main + sum(self.threads.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadRequest:
    """The events that count: of these ``types``, and not by ``ignored`` users.

    A count is at most ``count_max``. At most ``rows_max`` events of a room are read.
    """

    types: Collection[str] = UNREAD_TYPES
    count_max: int = COUNT_MAX
    ignored: list[UserId] | None = None
    rows_max: int = ROWS_MAX


async def unread(
    conn: Connection,
    user_id: UserId,
    room_nids: Collection[int] | None = None,
    *,
    room_ids: Collection[RoomId] | None = None,
    request: UnreadRequest = UnreadRequest(),  # frozen
) -> dict[RoomId, Unread]:
    """Return the counts of rooms that the user has joined, in one statement.

    A further one reads relations, and they are followed by up to three, where unread events relate
    to others. The rooms are given by number or by id; by default they are all. Others are left out.
    """
    rooms = (
        None if room_nids is None else list(room_nids),
        None if room_ids is None else list(room_ids),
    )
    rows = await _rows(conn, user_id, rooms, request)
    threads = await _threads_of(conn, [row for row in rows if row.kind == "related"])
    if threads:
        rows = await _rows(conn, user_id, rooms, request, threads)
    roots = {target_key(root_id): root_id for root_id in threads.values()}
    main: dict[RoomId, int] = {}
    counts: dict[RoomId, dict[EventId, int]] = {}
    for row in rows:
        room_id = RoomId(row.room_id)
        if row.kind == "room":
            main[room_id] = max(main.get(room_id, 0), row.events)
        elif row.kind == "thread":
            root_id = roots.get(row.key or 0) or _target(row)
            counts.setdefault(room_id, {})[root_id] = row.events
    return {room_id: Unread(count, counts.get(room_id, {})) for room_id, count in main.items()}


async def _rows(
    conn: Connection,
    user_id: UserId,
    rooms: tuple[list[int] | None, list[RoomId] | None],
    request: UnreadRequest,
    threads: Mapping[int, EventId] | None = None,
) -> list[UnreadRow]:
    """Return the counts, with the threads of events that unread ones relate to, if known."""
    return await conn.fetch(
        SQL_UNREAD,
        user_id,
        rooms[0],
        list(request.types),
        request.ignored,
        request.count_max,
        request.rows_max,
        rooms[1],
        None if threads is None else list(threads),
        REACTION in request.types,
        None if threads is None else [target_key(root_id) for root_id in threads.values()],
        row=UnreadRow,
    )


async def _threads_of(conn: Connection, related: Collection[UnreadRow]) -> dict[int, EventId]:
    """Return the roots of the threads that these events are in, by what the events relate to."""
    thread_roots: dict[int, EventId] = {}
    next_ids = {(row.key or 0, row.room_id): _target(row) for row in related}
    for _ in range(HOPS_MAX):
        if not next_ids:
            break
        rows = await conn.fetch(SQL_RELATIONS, list(set(next_ids.values())), row=RelationRow)
        reached = {(row.room_id, row.event_id): row for row in rows}
        sought, next_ids = next_ids, {}
        for (key, room_id), event_id in sought.items():
            row = reached.get((room_id, event_id))
            if row is not None and row.in_thread:
                thread_roots[key] = _target(row)
            elif row is not None:
                next_ids[key, room_id] = _target(row)
    return thread_roots


def _target(row: UnreadRow | RelationRow) -> EventId:
    if row.json is None or row.event_id is None:
        raise StorageCorrupt("a relation has no event", room_id=row.room_id)
    return related_id(row.json, row.event_id, row.room_id)
