"""The rooms of a response, each with its timeline, in one statement.

`known` is the position up to which the client has the room. For a live room it is where the `pos`
is in that room: its furthest position, or, if a writer was behind, the one before that writer's
event (storage/queries/sync/rooms.py). The upper end is the snapshot. For a user who is not in
the room any more it is the position of the membership. The state of the room ends there as well, or
where the user left, if the membership changed again after that. If state resolution took the user
out of the room, or removed a later membership, their own membership is that of the snapshot.

A timeline is that of a sync (storage/queries/sync/rooms.py). It begins at `lower`, or further
back where the client does not have the room, or its timeline limit has grown.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.columns import USER_SEES, WITHHELD
from storage.database.connection import Connection
from storage.database.names import INVITE, JOIN, MEMBERSHIP_NAMES, MEMBERSHIPS
from storage.database.placeholders import compose, fill
from storage.database.row_types import span
from storage.ids import RoomId, UserId
from storage.queries.events import StoredEvent
from storage.queries.sliding.connection import ClientRoom
from storage.queries.sliding.request_context import RequestContext
from storage.queries.sliding.room_state import (
    ALL_MEMBERS,
    LAZY_MEMBERS,
    MEMBER,
    NO_PAIRS,
    Pairs,
    Patterns,
    Required,
    RequiredRequest,
    SlidingState,
    beyond,
    sliding_states,
)
from storage.queries.sliding.selection import RequestedRoom, Selection, WhyIncluded
from storage.queries.sliding.types import Hero, SlidingRoom
from storage.queries.sync.response import SYNC_CURSOR_TOPOLOGICAL
from storage.queries.sync.rooms import (
    PART_EVENT,
    PART_LIVE,
    PART_NO_EVENT,
    TEMPLATE_HAS_STATE,
    TEMPLATE_LATE,
    TEMPLATE_LATEST,
    TEMPLATE_TIMELINE,
    TEMPLATE_TIMELINE_COLUMNS,
    RoomTimeline,
    TimelineEventRow,
    timelines_of,
)
from storage.queries.sync.state import SyncedRoom, SyncedUser, stripped
from storage.streams import PaginationToken, VectorPosition
from storage.turns import in_turns

TEMPLATE_TIMELINES: Final[LiteralString] = """
WITH
-- More than 150 lines: what a room may show follows from its memberships, in the same snapshot as
-- its events.
reader AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(:ignored)) AS ignored,
        ARRAY(SELECT type_nid FROM event_types WHERE type = ANY(:bumping)) AS bumping
    FROM principals p
    LEFT JOIN state_keys k ON k.type_nid = {TYPE_MEMBER} AND k.state_key = p.name
    WHERE p.name = :user_id
),
own AS MATERIALIZED (  -- the given rooms, with the membership of the user
    SELECT g.*, u.*, m.membership, m.event_nid AS member_nid, m.stream_ordering, m.writer_nid
    FROM unnest(:room_nids, :sent_upto, :is_inside, :is_new, :expands, :timeline_max)
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
        CASE WHEN o.membership = {JOIN} THEN 9223372036854775807 ELSE o.stream_ordering END AS upper
    FROM own o
    JOIN rooms r USING (room_nid)
    LEFT JOIN late USING (room_nid)
    CROSS JOIN LATERAL (SELECT COALESCE(late.reached, :upto)) AS live (reached)
),
room AS MATERIALIZED (
    SELECT k.*, start.whole,
        start.whole OR was.membership = {JOIN} OR departed.at IS NOT NULL AS is_state_shown,
        CASE WHEN start.whole THEN 0 ELSE COALESCE(GREATEST(has.lower,
            CASE WHEN k.completed_at <= k.known THEN k.completed_at END), 0) END AS lower,
        COALESCE(CASE WHEN k.membership <> {JOIN} THEN departed.at END, k.upper) AS state_upper,
        COALESCE(CASE WHEN k.membership IN ({BAN}, {LEAVE})
            AND departed.by_event THEN departed.at END,
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
        SELECT k.is_new OR was.membership <> {JOIN} AND (k.membership = {JOIN} OR EXISTS (
            SELECT FROM state_deltas d JOIN events e USING (event_nid)
            WHERE d.room_nid = k.room_nid AND d.stream_ordering > k.known
                AND d.state_key_nid = k.state_key_nid AND e.membership = {JOIN}
        )) AS whole
        OFFSET 0
    ) AS start
    LEFT JOIN LATERAL (  -- where the user was in the room for the last time
        SELECT d.stream_ordering AS at, d.event_nid IS NOT NULL AS by_event
        FROM state_deltas d
        JOIN events before ON before.event_nid = d.prev_event_nid
        WHERE d.room_nid = k.room_nid AND d.stream_ordering <= k.upper
            AND d.state_key_nid = k.state_key_nid AND before.membership = {JOIN}
        ORDER BY d.stream_ordering DESC
        LIMIT 1
    ) AS departed ON k.membership <> {JOIN}
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
        limit=":rows_max",
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
        limit=":rows_max",
    ),
    limit="r.timeline_limit",
    rows_max=":rows_max",
)

