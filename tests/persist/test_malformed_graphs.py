"""Graphs that no honest server makes: circles, several beginnings or none, floods of edges.

Each has an outcome, and nothing is lost.
"""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.event import parse, sign
from storage.event.hashes import canonical
from storage.maintenance.verify import verify
from storage.persist import Origin
from storage.streams.position_poller import SQL_MOVE_IDLE, SQL_POSITIONS, SQL_SEQUENCES
from storage.testing import BuiltEvent, RoomBuilder, signing_key
from tests.long_run import long_run
from tests.persist.tables import row_counts

SERVER = "s1.test"


class StatementCount:
    """An observer that counts, without the statements that a store sends from time to time."""

    count = 0

    def before(self, statement: str) -> None:
        self.count += statement not in (SQL_MOVE_IDLE, SQL_POSITIONS, SQL_SEQUENCES)

    def after(self, statement: str, seconds: float) -> None:
        del statement, seconds


@pytest.fixture
def statements() -> StatementCount:
    return StatementCount()


@pytest.fixture
async def store(dsn: str, statements: StatementCount) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER, observer=statements) as opened:
        yield opened


def begun(version: str, seed: int = 1) -> RoomBuilder:
    room = RoomBuilder(version, seed=seed, checked=False)
    room.start(room.user(1), join_rule="public")
    room.join(room.user(2))
    return room


def altered(room: RoomBuilder, event: BuiltEvent, **changes: object) -> bytes:
    """The event with other fields, hashed and signed again; in versions 1 and 2 its id stays."""
    pdu = {**event.json, **changes, "signatures": {}, "hashes": {}}
    return canonical(sign(pdu, room.version, SERVER, signing_key(SERVER)))


def pairs(ids: list[str]) -> list[object]:
    """References of versions 1 and 2."""
    return [[one, {"sha256": "x"}] for one in ids]


async def is_sound(store: Store) -> None:
    assert [finding async for finding in verify(store.database, server_name=SERVER)] == []


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("origin", ["live", "outlier", "backfill"])
async def test_a_circle_of_auth_events_is_never_complete(
    store: Store, version: str, origin: Origin
) -> None:
    """Each waits for the other to be stored, in one batch or several; the room's rest goes on."""
    room = begun(version)
    await store.append(room.pdus, room_version=version)
    before = await row_counts(store.database)
    branch = room.fork(1)[0]
    first, second = branch.topic(room.user(1), "a"), branch.name(room.user(1), "b")
    honest = list(first.auth_events)
    one = altered(
        room,
        first,
        prev_events=pairs(list(room.heads)),
        auth_events=pairs([*honest, second.event_id]),
    )
    other = altered(
        room,
        second,
        prev_events=pairs(list(room.heads)),
        auth_events=pairs([*honest, first.event_id]),
    )
    alone = altered(
        room,
        branch.topic(room.user(1), "c"),
        prev_events=pairs(list(room.heads)),
        auth_events=pairs([*honest, branch.heads[0]]),
    )
    for batch in ([one, other, alone], [other], [one], [other, one]):
        for result in await store.append(batch, origin=origin):
            assert result.outcome == "missing_parents"
            assert set(result.missing) <= {first.event_id, second.event_id, branch.heads[0]}
    assert await row_counts(store.database) == before
    [stored] = await store.append([room.message(room.user(2), "after").pdu])
    assert stored.outcome == "stored"
    await is_sound(store)


@pytest.mark.parametrize("version", ["1", "6", "12"])
async def test_auth_events_that_are_not_held_are_named(store: Store, version: str) -> None:
    """Its parents are held; what it needs is asked for, and nothing of it stays behind.

    With it, the event is stored.
    """
    room = begun(version)
    await store.append(room.pdus, room_version=version)
    side = room.fork(1)[0]
    lacking = side.join(room.user(3))
    cited = [
        room.state[key]
        for key in (("m.room.create", ""), ("m.room.power_levels", ""))
        if key[0] != "m.room.create" or version != "12"
    ]
    event = side.message(
        room.user(3), "hello", prev=list(room.heads), auth=[*cited, lacking.event_id]
    )
    before = await row_counts(store.database)
    [result] = await store.append([event.pdu])
    assert (result.outcome, result.missing) == ("missing_parents", (lacking.event_id,))
    assert await row_counts(store.database) == before
    results = await store.append([lacking.pdu])
    results += await store.append([event.pdu])
    assert [result.outcome for result in results] == [
        "stored",
        "rejected",
    ]  # the state before it has no such member
    await is_sound(store)


