"""The rooms of the users of a process, latest activity first.

A process keeps the lists of the users who synced last. One statement reads a list the first time.
From then on a request costs what has changed, however many rooms the user has:

1. The rooms that were published here as changed since the list was made (list_changes.py). For a
   new event in a room of the user that is the whole news: the position of the event is the new
   activity. A changed membership is read from the database.
2. The rooms with commits in the snapshot that were not published here yet (`News.unseen`), and
   those where state resolution changed the user's membership. They are read from the database.

So the list is exact for the snapshot of the request. A request with an older snapshot than the list
reads the changed rooms in its own snapshot, and does not store the result.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, LiteralString, NamedTuple, Self

from storage.cache_sizes import CacheSizes
from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.database.sql_template import fill
from storage.ids import UserId
from storage.queries.sliding.list_changes import ListChanges, RoomChange
from storage.queries.sliding.list_entry import Entry, SharedCaches
from storage.queries.sliding.room_facts import RoomFactsCache
from storage.queries.sliding.room_list import RoomList
from storage.queries.sliding.user_rooms import ListedRoom, UserRooms
from storage.queries.sync.changed_rooms import News
from storage.streams.caches import Cache
from storage.streams.feed import Feed

TEMPLATE_ROOMS: Final[LiteralString] = """
SELECT m.room_nid, r.room_id, m.membership::int AS membership,
    COALESCE(CASE WHEN m.membership = 5 THEN r.last_stream_ordering END, m.stream_ordering)
        AS activity,
    m.event_nid AS member_nid,
    CASE WHEN m.membership < 3 THEN EXISTS (
        SELECT FROM events e WHERE e.event_nid = m.event_nid AND e.sender_nid <> m.principal_nid
    ) ELSE false END AS was_kicked,
    CASE WHEN m.membership < 5 THEN EXISTS (
        SELECT FROM visibility v
        WHERE v.room_nid = m.room_nid AND v.principal_nid = m.principal_nid
            AND v.last_join_topological IS NOT NULL
    ) ELSE true END AS was_joined,
    m.forgotten AND m.membership < 3 AS is_forgotten,
    CASE WHEN m.membership = 4 THEN (
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

    known: UserRooms
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
            "space_children", facts_max, lambda one: 1 + len(one)
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
        feed.subscribe(lists.changes.told)
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

    def cached(self, user_id: UserId, news: News) -> "RoomList | None":
        """Return `of` without a statement. None: it takes one."""
        entry = self._entries.get(user_id)
        plan = None if entry is None or not news.is_resolved else self._plan(entry, news)
        if entry is None or plan is None or plan.is_read:
            return None
        self.hits += 1
        return self._list(user_id, entry, self._advanced(user_id, entry, plan, (), news), news)

    async def of(self, conn: Connection, user_id: UserId, news: News) -> "RoomList":
        """Return the list of a user in the snapshot of ``conn``, whose positions are ``news``."""
        entry = self._entry(user_id)
        plan = self._plan(entry, news)
        if plan is not None and not news.is_resolved:
            plan = await self._with_resolved(conn, user_id, plan)
        self.hits += plan is not None
        self.misses += plan is None
        if plan is None:
            rooms = await self._whole(conn, user_id, entry, news)
        else:
            read = await self._some(conn, user_id, plan) if plan.is_read else ()
            rooms = self._advanced(user_id, entry, plan, read, news)
        return self._list(user_id, entry, rooms, news)

    def _list(self, user_id: UserId, entry: Entry, rooms: UserRooms, news: News) -> "RoomList":
        return RoomList(self.shared, user_id, entry, rooms, news)

    # The steps of a request

    def _plan(self, entry: Entry, news: News) -> Plan | None:
        """Return what to do with the cached value. None: read all rooms."""
        known = entry.rooms
        if known is None or news.unseen is None:
            return None
        since = min(known.time, news.time)
        if since < max(self.changes.rooms.floor, entry.moved_floor):
            return None
        plan = Plan(
            known, set(known.unseen | news.unseen), set(), {}, set(known.unseen | news.unseen)
        )
        for room_id, time in entry.moved.items():
            if time > since:
                nid = known.nid(room_id)
                plan.room_ids.add(room_id) if nid is None else plan.nids.add(nid)
        is_later = news.time >= known.time
        for change in self._changes_of(known, since):
            nid = known.nid(change.room_id)
            room = None if nid is None or nid in plan.nids else known.get(nid)
            if room is None or room.membership != JOIN:
                continue
            if change.activity is None or change.time > news.time or not is_later:
                plan.nids.add(room.room_nid)
            else:
                plan.active[room.room_nid] = max(room.activity, change.activity)
        for room_id in self.changes.facts.since(since):
            if (nid := known.nid(room_id)) is not None:
                plan.facts.add(nid)
        return plan

    def _changes_of(self, known: UserRooms, since: int) -> Iterator[RoomChange]:
        """Yield the changes of the user's rooms; also of other rooms where these are few."""
        changes, limit = self.changes.rooms, len(known) + 100
        found = list(islice(changes.since(since), limit))
        if len(found) < limit:
            return iter(found)
        ids = (room_id for _, room_id, *_ in known.brief())
        return changes.among(ids, since)

    async def _with_resolved(self, conn: Connection, user_id: UserId, plan: Plan) -> Plan | None:
        """Add the rooms where resolution changed the membership, unknown to this process yet."""
        seen = list(self.shared.seen("caches").items())
        writers, positions = [name for name, _ in seen], [at for _, at in seen]
        rows = await conn.fetch(SQL_RESOLVED, user_id, writers, positions, row=ResolvedRow)
        if any(row.is_everything for row in rows):
            return None
        for row in rows:
            nid = plan.known.nid(row.room_id or "")
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
        news: News,
    ) -> UserRooms:
        """Return the value for the snapshot. Store it if that is not older than the cached one."""
        known = plan.known
        rooms: dict[int, ListedRoom | None] = {
            nid: None for nid in plan.nids if known.get(nid) is not None
        }
        for nid, activity in plan.active.items():
            room = known.get(nid)
            if nid not in plan.nids and room is not None:
                rooms[nid] = room._replace(activity=activity)
        rooms.update((room.room_nid, room) for room in read)
        changed = {nid: room for nid, room in rooms.items() if room != known.get(nid)}
        touched = changed.keys() | {nid for nid in plan.facts if known.get(nid) is not None}
        result = known.changed(changed, news.time, news.unseen or frozenset())
        if touched:
            entry.number(result, known.serial, touched)
        if entry.rooms is known and news.time >= max(known.time, self.changes.rooms.floor):
            self._store(user_id, entry, result)
        return result

    async def _whole(
        self, conn: Connection, user_id: UserId, entry: Entry, news: News
    ) -> UserRooms:
        """Return the value for the snapshot by a read of all rooms."""
        before = entry.rooms
        rooms = UserRooms(await conn.records(SQL_ROOMS, user_id, row=ListedRoom))
        rooms.time, rooms.unseen = news.time, news.unseen or frozenset()
        if (
            news.unseen is not None
            and entry.rooms is before
            and news.time >= max(0 if before is None else before.time, self.changes.rooms.floor, 1)
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
        entry.forget_moved(rooms.time)
        self._weight += 1 + len(rooms) - entry.weight
        entry.weight = 1 + len(rooms)
        self._evict()

    def _evict(self) -> None:
        while self._weight > self.limit and self._entries:
            self._weight -= self._entries.popitem(last=False)[1].weight

    def _member(self, user_id: str, room_id: str) -> None:
        """Note that the membership of a user may have changed."""
        if (entry := self._entries.get(user_id)) is not None:
            entry.moved[room_id] = self.changes.clock

    def _state(self, room_id: str | None) -> None:
        """Drop the facts of a room that may have changed; or everything."""
        self.shared.facts.forget(room_id)
        self.shared.children.forget(None if room_id is None else (room_id,))
        if room_id is None:
            self._entries.clear()
            self._weight = 0
