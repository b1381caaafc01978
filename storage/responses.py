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
WANTED: Final = "lists, room_subscriptions, extensions and each extension are objects"
NUMBER: Final[re.Pattern[str]] = re.compile("[0-9]{1,18}")
"""A number in a token: how many rooms of a hierarchy are before a page."""
ALWAYS: Final = ("initial", "limited", "num_live")
IF_KNOWN: Final = (
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
    option = unread_thread_notifications
    by_thread = (
        found.unread_thread_notifications if option is None else args.flag(option, "threads")
    )
    state_name = "state_after" if use_state_after else "state"
    rooms: list[JoinedRoom] = [*found.join.values(), *found.leave.values()]
    events = await _shown(
        store,
        user_id,
        chain.from_iterable(one.timeline.events for one in rooms),
        chain.from_iterable(getattr(one, state_name) for one in rooms),
        device_id,
        ignored=found.ignored,
    )
    parts: dict[str, Json] = {
        name: {
            room: _room(one, events, state_name, by_thread=by_thread)
            async for room, one in in_turns(listed.items())
        }
        for name, listed in (("join", found.join), ("leave", found.leave))
    }
    parts["invite"] = {
        room: {"invite_state": _events(one.invite_state)}
        async for room, one in in_turns(found.invite.items())
    }
    parts["knock"] = {
        room: {"knock_state": _events(one.knock_state)}
        async for room, one in in_turns(found.knock.items())
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
    form: Json = {
        "timeline": timeline,
        state_name: _events(_pick(events, getattr(room, state_name), as_state=True)),
        "account_data": _events(_account_data(room.account_data)),
        "ephemeral": _events(receipt_events(room.receipts)),
    }
    if room.summary is not None:
        form["summary"] = {
            "m.joined_member_count": room.summary.joined_count,
            "m.invited_member_count": room.summary.invited_count,
        }
        if room.summary.heroes is not None:
            form["summary"]["m.heroes"] = list(room.summary.heroes)
    if room.unread is not None:
        count = room.unread.main if by_thread else room.unread.total
        form["unread_notifications"] = _notifications(count)
        if by_thread:
            threads = {root: _notifications(count) for root, count in room.unread.threads.items()}
            form["unread_thread_notifications"] = threads
    return form


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
            lists={name: _part(f"the list {name!r}", one, _list) for name, one in lists},
            room_subscriptions={
                room: RoomSubscription(**_part(f"the subscription of {room!r}", one, _room_config))
                for room, one in rooms.items()
            },
            extensions=[one for one in EXTENSIONS if extensions.get(one, {}).get("enabled")],
        )
    except InputError:
        raise
    except MALFORMED as error:
        raise InputError(f"{WANTED}, not {str(body)[:200]}") from error


def received_upto(body: Json) -> int | VectorPosition:
    """Return the position up to which the device has its messages, or 0. `InputError`.

    It is the ``since`` of the extension to_device. Delete the messages up to there, before you
    request a response: ``await store.to_device.delete(user_id, device_id, position)``. With several
    writers it is exact for each of them.
    """
    try:
        since = body.get("extensions", {}).get("to_device", {}).get("since")
    except MALFORMED as error:
        raise InputError(f"{WANTED}, not {str(body)[:200]}") from error
    position = VectorPosition() if since is None else read_position(since)
    return position if position.items else position.min


def _part(name: str, given: Json, read: Callable[[Json], T]) -> T:
    """Return what is read of a part of a request. `InputError` with its name."""
    try:
        return read(given)
    except InputError:
        raise
    except MALFORMED as error:
        raise InputError(f"{name} is malformed: {str(given)[:200]}") from error


def _list(given: Json) -> SlidingList:
    ranges = [given["range"]] if "range" in given else given.get("ranges")
    filters = dict(given.get("filters") or {})
    if "is_invite" in filters:  # of the unstable form
        filters["is_invited"] = filters.pop("is_invite")
    known = {name: value for name, value in filters.items() if name in SlidingFilter.__slots__}
    pairs = None if ranges is None else [(first, last) for first, last in ranges]
    return SlidingList(ranges=pairs, filters=SlidingFilter(**known), **_room_config(given))


def _room_config(given: Json) -> Json:
    state = given.get("required_state", ())
    wanted: list[StateKey]
    excluded: list[StateKey] = []
    if isinstance(state, dict):  # the stable form
        wanted = _elements(state.get("include", ()))
        excluded = _elements(state.get("exclude", ()))
        if state.get("lazy_members", False):
            wanted.append(("m.room.member", "$LAZY"))
    else:
        wanted = [(kind, key) for kind, key in state]
    limit = {"timeline_limit": given["timeline_limit"]} if "timeline_limit" in given else {}
    return {"required_state": wanted, "excluded_state": excluded, **limit}


def _elements(given: Iterable[Json]) -> list[StateKey]:
    return [(one.get("type", "*"), one.get("state_key", "*")) for one in given]


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
        chain.from_iterable(one.timeline for one in found.rooms.values()),
        chain.from_iterable(one.required_state for one in found.rooms.values()),
        device_id,
        ignored=found.ignored,
    )
    extensions = _extensions(store, found)
    form = _unstable_room if unstable else _sliding_room
    return {
        "pos": found.pos,
        "lists": {name: {"count": one.count} for name, one in found.lists.items()},
        "rooms": {room: form(one, events) async for room, one in in_turns(found.rooms.items())},
        "extensions": {name: extensions[name] for name in sorted(request.extensions)},
    }


