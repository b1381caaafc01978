"""The rooms that have changed for a user, each with its timeline, in one statement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Generic, LiteralString, NamedTuple, Protocol, TypeVar

from storage.codec import StoredBytes
from storage.database.columns import USER_SEES, WITHHELD
from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.database.placeholders import compose, fill
from storage.database.prepared import prepare_ahead
from storage.database.row_types import span
from storage.ids import RoomId, UserId
from storage.queries.events import StoredEvent, event_of_room, served_at_once
from storage.queries.filters import ANY_ROOM, FILTER_VALUES, PART_IGNORED, SyncFilter
from storage.queries.sync.changed_rooms import PART_STREAMS, WriterRow
from storage.streams import VectorPosition
from storage.turns import in_turns, parts

# --------------------------------------------------------------------------------------------------
# Timelines of rooms: the parts that the statements of sync and sliding sync share, and their rows.
#
# A timeline is in stream order: the latest visible live events of the room, and one beyond the
# limit, which shows that there are more. It never has backfilled events. A range of a room's stream
# is written as a range of (room, position), and ordered so. Then only an index by room fits. The
# index over all rooms would be slow for a quiet room. `BETWEEN` shows the planner that the range is
# of one room. It takes a range between two rows for a ninth of the table, and would read the whole
# room by time.
#
# A timeline begins after the last gap: with the last event that arrived before one of its parents.
# Then it is limited. The missing events come by paging back, also those that are backfilled by
# then. At most `rows_max` events of a room are read. A timeline that finds too few visible ones
# among them is limited as well; pages skip the hidden ones.

TEMPLATE_LATEST: Final[LiteralString] = """
    SELECT {columns}
    FROM events e
    WHERE (e.room_nid, e.stream_ordering) > ({room}.room_nid, {after})
        AND (e.room_nid, e.stream_ordering) <= ({room}.room_nid, {upto})
        AND e.room_nid BETWEEN {room}.room_nid AND {room}.room_nid
        AND {which}
    ORDER BY e.room_nid DESC, e.stream_ordering DESC
    LIMIT {limit}
"""
"""The latest events of a range of a room's stream."""

PART_LIVE: Final[LiteralString] = "NOT e.outlier AND NOT e.backfilled"
"""Whether the event `e` arrived as new: backfilled history is in no timeline."""

TEMPLATE_TIMELINE_COLUMNS: Final[LiteralString] = """
    e.room_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.redacted_by,
    e.redacted_form, e.json, row_number() OVER () AS number,
    user_sees(e, :user_sees.of(v))
        AND {is_wanted} AS is_shown,
    :withheld.of(v) AS withheld
"""

TEMPLATE_TIMELINE: Final[LiteralString] = """
    SELECT e.*, e.number = {rows_max} AS is_last
    FROM visibility_of(r.room_nid, r.principal_nid) AS v
    {filter}
    CROSS JOIN LATERAL (
        SELECT *
        FROM ({latest}) AS e  -- at most so many are read
        WHERE e.is_shown OR e.number = {rows_max}
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT {limit} + 1
    ) AS e
"""
"""The latest visible events of the room `r`, and one more if there are more.

With all columns of an event: to look it up by number would be three more descents each. `latest` is
made of `TEMPLATE_TIMELINE_COLUMNS`.
"""

TEMPLATE_HAS_STATE: Final[LiteralString] = """
    EXISTS (
        SELECT
        FROM state_deltas d
        WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
            AND d.stream_ordering <= {upto}
    )
"""

PART_NO_EVENT: Final[LiteralString] = """
    NULL::boolean AS is_last, NULL AS event_id, NULL::bigint AS stream_ordering,
    NULL::bigint AS topological_ordering, NULL AS redacted_by, NULL::boolean AS redacted_form,
    NULL::boolean AS withheld, NULL::bytea AS json
"""
"""The columns of `PART_EVENT` in a row that has no event."""

