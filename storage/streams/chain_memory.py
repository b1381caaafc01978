"""Auth chains that this process has read, as long as no maintenance has changed anything.

The auth chain of events that are all in the chain cover never changes, except by maintenance: a
purge, a rebuild, a repair. Each transaction of these that changes a chain also publishes a fact of
the stream "caches", under the writer "maintenance". The snapshot of a read has the position of that
writer. If it is higher than that of the memory, the memory is out of date.

    position 7     the chain of {a, b} is read, and remembered
    position 7     {a, b} again: remembered
    position 8     a purge has committed; {a, b} is read again, and all else is forgotten
"""

from collections.abc import Collection
from typing import Final

from storage.ids import EventId

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
        found = self._chains[event_ids] = self._chains.pop(event_ids)  # the last one to be dropped
        return found

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
