"""Which state a client wants: pairs of a type and a state key, and how two sets of them differ.

A wildcard for both has no members if the set has ``$LAZY``: the timeline says which ones are sent.
A wildcard for the type alone is of all types, m.room.member as well. Excluded pairs are not part of
the statement: their state is read and left out.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import orjson

from storage.ids import StateKey, UserId
from storage.queries.sliding.checks import LAZY
from storage.queries.sliding.types import ANY, ME

MEMBER: Final = "m.room.member"
EVERYTHING: Final = (ANY, ANY)
ALL_MEMBERS: Final = (MEMBER, ANY)
LAZY_MEMBERS: Final = (MEMBER, LAZY)

Pairs = frozenset[StateKey]
NO_PAIRS: Final[Pairs] = frozenset()


class Required(NamedTuple):
    """The state that a client wants: what an included pair matches and no excluded one.

    Members that are loaded lazily are sent in any case.
    """

    included: Pairs = NO_PAIRS
    excluded: Pairs = NO_PAIRS

    @property
    def explicit(self) -> Pairs:
        """Return the included pairs, with all members where a wildcard stands for them."""
        if EVERYTHING in self.included and LAZY_MEMBERS not in self.included:
            return self.included | {ALL_MEMBERS}
        return self.included

    def excludes(self, state_key: StateKey, user_id: UserId) -> bool:
        """Return whether an excluded pair matches this type and state key."""
        kind, key = state_key
        return any(
            one in (ANY, kind) and (user_id if other == ME else other) in (ANY, key)
            for one, other in self.excluded
        )


NOTHING: Final = Required()


def beyond(required: Required, known: Required) -> Pairs:
    """Return the included pairs that may match state which ``known`` does not have.

    State that was excluded may be in it with other state that matches the same pair.
    """
    if required == known:
        return NO_PAIRS
    old = known.explicit
    lifted = known.excluded - required.excluded
    return frozenset(
        pair
        for pair in required.explicit
        if pair != LAZY_MEMBERS
        and (not _is_in(pair, old) or any(_overlap(pair, one) for one in lifted))
    )


def _overlap(one: StateKey, other: StateKey) -> bool:
    """Return whether two pairs may match the same state. ``$ME`` may be any state key."""
    return all(
        mine == its or ANY in (mine, its) or ME in (mine, its)
        for mine, its in zip(one, other, strict=True)
    )


def _is_in(pair: StateKey, known: Pairs) -> bool:
    """Return whether ``known`` matches all that the pair matches."""
    kind, key = pair
    if pair in known:
        return True
    if kind == ANY:  # members as well, unless the key is a wildcard too
        members = ALL_MEMBERS in known or (MEMBER, key) in known
        return key != ANY and EVERYTHING in known and members
    if (kind, ANY) in known or (key != ANY and (ANY, key) in known):
        return True
    return EVERYTHING in known and kind != MEMBER


class Pattern(NamedTuple):
    """A pair of one set, by the number of the set. None: any."""

    number: int
    type: str | None
    state_key: str | None


class Patterns:
    """The distinct sets of a statement, by number."""

    def __init__(self, user_id: UserId) -> None:
        self._user_id = user_id
        self._numbers: dict[Pairs, int] = {}

    def number(self, pairs: Pairs) -> int | None:
        """Return the number of a set as `Required.explicit` returns it. None for an empty one."""
        wanted = pairs - {LAZY_MEMBERS}
        return self._numbers.setdefault(wanted, len(self._numbers)) if wanted else None

    def columns(self) -> tuple[list[int], list[str | None], list[str | None]]:
        """Return the patterns of all sets: their numbers, types and state keys."""
        rows = list(self._rows())
        return (
            [row.number for row in rows],
            [row.type for row in rows],
            [row.state_key for row in rows],
        )

    def _rows(self) -> Iterator[Pattern]:
        for pairs, number in self._numbers.items():
            for kind, key in sorted(pairs):
                own = self._user_id if key == ME else key
                yield Pattern(number, None if kind == ANY else kind, None if own == ANY else own)
                if kind == ANY and own != ANY:  # the wildcard reads no members
                    yield Pattern(number, MEMBER, own)


def printed(required: Required) -> str:
    """Return a set as text. Equal sets have the same text."""
    included, excluded = sorted(required.included), sorted(required.excluded)
    return orjson.dumps(
        {"include": included, "exclude": excluded} if excluded else included
    ).decode()


def read(text: str) -> Required:
    """Return the set of a text of `printed`."""
    found = orjson.loads(text)
    parts = found if isinstance(found, dict) else {"include": found, "exclude": ()}
    return Required(*(frozenset((kind, key) for kind, key in part) for part in parts.values()))


def union(sets: Iterable[Required]) -> Required:
    """Return a set that matches all that one of the sets matches.

    ``$LAZY`` of one set takes no members away from the wildcard of another. A pair stays excluded
    if no other set includes state that it matches, or if that set excludes it as well.
    """
    found = list(dict.fromkeys(sets))
    if len(found) == 1:
        return found[0]
    included = NO_PAIRS.union(*(one.explicit for one in found))
    excluded = (
        pair
        for one in found
        for pair in one.excluded
        if not any(_includes(other, pair) for other in found)
    )
    return Required(included, frozenset(excluded))


def _includes(required: Required, pair: StateKey) -> bool:
    """Return whether the set may match state that the pair matches."""
    return pair not in required.excluded and any(
        _overlap(pair, one) for one in required.explicit if one != LAZY_MEMBERS
    )
