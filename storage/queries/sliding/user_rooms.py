"""The memberships of a user in one snapshot: a value that is derived from the one before.

The rows of a cold read stay as they are, in columns. Rooms that change later are in a small dict on
top, which is merged into new columns when it has grown. So a user with 10,000 rooms costs what has
changed, in time and in memory.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import compress
from typing import Any, Final, NamedTuple

from storage.database.names import MEMBERSHIPS
from storage.ids import RoomId, intern
from storage.streams.caches import CURRENT_STATE, FORGOTTEN, LastChange
from storage.streams.feed import Advance

# --------------------------------------------------------------------------------------------------
# The rooms and users that changed, as this process learns of it, on a clock of the process.
#
# Room lists and facts of rooms are cached. A request notes the time before its snapshot. Everything
# that was published before that time is in the snapshot. A cached value from an earlier time is
# right but for the keys that have changed since, and for the commits that were not published yet.
# The positions of the snapshot show those (storage/queries/sync/changed_rooms.py).

DIRECT: Final = "m.direct"
IGNORED: Final = "m.ignored_user_list"
TAG: Final = "m.tag"
MEMBER: Final = "m.room.member"
FACT_TYPES: Final = frozenset(
    {"m.room.create", "m.room.encryption", "m.room.name", "m.space.child"}
)
"""The state events that filters look at."""


class RoomChange(NamedTuple):
    """A room, the time of its last change, and the position of its latest event.

    ``activity`` None: unknown. The event is a membership, which may be out of band, or state
    resolution changed the room.
    """

    room_id: str
    time: int
    activity: int | None


class RecentRooms:
    """The rooms that changed last. All changes after ``floor`` are known."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.floor: int = 0
        self._last: OrderedDict[str, RoomChange] = OrderedDict()
        self._furthest: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._last)

    def restart(self, floor: int) -> None:
        self.floor = floor
        self._last.clear()
        self._furthest.clear()

    def note(self, room_id: str, time: int, position: int = 0, *, is_event: bool = False) -> None:
        """Record a change: an event at a position of the timeline, or anything else."""
        previous = self._last.pop(room_id, None)
        furthest = self._furthest.get(room_id, 0)
        activity = None if previous is None else previous.activity
        if position >= furthest:
            activity = position if is_event else None
            self._furthest[room_id] = position
        self._last[room_id] = RoomChange(room_id, time, activity)
        if len(self._last) > self.limit:
            dropped, change = self._last.popitem(last=False)
            self._furthest.pop(dropped)
            self.floor = max(self.floor, change.time)

    def last(self, room_id: str) -> int:
        """Return the time of its last change; 0 if there was none since ``floor``."""
        change = self._last.get(room_id)
        return 0 if change is None else change.time

    def since(self, time: int) -> Iterator[RoomChange]:
        """Yield the changes after a time that is not below ``floor``, the latest first."""
        for change in reversed(self._last.values()):
            if change.time <= time:
                return
            yield change

    def among(self, room_ids: Iterable[str], time: int) -> Iterator[RoomChange]:
        for room_id in room_ids:
            change = self._last.get(room_id)
            if change is not None and change.time > time:
                yield change


