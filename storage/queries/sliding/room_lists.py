"""The rooms of the users of a process, latest activity first.

A process keeps the lists of the users who synced last. One statement reads a list the first time.
From then on a request costs what has changed, however many rooms the user has:

1. The rooms that were published here as changed since the list was made. For a
   new event in a room of the user that is the whole change: the position of the event is the new
   activity. A changed membership is read from the database.
2. The rooms with commits in the snapshot that were not published here yet
   (`ChangeSnapshot.unseen`), and those where state resolution changed the user's membership. They
   are read from the database.

So the list is exact for the snapshot of the request. A request with an older snapshot than the list
reads the changed rooms in its own snapshot, and does not store the result.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, LiteralString, NamedTuple, Self

from storage.cache_sizes import CacheSizes
from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.database.placeholders import fill
from storage.ids import RoomId, UserId
from storage.queries.sliding.connection import ClientRoom, ClientRooms
from storage.queries.sliding.filters import FilterData, needs_facts, needs_personal_data, passing
from storage.queries.sliding.personal_data import NO_DATA, STREAM, PersonalData, read_personal_data
from storage.queries.sliding.room_state import KNOCK, RoomFacts, RoomFactsCache, read_facts
from storage.queries.sliding.types import ALL_ROOMS, SlidingFilter
from storage.queries.sliding.user_rooms import (
    CompactRoom,
    ListChanges,
    ListedRoom,
    RoomChange,
    RoomOrder,
    UserRooms,
)
from storage.queries.space_walk import children_of
from storage.queries.sync.changed_rooms import ChangeSnapshot
from storage.streams import VectorPosition
from storage.streams.caches import Cache
from storage.streams.feed import Feed

# --------------------------------------------------------------------------------------------------
# The cached lists of one user, and the caches that all lists share.

LOG_MAX: Final = 100  # values of a user's rooms; an older filtered list is made again
CHANGED_MEMBERSHIPS_MAX: Final = 100  # changed memberships of a user
FILTERS_MAX: Final = 16  # of a user
CONNECTIONS_MAX: Final = 4  # of a user, whose departed rooms are remembered


class Filtered(NamedTuple):
    """The rooms that pass a filter, and the data with which that was decided."""

    rooms: UserRooms
    order: RoomOrder
    data: FilterData


class LeftRooms(NamedTuple):
    """The rooms that a connection was sent and that the user left since, latest first.

    ``forgotten`` are those of them that the user has forgotten; ``rooms`` has the others.
    """

    order: RoomOrder
    sent: ClientRooms
    rooms: Sequence[ListedRoom]
    forgotten: Sequence[ListedRoom]


class Entry:
    """The list of one user, and lists that are made of it.

    ``changed_memberships`` are the rooms where the user's membership may have changed after
    ``memberships_floor``, each with the time.
    ``log`` has the rooms that each value of ``rooms`` changed, with its serial.
    """

    __slots__ = (
        "changed_memberships",
        "filtered",
        "left_rooms",
        "log",
        "memberships_floor",
        "personal",
        "rooms",
        "serials",
        "weight",
    )

    def __init__(self, time: int) -> None:
        self.changed_memberships: dict[str, int] = {}
        self.memberships_floor: int = time
        self.rooms: UserRooms | None = None
        self.personal: PersonalData | None = None
        self.filtered: OrderedDict[SlidingFilter, Filtered] = OrderedDict()
        self.left_rooms: OrderedDict[int, LeftRooms] = OrderedDict()
        self.log: deque[tuple[int, frozenset[int]]] = deque(maxlen=LOG_MAX)
        self.serials: int = 0
        self.weight: int = 1

    def forget_changed_memberships(self, time: int) -> None:
        """Forget changes of memberships up to a time, if there are many. Only old snapshots differ.

        Such a snapshot reads all rooms.
        """
        if len(self.changed_memberships) > CHANGED_MEMBERSHIPS_MAX:
            self.changed_memberships = {
                room_id: changed_at
                for room_id, changed_at in self.changed_memberships.items()
                if changed_at > time
            }
            self.memberships_floor = time

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

    def touched_between(self, value: UserRooms, other: UserRooms) -> set[int] | None:
        """Return the rooms in which two values may differ. None: any room.

        Each is derived from a value on one line. So the changes after the earlier of these two
        values are enough.
        """
        if value.serial == other.serial:
            return set()
        after = min(value.base, other.base)
        if not self.log or self.log[0][0] > after + 1:
            return None
        return {nid for serial, nids in self.log if serial > after for nid in nids}

    def store_filtered(self, filters: SlidingFilter, filtered: Filtered) -> None:
        """Keep a filtered list, if it is of the cached rooms."""
        if filtered.rooms is self.rooms:
            self.filtered[filters] = filtered
            self.filtered.move_to_end(filters)
            if len(self.filtered) > FILTERS_MAX:
                self.filtered.popitem(last=False)

    def left_rooms_of(self, rooms: UserRooms, sent: ClientRooms) -> LeftRooms:
        """Return the rooms that the connection was sent and that the user left since."""
        order = rooms.left_rooms
        if not len(order) or not len(sent):
            return LeftRooms(order, sent, (), ())
        cached = self.left_rooms.get(id(sent))
        if cached is not None and cached.sent is sent and cached.order is order:
            return cached
        nids = [nid for _, nid in order.since(-1)] if len(order) <= len(sent) else list(sent)
        sent_rooms = [
            room
            for nid in nids
            if nid in sent and (room := rooms.get(nid)) is not None and not room.is_always_listed
        ]
        sent_rooms.sort(key=lambda room: room.key, reverse=True)
        left = [room for room in sent_rooms if not room.is_forgotten]
        forgotten = [room for room in sent_rooms if room.is_forgotten]
        left_rooms = self.left_rooms[id(sent)] = LeftRooms(order, sent, left, forgotten)
        if len(self.left_rooms) > CONNECTIONS_MAX:
            self.left_rooms.popitem(last=False)
        return left_rooms


class SharedCaches(NamedTuple):
    """The caches of facts that lists share, and what this process has followed.

    ``children`` are those of a space. ``seen`` returns, for a stream, up to which position the
    process has followed each writer.
    """

    changes: ListChanges
    facts: RoomFactsCache
    children: Cache[frozenset[str]]
    seen: Callable[[str], Mapping[str, int]]

    def personal(
        self, user_id: UserId, entry: Entry, snapshot: ChangeSnapshot
    ) -> PersonalData | None:
        """Return the account data of a user, if the cached ones are right."""
        data = entry.personal
        if data is None:
            return None
        is_right = data.is_right_for(user_id, snapshot, self.changes, self.seen(STREAM))
        return data if is_right else None

    def store_personal(self, entry: Entry, data: PersonalData) -> None:
        """Keep the account data of a user with the list."""
        is_later = data.time >= (entry.personal or NO_DATA).time
        if is_later and data.time >= self.changes.account_data.floor:
            entry.personal = data

    def store_children(
        self, children: Mapping[str, frozenset[str]], snapshot: ChangeSnapshot
    ) -> None:
        """Keep the children of spaces that were read, unless they may have changed since."""
        changed = self.facts.changed_since(snapshot)
        for space, child_ids in children.items():
            if changed is not None and space not in changed:
                self.children.fill(self.children.ticket(space), child_ids)


# --------------------------------------------------------------------------------------------------
# The rooms of a user in one snapshot, latest activity first, and windows on them.
#
# A list has the rooms that the user is in, is invited to, or knocks at. It has rooms that the user
# was banned or kicked from, if the user was ever in the room. A room that the user left is in a
# list only where the connection was sent the room before. So is one that state resolution took the
# user out of. Forgotten rooms are in no list: the response after has the end, once. Invites by
# users whom the reader ignores are left out.
#
# The rooms that pass a filter are kept with the list of the user, and changed by what changed:
# rooms, their facts, and the account data of the user. A window first looks at the caches. If these
# lack something, it is read for all rooms at once.

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
        snapshot: ChangeSnapshot,
    ) -> None:
        self._shared = shared
        self._user_id = user_id
        self._entry = entry
        self._rooms = rooms
        self._snapshot = snapshot
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
        return (RoomId(room[1]) for room in self._rooms.compact_rooms() if room[2] == JOIN)

    def changed_since(self, position: VectorPosition) -> Iterator[ListedRoom]:
        """Yield the rooms that may have events or a membership after a position, latest first."""
        return self._rooms.since(position.min)

    def forgotten_since(
        self, position: VectorPosition, sent: ClientRooms
    ) -> Iterator[tuple[ListedRoom, ClientRoom]]:
        """Yield the forgotten rooms of a connection, if it may not have their end yet."""
        for room in self._entry.left_rooms_of(self._rooms, sent).forgotten:
            client_room = sent[room.room_nid]
            upto = position.min if client_room.sent_upto is None else client_room.sent_upto
            if room.activity > upto:
                yield room, client_room

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
        while isinstance(window := self._window(filters, ranges, sent, ignored), Missing):
            await self._read(conn, window)
        return window

    def cached_window(
        self,
        filters: SlidingFilter,
        ranges: Ranges,
        sent: ClientRooms,
        ignored: Collection[str] = (),
    ) -> Window | None:
        """Return `window` without a statement. None: it takes one."""
        window = self._window(filters, ranges, sent, ignored)
        return None if isinstance(window, Missing) else window

    async def personal(self, conn: Connection) -> PersonalData:
        """Return the account data of the user."""
        return self._own_data() or await self._read_personal(conn)

    def cached_personal(self) -> PersonalData | None:
        """Return `personal` without a statement. None: it takes one."""
        return self._own_data()

    # Windows

    def _window(
        self, filters: SlidingFilter, ranges: Ranges, sent: ClientRooms, ignored: Collection[str]
    ) -> Window | Missing:
        left_rooms = self._entry.left_rooms_of(self._rooms, sent).rooms
        if filters == ALL_ROOMS:
            listed = self._heard(self._rooms.listed, ignored)
            return _within(self._rooms, listed, left_rooms, ranges)
        data = self._filter_data(filters)
        filtered = data if isinstance(data, Missing) else self._order(filters, data)
        if isinstance(filtered, Missing):
            return filtered
        passed = self._passed(filters, filtered.data, [room.compact for room in left_rooms])
        if isinstance(passed, Missing):
            return passed
        nids = {room[0] for room in passed}
        some = [room for room in left_rooms if room.room_nid in nids]
        return _within(self._rooms, self._heard(filtered.order, ignored), some, ranges)

    def _heard(self, order: RoomOrder, ignored: Collection[str]) -> RoomOrder:
        """Return an order without the invites by some users."""
        hidden = self._rooms.invites_of(ignored) if ignored else ()
        return order.changed([room.key for room in hidden], ()) if hidden else order

    def _order(self, filters: SlidingFilter, data: FilterData) -> Filtered | Missing:
        """Return the listed rooms that pass, from the cached ones or from all rooms."""
        done = self._filtered.get(filters)
        if done is not None:
            return done
        cached = self._entry.filtered.get(filters)
        touched = cached and self._entry.touched_between(cached.rooms, self._rooms)
        if cached is None or touched is None:
            order = self._whole_order(filters, data)
        else:
            touched = touched.union(self._nids(data.differing(cached.data)))
            order = self._changed_order(filters, data, cached, touched)
        if isinstance(order, Missing):
            return order
        filtered = self._filtered[filters] = Filtered(self._rooms, order, data)
        self._entry.store_filtered(filters, filtered)
        return filtered

    def _whole_order(self, filters: SlidingFilter, data: FilterData) -> RoomOrder | Missing:
        listed = [room for room in self._rooms.compact_rooms() if room[4]]
        passed = self._passed(filters, data, listed)
        if isinstance(passed, Missing):
            return passed
        return self._rooms.listed.only({room[0] for room in passed})

    def _changed_order(
        self, filters: SlidingFilter, data: FilterData, cached: Filtered, touched: Collection[int]
    ) -> RoomOrder | Missing:
        if not touched:
            return cached.order
        before = [room for nid in touched if (room := cached.rooms.get(nid)) is not None]
        now = [room for nid in touched if (room := self._rooms.get(nid)) is not None]
        listed = [room.compact for room in now if room.is_always_listed]
        passed = self._passed(filters, data, listed)
        if isinstance(passed, Missing):
            return passed
        new = [(room[3], room[0]) for room in passed]
        return cached.order.changed([room.key for room in before], new)

    def _passed(
        self, filters: SlidingFilter, data: FilterData, rooms: Sequence[CompactRoom]
    ) -> list[CompactRoom] | Missing:
        """Return the rooms that meet the conditions."""
        names = filters.room_name_like is not None
        if needs_facts(filters) and (lacking := self._without_facts(rooms, names=names)):
            return Missing(rooms=lacking, names=names)
        cached, own = self._shared.facts.all(), self._facts
        return passing(
            filters, data, lambda room_id: own.get(room_id) or cached.get(room_id), rooms
        )

    # Data of the snapshot

    def _filter_data(self, filters: SlidingFilter) -> FilterData | Missing:
        """Return the account data and the children of spaces that a filter looks at."""
        personal = self._own_data() if needs_personal_data(filters) else NO_DATA
        spaces = [
            space
            for space in filters.spaces or ()
            if (room := self.get(space)) is not None and room.membership == JOIN
        ]
        lacking = [space for space in spaces if not self._has_children(space)]
        if personal is None or lacking:
            return Missing(personal=personal is None, spaces=lacking)
        return FilterData(personal, frozenset().union(*(self._children[space] for space in spaces)))

    def _own_data(self) -> PersonalData | None:
        if self._personal is None:
            self._personal = self._shared.personal(self._user_id, self._entry, self._snapshot)
        return self._personal

    def _has_children(self, space: RoomId) -> bool:
        if space not in self._children and not self._is_wrong([space]):
            children = self._shared.children.get(space)
            if isinstance(children, frozenset):
                self._children[space] = children
        return space in self._children

    def _without_facts(self, rooms: Sequence[CompactRoom], *, names: bool) -> list[int]:
        """Return the rooms without facts that are right in the snapshot."""
        own, cached = self._facts, self._shared.facts.all()
        wrong = self._is_wrong(cached)
        lacking = []
        for nid, room_id, membership, *_ in rooms:
            facts = own.get(room_id)
            if facts is None and membership >= KNOCK and room_id not in wrong:
                facts = cached.get(room_id)
                if facts is not None and not facts.is_known:
                    facts = None
            if facts is None or (names and not facts.has_name):
                lacking.append(nid)
        self._shared.facts.hits += len(rooms) - len(lacking)
        return lacking

    def _is_wrong(self, room_ids: Collection[str]) -> Collection[str]:
        """Return those of the rooms whose cached facts may be wrong in the snapshot, and others."""
        changed = self._shared.facts.changed_since(self._snapshot)
        if changed is None or self._snapshot.unseen is None:
            return room_ids
        unseen = (self._rooms.get(nid) for nid in self._snapshot.unseen)
        changed.update(room.room_id for room in unseen if room is not None)
        return changed if len(room_ids) > 1 else changed.intersection(room_ids)

    async def _read(self, conn: Connection, missing: Missing) -> None:
        """Read the missing data in the snapshot, and cache them."""
        if missing.personal:
            await self._read_personal(conn)
        if missing.spaces:
            children = await children_of(conn, missing.spaces)
            self._children |= {
                space: frozenset(child.room_id for child in listed)
                for space, listed in children.items()
            }
            wrong = self._is_wrong(missing.spaces)
            right = [space for space in children if space not in wrong]
            self._shared.store_children(
                {space: self._children[space] for space in right}, self._snapshot
            )
        if missing.rooms:
            await self._read_facts(conn, missing)

    async def _read_personal(self, conn: Connection) -> PersonalData:
        cached = self._entry.personal or NO_DATA
        self._personal = await read_personal_data(conn, self._user_id, cached, self._snapshot)
        self._shared.store_personal(self._entry, self._personal)
        return self._personal

    async def _read_facts(self, conn: Connection, missing: Missing) -> None:
        rooms = [room for nid in missing.rooms if (room := self._rooms.get(nid)) is not None]
        cached = self._shared.facts.all()
        wrong = self._is_wrong(cached)
        usable: dict[str, RoomFacts] = {
            room.room_id: cached[room.room_id]
            for room in rooms
            if room.room_id in cached and room.room_id not in wrong
        }
        facts, own = await read_facts(conn, rooms, usable, names=missing.names)
        wrong = self._is_wrong(cached)
        right = {
            room_id: room_facts for room_id, room_facts in facts.items() if room_id not in wrong
        }
        self._shared.facts.add(right, self._snapshot)
        self._shared.facts.misses += len(missing.rooms)
        self._facts |= usable | facts | own

    def _nids(self, room_ids: Iterable[str]) -> set[int]:
        return {nid for room_id in room_ids if (nid := self._rooms.nid(room_id)) is not None}


def _within(
    rooms: UserRooms, order: RoomOrder, left_rooms: Sequence[ListedRoom], ranges: Ranges
) -> Window:
    """Return the number of rooms, and those at the indexes of the ranges.

    The ``left_rooms`` rooms are not in the order. They have their places between the others.
    """
    indexes = [order.rooms_before(*room.key) + at for at, room in enumerate(left_rooms)]
    count = len(order) + len(left_rooms)
    nids: list[int] = []
    for first, last in _merged(((0, count - 1),) if ranges is None else ranges, count):
        start, end = bisect_left(indexes, first), bisect_right(indexes, last)
        part = list(order.between(first - start, last - end)) if last - end >= first - start else []
        for at in range(start, end):
            part.insert(indexes[at] - first, left_rooms[at].room_nid)
        nids += part
    return count, [room for nid in nids if (room := rooms.get(nid)) is not None]


def _merged(ranges: Iterable[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges up to an index, in order and without overlaps."""
    done = 0
    for first, last in sorted(ranges):
        start, end = max(first, done), min(last, count - 1)
        if start <= end:
            yield start, end
            done = end + 1