PART_EVENT: Final[LiteralString] = """
    t.is_last, t.event_id, t.stream_ordering, t.topological_ordering,
    CASE WHEN t.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = t.redacted_by) END,
    t.redacted_form, t.withheld, t.json
"""
"""The columns of an event of the timeline `t`."""


class TimelineEventRow(NamedTuple):
    """An event of a timeline: an accepted one, as `user_sees` lets no others pass."""

    is_last: bool
    """The last event that was read: there may be more."""
    event_id: str
    stream_ordering: int
    topological_ordering: int
    redacted_by: str | None
    redacted_form: bool
    withheld: bool
    """Its sender was erased, and the reader was not there: only the redacted form is shown."""
    json: StoredBytes


ROOM: Final = "room"
EVENT: Final = "event"
LIMIT: Final = "limit"


class TimelineRoom(Protocol):
    """The columns of a room that its events need."""

    @property
    def room_id(self) -> RoomId: ...

    @property
    def room_version(self) -> str: ...


R = TypeVar("R", bound=TimelineRoom)


@dataclass(slots=True)
class RoomTimeline(Generic[R]):
    """A room, and the events of its timeline: oldest first, perhaps one beyond the limit.

    ``cut``: there may be more visible events before the first one. A gap lies there, or those
    events were not read.
    """

    row: R
    cut: bool
    events: list[StoredEvent] = field(default_factory=list)

    def add(self, columns: Sequence[Any]) -> None:
        is_last, event_id, stream, topological, redacted_by, redacted_form, withheld, raw = columns
        self.cut = self.cut or is_last
        event = (event_id, stream, topological, redacted_by, None, False, False, redacted_form, raw)
        self.events.append(
            event_of_room(self.row.room_id, self.row.room_version, event, withheld=withheld)
        )

    async def shorten(self) -> None:
        """Leave out the oldest events if all of them have too many values (`served_at_once`)."""
        served = await served_at_once(self.events[::-1])
        if served < len(self.events):
            self.events, self.cut = self.events[-served:], True


T = TypeVar("T", bound=RoomTimeline[Any])


async def timelines_of(
    records: Sequence[Any], columns: slice, timeline: Callable[[Any], T]
) -> dict[int, T]:
    """Return the rooms of these rows by nid. ``columns`` are those of the event.

    ``timeline`` makes an empty one of a row of kind "room". A row of kind "limit" cuts its room.
    """
    by_room = dict[int, T]()
    async for part in parts(records):
        by_room |= {record[1]: timeline(record) for record in part if record[0] == ROOM}
    async for part in parts(records):
        for record in part:
            if record[0] == EVENT:
                by_room[record[1]].add(record[columns])
            elif record[0] == LIMIT:
                by_room[record[1]].cut = True
    async for room_timeline in in_turns(by_room.values()):
        room_timeline.events.sort(key=attrgetter("stream_ordering"))
        await room_timeline.shorten()
    return by_room


# --------------------------------------------------------------------------------------------------
# SQL part of a sync: which rooms have changed for a user, and which range of their stream is new.
#
# A token of several writers ends at another position for each of them, and a writer may commit
# positions below those of another one. But within a room stream orderings are in the order of
# commits. So of each room a token covers everything up to one position. That is its furthest
# position, or, for a room with a late commit, the position before that.

