"""A database that goes away: each call raises, then all recovers, no fact is lost or doubled."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

import storage
from storage import CommitUnknown, Config, DatabaseUnavailable, Store
from storage.replication import Client, Server
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.test_sync_long_poll import Wait
from tests.replication.processes import Seen
from tests.replication.proxies import Proxy, through, unix_socket_of

ALICE = "@alice:s1.test"
AWAY = (DatabaseUnavailable, CommitUnknown)
LONG_MS = 30_000
"""A connection that is refused fails at once. Others may take long on a busy machine."""


async def outcome(store: Store, event: BuiltEvent) -> str:
    """Of one append; "away" if it says that the database is."""
    try:
        [result] = await store.append([event.pdu])
    except AWAY:
        return "away"
    return result.outcome


async def lose(postgres: Proxy, store: Store, events: Sequence[BuiltEvent]) -> list[str]:
    """The database goes away amid these appends; what becomes of them."""
    first, *others = events
    tasks = [asyncio.create_task(outcome(store, first))]
    await asyncio.wait(tasks)
    tasks += [asyncio.create_task(outcome(store, event)) for event in others]
    await asyncio.sleep(0)
    postgres.open = False
    postgres.cut()
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("follow_ms", [5, 3_600_000])
async def test_a_database_that_goes_away_under_appends_syncs_and_replicas(
    dsn: str, follow_ms: int
) -> None:
    """Both stores lose it at once.

    Without a look at the table now and then (the second case) the worker hears by replication
    alone.
    """
    room = RoomBuilder("11")
    room.start(ALICE)
    config = Config(
        pool_acquire_timeout_ms=LONG_MS, connect_timeout_ms=LONG_MS, follow_ms=follow_ms
    )
    async with asyncio.timeout(60), Proxy(unix_socket_of(dsn)) as postgres:
        proxied = through(dsn, postgres.port)
        async with (
            storage.open(
                proxied, server_name="s1.test", instance_name="main", config=config
            ) as main,
            storage.open(
                proxied, server_name="s1.test", instance_name="worker", config=config
            ) as worker,
            await Server(main).serve() as server,
            Client(worker, "127.0.0.1", server.port) as client,
        ):
            await client.connected()
            await main.append(room.pdus)
            since = (await main.sync(ALICE)).next_batch
            seen = [Seen(main.streams), Seen(worker.streams)]
            during = [room.message(ALICE, f"while it goes {number}") for number in range(20)]
            found = await lose(postgres, main, during)
            assert found[0] == "stored"
            assert "away" in found

            gone = [room.message(ALICE, f"while it is away {number}") for number in range(3)]
            assert [await outcome(main, event) for event in gone] == ["away"] * 3
            for store in (main, worker):
                with pytest.raises(DatabaseUnavailable):
                    await store.sync(ALICE, since=since, timeout_ms=60_000)

            postgres.open = True
            again = [(await main.append([event.pdu]))[0] for event in [*during, *gone]]
            assert {result.outcome for result in again} == {"stored", "duplicate"}
            assert [await outcome(main, event) for event in [*during, *gone]] == ["duplicate"] * 23
            sent = {result.event_id: result.stream_ordering or 0 for result in again}
            for process in seen:
                await process.reached("main", max(sent.values()), "events")
                told = [fact.row[0] for fact in process.facts["events", "main"]]
                assert [event_id for event_id in told if event_id in sent] == sorted(
                    sent, key=sent.__getitem__
                ), "each once, in order"
            for store in (main, worker):
                answer = await store.sync(ALICE, since=since, timeline_limit=50, timeout_ms=60_000)
                assert {
                    event.event_id for event in answer.join[room.room_id].timeline.events
                } == set(sent)


async def test_a_database_that_falls_silent(dsn: str) -> None:
    """As when its machine vanishes: no connection breaks, and nothing comes back.

    The appends arrive in the end, long after their callers got an error.
    """
    room = RoomBuilder("11")
    room.start(ALICE)
    config = Config(
        pool_acquire_timeout_ms=1_000,
        connect_timeout_ms=1_000,
        statement_timeout_ms=1_000,
        follow_ms=3_600_000,
    )
    async with (
        asyncio.timeout(100),
        Proxy(unix_socket_of(dsn)) as postgres,
        storage.open(through(dsn, postgres.port), server_name="s1.test", config=config) as store,
    ):
        await store.append(room.pdus)
        since = (await store.sync(ALICE)).next_batch
        seen = Seen(store.streams)
        said = [room.message(ALICE, f"into the void {number}") for number in range(3)]
        postgres.flows.clear()
        async with asyncio.timeout(60):
            assert [await outcome(store, event) for event in said] == ["away"] * 3
            with pytest.raises(DatabaseUnavailable):
                await store.sync(ALICE, since=since, timeout_ms=60_000)
        limits = replace(config, connect_timeout_ms=LONG_MS, statement_timeout_ms=LONG_MS)
        limits = replace(limits, pool_acquire_timeout_ms=LONG_MS)
        store.database._config = store.database._connect._config = limits
        postgres.flows.set()
        again = [(await store.append([event.pdu]))[0] for event in said]
        assert {result.outcome for result in again} <= {"stored", "duplicate"}
        assert [fact.row[0] for fact in seen.facts["events", "main"]] == [
            event.event_id for event in said
        ]
        answer = await store.sync(ALICE, since=since)
        assert [event.event_id for event in answer.join[room.room_id].timeline.events] == [
            event.event_id for event in said
        ]


async def test_a_sync_that_waits_through_an_outage_is_woken_after_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting asks nothing of the database, so it does not notice."""
    room = RoomBuilder("11")
    room.start(ALICE)
    config = Config(
        pool_acquire_timeout_ms=LONG_MS, connect_timeout_ms=LONG_MS, follow_ms=3_600_000
    )
    async with (
        asyncio.timeout(100),
        Proxy(unix_socket_of(dsn)) as postgres,
        storage.open(through(dsn, postgres.port), server_name="s1.test", config=config) as store,
    ):
        await store.append(room.pdus)
        since = (await store.sync(ALICE)).next_batch
        wait = Wait(store, monkeypatch)
        asking = asyncio.create_task(store.sync(ALICE, since=since, timeout_ms=60_000))
        await wait.reached.wait()
        postgres.open = False
        postgres.cut()
        said = room.message(ALICE)
        assert await outcome(store, said) == "away"
        assert not asking.done()
        postgres.open = True
        await store.append([said.pdu])
        answer = await asking
        assert [event.event_id for event in answer.join[room.room_id].timeline.events] == [
            said.event_id
        ]
