"""Metrics: what is scraped after real work is what was done."""

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import storage
from storage import (
    Config,
    DatabaseError,
    InputError,
    SlidingList,
    SlidingSyncRequest,
    Store,
    UnknownRoom,
)
from storage.database import Database
from storage.observability.counters import FAILURES, Distribution
from storage.observability.prometheus import expose
from storage.persist.commit.retry import SQL_LOCK_ROOMS
from storage.testing import RoomBuilder, build_room
from tests.cli.running import started
from tests.maintenance.rooms import LIVELY, SERVER
from tests.operating.exposition import samples, scrape

ALICE, BOB = "@alice:s1.test", "@bob:s1.test"


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(
        dsn,
        server_name=SERVER,
        config=Config(pool_size_max=3, lock_timeout_ms=60_000, follow_ms=3_600_000),
    ) as opened:
        yield opened


@pytest.fixture
def registry(store: Store) -> CollectorRegistry:
    made = CollectorRegistry()
    expose(store, made)
    return made


def small_room() -> RoomBuilder:
    room = RoomBuilder("11", sign=False)
    room.start(ALICE)
    room.join(BOB)
    return room


async def until(is_so: Callable[[], bool]) -> None:
    """Until it is, which it will be once others have had their turn."""
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)


def test_an_error_for_an_alert_is_counted_from_zero(
    store: Store, registry: CollectorRegistry
) -> None:
    """The increase of a series that begins with its first error is 0, for Prometheus."""
    before = scrape(registry)
    for error in FAILURES:
        assert before[f'room_storage_call_errors_total{{call="append",error="{error}"}}'] == 0
        assert before[f'room_storage_call_errors_total{{call="rooms",error="{error}"}}'] == 0
    assert before['room_storage_database_errors_total{error="DatabaseFull"}'] == 0
    store.measures.call_errors["append", "StorageCorrupt"] += 1
    store.measures.database_errors["DatabaseFull"] += 1
    now = scrape(registry)
    assert now['room_storage_call_errors_total{call="append",error="StorageCorrupt"}'] == 1
    assert now['room_storage_database_errors_total{error="DatabaseFull"}'] == 1
    assert now.keys() == before.keys()


async def test_calls_and_events_are_counted(store: Store, registry: CollectorRegistry) -> None:
    room = small_room()
    await store.append(room.pdus)
    before = scrape(registry)
    said = [room.message(BOB).pdu for _ in range(30)]
    for at in range(0, 30, 10):
        await store.append(said[at : at + 10])
    await store.append(said[:1])
    first = await store.sync(ALICE)
    await store.sync(ALICE, since=first.next_batch)
    await store.sync(ALICE, since=first.next_batch, timeout_ms=1)
    await store.messages(room.room_id, ALICE)
    with pytest.raises(UnknownRoom):
        await store.messages("!nowhere:s1.test", ALICE)
    with pytest.raises(InputError):
        await store.backfill(room.room_id, [room.heads[-1]], -1)
    now = scrape(registry)

    def grown(name: str) -> float:
        return now[name] - before.get(name, 0)

    assert grown('room_storage_events_total{outcome="stored"}') == 30
    assert grown('room_storage_events_total{outcome="duplicate"}') == 1
    assert grown('room_storage_call_seconds_count{call="append"}') == 4
    assert grown('room_storage_call_seconds_bucket{call="append",le="+Inf"}') == 4
    assert 0 < grown('room_storage_call_seconds_sum{call="append"}') < 60
    assert (
        grown("room_storage_append_events_sum"),
        grown('room_storage_append_events_bucket{le="10.0"}'),
    ) == (31, 4)
    assert grown('room_storage_append_events_bucket{le="5.0"}') == 1
    assert grown("room_storage_write_events_sum") == 30
    assert grown("room_storage_write_seconds_count") == 3
    assert 3 <= grown("room_storage_writer_statements_total") <= 6
    assert grown('room_storage_call_seconds_count{call="first_sync"}') == 1
    assert grown('room_storage_call_seconds_count{call="sync"}') >= 2
    assert grown('room_storage_call_seconds_sum{call="sync"}') < 60
    assert grown('room_storage_call_seconds_count{call="messages"}') == 2
    assert grown('room_storage_call_errors_total{call="messages",error="UnknownRoom"}') == 1
    assert grown('room_storage_call_errors_total{call="backfill",error="InputError"}') == 1
    assert grown("room_storage_statements_total") >= 3 + 3
    for stream in ("events", "receipts"):
        assert (
            now[f'room_storage_stream_position{{stream="{stream}",writer="main"}}']
            == store.streams[stream].positions()["main"]
        )
        assert now[f'room_storage_stream_lag{{stream="{stream}",writer="main"}}'] == 0
    assert now['room_storage_cache_hits_total{cache="rooms_of"}'] == store.caches.rooms_of.hits
    assert now['room_storage_cache_entries{cache="rooms_of"}'] == len(store.caches.rooms_of) == 1
    assert now['room_storage_writer_cache_entries{cache="rooms"}'] == 1
    assert (
        now["room_storage_writer_queue_appends"],
        now["room_storage_writer_in_hand_appends"],
    ) == (0, 0)