TEMPLATE_LATE: Final[LiteralString] = """
-- rooms with an event at or below the furthest position of the token that the token does not
-- cover: its writer was behind
late AS MATERIALIZED (
    SELECT f.room_nid, min(f.stream_ordering) - 1 AS reached
    FROM (
        SELECT e.room_nid, e.stream_ordering, e.writer_nid
        FROM events e
        WHERE e.stream_ordering > :least_position AND e.stream_ordering <= {furthest}
            AND NOT e.backfilled AND :least_position < {furthest}
        UNION ALL
        SELECT m.room_nid, m.stream_ordering, m.writer_nid
        FROM own m
        WHERE m.stream_ordering > :least_position AND m.stream_ordering <= {furthest}
            AND :least_position < {furthest}
        UNION ALL  -- a partial state that was completed
        SELECT e.room_nid, o.stream_id, o.writer_nid
        FROM outlier_memberships o
        JOIN events e USING (event_nid)
        WHERE o.stream_id > :least_position AND o.stream_id <= {furthest}
            AND :least_position < {furthest}
    ) AS f
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest(:writers, :writer_positions) AS p (instance_name, stream_id)
        USING (instance_name)
    WHERE f.stream_ordering > COALESCE(p.stream_id, :least_position)
    GROUP BY f.room_nid
)
"""
"""The CTE `late`, made from `own`. Of the token, `:least_position` is the least of all writers.
`:writers` are further, at `:writer_positions`, and `furthest` is the furthest position."""

PART_LAST_STAY: Final[LiteralString] = """
-- where an old leave ended the last stay: a later invite or ban does not show more of the room
LEFT JOIN LATERAL (
    SELECT d.stream_ordering AS ended
    FROM state_deltas d
    WHERE d.room_nid = mine.room_nid AND d.stream_ordering <= mine.member_stream
        AND d.state_key_nid = mine.state_key_nid
        AND (SELECT e.membership = {JOIN} FROM events e WHERE e.event_nid = d.prev_event_nid)
        AND EXISTS (
            SELECT
            FROM visibility v
            WHERE v.room_nid = mine.room_nid AND v.principal_nid = mine.principal_nid
                AND v.last_join_topological IS NOT NULL
        )
    ORDER BY d.stream_ordering DESC
    LIMIT 1
) AS stay ON mine.is_old_leave
"""

