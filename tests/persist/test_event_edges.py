"""Parents and auth events have two forms: arrays, and distances. Every read knows both."""

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import pytest

import storage
from storage import Store
from storage.database.background import run_jobs
from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.migrate import DISTANCES_REVISION, script_directory
from storage.database.migration_steps import jobs_of
from storage.errors import ConstraintViolated
from storage.persist.write.event_edges import AUTH_DISTANCES, edge_columns
from storage.pipeline.rebuilding import Rebuilder
from storage.testing import SHAPES, build_room, generate_room
from tests.maintenance.rooms import LIVELY, SERVER, deliver, findings
from tests.persist.tables import logical_tables

FAR: Final = 2**40
EDGES: Final = {*PREV_NIDS.columns, *AUTH_NIDS.columns} - {"event_nid"}
SQL_READ: Final = """
SELECT prev_nids($1::bigint, $2::bigint[], $3::int),
    auth_nids($1::bigint, $4::bigint[], $5::int, $6::int, $7::int, $8::int)
"""
SQL_OLD: Final = "UPDATE schema_compatibility SET code_revision = '0031'"
SQL_FORMS: Final = """
SELECT count(*) FILTER (WHERE prev_events IS NOT NULL) AS prev_arrays,
    count(*) FILTER (WHERE auth_events IS NOT NULL) AS auth_arrays,
    count(prev_distance) AS prev_distances, count(auth_distance_1) AS auth_distances,
    count(*) FILTER (WHERE cardinality(prev_nids(event_nid, prev_events, prev_distance)) > 1)
        AS merges
FROM events
"""
SQL_REGISTER: Final = """
INSERT INTO background_jobs (name, revision, registered_ts)
VALUES ($1::text, $2::text, 0)
ON CONFLICT DO NOTHING
"""


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def execute(store: Store, sql: str, *args: object) -> None:
    async with store.database.connection() as conn:
        await conn.execute(sql, *args)


async def forms(store: Store) -> dict[str, int]:
    async with store.database.connection() as conn:
        return dict(await conn._driver.fetchrow(SQL_FORMS))


async def run_the_job(store: Store, *, batches: int | None = None, rows: int = 50) -> None:
    """Run some batches, or all, each of at most so many rows at first."""
    [job] = [one for one in jobs_of(script_directory()) if "distances" in one.name]
    await execute(store, SQL_REGISTER, job.name, DISTANCES_REVISION)
    await execute(store, "UPDATE background_jobs SET batch_rows = $1::int", rows)
    done = 0
    async for _ in run_jobs(store.database, {job.name: job}, pause=0, clock=lambda: 0.0):
        done += 1
        if done == batches:
            break


def test_few_and_near_edges_become_distances() -> None:
    columns = edge_columns(
        [900, 900, 900, 900, FAR],
        [(899,), (899, 870), (), (905,), (1,)],
        [(1, 2, 880), (), (1, 2, 3, 4, 5), (901,), (FAR - 1, 1)],
        has_distances=True,
    )
    assert columns.keys() == EDGES
    assert columns["prev_distance"] == [1, None, None, -5, None]
    assert columns["prev_events"] == [None, (899, 870), None, None, (1,)]
    assert [columns[name] for name in AUTH_DISTANCES] == [
        (899, None, None, -1, None),
        (898, None, None, None, None),
        (20, None, None, None, None),
        (),
    ]
    assert columns["auth_events"] == [None, None, (1, 2, 3, 4, 5), None, (FAR - 1, 1)]


async def test_the_schema_reads_what_is_written(store: Store) -> None:
    """Random edges, at both sides of each limit: the number of edges and their distance."""
    chosen = random.Random(5)
    limit = 2**31
    nids = [chosen.choice([1, 900, limit, FAR]) for _ in range(200)]
    near = [0, 1, -1, 7, limit - 1, limit, 1 - limit, -limit]
    prev, auth = (
        [
            tuple(nid + chosen.choice(near) for _ in range(chosen.randrange(most + 1)))
            for nid in nids
        ]
        for most in (2, 6)
    )
    for has_distances in (True, False):
        columns = edge_columns(nids, prev, auth, has_distances=has_distances)
        async with store.database.connection() as conn:
            for at, nid in enumerate(nids):
                row = {name: column[at] if column else None for name, column in columns.items()}
                taken = [row["prev_events"], row["prev_distance"], row["auth_events"]]
                taken += [row[name] for name in AUTH_DISTANCES]
                found = await conn._driver.fetchrow(SQL_READ, nid, *taken)
                assert [tuple(one) for one in found] == [prev[at], auth[at]]
        assert any(columns["prev_distance"]) == has_distances


async def test_both_forms_of_an_edge_at_once_are_refused(store: Store) -> None:
    await store.append(build_room(LIVELY, 20, seed=1).pdus)
    for change in ("prev_events = '{1}'", "auth_events = '{1}'"):
        with pytest.raises(ConstraintViolated, match="events_distance_check"):
            await execute(store, f"UPDATE events SET {change} WHERE prev_distance = 1")


async def test_an_old_database_is_rewritten_step_by_step(dsn: str, another_dsn: str) -> None:
    """Before the post step arrays are written, then distances; the job is ended and run again.

    At each step the room is the one of a database that has always had distances.
    """
    room = generate_room(SHAPES["fork_heavy"], 160, seed=2, sign=False)
    third = len(room.events) // 3
    parts = [
        replace(room, events=room.events[start : start + third])
        for start in range(0, len(room.events), third)
    ]
    async with (
        storage.open(dsn, server_name=SERVER) as store,
        storage.open(another_dsn, server_name=SERVER) as other,
    ):
        await execute(store, SQL_OLD)
        await deliver(store, parts[0])
        assert (await forms(store))["prev_distances"] == 0
        await execute(
            store, "UPDATE schema_compatibility SET code_revision = $1::text", DISTANCES_REVISION
        )
        await deliver(store, parts[1])
        half = await forms(store)
        assert 0 < half["prev_distances"] < half["prev_arrays"] + third
        await deliver(other, parts[0])
        await deliver(other, parts[1])
        assert await logical_tables(store.database) == await logical_tables(other.database)
        assert await findings(store) == []
        async with Rebuilder.opened(dsn, SERVER) as rebuilder:
            assert (await rebuilder.rebuild(room.room_id)).events == 0
        assert await forms(store) == half
        await run_the_job(store, batches=1, rows=20)
        begun = await forms(store)
        assert half["prev_arrays"] > begun["prev_arrays"] > begun["merges"]
        await run_the_job(store)
        assert (await forms(store))["prev_arrays"] == (await forms(store))["merges"]
        await deliver(store, parts[2])
        await deliver(other, parts[2])
        assert await logical_tables(store.database) == await logical_tables(other.database)
        assert await forms(store) == await forms(other)
        assert await findings(store) == []
