"""The rooms that have something to tell a user, each with its timeline, in one statement.

A timeline is in stream order: the latest visible live events of the room, one more than asked for
to know whether there are more. Backfilled events are never in one. The stretch of a room's stream
is written as a range of (room, position), and ordered so: then only an index by room fits, and
never the one over all rooms, along which a quiet room is far away. `BETWEEN` tells the planner that
the range is of one room: it takes one between two rows for a ninth of the table, and would rather
read the whole room by time.

A timeline does not go on across a gap: it begins with the last event that arrived before one of its
parents, and is limited. What is missing there comes by paging back, also when it has been filled in
by then, as backfilled events never come down here. And of a room no more than `rows_max` events are
looked at: a timeline that finds too few among these, as they are hidden or not wanted, is limited
likewise; pages leap over what is hidden.

Several writers: what a token covers ends at another place for each writer, and a writer may commit
positions below another's. But within a room stream orderings are in the order of commits, so of
each room a token covers everything up to some position: its furthest, or for a room where something
was committed late, what lies before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.database.template import fill
from storage.ids import RoomId, UserId
from storage.queries.events import StoredEvent, told_of
from storage.queries.filters import ANY_ROOM, SyncFilter
from storage.queries.sync.positions import WriterRow
from storage.streams import VectorPosition

SQL_ROOMS: Final[LiteralString] = """
WITH
reader AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid
    FROM principals p
    LEFT JOIN state_keys k ON k.type_nid = 2 AND k.state_key = p.name
    WHERE p.name = $1::text
),
filter AS MATERIALIZED (
    SELECT f.*, ARRAY(SELECT principal_nid FROM principals WHERE name = ANY($12::text[])) AS ignored
    FROM filter_of($17::text[], $18::text[], $19::text[], $20::text[], $21::boolean) AS f
),
among AS MATERIALIZED (  -- the rooms that were named, by number, by id, or by both; NULL for all
    SELECT CASE
        WHEN $14::text[] IS NULL THEN $13::int[]
        ELSE ARRAY(SELECT room_nid FROM rooms
            WHERE room_id = ANY($14::text[]) AND ($13::int[] IS NULL OR room_nid = ANY($13::int[])))
    END AS room_nids
),
own AS NOT MATERIALIZED (  -- of all rooms of the user, or of those that were named
    SELECT m.*, u.state_key_nid
    FROM reader u
    JOIN memberships m USING (principal_nid)
    WHERE (SELECT room_nids FROM among) IS NULL
    UNION ALL
    SELECT m.*, u.state_key_nid
    FROM reader u
    CROSS JOIN unnest((SELECT room_nids FROM among)) AS named (room_nid)
    -- room by room: all memberships of the user would be read for a few of them otherwise
    CROSS JOIN LATERAL (
        SELECT * FROM memberships
            WHERE principal_nid = u.principal_nid AND room_nid = named.room_nid OFFSET 0
    ) AS m
),
-- rooms of which something was committed after the token, by a writer that the token has further
-- back
late AS MATERIALIZED (
    SELECT f.room_nid, min(f.stream_ordering) - 1 AS reached
    FROM (
        SELECT e.room_nid, e.stream_ordering, e.writer_nid
        FROM events e
        WHERE e.stream_ordering > $9::bigint
            AND e.stream_ordering <= COALESCE($2::bigint, $3::bigint) AND NOT e.backfilled
            AND $9::bigint < COALESCE($2::bigint, $3::bigint)
        UNION ALL
        SELECT m.room_nid, m.stream_ordering, m.writer_nid
        FROM own m
        WHERE m.stream_ordering > $9::bigint
            AND m.stream_ordering <= COALESCE($2::bigint, $3::bigint)
            AND $9::bigint < COALESCE($2::bigint, $3::bigint)
    ) AS f
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($10::text[], $11::bigint[]) AS p (instance_name, stream_id)
        USING (instance_name)
    WHERE f.stream_ordering > COALESCE(p.stream_id, $9::bigint)
    GROUP BY f.room_nid
),
-- rooms of the user where anything has happened; what they were to the user before it (0: nothing)
mine AS (
    SELECT m.room_nid, m.event_nid AS member_nid, m.principal_nid, m.state_key_nid, r.room_id,
        r.room_version,
        r.last_stream_ordering, m.membership, m.stream_ordering > token.reached AS moved,
        CASE WHEN m.stream_ordering <= token.reached THEN m.membership
            ELSE COALESCE(old.membership, 0) END AS membership_then,
        delta.prev_event_nid AS member_nid_then,
        CASE WHEN $2::bigint IS NOT NULL THEN token.reached END AS since,
        CASE WHEN $2::bigint IS NULL THEN token.reached ELSE $3::bigint END AS upto
    FROM own m
    JOIN rooms r USING (room_nid)
    LEFT JOIN late USING (room_nid)
    CROSS JOIN LATERAL (SELECT COALESCE(late.reached, $2::bigint, $3::bigint)) AS token (reached)
    LEFT JOIN LATERAL (
        SELECT COALESCE(d.prev_event_nid, 0) AS prev_event_nid
        FROM state_deltas d
        WHERE d.room_nid = m.room_nid AND d.stream_ordering > token.reached
            AND d.state_key_nid = m.state_key_nid
        ORDER BY d.stream_ordering
        LIMIT 1
    ) delta ON m.stream_ordering > token.reached
    LEFT JOIN events old ON old.event_nid = delta.prev_event_nid
    WHERE r.room_id <> ALL($15::text[]) AND CASE
        WHEN $2::bigint IS NULL THEN m.membership IN (3, 4, 5)
        ELSE m.stream_ordering > token.reached
            OR (m.membership = 5 AND (r.last_stream_ordering > token.reached OR $4::boolean)) END
),
-- all, or of an initial sync in parts the next ones, latest activity (as of its position) first
joined AS (
    SELECT mine.*, latest.activity
    FROM mine
    CROSS JOIN LATERAL (
        SELECT CASE WHEN mine.last_stream_ordering <= mine.upto THEN mine.last_stream_ordering
            ELSE (
            SELECT e.stream_ordering
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (mine.room_nid, 0)
                AND (e.room_nid, e.stream_ordering) <= (mine.room_nid, mine.upto)
                AND e.room_nid BETWEEN mine.room_nid AND mine.room_nid
                AND NOT e.outlier AND NOT e.backfilled
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT 1
        ) END
    ) AS latest (activity)
    WHERE mine.membership = 5
        AND (mine.since IS NOT NULL OR NOT mine.moved OR mine.membership_then = 5)
        AND ($6::bigint IS NULL OR (latest.activity, mine.room_nid) < ($6::bigint, $7::int))
    ORDER BY latest.activity DESC, mine.room_nid DESC
    LIMIT $5::bigint
),
room AS (  -- what is to be told of each: whether it is told whole, and the stretch of the stream
    SELECT joined.*, since IS NULL OR $4::boolean OR membership_then <> 5 AS whole,
        true AS was_joined,
        CASE WHEN membership_then = 5 THEN COALESCE(news.after, since, 0) ELSE 0 END AS lower,
            upto AS upper
    FROM joined
    -- history that came since the last news may have changed the state: it is no news, and told
    -- with the next
    LEFT JOIN LATERAL (
        SELECT e.stream_ordering AS after
        FROM events e
        WHERE (e.room_nid, e.stream_ordering) > (joined.room_nid, 0)
            AND (e.room_nid, e.stream_ordering) <= (joined.room_nid, joined.since)
            AND e.room_nid BETWEEN joined.room_nid AND joined.room_nid
            AND NOT e.outlier AND NOT e.backfilled
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS news ON true
    UNION ALL
    SELECT mine.*, mine.last_stream_ordering, visit.whole, visit.whole OR membership_then = 5, CASE
        WHEN visit.whole THEN 0 ELSE COALESCE(mine.since, 0) END,
        CASE WHEN member.stream_ordering > mine.since THEN member.stream_ordering ELSE mine.upto END
    FROM mine
    CROSS JOIN filter
    LEFT JOIN events member ON member.event_nid = mine.member_nid
    -- a join and the leave since the last sync: the client knows nothing of the room
    CROSS JOIN LATERAL (
        SELECT membership_then <> 5 AND EXISTS (
            SELECT FROM state_deltas d JOIN events e USING (event_nid)
            WHERE d.room_nid = mine.room_nid AND d.stream_ordering > mine.since
                AND d.state_key_nid = mine.state_key_nid AND e.membership = 5
        ) AS whole
        OFFSET 0
    ) AS visit
    WHERE mine.membership <> 5 AND mine.member_nid IS DISTINCT FROM mine.member_nid_then
        AND $6::bigint IS NULL
        -- an invite by an ignored user
        AND NOT (mine.membership = 4 AND COALESCE(member.sender_nid = ANY(filter.ignored), false))
),
begun AS MATERIALIZED (  -- once a room: it would be asked for each event otherwise
    SELECT r.*, start.gap, start.has_state
    FROM room r
    -- what lies before the last gap is not told: it would hide what is missing
    CROSS JOIN LATERAL (
        SELECT (
            SELECT e.stream_ordering - 1
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, r.lower)
                AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND e.after_gap
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT 1
        ) AS gap, r.whole OR EXISTS (
            SELECT
            FROM state_deltas d
            WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
                AND d.stream_ordering <= r.upper
        ) AS has_state
        OFFSET 0
    ) AS start
)
SELECT r.room_nid, r.room_id, r.room_version, r.membership, r.member_nid,
    r.state_key_nid AS member_key_nid, r.whole, r.was_joined, r.lower, r.upper,
    r.activity, r.gap IS NOT NULL AS after_gap, r.has_state, NULL::boolean AS is_last,
    NULL AS event_id, NULL::bigint AS stream_ordering, NULL::bigint AS topological_ordering,
        NULL AS redacted_by, NULL::boolean AS redacted_form,
    NULL::boolean AS withheld, NULL::bytea AS json
