"""The rooms of a response, each with its timeline, in one statement.

`known` is the position up to which the client has the room. For a live room it is where the `pos`
is in that room: its furthest position, or, if a writer was behind, the one before that writer's
event (storage/queries/sync/room_ranges.py). The upper end is the snapshot. For a user who is not in
the room any more it is the position of the membership. The state of the room ends there as well, or
where the user left, if the membership changed again after that.

A timeline is that of a sync (storage/queries/sync/rooms.py). It begins at `lower`, or further back
where the client does not have the room, or its timeline limit has grown.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.ids import RoomId, UserId
from storage.queries.events import StoredEvent, event_of_room
from storage.queries.sync.room_ranges import TEMPLATE_LATE
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
    SELECT o.*, r.room_id, r.room_version, live.reached,
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
        CASE WHEN start.whole THEN 0 ELSE COALESCE(has.lower, 0) END AS lower,
        COALESCE(CASE WHEN k.membership <> 5 THEN departed.at END, k.upper) AS state_upper
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
        SELECT d.stream_ordering AS at
        FROM state_deltas d
        JOIN events before ON before.event_nid = d.prev_event_nid
        WHERE d.room_nid = k.room_nid AND d.stream_ordering <= k.upper
            AND d.state_key_nid = k.state_key_nid AND before.membership = 5
        ORDER BY d.stream_ordering DESC
        LIMIT 1
    ) AS departed ON k.membership <> 5
    -- backfilled history may have changed the state. That is no change by itself: it is returned
    -- with the next live event
    LEFT JOIN LATERAL (
        SELECT e.stream_ordering AS lower
        FROM events e
        WHERE (e.room_nid, e.stream_ordering) > (k.room_nid, 0)
            AND (e.room_nid, e.stream_ordering) <= (k.room_nid, k.known)
            AND e.room_nid BETWEEN k.room_nid AND k.room_nid
            AND NOT e.outlier AND NOT e.backfilled
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS has ON NOT start.whole
    WHERE k.is_inside AND k.timeline_limit IS NOT NULL
),
begun AS MATERIALIZED (  -- once a room: otherwise it would be evaluated for each event
    SELECT r.*, first.lower AS first_lower, part.*
    FROM room r
    CROSS JOIN LATERAL (
        SELECT CASE WHEN r.expands THEN 0 ELSE r.lower END AS lower
    ) AS first
    CROSS JOIN LATERAL (
        SELECT {gap} AS gap, {bump} AS bump, EXISTS (
            SELECT
            FROM state_deltas d
            WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
                AND d.stream_ordering <= r.state_upper
        ) AS has_state
        OFFSET 0
    ) AS part
)
SELECT 'room' AS kind, k.room_nid, k.room_id, k.room_version, k.membership::int AS membership,
    k.member_nid, k.reached, k.stream_ordering AS member_ordering, b.whole, b.is_state_shown,
    b.lower, b.state_upper, b.gap IS NOT NULL AS after_gap, b.has_state, b.bump,
    NULL::boolean AS is_last, NULL AS event_id, NULL::bigint AS stream_ordering,
    NULL::bigint AS topological_ordering, NULL AS redacted_by, NULL::boolean AS redacted_form,
    NULL::boolean AS withheld, NULL::bytea AS json
FROM known k
LEFT JOIN begun b USING (room_nid)
UNION ALL
SELECT CASE WHEN t.is_shown THEN 'event' ELSE 'limit' END, r.room_nid, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, t.is_last, t.event_id, t.stream_ordering,
    t.topological_ordering, CASE WHEN t.redacted_by IS NOT NULL THEN (SELECT b.event_id
        FROM events b WHERE b.event_nid = t.redacted_by) END,
    t.redacted_form, t.withheld, t.json
FROM begun r
CROSS JOIN LATERAL ({timeline}) AS t
"""

PART_GAP: Final[LiteralString] = """(
            SELECT e.stream_ordering - 1
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, first.lower)
                AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND e.after_gap
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT 1
        )"""

PART_BUMP: Final[LiteralString] = """(
            SELECT e.stream_ordering
            FROM (  -- at most so many are read
                SELECT e.*
                FROM events e
                WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, 0)
                    AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                    AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                    AND NOT e.outlier AND NOT e.backfilled
                ORDER BY e.room_nid DESC, e.stream_ordering DESC
                LIMIT $14::bigint
            ) AS e
            WHERE e.type_nid = ANY(r.bumping) AND e.rejected IS NULL AND NOT e.soft_failed
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT 1
        )"""

PART_TIMELINE: Final[LiteralString] = """
    SELECT e.*, e.number = $14::bigint AS is_last
    FROM visibility_of(r.room_nid, r.principal_nid) AS v
    CROSS JOIN LATERAL (
        SELECT *
        FROM (  -- at most so many are read
            SELECT e.room_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.redacted_by,
                e.redacted_form, e.json, row_number() OVER () AS number,
                user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences,
                    v.shared_before, v.reader_nid, v.unread)
                    AND not_ignored(e, r.ignored) AS is_shown,
                NOT was_there(e, v.joined_since, v.joined_audiences)
                    AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                    AND NOT was_there_before(e, v.reader_nid, v.unread) AS withheld
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, COALESCE(r.gap, r.first_lower))
                AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND NOT e.outlier AND NOT e.backfilled
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT $14::bigint
        ) AS e
        WHERE e.is_shown OR e.number = $14::bigint
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT r.timeline_limit + 1
    ) AS e
"""
"""The latest visible events of the room `r`, and one more if there are more."""

SQL_TIMELINES: Final[LiteralString] = fill(
    TEMPLATE_TIMELINES,
    late=fill(TEMPLATE_LATE, furthest="$8::bigint"),
    gap=PART_GAP,
    bump=PART_BUMP,
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
    json: bytes | None


class SlidingRoomColumns(NamedTuple):
    """The columns of a row of kind "room", without the kind."""

    room_nid: int
    room_id: RoomId
    room_version: str
    membership: int
    member_nid: int
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


@dataclass(slots=True)
class RoomTimeline:
    """A room, and the events of its timeline: oldest first, perhaps one beyond the limit.

    ``cut``: there may be more visible events before the first one. A gap lies there, or those
    events were not read.
    """

    row: SlidingRoomColumns
    events: list[StoredEvent] = field(default_factory=list)
    cut: bool = False


async def timelines(
    conn: Connection,
    user_id: UserId,
    rooms: Sequence[TimelineRequest],
    since: VectorPosition | None,
    *,
    ignored: Sequence[UserId],
    rows_max: int,
) -> dict[int, RoomTimeline]:
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
    found = {
        record[1]: RoomTimeline(SlidingRoomColumns._make(record[1:EVENT_AT]), cut=bool(record[12]))
        for record in records
        if record[0] == "room"
    }
    for record in records:
        if record[0] == "event":
            _add_event(found[record[1]], record[EVENT_AT:])
        elif record[0] == "limit":
            found[record[1]].cut = True
    for timeline in found.values():
        timeline.events.sort(key=attrgetter("stream_ordering"))
    return found


def _add_event(timeline: RoomTimeline, columns: Sequence[Any]) -> None:
    is_last, event_id, stream, topological, redacted_by, redacted_form, withheld, raw = columns
    timeline.cut = timeline.cut or is_last
    event = (event_id, stream, topological, redacted_by, None, False, False, redacted_form, raw)
    row = timeline.row
    timeline.events.append(event_of_room(row.room_id, row.room_version, event, withheld=withheld))
