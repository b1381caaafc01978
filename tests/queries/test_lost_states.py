"""Every read of an unreadable state raises `StorageCorrupt`.

It never reports an unknown event or returns a state that lacks entries.
"""

from collections.abc import Awaitable, Callable

import pytest

from storage import Store, SyncFilter
from storage.errors import StorageCorrupt
from storage.ids import EventId
from storage.testing import BuiltEvent
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, new_room

READS: dict[str, Callable[[Store, EventId], Awaitable[object]]] = {
    "whole": lambda store, at: store.state_before(at),
    "after": lambda store, at: store.states_after([at]),
    "types": lambda store, at: store.state_before(at, types=["m.room.topic"]),
    "members": lambda store, at: store.state_before(at, types=["m.room.member"]),
    "keys": lambda store, at: store.state_before(at, keys=[("m.room.topic", "")]),
    "unknown keys": lambda store, at: store.state_before(at, keys=[("m.nobody.sent", "")]),
    "member keys": lambda store, at: store.state_before(at, keys=[("m.room.member", LOCAL)]),
    "federation": lambda store, at: store.state_ids(at),
    "context": lambda store, at: store.context(at, LOCAL, limit=0),
}
LOSSES = {
    "group": "DELETE FROM state_groups WHERE state_group = $1::bigint",
    "part of the path": ("DELETE FROM state_groups WHERE state_group = (path_of($1::bigint))[1]"),
    "row with the beginning of the path": (
        "DELETE FROM state_groups WHERE state_group ="
        " (SELECT state_group - distance_in_path(path, 1) FROM state_groups"
        " WHERE state_group = $1::bigint)"
    ),
}


async def stored(store: Store) -> tuple[BuiltEvent, BuiltEvent]:
    """A topic, and the last event of the room, whose state has a path of several groups."""
    room = new_room(members=[LOCAL, *(f"@crowd{n}:s2.test" for n in range(30))])
    for number in range(5):
        room.topic(ADMIN, str(number))
    topic = room.topic(ADMIN, "last")
    last = room.message(ADMIN)
    await deliver(store, room)
    return topic, last


async def group_at(store: Store, event: BuiltEvent) -> int:
    async with store.database.connection() as conn:
        group: int = await conn.fetchval(
            "SELECT state_group_before FROM events WHERE event_id = $1::text", event.event_id
        )
        path: int = await conn.fetchval("SELECT cardinality(path_of($1::bigint))", group)
    assert path > 1, "a path of one group says nothing"
    return group


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("loss", LOSSES)
async def test_a_state_that_lost_a_row_is_corrupt(store: Store, read: str, loss: str) -> None:
    _, last = await stored(store)
    group = await group_at(store, last)
    assert await READS[read](store, last.event_id) is not None
    store.caches.states.forget(None)
    async with store.database.connection() as conn:
        assert await conn.execute(LOSSES[loss], group) == "DELETE 1"
    with pytest.raises(StorageCorrupt) as caught:
        await READS[read](store, last.event_id)
    assert str(group) in str(caught.value)


LOSSES_NOW = {
    name: loss.replace("$1::bigint", "(SELECT max(current_state_group) FROM rooms)")
    for name, loss in LOSSES.items()
}


@pytest.mark.parametrize("loss", LOSSES_NOW)
async def test_members_are_not_loaded_lazily_of_a_state_that_lost_a_row(
    store: Store, loss: str
) -> None:
    """Lazily loaded, the state of a room that is new to the client is read from its group."""
    _, last = await stored(store)
    await group_at(store, last)
    lazy = SyncFilter(lazy_load_members=True)
    since = (await store.sync(LOCAL, filter=lazy)).next_batch
    async with store.database.connection() as conn:
        assert await conn.execute(LOSSES_NOW[loss]) == "DELETE 1"
    with pytest.raises(StorageCorrupt) as caught:
        await store.sync(LOCAL, filter=lazy)
    assert last.room_id in str(caught.value)
    assert (await store.sync(LOCAL, since=since, filter=lazy)).is_empty, (
        "nothing of the state is read"
    )


@pytest.mark.parametrize("loss", LOSSES)
async def test_the_state_before_a_timeline_that_lost_a_row_is_corrupt(
    store: Store, loss: str
) -> None:
    """A timeline begins after a gap, with a topic.

    The topic before it is read from the state that was given.
    """
    room = new_room(members=[LOCAL, *(f"@crowd{n}:s2.test" for n in range(30))])
    for number in range(5):
        room.topic(ADMIN, str(number))
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    room.message(ADMIN, "missing")
    after = room.topic(ADMIN, "after")
    assert await append(
        store, after, state_before={after.event_id: list(after.state_before.values())}
    ) == ["stored"]
    group = await group_at(store, after)
    assert (await store.sync(LOCAL, since=since)).join[room.room_id].timeline.limited
    async with store.database.connection() as conn:
        assert await conn.execute(LOSSES[loss], group) == "DELETE 1"
    with pytest.raises(StorageCorrupt) as caught:
        await store.sync(LOCAL, since=since)
    assert room.room_id in str(caught.value)


async def test_a_sync_of_a_state_whose_event_is_lost_is_corrupt(store: Store) -> None:
    """It was returned as a key without a type that resolution took away."""
    topic, _ = await stored(store)
    async with store.database.connection() as conn:
        assert (
            await conn.execute("DELETE FROM events WHERE event_id = $1::text", topic.event_id)
            == "DELETE 1"
        )
    for lazy in (False, True):
        with pytest.raises(StorageCorrupt):
            await store.sync(LOCAL, filter=SyncFilter(lazy_load_members=lazy), timeline_limit=1)


@pytest.mark.parametrize("read", ["whole", "types", "keys", "context"])
async def test_a_state_whose_event_is_lost_is_corrupt(store: Store, read: str) -> None:
    topic, last = await stored(store)
    async with store.database.connection() as conn:
        assert (
            await conn.execute("DELETE FROM events WHERE event_id = $1::text", topic.event_id)
            == "DELETE 1"
        )
    with pytest.raises(StorageCorrupt):
        await READS[read](store, last.event_id)


async def test_a_key_that_was_removed_is_not_lost(store: Store) -> None:
    """An entry with 0 takes a key away."""
    _, last = await stored(store)
    group = await group_at(store, last)
    async with store.database.connection() as conn:
        topic: int = await conn.fetchval(
            "SELECT state_key_nid FROM state_keys WHERE type_nid = 10 AND state_key = ''"
        )
        await conn.execute(
            "UPDATE state_groups SET event_nid = 0"
            " WHERE state_group = $1::bigint AND key_nid = $2::int",
            group,
            topic,
        )
    key = ("m.room.topic", "")
    assert await store.state_before(last.event_id, keys=[key]) == {}
    assert await store.state_before(last.event_id, types=["m.room.topic"]) == {}
    assert key not in await store.state_before(last.event_id)