SQL_TIMELINES: Final[LiteralString] = compose(
    fill(
        TEMPLATE_TIMELINES,
        late=fill(TEMPLATE_LATE, furthest=":upto"),
        has=PART_HAS,
        gap=PART_GAP,
        bump=PART_BUMP,
        has_state=fill(TEMPLATE_HAS_STATE, upto="r.state_upper"),
        no_event=PART_NO_EVENT,
        event=PART_EVENT,
        timeline=PART_TIMELINE,
    ),
    USER_SEES,
    WITHHELD,
    user_id="text",
    room_nids="int[]",
    sent_upto="bigint[]",
    is_inside="boolean[]",
    is_new="boolean[]",
    expands="boolean[]",
    timeline_max="bigint[]",
    upto="bigint",
    least_position="bigint",
    writers="text[]",
    writer_positions="bigint[]",
    ignored="text[]",
    bumping="text[]",
    rows_max="bigint",
).sql

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


class SlidingRoomColumns(NamedTuple):
    """The columns of a room; those from `whole` on are NULL without a timeline."""

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


class SlidingRoomRow(NamedTuple):
    """A room, or an event of its timeline: `kind` says which columns a row has.

    "room": those of the room. "event": `room_nid` and those of the event. "limit": an event that is
    not shown, and the last one that was read.
    """

    kind: str
    room: SlidingRoomColumns
    event: TimelineEventRow | None


ROOM_COLUMNS: Final = span(SlidingRoomRow, "room")
EVENT_COLUMNS: Final = span(SlidingRoomRow, "event")


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
    return await timelines_of(records, EVENT_COLUMNS, _timeline)


def _timeline(record: Sequence[Any]) -> SlidingTimeline:
    row = SlidingRoomColumns._make(record[ROOM_COLUMNS])
    return SlidingTimeline(row, bool(row.after_gap))


# --------------------------------------------------------------------------------------------------
# A room that was read for a response, and how it compares with what the client has.


@dataclass(slots=True)
class ReadRoom:
    """A chosen room, with what was read of it."""

    requested: RequestedRoom
    why_included: WhyIncluded
    client_room: ClientRoom | None
    timeline: SlidingTimeline

    @property
    def room(self) -> SyncedRoom:
        """Return the columns that all events of the room share."""
        row = self.timeline.row
        return SyncedRoom(row.room_nid, row.room_id, row.room_version)

    @property
    def is_inside(self) -> bool:
        return self.requested.is_inside

    @property
    def is_new(self) -> bool:
        """Return whether the client does not have the room."""
        return self.timeline.row.whole if self.is_inside else self.why_included.is_new

    @property
    def events(self) -> list[StoredEvent]:
        """Return the timeline, oldest first."""
        limit = self.requested.timeline_limit
        return self.timeline.events[-limit:] if limit else []

    @property
    def limited(self) -> bool:
        """Return whether there may be more events before the timeline."""
        return self.timeline.cut or len(self.timeline.events) > self.requested.timeline_limit

    @property
    def has_gap(self) -> bool:
        """Return whether there may be events that the client does not have before these."""
        events = self.events
        if not self.why_included.expands or self.is_new:
            return self.limited
        return self.limited and (
            not events or (events[0].stream_ordering or 0) > self.timeline.row.lower
        )

    @property
    def is_reset(self) -> bool:
        """Return whether state resolution removed the membership that the client has."""
        return self.timeline.row.membership == 0 and self.is_member_changed

    @property
    def has_own_state(self) -> bool:
        """Return whether the user's own membership is new, beyond the rest of the state."""
        row = self.timeline.row
        return row.own_upper > row.state_upper and self.is_member_changed

    @property
    def is_shown_outside(self) -> bool:
        """Return whether a room that the user is not in has anything new."""
        return self.is_new or self.is_member_changed or self.why_included.is_direct_changed

    @property
    def is_member_changed(self) -> bool:
        """Return whether the membership of the user is new to the client."""
        row = self.timeline.row
        upto = self.client_room.sent_upto if self.client_room is not None else 0
        return row.member_ordering > (row.reached if upto is None else upto)