TEMPLATE_ROOMS: Final[LiteralString] = """
SELECT m.room_nid, r.room_id, m.membership::int AS membership,
    COALESCE(CASE WHEN m.membership = {JOIN} THEN r.last_stream_ordering END, m.stream_ordering)
        AS activity,
    m.event_nid AS member_nid,
    CASE WHEN m.membership < {KNOCK} THEN EXISTS (
        SELECT FROM events e WHERE e.event_nid = m.event_nid AND e.sender_nid <> m.principal_nid
    ) ELSE false END AS was_kicked,
    CASE WHEN m.membership < {JOIN} THEN EXISTS (
        SELECT FROM visibility v
        WHERE v.room_nid = m.room_nid AND v.principal_nid = m.principal_nid
            AND v.last_join_topological IS NOT NULL
    ) ELSE true END AS was_joined,
    m.forgotten AND m.membership < {KNOCK} AS is_forgotten,
    CASE WHEN m.membership = {INVITE} THEN (
        SELECT i.name
        FROM events e
        JOIN principals i ON i.principal_nid = e.sender_nid
        WHERE e.event_nid = m.event_nid
    ) END AS inviter
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $1::text
    {some}
"""

SQL_ROOMS: Final[LiteralString] = fill(TEMPLATE_ROOMS, some="")

