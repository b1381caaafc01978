"""A login that is a member of two roles."""

import asyncpg
import pytest

import storage
from storage import PermissionRefused, ServerName
from storage.persist import partial_marks
from storage.rebuild import complete
from storage.testing import RoomBuilder
from tests.database.test_roles import ALICE, QUICK, Logins, logins, role_of
from tests.maintenance.rooms import SERVER

__all__ = ["logins"]


async def test_both_roles_together_complete_a_partial_room(logins: Logins) -> None:
    """A completion deletes events and inserts them again, so neither role is enough."""
    room = RoomBuilder("12", servers=("s2.test",), sign=False)
    room.start("@carol:s2.test", join_rule="public")
    room.join("@dan:s2.test")
    join = room.join(ALICE)
    state = list(join.state_before.values())
    async with storage.open(logins.runtime, server_name=SERVER, config=QUICK) as store:
        await store.append(room.pdus[:-1], room_version="12", origin="outlier")
        async with store.database.transaction() as conn:
            assert await partial_marks.begin(
                conn, room.room_id, join.event_id, ServerName("s2.test"), [ServerName("s2.test")]
            )
        given = {join.event_id: [one for one in state if one != room.events[-2].event_id]}
        await store.append([join.pdu], room_version="12", state_before=given)
        with pytest.raises(PermissionRefused):
            await complete(store.database, room.room_id, state, server_name=SERVER)
        assert [one.room_id for one in await store.partial_rooms()] == [room.room_id]
        owner = await asyncpg.connect(logins.owner)
        try:
            await owner.execute(f'GRANT room_storage_purger TO "{role_of(logins.runtime)}"')
        finally:
            await owner.close()
        assert await complete(store.database, room.room_id, state, server_name=SERVER)
        assert len(await store.member_ids(room.room_id)) == 3