# --------------------------------------------------------------------------------------------------
# One room of a response, from its timeline and its state.

KNOCK: Final = MEMBERSHIPS["knock"]


def show_inside(
    room: ReadRoom,
    state: SlidingState | None,
    deployment: str,
    *,
    is_direct: bool,
    is_first: bool,
) -> SlidingRoom | None:
    """Return a room that the user is in or was. None: there is nothing new.

    ``is_first``: the connection is new, so no event is live.
    """
    row, events = room.timeline.row, room.events
    room_state = state or SlidingState(room.room)
    is_new = room.is_new
    changed = dict(_summary(room_state, is_new=is_new))
    if is_direct if is_new or room.client_room is None else is_direct != room.client_room.is_direct:
        changed["is_dm"] = is_direct
    if room_state.counts is not None:
        changed["joined_count"], changed["invited_count"] = room_state.counts
    shows_timeline = is_new or room.why_included.expands or bool(events) or room.limited
    if not (
        shows_timeline
        or changed
        or room_state.required
        or room_state.removed
        or room.is_member_changed
    ):
        return None
    start = (events[0].stream_ordering or 0) - 1 if events else _end(room)
    live = [event for event in events if (event.stream_ordering or 0) > row.reached]
    return SlidingRoom(
        membership=MEMBERSHIP_NAMES.get(row.membership, "leave"),
        initial=is_new,
        required_state=room_state.required,
        removed_state=room_state.removed,
        timeline=events,
        prev_batch=PaginationToken(SYNC_CURSOR_TOPOLOGICAL, 0, live=start).print(deployment),
        limited=room.limited,
        expanded_timeline=not is_new
        and any((event.stream_ordering or 0) <= row.lower for event in events),
        num_live=0 if is_first else len(live),
        bump_stamp=_bump(room),
        lists=room.requested.lists,
        changed=frozenset("counts" if name.endswith("_count") else name for name in changed),
        **changed,
    )


def _end(room: ReadRoom) -> int:
    """Return the position where an empty timeline ends."""
    row = room.timeline.row
    if row.membership != JOIN:
        return row.member_ordering
    return max(room.requested.listed.activity, row.lower)


def _bump(room: ReadRoom) -> int:
    row = room.timeline.row
    return (row.bump if row.membership == JOIN else None) or row.member_ordering


def _summary(state: SlidingState, is_new: bool) -> dict[str, Any]:
    """Return the name, the avatar and the heroes, where they are set or have changed."""
    values: dict[str, Any] = {
        "name": _text(state.named.get("name"), "name"),
        "avatar": _text(state.named.get("avatar"), "url"),
        "heroes": None
        if state.heroes is None
        else tuple(_hero(user, state.members.get(user)) for user in state.heroes),
    }
    due = state.due if state.heroes is not None else state.due - {"heroes"}
    return {name: values[name] for name in due if not is_new or values[name] is not None}


def _text(event: StoredEvent | None, key: str) -> str | None:
    value = None if event is None else event.content.get(key)
    return value if isinstance(value, str) and value else None


def _hero(user_id: str, event: StoredEvent | None) -> Hero:
    return Hero(UserId(user_id), _text(event, "displayname"), _text(event, "avatar_url"))


def show_outside(
    room: ReadRoom,
    state: SlidingState | None,
    ignored: Collection[UserId],
    *,
    is_direct: bool,
) -> SlidingRoom | None:
    """Return a room that the user was never in: an invite, a knock, or how it ended.

    Of a forgotten room it has the leave alone. None: there is nothing new, or the invite is by an
    ignored user.
    """
    row = room.timeline.row
    if state is None or (state.own is None and not room.is_reset):
        return None
    if row.membership == INVITE and state.own is not None and state.own.sender in ignored:
        return None
    shown = state.shown if row.membership in (INVITE, KNOCK) else []
    was_joined = room.requested.listed.is_forgotten and room.requested.listed.was_joined
    return SlidingRoom(
        membership=MEMBERSHIP_NAMES.get(row.membership, "leave"),
        initial=True,
        is_dm=is_direct if is_direct or room.why_included.is_direct_changed else None,
        required_state=[state.own] if was_joined and state.own is not None else (),
        removed_state=state.removed,
        bump_stamp=row.member_ordering,
        stripped_state=None if was_joined else stripped(shown, state.own, state.brought) or None,
        lists=room.requested.lists,
        changed=frozenset({"is_dm"} if is_direct or room.why_included.is_direct_changed else ()),
    )


