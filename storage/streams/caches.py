"""Caches of committed facts in a process, and their invalidation.

Each cache is bounded and drops the least recently used entry. Facts of the streams make entries
stale. Most invalidations follow from the facts of the stream "events". The others are facts of the
stream "caches": a state that resolution changed, an event that was reordered. A row of "caches" has
the name of a cache and a key, or no key for the whole cache. The name ``cs_cache_fake`` means
everything that depends on the current state of a room. Its key is the room id, followed by the
users whose membership changed. ``auth_chain_ids`` means that events of a room were deleted: reads
of chains compare the position of the row. ``removed`` lists the
deleted rows of a room, see `Removed`. The key of ``forgotten`` is a room, and the user who has
forgotten it. ``dictionaries`` means that writers have a new dictionary to encode events with.

A reader that fills a cache takes a `Ticket` before it queries the database. A value that became
stale since then is not stored.
"""

from collections import OrderedDict
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, Self, TypeVar

from storage.cache_sizes import CacheSizes
from storage.ids import EventId, UserId
from storage.streams.feed import Advance, Feed

# --------------------------------------------------------------------------------------------------
# Auth chains that this process has read, as long as no maintenance has changed anything.
#
# The auth chain of events that are all in the chain cover never changes, except by maintenance: a
# purge, a rebuild, a repair. Each transaction of these that changes a chain also publishes a fact
# of the stream "caches", under the writer "maintenance". The snapshot of a read has the position of
# that writer. If it is higher than that of the memory, the memory is out of date.
#
#     position 7     the chain of {a, b} is read, and remembered
#     position 7     {a, b} again: remembered
#     position 8     a purge has committed; {a, b} is read again, and all else is forgotten

CHAINS_MAX: Final = 100


