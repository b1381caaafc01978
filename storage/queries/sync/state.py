"""The state of rooms at the start and at the end of their timelines: one statement for all rooms.

`state_deltas` has the changes of each position, with removals. For a room that the client knows,
the response has the changes between two positions: for each key the value before the first delta
and after the last one. For a whole room it has the current state with the later deltas taken back.
That costs as much as has happened since, whatever the history of the room.

The state at the start is that of the room with the first event of the timeline, without that
event's own change. If the event arrived after a gap with `state_before`, its position has all
changes that happened inside the gap: they were there before the event. Its own key has the value of
the state before it. The result is not that state throughout. Events sent here meanwhile stay,
although the other side had not received them.

A client applies the timeline to the state at its start. So a key that changes in between without an
event of the timeline has its last value in both states (`response.py`): the user may not see that
event, or a merge has changed the state.

Most changed rooms have no deltas (see rooms.py), and are not requested. If none has, no statement
is sent. The same statement reads the stripped state of invites and knocks (`stripped`), so that a
sync has a statement to spare.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.database.prepared import prepare_ahead
from storage.database.row_types import maker, span
from storage.errors import StorageCorrupt
from storage.ids import EventId, RoomId, StateKey, UserId
from storage.queries.events import PART_ROOM_EVENT, RoomEventRow, StoredEvent, event_of_room
from storage.queries.filters import ANY_EVENT, FILTER_VALUES, EventFilter
from storage.queries.sync.types import JoinedRoom, RoomSummary, Sync
from storage.turns import parts

# --------------------------------------------------------------------------------------------------
# The lazily loaded members that a client has been sent.
#
# Client-server API, "Lazy-loading room members". A response leaves out a member event that the
# client has been sent up to its token, as far as this process knows. The members are kept by token:
# a client that has lost a response comes back with the token before it, and gets them again.
# Another process does not know, and sends them again.

MEMBER: Final = "m.room.member"
MEMBERS_MAX: Final = 200_000
"""So many members of all clients are kept, some 20 MB."""

Client = tuple[UserId, str]
"""A user and a device."""
Members = Mapping[tuple[RoomId, str], EventId]


class SentMembers:
    """The members that clients have, by their last tokens. The client used last comes last."""

    def __init__(self, most: int = MEMBERS_MAX) -> None:
        self._most = most
        self._size = 0
        self._clients: dict[Client, dict[str, Members]] = {}

    def leave_out(self, client: Client, since: str | None, response: Sync) -> Sync:
        """Return the response to a request without the members that the client has."""
        tokens = self._taken(client)
        sent = {} if since is None else tokens.get(since, {})
        kept = {} if since is None else {since: sent}
        left_rooms = response.leave.keys()
        members = {key: event_id for key, event_id in sent.items() if key[0] not in left_rooms}
        joined = {
            room_id: self._room(client[0], room_id, room, members)
            for room_id, room in response.join.items()
        }
        # two responses to one token may have led to the next one: only what both had is known
        other = {**tokens, **kept}.get(response.next_batch)
        if other is not None:
            members = dict(members.items() & other.items())
        self._keep(client, {**kept, response.next_batch: members})
        return replace(response, join=joined)

    def _room(
        self,
        user_id: UserId,
        room_id: RoomId,
        room: JoinedRoom,
        sent_members: dict[tuple[RoomId, str], EventId],
    ) -> JoinedRoom:
        """Return the room without known members, and change these to what the client has then."""
        lists = [dict(_members(events)) for events in (room.state, room.state_after)]
        timeline = dict(_members(room.timeline.events))
        if any(
            user_id in members for members in (*lists, timeline)
        ):  # the room may be new to the client
            for key in [key for key in sent_members if key[0] == room_id]:
                del sent_members[key]
        before = {
            user: event_id for (room, user), event_id in sent_members.items() if room == room_id
        }
        for user in {*lists[0], *lists[1], *timeline}:
            sent = {members.get(user, before.get(user)) for members in lists}
            last = timeline.get(user, sent.pop() if len(sent) == 1 else None)
            sent_members.pop((room_id, user), None)
            if last is not None:
                sent_members[room_id, user] = last
        if not before:
            return room
        return replace(
            room,
            state=list(_unknown(room.state, before)),
            state_after=list(_unknown(room.state_after, before)),
        )

    def _taken(self, client: Client) -> dict[str, Members]:
        tokens = self._clients.pop(client, {})
        self._size -= sum(map(len, tokens.values()))
        return tokens

    def _keep(self, client: Client, tokens: dict[str, Members]) -> None:
        self._clients[client] = tokens
        self._size += sum(map(len, tokens.values()))
        while self._size > self._most:
            self._taken(next(iter(self._clients)))


def _members(events: list[StoredEvent]) -> Iterator[tuple[str, EventId]]:
    for event in events:
        if event.type == MEMBER and event.state_key is not None:
            yield event.state_key, event.event_id


def _unknown(events: list[StoredEvent], sent: Mapping[str, EventId]) -> Iterator[StoredEvent]:
    for event in events:
        if event.type != MEMBER or sent.get(event.state_key or "") != event.event_id:
            yield event


# --------------------------------------------------------------------------------------------------
# Rows of states: the parts that the statements of sync and sliding sync share.
#
# Each statement chooses keys and events (`entry`), a row each: kind, room_nid, state_key_nid,
# event_nid. `TEMPLATE_ENTRY_ROWS` reads their events. `PART_SHOWN` chooses the events for a user
# who is not in the room; `stripped` makes stripped state of them.

PART_SHOWN: Final[LiteralString] = """
    -- create, join rules, name, topic, canonical alias, avatar, encryption
    SELECT 'shown', s.room_nid, c.state_key_nid, c.event_nid
    FROM shown s
    JOIN current_state c ON c.room_nid = s.room_nid
        AND c.state_key_nid IN ({KEY_CREATE}, {KEY_JOIN_RULES}, {KEY_NAME}, {KEY_TOPIC},
            {KEY_CANONICAL_ALIAS}, {KEY_AVATAR}, {KEY_ENCRYPTION})