TEMPLATE_CHANGED_ROOMS: Final[LiteralString] = """
reader AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid
    FROM principals p
    LEFT JOIN state_keys k ON k.type_nid = {TYPE_MEMBER} AND k.state_key = p.name
    WHERE p.name = :user_id
),
filter AS MATERIALIZED (
    SELECT f.*, {ignored} AS ignored
    FROM filter_of(:types, :not_types, :senders, :not_senders, :contains_url) AS f
),
named AS MATERIALIZED (  -- the rooms to read, by number, by id, or by both; NULL for all
    SELECT CASE
        WHEN :room_ids IS NULL THEN :room_nids
        ELSE ARRAY(SELECT room_nid FROM rooms
            WHERE room_id = ANY(:room_ids) AND (:room_nids IS NULL OR room_nid = ANY(:room_nids)))
    END AS room_nids
),
own AS NOT MATERIALIZED (  -- the memberships of the user: of all rooms, or of the named ones
    SELECT m.*, u.state_key_nid
    FROM reader u
    JOIN memberships m USING (principal_nid)
    WHERE (SELECT room_nids FROM named) IS NULL
    UNION ALL
    SELECT m.*, u.state_key_nid
    FROM reader u
    CROSS JOIN unnest((SELECT room_nids FROM named)) AS n (room_nid)
    -- room by room: otherwise all memberships of the user would be read for a few of them
    CROSS JOIN LATERAL (
        SELECT * FROM memberships
            WHERE principal_nid = u.principal_nid AND room_nid = n.room_nid OFFSET 0
    ) AS m
),
{late},
-- rooms of the user with new events, and the membership before those (0: none)
mine AS (
    SELECT m.room_nid, m.event_nid AS member_nid, m.principal_nid, m.state_key_nid, r.room_id,
        r.room_version,
        r.last_stream_ordering, r.completed_at, m.membership,
        m.forgotten AND m.membership < {KNOCK} AS is_forgotten,
        m.stream_ordering > token.reached AS is_changed,
        CASE WHEN m.stream_ordering <= token.reached THEN m.membership
            ELSE COALESCE(old.membership, 0) END AS membership_then,
        delta.prev_event_nid AS member_nid_then,
        old_leave.is_wanted AS is_old_leave, m.stream_ordering AS member_stream,
        CASE WHEN :since IS NOT NULL THEN token.reached END AS since,
        CASE WHEN :since IS NULL THEN token.reached ELSE :upto END AS upto
    FROM own m
    JOIN rooms r USING (room_nid)
    LEFT JOIN late USING (room_nid)
    CROSS JOIN LATERAL (SELECT COALESCE(late.reached, :since, :upto)) AS token (reached)
    -- rooms that were left before the position, on request: of a first sync, or with full_state
    CROSS JOIN LATERAL (
        SELECT :include_leave AND (:since IS NULL OR :full_state) AND NOT m.forgotten
            AND m.membership IN ({BAN}, {LEAVE}) AND m.stream_ordering <= token.reached
    ) AS old_leave (is_wanted)
    LEFT JOIN LATERAL (
        SELECT COALESCE(d.prev_event_nid, 0) AS prev_event_nid
        FROM state_deltas d
        WHERE d.room_nid = m.room_nid AND d.stream_ordering > token.reached
            AND d.state_key_nid = m.state_key_nid
        ORDER BY d.stream_ordering
        LIMIT 1
    ) delta ON m.stream_ordering > token.reached
    LEFT JOIN events old ON old.event_nid = delta.prev_event_nid
    WHERE r.room_id <> ALL(:not_rooms) AND CASE
        WHEN old_leave.is_wanted THEN true
        WHEN :since IS NULL THEN m.membership IN ({KNOCK}, {INVITE}, {JOIN})
        ELSE m.stream_ordering > token.reached
            OR (m.membership = {JOIN} AND (r.last_stream_ordering > token.reached
            OR :full_state)) END
        -- of a forgotten room the leave alone, for a client that has the room
        AND NOT (m.forgotten AND m.membership < {KNOCK}
            AND COALESCE(delta.prev_event_nid = 0 OR old.membership < {KNOCK}, :since IS NULL))
),
-- all joined rooms, or the next part of an initial sync: latest activity at its position first
joined AS (
    SELECT mine.*, latest.activity
    FROM mine
    CROSS JOIN LATERAL (
        SELECT CASE WHEN mine.last_stream_ordering <= mine.upto THEN mine.last_stream_ordering
            ELSE ({latest}) END
    ) AS latest (activity)
    WHERE mine.membership = {JOIN}
        AND (mine.since IS NOT NULL OR NOT mine.is_changed OR mine.membership_then = {JOIN})
        AND (:below_activity IS NULL
            OR (latest.activity, mine.room_nid) < (:below_activity, :below_room_nid))
    ORDER BY latest.activity DESC, mine.room_nid DESC
    LIMIT :rooms_max
),
room AS (  -- for each room, whether it is returned whole, and the range of the stream
    SELECT joined.*, since IS NULL OR :full_state OR membership_then <> {JOIN} AS whole,
        true AS was_joined,
        CASE WHEN membership_then = {JOIN} THEN COALESCE(GREATEST(live.after,
            CASE WHEN completed_at <= since THEN completed_at END), since, 0) ELSE 0 END AS lower,
            upto AS upper
    FROM joined
    -- backfilled history may have changed the state. That is no change by itself: it is returned
    -- with the next live event
    LEFT JOIN LATERAL ({live}) AS live (after) ON true
    UNION ALL
    SELECT mine.*, mine.last_stream_ordering, visit.whole OR stay.ended IS NOT NULL,
        -- of a forgotten room the client gets the leave alone, and no state
        (visit.whole OR stay.ended IS NOT NULL OR membership_then = {JOIN})
            AND NOT mine.is_forgotten,
        CASE WHEN visit.whole THEN 0 ELSE COALESCE(mine.since, 0) END,
        CASE WHEN stay.ended IS NOT NULL THEN stay.ended
            WHEN mine.is_old_leave THEN mine.member_stream
            WHEN member.stream_ordering > mine.since THEN member.stream_ordering ELSE mine.upto END
    FROM mine
    CROSS JOIN filter
    LEFT JOIN events member ON member.event_nid = mine.member_nid
    -- joined and left since the last sync: the client has no state of the room. The same of a user
    -- who never joined (shared_before), if they could see the room at their last membership
    CROSS JOIN LATERAL (
        SELECT membership_then <> {JOIN} AND (EXISTS (
            SELECT FROM state_deltas d JOIN events e USING (event_nid)
            WHERE d.room_nid = mine.room_nid AND d.stream_ordering > mine.since
                AND d.state_key_nid = mine.state_key_nid AND e.membership = {JOIN}
        ) OR (mine.membership < {KNOCK} AND NOT mine.is_forgotten AND (
            SELECT v.shared_before IS NULL AND user_sees(member, :user_sees.of(v))
            FROM visibility_of(mine.room_nid, mine.principal_nid) AS v
        ))) AS whole
        OFFSET 0
    ) AS visit
    {last_stay}
    WHERE mine.membership <> {JOIN} AND mine.member_nid IS DISTINCT FROM mine.member_nid_then
        AND :below_activity IS NULL
        -- a client that was not in the room has no state of it to return in full
        AND NOT (mine.is_old_leave AND mine.since IS NOT NULL AND stay.ended IS NULL)
        -- not an invite by an ignored user
        AND NOT (mine.membership = {INVITE}
        AND COALESCE(member.sender_nid = ANY(filter.ignored), false))
),
"""

