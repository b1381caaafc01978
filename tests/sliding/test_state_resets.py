"""State resolution that takes the user out of a room, without an event that says so."""

from collections.abc import Mapping

import pytest

import storage
from storage import SlidingFilter, SlidingRoom, Store
from storage.ids import RoomId, StateKey
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, deliver, ids, new_room
from tests.sliding.client import EVERYTHING, SlidingClient, state_of
from tests.sliding.test_waiting import started

OWN = ("m.room.member", LOCAL)


async def joined_room(store: Store, seed: int = 0) -> tuple[RoomBuilder, RoomBuilder]:
    """A room that LOCAL has joined, and a branch from before the join."""
    room = new_room(seed=seed, members=[OTHER])
    before = room.events[-1].event_id
    room.join(LOCAL)
    await deliver(store, room)
    return room, room.at(before)


async def invited_room(store: Store) -> tuple[RoomBuilder, BuiltEvent]:
    """A room with an invite of LOCAL, and an event on another branch that forbids the invite."""
    room = new_room(members=[OTHER])
    branch = room.at(room.events[-1].event_id)
    room.invite(OTHER, LOCAL)
    await deliver(store, room)
    return room, branch.power_levels(ADMIN, {"invite": 100})


async def reset(store: Store, branch: RoomBuilder) -> None:
    """Take LOCAL out of the room: the join is not allowed by these join rules."""
    assert await append(store, branch.join_rules(ADMIN, "invite")) == ["stored"]
    assert await store.membership(branch.room_id, LOCAL) is None


@pytest.mark.parametrize("required", [EVERYTHING, [("m.room.member", "$LAZY")], []])
@pytest.mark.parametrize("by", ["list", "subscription"])
async def test_the_room_comes_once_as_a_left_room(
    store: Store, by: str, required: list[StateKey], statements: StatementLog
) -> None:
    room, branch = await joined_room(store)
    client = SlidingClient(store, LOCAL)
    ranges = [(0, 19)] if by == "list" else []
    chosen = [] if by == "list" else [room.room_id]

    async def look() -> Mapping[RoomId, SlidingRoom]:
        return (await client.sync(*ranges, required=required, subscriptions=chosen)).rooms

    assert (await look())[room.room_id].membership == "join"
    await reset(store, branch)
    statements.take()
    shown = (await look())[room.room_id]
    assert len(statements.take()) <= 4
    assert (shown.membership, shown.initial, shown.removed_state) == ("leave", False, [OWN])
    assert OWN not in state_of(shown)
    room.merge(branch)
    await append(store, room.message(ADMIN, "secret"), room.name(ADMIN, "secret"))
    for _ in range(2):
        assert await look() == {}


async def test_only_a_connection_that_was_sent_the_room_has_it(store: Store, dsn: str) -> None:
    """Also in another process, and in one that reads its list for the first time."""
    room, branch = await joined_room(store)
    async with storage.open(dsn, server_name="s1.test", instance_name="second") as second:
        clients = [
            SlidingClient(one, LOCAL, conn_id=f"{number}")
            for number, one in enumerate((store, second))
        ]
        for client in clients:
            assert (await client.sync((0, 19))).lists["all"].count == 1
        await reset(store, branch)
        async with storage.open(dsn, server_name="s1.test", instance_name="third") as third:
            clients.append(SlidingClient(third, LOCAL, conn_id="0"))
            clients[-1].pos = clients[0].pos
            for client in clients:
                answer = await client.sync((0, 19))
                assert answer.rooms[room.room_id].membership == "leave"
                new = SlidingClient(client.store, LOCAL, conn_id="new")
                answer = await new.sync((0, 19), subscriptions=[room.room_id])
                assert (answer.rooms, answer.lists["all"].count) == ({}, 0)


async def test_a_room_that_was_in_no_window_comes_when_it_is(store: Store) -> None:
    room, branch = await joined_room(store)
    other = new_room(seed=1, members=[LOCAL])
    await deliver(store, other)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 1))
    await reset(store, branch)
    await append(store, other.message(ADMIN))
    assert set((await client.sync((0, 0))).rooms) == {other.room_id}
    assert (await client.sync((0, 0))).rooms == {}
    shown = (await client.sync((0, 1))).rooms[room.room_id]
    assert (shown.membership, shown.removed_state) == ("leave", [OWN])
    assert (await client.sync((0, 1))).rooms == {}


