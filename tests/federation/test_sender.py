"""Sending local events: every server gets what it must have, whatever fails in between."""

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg
import pytest

import storage
from storage import EventId, RoomId, ServerName, StorageClosed, StoredEvent
from storage.federation import RemoteError, Responder, Sender, SenderLimits
from storage.testing import signing_key
from tests.federation.peers import Homeserver, start
from tests.federation.rooms import PUBLIC, agree, shared_room

WAIT_S = 10
TOPIC: Final = "m.room.topic"
ACCEPT: Final = """
import asyncio, os, signal, sys
import storage
from storage.federation import Sender

async def main():
    dsn, name, server, pdu = sys.argv[1:]
    async with storage.open(dsn, server_name=name, instance_name="worker") as store:
        sender = Sender(store, None)
        [result] = await store.append([pdu.encode()])
        assert result.outcome == "stored", result
        await sender.pass_on([server], await store.event(result.event_id))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
"""A process that accepts an event of another server, and ends before it sends it."""

SLOW = SenderLimits(retry_seconds=60.0, poll_seconds=60.0)
"""With these nothing is sent but for a reason."""
QUICK = SenderLimits(retry_seconds=0.05, poll_seconds=0.05)


@dataclass
class Wire:
    """Transactions of the first server to the others. Those in ``down`` fail."""

    servers: list[Homeserver]
    down: set[str] = field(default_factory=set)
    sent: dict[str, list[EventId]] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    transactions: set[tuple[str, str]] = field(default_factory=set)
    fault: Callable[[], None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, server: ServerName, transaction: str, events: list[StoredEvent]) -> None:
        self.tried[server] = self.tried.get(server, 0) + 1
        self.changed.set()
        if server in self.down:
            if self.fault is not None:
                self.fault()
            raise RemoteError(f"{server} is down")
        assert (server, transaction) not in self.transactions
        self.transactions.add((server, transaction))
        [target] = [one for one in self.servers if one.name == server]
        await target.receive(self.servers[0], [one.json for one in events])
        self.sent.setdefault(server, []).extend(one.event_id for one in events)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def has(self, server: Homeserver, *ids: EventId) -> Callable[[], bool]:
        return lambda: set(ids) <= set(self.sent.get(server.name, ()))


@dataclass
class SilentWire(Wire):
    """The first transaction to a server in ``silent`` arrives nowhere, and gets no answer."""

    silent: set[str] = field(default_factory=set)

    async def send(self, server: ServerName, transaction: str, events: list[StoredEvent]) -> None:
        if server in self.silent:
            self.silent.remove(server)
            await asyncio.Event().wait()
        await super().send(server, transaction, events)


@asynccontextmanager
async def sending(wire: Wire, limits: SenderLimits = SLOW) -> AsyncIterator[Sender]:
    sender = Sender(wire.servers[0].store, wire.send, limits=limits)
    task = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def say(server: Homeserver, room: RoomId, count: int) -> list[EventId]:
    """Send messages of the server's user, one after the other."""
    content = {"msgtype": "m.text", "body": "hello"}
    found = []
    for _ in range(count):
        result = await server.store.send(room, server.user(), "m.room.message", content)
        found.append(result.event_id)
    return found


async def skip(one: Homeserver) -> None:
    """Let the cursor begin after the events that exist."""
    page = await one.store.outbox(0, 1_000)
    await one.store.cursors.set("federation", page.upto)


