"""The cached lists of one user, and the caches that all lists share."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from storage.ids import UserId
from storage.queries.sliding.connection import ClientRooms
from storage.queries.sliding.filters import FilterData
from storage.queries.sliding.list_changes import ListChanges
from storage.queries.sliding.personal_data import NO_DATA, STREAM, PersonalData
from storage.queries.sliding.room_facts import RoomFactsCache
from storage.queries.sliding.room_order import RoomOrder
from storage.queries.sliding.types import SlidingFilter
from storage.queries.sliding.user_rooms import ListedRoom, UserRooms
from storage.queries.sync.changed_rooms import News
from storage.streams.caches import Cache

LOG_MAX: Final = 100  # values of a user's rooms; an older filtered list is made again
MOVED_MAX: Final = 100  # changed memberships of a user
FILTERS_MAX: Final = 16  # of a user
CONNECTIONS_MAX: Final = 4  # of a user, whose departed rooms are remembered


class Filtered(NamedTuple):
    """The rooms that pass a filter, and the data with which that was decided."""

    rooms: UserRooms
    order: RoomOrder
    known: FilterData


class Departed(NamedTuple):
    """The rooms that a connection was sent and that the user left since, latest first.

    ``forgotten`` are those of them that the user has forgotten; ``rooms`` has the others.
    """

    order: RoomOrder
    sent: ClientRooms
    rooms: Sequence[ListedRoom]
    forgotten: Sequence[ListedRoom]


class Entry:
    """The list of one user, and lists that are made of it.

    ``moved`` are the rooms where the user's membership may have changed after ``moved_floor``, each
    with the time.
    ``log`` has the rooms that each value of ``rooms`` changed, with its serial.
    """

    __slots__ = (
        "departed",
        "filtered",
        "log",
        "moved",
        "moved_floor",
        "personal",
        "rooms",
        "serials",
        "weight",
    )

    def __init__(self, time: int) -> None:
        self.moved: dict[str, int] = {}
        self.moved_floor: int = time
        self.rooms: UserRooms | None = None
        self.personal: PersonalData | None = None
        self.filtered: OrderedDict[SlidingFilter, Filtered] = OrderedDict()
        self.departed: OrderedDict[int, Departed] = OrderedDict()
        self.log: deque[tuple[int, frozenset[int]]] = deque(maxlen=LOG_MAX)
        self.serials: int = 0
        self.weight: int = 1

    def forget_moved(self, time: int) -> None:
        """Forget changes of memberships up to a time, if there are many. Only old snapshots differ.

        Such a snapshot reads all rooms.
        """
        if len(self.moved) > MOVED_MAX:
            self.moved = {one: moved for one, moved in self.moved.items() if moved > time}
            self.moved_floor = time

    def begin(self, rooms: UserRooms) -> None:
        """Give the first serial after a read of all rooms. Lists that were made before are gone."""
        self.filtered.clear()
        self.log.clear()
        self.serials += 1
        self.number(rooms, self.serials + 1, ())

    def number(self, rooms: UserRooms, base: int, touched: Iterable[int]) -> None:
        """Give a new value its serial, and log the rooms that it changed."""
        self.serials += 1
        rooms.serial, rooms.base = self.serials, base
        self.log.append((rooms.serial, frozenset(touched)))

    def touched_between(self, one: UserRooms, other: UserRooms) -> set[int] | None:
        """Return the rooms in which two values may differ. None: any room.

        Each is derived from a value on one line. So the changes after the earlier of these two
        values are enough.
        """
        if one.serial == other.serial:
            return set()
        after = min(one.base, other.base)
        if not self.log or self.log[0][0] > after + 1:
            return None
        return {nid for serial, nids in self.log if serial > after for nid in nids}

    def store_filtered(self, wanted: SlidingFilter, found: Filtered) -> None:
        """Keep a filtered list, if it is of the cached rooms."""
        if found.rooms is self.rooms:
            self.filtered[wanted] = found
            self.filtered.move_to_end(wanted)
            if len(self.filtered) > FILTERS_MAX:
                self.filtered.popitem(last=False)

    def departed_of(self, rooms: UserRooms, sent: ClientRooms) -> Departed:
        """Return the rooms that the connection was sent and that the user left since."""
        order = rooms.departed
        if not len(order) or not len(sent):
            return Departed(order, sent, (), ())
        known = self.departed.get(id(sent))
        if known is not None and known.sent is sent and known.order is order:
            return known
        nids = [nid for _, nid in order.since(-1)] if len(order) <= len(sent) else list(sent)
        found = [
            room
            for nid in nids
            if nid in sent and (room := rooms.get(nid)) is not None and not room.is_always_listed
        ]
        found.sort(key=lambda room: room.key, reverse=True)
        left = [room for room in found if not room.is_forgotten]
        forgotten = [room for room in found if room.is_forgotten]
        departed = self.departed[id(sent)] = Departed(order, sent, left, forgotten)
        if len(self.departed) > CONNECTIONS_MAX:
            self.departed.popitem(last=False)
        return departed


class SharedCaches(NamedTuple):
    """The caches of facts that lists share, and what this process has followed.

    ``children`` are those of a space. ``seen`` returns, for a stream, up to which position the
    process has followed each writer.
    """

    changes: ListChanges
    facts: RoomFactsCache
    children: Cache[frozenset[str]]
    seen: Callable[[str], Mapping[str, int]]

    def personal(self, user_id: UserId, entry: Entry, news: News) -> PersonalData | None:
        """Return the account data of a user, if the cached ones are right."""
        data = entry.personal
        if data is None:
            return None
        is_right = data.is_right_for(user_id, news, self.changes, self.seen(STREAM))
        return data if is_right else None

    def store_personal(self, entry: Entry, data: PersonalData) -> None:
        """Keep the account data of a user with the list."""
        is_later = data.time >= (entry.personal or NO_DATA).time
        if is_later and data.time >= self.changes.account_data.floor:
            entry.personal = data

    def store_children(self, children: Mapping[str, frozenset[str]], news: News) -> None:
        """Keep the children of spaces that were read, unless they may have changed since."""
        changed = self.facts.changed_since(news)
        for space, found in children.items():
            if changed is not None and space not in changed:
                self.children.fill(self.children.ticket(space), found)