"""
"""The entries of kind "shown" of the rooms in `shown`."""

TEMPLATE_ENTRY_ROWS: Final[LiteralString] = """
SELECT CASE WHEN e.event_nid IS NULL AND n.event_nid IS NOT NULL
            OR gone.type IS NULL AND n.kind = 'removed' THEN 'lost' ELSE n.kind END AS kind,
    n.room_nid,
    {event},
    gone.type AS removed_type, gone.state_key AS removed_key, CASE WHEN n.kind = 'own' THEN (
        SELECT o.stripped_state FROM out_of_band_memberships o
        WHERE o.room_nid = n.room_nid AND o.event_nid = n.event_nid
    ) END AS stripped_state,
    NULL::int AS joined_count, NULL::int AS invited_count, NULL::text[] AS heroes
FROM entry n
-- not `stored_events`: it looks its room up for each event
LEFT JOIN events e ON e.event_nid = n.event_nid
LEFT JOIN LATERAL (  -- once for each of the few removed keys: a join could hash all keys
    SELECT t.type, k.state_key
    FROM state_keys k
    JOIN event_types t USING (type_nid)
    WHERE k.state_key_nid = n.state_key_nid AND n.kind = 'removed'
    OFFSET 0
) AS gone ON true
"""

PART_ENTRY_ROWS: Final[LiteralString] = fill(TEMPLATE_ENTRY_ROWS, event=PART_ROOM_EVENT)
"""The rows of all entries, with the columns of `StateRow`. Conditions may follow."""


class StateRow(NamedTuple):
    """One row of a room. `kind` says which columns it has besides `room_nid`.

    "removed": a key. "own": the membership event of a user who is not in the room, and its stripped
    state as JSON. "shown": an event that is shown to them. "summary": the counts and the heroes.
    "lost": rows of the state, or an event of it, are not there. The statements have other kinds of
    events.
    """

    kind: str
    room_nid: int
    event: RoomEventRow | None
    removed_type: str | None
    removed_key: str | None
    stripped_state: str | None
    joined_count: int | None
    invited_count: int | None
    heroes: list[str] | None


EVENT: Final = span(StateRow, "event")
"""The columns of the event."""
STRIPPED: Final = span(StateRow, "stripped_state").start


def lost_state(room_id: RoomId) -> StorageCorrupt:
    """Return the error for a row of kind "lost"."""
    lost = "rows of state_groups or events are lost, or an index does not find them"
    reason = f"the state of a room cannot be read: {lost} (`room-storage verify`)"
    return StorageCorrupt(reason, room_id=room_id)


# --------------------------------------------------------------------------------------------------
# SQL parts of a sync: the summaries of joined rooms. Client-server API, "Syncing".

TEMPLATE_IS_NAMED: Final[LiteralString] = """
EXISTS (
            SELECT
            FROM (VALUES {keys}) AS k (state_key_nid)
            JOIN events e ON e.event_nid = COALESCE((
                SELECT COALESCE(d.prev_event_nid, 0)
                FROM state_deltas d
                WHERE d.room_nid = r.room_nid AND d.state_key_nid = k.state_key_nid
                    AND d.stream_ordering > r.upper
                ORDER BY d.stream_ordering
                LIMIT 1
            ), (SELECT c.event_nid FROM current_state c
                WHERE c.room_nid = r.room_nid AND c.state_key_nid = k.state_key_nid))
            WHERE e.redacted_by IS NULL AND NOT e.redacted_form AND e.describes_room
        )
