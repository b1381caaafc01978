"""Fill the gaps that earlier transactions of a room have left open.

The gap before an event may be too large to be filled at once, or its server may fail meanwhile. The
event is then stored with a missing parent. Later transactions of the room fill the gap with
backfill, so that nobody has to page back for events that other servers have sent.
"""

import time
from typing import Final

from storage.federation.backfilling import backfill_room
from storage.federation.room_task import RoomTask
from storage.ids import RoomId, ServerName
from storage.queries.gaps import unfilled

ROOMS_MAX: Final = 10_000


class LeftGaps:
    """The rooms that have none, as far as this process knows. Every other room is looked at."""

    def __init__(self) -> None:
        self._whole: set[RoomId] = set()

    def may_have(self, room_id: RoomId) -> bool:
        return room_id not in self._whole

    def left(self, room_id: RoomId) -> None:
        """Note that a gap of the room may have stayed open."""
        self._whole.discard(room_id)

    async def fill(self, task: RoomTask, origin: ServerName) -> None:
        """Request a page of what the room lacks, of this server first."""
        since_ms = time.time_ns() // 1_000_000 - int(task.limits.left_gap_seconds * 1_000)
        async with task.store.database.connection() as conn:
            missing = await unfilled(conn, task.room_id, task.own_name, since_ms)
        if missing:
            limit = task.limits.backfill_max
            await backfill_room(task, limit, only=missing, first=[origin])
            return
        if len(self._whole) >= ROOMS_MAX:
            self._whole.clear()
        self._whole.add(task.room_id)
