"""Pages of an order in which events move: what a token means when some have moved up since it was made (`reordered_across` in the schema).

What a walk is due: what was there when it began, and what arrives ahead of it, each event once. So a walk backwards meets what has moved up past
its place at the top of its next page, and a walk forwards leaves out what it has met already. New events that come to stand
behind a walk are not due, as ever; nor, forwards, are parents that arrive after a child of theirs was met, or had come to stand behind. `to` is a place in the same sense: two
walks that meet at a token share nothing and lack nothing. With honest depths nothing moves, and nothing of this is read.

A page that ends amid moved events leaves two stretches behind that do not meet, so its token holds the place from before, too. Events may go
on moving, so there may be several (`PaginationToken.earlier`); a place is forgotten once the walk has come by all that moved past it. After
`LEVELS_MAX` of them, each with a move in between and a page full of what moved, the second one is forgotten, and events may be met again.

A walk forwards from beside a timeline, as from a sync token, has two places (`PaginationToken.beside`). Below the one at which it began, only live
events after the timeline are due. It has passed all that stands below the other. As the upper end of a range, such a token means the other alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from storage.streams import PaginationToken
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import LEVELS_MAX, Level


class Reorderings(NamedTuple):
    """What the tables tell of a room's order: how many moves it has had, and, of events that the page left out, their order and levels."""

    moves: int = 0
    left_out: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, numbers: Sequence[int] | None) -> "Reorderings":
        """From the column: the moves, then all orders, then all levels.

        None: no event of the room has ever moved.
        """
        if not numbers:
            return cls()
        moves, *rest = numbers
        half = len(rest) // 2
        return cls(moves, list(zip(rest[:half], rest[half:], strict=True)))


def walking(token: PaginationToken, direction: str) -> PaginationToken:
    """A token to go on from: who turns around begins at its last place."""
    if token.direction in ("", direction):
        return token
    return replace(
        token,
        live=token.live if token.beside is None else LARGEST_POSITION,
        direction="",
        earlier=(),
    )


def base(token: PaginationToken) -> Level:
    """The place above which there is only what lies above the token, or has moved there."""
    return token.levels[0] if token.direction == "b" else token.levels[-1]


def upper_end(token: PaginationToken) -> tuple[int, int, int]:
    """Return topological, stream and live of a token that ends a range from above."""
    place = base(token)
    return place.topological, place.stream, token.live if token.beside is None else LARGEST_POSITION


def lower_end(token: PaginationToken) -> tuple[int, int, int]:
    """Return topological, stream and live of a token that ends a range from below: what is ahead is above the place, or live and after that."""
    place = token.beside or base(token)
    return place.topological, place.stream, token.live


def above(token: PaginationToken) -> tuple[int, int]:
    """Return the place above which everything lies that is ahead of a token whose `lower_end` is below it; else that before every event."""
    return (0, 0) if token.beside is None else (token.topological, token.stream)


def behind(token: PaginationToken) -> int:
    """Return the levels of `numbers`, as bits, below which nothing is ahead of a walk forwards that has a place beside a timeline, too."""
    if token.beside is None:
        return 0
    return ~1 if token.beside in _crossed(token) else -1


def numbers(token: PaginationToken) -> list[int] | None:
    """The token as reordered_across takes it.

    None for the ends of the order, which nothing moves across.
    """
    levels = _crossed(token)
    if not levels:
        return None
    found = [int(token.direction != "f")]
    for level in levels:
        found += (level.moves, level.topological, level.stream)
    return found


def _crossed(token: PaginationToken) -> tuple[Level, ...]:
    """Return the places of the token that events can move across: all but the ends of the order."""
    return tuple(level for level in token.levels if 0 < level.topological < LARGEST_POSITION - 1)


def as_of(token: PaginationToken) -> int:
    """How many moves the room had when the first place of the token was made; for the ends of the order, however many it has."""
    levels = _crossed(token)
    return levels[0].moves if levels else LARGEST_POSITION


def ahead(
    end: PaginationToken, start: PaginationToken, direction: str, moved: Reorderings
) -> PaginationToken:
    """The token for what lies ahead at the end of a page that began at ``start``, as of now."""
    earlier = tuple(_kept(end, _crossed(start), direction, moved))
    beside = _beside(end, start) if direction == "f" else None
    if beside is not None:
        earlier = (beside, *(level for level in earlier if level != beside))
    if len(earlier) >= LEVELS_MAX:
        earlier = (*earlier[:1], *earlier[2:])
    live = LARGEST_POSITION if direction == "f" and beside is None else start.live
    return replace(
        end, live=live, moves=moved.moves, direction=direction if earlier else "", earlier=earlier
    )


def _beside(end: PaginationToken, start: PaginationToken) -> Level | None:
    """Return the place beside a timeline at which a walk forwards began, if it ends a page below that."""
    place = None if start.live == LARGEST_POSITION else start.beside or base(start)
    return (
        place
        if place is not None and (end.topological, end.stream) < (place.topological, place.stream)
        else None
    )


def _kept(
    end: PaginationToken, levels: Sequence[Level], direction: str, moved: Reorderings
) -> Iterator[Level]:
    """The places that do not follow from the new one."""
    for number, level in enumerate(levels):
        if direction == "b":
            kept = (level.topological, level.stream) < (end.topological, end.stream)
        else:
            kept = any(
                bits >> number & 1 and order >= end.topological for order, bits in moved.left_out
            )
        if kept:
            yield level