class ChainMemory:
    """Auth chains by the set of their events, and events with a position in the chain cover.

    ``limit`` is the limit for the ids of all chains together, and also for the others. A chain
    counts as at least a hundredth of it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.hits: int = 0
        self.misses: int = 0
        self._as_of = -1
        self._chains: dict[frozenset[EventId], frozenset[EventId]] = {}
        self._placed: set[EventId] = set()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._chains)

    def may_have(self, event_ids: frozenset[EventId]) -> bool:
        """Return False, and count a miss, if no read has to compare positions first."""
        self.misses += event_ids not in self._chains
        return event_ids in self._chains

    def chain(self, event_ids: frozenset[EventId], as_of: int) -> frozenset[EventId] | None:
        """Return their auth chain as of a position, or None."""
        if not self._holds(as_of) or event_ids not in self._chains:
            self.misses += 1
            return None
        self.hits += 1
        chain = self._chains[event_ids] = self._chains.pop(event_ids)  # the last one to be dropped
        return chain

    def keep(self, event_ids: frozenset[EventId], chain: frozenset[EventId], as_of: int) -> None:
        """Remember the auth chain of events that all have a position, as read at ``as_of``."""
        weight = self._weigh(event_ids, chain)
        if not self._holds(as_of) or event_ids in self._chains or weight > self.limit:
            return
        self._chains[event_ids] = chain
        self._weight += weight
        while self._weight > self.limit:
            oldest = next(iter(self._chains))
            self._weight -= self._weigh(oldest, self._chains.pop(oldest))

    def may_know_placed(self, event_ids: set[EventId]) -> bool:
        """Return False if none of these is known to have a position, as of any position."""
        return not self._placed.isdisjoint(event_ids)

    def without_placed(self, event_ids: set[EventId], as_of: int) -> set[EventId]:
        """Return those of the events that are not known to have a position."""
        return event_ids - self._placed if self._holds(as_of) else event_ids

    def keep_placed(self, event_ids: Collection[EventId], as_of: int) -> None:
        """Remember that these events have a position."""
        if self._holds(as_of):
            if len(self._placed) + len(event_ids) > self.limit:
                self._placed.clear()
            if len(event_ids) <= self.limit:
                self._placed.update(event_ids)

    def _holds(self, as_of: int) -> bool:
        """Return whether all of it is as of this position; forget what is older.

        A standby may be behind: it uses nothing of what others have read, and adds nothing.
        """
        if as_of > self._as_of:
            self._chains.clear()
            self._placed.clear()
            self._weight = 0
            self._as_of = as_of
        return as_of == self._as_of

    def _weigh(self, event_ids: frozenset[EventId], chain: frozenset[EventId]) -> int:
        return max(len(event_ids) + len(chain), self.limit // CHAINS_MAX)


K = TypeVar("K", bound=str)
V = TypeVar("V")
E = TypeVar("E")
S = TypeVar("S", bound=Sized)
Key = tuple[str, ...]

CURRENT_STATE: Final = "cs_cache_fake"
FORGOTTEN: Final = "forgotten"
DICTIONARIES: Final = "dictionaries"
AUTH_CHAIN_IDS: Final = "auth_chain_ids"
STATES_MAX: Final = 100  # their groups are sent with each query
REMOVED: Final = "removed"

Kind = Literal["timeline", "held", "state_groups"]


class Removed(NamedTuple):
    """The rows that one transaction deleted.

    The key of a row ``removed`` is the room, the number of that transaction (`rooms.removals`) and
    the rest. ``timeline``: these events are no longer in the timeline, some may be stored as
    outliers; also gaps that they had filled or opened. ``held``: these are no longer stored, given
    by id and, after a ``#``, by nid. ``state_groups``: neither are these.
    """

    room_id: str
    number: int
    kind: str
    ids: Sequence[str]

    @classmethod
    def of(cls, key: Sequence[str]) -> "Removed":
        room_id, number, kind, *ids = key
        return cls(room_id, int(number), kind, ids)

    @property
    def event_ids(self) -> list[str]:
        return (
            []
            if self.kind == "state_groups"
            else [event_id for event_id in self.ids if not event_id.startswith("#")]
        )

    @property
    def event_nids(self) -> list[int]:
        """Return the nids of the events that are no longer stored."""
        return [int(text[1:]) for text in self.ids if text.startswith("#")]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The time at which a reader began to query."""

    key: Key
    began: int


class Cache(Generic[V]):
    """A bounded cache that counts its hits and misses.

    ``limit`` applies to the sum of ``weigh`` over the entries.
    """

    def __init__(self, name: str, limit: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        self.name = name
        self.limit = limit
        self.hits: int = 0
        self.misses: int = 0
        self._weigh = weigh
        self._weight = 0
        self._entries: OrderedDict[Key, V] = OrderedDict()
        self._clock = 0
        self._staled: dict[Key, int] = {}
        self._all_staled = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, *key: str) -> V | Ticket:
        """Return the entry, or a ticket to fill it with."""
        if key in self._entries:
            self.hits += 1
            self._entries.move_to_end(key)
            return self._entries[key]
        self.misses += 1
        return Ticket(key, self._clock)

    def ticket(self, *key: str) -> Ticket:
        """Return a ticket to replace an entry that the database does not confirm."""
        return Ticket(key, self._clock)

    def peek(self, *key: str) -> V | None:
        """Return the entry, if it is there. Count nothing, and do not extend its life."""
        return self._entries.get(key)

    def entries(self) -> dict[Key, V]:
        """Return all entries. Count nothing, and do not extend their life."""
        return dict(self._entries)

    def fill(self, ticket: Ticket, value: V) -> None:
        """Store a value from the database, unless it may be stale already."""
        if max(self._all_staled, self._staled.get(ticket.key, 0)) > ticket.began:
            return
        self._drop(ticket.key)
        self._entries[ticket.key] = value
        self._weight += self._weigh(value)
        while self._weight > self.limit:
            self._weight -= self._weigh(self._entries.popitem(last=False)[1])

    async def many(
        self, keys: Iterable[K], load: Callable[[list[K]], Awaitable[Mapping[K, V]]]
    ) -> dict[K, V]:
        """Return the entries of these keys; load and store the missing ones.

        A key that ``load`` does not return has none.
        """
        entries: dict[K, V] = {}
        tickets: dict[K, Ticket] = {}
        for key in keys:
            entry = self.get(key)
            if isinstance(entry, Ticket):
                tickets[key] = entry
            else:
                entries[key] = entry
        if tickets:
            loaded = await load(list(tickets))
            for key, value in loaded.items():
                self.fill(tickets[key], value)
            entries.update(loaded)
        return entries

    def forget(self, key: Sequence[str] | None) -> None:
        """Drop one stale entry, or all."""
        self._clock += 1
        if key is None or len(self._staled) > self.limit:
            self._entries.clear()
            self._weight = 0
            self._staled.clear()
            self._all_staled = self._clock
        else:
            stale = tuple(key)
            self._drop(stale)
            self._staled[stale] = self._clock

    def _drop(self, key: Key) -> None:
        if key in self._entries:
            self._weight -= self._weigh(self._entries.pop(key))