PART_CHANGED_ROOMS: Final[LiteralString] = fill(
    TEMPLATE_CHANGED_ROOMS,
    ignored=PART_IGNORED,
    late=fill(TEMPLATE_LATE, furthest="COALESCE(:since, :upto)"),
    latest=fill(
        TEMPLATE_LATEST,
        columns="e.stream_ordering",
        room="mine",
        after="0",
        upto="mine.upto",
        which=PART_LIVE,
        limit="1",
    ),
    live=fill(
        TEMPLATE_LATEST,
        columns="e.stream_ordering",
        room="joined",
        after="0",
        upto="joined.since",
        which=PART_LIVE,
        limit="1",
    ),
    last_stay=PART_LAST_STAY,
)
"""The CTEs `reader`, `filter` and `room`, with others that they need."""


TEMPLATE_ROOMS: Final[LiteralString] = """
WITH
-- More than 150 lines: the rooms that changed and their timelines are of one snapshot. A quiet sync
-- needs no other statement.
{changed_rooms}
begun AS MATERIALIZED (  -- once a room: otherwise it would be evaluated for each event
    SELECT r.*, start.gap, start.has_state
    FROM room r
    -- events before the last gap are left out: with them the client would not see the gap
    CROSS JOIN LATERAL (
        SELECT ({gap}) AS gap, r.whole OR {has_state} AS has_state
        OFFSET 0
    ) AS start
)
SELECT 'room' AS kind, r.room_nid, r.room_id, r.room_version, r.membership, r.member_nid,
    r.state_key_nid AS member_key_nid, r.whole, r.was_joined, r.lower, r.upper,
    r.activity, r.gap IS NOT NULL AS after_gap, r.has_state,
    {no_event} {writer_columns}
FROM begun r
UNION ALL
SELECT CASE WHEN t.is_shown THEN 'event' ELSE 'limit' END, r.room_nid, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    {event} {no_writer}
FROM begun r
CROSS JOIN LATERAL ({timeline}) AS t
WHERE r.membership NOT IN ({KNOCK}, {INVITE}) {writers}
"""

TEMPLATE_WRITERS: Final[LiteralString] = """
UNION ALL
SELECT 'writer', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, stream_name, instance_name, stream_id
FROM stream_positions
WHERE {streams}
UNION ALL
SELECT 'purged', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, stream_name, NULL, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
"""

PART_GAP: Final[LiteralString] = fill(
    TEMPLATE_LATEST,
    columns="e.stream_ordering - 1",
    room="r",
    after="r.lower",
    upto="r.upper",
    which="e.after_gap",
    limit="1",
)

