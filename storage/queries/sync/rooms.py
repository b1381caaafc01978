"""The rooms that have changed for a user, each with its timeline, in one statement.

storage/queries/sync/timeline.py says what a timeline has, and why the statement reads it so.
"""

from collections.abc import Sequence
from typing import Any, Final, LiteralString, NamedTuple

from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.database.prepared import prepare_ahead
from storage.database.sql_template import fill
from storage.ids import RoomId, UserId
from storage.queries.filters import ANY_ROOM, SyncFilter
from storage.queries.sync.positions import PART_STREAMS, WriterRow
from storage.queries.sync.room_ranges import PART_CHANGED_ROOMS
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

TEMPLATE_ROOMS: Final[LiteralString] = """
WITH
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
WHERE r.membership NOT IN (3, 4) {writers}
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

PART_IS_WANTED: Final[LiteralString] = """
    not_ignored(e, filter.ignored)
        AND is_wanted(e, filter.types, filter.not_types, filter.senders, filter.not_senders,
            filter.contains_url)
"""

PART_TIMELINE: Final[LiteralString] = fill(
    TEMPLATE_TIMELINE,
    filter="CROSS JOIN filter",
    latest=fill(
        TEMPLATE_LATEST,
        columns=fill(TEMPLATE_TIMELINE_COLUMNS, is_wanted=PART_IS_WANTED),
        room="r",
        after="COALESCE(r.gap, r.lower)",
        upto="r.upper",
        which=PART_LIVE,
        limit="$16::bigint",
    ),
    limit="$8::bigint",
    rows_max="$16::bigint",
)

SQL_ROOMS: Final[LiteralString] = fill(
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
)

SQL_ROOMS_AND_WRITERS: Final[LiteralString] = fill(
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
)
"""Also returns the rows of `positions.SQL_POSITIONS`, in the same snapshot."""
prepare_ahead(SQL_ROOMS, SQL_ROOMS_AND_WRITERS)


class ChangedRoomRow(NamedTuple):
    """A room, or an event of its timeline: `kind` says which columns a row has.

    "room": the columns up to `has_state`. "event": `room_nid` and the columns of the event.
    "limit": an event that is not shown, and the last one that was read. Events are accepted ones of
    the timeline: `user_sees` lets no others pass.
    """

    kind: str
    room_nid: int
    room_id: str | None
    room_version: str | None
    membership: int | None
    member_nid: int | None
    member_key_nid: int | None
    whole: bool | None
    was_joined: bool | None
    lower: int | None
    upper: int | None
    activity: int | None
    after_gap: bool | None
    has_state: bool | None
    is_last: bool | None
    """The last event that was read: there may be more."""
    event_id: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    redacted_by: str | None
    redacted_form: bool | None
    withheld: bool | None
    """Its sender was erased, and the reader was not there: only the redacted form is shown."""
    json: StoredBytes | None


class RoomOrWriterRow(NamedTuple):
    """A row of `ChangedRoomRow`; or, of kind "writer" or "purged", one of `WriterRow`."""

    kind: str
    room_nid: int | None
    room_id: str | None
    room_version: str | None
    membership: int | None
    member_nid: int | None
    member_key_nid: int | None
    whole: bool | None
    was_joined: bool | None
    lower: int | None
    upper: int | None
    activity: int | None
    after_gap: bool | None
    has_state: bool | None
    is_last: bool | None
    event_id: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    redacted_by: str | None
    redacted_form: bool | None
    withheld: bool | None
    json: StoredBytes | None
    stream_name: str | None
    instance_name: str | None
    position: int | None


class RoomColumns(NamedTuple):
    """The columns of a row of kind "room", without the kind."""

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


EVENT_AT: Final = ChangedRoomRow._fields.index("is_last")
"""The columns of the event begin here, and end with the next."""
EVENT_END: Final = len(ChangedRoomRow._fields)


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
    writers = [WriterRow(record[0], *record[EVENT_END:]) for record in records if record[1] is None]
    return await _changed_rooms(records), writers


def _arguments(user_id: UserId, sync_range: SyncRange) -> tuple[object, ...]:
    wanted = sync_range.filter
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
        None if wanted.rooms is None else list(wanted.rooms),
        list(wanted.not_rooms),
        max(sync_range.rows_max, sync_range.timeline_limit + 1),
        *wanted.timeline.arguments,
        wanted.include_leave,
    )


async def _changed_rooms(records: Sequence[Any]) -> list[ChangedRoom]:
    """Return the rooms of these rows, each with its timeline."""
    found = await timelines_of(records, slice(EVENT_AT, EVENT_END), _changed_room)
    return sorted(found.values(), key=_by_activity, reverse=True)


def _changed_room(record: Sequence[Any]) -> ChangedRoom:
    row = RoomColumns._make(record[1:EVENT_AT])
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
