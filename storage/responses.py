"""The JSON of the client-server API for what the store returns: /sync, sliding sync, rooms, errors.

`store.client_events` makes the form of events. The functions here make the responses around it, and
read all events of a response at once. `room_state` and `hierarchy` are the only ones that read more
than they are given.

Sliding sync (MSC4186) has two forms. Most clients use the unstable one, at
``/_matrix/client/unstable/org.matrix.simplified_msc3575/sync``. The stable one is at
``/_matrix/client/v4/sync``. `sliding_request` reads both.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, Final, TypeVar

import orjson

from storage import arguments as args
from storage.errors import (
    AuthDenied,
    InputError,
    InvalidEvent,
    InvalidSignature,
    PartialState,
    ResyncNeeded,
    StateUnknown,
    StorageError,
    UnknownEvent,
    UnknownPos,
    UnknownRoom,
    UnknownUser,
)
from storage.federation import IncompatibleRoomVersion, RemoteError
from storage.ids import EventId, RoomId, StateKey
from storage.queries.events import StoredEvent
from storage.queries.room_info import RoomInfo
from storage.queries.sliding.types import (
    RoomSubscription,
    SlidingFilter,
    SlidingList,
    SlidingRoom,
    SlidingSync,
    SlidingSyncRequest,
)
from storage.queries.space_walk import SpaceChild, WalkRequest, space_walk
from storage.queries.sync.types import JoinedRoom, Sync
from storage.store.facade import Store
from storage.streams import VectorPosition
from storage.streams.receipts import receipt_events
from storage.streams.tokens import print_position, read_position
from storage.turns import in_turns

__all__ = [
    "error",
    "hierarchy",
    "hierarchy_room",
    "received_upto",
    "room_state",
    "room_summary",
    "sliding_request",
    "sliding_sync",
    "sync",
]

Json = dict[str, Any]
T = TypeVar("T")
Shown = Mapping[tuple[str, bool], Json]
"""Events in the form for clients, by id and whether as state: that of an erased sender is whole."""

ERRORS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (AuthDenied, 403, "M_FORBIDDEN"),
    (UnknownRoom, 404, "M_NOT_FOUND"),
    (UnknownEvent, 404, "M_NOT_FOUND"),
    (UnknownUser, 404, "M_NOT_FOUND"),
    (StateUnknown, 404, "M_NOT_FOUND"),
    (ResyncNeeded, 400, "M_UNKNOWN_POS"),
    (UnknownPos, 400, "M_UNKNOWN_POS"),
    (InvalidSignature, 401, "M_UNAUTHORIZED"),
    (PartialState, 503, "M_UNKNOWN"),
    (IncompatibleRoomVersion, 400, "M_INCOMPATIBLE_ROOM_VERSION"),
    (InvalidEvent, 400, "M_BAD_JSON"),
    (InputError, 400, "M_INVALID_PARAM"),
    (StorageError, 503, "M_UNKNOWN"),
)
"""The status and the errcode of each error. The first class that fits is used."""

RULES: Final = {
    "member.join.cannot_check": (400, "M_UNABLE_TO_AUTHORISE_JOIN"),
    "member.join.no_authoriser": (400, "M_UNABLE_TO_GRANT_JOIN"),
    "power_levels.malformed": (400, "M_BAD_JSON"),
    "power_levels.users": (400, "M_BAD_JSON"),
}
"""Another server may let the user in ("Restricted rooms"), or a level is none."""
PASSED_ON: Final = frozenset({400, 403, 404})
"""Statuses of other servers that concern the user. 401, for one, would log the client out."""

HIERARCHY_MAX: Final = 50
"""Rooms of one page of a hierarchy, and its depth without `max_depth`."""

EXTENSIONS: Final = ("to_device", "account_data", "receipts")
MALFORMED: Final = (AttributeError, KeyError, TypeError, ValueError)
EXPECTED_SHAPE: Final = "lists, room_subscriptions, extensions and each extension are objects"
NUMBER: Final[re.Pattern[str]] = re.compile("[0-9]{1,18}")
"""A number in a token: how many rooms of a hierarchy are before a page."""
ALWAYS: Final = ("initial", "limited", "num_live")
IF_PRESENT: Final = (
    "membership",
    "is_dm",
    "prev_batch",
    "bump_stamp",
    "joined_count",
    "invited_count",
    "stripped_state",
)
OLD_NAMES: Final = {
    "stripped_state": "invite_state",
    "expanded_timeline": "unstable_expanded_timeline",
}
"""Fields of a room in the stable form of sliding sync, and their names in the unstable one."""


async def sync(
    store: Store,
    user_id: str,
    found: Sync,
    *,
    device_id: str | None = None,
    use_state_after: bool = False,
    unread_thread_notifications: bool | None = None,
) -> Json:
    """Return the response of /sync.

    ``found`` is what ``store.sync`` returned for the user. The parts that it does not include are
    empty. ``use_state_after`` is the parameter of the request (MSC4222): a room has ``state_after``
    in place of ``state``. Unread events count as notifications, as without push rules.
    ``unread_thread_notifications`` (by default as in the filter) gives threads counts of their own.
    """
    threads = unread_thread_notifications
    by_thread = (
        found.unread_thread_notifications if threads is None else args.flag(threads, "threads")
    )
    state_name = "state_after" if use_state_after else "state"
    rooms: list[JoinedRoom] = [*found.join.values(), *found.leave.values()]
    events = await _shown(
        store,
        user_id,
        chain.from_iterable(room.timeline.events for room in rooms),
        chain.from_iterable(getattr(room, state_name) for room in rooms),
        device_id,
        ignored=found.ignored,
    )
    parts: dict[str, Json] = {
        name: {
            room: _room(joined_room, events, state_name, by_thread=by_thread)
            async for room, joined_room in in_turns(listed.items())
        }
        for name, listed in (("join", found.join), ("leave", found.leave))
    }
    parts["invite"] = {
        room: {"invite_state": _events(invited.invite_state)}
        async for room, invited in in_turns(found.invite.items())
    }
    parts["knock"] = {
        room: {"knock_state": _events(knocked.knock_state)}
        async for room, knocked in in_turns(found.knock.items())
    }
    return {
        "next_batch": found.next_batch,
        "rooms": parts,
        "account_data": _events(_account_data(found.account_data)),
        "to_device": _events(found.to_device),
    }


def _room(room: JoinedRoom, events: Shown, state_name: str, *, by_thread: bool) -> Json:
    timeline: Json = {"limited": room.timeline.limited, "prev_batch": room.timeline.prev_batch}
    timeline |= _events(_pick(events, room.timeline.events))
    for event in () if room.timeline.limited else timeline["events"]:
        event["unsigned"].pop("m.relations", None)  # the client gets what relates to it as events
    body: Json = {
        "timeline": timeline,
        state_name: _events(_pick(events, getattr(room, state_name), as_state=True)),
        "account_data": _events(_account_data(room.account_data)),
        "ephemeral": _events(receipt_events(room.receipts)),
    }
    if room.summary is not None:
        body["summary"] = {
            "m.joined_member_count": room.summary.joined_count,
            "m.invited_member_count": room.summary.invited_count,
        }
        if room.summary.heroes is not None:
            body["summary"]["m.heroes"] = list(room.summary.heroes)
    if room.unread is not None:
        count = room.unread.main if by_thread else room.unread.total
        body["unread_notifications"] = _notifications(count)
        if by_thread:
            threads = {root: _notifications(count) for root, count in room.unread.threads.items()}
            body["unread_thread_notifications"] = threads
    return body


def _notifications(count: int) -> Json:
    return {"notification_count": count, "highlight_count": 0}


# ------------------------------------------------------------------------------------------------
# sliding sync


def sliding_request(body: Json) -> SlidingSyncRequest:
    """Return the request of a body in either form. `InputError`.

    Fields that neither form has are ignored.
    """
    try:
        rooms, extensions = body.get("room_subscriptions", {}), body.get("extensions", {})
        lists = body.get("lists", {}).items()
        return SlidingSyncRequest(
            conn_id=body.get("conn_id", ""),
            lists={name: _part(f"the list {name!r}", config, _list) for name, config in lists},
            room_subscriptions={
                room: RoomSubscription(
                    **_part(f"the subscription of {room!r}", config, _room_config)
                )
                for room, config in rooms.items()
            },
            extensions=[
                extension
                for extension in EXTENSIONS
                if extensions.get(extension, {}).get("enabled")
            ],
        )
    except InputError:
        raise
    except MALFORMED as error:
        raise InputError(f"{EXPECTED_SHAPE}, not {str(body)[:200]}") from error


def received_upto(body: Json) -> int | VectorPosition:
    """Return the position up to which the device has its messages, or 0. `InputError`.

    It is the ``since`` of the extension to_device. Delete the messages up to there, before you
    request a response: ``await store.to_device.delete(user_id, device_id, position)``. With several
    writers it is exact for each of them.
    """
    try:
        since = body.get("extensions", {}).get("to_device", {}).get("since")
    except MALFORMED as error:
        raise InputError(f"{EXPECTED_SHAPE}, not {str(body)[:200]}") from error
    position = VectorPosition() if since is None else read_position(since)
    return position if position.items else position.min


def _part(name: str, part: Json, read: Callable[[Json], T]) -> T:
    """Return what is read of a part of a request. `InputError` with its name."""
    try:
        return read(part)
    except InputError:
        raise
    except MALFORMED as error:
        raise InputError(f"{name} is malformed: {str(part)[:200]}") from error


def _list(part: Json) -> SlidingList:
    ranges = [part["range"]] if "range" in part else part.get("ranges")
    filters = dict(part.get("filters") or {})
    if "is_invite" in filters:  # of the unstable form
        filters["is_invited"] = filters.pop("is_invite")
    fields = {name: value for name, value in filters.items() if name in SlidingFilter.__slots__}
    pairs = None if ranges is None else [(first, last) for first, last in ranges]
    return SlidingList(ranges=pairs, filters=SlidingFilter(**fields), **_room_config(part))


def _room_config(part: Json) -> Json:
    state = part.get("required_state", ())
    required: list[StateKey]
    excluded: list[StateKey] = []
    if isinstance(state, dict):  # the stable form
        required = _elements(state.get("include", ()))
        excluded = _elements(state.get("exclude", ()))
        if state.get("lazy_members", False):
            required.append(("m.room.member", "$LAZY"))
    else:
        required = [(kind, key) for kind, key in state]
    limit = {"timeline_limit": part["timeline_limit"]} if "timeline_limit" in part else {}
    return {"required_state": required, "excluded_state": excluded, **limit}


def _elements(elements: Iterable[Json]) -> list[StateKey]:
    return [(element.get("type", "*"), element.get("state_key", "*")) for element in elements]


async def sliding_sync(
    store: Store,
    user_id: str,
    request: SlidingSyncRequest,
    found: SlidingSync,
    *,
    device_id: str | None = None,
    unstable: bool = False,
) -> Json:
    """Return the response of a sliding sync. ``unstable``: in the unstable form.

    The unstable form has no stubs of removed state.
    """
    events = await _shown(
        store,
        user_id,
        chain.from_iterable(room.timeline for room in found.rooms.values()),
        chain.from_iterable(room.required_state for room in found.rooms.values()),
        device_id,
        ignored=found.ignored,
    )
    extensions = _extensions(store, found)
    formatted = _unstable_room if unstable else _sliding_room
    return {
        "pos": found.pos,
        "lists": {name: {"count": listed.count} for name, listed in found.lists.items()},
        "rooms": {
            room: formatted(listed, events) async for room, listed in in_turns(found.rooms.items())
        },
        "extensions": {name: extensions[name] for name in sorted(request.extensions)},
    }


def _sliding_room(room: SlidingRoom, events: Shown) -> Json:
    body: Json = {name: getattr(room, name) for name in ALWAYS}
    for name in IF_PRESENT:
        if getattr(room, name) is not None:
            body[name] = getattr(room, name)
    for name in ("name", "avatar"):
        if name in room.changed:
            body[name] = getattr(room, name)
    if room.expanded_timeline:
        body["expanded_timeline"] = True
    if room.lists:
        body["lists"] = list(room.lists)
    if room.heroes is not None:
        body["heroes"] = [
            {key: value for key, value in asdict(hero).items() if value is not None}
            for hero in room.heroes
        ]
    removed = [{"type": kind, "state_key": key} for kind, key in room.removed_state]
    body["required_state"] = _pick(events, room.required_state, as_state=True) + removed
    body["timeline"] = _pick(events, room.timeline)
    if room.unread is not None:
        body |= _notifications(room.unread.main)
    return body


def _unstable_room(room: SlidingRoom, events: Shown) -> Json:
    body = _sliding_room(room, events)
    body["required_state"] = _pick(events, room.required_state, as_state=True)
    return {OLD_NAMES.get(name, name): value for name, value in body.items()}


def _extensions(store: Store, response: SlidingSync) -> Json:
    everywhere: list[Json] = []
    rooms: dict[str, list[Json]] = {}
    for row in response.account_data:
        listed = everywhere if row.room_id is None else rooms.setdefault(row.room_id, [])
        listed.append({"type": row.type, "content": orjson.loads(row.content)})
    messages = [orjson.loads(message.content) for message in response.to_device]
    receipts = {room: receipt_events(rows)[0] for room, rows in response.receipts.items() if rows}
    reached = store.positions_of(response.pos)["to_device"] if messages else VectorPosition()
    return {
        "to_device": {"next_batch": print_position(reached), "events": messages},
        "account_data": {"global": everywhere, "rooms": rooms},
        "receipts": {"rooms": receipts},
    }


# ------------------------------------------------------------------------------------------------
# rooms


def room_summary(room: RoomInfo) -> Json:
    """Return the entry of a room in the directory, and in the hierarchy of a space."""
    fields = {
        "room_id": room.room_id,
        "name": room.name,
        "topic": room.topic,
        "avatar_url": room.avatar,
        "canonical_alias": room.alias,
        "room_type": room.type,
        "join_rule": room.join_rule or "invite",  # clients take a room without one for public
        "allowed_room_ids": list(room.allowed_rooms) or None,
        "num_joined_members": room.joined_count,
        "world_readable": room.visibility == "world_readable",
        "guest_can_join": room.guest_access == "can_join",
    }
    return {name: value for name, value in fields.items() if value is not None}


def hierarchy_room(room: RoomInfo, children: Iterable[SpaceChild]) -> Json:
    """Return the entry of a room in the hierarchy of a space, with the state of its children."""
    keys = ("type", "state_key", "sender", "content", "origin_server_ts")
    listed = [{key: child.event.json[key] for key in keys} for child in children]
    return {**room_summary(room), "room_version": room.version, "children_state": listed}


async def room_state(store: Store, user_id: str, room_id: RoomId) -> dict[StateKey, EventId]:
    """Return the state of a room that a user may read: the current one, or that of their leave.

    Use it for /state and /members. The current one is for its members, for everybody where the
    history is world-readable, and for invited users where it is visible to them. After a leave or a
    ban it is the state then; a later invite or ban shows no more. `AuthDenied` for other users who
    were never in the room, or who have forgotten it.
    """
    if await store.membership(room_id, user_id) == "join":
        return await store.current_state(room_id)
    left = await store.state_at_leave(user_id, room_id)
    state = {(event.type, event.state_key or ""): event.event_id for event in left}
    if ("m.room.create", "") in state:  # a rejected invite and a ban may come without it
        return state
    state = await store.current_state(room_id)
    if not await _is_visible(store, user_id, state):
        raise AuthDenied(f"{user_id} was never in {room_id}", rule="request.not_in_room")
    return state


async def _is_visible(store: Store, user_id: str, state: Mapping[StateKey, EventId]) -> bool:
    """Return whether a user who is not joined may see a room in this state.

    Client-server API, "Room history visibility".
    """
    keys = ("m.room.history_visibility", ""), ("m.room.member", user_id)
    events = await store.events([state[key] for key in keys if key in state])
    visibility, own = (events[state[key]].content if key in state else {} for key in keys)
    visibility_name, invited = (
        visibility.get("history_visibility"),
        own.get("membership") == "invite",
    )
    return visibility_name == "world_readable" or (visibility_name == "invited" and invited)


async def hierarchy(
    store: Store,
    user_id: str,
    room_id: RoomId,
    *,
    from_: str | None = None,
    limit: int = HIERARCHY_MAX,
    max_depth: int = HIERARCHY_MAX,
    suggested_only: bool = False,
) -> Json:
    """Return the response of /hierarchy: the rooms of a space, depth first.

    It has the rooms that the user is joined or invited to, and those that they may enter or read.
    ``from_`` is the ``next_batch`` of the page before. `AuthDenied` for a hidden space.
    """
    start, depth_max = _offset(from_), args.whole(max_depth, "max_depth")
    if args.limit(limit, HIERARCHY_MAX) == 0:
        raise InputError("limit 0: at least 1 is wanted")
    end = start + min(limit, HIERARCHY_MAX)
    own = await store.memberships_of(user_id, ("join", "invite"))
    request = WalkRequest(args.room(room_id), own, end + 1, depth_max, suggested_only)
    space_rooms = await store.reads.run(lambda conn: space_walk(conn, request))
    if not space_rooms:
        raise AuthDenied(f"{room_id} is not visible to {user_id}", rule="request.hidden_room")
    page = [hierarchy_room(*space_room) async for space_room in in_turns(space_rooms[start:end])]
    return {"rooms": page} | ({"next_batch": str(end)} if space_rooms[end:] else {})


def _offset(token: str | None) -> int:
    if token is None:
        return 0
    if not args.is_text(token) or NUMBER.fullmatch(token) is None:
        raise InputError(f"from {str(token)[:99]!r} is no token of a hierarchy")
    return int(token)


# ------------------------------------------------------------------------------------------------
# errors


def error(raised: StorageError | RemoteError, *, for_member: bool = False) -> tuple[int, Json]:
    """Return the status and the JSON object for an error of a store or of another server.

    The responses to clients and to other servers have the same form. An error of another server is
    502, unless its response was 400, 403 or 404. ``for_member``: the client's request is for the
    members of a room, so that an unknown room is 403, as any other that the user is not in.

    Source: client-server API, "Standard error response".
    """
    if isinstance(raised, RemoteError):
        if raised.status not in PASSED_ON:
            return 502, _error("M_UNKNOWN", raised)
        body = _error(raised.errcode or "M_UNKNOWN", raised)
        named = {} if raised.room_version is None else {"room_version": raised.room_version}
        return raised.status, body | named
    status_and_code = RULES.get(raised.rule) if isinstance(raised, AuthDenied) else None
    if isinstance(raised, InvalidEvent) and raised.kind == "too_large":
        status_and_code = 413, "M_TOO_LARGE"
    elif for_member and isinstance(raised, UnknownRoom):
        status_and_code = 403, "M_FORBIDDEN"
    status, errcode = status_and_code or next(
        rule[1:] for rule in ERRORS if isinstance(raised, rule[0])
    )
    body = _error(errcode, raised)
    if isinstance(raised, IncompatibleRoomVersion):
        body["room_version"] = raised.room_version
    return status, body


def _error(errcode: str, raised: Exception) -> Json:
    return {"errcode": errcode, "error": str(raised)}


# ------------------------------------------------------------------------------------------------
# parts


async def _shown(
    store: Store,
    user_id: str,
    events: Iterable[StoredEvent],
    state: Iterable[StoredEvent],
    device_id: str | None,
    *,
    ignored: args.Ignored,
) -> Shown:
    as_state = await store.client_events(user_id, state, as_state=True, with_room_id=False)
    how: Json = {"device_id": device_id, "ignored": ignored, "with_room_id": False}
    formatted = await store.client_events(user_id, events, **how)
    shown: dict[tuple[str, bool], Json] = {}
    for listed, is_state in ((as_state, True), (formatted, False)):
        async for event in in_turns(listed):
            shown[event["event_id"], is_state] = event
    return shown


def _pick(shown: Shown, events: Iterable[StoredEvent], *, as_state: bool = False) -> list[Json]:
    keys = ((event.event_id, as_state) for event in events)
    return [shown[key] for key in keys if key in shown]


def _events(events: Sequence[Json]) -> Json:
    return {"events": list(events)}


def _account_data(contents: Mapping[str, Json]) -> list[Json]:
    return [{"type": kind, "content": content} for kind, content in contents.items()]
