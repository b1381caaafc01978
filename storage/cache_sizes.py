"""The sizes of the caches of one process: `Config.cache_mb`, divided by fixed shares.

Caches are limited by their number of entries, not by bytes, so a share becomes entries by the bytes
that one takes. Those are measured with ordinary ids (`tests/test_cache_sizes.py`): rooms with long
ids or large states take more, and a cache that is half empty takes less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

MEGABYTE: Final = 1_000_000


class CacheShare(NamedTuple):
    """The share of a cache, and what one of its entries takes.

    ``contents`` is for the reference page.
    """

    percent: int
    entry_bytes: int
    contents: str


SHARES: Final[Mapping[str, CacheShare]] = {
    "events": CacheShare(
        10, 1_700, "events that the writer caches: rows, visibility, chains, contents of state"
    ),
    "groups": CacheShare(1, 4_000, "states that the writer caches, without their entries"),
    "state_entries": CacheShare(
        43, 200, "entries of those states, counted once where states share them"
    ),
    "rooms": CacheShare(
        2, 1_600, "rooms that the writer caches, and rooms with a known last change"
    ),
    "names": CacheShare(14, 250, "state keys, users and servers whose nids are known"),
    "memberships": CacheShare(
        2, 90, "memberships of the users who synced last: the rooms to check at a sync"
    ),
    "whole_states": CacheShare(
        7,
        650,
        "entries of whole states that were read last; the same number of ids of members, of ids of"
        " auth chains, and of events with a position in the chain cover",
    ),
    "room_lists": CacheShare(
        15,
        700,
        "rooms in the lists of sliding sync; the same number of rooms whose facts filters look at,"
        " and of children of spaces",
    ),
    "sliding_rooms": CacheShare(5, 100, "rooms of the connections of sliding sync"),
    "notifier_keys": CacheShare(
        1, 1_000, "rooms and users whose last change is known, for each stream and writer"
    ),
}
"""The share of each cache. The percentages add up to 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """The most entries of each cache; see `SHARES`."""

    events: int
    groups: int
    state_entries: int
    rooms: int
    names: int
    memberships: int
    whole_states: int
    room_lists: int
    sliding_rooms: int
    notifier_keys: int

    @classmethod
    def of(cls, cache_mb: int) -> Self:
        """Divide the memory of `Config.cache_mb`. 0: every cache is empty."""
        return cls(
            **{
                name: cache_mb * MEGABYTE * share.percent // 100 // share.entry_bytes
                for name, share in SHARES.items()
            }
        )
