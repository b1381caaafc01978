"""A dictionary is trained on a sample, compared on other events, and stored if it is better."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

import storage
from storage import InputError, Store
from storage.codec import shipped_dictionary, train
from storage.codec.pack import COMMON_ROOMS, common_words
from storage.maintenance.reencode import sample_events, train_dictionary
from storage.testing import RoomBuilder
from tests.cli.running import room_storage_beside
from tests.maintenance.rooms import SERVER, findings

USER = f"@user1:{SERVER}"
SECRET = "the password for everybody in the house behind the old mill is"
HABIT = {"org.example.weather": {"station": "Hohenpeissenberg", "unit": "degrees Celsius"}}
"""Content that is in every event of this deployment, and in no shipped dictionary."""


def weather_room(number: int, events: int = 30) -> RoomBuilder:
    room = RoomBuilder("11", seed=number)
    room.start(USER)
    for count in range(events):
        content = {"msgtype": "m.text", "body": f"Report {count} of station {number}", **HABIT}
        room.send(USER, "m.room.message", content)
    return room


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        for number in range(12):
            await opened.append(weather_room(number).pdus)
        yield opened


async def dictionaries(store: Store) -> list[int]:
    async with store.database.connection() as conn:
        found: list[int] = await conn.fetchvals("SELECT dictionary_id FROM dictionaries")
        return found


async def test_the_better_one_is_stored_and_used(store: Store) -> None:
    planned = await train_dictionary(store.database, dry_run=True, seed=3)
    assert (planned.is_better, planned.is_stored) == (True, False)
    assert await dictionaries(store) == []
    done = await train_dictionary(store.database, seed=3)
    assert done == replace(planned, is_stored=True)
    assert done.present_id == shipped_dictionary().id
    assert done.trained_bytes < 0.9 * done.present_bytes < done.received_bytes
    assert await dictionaries(store) == [done.trained_id]
    again = await train_dictionary(store.database, seed=3)
    assert (again.present_id, again.is_better) == (done.trained_id, False)
    assert await dictionaries(store) == [done.trained_id]
    assert await findings(store) == []


async def test_too_few_events(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        for events in (0, 40):
            if events:
                await store.append(weather_room(1, events).pdus)
            with pytest.raises(InputError, match="more events"):
                await train_dictionary(store.database)
        with pytest.raises(InputError, match="at least"):
            await train_dictionary(store.database, events=3)


async def test_the_sample_is_bounded_and_of_many_rooms(store: Store) -> None:
    async with store.database.connection() as conn:
        sample = await sample_events(conn, 100, 5)
        assert await sample_events(conn, 100, 5) == sample
        assert await sample_events(conn, 100, 6) != sample
    assert 60 <= len(sample) <= 100
    rooms = [one.room_id for one in sample]
    assert len(set(rooms)) > 8
    assert max(rooms.count(one) for one in rooms) <= 10


def test_no_text_of_a_message_is_in_a_dictionary() -> None:
    """Of texts only single words stay that occur in many rooms, in no order."""
    samples = []
    for number in range(COMMON_ROOMS + 2):
        room = RoomBuilder("11", seed=number)
        room.start(USER)
        for count in range(30):
            room.message(USER, f"{SECRET} swordfish{number} {count}")
        samples += [(event.pdu, room.room_id) for event in room.events]
    assert set(SECRET.encode().split()) <= common_words(samples)
    assert b"swordfish1" not in common_words(samples)
    data = train(samples)
    assert b"swordfish" not in data
    assert SECRET.encode() not in data
    assert SECRET.encode() in train(samples, are_private=False)


async def test_the_command(store: Store, dsn: str) -> None:
    done = await room_storage_beside("train-dictionary", "--dry-run", "--quiet", STORAGE_DSN=dsn)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the new one would be stored" in done.stdout
    done = await room_storage_beside("train-dictionary", "--json", "--quiet", "--dsn", dsn)
    found = json.loads(done.stdout)
    assert found["is_stored"]
    assert [found["trained_id"]] == await dictionaries(store)
    done = await room_storage_beside("jobs", "--re-encode", "--quiet", STORAGE_DSN=dsn)
    assert done.returncode == 0
    assert "encode events" in done.stdout
    done = await room_storage_beside("stats", "--json", "--dsn", dsn)
    stats = json.loads(done.stdout)["stored_forms"]
    assert stats["plain_events"] == 0
    assert stats["stored_bytes"] < stats["received_bytes"] / 2
    assert await findings(store) == []
    done = await room_storage_beside("train-dictionary", "--events", "3", STORAGE_DSN=dsn)
    assert done.returncode == 2
