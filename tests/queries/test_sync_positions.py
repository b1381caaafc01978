"""One sync token holds the position of each stream, also a token that an older release made."""

import asyncio

import pytest

from storage import InvalidToken, Store
from storage.ids import UserId
from storage.queries.sync.changed_rooms import NOT_SYNCED, STREAMS
from storage.streams import SyncToken, registry
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, new_room

USER = UserId(LOCAL)
LONG_MS = 60_000


def test_each_built_in_stream_is_in_tokens_or_left_out_on_purpose() -> None:
    assert sorted((*STREAMS, *NOT_SYNCED)) == sorted(registry.STREAMS)


async def test_a_token_holds_the_positions_of_all_streams(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    first = store.positions_of((await store.sync(LOCAL)).next_batch)
    written = {
        "account_data": await store.account_data.set(USER, "m.direct", {"a": 1}),
        "to_device": await store.to_device.send({USER: {"phone": {"n": 1}}}),
    }
    second = store.positions_of((await store.sync(LOCAL)).next_batch)
    assert sorted(first) == ["account_data", "events", "receipts", "to_device"]
    assert second["events"] == first["events"]
    for name, position in written.items():
        assert first[name].furthest() < position <= second[name].furthest()
    [message] = await store.to_device.inbox(
        USER, "phone", after=first["to_device"].min, upto=second["to_device"].furthest()
    )
    assert message.content == b'{"n":1}'
    with pytest.raises(InvalidToken):
        store.positions_of("s1~damaged")


async def test_a_message_to_a_device_alone_moves_the_token_and_asks_for_no_room(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    await store.to_device.send({USER: {"phone": {"n": 1}}})
    for remembers in (True, False):
        if not remembers:
            store.caches.rooms_of.forget(None)
        statements.sent.clear()
        answer = await store.sync(LOCAL, since=since)
        assert answer.is_empty
        assert answer.next_batch != since
        asked = [
            text for _, text in statements.sent if text.lstrip().startswith(("SELECT", "WITH"))
        ]
        assert len(asked) == 1, "the positions"


async def test_a_wait_ends_with_a_message_to_a_device(store: Store) -> None:
    """While it waits, and at once if the token does not cover it."""
    await deliver(store, new_room(members=[LOCAL]))
    since = (await store.sync(LOCAL)).next_batch
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(store.sync(LOCAL, since=since, timeout_ms=LONG_MS))
        sent = await store.to_device.send({USER: {"phone": {"n": 1}}})
    assert asking.result().is_empty
    async with asyncio.timeout(30):
        answer = await store.sync(LOCAL, since=since, timeout_ms=LONG_MS)
    assert store.positions_of(answer.next_batch)["to_device"].furthest() >= sent
    assert (
        await store.sync(LOCAL, since=answer.next_batch, timeout_ms=20)
    ).next_batch == answer.next_batch


async def test_a_token_of_an_older_release_is_taken(store: Store) -> None:
    """The token names the events alone.

    The answer names the rest, and nothing is lost or returned twice.
    """
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    now = store.positions_of((await store.sync(LOCAL)).next_batch)
    older = SyncToken.of({"events": now["events"]}).print(store.deployment_id)
    assert store.positions_of(older) == {"events": now["events"]}
    await store.to_device.send({USER: {"phone": {"n": 1}}})
    answer = await store.sync(LOCAL, since=older, timeout_ms=20)
    assert answer.is_empty
    assert store.positions_of(answer.next_batch).keys() == now.keys()
    said = room.message(ADMIN)
    await append(store, said)
    for since in (older, answer.next_batch):
        told = await store.sync(LOCAL, since=since)
        assert ids(told.join[room.room_id].timeline.events) == [said.event_id]
