"""Plans of a write before the first ANALYZE: the rows of `events` it reads do not grow with a room.

A table without statistics looks small. So a scan seems cheaper than a hundred look-ups by id.
"""

from collections.abc import Sequence
from functools import partial

import pytest

import storage
from storage.database.connection import Connection
from storage.database.explained import ExplainingConnection, QueryPlan
from storage.event import parse
from storage.persist.load.on_demand import load
from storage.persist.load.prefetch import SQL_LOAD_BATCH, prefetch
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.plan.event import plan_event
from storage.persist.write import all_tables, messages_only
from storage.streams.stream_writer import Author
from storage.testing import RoomBuilder
from tests.persist.writing import QUIET

STORED, BATCH = 500, 100
ROWS_MAX = 20
"""Of `events`, by each statement: the auth events, the last event, and what decides in a room."""

SQL_NO_STATISTICS = "ALTER TABLE events SET (autovacuum_enabled = false)"
SQL_EPOCH = "SELECT epoch FROM stream_positions WHERE stream_name = 'events'"


def large_room() -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Return the events to store, messages with a state event in a batch, and one alone."""
    room = RoomBuilder("11", seed=1, sign=False, exact=False)
    admin = room.user(1)
    room.start(admin)
    for _ in range(STORED):
        room.message(admin)
    side = room.fork(1)[0].topic(admin, "alone")
    for _ in range(BATCH):
        room.message(admin)
    room.topic(admin, "plans")
    pdus = [event.pdu for event in room.events if event is not side]
    return pdus[: -BATCH - 1], pdus[-BATCH - 1 :], [side.pdu]


async def planned(conn: Connection, caches: WriterCaches, pdus: Sequence[bytes]) -> ChangeSet:
    """Plan a batch by a process that has nothing in its caches."""
    change_set = ChangeSet(caches, NidBlocks(), "s1.test")
    incoming = [IncomingEvent(parse(pdu, "11"), "live") for pdu in pdus]
    await (await prefetch(partial(load, conn), change_set, incoming, assume_new=False)).finished()
    for one in incoming:
        while True:
            try:
                plan_event(change_set, one)
                break
            except MissingData as needs:
                await load(conn, change_set, needs)
    return change_set


async def plan_of_write(conn: ExplainingConnection, change_set: ChangeSet) -> QueryPlan:
    """Return the plan of the write, which is undone."""
    author = Author(1, "main", await Connection.fetchval(conn, SQL_EPOCH))
    await conn.execute("SAVEPOINT before")
    if messages_only.has_messages_only(change_set):
        statement = messages_only.statement_for(change_set)
        given = messages_only.arguments(statement, change_set, author, 1)
        await conn._explain(statement.sql, tuple(given))
    else:
        sql, given = all_tables.bound(change_set, author, 1, [])
        await conn._explain(sql, tuple(given))
    await conn.execute("ROLLBACK TO before")
    return conn.plans.pop()


@pytest.mark.parametrize("generic", [False, True])
async def test_a_write_does_not_grow_with_the_room(dsn: str, *, generic: bool) -> None:
    before, batch, alone = large_room()
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
        async with store.database.connection() as conn:
            await conn.execute(SQL_NO_STATISTICS)
        await store.append(before)
        store.writer.caches.forget()
        for pdus, sql in (
            (batch[:-1], messages_only.SQL_WRITE_MESSAGES),
            (batch[:1], messages_only.SQL_WRITE_ONE_MESSAGE),
            (batch, all_tables.SQL_WRITE),
            (alone, all_tables.SQL_WRITE_STATE_EVENT),
        ):
            async with store.database.transaction() as conn:
                explaining = ExplainingConnection.over(conn, generic=generic)
                change_set = await planned(explaining, store.writer.caches, pdus)
                explaining.plans.append(await plan_of_write(explaining, change_set))
            of_events = {
                plan.sql: plan.rows_of_tables()["events"]
                for plan in explaining.plans
                if "events" in plan.rows_of_tables()
            }
            assert {SQL_LOAD_BATCH, sql} <= set(of_events)
            assert max(of_events.values()) <= ROWS_MAX
            assert not [plan for plan in explaining.plans if "events" in plan.sequential]
