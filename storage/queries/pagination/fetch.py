"""The rows of a page: by the ordinary statement, or by the one for reordered events."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from storage.database.translate import TOO_MANY_MOVES
from storage.errors import DatabaseError, InvalidToken
from storage.queries.pagination.page import PageRange
from storage.queries.pagination.reordering import as_of
from storage.streams.positions import LARGEST_POSITION

_Row = TypeVar("_Row")


async def fetch_page(
    page_range: PageRange,
    deployment: str,
    ordinary: Callable[[int], Awaitable[list[_Row]]],
    reordered: Callable[[], Awaitable[list[_Row]]],
    *,
    skip_ordinary: bool,
) -> list[_Row]:
    """Return the rows of the ordinary statement, or of the reordered one if that gives none.

    The ordinary one gets the number of moves that the tokens know. It gives no row for a room with
    more moves, or where the user sees nothing. ``skip_ordinary``: a statement was sent before, so
    run the reordered one at once, that a page takes two. `InvalidToken` where there are too many
    moves to read.
    """
    moves = min(as_of(page_range.start), as_of(page_range.stop))
    if moves == LARGEST_POSITION:
        return await ordinary(moves)
    try:
        return (not skip_ordinary and await ordinary(moves)) or await reordered()
    except DatabaseError as error:
        if error.sqlstate != TOO_MANY_MOVES:
            raise
        token = min(page_range.start, page_range.stop, key=as_of)
        raise InvalidToken(
            token.print(deployment),
            "too many events of the room have moved since: begin the walk anew",
        ) from error
