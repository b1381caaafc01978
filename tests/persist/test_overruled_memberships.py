"""A membership by an outlier ends when its event enters the timeline and the state is another."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.database.names import MEMBERSHIPS
from storage.ids import UserId
from storage.rebuild import Rebuilder, rebuild
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.rooms import findings
from tests.persist.planning import SERVER, SQL_MEMBERSHIPS, fetch, take

ADMIN, GUEST = UserId("@user1:s2.test"), UserId(f"@user2:{SERVER}")
FRIEND = f"@user3:{SERVER}"
LEAVE, BAN, INVITE = (MEMBERSHIPS[name] for name in ("leave", "ban", "invite"))

SQL_POSITIONS = "SELECT membership, event_nid, stream_ordering FROM memberships"

SQL_DAMAGE = """
UPDATE memberships m
SET (membership, event_nid) = (SELECT membership, event_nid FROM events WHERE event_id = '{}')
FROM principals p
WHERE p.principal_nid = m.principal_nid AND p.name = '{}'
"""


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def banned(store: Store) -> tuple[RoomBuilder, BuiltEvent, BuiltEvent]:
    """A room of others in which the only local user is banned, and their leave on another fork."""
    room = RoomBuilder("11", seed=1, sign=False)
    room.start(ADMIN)
    room.join(GUEST)
    branch = room.fork(1)[0]
    ban = room.ban(ADMIN, GUEST)
    await take(store, *room.events)
    return room, ban, branch.leave(GUEST)


async def test_a_leave_that_is_soft_failed_in_the_timeline(store: Store) -> None:
    _, ban, leave = await banned(store)
    before = (await store.sync(GUEST)).next_batch
    await take(store, leave, origin="outlier")
    assert await fetch(store, SQL_MEMBERSHIPS) == [(GUEST, LEAVE, leave.event_id)]
    assert await findings(store) == []
    between = (await store.sync(GUEST, since=before)).next_batch
    [result] = await take(store, leave)
    assert result.outcome == "soft_failed"
    assert await fetch(store, SQL_MEMBERSHIPS) == [(GUEST, BAN, ban.event_id)]
    assert await findings(store) == []
    for since in (before, between):
        assert len((await store.sync(GUEST, since=since)).leave) == 1
    assert list(await store.memberships_of(GUEST, ["ban"])) != []


async def test_a_leave_without_its_state(store: Store) -> None:
    """The leave is rejected: the state has no membership of the user."""
    room = RoomBuilder("11", seed=1, sign=False)
    room.start(ADMIN)
    room.message(ADMIN)
    state = dict(room.state)
    invite = room.invite(ADMIN, GUEST)
    leave = room.leave(GUEST)
    await take(store, *room.events[:-2])
    await take(store, invite, origin="out_of_band")
    await take(store, invite, origin="outlier")
    await take(store, leave, origin="outlier")
    assert await fetch(store, SQL_MEMBERSHIPS) == [(GUEST, LEAVE, leave.event_id)]
    [result] = await take(store, leave, state_before={leave.event_id: list(state.values())})
    assert result.outcome == "rejected"
    assert await fetch(store, SQL_MEMBERSHIPS) == [(GUEST, 0, None)]
    assert await findings(store) == []


async def test_history_that_is_accepted_leaves_the_invite(store: Store) -> None:
    """This server is still not in the room, so the invite is the latest that it knows."""
    room = RoomBuilder("11", seed=1, sign=False)
    room.start(ADMIN)
    invite = room.invite(ADMIN, GUEST)
    await take(store, *room.events[:-1], origin="backfill")
    await take(store, invite, origin="outlier")
    await take(store, invite, origin="backfill")
    assert await fetch(store, SQL_MEMBERSHIPS) == [(GUEST, INVITE, invite.event_id)]
    assert list((await store.sync(GUEST)).invite) == [room.room_id]
    assert await findings(store) == []


async def test_an_event_of_the_state_stays(store: Store) -> None:
    """The state after a gap has an invite as an outlier. Later its event fills the gap."""
    room = RoomBuilder("11", seed=1, sign=False)
    room.start(ADMIN)
    invite = room.invite(ADMIN, GUEST)
    given = list(room.state.values())
    message = room.message(ADMIN)
    await take(store, *room.events[:-2])
    await take(store, invite, origin="outlier")
    await take(store, message, state_before={message.event_id: given})
    after = (await store.sync(GUEST)).next_batch
    rows = await fetch(store, SQL_POSITIONS)
    [result] = await take(store, invite)
    assert result.outcome == "stored"
    assert await fetch(store, SQL_POSITIONS) == rows
    assert (await store.sync(GUEST, since=after)).is_empty
    assert await findings(store) == []


@pytest.mark.parametrize("way", ["repair", "rebuild"])
@pytest.mark.parametrize("kind", ["placed", "resident"])
async def test_wrong_rows_are_found_and_mended(store: Store, dsn: str, kind: str, way: str) -> None:
    """The row is of a leave in the timeline, or of an outlier while a local user is joined."""
    room, ban, leave = await banned(store)
    await take(store, leave, origin="outlier")
    if kind == "placed":
        await take(store, leave)
    else:
        room.join(FRIEND)
        await take(store, room.events[-1])
    sound = await fetch(store, SQL_MEMBERSHIPS)
    assert sound[0] == (GUEST, BAN, ban.event_id)
    await fetch(store, SQL_DAMAGE.format(leave.event_id, GUEST))
    assert [(one.check, one.subject) for one in await findings(store)] == [
        ("memberships", (GUEST,))
    ]
    if way == "repair":
        await rebuild(store.database, room.room_id, server_name=SERVER)
    else:
        async with Rebuilder.opened(dsn, SERVER) as rebuilder:
            await rebuilder.rebuild(room.room_id)
    assert await fetch(store, SQL_MEMBERSHIPS) == sound
    assert await findings(store) == []
