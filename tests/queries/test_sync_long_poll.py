"""A sync that waits: only events of its user's concern wake it, from any writer and at any time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

import storage
from storage import Store, Sync
from storage.ids import UserId
from storage.queries.sync.changed_rooms import OTHER_STREAMS, PollResult, poll_until_changed
from storage.streams import SyncToken
from storage.streams.feed import StreamRow
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, deliver, ids, new_room

LONG_MS = 60_000


class Wait:
    """Run a step between a sync's read and its wait, and count how often that happened."""

    def __init__(
        self,
        store: Store,
        monkeypatch: pytest.MonkeyPatch,
        meanwhile: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.times = 0
        self.reached = asyncio.Event()
        self._wait = store.notifier.wait
        self._meanwhile = meanwhile
        monkeypatch.setattr(store.notifier, "wait", self)

    async def __call__(self, keys: Iterable[str], *, after: SyncToken, timeout_ms: int) -> bool:
        self.times += 1
        if self._meanwhile is not None and self.times == 1:
            await self._meanwhile()
        self.reached.set()
        return await self._wait(keys, after=after, timeout_ms=timeout_ms)


async def waiting(
    store: Store, since: str, meanwhile: Awaitable[object], monkeypatch: pytest.MonkeyPatch
) -> Sync:
    """The answer of a sync that waits before something happens."""
    wait = Wait(store, monkeypatch)
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(store.sync(LOCAL, since=since, timeout_ms=LONG_MS))
        await wait.reached.wait()
        await asyncio.sleep(0)
        await meanwhile
    return answer.result()


async def test_waiting_ends_with_time(store: Store) -> None:
    await deliver(store, new_room(members=[LOCAL]))
    since = (await store.sync(LOCAL)).next_batch
    assert (await store.sync(LOCAL, since=since, timeout_ms=20)).is_empty


async def test_waiting_ends_with_news(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    said = room.message(ADMIN)
    answer = await waiting(store, since, append(store, said), monkeypatch)
    assert ids(answer.join[room.room_id].timeline.events) == [said.event_id]


async def test_what_comes_between_looking_and_waiting_is_not_slept_through(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    said = room.message(ADMIN)
    wait = Wait(store, monkeypatch, lambda: append(store, said))
    answer = await store.sync(LOCAL, since=since, timeout_ms=LONG_MS)
    assert ids(answer.join[room.room_id].timeline.events) == [said.event_id]
    assert wait.times == 1


async def test_the_response_covers_news_that_came_after_its_snapshot(store: Store) -> None:
    since = (await store.sync(LOCAL)).next_batch
    deployment = store.deployment_id
    taken: list[str] = []

    async def look() -> PollResult[Sync]:
        answer = await store.sync(LOCAL, since=since)
        taken.append(answer.next_batch)
        await store.account_data.set(UserId(LOCAL), "m.test", {"n": len(taken)})
        return PollResult(answer, {LOCAL})

    first = SyncToken.parse(since, deployment)
    answer = await poll_until_changed(
        look,
        store.notifier,
        lambda answer: SyncToken.parse(answer.next_batch, deployment),
        first,
        timeout_ms=LONG_MS,
        ending=OTHER_STREAMS,
    )
    assert answer.next_batch == taken[1] != taken[0] == since


async def test_an_invite_wakes_who_is_in_no_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = new_room()
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    answer = await waiting(store, since, append(store, room.invite(ADMIN, LOCAL)), monkeypatch)
    assert list(answer.invite) == [room.room_id]


async def test_a_room_that_was_joined_while_waiting_wakes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rooms to wait for are those of the look, and a join concerns its user."""
    room = new_room()
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    wait = Wait(store, monkeypatch, lambda: append(store, room.join(LOCAL), room.message(ADMIN)))
    answer = await store.sync(LOCAL, since=since, timeout_ms=LONG_MS)
    assert list(answer.join) == [room.room_id]
    assert wait.times == 1


async def test_other_rooms_wake_nobody(store: Store, statements: StatementLog) -> None:
    """Neither before the wait begins nor while it lasts: who waits asks nothing more."""
    room, busy = new_room(members=[LOCAL]), new_room(seed=1, members=[OTHER])
    await deliver(store, room)
    await deliver(store, busy)
    since = (await store.sync(LOCAL)).next_batch

    async def write() -> None:
        for _ in range(20):
            await append(store, busy.message(ADMIN))
        await append(store, room.message(ADMIN))

    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(store.sync(LOCAL, since=since, timeout_ms=LONG_MS))
        tasks.create_task(write())
    assert list(asking.result().join) == [room.room_id]
    asked = [
        statement
        for task, statement in statements.sent
        if task is asking and statement.lstrip().startswith(("SELECT", "WITH"))
    ]
    assert len(asked) <= 2 + 4 + 4, (
        "positions and rooms; then perhaps a look without news, and the answer"
    )


async def test_old_news_does_not_wake(store: Store) -> None:
    """An event that a token covers is not new, though its notification is late.

    The table was faster than the feed.
    """
    stream = store.streams["events"]
    token = SyncToken.of({"events": stream.current().advance("far", 100)})
    asleep = asyncio.create_task(store.notifier.wait([LOCAL], after=token, timeout_ms=LONG_MS))
    await asyncio.sleep(0)
    for position in (99, 100, 101):
        row = ["$e", "!r", "m.room.member", LOCAL, None]
        store.streams.advance(
            "events", "far", position, [StreamRow(position, "far", row)], local=False
        )
        await asyncio.sleep(0)
        assert asleep.done() == (position > 100)
    assert await asleep


async def test_a_membership_that_resolution_gives_back_wakes_its_user(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moderator who was demoted on another branch kicked them.

    The kick loses resolution, and no event names the user.
    """
    room = new_room(members=[OTHER, LOCAL])
    room.power_levels(ADMIN, users={ADMIN: 100, OTHER: 50})
    left, right = room.fork(2)
    demoted = left.power_levels(ADMIN, users={OTHER: 0})
    kicked = right.kick(OTHER, LOCAL)
    await store.append(
        [event.pdu for event in room.events if event.event_id != demoted.event_id],
        room_version="11",
    )
    assert await store.rooms_of(UserId(LOCAL)) == []
    since = (await store.sync(LOCAL)).next_batch
    answer = await waiting(store, since, append(store, demoted), monkeypatch)
    assert kicked.event_id not in (await store.current_state(room.room_id)).values()
    assert list(answer.join) == [room.room_id]


async def test_closing_the_store_ends_the_wait(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with storage.open(dsn, server_name="s1.test") as store:
        since = (await store.sync(LOCAL)).next_batch
        wait = Wait(store, monkeypatch)
        asking = asyncio.create_task(store.sync(LOCAL, since=since, timeout_ms=LONG_MS))
        await wait.reached.wait()
    with pytest.raises(storage.StorageClosed):
        await asking


async def test_without_replication_another_store_is_heard_of_by_following(
    dsn: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    config = storage.Config(follow_ms=5)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="other", config=config
    ) as other:
        since = (await other.sync(LOCAL)).next_batch
        answer = await waiting(other, since, append(store, room.message(ADMIN)), monkeypatch)
    assert list(answer.join) == [room.room_id]
