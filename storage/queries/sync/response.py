"""The response of /sync from its parts, within one snapshot."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from storage import arguments as args
from storage.config import Config
from storage.database.connection import Connection
from storage.database.names import INVITE, JOIN, MEMBERSHIPS
from storage.errors import InvalidToken, ResyncNeeded
from storage.ids import StateKey, UserId
from storage.queries.events import StoredEvent
from storage.queries.filters import ANY_ROOM, SyncFilter
from storage.queries.sync.changed_rooms import ChangeSnapshot, SyncMemory, covered, events_of, where
from storage.queries.sync.included import NOTHING, Include, Inclusion, add_included
from storage.queries.sync.rooms import ChangedRoom, SyncRange, rooms, rooms_and_writers
from storage.queries.sync.state import (
    RoomState,
    ShownKey,
    StateRequest,
    SyncedRoom,
    SyncedUser,
    later_values,
    states,
    stripped,
)
from storage.queries.sync.types import (
    InvitedRoom,
    JoinedRoom,
    KnockedRoom,
    LeftRoom,
    Sync,
    Timeline,
)
from storage.streams import PaginationToken, RoomsToken, SyncToken
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import is_rooms_token
from storage.turns import in_turns

KNOCK: Final = MEMBERSHIPS["knock"]
MEMBER: Final = "m.room.member"
SYNC_CURSOR_TOPOLOGICAL: Final = LARGEST_POSITION - 1
"""Above the topological ordering of every event, also of one that moves up later.

See storage/graph/topological_ordering.py."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A request to /sync with parsed tokens and checked limits."""

    user_id: UserId
    since: SyncToken | None
    part: RoomsToken | None
    timeline_limit: int
    rooms_limit: int | None
    full_state: bool
    deployment: str
    ignored: list[UserId] | None = None
    filter: SyncFilter = ANY_ROOM
    rows_max: int = 20_000
    defined: frozenset[str] = frozenset()
    """The streams that the process has defined."""
    include: Include = NOTHING

    @property
    def text(self) -> str:
        """Return the token as the caller gave it: a token has one text only."""
        token = self.since or self.part
        return "" if token is None else token.print(self.deployment)

    @property
    def token(self) -> SyncToken | None:
        """Return the token of ``since``, or of the parts of an initial sync."""
        return self.since if self.part is None else self.part.upto

    def covered(self, reached: SyncToken) -> SyncToken:
        """Return the part of these positions that a response of this process covers."""
        return covered(reached, self.defined, self.token)

    def next_batch(self, reached: SyncToken) -> str:
        """Return the text of `covered`."""
        return self.covered(reached).print(self.deployment)

    @classmethod
    def of(
        cls,
        user_id: str,
        since: str | None,
        *,
        timeline_limit: int,
        rooms_limit: int | None,
        full_state: bool,
        ignored: list[UserId] | None = None,
        filter: SyncFilter = ANY_ROOM,  # noqa: A002  # as the client-server API calls it
        server_name: str,
        deployment: str,
        config: Config,
        defined: frozenset[str] = frozenset(),
        include: Include = NOTHING,
    ) -> "SyncRequest":
        """Return the request for these arguments.

        `InvalidIdentifier`, `InvalidToken`, `InputError`.
        """
        part = (
            None
            if since is None or not is_rooms_token(since)
            else RoomsToken.parse(since, deployment)
        )
        token = None if since is None or part is not None else SyncToken.parse(since, deployment)
        if rooms_limit is not None:
            rooms_limit = args.limit(rooms_limit, config.page_limit_max, "rooms_limit")
        if part is not None and rooms_limit is None:
            raise InvalidToken(since or "", "a next_rooms token goes with rooms_limit")
        limit = args.limit(timeline_limit, config.page_limit_max, "timeline_limit")
        user = args.local_user(user_id, server_name)
        rows_max = config.traversal_rows_max
        return cls(
            user,
            token,
            part,
            limit,
            rooms_limit,
            full_state,
            deployment,
            ignored,
            filter,
            rows_max,
            defined,
            include,
        )


async def sync(conn: Connection, request: SyncRequest, *, memory: SyncMemory | None = None) -> Sync:
    """Return the response, by at most three statements.

    ``conn`` is in a REPEATABLE READ transaction: one snapshot.

    ``memory`` has the rooms that can have changed. Without it all rooms of the user are read.
    """
    return await _respond(conn, request, await _snapshot(conn, request, memory))


async def poll(
    conn: Connection, request: SyncRequest, memory: SyncMemory, *, reread: bool
) -> tuple[Sync, ChangeSnapshot | None]:
    """Return the response as `sync`, and the snapshot of changes, if it was read.

    ``reread``: also read the rooms that the user is in, instead of taking them from the cache.
    """
    snapshot = await _snapshot(conn, request, memory, reread=reread)
    return await _respond(conn, request, snapshot), snapshot