"""
"""Whether the room `r` has one of these names at `r.upper`."""

TEMPLATE_HEROES: Final[LiteralString] = """
COALESCE(NULLIF(
    heroes_of(r.room_nid, r.upper, ARRAY[{INVITE}, {JOIN}]::smallint[], {user}), '{}'),
    heroes_of(r.room_nid, r.upper, ARRAY[{BAN}, {LEAVE}]::smallint[], {user}))
"""
"""The heroes of the room `r` at `r.upper`: of those who are there, or else of those who were."""

TEMPLATE_DUE_SUMMARIES: Final[LiteralString] = """
later AS (  -- members that changed after the position of the request
    SELECT DISTINCT ON (d.room_nid, d.state_key_nid) d.room_nid, d.state_key_nid,
        COALESCE(e.membership, 0) AS membership, COALESCE(c.membership, 0) AS membership_now
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.upper
    LEFT JOIN events e ON e.event_nid = d.prev_event_nid
    LEFT JOIN current_state c ON c.room_nid = d.room_nid AND c.state_key_nid = d.state_key_nid
    WHERE r.is_joined
    ORDER BY d.room_nid, d.state_key_nid, d.stream_ordering
),
due AS MATERIALIZED (  -- joined rooms with a summary that may have changed: members, name, alias
    SELECT r.room_nid, i.joined_count, i.invited_count,
        CASE WHEN NOT {is_named} THEN {heroes} END AS heroes
    FROM room r
    JOIN rooms i USING (room_nid)
    WHERE r.is_joined AND (r.whole OR EXISTS (
        SELECT
        FROM state_deltas d
        JOIN state_keys k USING (state_key_nid)
        WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
            AND d.stream_ordering <= r.upper
            AND (k.type_nid = {TYPE_MEMBER}
                OR k.state_key_nid IN ({KEY_NAME}, {KEY_CANONICAL_ALIAS}))
    ))
),
"""
PART_DUE_SUMMARIES: Final[LiteralString] = fill(
    TEMPLATE_DUE_SUMMARIES,
    is_named=fill(TEMPLATE_IS_NAMED, keys="({KEY_NAME}), ({KEY_CANONICAL_ALIAS})"),
    heroes=fill(TEMPLATE_HEROES, user=":user_id"),
)
"""The CTE `due`, made from `room`: rooms with a summary that may have changed, and its values."""

PART_SUMMARIES: Final[LiteralString] = """
SELECT 'summary', d.room_nid, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL,
    d.joined_count + COALESCE((
        SELECT sum((l.membership = {JOIN})::int - (l.membership_now = {JOIN})::int)
        FROM later l WHERE l.room_nid = d.room_nid), 0)::int,
    d.invited_count + COALESCE((
        SELECT sum((l.membership = {INVITE})::int - (l.membership_now = {INVITE})::int)
        FROM later l WHERE l.room_nid = d.room_nid), 0)::int,
    d.heroes
