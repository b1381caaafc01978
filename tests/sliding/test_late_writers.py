"""A `pos` of a time when one of two writers was behind: a room is where its own writer was."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

import storage
from storage import Store
from storage.streams import SyncToken, VectorPosition
from storage.streams.tokens import PosToken
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, new_room
from tests.sliding.client import SlidingClient

ALONE = storage.Config(follow_ms=3_600_000)


@pytest.fixture
async def stores(dsn: str) -> AsyncIterator[tuple[Store, Store]]:
    async with (
        storage.open(dsn, server_name="s1.test", config=ALONE) as one,
        storage.open(dsn, server_name="s1.test", instance_name="other", config=ALONE) as other,
    ):
        yield one, other


async def lagging(
    stores: tuple[Store, Store], client: SlidingClient, room: RoomBuilder, elsewhere: RoomBuilder
) -> list[str]:
    """Both writers write; the client gets a `pos` that covers the second one alone.

    Return the events of the first one.
    """
    one, other = stores
    assert client.pos is not None
    known = PosToken.parse(client.pos, one.deployment_id)
    before = known.upto.position("events")
    assert before is not None
    late = [room.message(ADMIN, str(number)) for number in range(2)]
    await append(one, *late)
    await append(other, elsewhere.message(ADMIN, "elsewhere"))
    reached = one.positions_of((await one.sync(ADMIN)).next_batch)["events"]
    position = VectorPosition.of(before.position("main"), {"other": reached.position("other")})
    assert position.furthest() > position.min
    upto = SyncToken.of(known.upto.positions() | {"events": position})
    client.pos = replace(known, upto=upto).print(one.deployment_id)
    return list(ids(late))


async def test_a_room_whose_writer_was_behind_has_its_events(stores: tuple[Store, Store]) -> None:
    one, other = stores
    room, elsewhere = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    await deliver(one, room)
    await deliver(other, elsewhere)
    client = SlidingClient(one, LOCAL)
    await client.sync((0, 9))
    late = await lagging(stores, client, room, elsewhere)
    answer = await client.sync((0, 9))
    assert set(answer.rooms) == {room.room_id}, "the other one is covered"
    shown = answer.rooms[room.room_id]
    assert (ids(shown.timeline), shown.num_live, shown.initial) == (late, 2, False)
    assert (await client.sync((0, 9))).rooms == {}


async def test_a_room_that_is_left_behind_is_where_its_writer_was(
    stores: tuple[Store, Store],
) -> None:
    one, other = stores
    room, elsewhere = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    await deliver(one, room)
    await deliver(other, elsewhere)
    client = SlidingClient(one, LOCAL)
    await client.sync((0, 9))
    late = await lagging(stores, client, room, elsewhere)
    assert (await client.sync((0, 0))).rooms == {}
    shown = (await client.sync((0, 9))).rooms[room.room_id]
    assert (ids(shown.timeline), shown.num_live) == (late, 0)
    assert (await client.sync((0, 9))).rooms == {}