async def test_filters_look_at_the_room_as_it_was(store: Store) -> None:
    room, branch = await joined_room(store)
    await append(store, room.name(ADMIN, "first"))
    client = SlidingClient(store, LOCAL)
    named = SlidingFilter(room_name_like="first")
    assert set((await client.sync((0, 19), filters=named)).rooms) == {room.room_id}
    await reset(store, branch)
    room.merge(branch)
    await append(store, room.name(ADMIN, "secret"))
    other = SlidingFilter(room_name_like="secret")
    assert (await client.sync((0, 19), filters=other)).rooms == {}
    shown = (await client.sync((0, 19), filters=named)).rooms[room.room_id]
    assert shown.membership == "leave"


async def test_a_reset_ends_the_wait(store: Store) -> None:
    room, branch = await joined_room(store)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 0))
    waiting = await started(store, client)
    await reset(store, branch)
    assert (await waiting).rooms[room.room_id].membership == "leave"


async def test_an_invite_that_is_resolved_away(store: Store) -> None:
    room, refusal = await invited_room(store)
    client = SlidingClient(store, LOCAL)
    assert (await client.sync((0, 19))).rooms[room.room_id].membership == "invite"
    assert await append(store, refusal) == ["stored"]
    assert await store.membership(room.room_id, LOCAL) is None
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert (shown.membership, shown.removed_state) == ("leave", [OWN])
    assert (shown.timeline, shown.required_state, shown.stripped_state) == ((), (), None)
    assert (await client.sync((0, 19), required=EVERYTHING)).rooms == {}


async def test_a_ban_that_is_resolved_away(store: Store) -> None:
    """The client was sent a kick or a ban. Neither that nor the join is left."""
    room = new_room(members=[OTHER], users={OTHER: 50})
    branch = room.at(room.events[-1].event_id)
    room.join(LOCAL)
    room.ban(OTHER, LOCAL)
    await deliver(store, room)
    clients = [SlidingClient(store, LOCAL, conn_id=one) for one in ("", "other")]
    wanted: tuple[list[StateKey], ...] = (EVERYTHING, [])
    for client, required in zip(clients, wanted, strict=True):
        shown = (await client.sync((0, 19), required=required)).rooms[room.room_id]
        assert shown.membership == "ban"
    rules, powers = branch.join_rules(ADMIN, "invite"), branch.power_levels(ADMIN, users={OTHER: 0})
    assert await append(store, rules, powers) == ["stored", "stored"]
    assert await store.membership(room.room_id, LOCAL) is None
    for client, required in zip(clients, wanted, strict=True):
        shown = (await client.sync((0, 19), required=required)).rooms[room.room_id]
        assert (shown.membership, shown.removed_state) == ("leave", [OWN])
        assert OWN not in state_of(shown)
        assert (await client.sync((0, 19), required=required)).rooms == {}


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_ban_after_the_reset_comes_as_an_event(store: Store, *, at_once: bool) -> None:
    room, branch = await joined_room(store)
    room.name(ADMIN, "first")
    await deliver(store, room)
    client, other = (SlidingClient(store, LOCAL, conn_id=one) for one in ("", "other"))
    await client.sync((0, 19), required=EVERYTHING)
    await other.sync((0, 19))
    await reset(store, branch)
    if not at_once:
        await client.sync((0, 19), required=EVERYTHING)
        await other.sync((0, 19))
    ban = branch.ban(ADMIN, LOCAL)
    await append(store, ban)
    room.merge(branch)
    await append(store, room.name(ADMIN, "secret"), room.message(ADMIN, "secret"))
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    own = [one for one in shown.required_state if (one.type, one.state_key) == OWN]
    assert (shown.membership, ids(own), shown.removed_state) == ("ban", [ban.event_id], [])
    assert "secret" not in {one.content.get("name") for one in shown.required_state}
    assert (await client.sync((0, 19), required=EVERYTHING)).rooms == {}
    shown = (await other.sync((0, 19))).rooms[room.room_id]
    assert (shown.membership, shown.required_state, shown.removed_state) == ("ban", [], [])
    grown = (await other.sync((0, 19), required=[("m.room.member", "$ME")])).rooms[room.room_id]
    assert ids(grown.required_state) == [ban.event_id]
    new = SlidingClient(store, LOCAL, conn_id="new")
    shown = (await new.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    own = [one for one in shown.required_state if (one.type, one.state_key) == OWN]
    assert (shown.initial, shown.membership, ids(own)) == (True, "ban", [ban.event_id])
    assert shown.name == "first"