FROM due d
"""
"""The rows of kind "summary"."""


TEMPLATE_VALUES: Final[LiteralString] = """
-- with the first event of the timeline, at `start`; 0 if there is none
room AS MATERIALIZED (
    SELECT i.*, COALESCE(e.event_nid, 0) AS first_nid, e.state_key_nid AS first_key_nid,
        e.membership IS NOT NULL AS first_is_member, CASE
        WHEN e.after_gap THEN e.state_group_before END AS given_group
    FROM unnest(:room_nids, :whole, :only_key_nids, :lower, :start, :upper, :is_joined, :has_first)
        AS i (room_nid, whole, only_key_nid, lower, start, upper, is_joined, has_first)
    LEFT JOIN events e ON i.has_first AND e.stream_ordering = i.start
),
{due_summaries}
-- the value that a first event after a gap has replaced: of the state before that event, because
-- the value of the room may be older
given AS MATERIALIZED (
    SELECT r.room_nid, r.first_key_nid AS state_key_nid, replaced.event_nid,
        COALESCE(replaced.is_lost, false) AS is_lost
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering = r.start
        AND d.state_key_nid = r.first_key_nid AND d.event_nid = r.first_nid
    -- the last row of the path that has the key, or a lost row; the group itself may be lost
    LEFT JOIN LATERAL (
        SELECT g.state_group IS NULL AS is_lost, NULLIF(own.event_nid, 0) AS event_nid
        FROM state_path(r.given_group) AS step
        LEFT JOIN state_groups g ON g.state_group = step.part
        CROSS JOIN LATERAL (
            SELECT own_entry(r.first_key_nid, r.first_is_member, :own_entries.of(g)) AS event_nid
        ) AS own
        WHERE g.state_group IS NULL OR own.event_nid IS NOT NULL
        ORDER BY g.state_group IS NULL DESC, step.place DESC
        LIMIT 1
    ) AS replaced ON true
    WHERE r.given_group IS NOT NULL
),
shown AS (  -- rooms that the user is invited to or knocks at, with the membership event. With a
            -- key also rooms where that may have ended
    SELECT *
    FROM unnest(:shown_rooms, :shown_members, :ended_keys)
        AS s (room_nid, member_nid, ended_key_nid)
),
filter AS MATERIALIZED (
    SELECT * FROM filter_of(:types, :not_types, :senders, :not_senders, :contains_url)
),
-- lazily loaded members: those of the timelines and of the summaries, as if the client knew none
wanted AS MATERIALIZED (
    SELECT i.room_nid, k.state_key_nid
    FROM (
        SELECT * FROM unnest(:member_rooms, :member_ids) AS i (room_nid, user_id)
        UNION
        SELECT d.room_nid, unnest(d.heroes) FROM due d WHERE :lazy
    ) AS i (room_nid, user_id)
    CROSS JOIN LATERAL (  -- one by one: a join could read the keys of all members
        SELECT state_key_nid FROM state_keys
        WHERE type_nid = {TYPE_MEMBER} AND state_key = i.user_id OFFSET 0
    ) AS k
),
-- rooms that the client knows: each changed key, with its value before the range, at the start and
-- at the end of the timeline
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
    -- other changes at the position of the first event were there before it: they are from the gap
    CROSS JOIN LATERAL (
        SELECT d.stream_ordering < r.start
            OR (d.stream_ordering = r.start AND d.event_nid IS DISTINCT FROM r.first_nid)
    ) AS came (before_first)
    WHERE (NOT r.whole OR r.lower > 0)
        AND (r.only_key_nid IS NULL OR d.state_key_nid = r.only_key_nid)
    GROUP BY r.room_nid, r.whole, d.state_key_nid
),
-- whole rooms, and members that the client may not know: each key that changed after the start of
-- the timeline
undone AS (
    SELECT r.room_nid, d.state_key_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS start_nid,
        (array_agg(d.prev_event_nid
            ORDER BY d.stream_ordering) FILTER (WHERE d.stream_ordering > r.upper))[1] AS end_nid,
        bool_or(d.stream_ordering > r.upper) AS end_differs
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering >= r.start
        AND (d.stream_ordering > r.start OR d.event_nid = r.first_nid)
    WHERE r.whole OR :lazy
    GROUP BY r.room_nid, d.state_key_nid
),
current AS (  -- the current state of these rooms
    SELECT c.room_nid, c.state_key_nid, c.event_nid
    FROM room r
    JOIN current_state c USING (room_nid)
    WHERE r.whole AND NOT :lazy
    UNION ALL
    SELECT r.room_nid, s.state_key_nid, s.event_nid
    FROM room r
    JOIN rooms USING (room_nid)
    CROSS JOIN LATERAL state_but_members(rooms.current_state_group) AS s
    WHERE r.whole AND :lazy
    UNION ALL
    SELECT c.room_nid, c.state_key_nid, c.event_nid
    FROM wanted
    JOIN current_state c USING (room_nid, state_key_nid)
),
value AS (  -- each key: the value that the client knows, at the start, and at the end
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
    FROM current c
    FULL JOIN undone u USING (room_nid, state_key_nid)
    LEFT JOIN given USING (room_nid, state_key_nid)
    WHERE NOT :lazy
        OR (room_nid, state_key_nid) IN (SELECT room_nid, state_key_nid FROM wanted)
        -- one key at a time: EXISTS could hash all members of the database
        OR (room_nid IN (SELECT room_nid FROM room WHERE whole)
            AND (SELECT k.type_nid <> {TYPE_MEMBER} FROM state_keys k
                WHERE k.state_key_nid = COALESCE(c.state_key_nid, u.state_key_nid)))
        OR state_key_nid IS NULL  -- rows of the state are lost
),
"""
"""CTEs from `room`, the requested rooms, to `value`, the values of each key at three positions."""

TEMPLATE_STATE: Final[LiteralString] = """
WITH
-- More than 150 lines: states at the start and the end, summaries and invites share the deltas that
-- are read once.
{values}
entry AS (
    SELECT CASE WHEN start_nid = end_nid THEN 'both' ELSE 'start' END AS kind, room_nid,
        state_key_nid, start_nid AS event_nid
    FROM value
    WHERE start_nid IS NOT NULL AND start_nid IS DISTINCT FROM before_nid
    UNION ALL
    SELECT 'end', room_nid, state_key_nid, end_nid
    FROM value
    WHERE end_nid IS NOT NULL AND end_nid IS DISTINCT FROM before_nid
        AND end_nid IS DISTINCT FROM start_nid
    UNION ALL
    SELECT 'removed', room_nid, state_key_nid, NULL
    FROM changed
    WHERE before_nid IS NOT NULL AND end_nid IS NULL
    UNION ALL
    SELECT 'lost', room_nid, NULL, NULL
    FROM value
    WHERE state_key_nid IS NULL
    UNION ALL
    SELECT 'lost', room_nid, NULL, NULL
    FROM given
    WHERE is_lost
    UNION ALL
    SELECT 'own', s.room_nid, NULL, s.member_nid
    FROM shown s
    WHERE NOT EXISTS (  -- an end that the room's state has did not come out of band
        SELECT
        FROM current_state c
        WHERE c.room_nid = s.room_nid AND c.state_key_nid = s.ended_key_nid
            AND c.event_nid = s.member_nid
    )
    UNION ALL
    {shown}
)
{rows}
CROSS JOIN filter
WHERE e.event_nid IS NULL OR NOT :is_filtered OR n.kind IN ('own', 'shown')
    OR is_wanted(e, filter.types, filter.not_types, filter.senders, filter.not_senders,
        filter.contains_url)
