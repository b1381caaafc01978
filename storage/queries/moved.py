"""Pages of an order in which events move: what a token means when some have moved up since it was made (`moved_across` in the schema).

What a walk is due: what was there when it began, and what arrives ahead of it, each event once. So a walk backwards meets what has moved up past
its place at the top of its next page, and a walk forwards leaves out what it has met already. New events that come to stand
behind a walk are not due, as ever; nor, forwards, are parents that arrive after a child of theirs was met, or had come to stand behind. `to` is a place in the same sense: two
walks that meet at a token share nothing and lack nothing. With honest depths nothing moves, and nothing of this is read.

A page that ends amid moved events leaves two stretches behind that do not meet, so its token holds the place from before, too. Events may go
on moving, so there may be several (`PaginationToken.earlier`); a place is forgotten once the walk has come by all that moved past it. After
`LEVELS_MAX` of them, each with a move in between and a page full of what moved, the second one is forgotten, and events may be met again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from storage.streams import PaginationToken
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import LEVELS_MAX, Level


class Moved(NamedTuple):
    """What the tables tell of a room's order: how many moves it has had, and, of events that the page left out, their order and levels."""

    moves: int = 0
    left_out: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, numbers: Sequence[int] | None) -> "Moved":
        """From the column: the moves, then all orders, then all levels. None: no event of the room has ever moved."""
        if not numbers:
            return cls()
        moves, *rest = numbers
        half = len(rest) // 2
        return cls(moves, list(zip(rest[:half], rest[half:], strict=True)))


def walking(token: PaginationToken, direction: str) -> PaginationToken:
    """A token to go on from: who turns around begins at its last place."""
    return token if token.direction in ("", direction) else replace(token, direction="", earlier=())


def base(token: PaginationToken) -> Level:
    """The place above which there is only what lies above the token, or has moved there."""
    return token.levels[0] if token.direction == "b" else token.levels[-1]


def numbers(token: PaginationToken) -> list[int] | None:
    """The token as moved_across takes it. None for the ends of the order, which nothing moves across."""
    if token.topological == 0 or token.topological >= LARGEST_POSITION - 1:
        return None
    found = [int(token.direction != "f")]
    for level in token.levels:
        found += (level.moves, level.topological, level.stream)
    return found


def as_of(token: PaginationToken) -> int:
    """How many moves the room had when the first place of the token was made; for the ends of the order, however many it has."""
    return LARGEST_POSITION if numbers(token) is None else token.levels[0].moves


def ahead(end: PaginationToken, start: PaginationToken, direction: str, moved: Moved) -> PaginationToken:
    """The token for what lies ahead at the end of a page that began at ``start``, as of now."""
    earlier = () if numbers(start) is None else tuple(_kept(end, start.levels, direction, moved))
    if len(earlier) >= LEVELS_MAX:
        earlier = (*earlier[:1], *earlier[2:])
    return replace(end, moves=moved.moves, direction=direction if earlier else "", earlier=earlier)


def _kept(end: PaginationToken, levels: Sequence[Level], direction: str, moved: Moved) -> Iterator[Level]:
    """The places that do not follow from the new one."""
    for number, level in enumerate(levels):
        if direction == "b":
            kept = (level.topological, level.stream) < (end.topological, end.stream)
        else:
            kept = any(bits >> number & 1 and order >= end.topological for order, bits in moved.left_out)
        if kept:
            yield level
