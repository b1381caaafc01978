"""The chain cover: positions of events in the auth graph, so that "does a reach b" needs no walk.

Every accepted state event has a position: a chain and a number on it. An event reaches all earlier
positions of its own chain, and the targets of the links of its chain up to its own position. A
chain is the succession of one state key. An event that cites its predecessor under the same key
continues that one's chain, any other begins a new one. (Only one event can continue a chain, so the
power levels' chain is left to the power levels.)

A link means "from this position on, that chain is reached up to there". It is written for an auth
event only if nothing implies it already: an earlier link of the chain, or another auth event that
cites the same event.

The closure of an event gives for each chain the last number that the event reaches. So "does a
reach b" is one look-up. It is computed from the closures of its auth events, and shares with them
the part they have in common.

Source: the chain cover indices of directed acyclic graphs (Jagadish, 1990), as used for room auth
chains.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, Self, TypeAlias

from storage.persistent_map import IntMap, Map

Closure: TypeAlias = IntMap
"""Chain -> the last number on it that an event reaches; an event does not reach itself."""


class ChainPosition(NamedTuple):
    """A chain, and the number on it from 1."""

    chain_nid: int
    sequence_number: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The known part of a chain: its last number, and how far it reaches each other chain."""

    last: int
    links: Mapping[int, int]

    @classmethod
    def from_numbers(cls, numbers: tuple[int, ...]) -> Self:
        return cls(numbers[0], dict(zip(numbers[1::2], numbers[2::2], strict=True)))

    def numbers(self) -> tuple[int, ...]:
        """Return the last number, then the target and its number for each link.

        Caches keep chains in this form, which the garbage collector does not visit.
        """
        return (self.last, *chain.from_iterable(self.links.items()))


class ChainParent(NamedTuple):
    """An auth event: its position, and the auth events that it cites itself."""

    event_nid: int
    position: ChainPosition
    auth_events: Sequence[int]


class ChainEntry(NamedTuple):
    """A new event's position, and the links that begin there: target chain -> target number."""

    position: ChainPosition
    links: dict[int, int]


def enter(
    predecessor: ChainPosition | None,
    chain: Chain | None,
    new_chain_nid: int,
    parents: Collection[ChainParent],
) -> ChainEntry:
    """Return the position and links of a new event.

    ``predecessor`` is the position of the auth event under its own state key, if it has one.
    ``chain`` is the known part of that chain. The event begins the chain ``new_chain_nid`` unless
    it can continue that one.
    """
    continues = (
        predecessor is not None and chain is not None and chain.last == predecessor.sequence_number
    )
    if continues and predecessor is not None and chain is not None:
        position, chain_links = ChainPosition(predecessor.chain_nid, chain.last + 1), chain.links
    else:
        position, chain_links = ChainPosition(new_chain_nid, 1), {}
    implied = {nid for parent in parents for nid in parent.auth_events}
    links: dict[int, int] = {}
    for parent in parents:
        target = parent.position
        reached = max(chain_links.get(target.chain_nid, 0), links.get(target.chain_nid, 0))
        if (
            target.chain_nid != position.chain_nid
            and parent.event_nid not in implied
            and target.sequence_number > reached
        ):
            links[target.chain_nid] = target.sequence_number
    return ChainEntry(position, links)


def extended(chain: Chain | None, entry: ChainEntry) -> Chain:
    """Return the known part of a chain after an event was added to it."""
    return Chain(
        entry.position.sequence_number,
        {**(chain.links if chain is not None else {}), **entry.links},
    )


def closure_of(parents: Sequence[tuple[ChainPosition, Closure]]) -> Closure:
    """Return the closure of an event whose auth events have these positions and closures."""
    outer = [
        (position, own)
        for position, own in parents
        if not any(reaches(other, position) for _, other in parents)
    ]
    base = max((own for _, own in outer), key=len, default=Map())
    more: dict[int, int] = {}
    for position, own in outer:
        for chain_nid, number in (position, *(() if own is base else own.items())):
            if number > max(base.get(chain_nid, 0), more.get(chain_nid, 0)):
                more[chain_nid] = number
    return base.update(more)


def reaches(closure: Closure, position: ChainPosition) -> bool:
    """Return whether an event with this closure reaches a position."""
    return closure.get(position.chain_nid, 0) >= position.sequence_number


# --------------------------------------------------------------------------------------------------
# A position in the chain cover as a row of its table.
#
# A chain that begins with event 900 has the number -900, so the row of its first event needs none.
# Nearly every chain is that of a member, and has no other event. A row has up to two links: the
# distance to the first event of the target chain, and the target position, in one number::
#
#     event 900, a join    chain NULL, number 1      link to number 2 of the chain of event 870
#                          link_1 = 30 << 32 | 2     900 - 870, and 2
#
# Other links are rows of their own (`auth_chain_links`): those above two, and links that are too
# far for the number.

LINKS_MAX: Final = 2
_FARTHEST: Final = 2**31 - 1
_NUMBER: Final = 2**32 - 1

LinkRow: TypeAlias = tuple[int, int, int, int]
"""A row of `auth_chain_links`: chain, number, target chain, target number."""


class ChainColumns(NamedTuple):
    """The columns of a position in `auth_chains`, without the texts."""

    event_nid: int
    chain_nid: int | None
    sequence_number: int
    link_1: int | None
    link_2: int | None


def chain_columns(event_nid: int, entry: ChainEntry) -> tuple[ChainColumns, list[LinkRow]]:
    """Return the row of a position, and the rows of the links that it does not have."""
    position, own, others = entry.position, list[int](), list[LinkRow]()
    for target in entry.links.items():
        link = _inlined(event_nid, *target) if len(own) < LINKS_MAX else None
        if link is None:
            others.append((*position, *target))
        else:
            own.append(link)
    own += [0] * (LINKS_MAX - len(own))
    chain_nid = None if position.chain_nid == -event_nid else position.chain_nid
    columns = ChainColumns(
        event_nid,
        chain_nid,
        position.sequence_number,
        *(link_number or None for link_number in own),
    )
    return columns, others


def _inlined(event_nid: int, chain_nid: int, number: int) -> int | None:
    """Return a link as one number; None for a chain that is too far."""
    distance = event_nid + chain_nid
    if not -_FARTHEST <= distance <= _FARTHEST:
        return None
    return distance << 32 | number


def links_of(event_nid: int, links: Iterable[int | None]) -> list[ChainPosition]:
    return [
        ChainPosition((link >> 32) - event_nid, link & _NUMBER)
        for link in links
        if link is not None
    ]


def all_columns(
    entries: Mapping[int, ChainEntry],
) -> tuple[list[ChainColumns], list[LinkRow]]:
    """Return the rows of positions, by event nid, and those of the links that these do not have."""
    made = [chain_columns(nid, entry) for nid, entry in entries.items()]
    return [columns for columns, _ in made], [link for _, links in made for link in links]