async def saved(one: Homeserver) -> None:
    """Wait until the cursor is behind all events."""
    async with asyncio.timeout(WAIT_S):
        while await one.store.outbox(await one.store.cursors.get("federation")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_each_server_gets_all_events_in_order(three: list[Homeserver]) -> None:
    one, two, _ = three
    everywhere, only_two = await shared_room(*three), await shared_room(one, two)
    await skip(one)
    wire = Wire(three)
    async with sending(wire, SenderLimits(pdus_max=4, poll_seconds=60.0)):
        first = await say(one, everywhere, 10)
        second = await say(one, only_two, 3)
        await wire.until(wire.has(two, *first, *second))
        await wire.until(wire.has(three[2], *first))
    assert wire.sent[two.name] == first + second
    assert wire.sent[three[2].name] == first
    assert one.name not in wire.sent
    await agree(everywhere, *three)


async def test_a_server_that_never_answers_is_tried_again(three: list[Homeserver]) -> None:
    """Its first request ends, so the cursor does not stay before its events for ever."""
    one, two, other = three
    room = await shared_room(*three)
    await skip(one)
    wire = SilentWire(three, silent={two.name})
    async with sending(wire, SenderLimits(send_seconds=2.0, poll_seconds=0.05)):
        sent = await say(one, room, 5)
        await wire.until(wire.has(other, *sent))
        await wire.until(wire.has(two, *sent))
        await saved(one)
    assert wire.sent[two.name] == sent


async def test_a_server_that_is_down_delays_nobody(three: list[Homeserver]) -> None:
    one, two, other = three
    room = await shared_room(*three)
    await skip(one)
    wire = Wire(three, down={two.name})
    async with sending(wire) as sender:
        sent = await say(one, room, 5)
        await wire.until(wire.has(other, *sent))
        await wire.until(lambda: two.name in wire.tried)
        sent += await say(one, room, 2)
        await wire.until(wire.has(other, *sent))
        assert wire.tried[two.name] == 1
        wire.down.clear()
        sender.is_up(two.name)
        await wire.until(wire.has(two, *sent))
    assert wire.sent[two.name] == sent
    await agree(room, *three)


async def test_it_tries_again_by_itself(
    two: list[Homeserver], caplog: pytest.LogCaptureFixture
) -> None:
    room = await shared_room(*two)
    await skip(two[0])

    def surprise() -> None:
        raise ZeroDivisionError

    wire = Wire(two, down={two[1].name}, fault=surprise)
    with caplog.at_level(logging.WARNING, "storage.federation.sender"):
        async with sending(wire, SenderLimits(retry_seconds=0.01)):
            sent = await say(two[0], room, 2)
            await wire.until(lambda: wire.tried.get(two[1].name, 0) >= 3)
            wire.down.clear()
            await wire.until(wire.has(two[1], *sent))
    assert {str(two[1].name) in one.getMessage() for one in caplog.records} == {True}
    assert all(one.exc_info is not None for one in caplog.records)


class Away:
    """The database is away while ``is_on`` is set; ``noticed`` after the first failure."""

    def __init__(self) -> None:
        self.is_on = False
        self.noticed = asyncio.Event()

    def before(self, _: str) -> None:
        if self.is_on:
            self.noticed.set()
            raise asyncpg.ConnectionDoesNotExistError("the database is away")

    def after(self, _: str, __: object) -> None:
        pass


async def test_the_database_is_away_when_it_begins(dsn: str, another_dsn: str) -> None:
    away = Away()
    async with AsyncExitStack() as stack:
        one, other = two = await start(stack, [dsn, another_dsn])
        room = await shared_room(*two)
        await skip(one)
        opened = storage.open(
            dsn,
            server_name=one.name,
            instance_name="sender",
            signing_key=signing_key(one.name),
            observer=away,
        )
        one.store = await stack.enter_async_context(opened)
        wire = Wire(two)
        away.is_on = True
        async with sending(wire, QUICK):
            async with asyncio.timeout(WAIT_S):
                await away.noticed.wait()
            away.is_on = False
            sent = await say(one, room, 2)
            await wire.until(wire.has(other, *sent))


async def test_the_end_of_the_store_ends_a_sender(dsn: str, another_dsn: str) -> None:
    async with AsyncExitStack() as stack:
        one, other = two = await start(stack, [dsn, another_dsn])
        room = await shared_room(*two)
        await skip(one)
        wire = Wire(two)
        running = asyncio.create_task(Sender(one.store, wire.send, limits=QUICK).run())
        await wire.until(wire.has(other, *await say(one, room, 1)))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(StorageClosed):
            await running


@dataclass
class Picky(Wire):
    """The other server answers 413 to transactions of more bytes than ``most``."""

    most: int = 0
    status: int = 413
    sizes: list[int] = field(default_factory=list)

    async def send(self, server: ServerName, transaction: str, events: list[StoredEvent]) -> None:
        self.sizes.append(len(events))
        self.changed.set()
        if sum(len(event.raw) for event in events) > self.most:
            raise RemoteError("refused", status=self.status)
        await super().send(server, transaction, events)


async def test_a_transaction_that_is_too_large_is_sent_in_parts(two: list[Homeserver]) -> None:
    one, other = two
    room = await shared_room(*two)
    await skip(one)
    sent = [await say(one, room, 20)]
    large = await one.store.send(room, one.user(), "m.room.message", {"body": "x" * 20_000})
    sent.append(await say(one, room, 20))
    [first, last] = (await one.store.events([sent[0][0], sent[1][-1]])).values()
    wire = Picky(two, most=7 * max(len(first.raw), len(last.raw)))
    async with sending(wire):
        await wire.until(wire.has(other, sent[1][-1]))
        await saved(one)
    assert wire.sent[other.name] == sent[0] + sent[1]
    assert large.event_id not in wire.sent[other.name]
    assert wire.sizes[:4] == [41, 20, 10, 5]
    assert wire.sizes.count(1) == 1, "the large one"


async def test_a_server_that_refuses_this_one_for_now_loses_nothing(two: list[Homeserver]) -> None:
    one, other = two
    room = await shared_room(*two)
    await skip(one)
    sent = await say(one, room, 3)
    wire = Picky(two, status=403)
    async with sending(wire, QUICK):
        await wire.until(lambda: len(wire.sizes) >= 3)
        wire.most = 1 << 20
        await wire.until(wire.has(other, *sent))
    assert set(wire.sizes) == {3}
    assert wire.sent[other.name] == sent


async def test_a_server_that_refuses_everything_loses_one_event_before_a_pause(
    two: list[Homeserver],
) -> None:
    one, other = two
    room = await shared_room(*two)
    await skip(one)
    sent = await say(one, room, 8)
    wire = Picky(two, status=400)
    async with sending(wire) as sender:
        await wire.until(lambda: wire.sizes[-3:] == [1, 2, 1])
        for _ in range(20):  # it pauses now
            await asyncio.sleep(0)
        assert wire.sizes == [8, 4, 2, 1, 2, 1]
        wire.most = 1 << 20
        sender.is_up(other.name)
        await wire.until(wire.has(other, *sent[1:]))
    assert wire.sent[other.name] == sent[1:]


async def test_a_damaged_event_is_dropped(
    two: list[Homeserver], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = two
    room = await shared_room(*two)
    await skip(one)
    before, [damaged], after = [await say(one, room, count) for count in (2, 1, 4)]
    async with one.store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET json = '\\x00ff00' WHERE event_id = $1::text", damaged
        )
    wire = Wire(two)
    async with sending(wire):
        await wire.until(wire.has(other, *before, after[-1]))
        await saved(one)
    assert wire.sent[other.name] == before + after
    assert [one.levelname for one in caplog.records if damaged in one.getMessage()] == ["ERROR"]


@pytest.mark.parametrize("turns", range(6))
async def test_news_at_the_moment_of_its_end_do_not_keep_it(
    two: list[Homeserver], turns: int
) -> None:
    """`asyncio.wait_for` of Python 3.11 drops a cancellation that comes with what it waits for."""
    sender = Sender(two[0].store, Wire(two).send, limits=SLOW)
    task = asyncio.create_task(sender.run())
    await asyncio.sleep(0.05)
    sender._has_new_events.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    assert await asyncio.wait([task], timeout=WAIT_S) == ({task}, set())
    assert task.cancelled()


async def test_after_a_restart_it_sends_what_a_server_lacks(three: list[Homeserver]) -> None:
    one, two, other = three
    room = await shared_room(*three)
    await skip(one)
    wire = Wire(three, down={two.name})
    async with sending(wire):
        sent = await say(one, room, 3)
        await wire.until(wire.has(other, *sent))
    again = Wire(three)
    async with sending(again):
        await again.until(again.has(two, *sent))
        await saved(one)
    assert again.sent[two.name] == sent
    third = Wire(three)
    async with sending(third):
        more = await say(one, room, 1)
        await third.until(third.has(two, *more))
        await third.until(third.has(other, *more))
    assert third.sent == {two.name: more, other.name: more}


async def test_a_long_queue_keeps_the_latest_of_each_room(two: list[Homeserver]) -> None:
    one, other = two
    quiet, loud = await shared_room(*two), await shared_room(*two)
    await skip(one)
    wire = Wire(two, down={other.name})
    async with sending(wire, SenderLimits(queue_max=5, retry_seconds=60.0)) as sender:
        [early] = await say(one, quiet, 1)
        late = await say(one, loud, 17)
        await wire.until(lambda: other.name in wire.tried)
        destination = sender._servers[ServerName(other.name)]
        async with asyncio.timeout(WAIT_S):
            while late[-1] not in destination.queue:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(destination.queue) <= 5
        wire.down.clear()
        sender.is_up(other.name)
        await wire.until(wire.has(other, early, late[-1]))
    assert len(wire.sent[other.name]) <= 5
    for room in (quiet, loud):
        await agree(room, *two)


async def test_it_passes_on_the_event_of_another_server(three: list[Homeserver]) -> None:
    one, two, other = three
    room = await shared_room(*three)
    await skip(one)
    [theirs] = await say(two, room, 1)
    event = (await two.store.events([theirs]))[theirs]
    await one.receive(two, [event.json])
    wire = Wire(three)
    async with sending(wire) as sender:
        await sender.pass_on([one.name, other.name], event)
        await wire.until(wire.has(other, theirs))
    assert wire.sent.keys() == {other.name}


async def test_a_kill_between_a_join_and_its_delivery(three: list[Homeserver], dsn: str) -> None:
    """The server of the join has its answer, so it does not repeat the request."""
    one, two, other = three
    room = await shared_room(*three)
    await skip(one)
    [theirs] = await say(two, room, 1)
    event = (await two.store.events([theirs]))[theirs]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ACCEPT, dsn, one.name, other.name, event.raw.decode()
    )
    async with asyncio.timeout(30):
        assert await child.wait() == -signal.SIGKILL
    wire = Wire(three, down={other.name})
    async with sending(wire, QUICK):
        await wire.until(lambda: wire.tried.get(other.name, 0) > 0)
    wire.down.clear()
    async with sending(wire, QUICK):
        await wire.until(wire.has(other, theirs))
        [fact] = await one.store.stream("relay").rows()
        async with asyncio.timeout(WAIT_S):
            while await one.store.cursors.get("federation relay") < fact.stream_id:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert wire.sent == {other.name: [theirs]}
    async with sending(wire, QUICK) as sender:
        await sender.pass_on([two.name], event)
        await wire.until(wire.has(two, theirs))
    assert wire.sent == {other.name: [theirs], two.name: [theirs]}, "nothing twice"