# --------------------------------------------------------------------------------------------------
# The chosen rooms of a response: their timelines and states, and what the client has then.

ALL_EVENTS: Final = 2**31 - 1
"""The timeline limit of a client that has all events of the room."""
REQUIRED_UNION_MAX: Final = 2_000


@dataclass(slots=True)
class ReadRooms:
    """The rooms of a response, and the changed rows of the connection."""

    shown: dict[RoomId, SlidingRoom] = field(default_factory=dict)
    changes: dict[int, ClientRoom] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    """The rooms that the client did not have."""


async def read_rooms(conn: Connection, context: RequestContext, selection: Selection) -> ReadRooms:
    """Return the chosen rooms, by two statements."""
    request, sent, since = context.request, context.sent, context.since
    timeline_requests = [
        timeline_request
        async for timeline_request in in_turns(_timeline_requests(context, selection))
    ]
    by_room = {}
    if timeline_requests:
        rows_max = max(request.rows_max, 2)
        by_room = await timelines(
            conn,
            request.user_id,
            timeline_requests,
            since,
            ignored=request.ignored or (),
            rows_max=rows_max,
        )
    rooms = [
        ReadRoom(selection.rooms[nid], why, sent.get(nid), by_room[nid])
        async for nid, why in in_turns(selection.why_included.items())
        if nid in by_room
    ]
    states = await _states(conn, request.user_id, rooms)
    result = ReadRooms()
    async for room in in_turns(rooms):
        _add(result, context, room, states.get(room.room.room_nid))
    for listed in selection.outside_windows:
        position = by_room[listed.room_nid].row.reached if listed.room_nid in by_room else None
        upto = (0 if since is None else since.furthest()) if position is None else position
        if listed.activity > upto:
            result.changes[listed.room_nid] = sent[listed.room_nid]._replace(sent_upto=upto)
    return result


def _timeline_requests(context: RequestContext, selection: Selection) -> Iterator[TimelineRequest]:
    """Yield the chosen rooms; of rooms left behind the position, where the token has several."""
    for nid, why in selection.why_included.items():
        room, client_room = selection.rooms[nid], context.sent.get(nid)
        upto = None if client_room is None else client_room.sent_upto
        expands = why.expands and not why.is_new
        limit = room.timeline_limit
        yield TimelineRequest(nid, upto, room.is_inside, why.is_new, expands, limit)
    since = context.since
    if since is not None and since.min < since.furthest():
        for listed in selection.outside_windows:
            yield TimelineRequest(
                listed.room_nid,
                None,
                is_inside=False,
                is_new=False,
                expands=False,
                timeline_limit=None,
            )


class _Difference(NamedTuple):
    """How the wanted state of a room differs from the one that the client has."""

    grown: Pairs
    dropped: Pairs


def _difference(room: ReadRoom) -> _Difference:
    if room.client_room is None or room.is_new:
        return _Difference(NO_PAIRS, NO_PAIRS)
    return _Difference(
        room.why_included.grown, beyond(room.client_room.required, room.requested.required)
    )


async def _states(
    conn: Connection, user_id: UserId, rooms: list[ReadRoom]
) -> dict[int, SlidingState]:
    patterns = Patterns(user_id)
    requested: list[RequiredRequest] = []
    members: list[tuple[int, str]] = []
    async for room in in_turns(rooms):
        if not room.is_inside or not room.timeline.row.is_state_shown:
            continue
        lazy = LAZY_MEMBERS in room.requested.required.included
        lazy_members = list(_members(room)) if lazy else []
        grown, dropped = _difference(room)
        has_changed = room.timeline.row.has_state or room.has_own_state
        if room.is_new or has_changed or grown or lazy_members:
            requested.append(_state_request(room, patterns, grown, dropped))
            members.extend(lazy_members)
    outside = [
        SyncedUser(room.room, room.timeline.row.member_nid)
        async for room in in_turns(rooms)
        if not room.is_inside and room.is_shown_outside and room.timeline.row.member_nid
    ]
    room_states = await sliding_states(
        conn, user_id, requested, members=members, patterns=patterns, shown=outside
    )
    async for room in in_turns(rooms):
        if room.requested.required.excluded and (state := room_states.get(room.room.room_nid)):
            _exclude(room, state, user_id)
    return room_states


