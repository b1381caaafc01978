"""The rooms of a response, each with its timeline, in one statement.

`known` is the position up to which the client has the room. For a live room it is where the `pos`
is in that room: its furthest position, or, if a writer was behind, the one before that writer's
event (storage/queries/sync/room_ranges.py). The upper end is the snapshot. For a user who is not in
the room any more it is the position of the membership. The state of the room ends there as well, or
where the user left, if the membership changed again after that. If state resolution took the user
out of the room, or removed a later membership, their own membership is that of the snapshot.

A timeline is that of a sync (storage/queries/sync/timeline.py). It begins at `lower`, or further
back where the client does not have the room, or its timeline limit has grown.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final, LiteralString, NamedTuple

from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.ids import RoomId, UserId
from storage.queries.sync.room_ranges import TEMPLATE_LATE
from storage.queries.sync.timeline import (
    PART_EVENT,
    PART_LIVE,
    PART_NO_EVENT,
    TEMPLATE_HAS_STATE,
    TEMPLATE_LATEST,
    TEMPLATE_TIMELINE,
    TEMPLATE_TIMELINE_COLUMNS,
    RoomTimeline,
    timelines_of,
)
from storage.streams import VectorPosition

TEMPLATE_TIMELINES: Final[LiteralString] = """
WITH
reader AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY($12::text[])) AS ignored,
        ARRAY(SELECT type_nid FROM event_types WHERE type = ANY($13::text[])) AS bumping
    FROM principals p
    LEFT JOIN state_keys k ON k.type_nid = 2 AND k.state_key = p.name
    WHERE p.name = $1::text
),
own AS MATERIALIZED (  -- the given rooms, with the membership of the user
    SELECT g.*, u.*, m.membership, m.event_nid AS member_nid, m.stream_ordering, m.writer_nid
    FROM unnest($2::int[], $3::bigint[], $4::boolean[], $5::boolean[], $6::boolean[], $7::bigint[])
        AS g (room_nid, sent_upto, is_inside, is_new, expands, timeline_limit)
    CROSS JOIN reader u
    -- room by room: otherwise all memberships of the user would be read for a few of them
    CROSS JOIN LATERAL (
        SELECT * FROM memberships m
        WHERE m.principal_nid = u.principal_nid AND m.room_nid = g.room_nid
        OFFSET 0
    ) AS m
),
{late},
known AS MATERIALIZED (
    SELECT o.*, r.room_id, r.room_version, r.completed_at, live.reached,
        COALESCE(o.sent_upto, live.reached) AS known,
        CASE WHEN o.membership = 5 THEN 9223372036854775807 ELSE o.stream_ordering END AS upper
    FROM own o
    JOIN rooms r USING (room_nid)
    LEFT JOIN late USING (room_nid)
    CROSS JOIN LATERAL (SELECT COALESCE(late.reached, $8::bigint)) AS live (reached)
),
room AS MATERIALIZED (
    SELECT k.*, start.whole,
        start.whole OR was.membership = 5 OR departed.at IS NOT NULL AS is_state_shown,
        CASE WHEN start.whole THEN 0 ELSE COALESCE(GREATEST(has.lower,
            CASE WHEN k.completed_at <= k.known THEN k.completed_at END), 0) END AS lower,
        COALESCE(CASE WHEN k.membership <> 5 THEN departed.at END, k.upper) AS state_upper,
        COALESCE(CASE WHEN k.membership IN (1, 2) AND departed.by_event THEN departed.at END,
            k.upper) AS own_upper
    FROM known k
    LEFT JOIN LATERAL (  -- the membership before the first change that the client does not have
        SELECT COALESCE(d.prev_event_nid, 0) AS prev_event_nid
        FROM state_deltas d
        WHERE d.room_nid = k.room_nid AND d.stream_ordering > k.known
            AND d.state_key_nid = k.state_key_nid
        ORDER BY d.stream_ordering
        LIMIT 1
    ) AS delta ON k.stream_ordering > k.known
    LEFT JOIN events old ON old.event_nid = delta.prev_event_nid
    CROSS JOIN LATERAL (SELECT CASE
        WHEN k.stream_ordering <= k.known THEN k.membership ELSE COALESCE(old.membership, 0) END
    ) AS was (membership)
    CROSS JOIN LATERAL (  -- new to the client; or the user was not in it, and is or has been since
        SELECT k.is_new OR was.membership <> 5 AND (k.membership = 5 OR EXISTS (
            SELECT FROM state_deltas d JOIN events e USING (event_nid)
            WHERE d.room_nid = k.room_nid AND d.stream_ordering > k.known
                AND d.state_key_nid = k.state_key_nid AND e.membership = 5
        )) AS whole
        OFFSET 0
    ) AS start
    LEFT JOIN LATERAL (  -- where the user was in the room for the last time
        SELECT d.stream_ordering AS at, d.event_nid IS NOT NULL AS by_event
        FROM state_deltas d
        JOIN events before ON before.event_nid = d.prev_event_nid
        WHERE d.room_nid = k.room_nid AND d.stream_ordering <= k.upper
            AND d.state_key_nid = k.state_key_nid AND before.membership = 5
        ORDER BY d.stream_ordering DESC
        LIMIT 1
    ) AS departed ON k.membership <> 5
    -- backfilled history may have changed the state. That is no change by itself: it is returned
    -- with the next live event
    LEFT JOIN LATERAL ({has}) AS has (lower) ON NOT start.whole
    WHERE k.is_inside AND k.timeline_limit IS NOT NULL
),
begun AS MATERIALIZED (  -- once a room: otherwise it would be evaluated for each event
    SELECT r.*, first.lower AS first_lower, part.*
    FROM room r
    CROSS JOIN LATERAL (
        SELECT CASE WHEN r.expands THEN 0 ELSE r.lower END AS lower
    ) AS first
    CROSS JOIN LATERAL (
        SELECT ({gap}) AS gap, ({bump}) AS bump, {has_state} AS has_state
        OFFSET 0
    ) AS part
)
SELECT 'room' AS kind, k.room_nid, k.room_id, k.room_version, k.membership::int AS membership,
    k.member_nid, k.reached, k.stream_ordering AS member_ordering, b.whole, b.is_state_shown,
    b.lower, b.state_upper, b.own_upper, b.gap IS NOT NULL AS after_gap, b.has_state, b.bump,
    {no_event}
