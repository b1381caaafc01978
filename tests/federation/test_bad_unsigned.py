"""Events whose `unsigned` is bad, on every path: each is stored as without it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

import storage
from storage import Store
from storage.event import Event
from storage.event.reading import MAX_PDU_BYTES
from storage.importing import Import, Rejects
from storage.persist import Origin
from storage.pipeline.imports.lines import parse_line
from storage.pipeline.imports.validate import LineValidator
from storage.testing import RoomBuilder
from tests.event.test_unsigned import BAD, with_unsigned
from tests.federation.peers import Homeserver
from tests.federation.rooms import PUBLIC, agree, shared_room
from tests.federation.test_invites import invite
from tests.federation.test_joins import asked
from tests.maintenance.rooms import SERVER, findings

Json = dict[str, Any]

VALUES: Final[tuple[Any, ...]] = (
    {"age": 1.5},
    {"age": 2**53},
    {"age": -0.0},
    {"a": "\ud800"},
    {"pad": "x" * (MAX_PDU_BYTES + 10)},
    None,
    [[]],
    json.loads("[" * 600 + "]" * 600),
)


def spoilt(pdu: Json, number: int = 0) -> Json:
    return {**pdu, "unsigned": VALUES[number % len(VALUES)]}


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


def pdus_of(room: RoomBuilder) -> list[bytes]:
    bad = list(BAD.values())
    return [
        with_unsigned(dict(event.json), bad[number % len(bad)])
        for number, event in enumerate(room.events)
    ]


def talk(version: str) -> RoomBuilder:
    room = RoomBuilder(version, seed=1, sign=False)
    room.start(room.user(1))
    for number in range(20):
        room.message(room.user(1), f"message {number}")
        room.topic(room.user(1), f"topic {number}")
    return room


@pytest.mark.parametrize("version", ["1", "5", "11", "12"])
@pytest.mark.parametrize("origin", ["live", "backfill", "outlier"])
async def test_in_an_append(store: Store, version: str, origin: Origin) -> None:
    """The create event is one of them, so the room's version is read from it."""
    room = talk(version)
    results = await store.append(pdus_of(room), origin=origin)
    assert [(one.outcome, one.event_id) for one in results] == [
        ("stored", event.event_id) for event in room.events
    ]
    kept = await store.events([event.event_id for event in room.events])
    assert [json.loads(kept[event.event_id].raw) for event in room.events] == [
        event.json for event in room.events
    ]
    assert await findings(store) == []


@pytest.mark.parametrize("version", ["1", "12"])
async def test_in_an_import(store: Store, tmp_path: Path, version: str) -> None:
    room = talk(version)
    archive = tmp_path / "room.ndjson"
    archive.write_bytes(b"\n".join(pdus_of(room)) + b"\n")
    summary = await Import(store, Rejects(None)).run([str(archive)])
    assert dict(summary.outcomes) == {"stored": len(room.events)}
    assert await findings(store) == []


@pytest.mark.parametrize("version", ["1", "12"])
async def test_in_a_transaction(two: list[Homeserver], version: str) -> None:
    one, other = two
    room_id = await shared_room(one, other, version=version)
    for number in range(len(VALUES)):
        sent = await one.say(room_id, f"hello {number}")
        body = {"pdus": [spoilt(sent, number)]}
        answer = await other.responder.transaction(one.name, body)
        assert list(answer["pdus"].values()) == [{}]
    await agree(room_id, one, other)


@pytest.mark.parametrize("version", ["1", "12"])
async def test_in_an_answer_to_send_join(two: list[Homeserver], version: str) -> None:
    one, other = two
    join = await asked(one, other, version)
    for name in ("state", "auth_chain"):
        join.response[name] = [
            spoilt(pdu, number) for number, pdu in enumerate(join.response[name])
        ]
    join.response["event"] = spoilt(join.response.get("event", join.join))
    result = await other.receiver.joined(one.name, spoilt(join.join), join.response, version)
    assert (result.outcome, dict(result.left_out)) == ("joined", {})
    await agree(join.room_id, one, other)


async def test_in_a_join_of_another_server(two: list[Homeserver]) -> None:
    """It is returned without it."""
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    join = await other.make_join(room_id, one, "user")
    event_id = storage.event.event_id(join, "12")
    for value in ({"age": 1.5}, {"a": "\ud800"}):
        given = {**join, "unsigned": value}
        answer = await one.responder.take_membership(other.name, "join", room_id, event_id, given)
        assert "unsigned" not in answer["event"]


async def test_in_an_invite(two: list[Homeserver]) -> None:
    one, other = two
    for number in range(len(VALUES)):
        room_id = await one.store.create_room(one.user())
        sent = await invite(one, room_id, other.user())
        found = await other.receiver.invited(spoilt(sent, number), "12", [])
        assert found.result.outcome == "stored"
        assert "unsigned" not in found.pdu
    assert len((await other.store.sync(other.user())).invite) == len(VALUES)


async def test_below_a_gap(two: list[Homeserver]) -> None:
    """The missing events are fetched, and so is history."""
    one, other = two
    room_id = await shared_room(one, other)
    for number in range(30):
        await one.say(room_id, f"lost {number}")

    async def spoil(body: Json) -> Json:
        return {
            name: [spoilt(pdu, number) for number, pdu in enumerate(value)]
            if isinstance(value, list) and value and isinstance(value[0], dict)
            else value
            for name, value in body.items()
        }

    for request in ("get_missing_events", "event", "backfill", "state"):
        one.network.faults[one.name, request] = spoil
    last = await one.say(room_id, "found")
    answer = await other.responder.transaction(one.name, {"pdus": [spoilt(last)]})
    assert list(answer["pdus"].values()) == [{}]
    await agree(room_id, one, other)


@pytest.mark.parametrize("version", ["1", "12"])
@pytest.mark.parametrize("form", [b"%s", b'{"pdu":%s,"room_version":"%s","origin":"live"}'])
def test_in_a_line_that_a_task_of_spark_reads(version: str, form: bytes) -> None:
    """The room and its version are found, and the bytes that are stored are without it."""
    room = talk(version)
    validator = LineValidator({room.room_id: version}, version)
    for event, pdu in zip(room.events, pdus_of(room), strict=True):
        line = form % ((pdu, version.encode()) if b"pdu" in form else pdu)
        found = validator.parsed(parse_line(line))
        assert isinstance(found, Event)
        assert (found.event_id, json.loads(found.raw)) == (event.event_id, event.json)