PART_HAS_STATE: Final[LiteralString] = fill(TEMPLATE_HAS_STATE, upto="r.upper")

PART_IS_REQUESTED: Final[LiteralString] = """
    not_ignored(e, filter.ignored)
        AND is_wanted(e, filter.types, filter.not_types, filter.senders, filter.not_senders,
            filter.contains_url)
"""

PART_TIMELINE: Final[LiteralString] = fill(
    TEMPLATE_TIMELINE,
    filter="CROSS JOIN filter",
    latest=fill(
        TEMPLATE_LATEST,
        columns=fill(TEMPLATE_TIMELINE_COLUMNS, is_wanted=PART_IS_REQUESTED),
        room="r",
        after="COALESCE(r.gap, r.lower)",
        upto="r.upper",
        which=PART_LIVE,
        limit=":rows_max",
    ),
    limit=":timeline_max",
    rows_max=":rows_max",
)

ROOMS_VALUES: Final[dict[str, str]] = {
    "user_id": "text",
    "since": "bigint",
    "upto": "bigint",
    "full_state": "boolean",
    "rooms_max": "bigint",
    "below_activity": "bigint",
    "below_room_nid": "int",
    "timeline_max": "bigint",
    "least_position": "bigint",
    "writers": "text[]",
    "writer_positions": "bigint[]",
    "ignored": "text[]",
    "room_nids": "int[]",
    "room_ids": "text[]",
    "not_rooms": "text[]",
    "rows_max": "bigint",
    **FILTER_VALUES,
    "include_leave": "boolean",
}
"""The parameters of `_arguments`, in its order."""

SQL_ROOMS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_ROOMS,
        changed_rooms=PART_CHANGED_ROOMS,
        gap=PART_GAP,
        has_state=PART_HAS_STATE,
        no_event=PART_NO_EVENT,
        event=PART_EVENT,
        timeline=PART_TIMELINE,
        writer_columns="",
        no_writer="",
        writers="",
    ),
    USER_SEES,
    WITHHELD,
    **ROOMS_VALUES,
).sql

SQL_ROOMS_AND_WRITERS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_ROOMS,
        changed_rooms=PART_CHANGED_ROOMS,
        gap=PART_GAP,
        has_state=PART_HAS_STATE,
        no_event=PART_NO_EVENT,
        event=PART_EVENT,
        timeline=PART_TIMELINE,
        writer_columns=", NULL AS stream_name, NULL AS instance_name, NULL::bigint AS position",
        no_writer=", NULL, NULL, NULL",
        writers=fill(TEMPLATE_WRITERS, streams=PART_STREAMS),
    ),
    USER_SEES,
    WITHHELD,
    **ROOMS_VALUES,
).sql
"""Also returns the rows of `positions.SQL_POSITIONS`, in the same snapshot."""
prepare_ahead(SQL_ROOMS, SQL_ROOMS_AND_WRITERS)


class RoomColumns(NamedTuple):
    """The columns of a room."""

    room_nid: int
    room_id: RoomId
    room_version: str
    membership: int
    member_nid: int
    member_key_nid: int | None
    whole: bool
    was_joined: bool
    lower: int
    upper: int
    activity: int | None
    after_gap: bool
    """The timeline begins after a gap."""
    has_state: bool
    """The response has state: the whole, or some that has changed."""


class ChangedRoomRow(NamedTuple):
    """A room, or an event of its timeline: `kind` says which columns a row has.

    "room": those of the room. "event": `room_nid` and those of the event. "limit": an event that is
    not shown, and the last one that was read.
    """

    kind: str
    room: RoomColumns
    event: TimelineEventRow | None


class RoomOrWriterRow(NamedTuple):
    """A row of `ChangedRoomRow`; or, of kind "writer" or "purged", one of `WriterRow`."""

    kind: str
    room: RoomColumns | None
    event: TimelineEventRow | None
    stream_name: str | None
    instance_name: str | None
    position: int | None