def _exclude(room: ReadRoom, state: SlidingState, user_id: UserId) -> None:
    """Leave out the excluded state, but for members that are loaded lazily.

    Removed keys stay: the client may have them from before it excluded them.
    """
    required = room.requested.required
    lazy = LAZY_MEMBERS in required.included
    everyone = lazy and not room.limited and not room.is_new
    people = {user for _, user in _members(room)} if lazy else set()

    def is_excluded(event: StoredEvent) -> bool:
        key = event.state_key or ""
        is_lazy = event.type == MEMBER and (everyone or key in people)
        return not is_lazy and required.excludes((event.type, key), user_id)

    kept = [event for event in state.required if not is_excluded(event)]
    state.has_dropped |= len(kept) < len(state.required)
    state.required = kept


def _state_request(
    room: ReadRoom, patterns: Patterns, grown: Pairs, dropped: Pairs
) -> RequiredRequest:
    row, required = room.timeline.row, room.requested.required
    return RequiredRequest(
        room.room,
        room.is_new,
        row.lower,
        row.state_upper,
        row.own_upper,
        row.membership == JOIN,
        patterns.number(required.explicit),
        patterns.number(grown),
        patterns.number(dropped),
        LAZY_MEMBERS in required.included and not room.limited,
    )


def _members(room: ReadRoom) -> Iterator[tuple[int, str]]:
    """Yield the members that the timeline needs: senders, and those whose membership it changes."""
    nid = room.room.room_nid
    users: dict[str, None] = {}
    for event in room.events:
        users[event.sender] = None
        if event.type == MEMBER and event.state_key is not None:
            users[event.state_key] = None
    return ((nid, user) for user in users)


def _add(
    result: ReadRooms, context: RequestContext, room: ReadRoom, state: SlidingState | None
) -> None:
    """Add a room to the response, and what the client has then."""
    nid, request = room.room.room_nid, context.request
    is_direct = room.room.room_id in context.direct
    if room.is_reset:
        state = state or SlidingState(room.room)
        state.remove((MEMBER, request.user_id))
    if room.is_inside:
        is_first = context.since is None
        shown = show_inside(room, state, request.deployment, is_direct=is_direct, is_first=is_first)
    else:
        shown = show_outside(room, state, request.ignored or (), is_direct=is_direct)
    if shown is not None:
        result.shown[room.room.room_id] = shown
        if room.is_new:
            result.whole.add(nid)
    elif room.why_included.is_new:
        return
    after = _sent(room, state, is_direct=is_direct)
    if after != room.client_room:
        result.changes[nid] = after


def _sent(room: ReadRoom, state: SlidingState | None, is_direct: bool) -> ClientRoom:
    """Return what the client has of the room with the response."""
    client_room, requested = room.client_room, room.requested
    if client_room is None or room.is_new:
        limit = _coverage(room) if room.is_inside else ALL_EVENTS
        return ClientRoom(None, None, None, limit, requested.required, is_direct)
    if room.has_gap or (room.why_included.expands and room.is_inside):
        limit = _coverage(room)
    else:
        limit = client_room.timeline_limit
    required = client_room.required
    if (state is not None and state.has_dropped) or _forgets_members(room, client_room):
        required = requested.required
    elif room.why_included.grown:
        required = _with_sent(room, client_room)
    return ClientRoom(
        None, client_room.receipts_upto, client_room.account_data_upto, limit, required, is_direct
    )


def _with_sent(room: ReadRoom, client_room: ClientRoom) -> Required:
    """Return the state that the client has after more was sent."""
    required = room.requested.required
    both = client_room.required.included | required.included | room.why_included.grown
    has_excluded = client_room.required.excluded or required.excluded
    return required if has_excluded or len(both) > REQUIRED_UNION_MAX else Required(both)


def _forgets_members(room: ReadRoom, client_room: ClientRoom) -> bool:
    """Return whether the client forgets members that it wanted before.

    With ``$LAZY`` it does, where the timeline is limited.
    """
    included = room.requested.required.included
    forgets = room.limited and LAZY_MEMBERS in included and ALL_MEMBERS not in included
    return forgets and ALL_MEMBERS in client_room.required.explicit


def _coverage(room: ReadRoom) -> int:
    return min(room.requested.timeline_limit, ALL_EVENTS) if room.limited else ALL_EVENTS
