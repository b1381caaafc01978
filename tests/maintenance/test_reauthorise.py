"""Events that an earlier release rejected by mistake are found and authorised again.

Afterwards the store equals one without that mistake.
"""

import itertools
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Any

import orjson
import pytest

import storage
from storage import StorageCorrupt, Store
from storage.database import Database
from storage.event import Event, content_hash, event_id
from storage.maintenance.verify import Finding
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import RoomChanges
from storage.persist.plan import event as plan_event
from storage.persist.plan.auth_checks import AuthResult, auth_result
from storage.rebuild import rebuild
from storage.streams.invalidate_caches import register_writer
from storage.testing import RoomBuilder
from tests.maintenance.damaging import rows_of_all_tables
from tests.maintenance.older_release import append_before, earlier_release, opened
from tests.maintenance.rooms import SERVER, everything_seen, findings
from tests.persist.tables import logical_tables

TABLES = (
    "events",
    "states",
    "rooms",
    "current_state",
    "memberships",
    "seen",
    "seen_since",
    "missing_events",
    "waiting_redactions",
)


def room_of(version: str, seed: int) -> RoomBuilder:
    """With levels that no id of version 10 covers, a redaction, a refused event and a merge."""
    room = RoomBuilder(version, seed=seed, sign=False)
    admin, other = room.user(1), room.user(2)
    room.start(admin, join_rule="public")
    room.join(other)
    room.topic(admin, "topic")
    room.topic(other, "no", expected="rejected")
    room.redact(admin, room.message(other, "hello"))
    left, right = room.fork()
    left.message(admin, "left")
    right.send(admin, "m.room.name", {"name": "right"}, state_key="")
    room.merge(left, right)
    room.message(other, "after")
    room.leave(other)
    return room


@pytest.fixture
async def fresh(another_dsn: str) -> AsyncIterator[Store]:
    """A store that never erred."""
    async with opened(another_dsn) as store:
        yield store


def checks(found: Iterable[Finding]) -> set[str]:
    return {finding.check for finding in found}


async def assert_as_fresh(store: Store, fresh: Store, rooms: Collection[RoomBuilder]) -> None:
    """The same tables but for numbers, the same states and sight, and nothing is found."""
    assert await findings(store) == []
    found, expected = await logical_tables(store.database), await logical_tables(fresh.database)
    for name in TABLES:
        assert found[name] == expected[name], name
    for room in rooms:
        ids = [event.event_id for event in room.events]
        assert await everything_seen(store, room, ids) == await everything_seen(fresh, room, ids)
        assert await store.current_state(room.room_id) == await fresh.current_state(room.room_id)
        assert await store.forward_extremities(room.room_id) == await fresh.forward_extremities(
            room.room_id
        )


@pytest.mark.parametrize("versions", [("11", "12"), ("9", "11", "12", "10")])
async def test_a_room_rejected_by_the_version_of_another(
    dsn: str, fresh: Store, versions: tuple[str, ...]
) -> None:
    rooms = [room_of(version, seed) for seed, version in enumerate(versions, 1)]
    pdus = [pdu for room in rooms for pdu in room.pdus]
    results = await append_before(dsn, pdus)
    wronged = [room for room in rooms if room.version == "12"]
    first = [result for result in results if result.reason is not None]
    assert any((result.reason or "").startswith("auth_events.no_create") for result in first)
    await fresh.append(pdus)
    async with opened(dsn) as store:
        found = await findings(store)
        assert "rejected" in checks(found)
        assert {finding.room_id for finding in found} == {room.room_id for room in wronged}
        assert any(finding.repairable for finding in found)
        for room in wronged:
            await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await findings(store) == []
        if versions[0] != "11":  # ids differ: what named the right ones was not stored
            await store.append(pdus)
        await assert_as_fresh(store, fresh, rooms)


async def test_ids_of_another_version(dsn: str, fresh: Store) -> None:
    """Events that name them were never stored, as their parents were missing: append them later."""
    first, room = room_of("10", 1), RoomBuilder("12", seed=2, sign=False)
    admin = room.user(1)
    room.create(admin)
    room.join(admin)
    room.power_levels(admin, {"invite": 0})
    room.send(admin, "m.room.join_rules", {"join_rule": "public"}, state_key="")
    room.topic(admin, "topic")
    outcomes = [
        result.outcome for result in await append_before(dsn, [*first.pdus[:1], *room.pdus])
    ]
    assert outcomes[-4:] == ["rejected", "rejected", "missing_parents", "missing_parents"]
    async with opened(dsn) as store:
        found = await findings(store)
        wrong = [finding for finding in found if finding.check == "event_ids"]
        assert [(finding.expected, finding.repairable) for finding in wrong] == [
            (room.events[2].event_id, True)
        ]
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await findings(store) == []
        held = await store.events([event.event_id for event in room.events])
        assert list(held) == [event.event_id for event in room.events[:3]]
        await store.append(room.pdus)
        await fresh.append([*first.pdus[:1], *room.pdus])
        await assert_as_fresh(store, fresh, [room])


