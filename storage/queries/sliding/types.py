"""The request and the response of a sliding sync, MSC4186."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from storage import arguments as args
from storage.errors import InputError
from storage.ids import RoomId, StateKey, UserId
from storage.queries.events import StoredEvent
from storage.queries.sliding.checks import (
    LISTS_MAX,
    NAME_BYTES_MAX,
    SUBSCRIPTIONS_MAX,
    allowed_names,
    check_list_name,
    distinct,
    entries,
    index_ranges,
    room_types,
    set_room_config,
)
from storage.queries.sync.changed_rooms import OTHER_STREAMS
from storage.queries.unread import Unread
from storage.streams.account_data import AccountDataRow
from storage.streams.receipts import ReceiptRow
from storage.streams.to_device import MessageRow

ANY: Final = "*"
"""In `required_state`: any type, or any state key."""
ME: Final = "$ME"
"""In `required_state`: the user as a state key."""


@dataclass(frozen=True, slots=True)
class SlidingFilter:
    """Conditions that all rooms of a list meet. None: no condition. Excluding names win.

    ``is_dm``: the room is in the account data m.direct. ``spaces``: the room is a child of one of
    these rooms, and the user is joined to that. ``room_types`` has None for rooms without a type.
    ``room_name_like``: the name has this text, in any case. ``tags``: one of the tags that the user
    gave to the room.
    """

    is_dm: bool | None = None
    spaces: Collection[RoomId] | None = None
    is_encrypted: bool | None = None
    is_invited: bool | None = None
    room_types: Collection[str | None] | None = None
    not_room_types: Collection[str | None] | None = None
    room_name_like: str | None = None
    tags: Collection[str] | None = None
    not_tags: Collection[str] | None = None

    def __post_init__(self) -> None:
        for name in ("is_dm", "is_encrypted", "is_invited"):
            if getattr(self, name) is not None:
                args.flag(getattr(self, name), name)
        for name in ("spaces", "tags", "not_tags"):
            object.__setattr__(self, name, distinct(args.filtered(getattr(self, name), name)))
        for name in ("room_types", "not_room_types"):
            object.__setattr__(self, name, room_types(getattr(self, name), name))
        if self.room_name_like is not None and not isinstance(self.room_name_like, str):
            raise InputError(f"room_name_like is {self.room_name_like!r}: a text is wanted")


ALL_ROOMS: Final = SlidingFilter()


def _filter(filters: SlidingFilter | Mapping[str, Any]) -> SlidingFilter:
    """Return the filter. Raise `InputError` for a mapping with other names."""
    if not isinstance(filters, Mapping):
        return args.instance(filters, SlidingFilter, "filters")
    if unknown := [name for name in filters if name not in SlidingFilter.__slots__]:
        raise InputError(f"filters has {unknown!r}: {', '.join(SlidingFilter.__slots__)} are known")
    return SlidingFilter(**filters)


@dataclass(frozen=True, slots=True)
class SlidingList:
    """A list of rooms, latest activity first, and which part of it the client wants.

    ``ranges``: pairs of the first and the last index, both included; None: all rooms.
    ``required_state``: pairs of a type and a state key. ``*`` is any of them, ``$ME`` the user, and
    ``("m.room.member", "$LAZY")`` the members that the timeline needs. With it ``("*", "*")`` has
    no other members. State that matches a pair of ``excluded_state`` is left out, but for lazily
    loaded members. ``filters`` may also be a mapping with the fields of `SlidingFilter`.
    """

    ranges: Collection[tuple[int, int]] | None = None
    timeline_limit: int = 10
    required_state: Collection[StateKey] = ()
    filters: SlidingFilter = ALL_ROOMS
    excluded_state: Collection[StateKey] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", index_ranges(self.ranges))
        set_room_config(self)
        object.__setattr__(self, "filters", _filter(self.filters))


@dataclass(frozen=True, slots=True)
class RoomSubscription:
    """A room that the client always wants. See `SlidingList`."""

    timeline_limit: int = 10
    required_state: Collection[StateKey] = ()
    excluded_state: Collection[StateKey] = ()

    def __post_init__(self) -> None:
        set_room_config(self)


@dataclass(frozen=True, slots=True)
class SlidingSyncRequest:
    """The body of a request. ``conn_id`` tells the connections of a device apart.

    ``extensions``: some of account_data, receipts and to_device. ``extension_lists`` and
    ``extension_rooms`` limit receipts and the account data of rooms to rooms of these lists, and of
    these subscriptions; None: no limit. ``to_device_limit`` is the largest number of messages.
    ``unread`` adds the unread counts to the joined rooms of the response, by one statement more.
    """

    conn_id: str = ""
    lists: Mapping[str, SlidingList] = field(default_factory=dict)
    room_subscriptions: Mapping[RoomId, RoomSubscription] = field(default_factory=dict)
    extensions: Collection[str] = frozenset()
    extension_lists: Collection[str] | None = None
    extension_rooms: Collection[RoomId] | None = None
    to_device_limit: int = 100
    unread: bool = False

    def __post_init__(self) -> None:
        if len(args.text(self.conn_id).encode()) > NAME_BYTES_MAX:
            raise InputError(f"conn_id has more than {NAME_BYTES_MAX} bytes")
        lists = entries(self.lists, SlidingList, "lists", LISTS_MAX)
        for name in lists:
            check_list_name(name)
        rooms = entries(
            self.room_subscriptions, RoomSubscription, "room_subscriptions", SUBSCRIPTIONS_MAX
        )
        object.__setattr__(self, "lists", lists)
        object.__setattr__(
            self,
            "room_subscriptions",
            {args.room(name): subscription for name, subscription in rooms.items()},
        )
        object.__setattr__(
            self, "extensions", allowed_names(self.extensions, OTHER_STREAMS, "extensions")
        )
        for name, allowed in (("extension_lists", self.lists), ("extension_rooms", rooms)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, allowed_names(getattr(self, name), allowed, name))
        args.flag(self.unread, "unread")
        # one message more is read, and that limit is a bigint, too
        limit = args.limit(self.to_device_limit, args.LARGEST - 1, "to_device_limit")
        if limit == 0:
            raise InputError("to_device_limit is 0: at least 1 is wanted")
        object.__setattr__(self, "to_device_limit", limit)


@dataclass(frozen=True, slots=True)
class Hero:
    """A member that names a room without a name, with the profile of the member event."""

    user_id: UserId
    displayname: str | None = None
    avatar_url: str | None = None


@dataclass(frozen=True, slots=True)
class SlidingRoom:
    """One room of a response.

    ``membership`` is that of the user. It is also "leave" if state resolution took the user out of
    the room. Then ``removed_state`` has the user's own membership, whatever the client requires.

    ``changed`` names the fields that the response has: of
    ``name``, ``avatar``, ``heroes``, ``is_dm`` and ``counts``. The client keeps its values of the
    others, unless the room is ``initial``: then it has no others. A name or an avatar that is in
    ``changed`` and None was removed.

    ``required_state`` are the state events that match and are new to the client, ``removed_state``
    the keys that state resolution took away. ``timeline``: events in the order of arrival, the
    latest last. The last ``num_live`` of them arrived since ``pos``. ``expanded_timeline``: some of
    them were there before, because the timeline limit has grown. ``limited``: there are more events
    before the first one that the client may not have. ``prev_batch`` pages back from there
    (`store.messages`).

    ``bump_stamp`` sorts rooms by activity that a person would notice; None: it has not changed.
    ``stripped_state`` is that of an invite or a knock. ``lists`` names the lists with this room.
    ``unread`` are the counts, if the request has ``unread`` and the user is joined.
    """

    membership: str
    initial: bool = False
    name: str | None = None
    avatar: str | None = None
    heroes: Sequence[Hero] | None = None
    is_dm: bool | None = None
    required_state: Sequence[StoredEvent] = ()
    removed_state: Sequence[StateKey] = ()
    timeline: Sequence[StoredEvent] = ()
    prev_batch: str | None = None
    limited: bool = False
    expanded_timeline: bool = False
    num_live: int = 0
    bump_stamp: int | None = None
    joined_count: int | None = None
    invited_count: int | None = None
    stripped_state: Sequence[dict[str, Any]] | None = None
    lists: Sequence[str] = ()
    changed: frozenset[str] = frozenset()
    unread: Unread | None = None


@dataclass(frozen=True, slots=True)
class SlidingListResult:
    """The number of rooms in a list, within the ranges and outside of them."""

    count: int


@dataclass(frozen=True, slots=True)
class SlidingSync:
    """A response of `store.sliding_sync`. ``pos`` is the next ``pos``.

    The extensions are those of the request: messages to the device, oldest first; the account data
    that has changed, with the room or None; and receipts by room.
    """

    pos: str
    lists: Mapping[str, SlidingListResult] = field(default_factory=dict)
    rooms: Mapping[RoomId, SlidingRoom] = field(default_factory=dict)
    to_device: Sequence[MessageRow] = ()
    account_data: Sequence[AccountDataRow] = ()
    receipts: Mapping[RoomId, Sequence[ReceiptRow]] = field(default_factory=dict)
    ignored: args.Ignored = args.ACCOUNT_DATA
    """As the request has it, for `storage.responses.sliding_sync`."""

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing new."""
        return not (self.rooms or self.to_device or self.account_data or self.receipts)