async def _snapshot(
    conn: Connection, request: SyncRequest, memory: SyncMemory | None, *, reread: bool = False
) -> ChangeSnapshot | None:
    """Return what the caches know of changes. None: it makes no difference."""
    if memory is None or request.since is None or request.full_state:
        return None
    return await memory.snapshot(conn, request.user_id, reread=reread)


async def _respond(conn: Connection, request: SyncRequest, snapshot: ChangeSnapshot | None) -> Sync:
    reached, purged_upto = (
        await where(conn) if snapshot is None else (snapshot.token, snapshot.purged_upto)
    )
    _refuse_purged(request, purged_upto)
    current = reached.positions()
    upto = reached if request.part is None else request.part.upto.bound(current)
    since = None if request.since is None else request.since.bound(current)
    since_events = None if since is None else events_of(since)
    room_nids = (
        None if snapshot is None or since_events is None else snapshot.candidates(since_events)
    )
    if (since_events == events_of(upto) and not request.full_state) or room_nids == []:
        return await _included(conn, request, _inclusion(request, since, upto, []), [])
    below = None if request.part is None else (request.part.activity, request.part.room)
    limit = request.rooms_limit if since is None else None
    of_all = (
        request.timeline_limit,
        limit,
        below,
        request.full_state,
        request.ignored,
        room_nids,
        request.filter,
        request.rows_max,
    )
    changed = await rooms(conn, request.user_id, SyncRange(since_events, events_of(upto), *of_all))
    joined = [room for room in changed if room.row.membership == JOIN]
    more = limit is not None and len(joined) > limit
    if more:
        changed.remove(joined[-1])
        joined = joined[:-1]
    inclusion = _inclusion(request, since, upto, changed)
    last = joined[-1] if more and joined else None
    return await _included(conn, request, inclusion, changed, last=last)


async def _included(
    conn: Connection,
    request: SyncRequest,
    inclusion: Inclusion,
    changed: list[ChangedRoom],
    *,
    last: ChangedRoom | None = None,
) -> Sync:
    """Return the response with these rooms, and with the parts to include.

    ``last`` is the last room where more follow. All parts of an initial sync cover the same
    positions, so the first one decides how far the to-device messages go.
    """
    response = await _fill(conn, request, changed, Sync(""))
    response, upto = await add_included(conn, inclusion, response)
    next_rooms = (
        None if last is None else _next_rooms(request.covered(upto), last).print(request.deployment)
    )
    return replace(response, next_batch=request.next_batch(upto), next_rooms=next_rooms)


def _inclusion(
    request: SyncRequest, since: SyncToken | None, upto: SyncToken, changed: Iterable[ChangedRoom]
) -> Inclusion:
    """Return the request for the parts that the response includes."""
    end = PaginationToken(SYNC_CURSOR_TOPOLOGICAL, 0, live=events_of(upto).furthest())
    rows = [room.row for room in changed]
    left = (row for row in rows if row.membership not in (JOIN, INVITE, KNOCK))
    return Inclusion(
        user_id=request.user_id,
        include=request.include,
        since=since,
        now=upto,
        filter=request.filter,
        ignored=request.ignored,
        is_first=request.part is None,
        whole=[row.room_nid for row in rows if row.membership == JOIN and row.whole],
        left=[row.room_nid for row in left if row.whole or not row.was_joined],
        prev_batch=end.print(request.deployment),
        rows_max=request.rows_max,
    )


def has_no_changes(request: SyncRequest, memory: SyncMemory) -> bool:
    """Return whether nothing is new as far as this process has followed. Then try `no_changes`."""
    return (
        request.since is not None
        and not request.full_state
        and memory.has_no_changes(request.user_id, events_of(request.since))
    )


async def no_changes(
    conn: Connection, request: SyncRequest, memory: SyncMemory
) -> tuple[Sync, ChangeSnapshot] | None:
    """Return an empty response, by one statement without a transaction, and the snapshot.

    None: there may be changes.
    """
    snapshot = await memory.positions_only(conn, request.user_id)
    if snapshot is None:
        return None
    upto = snapshot.token
    token = (request.since or SyncToken()).bound(upto.positions())
    since = events_of(token)
    if since.min < snapshot.purged_upto or request.include.has_changed(token, upto):
        return None
    if since == events_of(upto) or snapshot.candidates(since) == []:
        return Sync(request.next_batch(upto)), snapshot
    return None


def is_timeline_only(request: SyncRequest, memory: SyncMemory) -> bool:
    """Return whether only timelines have new events, as far as this process has followed.

    Then try `timeline_only`.
    """
    if request.since is None or request.full_state or request.filter.lazy_load_members:
        return False
    if "unread" in request.include.parts:
        return False
    return not memory.has_state(request.user_id, events_of(request.since))