UNION ALL
{summaries}
"""

SQL_STATE: Final[LiteralString] = compose(
    fill(
        TEMPLATE_STATE,
        values=fill(TEMPLATE_VALUES, due_summaries=PART_DUE_SUMMARIES),
        shown=PART_SHOWN,
        rows=PART_ENTRY_ROWS,
        summaries=PART_SUMMARIES,
    ),
    OWN_ENTRIES,
    room_nids="int[]",
    whole="boolean[]",
    only_key_nids="int[]",
    lower="bigint[]",
    start="bigint[]",
    upper="bigint[]",
    is_joined="boolean[]",
    lazy="boolean",
    member_rooms="int[]",
    member_ids="text[]",
    is_filtered="boolean",
    **FILTER_VALUES,
    user_id="text",
    shown_rooms="int[]",
    shown_members="bigint[]",
    has_first="boolean[]",
    ended_keys="int[]",
).sql
prepare_ahead(SQL_STATE)


class SyncedRoom(NamedTuple):
    """The columns that all events of a room share."""

    room_nid: int
    room_id: RoomId
    room_version: str


class SyncedUser(NamedTuple):
    """A room that the user is invited to or knocks at, with the nid of their membership event.

    ``ended_key_nid``: the invite or knock may have ended; the state key of the membership.
    """

    room: SyncedRoom
    member_nid: int
    ended_key_nid: int | None = None


class StateRequest(NamedTuple):
    """The requested state of a room: whole, or changes after `lower`; at `start` and `upper`.

    `start` is the position of the first event of the timeline, `has_first`. Without one the
    timeline is empty, and `start` is `upper`. ``only_key_nid``: of this key alone.
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
    """Whether there are changes after `lower`. If not, only lazily loaded members are read."""


