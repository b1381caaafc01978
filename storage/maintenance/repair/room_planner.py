"""Plan for a locked room as the live path does: same pure functions and loading, separate writes.

Missing data is loaded from the tables (`storage.persist.load.on_demand`). States are the exception:
the thousands of a room share their entries (`storage.maintenance.room_states`). None of it enters
the caches of a writer.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from storage.database.connection import Connection
from storage.database.names import TYPE_MEMBER
from storage.errors import StorageCorrupt
from storage.maintenance.room_states import RoomStates
from storage.persist.load.on_demand import load
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.missing_data import MissingData
from storage.persist.model.nid_blocks import NidBlocks
from storage.persist.model.row_changes import RoomChanges
from storage.persist.model.rows import RoomRow
from storage.state.rows import GROUP_COLUMNS, row_of

T = TypeVar("T")

MEMORY: Final = {"events": 20_000, "groups": 1, "state_entries": 1, "rooms": 10, "names": 500_000}


class RepairPlanner:
    """Run functions of `storage.persist` on one room."""

    def __init__(
        self,
        row: RoomRow,
        server_name: str,
        states: RoomStates,
        change_set: ChangeSet | None = None,
    ) -> None:
        self.row = row
        self.states = states
        self.change_set: ChangeSet = change_set or ChangeSet(new_caches(), NidBlocks(), server_name)
        self.room: RoomChanges = RoomChanges.of(row)

    @classmethod
    async def of(
        cls, conn: Connection, room_id: str, server_name: str, states: RoomStates
    ) -> "RepairPlanner":
        return cls(await stored_room(conn, room_id), server_name, states)

    async def plan(self, conn: Connection, work: Callable[[EventChanges], T]) -> T:
        """Run a decision, loading the data that it lacks, and keep its changes."""
        while True:
            changes = EventChanges(self.change_set, self.room)
            try:
                result = work(changes)
            except MissingData as needs:
                lacking = needs
            else:
                changes.commit()
                return result
            await self.load(conn, lacking)

    async def load(self, conn: Connection, needs: MissingData) -> None:
        """Load the data that a decision lacks."""
        if needs.kind != "groups":
            await load(conn, self.change_set, needs)
            return
        wanted = {key for key in needs.keys if isinstance(key, int)}
        groups = await self.states.load(conn, wanted)
        lost = wanted - groups.keys()
        if lost:
            raise StorageCorrupt(
                "state groups cannot be read", room_nid=self.row.room_nid, state_groups=sorted(lost)
            )
        self.change_set.states.groups.update(groups)

    async def write_groups(self, conn: Connection) -> None:
        """Insert the planned groups."""
        groups = list(self.change_set.states.new_groups.values())
        while True:
            try:
                self.change_set.names.ensure_state_key_names(
                    key for group in groups for key in group.steps[-1].delta
                )
            except MissingData as needs:
                lacking = needs
            else:
                break
            await load(conn, self.change_set, lacking)
        rows = [row_of(group, self._is_member) for group in groups]
        await conn.copy_in("state_groups", GROUP_COLUMNS, rows)

    def _is_member(self, key_nid: int) -> bool:
        return self.change_set.names.state_key_name(key_nid)[0] == TYPE_MEMBER


def new_caches() -> WriterCaches:
    """Return separate, empty caches."""
    return WriterCaches(**MEMORY)


async def stored_room(conn: Connection, room_id: str) -> RoomRow:
    change_set = ChangeSet(new_caches(), NidBlocks(), "")
    await load(conn, change_set, MissingData("rooms", [room_id]))
    row = change_set.rooms.known[room_id]
    if row is None:
        raise StorageCorrupt("a locked room is gone", room_id=room_id)
    return row
