"""Batches with rooms of several versions: each event is read and authorised by its own room's."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.persist.model.results import Origin
from storage.testing import RoomBuilder

PAIRS = [
    ("11", "12"),
    ("12", "11"),
    ("10", "12"),
    ("12", "10"),
    ("1", "12"),
    ("2", "11"),
    ("3", "12"),
    ("12", "12"),
]


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


def room_of(version: str, seed: int = 1) -> RoomBuilder:
    room = RoomBuilder(version, seed=seed, sign=False)
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    room.topic(admin, "topic")
    room.redact(admin, room.message(other, "hello"))
    return room


def interleaved(*rooms: RoomBuilder) -> list[bytes]:
    return [
        pdu
        for pdus in itertools.zip_longest(*(room.pdus for room in rooms))
        for pdu in pdus
        if pdu is not None
    ]


async def assert_whole(store: Store, *rooms: RoomBuilder) -> None:
    for room in rooms:
        assert await store.current_state(room.room_id) == dict(room.state), room.version
        held = await store.events([event.event_id for event in room.events])
        assert {one.event_id for one in held.values() if not one.rejected} == {
            event.event_id for event in room.events
        }


@pytest.mark.parametrize("versions", PAIRS)
@pytest.mark.parametrize("given", [None, "9"])
async def test_each_event_by_the_version_of_its_room(
    store: Store, versions: tuple[str, str], given: str | None
) -> None:
    """A create event in the batch outranks ``room_version``."""
    rooms = [room_of(version, seed) for seed, version in enumerate(versions, 1)]
    results = await store.append(interleaved(*rooms), room_version=given)
    assert {(result.outcome, result.reason) for result in results} == {("stored", None)}
    await assert_whole(store, *rooms)


async def test_twelve_rooms_of_all_versions_in_any_order(store: Store) -> None:
    rooms = [room_of(str(version), version) for version in range(1, 13)]
    pdus = interleaved(*rooms)
    random.Random(1).shuffle(pdus)
    assert {result.outcome for result in await store.append(pdus)} == {"stored"}
    await assert_whole(store, *rooms)


@pytest.mark.parametrize("version", ["1", "9", "11", "12"])
async def test_an_unknown_room_is_invalid_beside_the_create_event_of_another(
    store: Store, version: str
) -> None:
    """Outliers name no parents that are missing, so nothing else would stop them."""
    known, unknown = room_of("10", 1), room_of(version, 2)
    joins = [event.pdu for event in unknown.events if event.type == "m.room.member"]
    results = await store.append([*known.pdus, *joins], origin="outlier")
    assert [result.outcome for result in results] == ["stored"] * len(known.pdus) + [
        "invalid"
    ] * len(joins)
    assert "give room_version" in (results[-1].reason or "")
    assert await store.append(unknown.pdus)  # nothing was learned of it
    await assert_whole(store, unknown)


async def test_a_stored_room_outranks_what_the_batch_says(store: Store) -> None:
    room = room_of("11")
    await store.append(room.pdus[:1])
    claimed = RoomBuilder("9", seed=2, sign=False)
    claimed.start(claimed.user(1))
    create = {**claimed.events[0].json, "room_id": room.room_id}
    results = await store.append([create, *room.pdus[1:]], room_version="9")
    assert {result.outcome for result in results[1:]} == {"stored"}
    await assert_whole(store, room)


async def test_nobody_claims_the_id_of_a_room_of_version_12(store: Store) -> None:
    """The id is that of its create event.

    Another create event that names it in ``room_id`` says nothing about its version.
    """
    room, other = room_of("12"), room_of("9", 2)
    claim = {**other.events[0].json, "room_id": room.room_id}
    results = await store.append([claim, *room.pdus])
    assert {result.outcome for result in results[1:]} == {"stored"}
    await assert_whole(store, room)


async def test_a_create_event_that_cannot_be_stored_says_nothing(store: Store) -> None:
    room = room_of("11")
    broken = {**room.events[0].json, "depth": "1"}
    results = await store.append([broken, *room.pdus[1:]])
    assert {result.outcome for result in results} == {"invalid"}
    assert {
        result.outcome for result in await store.append([broken, *room.pdus[1:]], room_version="11")
    } == {"invalid", "missing_parents"}


async def test_a_room_that_becomes_known_while_another_call_waits(store: Store) -> None:
    """The version that a caller guesses is compared with the room's.

    An event that was read by another version is invalid, and can come again.
    """
    for seed, guess in enumerate(("1", "10", "11"), 1):
        room = room_of("12", seed)
        [*calls, first] = await asyncio.gather(
            store.append(room.pdus[1:2], room_version=guess),
            store.append(room.pdus[:1]),
            store.append(room.pdus[1:2], room_version=guess),
        )
        assert {first[0].outcome, calls[0][0].outcome} <= {
            "invalid",
            "missing_parents",
            "stored",
            "duplicate",
        }, guess
        assert {result.outcome for result in await store.append(room.pdus)} == {
            "duplicate",
            "stored",
        }
        await assert_whole(store, room)


@pytest.mark.parametrize("origin", ["live", "outlier", "backfill", "out_of_band"])
@pytest.mark.parametrize("guess", ["3", "6", "11"])
async def test_a_room_of_version_12_is_never_known_under_another(
    store: Store, guess: str, origin: Origin
) -> None:
    """The id proves that the caller's guess is wrong.

    The room gets its version from the first event that is read by the right one.
    """
    room = room_of("12")
    joins = [event.pdu for event in room.events if event.type == "m.room.member"]
    results = await store.append(joins, room_version=guess, origin=origin)
    assert {result.outcome for result in results} == {"invalid"}
    assert f"is not the id of a room of version {guess}" in (results[0].reason or "")
    assert await version_of(store, room) is None
    assert {result.outcome for result in await store.append(room.pdus)} == {"stored"}
    assert await version_of(store, room) == "12"
    await assert_whole(store, room)


@pytest.mark.parametrize("version", ["6", "11"])
async def test_a_room_of_an_older_version_is_never_known_under_12(
    store: Store, version: str
) -> None:
    room = room_of(version)
    [join, *_] = [event.pdu for event in room.events if event.type == "m.room.member"]
    [result] = await store.append([join], room_version="12", origin="outlier")
    assert result.outcome == "invalid"
    assert await version_of(store, room) is None
    assert {result.outcome for result in await store.append(room.pdus)} == {"stored"}
    await assert_whole(store, room)


async def version_of(store: Store, room: RoomBuilder) -> str | None:
    async with store.database.connection() as conn:
        version: str | None = await conn.fetchval(
            "SELECT room_version FROM rooms WHERE room_id = $1::text", room.room_id
        )
        return version