class RoomState(NamedTuple):
    """The state of one room. ``shown``, ``own`` and ``brought`` are for stripped state.

    ``throughout``: the same at the start and at the end of the timeline.
    """

    room: SyncedRoom
    throughout: list[StoredEvent]
    at_start: list[StoredEvent]
    at_end: list[StoredEvent]
    removed: list[StateKey]
    summary: list[RoomSummary]  # one, or none where it has not changed
    shown: list[StoredEvent]
    own: list[StoredEvent]  # the membership event of the user
    brought: list[dict[str, Any]]  # the stripped events that came with it


async def states(
    conn: Connection,
    user_id: UserId,
    requests: Sequence[StateRequest],
    *,
    members: Sequence[tuple[int, str]] | None,
    picked: EventFilter,
    shown: Sequence[SyncedUser],
) -> dict[int, RoomState]:
    """Return the state of each of these rooms, by room nid.

    ``members``: pairs of a room nid and a user whose membership is read; None: of all users.

    `StorageCorrupt` where a state cannot be read.
    """
    rooms = (*(request.room for request in requests), *(request.room for request in shown))
    by_room = {room.room_nid: RoomState(room, [], [], [], [], [], [], [], []) for room in rooms}
    requested = [
        request
        for request in requests
        if request.whole or request.has_changed or members is not None
    ]
    if not requested and not shown:
        return by_room
    rows = await conn.records(
        SQL_STATE,
        [request.room.room_nid for request in requested],
        *_columns([request[1:7] for request in requested], 6),
        members is not None,
        *_columns(members or (), 2),
        picked != ANY_EVENT,
        *picked.arguments,
        user_id,
        [request.room.room_nid for request in shown],
        [request.member_nid for request in shown],
        [request.has_first for request in requested],
        [request.ended_key_nid for request in shown],
        row=StateRow,
    )
    async for part in parts(rows):
        for row in part:
            if row[EVENT.start] is None:
                _add_other(by_room[row[1]], maker(StateRow)(row))
            else:
                _add_event(by_room[row[1]], row)
    return by_room


SQL_LATER_VALUES: Final[LiteralString] = compose(
    """
SELECT i.room_nid, i.type, i.state_key
FROM unnest(:room_nids, :types, :keys, :shown, :upper)
    AS i (room_nid, type, state_key, shown, upper)
CROSS JOIN LATERAL (
    SELECT k.state_key_nid
    FROM event_types t
    JOIN state_keys k USING (type_nid)
    WHERE t.type = i.type AND k.state_key = i.state_key
    OFFSET 0
) AS k
CROSS JOIN LATERAL (
    SELECT e.stream_ordering
    FROM events e
    WHERE e.event_nid = COALESCE((
        SELECT COALESCE(d.prev_event_nid, 0)
        FROM state_deltas d
        WHERE d.room_nid = i.room_nid AND d.state_key_nid = k.state_key_nid
            AND d.stream_ordering > i.upper
        ORDER BY d.stream_ordering
        LIMIT 1
    ), (SELECT c.event_nid FROM current_state c
        WHERE c.room_nid = i.room_nid AND c.state_key_nid = k.state_key_nid))
    OFFSET 0
) AS value
WHERE value.stream_ordering > i.shown
""",
    room_nids="int[]",
    types="text[]",
    keys="text[]",
    shown="bigint[]",
    upper="bigint[]",
).sql


