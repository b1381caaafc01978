"""The rooms of a user in one snapshot, latest activity first, and windows on them.

A list has the rooms that the user is in, is invited to, or knocks at. It has rooms that the user
was banned or kicked from, if the user was ever in the room. A room that the user left is in a list
only where the connection was sent the room before. So is one that state resolution took the user
out of. Forgotten rooms are in no list: the response after has the end, once. Invites by users whom
the reader ignores are left out.

The rooms that pass a filter are kept with the list of the user, and changed by what changed: rooms,
their facts, and the account data of the user. A window first looks at the caches. If these lack
something, it is read for all rooms at once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.ids import RoomId, UserId
from storage.queries.sliding.connection import ClientRoom, ClientRooms
from storage.queries.sliding.filters import FilterData, needs_facts, needs_personal_data, passing
from storage.queries.sliding.list_entry import Entry, Filtered, SharedCaches
from storage.queries.sliding.personal_data import NO_DATA, PersonalData, read_personal_data
from storage.queries.sliding.room_facts import KNOCK, RoomFacts, read_facts
from storage.queries.sliding.room_order import RoomOrder
from storage.queries.sliding.types import ALL_ROOMS, SlidingFilter
from storage.queries.sliding.user_rooms import BriefRoom, ListedRoom, UserRooms
from storage.queries.space_children import children_of
from storage.queries.sync.changed_rooms import News
from storage.streams import VectorPosition

Ranges = Collection[tuple[int, int]] | None
Window = tuple[int, list[ListedRoom]]


class Missing(NamedTuple):
    """Data that a window takes and the caches lack.

    ``names``: the facts of these rooms have to include the names.
    """

    personal: bool = False
    spaces: Sequence[RoomId] = ()
    rooms: Sequence[int] = ()
    names: bool = False


class RoomList:
    """The rooms of a user in one snapshot."""

    def __init__(
        self,
        shared: SharedCaches,
        user_id: UserId,
        entry: Entry,
        rooms: UserRooms,
        news: News,
    ) -> None:
        self._shared = shared
        self._user_id = user_id
        self._entry = entry
        self._rooms = rooms
        self._news = news
        # read in this snapshot, or found to be right for it
        self._personal: PersonalData | None = None
        self._children: dict[str, frozenset[str]] = {}
        self._facts: dict[str, RoomFacts] = {}
        self._filtered: dict[SlidingFilter, Filtered] = {}

    def get(self, room_id: str) -> ListedRoom | None:
        """Return a room, whatever the membership. None: the user has none."""
        nid = self._rooms.nid(room_id)
        return None if nid is None else self._rooms.get(nid)

    def by_nid(self, room_nid: int) -> ListedRoom | None:
        return self._rooms.get(room_nid)

    def joined(self) -> Iterator[RoomId]:
        """Yield the rooms that the user is in, in no order."""
        return (RoomId(one[1]) for one in self._rooms.brief() if one[2] == JOIN)

    def changed_since(self, position: VectorPosition) -> Iterator[ListedRoom]:
        """Yield the rooms that may have events or a membership after a position, latest first."""
        return self._rooms.since(position.min)

    def forgotten_since(
        self, position: VectorPosition, sent: ClientRooms
    ) -> Iterator[tuple[ListedRoom, ClientRoom]]:
        """Yield the forgotten rooms of a connection, if it may not have their end yet."""
        for room in self._entry.departed_of(self._rooms, sent).forgotten:
            known = sent[room.room_nid]
            upto = position.min if known.sent_upto is None else known.sent_upto
            if room.activity > upto:
                yield room, known

    async def window(
        self,
        conn: Connection,
        filters: SlidingFilter,
        ranges: Ranges,
        sent: ClientRooms,
        ignored: Collection[str] = (),
    ) -> Window:
        """Return the number of rooms that pass a filter, and those of them in the ranges.

        The indexes of a range are both included. ``sent`` are the rooms of the connection.
        ``ignored``: users whose invites are left out.
        """
        while isinstance(found := self._window(filters, ranges, sent, ignored), Missing):
            await self._read(conn, found)
        return found

    def cached_window(
        self,
        filters: SlidingFilter,
        ranges: Ranges,
        sent: ClientRooms,
        ignored: Collection[str] = (),
    ) -> Window | None:
        """Return `window` without a statement. None: it takes one."""
        found = self._window(filters, ranges, sent, ignored)
        return None if isinstance(found, Missing) else found

    async def personal(self, conn: Connection) -> PersonalData:
        """Return the account data of the user."""
        return self._own_data() or await self._read_personal(conn)

    def cached_personal(self) -> PersonalData | None:
        """Return `personal` without a statement. None: it takes one."""
        return self._own_data()

    # Windows

    def _window(
        self, wanted: SlidingFilter, ranges: Ranges, sent: ClientRooms, ignored: Collection[str]
    ) -> Window | Missing:
        departed = self._entry.departed_of(self._rooms, sent).rooms
        if wanted == ALL_ROOMS:
            listed = self._heard(self._rooms.listed, ignored)
            return _within(self._rooms, listed, departed, ranges)
        known = self._known(wanted)
        found = known if isinstance(known, Missing) else self._order(wanted, known)
        if isinstance(found, Missing):
            return found
        passed = self._passed(wanted, found.known, [room.brief for room in departed])
        if isinstance(passed, Missing):
            return passed
        nids = {one[0] for one in passed}
        some = [room for room in departed if room.room_nid in nids]
        return _within(self._rooms, self._heard(found.order, ignored), some, ranges)

    def _heard(self, order: RoomOrder, ignored: Collection[str]) -> RoomOrder:
        """Return an order without the invites by some users."""
        hidden = self._rooms.invites_of(ignored) if ignored else ()
        return order.changed([room.key for room in hidden], ()) if hidden else order

    def _order(self, wanted: SlidingFilter, known: FilterData) -> Filtered | Missing:
        """Return the listed rooms that pass, from the cached ones or from all rooms."""
        done = self._filtered.get(wanted)
        if done is not None:
            return done
        cached = self._entry.filtered.get(wanted)
        touched = cached and self._entry.touched_between(cached.rooms, self._rooms)
        if cached is None or touched is None:
            order = self._whole_order(wanted, known)
        else:
            touched = touched.union(self._nids(known.differing(cached.known)))
            order = self._changed_order(wanted, known, cached, touched)
        if isinstance(order, Missing):
            return order
        found = self._filtered[wanted] = Filtered(self._rooms, order, known)
        self._entry.store_filtered(wanted, found)
        return found

    def _whole_order(self, wanted: SlidingFilter, known: FilterData) -> RoomOrder | Missing:
        listed = [one for one in self._rooms.brief() if one[4]]
        passed = self._passed(wanted, known, listed)
        if isinstance(passed, Missing):
            return passed
        return self._rooms.listed.only({one[0] for one in passed})

    def _changed_order(
        self, wanted: SlidingFilter, known: FilterData, cached: Filtered, touched: Collection[int]
    ) -> RoomOrder | Missing:
        if not touched:
            return cached.order
        before = [room for nid in touched if (room := cached.rooms.get(nid)) is not None]
        now = [room for nid in touched if (room := self._rooms.get(nid)) is not None]
        listed = [room.brief for room in now if room.is_always_listed]
        passed = self._passed(wanted, known, listed)
        if isinstance(passed, Missing):
            return passed
        new = [(one[3], one[0]) for one in passed]
        return cached.order.changed([room.key for room in before], new)

    def _passed(
        self, wanted: SlidingFilter, known: FilterData, rooms: Sequence[BriefRoom]
    ) -> list[BriefRoom] | Missing:
        """Return the rooms that meet the conditions."""
        names = wanted.room_name_like is not None
        if needs_facts(wanted) and (lacking := self._without_facts(rooms, names=names)):
            return Missing(rooms=lacking, names=names)
        cached, own = self._shared.facts.all(), self._facts
        return passing(
            wanted, known, lambda room_id: own.get(room_id) or cached.get(room_id), rooms
        )

    # Data of the snapshot

    def _known(self, wanted: SlidingFilter) -> FilterData | Missing:
        """Return the account data and the children of spaces that a filter looks at."""
        personal = self._own_data() if needs_personal_data(wanted) else NO_DATA
        spaces = [
            space
            for space in wanted.spaces or ()
            if (room := self.get(space)) is not None and room.membership == JOIN
        ]
        lacking = [space for space in spaces if not self._has_children(space)]
        if personal is None or lacking:
            return Missing(personal=personal is None, spaces=lacking)
        return FilterData(personal, frozenset().union(*(self._children[space] for space in spaces)))

    def _own_data(self) -> PersonalData | None:
        if self._personal is None:
            self._personal = self._shared.personal(self._user_id, self._entry, self._news)
        return self._personal

    def _has_children(self, space: RoomId) -> bool:
        if space not in self._children and not self._is_wrong([space]):
            found = self._shared.children.get(space)
            if isinstance(found, frozenset):
                self._children[space] = found
        return space in self._children

    def _without_facts(self, rooms: Sequence[BriefRoom], *, names: bool) -> list[int]:
        """Return the rooms without facts that are right in the snapshot."""
        own, cached = self._facts, self._shared.facts.all()
        wrong = self._is_wrong(cached)
        lacking = []
        for nid, room_id, membership, *_ in rooms:
            found = own.get(room_id)
            if found is None and membership >= KNOCK and room_id not in wrong:
                found = cached.get(room_id)
                if found is not None and not found.is_known:
                    found = None
            if found is None or (names and not found.has_name):
                lacking.append(nid)
        self._shared.facts.hits += len(rooms) - len(lacking)
        return lacking

    def _is_wrong(self, room_ids: Collection[str]) -> Collection[str]:
        """Return those of the rooms whose cached facts may be wrong in the snapshot, and others."""
        changed = self._shared.facts.changed_since(self._news)
        if changed is None or self._news.unseen is None:
            return room_ids
        unseen = (self._rooms.get(nid) for nid in self._news.unseen)
        changed.update(room.room_id for room in unseen if room is not None)
        return changed if len(room_ids) > 1 else changed.intersection(room_ids)

    async def _read(self, conn: Connection, missing: Missing) -> None:
        """Read the missing data in the snapshot, and cache them."""
        if missing.personal:
            await self._read_personal(conn)
        if missing.spaces:
            children = await children_of(conn, missing.spaces)
            self._children |= {
                space: frozenset(child.room_id for child in found)
                for space, found in children.items()
            }
            wrong = self._is_wrong(missing.spaces)
            right = [space for space in children if space not in wrong]
            self._shared.store_children({one: self._children[one] for one in right}, self._news)
        if missing.rooms:
            await self._read_facts(conn, missing)

    async def _read_personal(self, conn: Connection) -> PersonalData:
        known = self._entry.personal or NO_DATA
        self._personal = await read_personal_data(conn, self._user_id, known, self._news)
        self._shared.store_personal(self._entry, self._personal)
        return self._personal

    async def _read_facts(self, conn: Connection, missing: Missing) -> None:
        rooms = [room for nid in missing.rooms if (room := self._rooms.get(nid)) is not None]
        cached = self._shared.facts.all()
        wrong = self._is_wrong(cached)
        known: dict[str, RoomFacts] = {
            room.room_id: cached[room.room_id]
            for room in rooms
            if room.room_id in cached and room.room_id not in wrong
        }
        facts, own = await read_facts(conn, rooms, known, names=missing.names)
        wrong = self._is_wrong(cached)
        right = {room_id: one for room_id, one in facts.items() if room_id not in wrong}
        self._shared.facts.add(right, self._news)
        self._shared.facts.misses += len(missing.rooms)
        self._facts |= known | facts | own

    def _nids(self, room_ids: Iterable[str]) -> set[int]:
        return {nid for one in room_ids if (nid := self._rooms.nid(one)) is not None}


def _within(
    rooms: UserRooms, order: RoomOrder, departed: Sequence[ListedRoom], ranges: Ranges
) -> Window:
    """Return the number of rooms, and those at the indexes of the ranges.

    The ``departed`` rooms are not in the order. They have their places between the others.
    """
    places = [order.ahead(*room.key) + at for at, room in enumerate(departed)]
    count = len(order) + len(departed)
    found: list[int] = []
    for first, last in _merged(((0, count - 1),) if ranges is None else ranges, count):
        start, end = bisect_left(places, first), bisect_right(places, last)
        part = list(order.between(first - start, last - end)) if last - end >= first - start else []
        for at in range(start, end):
            part.insert(places[at] - first, departed[at].room_nid)
        found += part
    return count, [room for nid in found if (room := rooms.get(nid)) is not None]


def _merged(ranges: Iterable[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges up to an index, in order and without overlaps."""
    done = 0
    for first, last in sorted(ranges):
        start, end = max(first, done), min(last, count - 1)
        if start <= end:
            yield start, end
            done = end + 1
