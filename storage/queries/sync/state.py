"""The state of rooms at the start and at the end of their timelines, in one statement for all rooms.

`state_deltas` tells what each position changed, with removals. A room that the client knows is told what changed between two
positions: for each key the value before the first delta and after the last one. A room that is told whole is the current
state with the deltas since then taken back, which costs what has happened since and not the history of the room.

The state at the start is the room's with the first event of the timeline, but for what that event itself says. Where it arrived after a gap,
with `state_before`, its position changes everything that happened inside the gap: that was so before it. Its own key has the value of the state
before it. It is not the state before it throughout: what was sent here meanwhile, which the other side had not heard of, stays.

Most rooms with news have no deltas (rooms.py tells which), and are not asked for; if none has, there is no statement.

The same statement reads what invited and knocking users are shown of a room (stripped_state.py), so that a sync has a statement to spare.
"""

from collections.abc import Sequence
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.ids import RoomId, StateKey, UserId
from storage.queries.events import StoredEvent, told_of
from storage.queries.filters import ANY_EVENT, EventFilter
from storage.queries.sync.types import RoomSummary

SQL_STATE: Final[LiteralString] = r"""
WITH
-- with the first event of the timeline, which is at start; 0 where there is none
room AS MATERIALIZED (
    SELECT i.*, COALESCE(e.event_nid, 0) AS first_nid, e.state_key_nid AS first_key_nid, CASE
        WHEN e.after_gap THEN e.state_group_before END AS given_group
    FROM unnest($1::int[], $2::boolean[], $3::int[], $4::bigint[], $5::bigint[], $6::bigint[],
        $7::boolean[], $20::boolean[])
        AS i (room_nid, whole, only_key_nid, lower, start, upper, is_joined, has_first)
    LEFT JOIN events e ON i.has_first AND e.stream_ordering = i.start
),
-- what a first event after a gap has replaced: the value in the state before it, as the room's may
-- be older
given AS MATERIALIZED (
    SELECT r.room_nid, r.first_key_nid AS state_key_nid, replaced.event_nid,
        COALESCE(replaced.is_lost, false) AS is_lost
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering = r.start
        AND d.state_key_nid = r.first_key_nid AND d.event_nid = r.first_nid
    -- the last row of the path that has the key, or one that is lost; the group itself may be
    LEFT JOIN LATERAL (
        SELECT part.state_group IS NULL AS is_lost, NULLIF(COALESCE(
            part.event_nids[array_position(part.key_nids, r.first_key_nid)],
            part.member_event_nids[array_position(part.member_key_nids, r.first_key_nid)]
        ), 0) AS event_nid
        FROM (SELECT r.given_group AS state_group) AS one
        LEFT JOIN state_groups g USING (state_group)
        LEFT JOIN LATERAL unnest(g.back) WITH ORDINALITY AS step (back, place) ON true
        LEFT JOIN state_groups part ON part.state_group = g.state_group - step.back
        WHERE part.state_group IS NULL OR r.first_key_nid = ANY(part.key_nids)
            OR r.first_key_nid = ANY(part.member_key_nids)
        ORDER BY part.state_group IS NULL DESC, step.place DESC
        LIMIT 1
    ) AS replaced ON true
    WHERE r.given_group IS NOT NULL
),
shown AS (  -- rooms that the user is not in, but invited to or knocking at; with the own membership
    SELECT * FROM unnest($18::int[], $19::bigint[]) AS s (room_nid, member_nid)
),
filter AS MATERIALIZED (
    SELECT * FROM filter_of($12::text[], $13::text[], $14::text[], $15::text[], $16::boolean)
),
-- where members are loaded lazily: those who matter; the client is taken to know none of them
wanted AS MATERIALIZED (
    SELECT i.room_nid, k.state_key_nid
    FROM unnest($9::int[], $10::text[]) AS i (room_nid, user_id)
    JOIN state_keys k ON k.type_nid = 2 AND k.state_key = i.user_id
),
-- rooms that the client knows: each key that changed since, before, at the start and at the end of
-- the timeline
changed AS (
    SELECT r.room_nid, r.whole, d.state_key_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS before_nid,
        (array_agg(
            CASE WHEN came.before_first THEN d.event_nid ELSE d.prev_event_nid END
            ORDER BY NOT came.before_first, CASE WHEN came.before_first THEN -d.stream_ordering
                ELSE d.stream_ordering END
        ))[1] AS start_nid,
        (array_agg(d.event_nid ORDER BY d.stream_ordering DESC))[1] AS end_nid
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.lower
        AND d.stream_ordering <= r.upper
    -- what came with the first event, but for itself, was so before it: it changed where history is
    -- missing
    CROSS JOIN LATERAL (
        SELECT d.stream_ordering < r.start
            OR (d.stream_ordering = r.start AND d.event_nid IS DISTINCT FROM r.first_nid)
    ) AS came (before_first)
    WHERE (NOT r.whole OR r.lower > 0)
        AND (r.only_key_nid IS NULL OR d.state_key_nid = r.only_key_nid)
    GROUP BY r.room_nid, r.whole, d.state_key_nid
),
-- rooms that are told whole, and members that the client may not know: each key that changed after
-- the start of the timeline
undone AS (
    SELECT r.room_nid, d.state_key_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS start_nid,
        (array_agg(d.prev_event_nid
            ORDER BY d.stream_ordering) FILTER (WHERE d.stream_ordering > r.upper))[1] AS end_nid,
        bool_or(d.stream_ordering > r.upper) AS end_differs
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering >= r.start
        AND (d.stream_ordering > r.start OR d.event_nid = r.first_nid)
    WHERE r.whole OR $8::boolean
    GROUP BY r.room_nid, d.state_key_nid
),
held AS (  -- the current state of these rooms
    SELECT c.room_nid, c.state_key_nid, c.event_nid
    FROM room r
    JOIN current_state c USING (room_nid)
    WHERE r.whole AND NOT $8::boolean
    UNION ALL
    SELECT r.room_nid, s.state_key_nid, s.event_nid
    FROM room r
    JOIN rooms USING (room_nid)
    CROSS JOIN LATERAL state_but_members(rooms.current_state_group) AS s
    WHERE r.whole AND $8::boolean
    UNION ALL
    SELECT c.room_nid, c.state_key_nid, c.event_nid
    FROM wanted
    JOIN current_state c USING (room_nid, state_key_nid)
),
value AS (  -- each key to tell: what the client knows, the value at the start, the value at the end
    SELECT room_nid, state_key_nid, before_nid, CASE WHEN given.room_nid IS NULL THEN start_nid
        ELSE given.event_nid END AS start_nid, end_nid
    FROM changed
    LEFT JOIN given USING (room_nid, state_key_nid)
    WHERE NOT whole AND (room_nid, state_key_nid) NOT IN (SELECT room_nid, state_key_nid
        FROM wanted)
    UNION ALL
    SELECT room_nid, state_key_nid, NULL,
        CASE WHEN given.room_nid IS NOT NULL THEN given.event_nid
            WHEN u.end_differs IS NULL THEN c.event_nid ELSE u.start_nid END,
        CASE WHEN u.end_differs THEN u.end_nid ELSE c.event_nid END
    FROM held c
    FULL JOIN undone u USING (room_nid, state_key_nid)
    LEFT JOIN given USING (room_nid, state_key_nid)
    WHERE NOT $8::boolean
        OR (room_nid, state_key_nid) IN (SELECT room_nid, state_key_nid FROM wanted)
        -- one key at a time: EXISTS could have all members of the database hashed
        OR (room_nid IN (SELECT room_nid FROM room WHERE whole)
            AND (SELECT k.type_nid <> 2 FROM state_keys k
                WHERE k.state_key_nid = COALESCE(c.state_key_nid, u.state_key_nid)))
        OR state_key_nid IS NULL  -- rows of the state are lost
),
entry AS (
    SELECT room_nid, state_key_nid, start_nid AS event_nid, true AS at_start,
        COALESCE(start_nid = end_nid, false) AS at_end, NULL::boolean AS is_own
    FROM value
    WHERE start_nid IS NOT NULL AND start_nid IS DISTINCT FROM before_nid
    UNION ALL
    SELECT room_nid, state_key_nid, end_nid, false, true, NULL
    FROM value
    WHERE end_nid IS NOT NULL AND end_nid IS DISTINCT FROM before_nid
        AND end_nid IS DISTINCT FROM start_nid
    UNION ALL
    SELECT room_nid, state_key_nid, NULL, false, false, NULL
    FROM changed
    WHERE before_nid IS NOT NULL AND end_nid IS NULL
    UNION ALL
    SELECT room_nid, NULL, NULL, NULL, NULL, NULL
    FROM value
    WHERE state_key_nid IS NULL
    UNION ALL
    SELECT room_nid, NULL, NULL, NULL, NULL, NULL
    FROM given
    WHERE is_lost
    UNION ALL
    SELECT room_nid, NULL, member_nid, false, false, true
    FROM shown
    UNION ALL  -- create, join rules, name, topic, canonical alias, avatar, encryption
    SELECT s.room_nid, c.state_key_nid, c.event_nid, false, false, false
    FROM shown s
    JOIN current_state c ON c.room_nid = s.room_nid AND c.state_key_nid IN (1, 4, 9, 10, 11, 12, 13)
),
later AS (  -- members that have changed since, where an older position is asked for
    SELECT DISTINCT ON (d.room_nid, d.state_key_nid) d.room_nid, d.state_key_nid,
        COALESCE(e.membership, 0) AS membership, COALESCE(c.membership, 0) AS membership_now
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.upper
    LEFT JOIN events e ON e.event_nid = d.prev_event_nid
    LEFT JOIN current_state c ON c.room_nid = d.room_nid AND c.state_key_nid = d.state_key_nid
    WHERE r.is_joined
    ORDER BY d.room_nid, d.state_key_nid, d.stream_ordering
),
due AS (  -- joined rooms with a summary that may have changed: members, name, canonical alias
    SELECT r.room_nid, r.upper, i.joined_count, i.invited_count, EXISTS (
            SELECT
            FROM (VALUES (9, 'name'), (11, 'alias')) AS k (state_key_nid, said)
            JOIN events e ON e.event_nid = COALESCE((
                SELECT COALESCE(d.prev_event_nid, 0)
                FROM state_deltas d
                WHERE d.room_nid = r.room_nid AND d.state_key_nid = k.state_key_nid
                    AND d.stream_ordering > r.upper
                ORDER BY d.stream_ordering
                LIMIT 1
            ), (SELECT c.event_nid FROM current_state c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = k.state_key_nid))
            CROSS JOIN LATERAL (SELECT convert_from(e.json, 'UTF8') AS text OFFSET 0) AS pdu
            WHERE e.redacted_by IS NULL AND NOT e.redacted_form AND CASE
                WHEN e.encoding <> 0 THEN true
                -- what Postgres takes for no text
                WHEN position('\u' IN pdu.text) > 0 AND pdu.text ~ '\\u(0000|[dD][89abAB])'
                    THEN pdu.text ~ ('"' || k.said || '"\s*:\s*"[^"]')
                ELSE (pdu.text::json #> ARRAY['content', k.said])::text ~ '^"[^"]'
            END
        ) AS is_named
    FROM room r
    JOIN rooms i USING (room_nid)
    WHERE r.is_joined AND (r.whole OR EXISTS (
        SELECT
        FROM state_deltas d
        JOIN state_keys k USING (state_key_nid)
        WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
            AND d.stream_ordering <= r.upper
            AND (k.type_nid = 2 OR k.state_key_nid IN (9, 11))
    ))
)
SELECT n.room_nid, n.at_start, n.at_end, n.is_own, e.event_id, e.stream_ordering,
    e.topological_ordering,
    CASE WHEN e.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = e.redacted_by) END AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.json, gone.type AS removed_type,
        gone.state_key AS removed_key,
    CASE WHEN n.is_own THEN (
        SELECT o.stripped_state FROM out_of_band_memberships o
            WHERE o.room_nid = n.room_nid AND o.event_nid = n.event_nid
    ) END AS stripped_state,
    NULL::int AS joined_count, NULL::int AS invited_count, NULL::text[] AS heroes
FROM entry n
CROSS JOIN filter
-- not `stored_events`, which looks its room up for each event
LEFT JOIN events e ON e.event_nid = n.event_nid
LEFT JOIN LATERAL (  -- for the few keys that were removed; not all keys of the database, hashed
    SELECT t.type, k.state_key
    FROM state_keys k
    JOIN event_types t USING (type_nid)
    WHERE k.state_key_nid = n.state_key_nid AND n.event_nid IS NULL
    OFFSET 0
) AS gone ON true
WHERE e.event_nid IS NULL OR NOT $11::boolean OR n.is_own IS NOT NULL
    OR is_wanted(e, filter.types, filter.not_types, filter.senders, filter.not_senders,
        filter.contains_url)
UNION ALL
SELECT d.room_nid, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL,
    d.joined_count + COALESCE((SELECT sum((l.membership = 5)::int - (l.membership_now = 5)::int)
        FROM later l WHERE l.room_nid = d.room_nid), 0)::int,
    d.invited_count + COALESCE((SELECT sum((l.membership = 4)::int - (l.membership_now = 4)::int)
        FROM later l WHERE l.room_nid = d.room_nid), 0)::int,
    CASE WHEN NOT d.is_named THEN
        COALESCE(NULLIF(heroes_of(d.room_nid, d.upper, '{4,5}', $17::text), '{}'),
            heroes_of(d.room_nid, d.upper, '{1,2}', $17::text))
    END
FROM due d
"""


