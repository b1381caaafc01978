"""Pages of an order in which events move up: what a token means after that.

`reordered_across` in the schema reads the moves. A walk returns each event once: those that were
there when it began, and those that arrive ahead of it. A walk backwards meets an event that moved
up past its position at the top of its next page. A walk forwards leaves out events that it has
returned already. Two kinds of event are skipped on purpose. New events inserted behind the position
are never returned. And a walk forwards does not return a parent that arrives after its child was
returned, or after the child was inserted behind the position. `to` is a position in the same sense:
two walks that meet at a token share no event and lack none. With honest depths nothing moves, and
the ordinary statements do.

A page that ends among reordered events leaves two ranges behind that do not meet. So its token also
holds the position from before. Events may go on moving, so there may be several positions
(`PaginationToken.earlier`). A walk drops a position once it has passed all events that moved past
it. A token holds at most `CURSOR_POSITIONS_MAX` positions, each with a move in between and a page
full of reordered events. Beyond that the second one is dropped, and events may be returned again.

A walk forwards from beside a timeline, as from a sync token, has two positions
(`PaginationToken.sync_cursor`). Below the one at which it began, only live events after the
timeline are ahead. It has passed all events below the other. As the upper end of a range, such a
token means the other position alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from storage.streams import PaginationToken
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import CURSOR_POSITIONS_MAX, CursorPosition


class Reorderings(NamedTuple):
    """How many moves a room has had, and the topological ordering and levels of left out events."""

    reorder_count: int = 0
    left_out: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(
        cls,
        reorder_count: int,
        topological: Sequence[int] | None,
        position_bits: Sequence[int] | None,
    ) -> "Reorderings":
        """Return the value of the columns `moves`, `left_out_topological`, `left_out_levels`."""
        return cls(reorder_count, list(zip(topological or (), position_bits or (), strict=True)))


def walking(token: PaginationToken, direction: str) -> PaginationToken:
    """Return a token to go on from. A walk that turns around begins at its last position."""
    if token.direction in ("", direction):
        return token
    return replace(
        token,
        live=token.live if token.sync_cursor is None else LARGEST_POSITION,
        direction="",
        earlier=(),
    )


def base(token: PaginationToken) -> CursorPosition:
    """Return the position above which all events lie above the token, or have moved there."""
    return token.cursor_positions[0] if token.direction == "b" else token.cursor_positions[-1]


def upper_end(token: PaginationToken) -> tuple[int, int, int]:
    """Return topological, stream and live of a token that is the upper end of a range."""
    position = base(token)
    live = token.live if token.sync_cursor is None else LARGEST_POSITION
    return position.topological, position.stream, live


def lower_end(token: PaginationToken) -> tuple[int, int, int]:
    """Return topological, stream and live of a token that is the lower end of a range.

    Events above the position are ahead, and live events after that stream ordering.
    """
    position = token.sync_cursor or base(token)
    return position.topological, position.stream, token.live


def lower_bound(token: PaginationToken) -> tuple[int, int]:
    """Return the position above which all events lie that are ahead of the token.

    Only a token beside a timeline has one: its `lower_end` is below it. For others it is (0, 0).
    """
    return (0, 0) if token.sync_cursor is None else (token.topological, token.stream)


def passed_positions(token: PaginationToken) -> int:
    """Return, as bits, the levels of `numbers` below which no event is ahead of the token.

    0 but for a walk forwards that has a position beside a timeline, too.
    """
    if token.sync_cursor is None:
        return 0
    return ~1 if token.sync_cursor in _crossed(token) else -1


def numbers(token: PaginationToken) -> list[int] | None:
    """Return the token as reordered_across takes it.

    None for the ends of the order: no event moves across them.
    """
    cursor_positions = _crossed(token)
    if not cursor_positions:
        return None
    flat = [int(token.direction != "f")]
    for position in cursor_positions:
        flat += (position.moves, position.topological, position.stream)
    return flat


def _crossed(token: PaginationToken) -> tuple[CursorPosition, ...]:
    """Return the positions that events can move across: all but the ends of the order."""
    return tuple(
        position
        for position in token.cursor_positions
        if 0 < position.topological < LARGEST_POSITION - 1
    )


def as_of(token: PaginationToken) -> int:
    """Return how many moves the room had when the first position of the token was made.

    LARGEST_POSITION for the ends of the order: later moves make no difference to them.
    """
    cursor_positions = _crossed(token)
    return cursor_positions[0].moves if cursor_positions else LARGEST_POSITION


def next_token(
    end: PaginationToken, start: PaginationToken, direction: str, reorderings: Reorderings
) -> PaginationToken:
    """Return the token for the events ahead, at the end of a page that began at ``start``."""
    previous = tuple(_kept(end, _crossed(start), direction, reorderings))
    sync_cursor = _sync_cursor(end, start) if direction == "f" else None
    if sync_cursor is not None:
        previous = (sync_cursor, *(position for position in previous if position != sync_cursor))
    if len(previous) >= CURSOR_POSITIONS_MAX:
        previous = (*previous[:1], *previous[2:])
    live = LARGEST_POSITION if direction == "f" and sync_cursor is None else start.live
    direction = direction if previous else ""
    return replace(
        end, live=live, moves=reorderings.reorder_count, direction=direction, earlier=previous
    )


def _sync_cursor(end: PaginationToken, start: PaginationToken) -> CursorPosition | None:
    """Return the position beside a timeline where a walk forwards began, if the page ends below."""
    if start.live == LARGEST_POSITION:
        return None
    begun = start.sync_cursor or base(start)
    is_below = (end.topological, end.stream) < (begun.topological, begun.stream)
    return begun if is_below else None


def _kept(
    end: PaginationToken,
    cursor_positions: Sequence[CursorPosition],
    direction: str,
    reorderings: Reorderings,
) -> Iterator[CursorPosition]:
    """Yield the positions that do not follow from the new one."""
    for number, position in enumerate(cursor_positions):
        if direction == "b":
            kept = (position.topological, position.stream) < (end.topological, end.stream)
        else:
            kept = any(
                bits >> number & 1 and order >= end.topological
                for order, bits in reorderings.left_out
            )
        if kept:
            yield position
