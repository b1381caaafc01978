"""A rebuild from the received bytes restores the same store, mends damage and disturbs nobody.

The oracle agrees after each.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import storage
from storage import Store
from storage.database import Database
from storage.errors import StorageCorrupt
from storage.ids import EventId
from storage.persist import Outcome
from storage.rebuild import Rebuilder
from storage.testing import (
    ODD_SOME,
    SHAPES,
    GeneratedRoom,
    Odd,
    RoomBuilder,
    build_room,
    deliver_late,
    deliver_shuffled,
    deliver_with_gap,
    generate_room,
)
from tests.long_run import long_run
from tests.maintenance.rooms import LIVELY, SERVER, deliver, findings
from tests.maintenance.test_damage import DAMAGES, REFUSED
from tests.oracle.example_databases import ExampleDatabases
from tests.oracle.facts import Audience
from tests.oracle.machine import RoomMachine, run_machine
from tests.oracle.store_subject import StoreSubject
from tests.oracle.worlds import SERVERS, USERS
from tests.persist.tables import SQL_LOGICAL
from tests.pipeline.planted import with_planted_creates
from tests.pipeline.stores import tables

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "3"))
OF_ALL_ROOMS = {
    *("stream_positions", "sequences", "indexes", "sliding_rooms", "names", "derived_orphans"),
}
"""Checks of what rooms share: a rebuild of rooms leaves that as it is."""

IN_ROOMS = sorted(
    name
    for name, damage in DAMAGES.items()
    if not damage.found <= OF_ALL_ROOMS and "names" not in damage.found
)
SOME = sorted({frozenset(DAMAGES[name].found): name for name in IN_ROOMS}.values())
"""One for each check that finds it; with STORAGE_EXAMPLES=30 or more all of them."""

UNMENDED = {name for name in IN_ROOMS if not DAMAGES[name].mended}
"""Damage of received bytes: from what else could they follow?"""


async def rebuilt(dsn: str, room_id: str) -> int:
    """Rebuild a room; how many rows of events that changed."""
    async with Rebuilder.opened(dsn, SERVER) as rebuilder:
        return (await rebuilder.rebuild(room_id)).events


async def logical(dsn: str) -> dict[str, Any]:
    connection = await asyncpg.connect(dsn)
    try:
        return {
            name: list(map(tuple, await connection.fetch(sql))) for name, sql in SQL_LOGICAL.items()
        }
    finally:
        await connection.close()


@pytest.mark.parametrize("shape", ["small_chat", "direct_chat", "join_leave_storm", "fork_heavy"])
@pytest.mark.parametrize("way", ["in order", "late", "gap", "shuffled", "planted"])
async def test_a_sound_room_stays_what_it_is(dsn: str, shape: str, way: str) -> None:
    """To the number: neither events nor anything else is written."""
    delivery: GeneratedRoom
    version = {"in order": "2", "late": "6", "gap": "12", "shuffled": "11", "planted": "10"}[way]
    room = build_room(
        SHAPES[shape].replaced(odd=ODD_SOME), 220, seed=3, version=version, sign=False
    )
    match way:
        case "planted":
            in_order = generate_room(SHAPES[shape], 60, seed=3, version=version, sign=False)
            delivery = with_planted_creates(in_order, at=30)
        case "late":
            delivery = deliver_late(room, 4)
        case "gap":
            delivery = deliver_with_gap(room, 60, 80)
        case "shuffled":
            delivery = deliver_shuffled(room, 4)
        case _:
            delivery = generate_room(
                SHAPES[shape].replaced(odd=ODD_SOME), 220, seed=3, version=version, sign=False
            )
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, delivery, batch=20)
        before = await tables(dsn)
        assert await rebuilt(dsn, room.room_id) == 0
        assert await tables(dsn) == before
        assert await findings(store) == []


@pytest.fixture(scope="module")
def room() -> RoomBuilder:
    return build_room(
        LIVELY.replaced(odd=Odd(rejected=0.03, early_redaction=0.02)), 260, seed=11, sign=False
    )


@pytest.mark.parametrize("name", IN_ROOMS if EXAMPLES >= 30 else SOME)
async def test_damage_is_mended(dsn: str, room: RoomBuilder, name: str) -> None:
    """The tables are those of before; and with damaged bytes nothing else is changed."""
    async with storage.open(dsn, server_name=SERVER) as store:
        delivery = deliver_with_gap(room, 60, 70)
        await deliver(
            store, replace(delivery, events=delivery.events[:-5]), batch=40
        )  # so that gaps are left
        sound = await logical(dsn)
        async with store.database.connection() as conn:
            await conn.execute(DAMAGES[name].sql)
        found = await findings(store)
        assert found
        if name in REFUSED:
            with pytest.raises(StorageCorrupt, match="checksum"):
                await rebuilt(dsn, room.room_id)
        else:
            await rebuilt(dsn, room.room_id)
        left = [finding for finding in await findings(store) if finding.room_id is not None]
        if name in UNMENDED:
            assert sorted(map(str, left)) == sorted(map(str, found))
        else:
            assert left == []
            assert await logical(dsn) == sound


async def test_states_whose_numbers_are_wrong(dsn: str) -> None:
    """Every audience has another number: every event and state changes, and is as it was."""
    room = build_room(LIVELY, 240, seed=9, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, deliver_late(room, 4))
        before = await tables(dsn)
        async with store.database.connection() as conn:
            await conn.execute("UPDATE state_groups SET audience = audience + (1::bigint << 41)")
            await conn.execute("UPDATE events SET audience = audience + 7 WHERE audience > 0")
        assert await rebuilt(dsn, room.room_id) > 0
        assert await findings(store) == []
        after = await tables(dsn)
        assert {name for name in before if after[name] != before[name]} <= {"counts"}
        await store.append([room.message(room.events[0].sender).pdu])
        assert await findings(store) == []


async def test_beside_appends_and_readers(dsn: str) -> None:
    """A room without visibility and with a wrong current state.

    A reader sees all events of a user or none, before and after the switch.
    """
    room = build_room(LIVELY, 200, seed=2, sign=False)
    creator = room.events[0].sender
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus[:60])
        ids = [event.event_id for event in room.events[:60]]
        seen = set(await store.visible_to_user(creator, ids))
        async with store.database.connection() as conn:
            await conn.execute(
                "DELETE FROM visibility; UPDATE rooms "
                "SET current_audience = 0, next_audience = 1::bigint << 45"
            )
            await conn.execute("UPDATE current_state SET membership = 1 WHERE membership = 5")
        told: list[set[EventId]] = []

        async def reading() -> None:
            while True:
                told.append(set(await store.visible_to_user(creator, ids)))

        async with Rebuilder.opened(dsn, SERVER) as rebuilder:
            reader = asyncio.create_task(reading())
            at = 60
            rebuilding = asyncio.create_task(rebuilder.rebuild(room.room_id))
            while not rebuilding.done():
                at += 1
                await store.append(room.pdus[at - 1 : at])
            await rebuilding
            assert at > 61, "nothing was appended meanwhile"
        told.append(set(await store.visible_to_user(creator, ids)))
        reader.cancel()
        assert told[0] == set()
        assert told[-1] == seen
        assert all(one in (set(), seen) for one in told)
        assert await findings(store) == []
        await store.append(room.pdus[at:])
        assert await store.current_state(room.room_id) == dict(room.state)
        assert await findings(store) == []


async def test_again_and_again_beside_appends(dsn: str) -> None:
    room = build_room(LIVELY, 160, seed=2, sign=False)
    async with (
        storage.open(dsn, server_name=SERVER) as store,
        Rebuilder.opened(dsn, SERVER) as rebuilder,
    ):
        await store.append(room.pdus[:20])

        async def rebuilding() -> None:
            for _ in range(5):
                await rebuilder.rebuild(room.room_id)

        rebuilds = asyncio.create_task(rebuilding())
        for at in range(20, len(room.pdus), 4):
            await store.append(room.pdus[at : at + 4])
        await rebuilds
        assert await store.current_state(room.room_id) == dict(room.state)
        assert await findings(store) == []


async def test_several_rooms_and_an_event_of_another_room(dsn: str) -> None:
    """An event that names one of another room as its auth event is rejected, and stays so."""
    rooms = [build_room(LIVELY, 60, seed=seed, sign=False) for seed in range(3)]
    async with (
        storage.open(dsn, server_name=SERVER) as store,
        Rebuilder.opened(dsn, SERVER) as rebuilder,
    ):
        for room in rooms:
            await store.append(room.pdus)
        strange = rooms[0].message(
            rooms[0].events[0].sender,
            auth=[rooms[0].events[0], rooms[1].events[1]],
            expected="rejected",
        )
        [result] = await store.append([strange.pdu])
        assert result.outcome == "rejected"
        before = await tables(dsn)
        for room in [*rooms, *reversed(rooms)]:
            assert (await rebuilder.rebuild(room.room_id)).events == 0
        assert await tables(dsn) == before
        with pytest.raises(storage.UnknownRoom):
            await rebuilder.rebuild("!nowhere:s1.test")


async def test_a_room_of_outliers_alone(dsn: str) -> None:
    room = build_room(LIVELY, 30, seed=2, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus[:10], origin="outlier", room_version=room.version)
        await rebuilt(dsn, room.room_id)
        assert await findings(store) == []
        await store.append(room.pdus)
        before = await tables(dsn)
        assert await rebuilt(dsn, room.room_id) == 0
        assert await tables(dsn) == before


# --------------------------------------------------------------------------------------------------
# killed


@long_run
async def test_killed_at_any_moment(dsn: str) -> None:
    """The process ends itself before its n-th statement: the store is as before, or complete."""
    room = build_room(LIVELY, 80, seed=5, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, deliver_with_gap(room, 30, 36))
        sound = await logical(dsn)
        await damage(store)
        damaged = await tables(dsn)
        count = int((await process(dsn, room.room_id, 0)).split()[-1])
        assert await logical(dsn) == sound
        switch = range(count - 28, count + 1)
        for number in [*range(1, count - 28, (count - 28) // 6), *switch[::4], count]:
            await damage(store)
            assert await tables(dsn) == damaged
            assert await process(dsn, room.room_id, number) == ""
            assert await tables(dsn) == damaged, f"killed before statement {number} of {count}"
        await process(dsn, room.room_id, 0)
        assert await logical(dsn) == sound
        assert await findings(store) == []


async def damage(store: Store) -> None:
    async with store.database.connection() as conn:
        await conn.execute(
            "DELETE FROM visibility; DELETE FROM current_state; UPDATE events "
            "SET redacted_by = NULL; DELETE FROM auth_chains"
        )


async def process(dsn: str, room_id: str, number: int) -> str:
    """Rebuild in a process that ends before its n-th statement (0: never); return its output."""
    script = str(Path(__file__).with_name("rebuild_process.py"))
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        dsn,
        room_id,
        str(number),
        cwd=Path(__file__).parents[2],
        stdout=PIPE,
        stderr=STDOUT,
    )
    output, _ = await started.communicate()
    assert started.returncode == (-9 if number else 0), output.decode()[-3000:]
    return output.decode()


# --------------------------------------------------------------------------------------------------
# oracle


class RebuiltSubject(StoreSubject):
    """A store every room of which is rebuilt after each delivery."""

    def __init__(self, dsn: str, **limits: Any) -> None:
        super().__init__(dsn, **limits)
        self.dsn = dsn

    def append(self, pdus: Sequence[bytes], **how: Any) -> list[tuple[EventId | None, Outcome]]:
        told = super().append(pdus, **how)
        self.run(self._rebuild())
        return told

    def readmit(self, event_id: EventId) -> Outcome:
        told = super().readmit(event_id)
        self.run(self._rebuild())
        return told

    async def _rebuild(self) -> None:
        async with self.store.database.connection() as conn:
            rooms: list[str] = await conn.fetchvals("SELECT room_id FROM rooms")
        async with Rebuilder.opened(self.dsn, self.store.server_name) as rebuilder:
            for room_id in rooms:
                await rebuilder.rebuild(room_id)


@pytest.mark.timeout(0)
def test_the_oracle_agrees_with_rebuilt_rooms(databases: ExampleDatabases) -> None:
    """All that can be asked, after every delivery and the rebuild that follows it."""

    class Machine(RoomMachine):
        local_server = SERVER
        audience = Audience(tuple(user for user in USERS if user.endswith(f":{SERVER}")), SERVERS)
        syncing = tuple(user for user in USERS if user.endswith(f":{SERVER}"))

        def open_subject(self) -> StoreSubject:
            dsn = databases.open()
            return RebuiltSubject(dsn, server_name=SERVER)

        def close_subject(self, subject: Any) -> None:
            subject.close()
            databases.close()

    run_machine(Machine, examples=EXAMPLES, steps=15)


async def test_tables_aside_are_gone_with_their_session(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        room = build_room(LIVELY, 30, seed=2, sign=False)
        await store.append(room.pdus)
        await rebuilt(dsn, room.room_id)
        async with await Database.open(dsn) as database, database.connection() as conn:
            assert (
                await conn.fetchval("SELECT count(*) FROM pg_class WHERE relpersistence = 't'") == 0
            )