class LastChange:
    """The position of the last change of each room or user, or a later one, never an earlier one.

    A key without an entry has not changed since ``floor``: since this process began to listen, or
    since the oldest entry was dropped. Positions of several writers arrive in any order. They are
    stored in ascending order anyway, each as the largest so far. So the changes since a position
    are at the end.
    """

    def __init__(self, limit: int, floor: int) -> None:
        self.limit = limit
        self.floor: int = floor
        self.hits: int = 0
        self.misses: int = 0
        self._latest = floor
        self._last: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def restart(self, floor: int) -> None:
        """Forget all changes before ``floor``."""
        self.floor = self._latest = floor
        self._last.clear()

    def note(self, key: str, position: int) -> None:
        self._latest = max(self._latest, position)
        self._last.pop(key, 0)
        self._last[key] = self._latest
        if len(self._last) > self.limit:
            _, dropped = self._last.popitem(last=False)
            self.floor = max(self.floor, dropped)

    def last(self, key: str) -> int:
        """Return the position of its last change; 0 if there was none since ``floor``."""
        return self._last.get(key, 0)

    def since(self, position: int) -> Iterator[str]:
        """Yield the keys that changed since a position, the latest first.

        The position must not be below ``floor``.
        """
        for key, last in reversed(self._last.items()):
            if last <= position:
                return
            yield key

    def may_have_changed(self, key: str, since: int) -> bool:
        """Return False only if it has certainly not changed after ``since``.

        That is a hit: no query is needed.
        """
        may_have = since < self.floor or self._last.get(key, 0) > since
        self.hits += not may_have
        self.misses += may_have
        return may_have


class RoomsOf(NamedTuple):
    """The rooms that a local user is in, with their nids.

    ``changed_at`` is the position of the last change of any of the user's memberships.
    """

    joined: Mapping[str, int]
    changed_at: int


class MemberIds(NamedTuple):
    """The users with one membership in the room's state of a group. None: a room without state.

    The content of a group does not change. So this is right as long as the current state of the
    room has the group.
    """

    state_group: int | None
    user_ids: list[UserId]