async def timeline_only(
    conn: Connection, request: SyncRequest, memory: SyncMemory
) -> tuple[Sync, ChangeSnapshot] | None:
    """Return a response with timelines alone, and the snapshot, by one statement.

    It takes no transaction. The statement reads the rooms that have changed as far as this process
    has followed, and the positions of the streams. None: these are further than that, or there is
    state to return, or the caches do not reach back so far.
    """
    seen = memory.seen_positions(request.user_id)
    upto, since = seen.upto, events_of(request.since or SyncToken()).meet(seen.upto)
    room_nids = seen.candidates(since)
    if room_nids is None:
        return None
    limit, rows_max = request.timeline_limit, request.rows_max
    sync_range = SyncRange(
        since,
        upto,
        limit,
        ignored=request.ignored,
        room_nids=room_nids,
        filter=request.filter,
        rows_max=rows_max,
    )
    changed, writers = await rooms_and_writers(conn, request.user_id, sync_range)
    snapshot = seen.confirmed(writers)
    if (
        snapshot is None
        or events_of(snapshot.token) != upto
        or since.min < snapshot.purged_upto
        or snapshot.candidates(since) != room_nids
        or request.include.has_changed(request.since or SyncToken(), snapshot.token)
    ):
        return None
    if any(room.row.whole or room.row.has_state or room.row.membership != JOIN for room in changed):
        return None
    return await _fill(conn, request, changed, Sync(request.next_batch(snapshot.token))), snapshot


def _refuse_purged(request: SyncRequest, purged_upto: int) -> None:
    """Raise `ResyncNeeded` for a token from before the purged events."""
    token = request.token
    if token is not None and events_of(token).min < purged_upto:
        raise ResyncNeeded(
            token.print(request.deployment), "what happened since then is not kept any more"
        )


def _next_rooms(upto: SyncToken, last: ChangedRoom) -> RoomsToken:
    return RoomsToken(upto, last.row.activity or 0, last.row.room_nid)


async def _fill(
    conn: Connection, request: SyncRequest, changed: list[ChangedRoom], response: Sync
) -> Sync:
    """Add the rooms with their states to the response."""
    shown = [room for room in changed if room.row.membership in (INVITE, KNOCK)]
    inside = [room for room in changed if room.row.membership not in (INVITE, KNOCK)]
    members = _members(inside, request) if request.filter.lazy_load_members else None
    state_requests = [
        _state_request(room, request.timeline_limit) async for room in in_turns(inside)
    ]
    outside = [SyncedUser(_of(room), room.row.member_nid) async for room in in_turns(shown)] + [
        SyncedUser(_of(room), room.row.member_nid, room.row.member_key_nid)
        for room in filter(_may_have_ended, inside)
    ]
    state_of = await states(
        conn,
        request.user_id,
        state_requests,
        members=members,
        picked=request.filter.state,
        shown=outside,
    )
    later: dict[int, set[StateKey]] = defaultdict(set)
    shown_keys = [
        key
        async for room in in_turns(inside)
        for key in _unchanged_keys(room, state_of[room.row.room_nid], request.timeline_limit)
    ]
    for row in await later_values(conn, shown_keys):
        later[row.room_nid].add((row.type, row.state_key))
    async for room in in_turns(inside):
        room_id = room.row.room_id
        joined_room = _room(room, state_of[room.row.room_nid], request, later[room.row.room_nid])
        if room.row.membership != JOIN:
            _add_end(joined_room.timeline, state_of[room.row.room_nid])
            response.leave[room_id] = LeftRoom(
                joined_room.timeline,
                joined_room.state,
                joined_room.state_after,
                joined_room.state_removed,
            )
        elif (
            room.row.whole
            or joined_room.timeline.events
            or joined_room.timeline.limited
            or joined_room.state_after
            or joined_room.state
            or joined_room.state_removed
            or joined_room.summary
        ):
            response.join[room_id] = joined_room
    async for room in in_turns(shown):
        state = state_of[room.row.room_nid]
        events = stripped(state.shown, next(iter(state.own), None), state.brought)
        if room.row.membership == INVITE:
            response.invite[room.row.room_id] = InvitedRoom(events)
        else:
            response.knock[room.row.room_id] = KnockedRoom(events)
    return response


def _may_have_ended(room: ChangedRoom) -> bool:
    """Return whether this may be an invite or a knock that ended out of band."""
    return (
        room.row.membership != JOIN
        and not room.row.was_joined
        and not room.events
        and room.row.member_nid != 0
    )


def _add_end(timeline: Timeline, state: RoomState) -> None:
    """Add the event that ended an invite or a knock out of band.

    It is in no timeline. The user gets it as the last event of one.
    """
    timeline.events.extend(event for event in state.own if event.outlier)