FROM known k
LEFT JOIN begun b USING (room_nid)
UNION ALL
SELECT CASE WHEN t.is_shown THEN 'event' ELSE 'limit' END, r.room_nid, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    {event}
FROM begun r
CROSS JOIN LATERAL ({timeline}) AS t
"""

PART_HAS: Final[LiteralString] = fill(
    TEMPLATE_LATEST,
    columns="e.stream_ordering",
    room="k",
    after="0",
    upto="k.known",
    which=PART_LIVE,
    limit="1",
)

PART_GAP: Final[LiteralString] = fill(
    TEMPLATE_LATEST,
    columns="e.stream_ordering - 1",
    room="r",
    after="first.lower",
    upto="r.upper",
    which="e.after_gap",
    limit="1",
)

TEMPLATE_BUMP: Final[LiteralString] = """
    SELECT e.stream_ordering
    FROM ({latest}) AS e  -- at most so many are read
    WHERE e.type_nid = ANY(r.bumping) AND e.rejected IS NULL AND NOT e.soft_failed
    ORDER BY e.room_nid DESC, e.stream_ordering DESC
    LIMIT 1
"""

PART_BUMP: Final[LiteralString] = fill(
    TEMPLATE_BUMP,
    latest=fill(
        TEMPLATE_LATEST,
        columns="e.*",
        room="r",
        after="0",
        upto="r.upper",
        which=PART_LIVE,
        limit="$14::bigint",
    ),
)

PART_TIMELINE: Final[LiteralString] = fill(
    TEMPLATE_TIMELINE,
    filter="",
    latest=fill(
        TEMPLATE_LATEST,
        columns=fill(TEMPLATE_TIMELINE_COLUMNS, is_wanted="not_ignored(e, r.ignored)"),
        room="r",
        after="COALESCE(r.gap, r.first_lower)",
        upto="r.upper",
        which=PART_LIVE,
        limit="$14::bigint",
    ),
    limit="r.timeline_limit",
    rows_max="$14::bigint",
)

SQL_TIMELINES: Final[LiteralString] = fill(
    TEMPLATE_TIMELINES,
    late=fill(TEMPLATE_LATE, furthest="$8::bigint"),
    has=PART_HAS,
    gap=PART_GAP,
    bump=PART_BUMP,
    has_state=fill(TEMPLATE_HAS_STATE, upto="r.state_upper"),
    no_event=PART_NO_EVENT,
    event=PART_EVENT,
    timeline=PART_TIMELINE,
)

BUMPING: Final = (
    "m.room.create",
    "m.room.message",
    "m.room.encrypted",
    "m.sticker",
    "m.call.invite",
    "m.poll.start",
    "m.beacon_info",
)
"""The types of events that a person notices (MSC4186, `bump_stamp`)."""


class SlidingRoomRow(NamedTuple):
    """A room, or an event of its timeline: `kind` says which columns a row has.

    "room": the columns up to `bump`; those from `whole` on are NULL without a timeline. "event":
    `room_nid` and the columns of the event. "limit": an event that is not shown, and the last one
    that was read.
    """

    kind: str
    room_nid: int
    room_id: str | None
    room_version: str | None
    membership: int | None
    member_nid: int | None
    reached: int | None
    member_ordering: int | None
    whole: bool | None
    is_state_shown: bool | None
    lower: int | None
    state_upper: int | None
    own_upper: int | None
    after_gap: bool | None
    has_state: bool | None
    bump: int | None
    is_last: bool | None
    event_id: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    redacted_by: str | None
    redacted_form: bool | None
    withheld: bool | None
    json: StoredBytes | None


class SlidingRoomColumns(NamedTuple):
    """The columns of a row of kind "room", without the kind."""

    room_nid: int
    room_id: RoomId
    room_version: str
    membership: int
    member_nid: int
    """The event of the membership; 0 if state resolution removed it."""
    reached: int
    """Where the `pos` is in this room."""
    member_ordering: int
    """The position of the membership of the user."""
    whole: bool
    """The client does not have the room, or has it as of an earlier stay."""
    is_state_shown: bool
    """The user was in the room at some time since the client has it."""
    lower: int
    state_upper: int
    own_upper: int
    """As `state_upper`, for the user's own membership."""
    after_gap: bool
    has_state: bool
    """There are changes of the state since `lower`."""
    bump: int | None