FROM begun r
UNION ALL
SELECT r.room_nid, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, told.is_last,
    CASE WHEN told.is_told THEN told.event_id END, told.stream_ordering, told.topological_ordering,
    CASE WHEN told.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = told.redacted_by) END, told.redacted_form,
    told.withheld, told.json
FROM begun r
-- with all that is told of an event: to look it up by number would be three more descents each
CROSS JOIN LATERAL (
    SELECT e.*, e.place = $16::bigint AS is_last
    FROM visibility_of(r.room_nid, r.principal_nid) AS sight
    CROSS JOIN filter
    CROSS JOIN LATERAL (
        SELECT *
        FROM (  -- so many are looked at, at most
            SELECT e.room_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.redacted_by,
                e.redacted_form, e.json, row_number() OVER () AS place,
                user_sees(e, sight.joined_since, sight.own_audiences, sight.shared_audiences,
                    sight.world_audiences,
                    sight.shared_before, sight.reader_nid, sight.unread)
                    AND not_ignored(e, filter.ignored)
                    AND is_wanted(e, filter.types, filter.not_types, filter.senders,
                        filter.not_senders, filter.contains_url) AS is_told,
                NOT was_there(e, sight.joined_since, sight.joined_audiences)
                    AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
                    AND NOT was_there_before(e, sight.reader_nid, sight.unread) AS withheld
            FROM events e
            WHERE (e.room_nid, e.stream_ordering) > (r.room_nid, COALESCE(r.gap, r.lower))
                AND (e.room_nid, e.stream_ordering) <= (r.room_nid, r.upper)
                AND e.room_nid BETWEEN r.room_nid AND r.room_nid
                AND NOT e.outlier AND NOT e.backfilled
            ORDER BY e.room_nid DESC, e.stream_ordering DESC
            LIMIT $16::bigint
        ) AS e
        WHERE e.is_told OR e.place = $16::bigint
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT $8::bigint + 1
    ) AS e
) AS told
WHERE r.membership NOT IN (3, 4)
"""

PART_WRITERS: Final[LiteralString] = """
UNION ALL
SELECT NULL, stream_name, instance_name, NULL, NULL, NULL, NULL, NULL, stream_id, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM stream_positions
WHERE stream_name IN ('events', 'caches', 'account_data', 'receipts', 'to_device')
UNION ALL
SELECT NULL, 'purged', stream_name, NULL, NULL, NULL, NULL, NULL, purged_upto, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM purged_streams
WHERE stream_name = 'events'
"""

TEMPLATE_ROOMS_AND_WRITERS: Final[LiteralString] = """
{rooms}
{writers}
"""

SQL_ROOMS_AND_WRITERS: Final[LiteralString] = fill(
    TEMPLATE_ROOMS_AND_WRITERS, rooms=SQL_ROOMS, writers=PART_WRITERS
)
"""With what `positions.SQL_POSITIONS` tells, in the same snapshot, in the columns of a room: no number, the stream, the writer, "lower"."""


class RoomOrEventRow(NamedTuple):
    """A room to tell of; or, with none of that but its number, an event of its timeline, or that none was looked at any more.

    The columns of an event come last. It has been accepted, and is no outlier: `user_sees` lets nothing else pass.
    """

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
    """No further event was looked at."""
    event_id: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    redacted_by: str | None
    redacted_form: bool | None
    withheld: bool | None
    """Its sender was erased, and the reader not there: only the redacted form is shown."""
    json: bytes | None


class RoomColumns(NamedTuple):
    """A room to tell of: the columns of `RoomOrEventRow` before those of events, as they are where there is a room."""

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
    """Its state is to be told: whole, or as something of it has changed."""


EVENT: Final = len(RoomColumns._fields)
"""Where the columns of the event begin."""
LOWER: Final = RoomColumns._fields.index("lower")


@dataclass(slots=True)
class ChangedRoom:
    """A room to tell of, and the events of its timeline, oldest first, perhaps one too many.

    ``cut``: the stretch may have more that is visible before the first of them: a gap lies there,
    or it was not looked at.
    """

    row: RoomColumns
    events: list[StoredEvent]
    cut: bool

    @property
    def is_visit(self) -> bool:
        """Whether the user joined and left since the last sync: what the client may hold of the room is from an earlier visit."""
        return self.row.whole and self.row.membership != JOIN


class SyncRange(NamedTuple):
    """What is asked for: from (None: from the beginning) and up to which position, and how much."""

    since: VectorPosition | None
    upto: VectorPosition
    timeline_limit: int
    rooms_limit: int | None = None
    below: tuple[int, int] | None = None  # only rooms below this (activity, room_nid)
    full_state: bool = False
    ignored: tuple[UserId, ...] = ()  # what they have sent is left out, but for state
    room_nids: Sequence[int] | None = None  # only these rooms
    filter: SyncFilter = ANY_ROOM
    rows_max: int = 20_000  # events of a room to look at


async def rooms(conn: Connection, user_id: UserId, asked: SyncRange) -> list[ChangedRoom]:
    """The rooms with something to tell, latest activity first; one more than ``rooms_limit`` if there are more."""
    return _told(await conn.records(SQL_ROOMS, *_arguments(user_id, asked), row=RoomOrEventRow))


async def rooms_and_writers(
    conn: Connection, user_id: UserId, asked: SyncRange
) -> tuple[list[ChangedRoom], list[WriterRow]]:
    """The same, with how far each writer is there (`positions.writers`)."""
    records = await conn.records(
        SQL_ROOMS_AND_WRITERS, *_arguments(user_id, asked), row=RoomOrEventRow
    )
    writers = [
        WriterRow(record[1], record[2], record[LOWER]) for record in records if record[0] is None
    ]
    return _told([record for record in records if record[0] is not None]), writers


def _arguments(user_id: UserId, asked: SyncRange) -> tuple[object, ...]:
    """Of the statement."""
    return (
        user_id,
        None if asked.since is None else asked.since.furthest(),
        asked.upto.furthest(),
        asked.full_state,
        None if asked.rooms_limit is None else asked.rooms_limit + 1,
        *(asked.below or (None, None)),
        asked.timeline_limit,
        *_parts(asked.since or asked.upto),
        list(asked.ignored),
        asked.room_nids,
        None if asked.filter.rooms is None else list(asked.filter.rooms),
        list(asked.filter.not_rooms),
        max(asked.rows_max, asked.timeline_limit + 1),
        *asked.filter.timeline.arguments,
    )


def _told(records: Sequence[Any]) -> list[ChangedRoom]:
    """The rooms of these rows, each with its timeline."""
    told = {
        record[0]: ChangedRoom(head := RoomColumns._make(record[:EVENT]), [], head.after_gap)
        for record in records
        if record[1] is not None
    }
    for record in records:
        if record[1] is None:
            _take(told[record[0]], record[EVENT:])
    found = sorted(told.values(), key=_by_activity, reverse=True)
    for room in found:
        room.events.sort(key=attrgetter("stream_ordering"))
    return found


def _take(room: ChangedRoom, columns: Sequence[Any]) -> None:
    """A row of a timeline."""
    is_last, event_id, stream, topological, redacted_by, redacted_form, withheld, raw = columns
    if is_last:
        room.cut = True
    if event_id is not None:
        event = (event_id, stream, topological, redacted_by, None, False, False, redacted_form, raw)
        room.events.append(
            told_of(room.row.room_id, room.row.room_version, event, withheld=withheld)
        )


def _by_activity(room: ChangedRoom) -> tuple[bool, int, int]:
    """Ascending; what never was active comes last."""
    activity = room.row.activity
    return activity is None, activity or 0, room.row.room_nid


def _parts(position: VectorPosition) -> tuple[int, list[str], list[int]]:
    """Where every writer is at least, and the writers that are further."""
    return (
        position.min,
        [writer for writer, _ in position.items],
        [number for _, number in position.items],
    )
