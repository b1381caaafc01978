"""Which rooms a response has, and why: from the windows of the lists and what the client has."""

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from storage import arguments as args
from storage.config import Config
from storage.database.names import INVITE, MEMBERSHIPS
from storage.errors import InputError, InvalidToken, UnknownPos
from storage.ids import UserId
from storage.queries.sliding.checks import NAME_BYTES_MAX
from storage.queries.sliding.connection import ClientRoom, ClientRooms, ConnectionKey
from storage.queries.sliding.room_lists import RoomList
from storage.queries.sliding.room_state import Pairs, Required, beyond, union
from storage.queries.sliding.types import RoomSubscription, SlidingList, SlidingSyncRequest
from storage.queries.sliding.user_rooms import ListedRoom
from storage.queries.sync.changed_rooms import OTHER_STREAMS, covered
from storage.streams import SyncToken, VectorPosition
from storage.streams.tokens import PosToken, is_foreign_pos

LEAVE: Final = MEMBERSHIPS["leave"]
KNOCK: Final = MEMBERSHIPS["knock"]
Window = tuple[int, list[ListedRoom]]


@dataclass(frozen=True, slots=True)
class RequestedRoom:
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
        was_inside = self.listed.was_joined and not self.listed.is_forgotten
        return was_inside and self.listed.membership not in (INVITE, KNOCK)


class WhyIncluded(NamedTuple):
    """Why a wanted room is in the response, unless it turns out to have nothing new.

    ``expands``: the timeline limit has grown. ``grown``: state that the client does not have.
    """

    is_new: bool
    has_changed: bool
    expands: bool
    grown: Pairs
    is_direct_changed: bool

    def __bool__(self) -> bool:
        return any(self[at] for at in range(len(self)))


@dataclass(slots=True)
class Selection:
    """The rooms of a request. ``outside_windows``: changed rooms that are in no window."""

    counts: dict[str, int] = field(default_factory=dict)
    rooms: dict[int, RequestedRoom] = field(default_factory=dict)
    why_included: dict[int, WhyIncluded] = field(default_factory=dict)
    outside_windows: list[ListedRoom] = field(default_factory=list)


def requested_rooms(
    request: SlidingSyncRequest,
    windows: Mapping[str, Window],
    room_list: RoomList,
    sent: Container[int],
    *,
    timeline_max: int,
) -> dict[int, RequestedRoom]:
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
        subscribed = room_list.get(room_id)
        if subscribed is not None and _may_subscribe(subscribed, sent):
            configs.setdefault(subscribed.room_nid, []).append((None, subscription))
            listed[subscribed.room_nid] = subscribed
    unions: dict[tuple[int, ...], tuple[int, Required]] = {}
    requested: dict[int, RequestedRoom] = {}
    for nid, room_configs in configs.items():
        key = tuple(id(config) for _, config in room_configs)
        if key not in unions:  # many rooms have the same configurations
            limit = max(config.timeline_limit for _, config in room_configs)
            state = union(_required(config) for _, config in room_configs)
            unions[key] = min(limit, timeline_max), state
        names = tuple(name for name, _ in room_configs if name is not None)
        is_extended = _is_extended(request, listed[nid], names)
        requested[nid] = RequestedRoom(listed[nid], *unions[key], names, is_extended)
    return requested