class SyncStateRow(NamedTuple):
    """One state event of a room, or (``event_id`` None) a key that was removed, or (with counts) its summary.

    With none of these it says that rows of the room's state, or an event of it, are lost.

    With ``is_own`` it is an event to be shown to somebody who is not in the room: their own membership event, or another one.
    """

    room_nid: int
    at_start: bool | None
    at_end: bool | None
    is_own: bool | None
    event_id: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool | None
    outlier: bool | None
    redacted_form: bool | None
    json: bytes | None
    removed_type: str | None
    removed_key: str | None
    stripped_state: str | None
    """What came with the own membership event out of band, as JSON."""
    joined_count: int | None
    invited_count: int | None
    heroes: list[str] | None


EVENT: Final = SyncStateRow._fields.index("event_id")
"""Where the columns of the event begin."""
EVENT_END: Final = SyncStateRow._fields.index("removed_type")
"""Where they end."""
STRIPPED: Final = SyncStateRow._fields.index("stripped_state")


class SyncedRoom(NamedTuple):
    """What all events of a room share."""

    room_nid: int
    room_id: RoomId
    room_version: str


class SyncedUser(NamedTuple):
    """A room that the user is not in, but shown something of, with the nid of their membership event."""

    room: SyncedRoom
    member_nid: int