def _members(rooms: Iterable[ChangedRoom], request: SyncRequest) -> list[tuple[int, str]]:
    """Return pairs of a room and a user whose membership is part of the response.

    These are the senders of the timeline, those whose membership it changes, and the user: once,
    with the whole room.
    """
    members: dict[tuple[int, str], None] = {}
    is_repeated = request.filter.include_redundant_members
    for room in rooms:
        users: list[str] = [request.user_id]
        if room.row.was_joined:
            for event in _latest(room, request.timeline_limit):
                users.append(event.sender)
                if event.type == MEMBER and event.state_key is not None:
                    users.append(event.state_key)
        is_new = is_repeated or room.row.whole or not room.row.was_joined
        for user in users:
            if is_new or user != request.user_id:
                members[room.row.room_nid, user] = None
    return list(members)


def _state_request(room: ChangedRoom, timeline_limit: int) -> StateRequest:
    """Return the state to read.

    A user who was not in the room since the last sync gets their own membership only.
    """
    row = room.row
    only = None if row.was_joined else row.member_key_nid
    timeline = _latest(room, timeline_limit)
    start, has_first = _start(room, timeline), bool(timeline)
    return StateRequest(
        _of(room),
        row.whole,
        only,
        row.lower,
        start + 1 if has_first else start,
        row.upper,
        row.membership == JOIN,
        has_first,
        row.has_state,
    )


def _of(room: ChangedRoom) -> SyncedRoom:
    return SyncedRoom(room.row.room_nid, room.row.room_id, room.row.room_version)


def _start(room: ChangedRoom, timeline: Sequence[StoredEvent]) -> int:
    """Return the stream ordering just before the timeline, or the end of an empty one."""
    return (timeline[0].stream_ordering or 0) - 1 if timeline else room.row.upper


def _unchanged_keys(room: ChangedRoom, state: RoomState, limit: int) -> Iterator[ShownKey]:
    """Yield the keys of the timeline of which the state that was read has no value."""
    last = {
        (event.type, event.state_key): event.stream_ordering or 0
        for event in _latest(room, limit)
        if event.state_key is not None
    }
    if last:
        # no content is read of what came before the timeline: that may be a large state
        first = min(last.values())
        read = {
            (event.type, event.state_key)
            for event in itertools.chain(state.throughout, state.at_end)
            if (event.stream_ordering or 0) >= first
        }
        for key in last.keys() - read:
            yield ShownKey(room.row.room_nid, *key, last[key], room.row.upper)


def _room(
    room: ChangedRoom, state: RoomState, request: SyncRequest, later: Collection[StateKey]
) -> JoinedRoom:
    events = _latest(room, request.timeline_limit)
    start = _seen_before(events, [*state.throughout, *state.at_end], later)
    shown = events[start:]
    before = PaginationToken(SYNC_CURSOR_TOPOLOGICAL, 0, live=_start(room, shown)).print(
        request.deployment
    )
    is_visit = room.is_visit and request.since is not None
    limited = room.cut or len(room.events) > len(shown) or is_visit
    return JoinedRoom(
        Timeline(shown, limited, before),
        [*state.throughout, *_leading_to(shown, state)],
        [*state.throughout, *state.at_end],
        state.removed,
        next(iter(state.summary), None),
    )


def _latest(room: ChangedRoom, limit: int) -> list[StoredEvent]:
    return room.events[-limit:] if limit else []


def _seen_before(
    events: Sequence[StoredEvent], at_end: Sequence[StoredEvent], later: Collection[StateKey]
) -> int:
    """Return how many of these events come before the timeline.

    A key may change while the user is away, after a change that is in the timeline. A client would
    keep that one. So the timeline begins after it. The later change may be older in the graph, and
    the value at the start as well. ``later``: keys with such a value that is not in ``at_end``.
    """
    first = min((event.stream_ordering or 0 for event in events), default=0)
    # no content is read of what came before the timeline: that may be a large state
    changed = [event for event in at_end if (event.stream_ordering or 0) > first]
    if not (events and (changed or later)):
        return 0
    end_positions = {(event.type, event.state_key): event.stream_ordering or 0 for event in changed}
    indexes = {(event.type, event.state_key): index for index, event in enumerate(events)}
    outdated = (
        index + 1
        for key, index in indexes.items()
        if key in later or end_positions.get(key, 0) > (events[index].stream_ordering or 0)
    )
    return max(outdated, default=0)


def _leading_to(timeline: Iterable[StoredEvent], state: RoomState) -> list[StoredEvent]:
    """Return the values at the start, or the last ones of keys of which it has no event."""
    if not (state.at_start or state.at_end):
        return []
    shown = {(event.type, event.state_key) for event in timeline}
    return [event for event in state.at_start if (event.type, event.state_key) in shown] + [
        event for event in state.at_end if (event.type, event.state_key) not in shown
    ]