def forgotten_rooms(
    room_list: RoomList, since: VectorPosition, sent: ClientRooms
) -> dict[int, RequestedRoom]:
    """Return the forgotten rooms whose end the client may lack, by nid, in no list."""
    return {
        room.room_nid: RequestedRoom(
            room, client_room.timeline_limit, client_room.required, (), is_extended=False
        )
        for room, client_room in room_list.forgotten_since(since, sent)
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


def _is_any(names: Iterable[str], requested: Collection[str] | None) -> bool:
    return any(requested is None or name in requested for name in names)


def select_rooms(
    requested: Mapping[int, RequestedRoom],
    sent: ClientRooms,
    changed: Mapping[int, ListedRoom],
    direct: Container[str],
    *,
    purged_upto: int,
) -> Selection:
    """Return which of the wanted rooms the response may have.

    ``changed`` are the rooms that may have changed since the `pos`.
    """
    selection = Selection(rooms=dict(requested))
    for nid, room in requested.items():
        is_direct = room.listed.room_id in direct
        why = _why_included(room, sent.get(nid), is_direct, nid in changed, purged_upto)
        if why:
            selection.why_included[nid] = why
    for nid, listed in changed.items():
        client_room = sent.get(nid)
        if client_room is not None and client_room.sent_upto is None and nid not in requested:
            selection.outside_windows.append(listed)
    return selection


def _why_included(
    room: RequestedRoom,
    client_room: ClientRoom | None,
    is_direct: bool,
    has_changed: bool,
    purged_upto: int,
) -> WhyIncluded:
    if client_room is None or (
        client_room.sent_upto is not None and client_room.sent_upto < purged_upto
    ):
        return WhyIncluded(True, True, False, frozenset(), False)
    return WhyIncluded(
        False,
        has_changed or client_room.sent_upto is not None,
        room.timeline_limit > client_room.timeline_limit,
        beyond(room.required, client_room.required),
        is_direct != client_room.is_direct and not room.listed.is_forgotten,
    )


# --------------------------------------------------------------------------------------------------
# A request with a parsed `pos` and checked arguments.


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request of a device. ``pos`` None: it begins a connection."""

    key: ConnectionKey
    body: SlidingSyncRequest
    pos: PosToken | None
    ignored: Collection[UserId] | None
    """None, until the account data are read: the users that these list."""
    deployment: str
    defined: frozenset[str]
    rows_max: int
    timeline_max: int

    @classmethod
    def of(
        cls,
        user_id: str,
        body: SlidingSyncRequest,
        *,
        device_id: str,
        pos: str | None,
        ignored: list[UserId] | None,
        server_name: str,
        deployment: str,
        config: Config,
        defined: frozenset[str],
    ) -> "PreparedRequest":
        """Return the request for these arguments.

        `InvalidIdentifier`, `InvalidToken`, `UnknownPos`, `InputError`.
        """
        user = args.local_user(user_id, server_name)
        if not 1 <= len(args.text(device_id).encode()) <= NAME_BYTES_MAX:
            raise InputError(f"device_id has 1 to {NAME_BYTES_MAX} bytes, not {device_id[:99]!r}")
        args.instance(body, SlidingSyncRequest, "request")
        return cls(
            ConnectionKey(user, device_id, body.conn_id),
            body,
            None if pos is None else _read(pos, deployment),
            ignored,
            deployment,
            defined,
            config.traversal_rows_max,
            config.page_limit_max,
        )

    def with_ignored(self, listed: Collection[UserId]) -> "PreparedRequest":
        """Return the request with these users of the account data, if it names none itself."""
        return replace(self, ignored=listed) if self.ignored is None else self

    @property
    def user_id(self) -> UserId:
        return self.key.user_id

    @property
    def text(self) -> str:
        """Return the `pos` as the caller gave it: a token has one text only."""
        return "" if self.pos is None else self.pos.print(self.deployment)

    @property
    def upto(self) -> SyncToken | None:
        """Return the positions of the `pos`."""
        return None if self.pos is None else self.pos.upto

    def covered(self, reached: SyncToken) -> SyncToken:
        """Return the part of these positions that a response of this process covers."""
        return covered(reached, self.defined, self.upto)

    def extension_position(self, stream: str) -> VectorPosition:
        """Return up to where the client has the facts of an extension."""
        if self.pos is None:
            return VectorPosition()
        position = self.pos.extensions.position(stream)
        if position is None:
            position = self.pos.upto.position(stream)
        return VectorPosition() if position is None else position

    @property
    def waited(self) -> tuple[str, ...]:
        """Return the streams beside the events whose facts end the wait."""
        return (
            *(stream for stream in OTHER_STREAMS if stream in self.body.extensions),
            *sorted(self.defined),
        )


def _read(pos: str, deployment: str) -> PosToken:
    """Return a `pos`. `UnknownPos` for one of another database: its connections are not here."""
    try:
        return PosToken.parse(pos, deployment)
    except InvalidToken as error:
        if is_foreign_pos(error.token, deployment):
            raise UnknownPos(pos, error.reason) from error
        raise