SQL_SOME_ROOMS: Final[LiteralString] = fill(
    TEMPLATE_ROOMS,
    some="""
    AND m.room_nid = ANY(
        $2::int[] || ARRAY(SELECT room_nid FROM rooms WHERE room_id = ANY($3::text[]))
    )
""",
)

SQL_RESOLVED: Final[LiteralString] = """
SELECT i.keys IS NULL AS is_everything, i.keys[1] AS room_id
FROM stream_positions p
JOIN writers w USING (instance_name)
LEFT JOIN unnest($2::text[], $3::bigint[]) AS s (instance_name, stream_id) USING (instance_name)
JOIN cache_invalidations i ON i.stream_id > COALESCE(s.stream_id, p.entered_at)
    AND i.stream_id <= p.stream_id AND i.writer_nid = w.writer_nid
WHERE p.stream_name = 'caches' AND i.cache_name IN ('cs_cache_fake', 'forgotten')
    AND (i.keys IS NULL OR $1::text = ANY(i.keys[2:]))
"""


class ResolvedRow(NamedTuple):
    """A room that the user has forgotten, or where resolution changed the user's membership.

    Or everything may have changed.
    """

    is_everything: bool
    room_id: str | None


class Plan(NamedTuple):
    """The steps from a cached value to a snapshot.

    ``nids`` and ``room_ids`` are to be read. ``active`` are rooms with a new activity. ``facts``:
    rooms whose facts may have changed.
    """

    cached: UserRooms
    nids: set[int]
    room_ids: set[str]
    active: dict[int, int]
    facts: set[int]

    @property
    def is_read(self) -> bool:
        """Return whether it takes a statement."""
        return bool(self.nids or self.room_ids)