@pytest.mark.parametrize("version", ["1", "11"])
async def test_a_room_without_a_create_event(store: Store, version: str) -> None:
    """What comes without one is rejected and held; when the room itself comes, it works."""
    room = begun(version)
    pair, pdus = version == "1", room.pdus
    stray = room.fork(1)[0].message(room.user(1), "from nowhere")
    pdu = altered(room, stray, prev_events=[], auth_events=[])
    stray_id = parse(pdu, version).event_id
    [result] = await store.append([pdu], room_version=version)
    assert (result.outcome, (result.reason or "").partition(":")[0]) == (
        "rejected",
        "auth_events.no_create",
    )
    assert await store.forward_extremities(room.room_id) == set()
    assert await store.current_state(room.room_id) == {}
    assert {one.outcome for one in await store.append(pdus)} == {"stored"}
    assert await store.forward_extremities(room.room_id) == set(room.heads)
    child = altered(
        room,
        stray,
        prev_events=pairs([stray_id]) if pair else [stray_id],
        auth_events=[],
        event_id="$child:s1.test",
    )
    [result] = await store.append([child])
    assert result.outcome == "rejected"
    assert (await store.event(stray_id)) is not None
    assert await store.current_state(room.room_id) == dict(room.state)
    await is_sound(store)


@pytest.mark.parametrize("version", ["1", "6", "11"])
@pytest.mark.parametrize("together", [True, False])
async def test_a_second_create_event_is_rejected(
    store: Store, version: str, *, together: bool
) -> None:
    """It is held, and the room stays as it was, whatever is built on it."""
    room = begun(version)
    second = altered(room, room.events[0], origin_server_ts=5, event_id="$second:s1.test")
    second_id = parse(second, version).event_id
    batches = [[room.pdus[0], second, *room.pdus[1:]]] if together else [room.pdus, [second]]
    outcomes = {}
    for batch in batches:
        outcomes.update(
            {result.event_id: result for result in await store.append(batch, room_version=version)}
        )
    refused = outcomes.pop(second_id)
    assert (refused.outcome, (refused.reason or "").partition(":")[0]) == (
        "rejected",
        "create.second",
    )
    assert {result.outcome for result in outcomes.values()} == {"stored"}
    assert await store.current_state(room.room_id) == dict(room.state)
    assert await store.forward_extremities(room.room_id) == set(room.heads)
    held = await store.event(second_id)
    assert held is not None
    assert held.raw == second
    await is_sound(store)


@pytest.mark.parametrize("version", ["1", "11", "12"])
@pytest.mark.parametrize("room_id", [[], {}, None, 1, [["!x:s1.test"]]])
async def test_a_create_event_of_no_room(store: Store, version: str, room_id: object) -> None:
    """It fails nothing else."""
    room = begun(version)
    create = {**room.events[0].json, "room_id": room_id}
    results = await store.append([create, *room.pdus, canonical(create)], room_version=version)
    assert [result.outcome for result in results] == [
        "invalid",
        *["stored"] * len(room.pdus),
        "invalid",
    ]


@pytest.mark.parametrize("version", ["1", "11"])
@pytest.mark.parametrize("count", [21, 100_000, pytest.param(1_000_000, marks=long_run)])
async def test_more_parents_than_an_event_may_have(
    store: Store, statements: StatementCount, version: str, count: int
) -> None:
    """Refused as it is read: no statement is about the parents, and the batch goes on."""
    room = begun(version)
    await store.append(room.pdus, room_version=version)
    names = [f"$parent{number}:s1.test" for number in range(count)]
    side = room.fork(1)[0].message(room.user(1), "x")
    pdu = canonical({**side.json, "prev_events": pairs(names) if version == "1" else names})
    after = room.message(room.user(1), "after")
    counts = []
    for batch in ([pdu], [pdu] * 5):
        statements.count = 0
        assert {result.outcome for result in await store.append(batch)} == {"invalid"}
        counts.append(statements.count)
    assert counts[0] == counts[1] == 0
    [invalid, stored] = await store.append([pdu, after.pdu])
    assert (invalid.outcome, stored.outcome) == ("invalid", "stored")
    assert await store.backward_extremities(room.room_id) == set()
    await is_sound(store)


async def test_an_outlier_keeps_the_bytes_that_came_first(dsn: str) -> None:
    """In versions 1 and 2 senders choose event ids.

    The bytes that come later may be others, or of another room.
    """
    rooms = [
        RoomBuilder(version, seed=seed, sign=False) for seed, version in enumerate(("1", "2"), 1)
    ]
    for room in rooms:
        room.start(room.user(1))
    first, other = (room.topic(room.user(1), "topic") for room in rooms)
    forged = {**other.json, "event_id": first.event_id}
    changed = {**first.json, "depth": 77, "prev_events": first.json["auth_events"]}
    async with storage.open(dsn, server_name=SERVER) as store:
        for room in rooms:
            await store.append(room.pdus[:-1])
        await store.append([first.pdu], origin="outlier")
        [answer] = await store.append([forged])
        assert answer.outcome == "duplicate"
        assert await store.forward_extremities(rooms[1].room_id) == set(other.prev_events)
        [answer] = await store.append([changed])
        assert answer.outcome == "stored"
        held = await store.event(first.event_id)
        assert held is not None
        assert (held.raw, held.depth) == (first.pdu, first.json["depth"])
        assert await store.current_state(rooms[0].room_id) == dict(rooms[0].state)
        assert [finding async for finding in verify(store.database, server_name=SERVER)] == []