async def test_a_room_under_the_version_that_a_caller_gave(dsn: str, fresh: Store) -> None:
    """Its first event came before its create event."""
    room = room_of("12", 1)
    [join] = [event.pdu for event in room.events[:2] if event.type == "m.room.member"]
    [result] = await append_before(dsn, [join], origin="outlier", room_version="10")
    assert (result.outcome, (result.reason or "").partition(":")[0]) == (
        "rejected",
        "auth_events.no_create",
    )
    await append_before(dsn, room.pdus)
    await fresh.append([join], origin="outlier", room_version="12")
    await fresh.append(room.pdus)
    await assert_version_repaired(dsn, fresh, room, "10")


async def test_a_room_of_version_12_stored_under_another_waits_for_its_repair(
    dsn: str, fresh: Store
) -> None:
    room = room_of("12", 1)
    [join] = [event.pdu for event in room.events[:2] if event.type == "m.room.member"]
    await append_before(dsn, [join], origin="outlier", room_version="11")
    async with opened(dsn) as store:
        create, *others = await store.append(room.pdus)
        assert create.outcome == "stored"
        assert {result.outcome for result in others} == {"invalid"}
        assert "verify --repair" in (others[0].reason or "")
    await fresh.append([join], origin="outlier", room_version="12")
    await fresh.append(room.pdus)
    await assert_version_repaired(dsn, fresh, room, "11")


@pytest.mark.parametrize(
    "versions", [("10", "11"), ("6", "9"), ("11", "10"), ("3", "6"), ("2", "1")]
)
async def test_a_room_under_another_version(
    dsn: str, fresh: Store, versions: tuple[str, str]
) -> None:
    wrong, right = versions
    room = room_of(right, 1)
    await append_before(dsn, room.pdus[:1])
    async with opened(dsn) as store, store.database.connection() as conn:
        await conn.execute("UPDATE rooms SET room_version = $1::text", wrong)
    await append_before(dsn, room.pdus[1:])
    await fresh.append(room.pdus)
    await assert_version_repaired(dsn, fresh, room, wrong)


async def assert_version_repaired(dsn: str, fresh: Store, room: RoomBuilder, wrong: str) -> None:
    async with opened(dsn) as store:
        said = next(finding for finding in await findings(store) if finding.check == "room_version")
        assert (said.found, said.expected, said.repairable) == (wrong, room.version, True)
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await findings(store) == []
        await store.append(room.pdus)  # what could not be stored, as its parents had other ids
        await assert_as_fresh(store, fresh, [room])


async def test_a_create_event_that_cannot_create_its_room(dsn: str) -> None:
    """The room id of version 12 is made of the create event; no version makes this one of it."""
    room = RoomBuilder("11", sign=False)
    create = room.create(room.user(1))
    room.join(room.user(1))
    claim = {**create.json, "content": {**create.content, "room_version": "12"}}
    claim["hashes"] = {"sha256": content_hash(claim)}
    async with opened(dsn) as store:
        await store.append(room.pdus)
        async with store.database.connection() as conn:
            text = orjson.dumps(claim)
            await conn.execute(
                "UPDATE events SET json = $1::bytea, event_id = $2::text WHERE type_nid = 1",
                text,
                event_id(claim, "11"),
            )
        for _ in range(2):
            [said] = [
                finding for finding in await findings(store) if finding.check == "create_event"
            ]
            assert (said.repairable, said.subject) == (False, (event_id(claim, "11"),))
            with pytest.raises(StorageCorrupt, match="depends on are not stored"):
                await rebuild(store.database, room.room_id, server_name=SERVER)


async def test_a_rejected_event_in_the_middle(dsn: str, fresh: Store) -> None:
    """Its descendants were accepted on the state without it: they are appended again, too.

    Syncs from before them begin anew.
    """
    room = RoomBuilder("11", sign=False)
    admin, other = room.user(1), room.user(2)
    room.start(admin, join_rule="public")
    topic = room.topic(admin, "first")
    said = room.message(admin, "hello")
    room.join(other)
    room.topic(admin, "second")
    await fresh.append(room.pdus)
    async with opened(dsn) as store:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan_event, "auth_result", _refusing(topic.event_id))
            await store.append(room.pdus[:-1])
            before = (await store.sync(admin)).next_batch
            await store.append(room.pdus[-1:])
        assert checks(await findings(store)) == {"rejected"}
        await rebuild(store.database, room.room_id, server_name=SERVER)
        await assert_as_fresh(store, fresh, [room])
        with pytest.raises(storage.ResyncNeeded):
            await store.sync(admin, since=before)
        timeline = (await store.sync(admin)).join[room.room_id].timeline.events
        assert [topic.event_id, said.event_id] == [
            event.event_id
            for event in timeline
            if event.event_id in {topic.event_id, said.event_id}
        ]