class RoomLists:
    """The room lists of the users of a process.

    ``rooms_max``: the limit for the rooms of all lists together. ``seen`` returns, for a stream, up
    to which position the process has followed each writer.
    """

    def __init__(
        self,
        seen: Callable[[str], Mapping[str, int]],
        *,
        rooms_max: int,
        facts_max: int,
        changes_max: int,
    ) -> None:
        self.limit = rooms_max
        self.hits: int = 0
        self.misses: int = 0
        self.changes: ListChanges = ListChanges(changes_max, self._member, self._state)
        children: Cache[frozenset[str]] = Cache(
            "space_children", facts_max, lambda child_ids: 1 + len(child_ids)
        )
        facts = RoomFactsCache(facts_max, self.changes)
        self.shared: SharedCaches = SharedCaches(self.changes, facts, children, seen)
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._weight = 0

    @classmethod
    def following(
        cls, sizes: CacheSizes, feed: Feed, seen: Callable[[str], Mapping[str, int]]
    ) -> Self:
        """Return empty lists of these sizes that follow the feed."""
        lists = cls(
            seen,
            rooms_max=sizes.room_lists,
            facts_max=sizes.room_lists,
            changes_max=sizes.rooms,
        )
        feed.subscribe(lists.changes.record_advance)
        return lists

    def __len__(self) -> int:
        return len(self._entries)

    def counted(self) -> "dict[str, RoomLists | RoomFactsCache | Cache[Any]]":
        """Return everything that counts hits and misses, by name."""
        shared = self.shared
        return {"room_lists": self, "room_facts": shared.facts, "space_children": shared.children}

    def restart(self) -> None:
        """Forget everything, including reads in progress: the database was replaced."""
        self.changes.restart()

    def cached(self, user_id: UserId, snapshot: ChangeSnapshot) -> "RoomList | None":
        """Return `of` without a statement. None: it takes one."""
        entry = self._entries.get(user_id)
        plan = None if entry is None or not snapshot.is_resolved else self._plan(entry, snapshot)
        if entry is None or plan is None or plan.is_read:
            return None
        self.hits += 1
        return self._list(
            user_id, entry, self._advanced(user_id, entry, plan, (), snapshot), snapshot
        )

    async def of(self, conn: Connection, user_id: UserId, snapshot: ChangeSnapshot) -> "RoomList":
        """Return the list of a user in the snapshot of ``conn``."""
        entry = self._entry(user_id)
        plan = self._plan(entry, snapshot)
        if plan is not None and not snapshot.is_resolved:
            plan = await self._with_resolved(conn, user_id, plan)
        self.hits += plan is not None
        self.misses += plan is None
        if plan is None:
            rooms = await self._whole(conn, user_id, entry, snapshot)
        else:
            read = await self._some(conn, user_id, plan) if plan.is_read else ()
            rooms = self._advanced(user_id, entry, plan, read, snapshot)
        return self._list(user_id, entry, rooms, snapshot)

    def _list(
        self, user_id: UserId, entry: Entry, rooms: UserRooms, snapshot: ChangeSnapshot
    ) -> "RoomList":
        return RoomList(self.shared, user_id, entry, rooms, snapshot)

    # The steps of a request

    def _plan(self, entry: Entry, snapshot: ChangeSnapshot) -> Plan | None:
        """Return what to do with the cached value. None: read all rooms."""
        cached = entry.rooms
        if cached is None or snapshot.unseen is None:
            return None
        since = min(cached.time, snapshot.time)
        if since < max(self.changes.rooms.floor, entry.memberships_floor):
            return None
        plan = Plan(
            cached,
            set(cached.unseen | snapshot.unseen),
            set(),
            {},
            set(cached.unseen | snapshot.unseen),
        )
        for room_id, time in entry.changed_memberships.items():
            if time > since:
                nid = cached.nid(room_id)
                plan.room_ids.add(room_id) if nid is None else plan.nids.add(nid)
        is_later = snapshot.time >= cached.time
        for change in self._changes_of(cached, since):
            nid = cached.nid(change.room_id)
            room = None if nid is None or nid in plan.nids else cached.get(nid)
            if room is None or room.membership != JOIN:
                continue
            if change.activity is None or change.time > snapshot.time or not is_later:
                plan.nids.add(room.room_nid)
            else:
                plan.active[room.room_nid] = max(room.activity, change.activity)
        for room_id in self.changes.facts.since(since):
            if (nid := cached.nid(room_id)) is not None:
                plan.facts.add(nid)
        return plan

    def _changes_of(self, cached: UserRooms, since: int) -> Iterator[RoomChange]:
        """Yield the changes of the user's rooms; also of other rooms where these are few."""
        changes, limit = self.changes.rooms, len(cached) + 100
        recent = list(islice(changes.since(since), limit))
        if len(recent) < limit:
            return iter(recent)
        ids = (room_id for _, room_id, *_ in cached.compact_rooms())
        return changes.among(ids, since)

    async def _with_resolved(self, conn: Connection, user_id: UserId, plan: Plan) -> Plan | None:
        """Add the rooms where resolution changed the membership, unknown to this process yet."""
        seen = list(self.shared.seen("caches").items())
        writers, positions = [name for name, _ in seen], [at for _, at in seen]
        rows = await conn.fetch(SQL_RESOLVED, user_id, writers, positions, row=ResolvedRow)
        if any(row.is_everything for row in rows):
            return None
        for row in rows:
            nid = plan.cached.nid(row.room_id or "")
            plan.room_ids.add(row.room_id or "") if nid is None else plan.nids.add(nid)
        return plan

    async def _some(self, conn: Connection, user_id: UserId, plan: Plan) -> list[ListedRoom]:
        nids, room_ids = list(plan.nids), list(plan.room_ids)
        return await conn.fetch(SQL_SOME_ROOMS, user_id, nids, room_ids, row=ListedRoom)

    def _advanced(
        self,
        user_id: UserId,
        entry: Entry,
        plan: Plan,
        read: Sequence[ListedRoom],
        snapshot: ChangeSnapshot,
    ) -> UserRooms:
        """Return the value for the snapshot. Store it if that is not older than the cached one."""
        cached = plan.cached
        rooms: dict[int, ListedRoom | None] = {
            nid: None for nid in plan.nids if cached.get(nid) is not None
        }
        for nid, activity in plan.active.items():
            room = cached.get(nid)
            if nid not in plan.nids and room is not None:
                rooms[nid] = room._replace(activity=activity)
        rooms.update((room.room_nid, room) for room in read)
        changed = {nid: room for nid, room in rooms.items() if room != cached.get(nid)}
        touched = changed.keys() | {nid for nid in plan.facts if cached.get(nid) is not None}
        result = cached.changed(changed, snapshot.time, snapshot.unseen or frozenset())
        if touched:
            entry.number(result, cached.serial, touched)
        if entry.rooms is cached and snapshot.time >= max(cached.time, self.changes.rooms.floor):
            self._store(user_id, entry, result)
        return result

    async def _whole(
        self, conn: Connection, user_id: UserId, entry: Entry, snapshot: ChangeSnapshot
    ) -> UserRooms:
        """Return the value for the snapshot by a read of all rooms."""
        before = entry.rooms
        rooms = UserRooms(await conn.records(SQL_ROOMS, user_id, row=ListedRoom))
        rooms.time, rooms.unseen = snapshot.time, snapshot.unseen or frozenset()
        if (
            snapshot.unseen is not None
            and entry.rooms is before
            and snapshot.time
            >= max(0 if before is None else before.time, self.changes.rooms.floor, 1)
        ):
            entry.begin(rooms)
            self._store(user_id, entry, rooms)
        else:
            rooms.serial = rooms.base = -1
        return rooms

    # The entries

    def _entry(self, user_id: UserId) -> Entry:
        """Return the entry of a user. Memberships that change from now on are noted there."""
        entry = self._entries.get(user_id)
        if entry is None:
            entry = self._entries[user_id] = Entry(self.changes.clock)
            self._weight += entry.weight
            self._evict()
        else:
            self._entries.move_to_end(user_id)
        return entry

    def _store(self, user_id: UserId, entry: Entry, rooms: UserRooms) -> None:
        """Set the value of an entry, unless it was dropped meanwhile."""
        if self._entries.get(user_id) is not entry:
            return
        entry.rooms = rooms
        entry.forget_changed_memberships(rooms.time)
        self._weight += 1 + len(rooms) - entry.weight
        entry.weight = 1 + len(rooms)
        self._evict()

    def _evict(self) -> None:
        while self._weight > self.limit and self._entries:
            self._weight -= self._entries.popitem(last=False)[1].weight

    def _member(self, user_id: str, room_id: str) -> None:
        """Note that the membership of a user may have changed."""
        if (entry := self._entries.get(user_id)) is not None:
            entry.changed_memberships[room_id] = self.changes.clock

    def _state(self, room_id: str | None) -> None:
        """Drop the facts of a room that may have changed; or everything."""
        self.shared.facts.forget(room_id)
        self.shared.children.forget(None if room_id is None else (room_id,))
        if room_id is None:
            self._entries.clear()
            self._weight = 0
