"""Which state a client wants: pairs of a type and a state key, and how two sets of them differ.

A wildcard for both has no members if the set has ``$LAZY``: the timeline says which ones are sent.
A wildcard for the type alone is of all types, m.room.member as well.
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

Required = frozenset[StateKey]
NOTHING: Final[Required] = frozenset()


def explicit(required: Required) -> Required:
    """Return the set with a pair for all members where a wildcard stands for them."""
    if EVERYTHING in required and LAZY_MEMBERS not in required:
        return required | {ALL_MEMBERS}
    return required


def beyond(required: Required, known: Required) -> Required:
    """Return the pairs that may match state which no pair of ``known`` matches."""
    if required == known:
        return NOTHING
    old = explicit(known)
    return frozenset(
        pair for pair in explicit(required) if pair != LAZY_MEMBERS and not _is_in(pair, old)
    )


def _is_in(pair: StateKey, known: Required) -> bool:
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
        self._numbers: dict[Required, int] = {}

    def number(self, required: Required) -> int | None:
        """Return the number of a set as `explicit` returns it. None for an empty one."""
        wanted = required - {LAZY_MEMBERS}
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
        for required, number in self._numbers.items():
            for kind, key in sorted(required):
                own = self._user_id if key == ME else key
                yield Pattern(number, None if kind == ANY else kind, None if own == ANY else own)
                if kind == ANY and own != ANY:  # the wildcard reads no members
                    yield Pattern(number, MEMBER, own)


def printed(required: Required) -> str:
    """Return a set as text. Equal sets have the same text."""
    return orjson.dumps(sorted(required)).decode()


def read(text: str) -> Required:
    """Return the set of a text of `printed`."""
    return frozenset((kind, key) for kind, key in orjson.loads(text))


def union(sets: Iterable[Required]) -> Required:
    """Return the pairs of all sets.

    ``$LAZY`` of one set takes no members away from the wildcard of another.
    """
    found = list(sets)
    if len(found) == 1:
        return found[0]
    return frozenset[StateKey]().union(*map(explicit, found))