class ListChanges:
    """The changes that room lists depend on, by a feed.

    ``rooms``: any event, or a change by state resolution. ``facts``: state that filters look at.
    ``account_data``: users whose m.direct, tags or ignored users changed. ``clock`` counts changes.

    ``on_member`` is called for a user whose membership in a room may have changed. ``on_state`` is
    called for a room whose facts may have changed; None: all lists and facts may be wrong.
    """

    def __init__(
        self,
        limit: int,
        on_member: Callable[[str, str], None],
        on_state: Callable[[str | None], None],
    ) -> None:
        self.clock: int = 1
        self.rooms: RecentRooms = RecentRooms(limit)
        self.facts: LastChange = LastChange(limit, 0)
        self.account_data: LastChange = LastChange(limit, 0)
        self._on_member = on_member
        self._on_state = on_state

    def restart(self) -> None:
        """Forget everything, including reads in progress."""
        self.clock += 1
        self.rooms.restart(self.clock)
        for changes in (self.facts, self.account_data):
            changes.restart(self.clock)
        self._on_state(None)

    def record_advance(self, advance: Advance) -> None:
        """Record the facts of an advance."""
        if advance.stream_name == "events":
            for stream_row in advance.rows:
                self._event(stream_row.stream_id, stream_row.row)
        elif advance.stream_name == "caches":
            for stream_row in advance.rows:
                if stream_row.row[0] == CURRENT_STATE:
                    self._resolved(stream_row.row[1])
                elif stream_row.row[0] == FORGOTTEN:
                    self._forgotten(*stream_row.row[1])
        elif advance.stream_name == "account_data":
            for stream_row in advance.rows:
                self._account_data(*stream_row.row)

    def _event(self, position: int, row: Sequence[str | None]) -> None:
        _, room_id, event_type, state_key, redacts = row
        if room_id is None:
            return
        self.clock += 1
        self.rooms.note(room_id, self.clock, position, is_event=event_type != MEMBER)
        if redacts is not None or (state_key is not None and event_type in FACT_TYPES):
            self.facts.note(room_id, self.clock)
            self._on_state(room_id)
        if event_type == MEMBER and state_key is not None:
            self._on_member(state_key, room_id)

    def _resolved(self, key: Sequence[str] | None) -> None:
        if key is None:
            self.restart()
            return
        room_id, *users = key
        self.clock += 1
        self.rooms.note(room_id, self.clock)
        self.facts.note(room_id, self.clock)
        self._on_state(room_id)
        for user in users:
            self._on_member(user, room_id)

    def _forgotten(self, room_id: str, user_id: str) -> None:
        self.clock += 1
        self._on_member(user_id, room_id)

    def _account_data(self, user_id: str, _: str | None, kind: str, *__: object) -> None:
        if kind in (DIRECT, TAG, IGNORED):
            self.clock += 1
            self.account_data.note(user_id, self.clock)


# --------------------------------------------------------------------------------------------------
# Rooms in the order of their activity: a value that is cheap to copy and to change.
#
# Two arrays of numbers have the rooms of a list, 12 bytes a room, the latest last. A copy with a
# few changes costs some microseconds at 10,000 rooms. So each snapshot has an order of its own, and
# two requests of a user with different snapshots do not disturb each other.