def _sliding_room(room: SlidingRoom, events: Shown) -> Json:
    form: Json = {name: getattr(room, name) for name in ALWAYS}
    for name in IF_KNOWN:
        if getattr(room, name) is not None:
            form[name] = getattr(room, name)
    for name in ("name", "avatar"):
        if name in room.changed:
            form[name] = getattr(room, name)
    if room.expanded_timeline:
        form["expanded_timeline"] = True
    if room.lists:
        form["lists"] = list(room.lists)
    if room.heroes is not None:
        form["heroes"] = [
            {key: value for key, value in asdict(hero).items() if value is not None}
            for hero in room.heroes
        ]
    removed = [{"type": kind, "state_key": key} for kind, key in room.removed_state]
    form["required_state"] = _pick(events, room.required_state, as_state=True) + removed
    form["timeline"] = _pick(events, room.timeline)
    if room.unread is not None:
        form |= _notifications(room.unread.main)
    return form


def _unstable_room(room: SlidingRoom, events: Shown) -> Json:
    form = _sliding_room(room, events)
    form["required_state"] = _pick(events, room.required_state, as_state=True)
    return {OLD_NAMES.get(name, name): value for name, value in form.items()}


def _extensions(store: Store, found: SlidingSync) -> Json:
    everywhere: list[Json] = []
    rooms: dict[str, list[Json]] = {}
    for row in found.account_data:
        listed = everywhere if row.room_id is None else rooms.setdefault(row.room_id, [])
        listed.append({"type": row.type, "content": orjson.loads(row.content)})
    messages = [orjson.loads(one.content) for one in found.to_device]
    receipts = {room: receipt_events(one)[0] for room, one in found.receipts.items() if one}
    reached = store.positions_of(found.pos)["to_device"] if messages else VectorPosition()
    return {
        "to_device": {"next_batch": print_position(reached), "events": messages},
        "account_data": {"global": everywhere, "rooms": rooms},
        "receipts": {"rooms": receipts},
    }


# ------------------------------------------------------------------------------------------------
# rooms


def room_summary(room: RoomInfo) -> Json:
    """Return the entry of a room in the directory, and in the hierarchy of a space."""
    known = {
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
    return {name: value for name, value in known.items() if value is not None}


def hierarchy_room(room: RoomInfo, children: Iterable[SpaceChild]) -> Json:
    """Return the entry of a room in the hierarchy of a space, with the state of its children."""
    keys = ("type", "state_key", "sender", "content", "origin_server_ts")
    listed = [{key: one.event.json[key] for key in keys} for one in children]
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
    state = {(one.type, one.state_key or ""): one.event_id for one in left}
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
    found = await store.events([state[key] for key in keys if key in state])
    visibility, own = (found[state[key]].content if key in state else {} for key in keys)
    given, invited = visibility.get("history_visibility"), own.get("membership") == "invite"
    return given == "world_readable" or (given == "invited" and invited)


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
    found = await store.reads.run(lambda conn: space_walk(conn, request))
    if not found:
        raise AuthDenied(f"{room_id} is not visible to {user_id}", rule="request.hidden_room")
    page = [hierarchy_room(*one) async for one in in_turns(found[start:end])]
    return {"rooms": page} | ({"next_batch": str(end)} if found[end:] else {})


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
        form = _error(raised.errcode or "M_UNKNOWN", raised)
        named = {} if raised.room_version is None else {"room_version": raised.room_version}
        return raised.status, form | named
    known = RULES.get(raised.rule) if isinstance(raised, AuthDenied) else None
    if isinstance(raised, InvalidEvent) and raised.kind == "too_large":
        known = 413, "M_TOO_LARGE"
    elif for_member and isinstance(raised, UnknownRoom):
        known = 403, "M_FORBIDDEN"
    status, errcode = known or next(one[1:] for one in ERRORS if isinstance(raised, one[0]))
    form = _error(errcode, raised)
    if isinstance(raised, IncompatibleRoomVersion):
        form["room_version"] = raised.room_version
    return status, form


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
    found = await store.client_events(user_id, events, **how)
    shown: dict[tuple[str, bool], Json] = {}
    for listed, is_state in ((as_state, True), (found, False)):
        async for one in in_turns(listed):
            shown[one["event_id"], is_state] = one
    return shown


def _pick(shown: Shown, events: Iterable[StoredEvent], *, as_state: bool = False) -> list[Json]:
    keys = ((one.event_id, as_state) for one in events)
    return [shown[key] for key in keys if key in shown]


def _events(events: Sequence[Json]) -> Json:
    return {"events": list(events)}


def _account_data(contents: Mapping[str, Json]) -> list[Json]:
    return [{"type": kind, "content": content} for kind, content in contents.items()]
