"""Which rooms a response has, and why: from the windows of the lists and what the client has."""

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from storage.database.names import INVITE, MEMBERSHIPS
from storage.queries.sliding.connection import ClientRoom, ClientRooms
from storage.queries.sliding.required_state import Pairs, Required, beyond, union
from storage.queries.sliding.room_list import RoomList
from storage.queries.sliding.types import RoomSubscription, SlidingList, SlidingSyncRequest
from storage.queries.sliding.user_rooms import ListedRoom
from storage.streams import VectorPosition

LEAVE: Final = MEMBERSHIPS["leave"]
KNOCK: Final = MEMBERSHIPS["knock"]
Window = tuple[int, list[ListedRoom]]


@dataclass(frozen=True, slots=True)
class WantedRoom:
    """A room that is in a window or a subscription, with the union of their configurations."""

    listed: ListedRoom
    timeline_limit: int
    required: Required
    lists: tuple[str, ...]
    is_extended: bool
    """The extensions have the room as well."""

    @property
    def is_inside(self) -> bool:
        """Return whether the user is in the room, or was and has no new invite or knock.

        One who has forgotten the room was never in it.
        """
        is_known = self.listed.was_joined and not self.listed.is_forgotten
        return is_known and self.listed.membership not in (INVITE, KNOCK)


class Reason(NamedTuple):
    """Why a wanted room is in the response, unless it turns out to have nothing new.

    ``expands``: the timeline limit has grown. ``grown``: state that the client does not have.
    """

    is_new: bool
    has_news: bool
    expands: bool
    grown: Pairs
    is_direct_changed: bool

    def __bool__(self) -> bool:
        return any(self[at] for at in range(len(self)))


@dataclass(slots=True)
class Choice:
    """The rooms of a request. ``left_behind``: rooms with news that are in no window."""

    counts: dict[str, int] = field(default_factory=dict)
    wanted: dict[int, WantedRoom] = field(default_factory=dict)
    reasons: dict[int, Reason] = field(default_factory=dict)
    left_behind: list[ListedRoom] = field(default_factory=list)


def wanted_rooms(
    request: SlidingSyncRequest,
    windows: Mapping[str, Window],
    room_list: RoomList,
    sent: Container[int],
    *,
    timeline_max: int,
) -> dict[int, WantedRoom]:
    """Return the rooms of all windows and subscriptions, by nid.

    ``timeline_max``: a larger timeline limit is reduced to it.
    """
    configs: dict[int, list[tuple[str | None, SlidingList | RoomSubscription]]] = {}
    listed: dict[int, ListedRoom] = {}
    for name, (_, rooms) in windows.items():
        for room in rooms:
            configs.setdefault(room.room_nid, []).append((name, request.lists[name]))
            listed[room.room_nid] = room
    for room_id, subscription in request.room_subscriptions.items():
        found = room_list.get(room_id)
        if found is not None and _may_subscribe(found, sent):
            configs.setdefault(found.room_nid, []).append((None, subscription))
            listed[found.room_nid] = found
    known: dict[tuple[int, ...], tuple[int, Required]] = {}
    wanted: dict[int, WantedRoom] = {}
    for nid, given in configs.items():
        key = tuple(id(config) for _, config in given)
        if key not in known:  # many rooms have the same configurations
            limit = max(config.timeline_limit for _, config in given)
            state = union(_required(config) for _, config in given)
            known[key] = min(limit, timeline_max), state
        names = tuple(name for name, _ in given if name is not None)
        is_extended = _is_extended(request, listed[nid], names)
        wanted[nid] = WantedRoom(listed[nid], *known[key], names, is_extended)
    return wanted


def forgotten_rooms(
    room_list: RoomList, since: VectorPosition, sent: ClientRooms
) -> dict[int, WantedRoom]:
    """Return the forgotten rooms whose end the client may lack, by nid, in no list."""
    return {
        room.room_nid: WantedRoom(room, known.timeline_limit, known.required, (), is_extended=False)
        for room, known in room_list.forgotten_since(since, sent)
    }


def _required(config: SlidingList | RoomSubscription) -> Required:
    return Required(frozenset(config.required_state), frozenset(config.excluded_state))


def _may_subscribe(room: ListedRoom, sent: Container[int]) -> bool:
    """Return whether the user is or was in the room, or has or had an invite or a knock.

    If state resolution removed the membership, only a connection that was sent the room has it.
    """
    if room.is_forgotten:
        return False
    if room.membership == 0:
        return room.room_nid in sent
    return room.membership >= LEAVE or room.was_joined or room.room_nid in sent


def _is_extended(request: SlidingSyncRequest, room: ListedRoom, lists: Iterable[str]) -> bool:
    return _is_any(lists, request.extension_lists) or (
        room.room_id in request.room_subscriptions
        and _is_any([room.room_id], request.extension_rooms)
    )


def _is_any(names: Iterable[str], wanted: Collection[str] | None) -> bool:
    return any(wanted is None or name in wanted for name in names)


def choose(
    wanted: Mapping[int, WantedRoom],
    sent: ClientRooms,
    changed: Mapping[int, ListedRoom],
    direct: Container[str],
    *,
    purged_upto: int,
) -> Choice:
    """Return which of the wanted rooms the response may have.

    ``changed`` are the rooms that may have changed since the `pos`.
    """
    choice = Choice(wanted=dict(wanted))
    for nid, room in wanted.items():
        is_direct = room.listed.room_id in direct
        reason = _reason(room, sent.get(nid), is_direct, nid in changed, purged_upto)
        if reason:
            choice.reasons[nid] = reason
    for nid, listed in changed.items():
        known = sent.get(nid)
        if known is not None and known.sent_upto is None and nid not in wanted:
            choice.left_behind.append(listed)
    return choice


def _reason(
    room: WantedRoom,
    known: ClientRoom | None,
    is_direct: bool,
    has_changed: bool,
    purged_upto: int,
) -> Reason:
    if known is None or (known.sent_upto is not None and known.sent_upto < purged_upto):
        return Reason(True, True, False, frozenset(), False)
    return Reason(
        False,
        has_changed or known.sent_upto is not None,
        room.timeline_limit > known.timeline_limit,
        beyond(room.required, known.required),
        is_direct != known.is_direct and not room.listed.is_forgotten,
    )