class ShownKey(NamedTuple):
    """A key whose last event in a timeline is at `shown`. The response ends at `upper`."""

    room_nid: int
    type: str
    state_key: str
    shown: int
    upper: int


class LaterValueRow(NamedTuple):
    """A key whose value at the end is of a later event than the timeline shows."""

    room_nid: int
    type: str
    state_key: str


async def later_values(conn: Connection, keys: Sequence[ShownKey]) -> list[LaterValueRow]:
    """Return the keys whose value came later in the stream than the event that is shown.

    Such a value need not be a change: the room had it as an outlier, from the state after a gap,
    and both events came afterwards. So no delta says it.
    """
    if not keys:
        return []
    columns = _columns(keys, len(ShownKey._fields))
    return await conn.fetch(SQL_LATER_VALUES, *columns, row=LaterValueRow)


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    return [[row[index] for row in rows] for index in range(count)]


def _add_other(state: RoomState, row: StateRow) -> None:
    """Add a summary or a removed key. `StorageCorrupt` for lost rows."""
    if row.kind == "removed":
        state.removed.append((row.removed_type or "", row.removed_key or ""))
    elif row.kind == "summary":
        heroes = None if row.heroes is None else tuple(map(UserId, row.heroes))
        summary = RoomSummary(row.joined_count or 0, row.invited_count or 0, heroes)
        state.summary.append(summary)
    else:
        raise lost_state(state.room.room_id)


def _add_event(state: RoomState, row: Any) -> None:
    kind = row[0]
    event = event_of_room(state.room.room_id, state.room.room_version, row[EVENT])
    if kind == "own":
        state.own.append(event)
        state.brought.extend(orjson.loads(row[STRIPPED] or "[]"))
    elif kind == "shown":
        state.shown.append(event)
    elif kind == "both":
        state.throughout.append(event)
    else:
        (state.at_start if kind == "start" else state.at_end).append(event)


# --------------------------------------------------------------------------------------------------
# Stripped state: the part of a room that an invited or knocking user sees.
#
# Client-server API, "Stripped state". It is the stripped state that came with the membership event
# from another server, beside it or in it. Otherwise it is a few events of the current state. The
# user's own membership event is always part of it.

BROUGHT: Final = ("invite_room_state", "knock_room_state")


def stripped(
    shown: Sequence[StoredEvent], own: StoredEvent | None, brought: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the stripped state: that which came with the ``own`` event, or else ``shown``.

    ``shown`` are events of the current state (state.py), ``own`` is the membership event.
    ``brought`` is stripped state that came beside it (``append(stripped_state=…)``), well-formed.
    """
    if own is None:
        return [strip(event.json) for event in shown]
    state = (
        [strip(event) for event in brought]
        or _brought(own)
        or [strip(event.json) for event in shown]
    )
    key = (own.type, own.state_key)
    return [
        *(event for event in state if (event["type"], event["state_key"]) != key),
        strip(own.json),
    ]


def _brought(own: StoredEvent) -> list[dict[str, Any]]:
    """Return the well-formed events in the `unsigned` of the membership event.

    Another server can send anything there.
    """
    unsigned = own.json.get("unsigned")
    if not isinstance(unsigned, dict):
        return []
    stripped = next(
        (value for name in BROUGHT if isinstance(value := unsigned.get(name), list)), []
    )
    return [strip(event) for event in stripped if isinstance(event, dict) and _is_stripped(event)]


def _is_stripped(event: dict[str, Any]) -> bool:
    return all(
        isinstance(event.get(name), str) for name in ("type", "state_key", "sender")
    ) and isinstance(event.get("content"), dict)


def strip(event: dict[str, Any]) -> dict[str, Any]:
    """Return the four keys of a stripped event."""
    return {name: event[name] for name in ("type", "state_key", "sender", "content")}
