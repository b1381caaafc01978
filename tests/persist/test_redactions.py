"""Which redactions take effect: one's own server's, or by the redact level; never anybody's."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.ids import EventId
from storage.testing import BuiltEvent, RoomBuilder

VERSIONS = ["3", "6", "11", "12"]


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


def room_of_three(version: str) -> tuple[RoomBuilder, str, str, str]:
    """A room with its admin, a user of the admin's server, and a user of another server."""
    room = RoomBuilder(version, seed=1, sign=False)
    admin, local, remote = room.user(1, "s1.test"), room.user(2, "s1.test"), room.user(3, "s2.test")
    room.start(admin)
    room.join(local)
    room.join(remote)
    return room, admin, local, remote


async def redacted_by(store: Store, event: BuiltEvent) -> EventId | None:
    return (await store.events([event.event_id]))[event.event_id].redacted_by


async def take(store: Store, room: RoomBuilder, *, last: BuiltEvent | None = None) -> None:
    """Store the room; ``last`` arrives after all others, as history."""
    await store.append(
        [one.pdu for one in room.events if one is not last], room_version=room.version
    )
    if last is not None:
        assert (await store.append([last.pdu], origin="backfill"))[0].outcome == "stored"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("target_last", [False, True])
async def test_nobody_without_the_level_redacts_an_event_of_another_server(
    store: Store, version: str, target_last: bool
) -> None:
    room, _, local, remote = room_of_three(version)
    left, right = room.fork(2)
    said = left.message(local, "hello")
    right.redact(remote, said)
    await take(store, room, last=said if target_last else None)
    assert await redacted_by(store, said) is None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("target_last", [False, True])
@pytest.mark.parametrize("by", ["sender", "server", "level"])
async def test_the_sender_its_server_and_the_level_redact(
    store: Store, version: str, by: str, target_last: bool
) -> None:
    room, admin, local, remote = room_of_three(version)
    neighbour = room.user(4, "s2.test")
    room.join(neighbour)
    redactor = {"sender": remote, "server": neighbour, "level": admin}[by]
    left, right = room.fork(2)
    said = left.message(remote, f"hello {local}")
    redaction = right.redact(redactor, said)
    await take(store, room, last=said if target_last else None)
    assert await redacted_by(store, said) == redaction.event_id


async def ineffective(store: Store, *events: BuiltEvent) -> list[bool]:
    """Return of each whether it is stored as a redaction that takes no effect."""
    async with store.database.connection() as conn:
        rows = await conn._driver.fetch(
            "SELECT event_id, ineffective FROM events WHERE event_id = ANY($1)",
            [one.event_id for one in events],
        )
    by_id = {row[0]: row[1] for row in rows}
    return [by_id[one.event_id] for one in events]


@pytest.mark.parametrize("later_first", [False, True])
async def test_of_two_redactions_that_waited_the_older_one_is_named_and_both_take_effect(
    store: Store, *, later_first: bool
) -> None:
    room, admin, local, remote = room_of_three("11")
    side, left, right = room.fork(3)
    said = side.message(local, "hello")
    first, second, nobodys = (
        left.redact(admin, said),
        right.redact(local, said),
        right.redact(remote, said),
    )
    arrived = [second, nobodys, first] if later_first else [first, second, nobodys]
    await store.append(
        [one.pdu for one in room.events if one not in {said, *arrived}], room_version="11"
    )
    for one in arrived:
        await store.append([one.pdu])
    assert await ineffective(store, first, second, nobodys) == [True, True, True]
    assert (await store.append([said.pdu], origin="backfill"))[0].outcome == "stored"
    assert await redacted_by(store, said) == first.event_id
    assert await ineffective(store, first, second, nobodys, said) == [False, False, True, False]


async def test_redactions_that_take_no_effect_are_marked(store: Store) -> None:
    """Without a target, by nobody's right, of an event of another room, and of a rejected event."""
    room, admin, local, remote = room_of_three("11")
    other = RoomBuilder("11", seed=2, sign=False)
    other.start(admin)
    said, elsewhere = room.message(local, "hello"), other.message(admin, "elsewhere")
    refused = room.at(said).send(
        remote, "m.room.topic", {"topic": "not allowed"}, state_key="", expected="rejected"
    )
    taken = [
        room.send(admin, "m.room.redaction", {}),
        room.redact(remote, said),
        room.redact(admin, elsewhere),
        room.redact(admin, refused),
        room.redact(admin, said),
    ]
    await store.append(other.pdus, room_version="11")
    outcomes = {
        one.event_id: one.outcome
        for one in await store.append([one.pdu for one in room.events], room_version="11")
    }
    assert outcomes[refused.event_id] == "rejected"
    assert await ineffective(store, *taken, said) == [True, True, True, True, False, False]
    assert await redacted_by(store, said) == taken[-1].event_id
    assert await redacted_by(store, elsewhere) is None


async def test_a_redaction_of_another_room_waits_without_result(store: Store) -> None:
    room, _, local, _ = room_of_three("11")
    said = room.message(local, "hello")
    other = RoomBuilder("11", seed=2, sign=False)
    other.start(local)
    redaction = other.redact(local, said)
    await store.append(other.pdus, room_version="11")
    await store.append(room.pdus, room_version="11")
    assert await redacted_by(store, said) is None
    assert await ineffective(store, redaction) == [True]