async def test_the_states_of_connections_are_a_cache(
    store: Store, registry: CollectorRegistry
) -> None:
    await store.append(small_room().pdus)
    request = SlidingSyncRequest(lists={"all": SlidingList()})
    found = await store.sliding_sync(ALICE, request, device_id="PHONE")
    await store.sliding_sync(ALICE, request, device_id="PHONE", pos=found.pos)
    states, now = store.sliding.connections.states, scrape(registry)
    assert states.hits >= 1
    label = '{cache="sliding_connections"}'
    assert now[f"room_storage_cache_hits_total{label}"] == states.hits
    assert now[f"room_storage_cache_misses_total{label}"] == states.misses
    assert now[f"room_storage_cache_entries{label}"] == len(states) == 1


async def test_resolutions_are_timed(store: Store, registry: CollectorRegistry) -> None:
    room = small_room()
    left, right = room.fork()
    left.topic(ALICE, "here")
    right.topic(ALICE, "there")
    room.merge(left, right)
    await store.append([event.pdu for event in room.events])
    now = scrape(registry)
    assert now["room_storage_resolution_seconds_count"] >= 1
    assert 0 < now["room_storage_resolution_seconds_sum"] < 60


async def test_queues_are_told_while_they_last(
    dsn: str, store: Store, registry: CollectorRegistry
) -> None:
    """A writer that is held up by a lock, and readers for whom there is no connection."""
    room = small_room()
    await store.append(room.pdus)
    async with await Database.open(dsn) as other, other.transaction() as conn:
        await conn.execute(SQL_LOCK_ROOMS, [room.room_id])
        appends = [asyncio.create_task(store.append([room.message(BOB).pdu])) for _ in range(5)]
        await until(lambda: store.writer.in_hand == 5)
        used = [store.database.connection() for _ in range(2)]
        for one in used:
            await one.__aenter__()
        reader = asyncio.create_task(store.messages(room.room_id, ALICE))
        await until(lambda: store.database.connections[2] == 1)
        now = scrape(registry)
        assert now["room_storage_writer_in_hand_appends"] == 5
        assert now["room_storage_pool_connections"] == now["room_storage_pool_connections_max"] == 3
        assert now["room_storage_pool_connections_used"] == 3
        assert now["room_storage_pool_waiting"] == 1
        for one in used:
            await one.__aexit__(None, None, None)
    await asyncio.gather(reader, *appends)
    now = scrape(registry)
    assert (now["room_storage_writer_in_hand_appends"], now["room_storage_pool_waiting"]) == (0, 0)
    assert now["room_storage_pool_wait_seconds_count"] >= 1