EVENT_AT: Final = SlidingRoomRow._fields.index("is_last")
"""The columns of the event begin here."""


class TimelineRequest(NamedTuple):
    """A room to read.

    ``sent_upto`` None: the client has everything up to its `pos`. ``is_inside``: the user is in the
    room or was. ``timeline_limit`` None: only where the `pos` is in this room.
    """

    room_nid: int
    sent_upto: int | None
    is_inside: bool
    is_new: bool
    expands: bool
    timeline_limit: int | None


SlidingTimeline = RoomTimeline[SlidingRoomColumns]


async def timelines(
    conn: Connection,
    user_id: UserId,
    rooms: Sequence[TimelineRequest],
    since: VectorPosition | None,
    *,
    ignored: Collection[UserId],
    rows_max: int,
) -> dict[int, SlidingTimeline]:
    """Return these rooms of a user, by nid. ``since`` is the position of the `pos`."""
    position = since or VectorPosition()
    records = await conn.records(
        SQL_TIMELINES,
        user_id,
        *([room[at] for room in rooms] for at in range(len(TimelineRequest._fields))),
        position.furthest(),
        position.min,
        [writer for writer, _ in position.items],
        [number for _, number in position.items],
        list(ignored),
        list(BUMPING),
        rows_max,
        row=SlidingRoomRow,
    )
    return await timelines_of(records, slice(EVENT_AT, None), _timeline)


def _timeline(record: Sequence[Any]) -> SlidingTimeline:
    row = SlidingRoomColumns._make(record[1:EVENT_AT])
    return SlidingTimeline(row, bool(row.after_gap))