ROOM_COLUMNS: Final = span(ChangedRoomRow, "room")
EVENT_COLUMNS: Final = span(ChangedRoomRow, "event")


class ChangedRoom(RoomTimeline[RoomColumns]):
    """A changed room, with its timeline."""

    __slots__ = ()

    @property
    def is_visit(self) -> bool:
        """Return whether the user joined and left since the last sync, or since the beginning.

        The client may have the room as of an earlier visit.
        """
        return self.row.whole and self.row.membership != JOIN and self.row.lower == 0


class SyncRange(NamedTuple):
    """The range of a sync: from which position (None: the beginning), up to which, and how much."""

    since: VectorPosition | None
    upto: VectorPosition
    timeline_limit: int
    rooms_limit: int | None = None
    below: tuple[int, int] | None = None  # only rooms below this (activity, room_nid)
    full_state: bool = False
    ignored: list[UserId] | None = None  # their events are left out, but for state
    room_nids: Sequence[int] | None = None  # only these rooms
    filter: SyncFilter = ANY_ROOM
    rows_max: int = 20_000  # most events of a room to read


async def rooms(conn: Connection, user_id: UserId, sync_range: SyncRange) -> list[ChangedRoom]:
    """Return the changed rooms, latest activity first.

    One more than ``rooms_limit`` if there are more.
    """
    arguments = _arguments(user_id, sync_range)
    return await _changed_rooms(await conn.records(SQL_ROOMS, *arguments, row=ChangedRoomRow))


async def rooms_and_writers(
    conn: Connection, user_id: UserId, sync_range: SyncRange
) -> tuple[list[ChangedRoom], list[WriterRow]]:
    """Return the changed rooms, and the position of each writer (`positions.writers`)."""
    arguments = _arguments(user_id, sync_range)
    records = await conn.records(SQL_ROOMS_AND_WRITERS, *arguments, row=RoomOrWriterRow)
    after = EVENT_COLUMNS.stop
    writers = [WriterRow(record[0], *record[after:]) for record in records if record[1] is None]
    return await _changed_rooms(records), writers


def _arguments(user_id: UserId, sync_range: SyncRange) -> tuple[object, ...]:
    sync_filter = sync_range.filter
    return (
        user_id,
        None if sync_range.since is None else sync_range.since.furthest(),
        sync_range.upto.furthest(),
        sync_range.full_state,
        None if sync_range.rooms_limit is None else sync_range.rooms_limit + 1,
        *(sync_range.below or (None, None)),
        sync_range.timeline_limit,
        *_parts(sync_range.since or sync_range.upto),
        sync_range.ignored,
        sync_range.room_nids,
        None if sync_filter.rooms is None else list(sync_filter.rooms),
        list(sync_filter.not_rooms),
        max(sync_range.rows_max, sync_range.timeline_limit + 1),
        *sync_filter.timeline.arguments,
        sync_filter.include_leave,
    )


async def _changed_rooms(records: Sequence[Any]) -> list[ChangedRoom]:
    """Return the rooms of these rows, each with its timeline."""
    by_room = await timelines_of(records, EVENT_COLUMNS, _changed_room)
    return sorted(by_room.values(), key=_by_activity, reverse=True)


def _changed_room(record: Sequence[Any]) -> ChangedRoom:
    row = RoomColumns._make(record[ROOM_COLUMNS])
    return ChangedRoom(row, row.after_gap)


def _by_activity(room: ChangedRoom) -> tuple[bool, int, int]:
    """Return an ascending key. A room without activity comes last."""
    activity = room.row.activity
    return activity is None, activity or 0, room.row.room_nid


def _parts(position: VectorPosition) -> tuple[int, list[str], list[int]]:
    """Return the least position of all writers, and the writers that are further."""
    return (
        position.min,
        [writer for writer, _ in position.items],
        [number for _, number in position.items],
    )
