"""Rows that the plan knows to be new are inserted without ON CONFLICT; others may be there or not.

ON CONFLICT writes one more record to the write-ahead log for each row that it inserts.
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import NamedTuple

import pytest

import storage
from storage import Store
from storage.database.connection import Connection
from storage.database.explained import ExplainingConnection
from storage.errors import DatabaseConflict
from storage.event import parse
from storage.persist.model.cache_view import StateView
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.rows import UNSEEN, StateDelta, VisibilityRow
from storage.persist.write import all_tables
from storage.rebuild import rebuild
from storage.streams.stream_writer import Author
from storage.testing import BuiltEvent, RoomBuilder
from storage.visibility import multirange
from tests.maintenance.rooms import findings
from tests.persist.planning import planned, take
from tests.persist.writing import QUIET, admin_of, waiting_write

TABLES = {"current_state", "visibility", "audiences"}
ADMIN, GUEST = "@admin:s1.test", "@guest:s9.test"

SQL_EPOCH = "SELECT epoch FROM stream_positions WHERE stream_name = 'events'"
SQL_ROWS = """
SELECT p.name, v.audiences::text AS audiences, v.last_join_topological, v.joined_count,
    v.invited_count
FROM visibility v
JOIN principals p USING (principal_nid)
"""
SQL_FORGET = """
DELETE FROM visibility v
USING principals p
WHERE p.principal_nid = v.principal_nid AND p.name = $1::text
"""


SQL_STRAY = """
INSERT INTO current_state (room_nid, state_key_nid, event_nid, membership)
SELECT r.room_nid, k.state_key_nid, e.event_nid, 2
FROM rooms r
JOIN events e USING (room_nid)
CROSS JOIN state_keys k
WHERE r.room_id = $1::text AND k.state_key = $2::text
LIMIT 1
"""


class StoredVisibility(NamedTuple):
    name: str
    audiences: str
    last_join_topological: int | None
    joined_count: int
    invited_count: int


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as opened:
        yield opened


async def visibility(store: Store) -> dict[str, StoredVisibility]:
    async with store.database.connection() as conn:
        return {row.name: row for row in await conn.fetch(SQL_ROWS, row=StoredVisibility)}


async def change_set_of(store: Store, *events: BuiltEvent) -> ChangeSet:
    """Plan events without writing them."""
    change_set = ChangeSet(store.writer.caches, NidBlocks(), "s1.test")
    for event in events:
        await planned(store, change_set, IncomingEvent(parse(event.pdu, "11"), "live"))
    return change_set


async def author_of(conn: Connection) -> Author:
    return Author(1, "main", await Connection.fetchval(conn, SQL_EPOCH))


class Upserts(NamedTuple):
    """Rows that a write gave to ON CONFLICT: those that it inserted, and those that were there."""

    inserted: int
    found: int


async def upserts(store: Store, *events: BuiltEvent) -> dict[str, Upserts]:
    """Return what ON CONFLICT does of the three tables if these events are written."""
    change_set = await change_set_of(store, *events)
    async with store.database.transaction() as conn:
        explaining = ExplainingConnection.over(conn)
        statement, given = all_tables.bound(change_set, await author_of(conn), 1, [])
        await conn.execute("SAVEPOINT before")
        await explaining._explain(statement, tuple(given))
        await conn.execute("ROLLBACK TO before")
    return {
        node["Relation Name"]: Upserts(
            int(node["Tuples Inserted"]), int(node["Conflicting Tuples"])
        )
        for node in explaining.plans[0].nodes()
        if "Conflict Resolution" in node and node["Relation Name"] in TABLES
    }


def room_of_admin(seed: int = 1) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed, sign=False)
    room.start(ADMIN)
    return room


async def test_new_rows_of_a_room_are_no_upserts(store: Store) -> None:
    room = room_of_admin()
    await take(store, *room.events)
    events = [room.join(f"@user{number}:h{number % 3}.test") for number in range(6)]
    events += [room.topic(ADMIN, "a new key"), room.leave("@user0:h0.test")]
    found = await upserts(store, *events)
    assert found == dict.fromkeys(TABLES, Upserts(0, 0))
    await take(store, *events)
    more = [room.topic(ADMIN, "changed"), room.join("@more:h1.test")]
    assert await upserts(store, *more) == {
        "current_state": Upserts(0, 1),
        "visibility": Upserts(0, 1),  # of the server
        "audiences": Upserts(0, 0),
    }


async def test_a_row_that_says_nothing_is_there_all_the_same(store: Store) -> None:
    """It has the values of `UNSEEN`. To insert it again would be refused by the primary key."""
    room = room_of_admin()
    room.invite(ADMIN, GUEST)
    room.kick(ADMIN, GUEST)
    await take(store, *room.events)
    row = (await visibility(store))["s9.test"]
    assert VisibilityRow(multirange.from_text(row.audiences), *row[2:]) == UNSEEN
    invite = room.invite(ADMIN, GUEST)
    for is_cached in (True, False):
        if not is_cached:
            store.writer.caches.forget()
        assert (await upserts(store, invite))["visibility"] == Upserts(0, 1)
    await take(store, invite)
    assert (await visibility(store))["s9.test"].invited_count == 1


def test_a_key_that_goes_and_comes_back_in_one_batch() -> None:
    """The row is there, although the state before the last change has no entry."""
    states = StateView(
        WriterCaches(events=100, groups=1, state_entries=1, rooms=1, names=100), NidBlocks()
    )
    for key, entries in {1: (10, None, 11), 2: (None, 12, None, 13)}.items():
        for before, after in pairwise(entries):
            states.change_current(StateDelta(7, 1, key, after, before), None)
    assert states.current_changes == {(7, 1): (11, None), (7, 2): (13, None)}
    assert states.absent_keys == {(7, 2)}


async def test_a_row_that_a_purge_has_deleted_is_inserted(store: Store) -> None:
    """A purge leaves the plans and the caches of writers as they are."""
    room = room_of_admin()
    room.invite(ADMIN, GUEST)
    room.kick(ADMIN, GUEST)
    await take(store, *room.events)
    async with store.database.connection() as conn:
        await conn.execute(SQL_FORGET, "s9.test")
    assert "s9.test" not in await visibility(store)
    await take(store, room.invite(ADMIN, GUEST))
    assert (await visibility(store))["s9.test"].invited_count == 1


async def test_of_two_writers_with_the_same_new_rows_one_is_refused(dsn: str, store: Store) -> None:
    """The second one waits, and its snapshot lacks the rows of the first.

    The compare-and-set refuses it before it inserts anything.
    """
    known, room = room_of_admin(seed=2), room_of_admin()
    known.join(GUEST)
    await take(store, *known.events)
    await take(store, *room.events)
    plans = [await change_set_of(store, branch.join(GUEST)) for branch in room.fork()]
    for absent in (
        [plan.states.absent_keys for plan in plans],
        [plan.visibility.absent_visibility for plan in plans],
        [plan.visibility.absent_audiences for plan in plans],
    ):
        assert absent[0] == absent[1] != set()
    async with admin_of(dsn) as admin:
        async with store.database.transaction() as conn:
            await all_tables.write(conn, plans[0], await author_of(conn), 1)

            async def write_second() -> None:
                async with store.database.transaction() as other:
                    await all_tables.write(other, plans[1], await author_of(other), 1)

            waits = asyncio.create_task(write_second())
            await waiting_write(admin)
        with pytest.raises(DatabaseConflict, match="rooms"):
            await waits
    assert (await visibility(store))["s9.test"].joined_count == 1


async def test_a_row_that_should_not_be_there_stops_its_room_until_it_is_repaired(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The other room of the batch is written, and the log names the cure."""
    room, other = room_of_admin(), room_of_admin(seed=2)
    other.join(GUEST)
    await take(store, *room.events)
    await take(store, *other.events)
    async with store.database.connection() as conn:
        await conn.execute(SQL_STRAY, room.room_id, GUEST)
    join = room.join(GUEST)
    refused = asyncio.create_task(store.append([join.pdu], room_version="11"))
    message = other.message(GUEST, "there")
    assert [one.outcome for one in await store.append([message.pdu], room_version="11")] == [
        "stored"
    ]
    [result] = await refused
    assert (result.outcome, result.reason) == (
        "invalid",
        "the database refuses it: current_state_pkey",
    )
    assert "`room-storage verify --repair`" in caplog.text
    assert [finding.check for finding in await findings(store)] == ["current_state"]
    await rebuild(store.database, room.room_id, server_name="s1.test")
    await take(store, join)
    assert await findings(store) == []