class RoomOrder:
    """Rooms by activity, and by nid where that is equal."""

    __slots__ = ("_activities", "_nids")

    def __init__(self, activities: "array[int]", nids: "array[int]") -> None:
        self._activities = activities
        self._nids = nids

    @classmethod
    def of(cls, rooms: Iterable[tuple[int, int]]) -> "RoomOrder":
        """Return the order of these pairs of an activity and a nid."""
        # one number sorts faster than a pair
        keys = sorted([activity << 32 | nid for activity, nid in rooms])
        return cls(
            array("q", [key >> 32 for key in keys]), array("i", [key & 0xFFFFFFFF for key in keys])
        )

    def only(self, nids: Container[int]) -> "RoomOrder":
        pairs = [pair for pair in zip(self._activities, self._nids, strict=True) if pair[1] in nids]
        return RoomOrder(
            array("q", [activity for activity, _ in pairs]), array("i", [nid for _, nid in pairs])
        )

    def __len__(self) -> int:
        return len(self._nids)

    def __contains__(self, room: tuple[int, int]) -> bool:
        return self._index(*room) is not None

    def changed(
        self, removed: Iterable[tuple[int, int]], new: Iterable[tuple[int, int]]
    ) -> "RoomOrder":
        copy = RoomOrder(self._activities[:], self._nids[:])
        for activity, nid in removed:
            if (at := copy._index(activity, nid)) is not None:
                del copy._activities[at], copy._nids[at]
        for activity, nid in new:
            at = copy._insertion_index(activity, nid)
            copy._activities.insert(at, activity)
            copy._nids.insert(at, nid)
        return copy

    def rooms_before(self, activity: int, nid: int) -> int:
        """Return the number of rooms that come before this one, latest activity first."""
        return len(self) - self._insertion_index(activity, nid + 1)

    def between(self, first: int, last: int) -> Sequence[int]:
        """Return the nids at these indexes, the last one included, latest activity first."""
        end = len(self) - first
        return self._nids[max(0, len(self) - 1 - last) : max(0, end)][::-1]

    def since(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the activity and the nid of rooms with activity after a position, latest first."""
        start = bisect_right(self._activities, position)
        for at in range(len(self) - 1, start - 1, -1):
            yield self._activities[at], self._nids[at]

    def _insertion_index(self, activity: int, nid: int) -> int:
        at = bisect_left(self._activities, activity)
        while at < len(self) and self._activities[at] == activity and self._nids[at] < nid:
            at += 1
        return at

    def _index(self, activity: int, nid: int) -> int | None:
        at = self._insertion_index(activity, nid)
        is_there = at < len(self) and self._activities[at] == activity and self._nids[at] == nid
        return at if is_there else None


LEAVE: Final = MEMBERSHIPS["leave"]
BAN: Final = MEMBERSHIPS["ban"]
LATER_MIN: Final = 500  # changed rooms on top of the columns; beyond it, a tenth of the rooms


CompactRoom = tuple[int, str, int, int, int]
"""A room of thousands: nid, id, membership, activity, and whether each list has it."""


class ListedRoom(NamedTuple):
    """A room of a user.

    ``activity`` is the position of its latest event. Where the user is not in the room, it is that
    of the membership. ``membership`` 0: state resolution removed it. ``was_kicked``: another user
    ended the membership. ``was_joined``: the user is in the room, or was there once.
    ``is_forgotten``: no list has the room. ``inviter``: the sender of an invite.
    """

    room_nid: int
    room_id: RoomId
    membership: int
    activity: int
    member_nid: int
    was_kicked: bool
    was_joined: bool
    is_forgotten: bool
    inviter: str | None

    @property
    def is_always_listed(self) -> bool:
        """Return whether the lists of every connection have the room."""
        was_removed = self.was_joined and (self.membership == BAN or self.was_kicked)
        return self.membership > LEAVE or (was_removed and not self.is_forgotten)

    @property
    def compact(self) -> CompactRoom:
        kind = self.membership, self.activity, int(self.is_always_listed)
        return self.room_nid, self.room_id, *kind

    @property
    def key(self) -> tuple[int, int]:
        return self.activity, self.room_nid


class Columns:
    """Rooms of a cold read, by column; some 250 bytes a room."""

    __slots__ = (
        "_activities",
        "_at",
        "_flags",
        "_ids",
        "_member_nids",
        "_nids",
        "inviters",
        "nid_of",
    )

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        columns = list(zip(*rows, strict=True)) or [()] * len(ListedRoom._fields)
        nids, room_ids, memberships, activities, member_nids, *flags, inviters = columns
        self._ids: list[str] = list(map(intern, room_ids))
        self._nids = array("i", nids)
        self._activities = array("q", activities)
        self._member_nids = array("q", member_nids)
        self._flags = bytes(map(_flags, memberships, *flags))
        self._at: dict[int, int] = dict(zip(nids, range(len(nids)), strict=True))
        self.nid_of: dict[str, int] = dict(zip(self._ids, nids, strict=True))
        self.inviters: dict[int, str] = {
            nid: intern(user) for nid, user in zip(nids, inviters, strict=True) if user is not None
        }

    def __len__(self) -> int:
        return len(self._nids)

    def get(self, room_nid: int) -> ListedRoom | None:
        at = self._at.get(room_nid)
        if at is None:
            return None
        member_nid, flags = self._member_nids[at], self._flags[at]
        numbers = flags & MEMBERSHIP, self._activities[at], member_nid
        inviter = self.inviters.get(room_nid)
        return ListedRoom(room_nid, RoomId(self._ids[at]), *numbers, *_facts(flags), inviter)

    def compact_rooms(self) -> Iterator[CompactRoom]:
        memberships = (flags & MEMBERSHIP for flags in self._flags)
        columns = self._ids, memberships, self._activities, self._flags.translate(LISTED)
        return zip(self._nids, *columns, strict=True)

    def orders(self) -> tuple[RoomOrder, RoomOrder]:
        """Return the rooms that each list has, and the others, by activity."""
        pairs = list(zip(self._activities, self._nids, strict=True))
        is_listed = self._flags.translate(LISTED)
        listed = RoomOrder.of(compress(pairs, is_listed))
        if len(listed) == len(pairs):
            return listed, RoomOrder.of(())
        return listed, RoomOrder.of(compress(pairs, (not flag for flag in is_listed)))


MEMBERSHIP: Final = 7
KICKED: Final = 8
JOINED: Final = 16
IS_FORGOTTEN: Final = 32


def _facts(flags: int) -> tuple[bool, bool, bool]:
    return bool(flags & KICKED), bool(flags & JOINED), bool(flags & IS_FORGOTTEN)


LISTED: Final = bytes(
    ListedRoom(0, RoomId(""), flags & MEMBERSHIP, 0, 0, *_facts(flags), None).is_always_listed
    for flags in range(256)
)
"""For each value of the flags of a room whether each list has the room."""


def _flags(membership: int, was_kicked: bool, was_joined: bool, is_forgotten: bool) -> int:
    return membership | KICKED * was_kicked | JOINED * was_joined | IS_FORGOTTEN * is_forgotten


class UserRooms:
    """The rooms of a user in one snapshot.

    ``listed`` are those that each list has. ``left_rooms`` are only in lists of connections that
    were sent them, or forgotten. ``time`` is the time on the clock of the process before the
    snapshot.
    ``unseen`` are rooms with commits in the snapshot that were not published here at that time.

    ``serial`` numbers the values of one user. ``base`` is the serial of the value that this one was
    derived from.
    """

    __slots__ = (
        "_columns",
        "_ids",
        "_later",
        "base",
        "left_rooms",
        "listed",
        "serial",
        "time",
        "unseen",
    )

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self._columns = Columns(rows)
        self._later: dict[int, ListedRoom | None] = {}
        self._ids: dict[str, int] = {}
        self.listed, self.left_rooms = self._columns.orders()
        self.time: int = 0
        self.unseen: frozenset[int] = frozenset()
        self.serial: int = 0
        self.base: int = 0

    def __len__(self) -> int:
        return len(self.listed) + len(self.left_rooms)

    def nid(self, room_id: str) -> int | None:
        nid = self._ids.get(room_id)
        return self._columns.nid_of.get(room_id) if nid is None else nid

    def get(self, room_nid: int) -> ListedRoom | None:
        if room_nid in self._later:
            return self._later[room_nid]
        return self._columns.get(room_nid)

    def compact_rooms(self) -> Iterator[CompactRoom]:
        later = self._later
        for compact in self._columns.compact_rooms():
            if compact[0] not in later:
                yield compact
        for room in later.values():
            if room is not None:
                yield room.compact

    def invites_of(self, users: Collection[str]) -> list[ListedRoom]:
        nids = {*self._columns.inviters, *self._later}
        rooms = (room for nid in nids if (room := self.get(nid)) is not None)
        return [room for room in rooms if room.inviter in users]

    def since(self, position: int) -> Iterator[ListedRoom]:
        """Yield the rooms with activity after a position, latest first."""
        for _, nid in merge(
            self.listed.since(position), self.left_rooms.since(position), reverse=True
        ):
            if (room := self.get(nid)) is not None:
                yield room

    def changed(
        self, rooms: Mapping[int, ListedRoom | None], time: int, unseen: frozenset[int]
    ) -> "UserRooms":
        """Return the value of another snapshot, with these rooms as given there.

        None: it is no room of the user there.
        """
        pairs = [(self.get(nid), room) for nid, room in rooms.items()]
        pairs = [(old, new) for old, new in pairs if old != new]
        result = object.__new__(UserRooms)
        result._columns = self._columns
        result._later = self._later if not pairs else {**self._later, **rooms}
        new_ids = {new.room_id: new.room_nid for _, new in pairs if new is not None}
        result._ids = self._ids if new_ids.keys() <= self._ids.keys() else self._ids | new_ids
        result.listed = _reordered(self.listed, pairs, is_listed=True)
        result.left_rooms = _reordered(self.left_rooms, pairs, is_listed=False)
        if len(result._later) > LATER_MIN + len(self._columns) // 10:
            every = [
                room
                for compact in result.compact_rooms()
                if (room := result.get(compact[0])) is not None
            ]
            result._columns, result._later, result._ids = Columns(every), {}, {}
        result.time, result.unseen = time, unseen
        result.serial, result.base = self.serial, self.base
        return result


def _reordered(
    order: RoomOrder,
    pairs: Sequence[tuple[ListedRoom | None, ListedRoom | None]],
    *,
    is_listed: bool,
) -> RoomOrder:
    """Return the order after these rooms changed, each from the first value to the second."""
    removed = [old.key for old, _ in pairs if old is not None and old.is_always_listed == is_listed]
    new = [new.key for _, new in pairs if new is not None and new.is_always_listed == is_listed]
    return order.changed(removed, new) if removed or new else order
