"""Few and near parents and auth events are distances, others arrays. Every read knows both."""

import random
from collections.abc import AsyncIterator
from typing import Final

import pytest

import storage
from storage import Store
from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.persist.write.events import AUTH_DISTANCES, edge_columns
from tests.maintenance.rooms import SERVER

FAR: Final = 2**40
EDGES: Final = {*PREV_NIDS.columns, *AUTH_NIDS.columns} - {"event_nid"}
SQL_READ: Final = """
SELECT prev_nids($1::bigint, $2::bigint[], $3::int),
    auth_nids($1::bigint, $4::bigint[], $5::int, $6::int, $7::int, $8::int)
"""


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def execute(store: Store, sql: str, *args: object) -> None:
    async with store.database.connection() as conn:
        await conn.execute(sql, *args)


def test_few_and_near_edges_become_distances() -> None:
    columns = edge_columns(
        [900, 900, 900, 900, FAR],
        [(899,), (899, 870), (), (905,), (1,)],
        [(1, 2, 880), (), (1, 2, 3, 4, 5), (901,), (FAR - 1, 1)],
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
    columns = edge_columns(nids, prev, auth)
    assert any(columns["prev_distance"])
    assert any(columns["prev_events"])
    async with store.database.connection() as conn:
        for at, nid in enumerate(nids):
            row = {name: column[at] if column else None for name, column in columns.items()}
            taken = [row["prev_events"], row["prev_distance"], row["auth_events"]]
            taken += [row[name] for name in AUTH_DISTANCES]
            found = await conn._driver.fetchrow(SQL_READ, nid, *taken)
            assert [tuple(one) for one in found] == [prev[at], auth[at]]
