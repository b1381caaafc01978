"""The memberships of a user in one snapshot: a value that is derived from the one before.

The rows of a cold read stay as they are, in columns. Rooms that change later are in a small dict on
top, which is merged into new columns when it has grown. So a user with 10,000 rooms costs what has
changed, in time and in memory.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import merge
from itertools import compress
from typing import Any, Final, NamedTuple

from storage.database.names import MEMBERSHIPS
from storage.ids import RoomId, intern
from storage.queries.sliding.room_order import RoomOrder

LEAVE: Final = MEMBERSHIPS["leave"]
BAN: Final = MEMBERSHIPS["ban"]
LATER_MIN: Final = 500  # changed rooms on top of the columns; beyond it, a tenth of the rooms


BriefRoom = tuple[int, str, int, int, int]
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
    def brief(self) -> BriefRoom:
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

    def brief(self) -> Iterator[BriefRoom]:
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
        return listed, RoomOrder.of(compress(pairs, (not one for one in is_listed)))


MEMBERSHIP: Final = 7
KICKED: Final = 8
JOINED: Final = 16
FORGOTTEN: Final = 32


def _facts(flags: int) -> tuple[bool, bool, bool]:
    return bool(flags & KICKED), bool(flags & JOINED), bool(flags & FORGOTTEN)


LISTED: Final = bytes(
    ListedRoom(0, RoomId(""), flags & MEMBERSHIP, 0, 0, *_facts(flags), None).is_always_listed
    for flags in range(256)
)
"""For each value of the flags of a room whether each list has the room."""


def _flags(membership: int, was_kicked: bool, was_joined: bool, is_forgotten: bool) -> int:
    return membership | KICKED * was_kicked | JOINED * was_joined | FORGOTTEN * is_forgotten


class UserRooms:
    """The rooms of a user in one snapshot.

    ``listed`` are those that each list has. ``departed`` are only in lists of connections that were
    sent them, or forgotten. ``time`` is the time on the clock of the process before the snapshot.
    ``unseen`` are rooms with commits in the snapshot that were not published here at that time.

    ``serial`` numbers the values of one user. ``base`` is the serial of the value that this one was
    derived from.
    """

    __slots__ = (
        "_columns",
        "_ids",
        "_later",
        "base",
        "departed",
        "listed",
        "serial",
        "time",
        "unseen",
    )

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self._columns = Columns(rows)
        self._later: dict[int, ListedRoom | None] = {}
        self._ids: dict[str, int] = {}
        self.listed, self.departed = self._columns.orders()
        self.time: int = 0
        self.unseen: frozenset[int] = frozenset()
        self.serial: int = 0
        self.base: int = 0

    def __len__(self) -> int:
        return len(self.listed) + len(self.departed)

    def nid(self, room_id: str) -> int | None:
        nid = self._ids.get(room_id)
        return self._columns.nid_of.get(room_id) if nid is None else nid

    def get(self, room_nid: int) -> ListedRoom | None:
        if room_nid in self._later:
            return self._later[room_nid]
        return self._columns.get(room_nid)

    def brief(self) -> Iterator[BriefRoom]:
        later = self._later
        for one in self._columns.brief():
            if one[0] not in later:
                yield one
        for room in later.values():
            if room is not None:
                yield room.brief

    def invites_of(self, users: Collection[str]) -> list[ListedRoom]:
        nids = {*self._columns.inviters, *self._later}
        rooms = (room for nid in nids if (room := self.get(nid)) is not None)
        return [room for room in rooms if room.inviter in users]

    def since(self, position: int) -> Iterator[ListedRoom]:
        """Yield the rooms with activity after a position, latest first."""
        for _, nid in merge(
            self.listed.since(position), self.departed.since(position), reverse=True
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
        result.departed = _reordered(self.departed, pairs, is_listed=False)
        if len(result._later) > LATER_MIN + len(self._columns) // 10:
            every = [room for one in result.brief() if (room := result.get(one[0])) is not None]
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
    gone = [old.key for old, _ in pairs if old is not None and old.is_always_listed == is_listed]
    new = [new.key for _, new in pairs if new is not None and new.is_always_listed == is_listed]
    return order.changed(gone, new) if gone or new else order
