"""Appending: what is stored is what came, in whatever order, batch size or circumstances."""

import json
import random
from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.database.migrate import migrate
from storage.errors import CommitUnknown, DatabaseUnavailable
from storage.ids import server_name_of
from storage.testing import (
    KEY_ID,
    SHAPES,
    RoomBuilder,
    build_room,
    deliver_late,
    deliver_shuffled,
    deliver_with_gap,
    respell,
)
from tests.persist.tables import logical_tables, row_counts

pytestmark = pytest.mark.every_postgres

VERSIONS = [str(number) for number in range(1, 13)]


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


def small_room(version: str = "11", seed: int = 1) -> RoomBuilder:
    room = RoomBuilder(version, seed=seed)
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    left, right = room.fork(2)
    left.topic(admin, "one")
    right.ban(admin, other)
    room.merge(left, right)
    target = room.message(admin, "hello")
    room.redact(admin, target)
    return room


@pytest.mark.parametrize("version", VERSIONS)
async def test_states_bytes_and_signatures_of_a_room_with_a_fork(
    store: Store, version: str
) -> None:
    room = small_room(version)
    results = await store.append(room.pdus, verify_keys=room.keys, room_version=version)
    assert [result.outcome for result in results] == ["stored"] * len(room.events)
    for event in room.events:
        assert await store.state_before(event.event_id) == dict(event.state_before)
        assert await store.state_after(event.event_id) == dict(event.state_after)
        held = await store.event(event.event_id)
        assert held is not None
        assert held.raw == event.pdu
    assert await store.current_state(room.room_id) == dict(room.state)
    assert await store.forward_extremities(room.room_id) == set(room.heads)
    again = await store.append(room.pdus, room_version=version)
    assert {result.outcome for result in again} == {"duplicate"}


async def test_spelling_survives(store: Store) -> None:
    """Key order, spacing and escapes of the bytes that came in."""
    room = small_room()
    rng = random.Random(1)
    spelled = [respell(event, rng).pdu for event in room.generated().events]
    assert spelled != room.pdus
    await store.append(spelled)
    held = await store.events([event.event_id for event in room.events])
    assert [held[event.event_id].raw for event in room.events] == spelled


@pytest.mark.parametrize("version", ["1", "2", "3", "5"])
async def test_number_lexemes_survive(store: Store, version: str) -> None:
    """Versions 1 to 5 allow any number of JSON; it comes out as it came in."""
    room = RoomBuilder(version, seed=1)
    room.start(room.user(1))
    event = room.send(room.user(1), "m.room.message", {"body": "x", "a": 100.0, "b": 0, "c": 1.5})
    pdu = event.pdu.replace(b'"a":100.0', b'"a":1e2').replace(b'"b":0', b'"b":-0')
    assert pdu != event.pdu
    await store.append(room.pdus[:-1], room_version=version)
    [result] = await store.append([pdu], room_version=version)
    assert result.outcome == "stored"
    held = await store.event(event.event_id)
    assert held is not None
    assert held.raw == pdu


async def test_a_dict_is_stored_as_canonical_json(store: Store) -> None:
    room = small_room()
    results = await store.append([json.loads(pdu) for pdu in room.pdus])
    assert {result.outcome for result in results} == {"stored"}


@pytest.mark.parametrize("seed", range(6))
async def test_order_and_batch_size_do_not_matter(store: Store, dsn: str, seed: int) -> None:
    """Without gaps, every delivery with parents first gives the same tables.

    Soft failure is excepted, as it depends on arrival.
    """
    shape = SHAPES["small_chat"].replaced(fork_rate=0.0)
    room = build_room(shape, 120, seed=seed)
    await store.append(room.pdus)
    expected = await logical_tables(store.database)
    rng = random.Random(seed)
    events = list(deliver_late(room, seed).events)
    async with storage.open(await _another(dsn, store), server_name="s1.test") as second:
        while events:
            size = rng.choice([1, 2, 7, 30])
            batch, events = events[:size], events[size:]
            rng.shuffle(batch)
            results = await second.append([event.pdu for event in batch], room_version=room.version)
            assert {result.outcome for result in results} == {"stored"}
        found = await logical_tables(second.database)
    for name, rows in expected.items():
        assert found[name] == rows, name


async def _another(dsn: str, store: Store) -> str:
    """A second migrated database beside the first."""
    name = dsn.rsplit("/", 1)[1].split("?", maxsplit=1)[0]
    async with store.database.connection() as conn:
        await conn.execute(
            f"CREATE DATABASE {name}_b TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'"
        )
    second = dsn.replace(name, f"{name}_b")
    await migrate(second)
    return second


async def test_shuffled_delivery_in_one_batch(store: Store) -> None:
    room = small_room(seed=4)
    delivered = deliver_shuffled(room, 3)
    results = await store.append([event.pdu for event in delivered.events])
    assert {result.outcome for result in results} == {"stored"}
    assert [result.event_id for result in results] == [event.event_id for event in delivered.events]


async def test_missing_parents_are_named_and_nothing_is_stored(store: Store) -> None:
    room = small_room()
    [result] = await store.append(room.pdus[-1:], room_version="11")
    assert result.outcome == "missing_parents"
    assert set(result.missing) == {*room.events[-1].prev_events, *room.events[-1].auth_events} - {
        None
    }
    assert (await row_counts(store.database))["events"] == 0
    assert (await row_counts(store.database))["rooms"] == 0