@pytest.mark.parametrize("version", ["1", "6", "12"])
@pytest.mark.parametrize("is_slow", [True, False])
async def test_a_server_that_joins_gets_what_was_sent_after_its_template(
    two: list[Homeserver], version: str, *, is_slow: bool
) -> None:
    """No join has it as a parent. ``is_slow``: it comes before the answer to send_join."""
    one, other = two
    room = await one.store.create_room(one.user(), room_version=version, initial_state=[PUBLIC])
    wire, between = Wire(two), []

    async def write(template: dict[str, Any]) -> dict[str, Any]:
        topic = {"topic": "made meanwhile"}
        topic_id = (await one.store.send(room, one.user(), TOPIC, topic, state_key="")).event_id
        assert topic_id is not None
        between.extend([topic_id, *await say(one, room, 1)])
        return template

    async def late(answer: dict[str, Any]) -> dict[str, Any]:
        await wire.until(lambda: "s2.test" in wire.tried)
        return answer

    other.network.faults["s1.test", "make_join"] = write
    if is_slow:
        other.network.faults["s1.test", "send_join"] = late
    await skip(one)
    async with sending(wire) as sender:
        one.responder = Responder(one.receiver, sender)
        joined = await other.memberships.join(other.user(), room, ["s1.test"])
        assert joined.outcome == "joined"
        await wire.until(wire.has(other, between[-1]))
    assert {*between} <= (await other.store.events(between)).keys()
    assert (await other.store.current_state(room))[TOPIC, ""] == between[0]
    shown = (await other.store.sync(other.user())).join[room].timeline.events
    assert {*between} <= {one.event_id for one in shown}
    await agree(room, one, other)


async def test_an_event_that_is_passed_on_twice_reaches_both_servers(
    three: list[Homeserver],
) -> None:
    """The second call does not replace the first one."""
    one, other, third = three
    room = await shared_room(one, other, third)
    wire = Wire(three, down={other.name})
    await skip(one)
    [event_id] = await say(third, room, 1)
    event = await third.store.event(event_id)
    assert event is not None
    await one.receive(third, [event.json])
    async with sending(wire) as sender:
        await sender.pass_on([other.name], event)
        await sender.pass_on([third.name], event)
        await wire.until(wire.has(third, event_id))
    facts = await one.store.stream("relay").rows()
    assert len({fact.key for fact in facts}) == 2
    wire.down.clear()
    async with sending(wire):
        await wire.until(wire.has(other, event_id))