class StateRequest(NamedTuple):
    """The state of one room that is requested: after `lower` (or whole), before the event at `start` and at `upper`; of one key only, or of all.

    Without a `has_first` event the timeline is empty, and `start` is `upper`.
    """

    room: SyncedRoom
    whole: bool
    only_key_nid: int | None
    lower: int
    start: int
    upper: int
    is_joined: bool
    has_first: bool
    has_changed: bool = True
    """Whether anything has after `lower`. If not, only lazily loaded members are left to tell."""


class RoomState(NamedTuple):
    """The answer for one room.

    ``shown`` and ``own`` are for stripped state, the rest is of rooms that are told.
    """

    room: SyncedRoom
    at_start: list[StoredEvent]
    at_end: list[StoredEvent]
    removed: list[StateKey]
    summary: list[RoomSummary]  # one, or none where it has not changed
    shown: list[StoredEvent]
    own: list[StoredEvent]  # the membership event of whoever asks
    brought: list[dict[str, Any]]  # the stripped events that came with it


async def states(
    conn: Connection,
    user_id: UserId,
    wanted: Sequence[StateRequest],
    *,
    members: Sequence[tuple[int, str]] | None,
    picked: EventFilter,
    shown: Sequence[SyncedUser],
) -> dict[int, RoomState]:
    """The state of each of these rooms, by room nid.

    ``members``: in which room whose membership matters; None: everybody's.

    `StorageCorrupt` where a state cannot be read.
    """
    rooms = (*(one.room for one in wanted), *(one.room for one in shown))
    found = {room.room_nid: RoomState(room, [], [], [], [], [], [], []) for room in rooms}
    asked = [one for one in wanted if one.whole or one.has_changed or members is not None]
    if not asked and not shown:
        return found
    rows = await conn.records(
        SQL_STATE,
        [one.room.room_nid for one in asked],
        *_columns([one[1:7] for one in asked], 6),
        members is not None,
        *_columns(members or (), 2),
        picked != ANY_EVENT,
        *picked.arguments,
        user_id,
        [one.room.room_nid for one in shown],
        [one.member_nid for one in shown],
        [one.has_first for one in asked],
        row=SyncStateRow,
    )
    for row in rows:
        if row[EVENT] is None:
            _take(found[row[0]], SyncStateRow._make(row))
        else:
            _take_event(found[row[0]], row)
    return found


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    """One list a column."""
    return [[row[place] for row in rows] for place in range(count)]


def _take(room: RoomState, row: SyncStateRow) -> None:
    """A summary, or a key that was removed.

    `StorageCorrupt` where rows of the state, or an event of it, are lost.
    """
    if row.joined_count is None:
        if row.removed_type is None:
            lost = "rows of state_groups or events are lost, or an index does not find them (`room-storage verify`)"
            reason = f"the state of a room cannot be read: {lost}"
            raise StorageCorrupt(reason, room_id=room.room.room_id)
        room.removed.append((row.removed_type, row.removed_key or ""))
        return
    heroes = None if row.heroes is None else tuple(map(UserId, row.heroes))
    room.summary.append(RoomSummary(row.joined_count, row.invited_count or 0, heroes))


def _take_event(state: RoomState, row: Any) -> None:
    """A state event; ``row`` has the columns of `SyncStateRow`."""
    _, at_start, at_end, is_own = row[:EVENT]
    event = told_of(state.room.room_id, state.room.room_version, row[EVENT:EVENT_END])
    if is_own is not None:
        (state.own if is_own else state.shown).append(event)
    if row[STRIPPED] is not None:
        state.brought.extend(orjson.loads(row[STRIPPED]))
    if at_start:
        state.at_start.append(event)
    if at_end:
        state.at_end.append(event)