async def test_errors_of_the_database_are_counted_by_class(
    store: Store, registry: CollectorRegistry
) -> None:
    async with store.database.connection() as conn:
        with pytest.raises(DatabaseError):
            await conn.execute("SELECT 1 / 0")
    async with store.database.connection() as killed, store.database.connection() as killer:
        await killer.execute("SELECT pg_terminate_backend($1::int, 30000)", killed.backend_pid)
        with pytest.raises(storage.DatabaseUnavailable):
            await killed.execute("SELECT 1")
    now = scrape(registry)
    assert now['room_storage_database_errors_total{error="DatabaseUnavailable"}'] == 1
    assert now['room_storage_database_errors_total{error="DatabaseError"}'] == 1


async def test_another_writer_that_is_behind(
    dsn: str, store: Store, registry: CollectorRegistry
) -> None:
    async with storage.open(
        dsn, server_name=SERVER, instance_name="second", config=Config(follow_ms=3_600_000)
    ):
        room = small_room()
        await store.append(room.pdus)
        await store.streams["events"].rows(0, 1, 1)
        now = scrape(registry)
        assert (
            now['room_storage_stream_lag{stream="events",writer="second"}'] >= len(room.events) - 1
        )
        assert now['room_storage_stream_lag{stream="events",writer="main"}'] == 0


async def test_nobody_is_named(store: Store, registry: CollectorRegistry) -> None:
    """Neither users nor rooms nor events, whatever is done."""
    room = build_room(LIVELY, 120, seed=3, sign=False)
    await store.append([event.pdu for event in room.events])
    users = {event.sender for event in room.events}
    for user in sorted(user for user in users if user.endswith(SERVER)):
        await store.sync(user)
        await store.messages(room.room_id, user)
        with pytest.raises(UnknownRoom):
            await store.gaps("!nowhere:s1.test")
    text = generate_latest(registry).decode()
    labels = set(re.findall(r'="([^"]*)"', text))
    assert "append" in labels
    assert [label for label in labels if re.search(r"[@!$:]", label)] == []
    assert [
        one
        for one in (room.room_id, *users, *(event.event_id for event in room.events))
        if one in text
    ] == []


async def test_two_stores_need_two_registries(
    dsn: str, store: Store, registry: CollectorRegistry
) -> None:
    with pytest.raises(ValueError, match="Duplicated"):
        expose(store, registry)
    again = CollectorRegistry()
    collector = expose(store, again)
    again.unregister(collector)
    assert scrape(again) == {}
    expose(store, again)


def test_values_are_counted_where_prometheus_has_them() -> None:
    """A bound is part of its bucket."""
    values = Distribution((1, 2))
    for value in (0.5, 1, 1.5, 2, 2.5, 100):
        values.add(value)
    assert (values.counts, values.total, len(values)) == ([2, 2, 2], 107.5, 6)


def test_serve_has_a_port_for_metrics(dsn: str) -> None:
    process = started(
        "serve",
        "--port",
        "0",
        "--http-port",
        "0",
        "--json",
        "--server-name",
        SERVER,
        STORAGE_DSN=dsn,
    )
    assert process.stdout is not None
    try:
        places: dict[str, Any] = json.loads(process.stdout.readline())
        with urllib.request.urlopen(places["metrics"], timeout=30) as answer:
            now = samples(answer.read().decode())
        assert now['room_storage_stream_lag{stream="events",writer="serve"}'] == 0
        assert now["process_cpu_seconds_total"] > 0
        assert places["metrics"] == places["http"] + "/metrics"
        taken = started(
            "serve",
            "--no-tcp",
            "--redis",
            "redis://127.0.0.1:1",
            "--metrics-port",
            places["metrics"].rpartition(":")[2].partition("/")[0],
            "--instance-name",
            "other",
            "--server-name",
            SERVER,
            STORAGE_DSN=dsn,
        )
        _, told = taken.communicate(timeout=60)
        assert taken.returncode != 0, told
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
