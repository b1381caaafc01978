"""The chosen rooms of a response: their timelines and states, and what the client has then."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.ids import RoomId, UserId
from storage.queries.events import StoredEvent
from storage.queries.sliding.choice import Choice
from storage.queries.sliding.connection import ClientRoom
from storage.queries.sliding.read_room import ReadRoom
from storage.queries.sliding.required_state import (
    ALL_MEMBERS,
    LAZY_MEMBERS,
    MEMBER,
    NO_PAIRS,
    Pairs,
    Patterns,
    Required,
    beyond,
)
from storage.queries.sliding.room_state import RequiredRequest, SlidingState, sliding_states
from storage.queries.sliding.show_room import show_inside, show_outside
from storage.queries.sliding.situation import Situation
from storage.queries.sliding.timelines import TimelineRequest, timelines
from storage.queries.sliding.types import SlidingRoom
from storage.queries.sync.state import SyncedUser
from storage.turns import in_turns

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


async def read_rooms(conn: Connection, situation: Situation, choice: Choice) -> ReadRooms:
    """Return the chosen rooms, by two statements."""
    request, sent, since = situation.request, situation.sent, situation.since
    asked = [one async for one in in_turns(_timeline_requests(situation, choice))]
    found = {}
    if asked:
        rows_max = max(request.rows_max, 2)
        found = await timelines(
            conn, request.user_id, asked, since, ignored=request.ignored or (), rows_max=rows_max
        )
    rooms = [
        ReadRoom(choice.wanted[nid], reason, sent.get(nid), found[nid])
        async for nid, reason in in_turns(choice.reasons.items())
        if nid in found
    ]
    states = await _states(conn, request.user_id, rooms)
    result = ReadRooms()
    async for room in in_turns(rooms):
        _add(result, situation, room, states.get(room.room.room_nid))
    for listed in choice.left_behind:
        position = found[listed.room_nid].row.reached if listed.room_nid in found else None
        upto = (0 if since is None else since.furthest()) if position is None else position
        if listed.activity > upto:
            result.changes[listed.room_nid] = sent[listed.room_nid]._replace(sent_upto=upto)
    return result


def _timeline_requests(situation: Situation, choice: Choice) -> Iterator[TimelineRequest]:
    """Yield the chosen rooms; of rooms left behind the position, where the token has several."""
    for nid, reason in choice.reasons.items():
        room, known = choice.wanted[nid], situation.sent.get(nid)
        upto = None if known is None else known.sent_upto
        expands = reason.expands and not reason.is_new
        limit = room.timeline_limit
        yield TimelineRequest(nid, upto, room.is_inside, reason.is_new, expands, limit)
    since = situation.since
    if since is not None and since.min < since.furthest():
        for listed in choice.left_behind:
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
    if room.known is None or room.is_new:
        return _Difference(NO_PAIRS, NO_PAIRS)
    return _Difference(room.reason.grown, beyond(room.known.required, room.wanted.required))


async def _states(
    conn: Connection, user_id: UserId, rooms: list[ReadRoom]
) -> dict[int, SlidingState]:
    patterns = Patterns(user_id)
    requested: list[RequiredRequest] = []
    members: list[tuple[int, str]] = []
    async for room in in_turns(rooms):
        if not room.is_inside or not room.timeline.row.is_state_shown:
            continue
        lazy = LAZY_MEMBERS in room.wanted.required.included
        found = list(_members(room)) if lazy else []
        grown, dropped = _difference(room)
        has_changed = room.timeline.row.has_state or room.has_own_state
        if room.is_new or has_changed or grown or found:
            requested.append(_state_request(room, patterns, grown, dropped))
            members.extend(found)
    outside = [
        SyncedUser(room.room, room.timeline.row.member_nid)
        async for room in in_turns(rooms)
        if not room.is_inside and room.is_shown_outside and room.timeline.row.member_nid
    ]
    found_states = await sliding_states(
        conn, user_id, requested, members=members, patterns=patterns, shown=outside
    )
    async for room in in_turns(rooms):
        if room.wanted.required.excluded and (state := found_states.get(room.room.room_nid)):
            _exclude(room, state, user_id)
    return found_states


def _exclude(room: ReadRoom, state: SlidingState, user_id: UserId) -> None:
    """Leave out the excluded state, but for members that are loaded lazily.

    Removed keys stay: the client may have them from before it excluded them.
    """
    wanted = room.wanted.required
    lazy = LAZY_MEMBERS in wanted.included
    everyone = lazy and not room.limited and not room.is_new
    people = {user for _, user in _members(room)} if lazy else set()

    def is_excluded(event: StoredEvent) -> bool:
        key = event.state_key or ""
        is_lazy = event.type == MEMBER and (everyone or key in people)
        return not is_lazy and wanted.excludes((event.type, key), user_id)

    kept = [event for event in state.required if not is_excluded(event)]
    state.has_dropped |= len(kept) < len(state.required)
    state.required = kept


def _state_request(
    room: ReadRoom, patterns: Patterns, grown: Pairs, dropped: Pairs
) -> RequiredRequest:
    row, wanted = room.timeline.row, room.wanted.required
    return RequiredRequest(
        room.room,
        room.is_new,
        row.lower,
        row.state_upper,
        row.own_upper,
        row.membership == JOIN,
        patterns.number(wanted.explicit),
        patterns.number(grown),
        patterns.number(dropped),
        LAZY_MEMBERS in wanted.included and not room.limited,
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
    result: ReadRooms, situation: Situation, room: ReadRoom, state: SlidingState | None
) -> None:
    """Add a room to the response, and what the client has then."""
    nid, request = room.room.room_nid, situation.request
    is_direct = room.room.room_id in situation.direct
    if room.is_reset:
        state = state or SlidingState(room.room)
        state.remove((MEMBER, request.user_id))
    if room.is_inside:
        is_first = situation.since is None
        shown = show_inside(room, state, request.deployment, is_direct=is_direct, is_first=is_first)
    else:
        shown = show_outside(room, state, request.ignored or (), is_direct=is_direct)
    if shown is not None:
        result.shown[room.room.room_id] = shown
        if room.is_new:
            result.whole.add(nid)
    elif room.reason.is_new:
        return
    after = _sent(room, state, is_direct=is_direct)
    if after != room.known:
        result.changes[nid] = after


def _sent(room: ReadRoom, state: SlidingState | None, is_direct: bool) -> ClientRoom:
    """Return what the client has of the room with the response."""
    known, wanted = room.known, room.wanted
    if known is None or room.is_new:
        limit = _coverage(room) if room.is_inside else ALL_EVENTS
        return ClientRoom(None, None, None, limit, wanted.required, is_direct)
    if room.has_gap or (room.reason.expands and room.is_inside):
        limit = _coverage(room)
    else:
        limit = known.timeline_limit
    required = known.required
    if (state is not None and state.has_dropped) or _forgets_members(room, known):
        required = wanted.required
    elif room.reason.grown:
        required = _with_known(room, known)
    return ClientRoom(
        None, known.receipts_upto, known.account_data_upto, limit, required, is_direct
    )


def _with_known(room: ReadRoom, known: ClientRoom) -> Required:
    """Return the state that the client has after more was sent."""
    wanted = room.wanted.required
    both = known.required.included | wanted.included | room.reason.grown
    has_excluded = known.required.excluded or wanted.excluded
    return wanted if has_excluded or len(both) > REQUIRED_UNION_MAX else Required(both)


def _forgets_members(room: ReadRoom, known: ClientRoom) -> bool:
    """Return whether the client forgets members that it wanted before.

    With ``$LAZY`` it does, where the timeline is limited.
    """
    wanted = room.wanted.required.included
    forgets = room.limited and LAZY_MEMBERS in wanted and ALL_MEMBERS not in wanted
    return forgets and ALL_MEMBERS in known.required.explicit


def _coverage(room: ReadRoom) -> int:
    return min(room.wanted.timeline_limit, ALL_EVENTS) if room.limited else ALL_EVENTS