class ReadCaches(Generic[E, S]):
    """The caches of one process, updated by the feed of its streams.

    ``memberships``: the limit for all users whose rooms are cached, together.

    ``state_entries``: the limit for all whole states by their groups, together; one counts as at
    least a hundredth of it. These never become stale. It is also the limit for the ids of members,
    which each read compares with the room's group, and for the ids of auth chains, which each
    read compares with the position of maintenance. ``listening_since``: a position of the stream
    "events" above which every fact will be published here.
    """

    def __init__(
        self, *, events: int, rooms: int, memberships: int, state_entries: int, listening_since: int
    ) -> None:
        self.events: Cache[E] = Cache("events", events)
        self.current_state: Cache[S] = Cache("current_state", rooms)
        self.rooms_of: Cache[RoomsOf] = Cache(
            "rooms_of", memberships, lambda rooms: 1 + len(rooms.joined)
        )
        self.states: Cache[S] = Cache(
            "states", state_entries, lambda state: max(len(state), state_entries // STATES_MAX)
        )
        self.members: Cache[MemberIds] = Cache(
            "members", state_entries, lambda members: 1 + len(members.user_ids)
        )
        self.chains: ChainMemory = ChainMemory(state_entries)
        self.room_changes: LastChange = LastChange(rooms, listening_since)
        # by events; changes by resolution are published without a position
        self.state_changes: LastChange = LastChange(rooms, listening_since)
        self._by_name: dict[str, Cache[Any]] = {
            cache.name: cache for cache in (self.events, self.current_state, self.rooms_of)
        }

    @classmethod
    def of(cls, sizes: CacheSizes, feed: Feed, listening_since: int) -> Self:
        """Return empty caches of these sizes that follow the feed."""
        caches = cls(
            events=sizes.events,
            rooms=sizes.rooms,
            memberships=sizes.memberships,
            state_entries=sizes.whole_states,
            listening_since=listening_since,
        )
        feed.subscribe(caches.on_advance)
        return caches

    def counted(self) -> "dict[str, Cache[Any] | ChainMemory | LastChange]":
        """Return everything that counts hits and misses, by name."""
        return {
            **self._by_name,
            "states": self.states,
            "members": self.members,
            AUTH_CHAIN_IDS: self.chains,
            "room_changes": self.room_changes,
        }

    def hit_rates(self) -> dict[str, float]:
        """Return hits by all look-ups of each cache, 0 where there was none."""
        return {
            name: cache.hits / max(1, cache.hits + cache.misses)
            for name, cache in self.counted().items()
        }

    def restart(self, listening_since: int) -> None:
        """Forget everything, including reads in progress: the database was replaced."""
        for cache in (*self._by_name.values(), self.states, self.members):
            cache.forget(None)
        self.chains = ChainMemory(self.chains.limit)  # reads in progress keep the old one
        for changes in (self.room_changes, self.state_changes):
            changes.restart(listening_since)

    def on_advance(self, advance: Advance) -> None:
        """Invalidate by an advance of the feed."""
        if advance.stream_name == "events":
            for row in advance.rows:
                self._event(row.stream_id, row.row)
        elif advance.stream_name == "caches":
            for row in advance.rows:
                self.invalidate(row.row[0], row.row[1])

    def invalidate(self, name: str, key: Sequence[str] | None) -> None:
        """Apply a row of the stream "caches".

        A name without a cache in this process is ignored.
        """
        if name == CURRENT_STATE:
            self._state_changed(key)
        elif name == REMOVED and key is not None:
            self._removed(Removed.of(key))
        elif name in self._by_name:
            self._by_name[name].forget(key)

    def _state_changed(self, key: Sequence[str] | None) -> None:
        if key is None:
            self.current_state.forget(None)
            self.rooms_of.forget(None)
            return
        self.current_state.forget(key[:1])
        for user in key[1:]:
            self.rooms_of.forget((user,))

    def _removed(self, removed: Removed) -> None:
        for event_id in removed.event_ids:
            self.events.forget((event_id,))

    def _event(self, position: int, row: Sequence[str | None]) -> None:
        event_id, room_id, event_type, state_key, redacts = row
        if event_id is None or room_id is None:
            return
        self.room_changes.note(room_id, position)
        self.events.forget((event_id,))
        if redacts is not None:
            self.events.forget((redacts,))
        if state_key is not None:
            self.state_changes.note(room_id, position)
            self.current_state.forget((room_id,))
        if event_type == "m.room.member" and state_key is not None:
            self.rooms_of.forget((state_key,))
