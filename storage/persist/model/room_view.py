"""Rooms: their rows, and how they change.

A view reads through to the caches of the process, and collects what the batch adds and changes.
"""

from storage.persist.model.caches import WriterCaches
from storage.persist.model.missing_data import MissingData
from storage.persist.model.nid_blocks import NidBlocks
from storage.persist.model.row_changes import RoomChanges
from storage.persist.model.rows import (
    RoomRow,
)
from storage.visibility.audience_numbering import FIRST, NOTHING
from storage.visibility.multirange import EMPTY


class RoomView:
    """Rooms: their rows, and how they change."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks) -> None:
        self.caches = caches
        self.blocks = blocks
        self.known: dict[str, RoomRow | None] = {}
        self.fresh_rooms: set[int] = set()  # rooms without a row in any table yet
        self.room_changes: dict[str, RoomChanges] = {}
        self.new_rooms: dict[str, RoomRow] = {}
        self.dropped: dict[int, int] = {}  # dropped forward extremities -> room nid

    def room(self, room_id: str) -> RoomRow | None:
        """Return the row of a room, or None if the store does not know the room."""
        if room_id in self.known:
            return self.known[room_id]
        row = self.caches.rooms.get(room_id)
        if row is None:
            raise MissingData("rooms", (room_id,))
        return row

    def new_room(self, room_id: str, room_version: str) -> RoomRow:
        """Add a room that the store does not know yet."""
        row = RoomRow(
            self.blocks.take("room_nids"),
            room_id,
            room_version,
            0,
            FIRST,
            None,
            0,
            (),
            NOTHING,
            EMPTY,
        )
        self.known[room_id] = self.new_rooms[room_id] = row
        self.fresh_rooms.add(row.room_nid)
        return row
