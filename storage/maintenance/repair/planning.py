"""Planning as the live path does it, for a room that is held: the same pure functions, the same loading, writes of its own.

What planning asks for is loaded from the tables (`storage.persist.load`), but for states, which are shared among the thousands that
a room has (`storage.maintenance.states`). Nothing of it reaches the caches of a writer.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from storage.database.connection import Connection
from storage.database.names import TYPE_MEMBER
from storage.errors import StorageCorrupt
from storage.maintenance.states import States
from storage.persist.context import Caches, Needs
from storage.persist.draft import Blocks, Draft, RoomDraft
from storage.persist.load import load
from storage.persist.rows import RoomRow
from storage.persist.step import Step
from storage.state.rows import GROUP_COLUMNS, row_of

T = TypeVar("T")

MEMORY: Final = {"events": 20_000, "groups": 1, "state_entries": 1, "rooms": 10, "names": 500_000}


class Planner:
    """Runs functions of `storage.persist` on one room."""

    def __init__(self, row: RoomRow, server_name: str, states: States, draft: Draft | None = None) -> None:
        self.row = row
        self.states = states
        self.draft = draft or Draft(new_caches(), Blocks(), server_name)
        self.room = RoomDraft.of(row)

    @classmethod
    async def of(cls, conn: Connection, room_id: str, server_name: str, states: States) -> "Planner":
        """For a room that is held."""
        return cls(await held_room(conn, room_id), server_name, states)

    async def plan(self, conn: Connection, work: Callable[[Step], T]) -> T:
        """Run a decision to its end, loading what it lacks, and keep what it changed."""
        while True:
            step = Step(self.draft, self.room)
            try:
                result = work(step)
            except Needs as needs:
                lacking = needs
            else:
                step.commit()
                return result
            await self.load(conn, lacking)

    async def load(self, conn: Connection, needs: Needs) -> None:
        """What a decision lacks."""
        if needs.kind != "groups":
            await load(conn, self.draft, needs)
            return
        wanted = {key for key in needs.keys if isinstance(key, int)}
        groups = await self.states.load(conn, wanted)
        lost = wanted - groups.keys()
        if lost:
            raise StorageCorrupt("state groups cannot be read", room_nid=self.row.room_nid, state_groups=sorted(lost))
        self.draft.groups.update(groups)

    async def write_groups(self, conn: Connection) -> None:
        """Insert the groups that were planned."""
        groups = list(self.draft.new_groups.values())
        while True:
            try:
                self.draft.ensure_state_key_names(key for group in groups for key in group.steps[-1].delta)
            except Needs as needs:
                lacking = needs
            else:
                break
            await load(conn, self.draft, lacking)
        await conn.copy_in("state_groups", GROUP_COLUMNS, [row_of(group, self._is_member) for group in groups])

    def _is_member(self, key_nid: int) -> bool:
        return self.draft.state_key_name(key_nid)[0] == TYPE_MEMBER


def new_caches() -> Caches:
    """Caches of the planner's own."""
    return Caches(**MEMORY)


async def held_room(conn: Connection, room_id: str) -> RoomRow:
    """The row of a room."""
    draft = Draft(new_caches(), Blocks(), "")
    await load(conn, draft, Needs("rooms", [room_id]))
    row = draft.rooms[room_id]
    if row is None:
        raise StorageCorrupt("a room that is held is gone", room_id=room_id)
    return row