async def test_a_gap_is_listed_and_filled(store: Store) -> None:
    room = RoomBuilder("11", seed=2)
    admin = room.user(1)
    room.start(admin)
    for number in range(10):
        room.message(admin, f"message {number}")
    room.topic(admin, "after")
    delivery = deliver_with_gap(room, 7, 11)
    gap = {event.event_id for event in room.events[7:11]}
    for event in delivery.events:
        given = {} if event.state_before is None else {event.event_id: event.state_before}
        if event.origin == "backfill":
            assert (await store.backward_extremities(room.room_id)) & gap
        [result] = await store.append([event.pdu], origin=event.origin, state_before=given)
        assert result.outcome in ("stored", "duplicate"), result
    assert await store.backward_extremities(room.room_id) == set()
    held = await store.events([event.event_id for event in room.events])
    orders = {event_id: one.topological_ordering for event_id, one in held.items()}
    edges = [(parent, event.event_id) for event in room.events for parent in event.prev_events]
    assert all((orders[parent] or 0) < (orders[child] or 0) for parent, child in edges)
    assert await store.forward_extremities(room.room_id) == set(room.heads)


async def test_invalid_pdus_do_not_fail_the_batch(store: Store) -> None:
    room = small_room()
    bad = [b"{", b"[]", b'{"type":1}', b"\xff", b"{" * 100_000]
    results = await store.append([*bad, *room.pdus, *bad])
    assert [result.outcome for result in results] == ["invalid"] * 5 + ["stored"] * len(
        room.events
    ) + ["invalid"] * 5
    assert all(result.reason for result in results[:5])


async def test_a_bad_signature_is_invalid(store: Store) -> None:
    room = small_room()
    damaged = room.message(room.user(1), "x", damage="signature")
    results = await store.append(room.pdus, verify_keys=room.keys)
    assert [result.outcome for result in results] == ["stored"] * (len(room.events) - 1) + [
        "invalid"
    ]
    assert await store.event(damaged.event_id) is None


async def test_keys_may_be_fetched(store: Store) -> None:
    room = small_room()

    async def fetch(server: str, key_id: str) -> object:
        return room.keys.get((server, key_id))

    assert {result.outcome for result in await store.append(room.pdus, verify_keys=fetch)} == {
        "stored"
    }


async def test_an_unknown_key_is_invalid(store: Store) -> None:
    room = small_room()
    results = await store.append(room.pdus, verify_keys={})
    assert [(result.outcome, result.reason) for result in results] == [
        ("invalid", f"signature of {server}: verify_keys has no key for {(server, KEY_ID)}")
        for server in (server_name_of(event.sender) for event in room.events)
    ]


async def test_a_wrong_content_hash_stores_the_redacted_form(store: Store) -> None:
    room = RoomBuilder("11", seed=1)
    room.start(room.user(1))
    event = room.message(room.user(1), "secret", damage="content_hash")
    results = await store.append(room.pdus)
    assert results[-1].outcome == "redacted"
    held = await store.event(event.event_id)
    assert held is not None
    assert held.raw == event.pdu
    assert held.json["content"] == {}


async def test_two_stores_on_one_room(store: Store, dsn: str) -> None:
    """Two processes write to the same rooms: no event is lost or doubled, states form one line."""
    room = build_room(SHAPES["small_chat"], 200, seed=5)
    async with storage.open(dsn, server_name="s1.test", instance_name="second") as second:
        for at, pdu in enumerate(room.pdus):
            writer, other = (store, second) if at % 2 else (second, store)
            [result] = await writer.append([pdu])
            assert result.outcome == "stored"
            if at % 7 == 0:
                [again] = await other.append([pdu])
                assert again.outcome == "duplicate"
    assert await store.current_state(room.room_id) == dict(room.state)


async def test_a_closed_store_says_so(dsn: str) -> None:
    async with storage.open(dsn, server_name="s1.test") as store:
        pass
    with pytest.raises(storage.StorageClosed):
        await store.append(small_room().pdus, room_version="11")


class FailAt:
    """An observer that lets statement number `count` fail as a lost connection would."""

    def __init__(self) -> None:
        self.count = -1
        self.seen = 0
        self.failed = False

    def before(self, statement: str) -> None:
        del statement
        if self.seen == self.count:
            self.failed = True
            raise DatabaseUnavailable("injected")
        self.seen += 1

    def after(self, statement: str, seconds: float) -> None:
        del statement, seconds


async def test_failure_at_any_statement_changes_nothing(dsn: str) -> None:
    """Fail at statement n for every n, until the call succeeds: before that nothing has changed."""
    room = small_room("12")
    observer = FailAt()
    quiet = storage.Config(follow_ms=3_600_000)  # nobody else's statements are counted
    async with storage.open(dsn, server_name="s1.test", config=quiet, observer=observer) as store:
        await store.append(room.pdus[:5])
        observer.seen, observer.count = 0, -1
        before = await logical_tables(store.database)
        results: list[storage.AppendResult] = []
        for count in range(100):
            store.writer.caches.forget()
            observer.seen, observer.count, observer.failed = 0, count, False
            try:
                results = await store.append(room.pdus)
            except (
                DatabaseUnavailable,
                CommitUnknown,
            ):  # the latter: the write itself failed, and so did the look-up after it
                observer.count = -1
                assert await logical_tables(store.database) == before, count
            else:
                break
        observer.count = -1
        assert not observer.failed
        assert count > 5
        assert [result.outcome for result in results] == ["duplicate"] * 5 + ["stored"] * (
            len(room.events) - 5
        )
        assert await store.current_state(room.room_id) == dict(room.state)
