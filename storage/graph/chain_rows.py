"""A position in the chain cover as a row of its table.

A chain that begins with event 900 has the number -900, so the row of its first event needs none.
Nearly every chain is that of a member, and has no other event. A row has up to two links: the
distance to the first event of the target chain, and the target position, in one number::

    event 900, a join    chain NULL, number 1      link to number 2 of the chain of event 870
                         link_1 = 30 << 32 | 2     900 - 870, and 2

Other links are rows of their own (`auth_chain_links`): those above two, and links that are too far
for the number.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from storage.graph.chains import ChainEntry, ChainPosition

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
    place, own, others = entry.place, list[int](), list[LinkRow]()
    for target in entry.links.items():
        link = _inlined(event_nid, *target) if len(own) < LINKS_MAX else None
        if link is None:
            others.append((*place, *target))
        else:
            own.append(link)
    own += [0] * (LINKS_MAX - len(own))
    chain_nid = None if place.chain_nid == -event_nid else place.chain_nid
    columns = ChainColumns(
        event_nid, chain_nid, place.sequence_number, *(one or None for one in own)
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
