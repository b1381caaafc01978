"""Positions in a room at which members are read: from tokens of sync and of pages.

A sync token, and a page token next to a timeline, cover a part of the room's stream: the current
state of that time is today's without the later changes (`state_deltas`). Any other page token is a
position in the topological order. The state there is the one after the last event before it.
"""

from typing import NamedTuple

from storage.errors import ResyncNeeded
from storage.queries.sync.positions import events_of
from storage.queries.sync.response import BESIDE_TIMELINE
from storage.streams import PaginationToken, VectorPosition
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import is_sync_token, read_positions


class RoomPosition(NamedTuple):
    """A position in a room.

    ``covered``: the facts of the stream that come before it. ``below``: it is also at this
    (topological, stream) position. None: at the end of what is covered.
    """

    covered: VectorPosition
    below: tuple[int, int] | None = None
    text: str = ""

    @property
    def vector(self) -> tuple[int, list[str], list[int]]:
        """Return the least position of all writers, and the writers that are further."""
        return (
            self.covered.min,
            [writer for writer, _ in self.covered.items],
            [position for _, position in self.covered.items],
        )

    def refuse_purged(self, purged_upto: int | None) -> None:
        """Raise `ResyncNeeded` for a position from before the purged state changes."""
        if self.covered.min < (purged_upto or 0):
            raise ResyncNeeded(self.text, "the state changes since then are not kept any more")


NOW = RoomPosition(VectorPosition(LARGEST_POSITION))


def position_at(token: str | None, deployment: str) -> RoomPosition:
    """Return the position of a token of sync or of a page; None is now. `InvalidToken`."""
    if token is None:
        return NOW
    if is_sync_token(token):
        return RoomPosition(events_of(read_positions(token, deployment)), text=token)
    page = PaginationToken.parse(token, deployment)
    if page.topological >= BESIDE_TIMELINE:
        return RoomPosition(VectorPosition(page.live), text=token)
    return RoomPosition(VectorPosition(page.live), (page.topological, page.stream), token)
