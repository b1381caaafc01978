"""Auth chains and their difference over graphs that no auth rule would allow.

One connection has only the tables that these queries read.
"""

import os
from collections.abc import Sequence
from random import Random

import pytest

import storage
from storage.database import Connection
from storage.database.columns import AUTH_NIDS
from storage.graph.chains import ChainColumns, all_columns
from storage.ids import EventId
from storage.persist.load.chain_ancestors import load_closures
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.write.events import edge_columns
from storage.queries.auth_chain import auth_chain_difference, auth_chain_ids
from tests.persist.random_auth_graphs import SERVER, AuthGraphWorld, caches, chain, world_of

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "0"))
TABLES = """
CREATE TEMPORARY TABLE events (
  event_nid bigint PRIMARY KEY,
  event_id text COLLATE "C" UNIQUE,
  auth_events bigint[],
  auth_distance_1 int,
  auth_distance_2 int,
  auth_distance_3 int,
  auth_distance_4 int
);
CREATE TEMPORARY TABLE auth_chains (LIKE public.auth_chains INCLUDING ALL);
CREATE TEMPORARY TABLE auth_chain_links (LIKE public.auth_chain_links INCLUDING ALL)
"""


async def keep(conn: Connection, world: AuthGraphWorld) -> None:
    """The world, and nothing else, in the tables of this connection."""
    await conn.execute("TRUNCATE events, auth_chains, auth_chain_links")
    places = world.change_set.auth_graph.new_places
    nids = list(world.graph)
    edges = edge_columns(nids, [()] * len(nids), list(world.graph.values()))
    await conn.copy_in(
        "events",
        ("event_nid", "event_id", *AUTH_NIDS.columns[1:]),
        [
            (nid, f"${nid}", *auth)
            for nid, *auth in zip(
                nids,
                *(edges[column] or [None] * len(nids) for column in AUTH_NIDS.columns[1:]),
                strict=True,
            )
        ],
    )
    rows, links = all_columns(places)
    await conn.copy_in(
        "auth_chains",
        (*ChainColumns._fields, "event_id", "state_key"),
        [(*row, f"${row.event_nid}", "") for row in rows],
    )
    await conn.copy_in(
        "auth_chain_links",
        ("chain_nid", "sequence_number", "target_chain_nid", "target_sequence_number"),
        links,
    )


def ids(nids: Sequence[int] | set[int]) -> set[EventId]:
    return {EventId(f"${nid}") for nid in nids}


async def compare(conn: Connection, rng: Random, world: AuthGraphWorld) -> int:
    """Some questions, and what walking says; how many of the answers were of several events."""
    some = rng.sample(list(world.graph), min(len(world.graph), rng.randint(1, 6)))
    sets = [
        {*some, *rng.sample(list(world.graph), min(len(world.graph), 3))}
        for _ in range(rng.randint(2, 3))
    ]
    chains = [chain(world.graph, one) for one in sets]
    difference = set[int]().union(*chains) - chains[0].intersection(*chains[1:])
    assert await auth_chain_ids(conn, ids(some)) == ids(chain(world.graph, some))
    assert await auth_chain_difference(conn, [ids(one) for one in sets]) == ids(difference)
    change_set = ChangeSet(caches(), NidBlocks(), SERVER)
    await load_closures(conn, change_set, some)
    assert (
        change_set.auth_graph.closures.keys()
        == set(some) & world.change_set.auth_graph.places.keys()
    )
    for nid, closure in change_set.auth_graph.closures.items():
        reached = sorted(
            world.change_set.auth_graph.places[one] for one in chain(world.graph, [nid])
        )
        assert dict(closure) == dict(reached), "of each chain the last place"
    return len(difference) > 1


@pytest.mark.parametrize("rejected", [False, True])
async def test_any_graph(dsn: str, *, rejected: bool) -> None:
    async with storage.open(dsn, server_name=SERVER) as store, store.database.connection() as conn:
        await conn.execute(TABLES)
        told = 0
        for seed in range(EXAMPLES or 20):
            rng = Random(seed)
            world = world_of(rng, rng.randint(1, 30), rejected=rejected)
            await keep(conn, world)
            for _ in range(5):
                told += await compare(conn, rng, world)
        assert told > 20