def _refusing(refused: str) -> Callable[..., AuthResult]:
    """The auth result as it is, but for one event."""

    def refusing(
        change_set: ChangeSet, room: RoomChanges, event: Event, *args: Any, **given: Any
    ) -> AuthResult:
        return (
            AuthResult(rejected="event.level: x")
            if event.event_id == refused
            else auth_result(change_set, room, event, *args, **given)
        )

    return refusing


async def test_clients_learn_of_it_by_their_next_sync(dsn: str) -> None:
    first, room = room_of("11", 1), RoomBuilder("12", seed=2, sign=False)
    admin = room.user(1)
    room.start(admin)
    message = room.message(admin, "hello")
    await append_before(dsn, [*first.pdus, *room.pdus])
    async with opened(dsn) as store:
        token = (await store.sync(admin)).next_batch
        received = await _received(store, message.event_id)
        await rebuild(store.database, room.room_id, server_name=SERVER)
        await storage.streams.position_poller.follow_once(store.database, store.streams)
        told = (await store.sync(admin, since=token)).join[room.room_id]
        assert [event.event_id for event in told.timeline.events][-1] == message.event_id
        assert await _received(store, message.event_id) == received
        again = room.message(admin, "the writer goes on")
        assert [result.outcome for result in await store.append([again.pdu])] == ["stored"]
        assert await findings(store) == []


async def _received(store: Store, one: str) -> int:
    async with store.database.connection() as conn:
        time: int = await conn.fetchval(
            "SELECT received_ts FROM events WHERE event_id = $1::text", one
        )
        return time


async def test_outliers_and_history(dsn: str, fresh: Store) -> None:
    """An event comes back as it came: as an outlier, as history, after a gap."""
    first, room = room_of("11", 1), room_of("12", 2)
    async with opened(dsn) as store:
        for target in (store, fresh):
            await target.append(first.pdus)
    pdus, rest = room.pdus[:6], room.pdus[6:]
    await append_before(dsn, [first.pdus[0], *pdus], origin="outlier")
    await fresh.append(pdus, origin="outlier")
    async with opened(dsn) as store:
        assert "rejected" in checks(await findings(store))
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await findings(store) == []
        for target in (store, fresh):
            given = {room.events[6].event_id: list(room.at(room.events[5]).state.values())}
            await target.append(rest, state_before=given)
            await target.append(pdus, origin="backfill")
        await assert_as_fresh(store, fresh, [room])


class RepairKilled(Exception):  # noqa: N818
    """The end of the process."""


class FailAfter:
    """An observer that lets so many statements pass."""

    def __init__(self, left: int) -> None:
        self.left = left

    def before(self, statement: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise RepairKilled(statement)

    def after(self, statement: str, seconds: float) -> None:
        """The interface of an observer."""


async def test_a_repair_that_ends_early_changes_nothing(dsn: str, fresh: Store) -> None:
    """At any statement; the next repair does it all."""
    first, room = room_of("10", 1), room_of("12", 2)
    pdus = [*first.pdus[:1], *room.pdus]
    await append_before(dsn, pdus)
    async with await Database.open(dsn) as database:
        await register_writer(database)
        async with database.connection() as conn:
            rows = await rows_of_all_tables(conn)
            for number in itertools.count():
                async with await Database.open(dsn, observer=FailAfter(number)) as doomed:
                    try:
                        await rebuild(
                            doomed, room.room_id, server_name=SERVER, indexes_compared=True
                        )
                    except RepairKilled:
                        assert await rows_of_all_tables(conn) == rows
                    else:
                        break
    assert number > 30
    async with opened(dsn) as store:
        assert await findings(store) == []
        await store.append(room.pdus)
        await fresh.append(pdus)
        await assert_as_fresh(store, fresh, [room])


async def test_a_repair_beside_a_writer(dsn: str, fresh: Store) -> None:
    """A store forgets the rejected events that it remembers."""
    first, room = room_of("11", 1), room_of("12", 2)
    async with opened(dsn) as store:
        with earlier_release():
            await store.append([*first.pdus, *room.pdus[:-3]])
        child = room.pdus[-3:]
        await rebuild(store.database, room.room_id, server_name=SERVER)
        await store.append(child)
        await fresh.append([*first.pdus, *room.pdus])
        await assert_as_fresh(store, fresh, [first, room])


async def test_damaged_bytes_stay(dsn: str) -> None:
    """The rest of the room is repaired all the same."""
    first, room = room_of("11", 1), room_of("12", 2)
    await append_before(dsn, [*first.pdus, *room.pdus])
    async with opened(dsn) as store:
        async with store.database.connection() as conn:
            await conn.execute(
                "UPDATE events SET json = convert_to('{}', 'UTF8') WHERE event_id = $1::text",
                room.events[-1].event_id,
            )
            await conn.execute(
                "UPDATE rooms SET joined_count = joined_count + 1 WHERE room_id = $1::text",
                room.room_id,
            )
        assert {"rejected", "member_counts", "bytes"} <= checks(await findings(store, room.room_id))
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert checks(await findings(store, room.room_id)) == {"bytes"}
