"""The auth difference and the conflicted subgraph by closures, compared with whole chains."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import TypeVar
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storage
from storage.database import Connection
from storage.errors import StorageCorrupt
from storage.event import Event, parse
from storage.persist.commit.publish import absorb
from storage.persist.load.lookups import AuthGraphRow, fill_blocks
from storage.persist.load.on_demand import load
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.model.rows import EventRow
from storage.persist.plan import auth_difference as auth_differences
from storage.persist.plan.auth_difference import AuthChains, auth_difference, auth_graph, walked
from storage.persist.plan.event import plan_event
from storage.persistent_map import Map
from storage.state.groups import Group, read_groups, root_group
from storage.testing import SHAPES, RoomBuilder, generate_room
from storage.visibility.multirange import NOTHING
from tests.persist.random_auth_graphs import SERVER, AuthGraphWorld, Graph, caches, chain, world_of

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "0"))
SQL_GRAPH = """
SELECT event_nid, auth_nids(event_nid, auth_events, auth_distance_1, auth_distance_2,
    auth_distance_3, auth_distance_4) AS auth_events
FROM events
JOIN rooms USING (room_nid)
WHERE room_id = $1::text
"""
SQL_GROUPS = """
SELECT state_group
FROM state_groups
JOIN rooms USING (room_nid)
WHERE room_id = $1::text
ORDER BY state_group
"""

V = TypeVar("V")


def group(number: int, entries: Mapping[int, int]) -> Group:
    return root_group(number, 1, Map(entries), NOTHING)


@contextmanager
def known_state(entries: int) -> Iterator[None]:
    """Larger states count as large."""
    with mock.patch.object(auth_differences, "CLOSURES_STATE_MAX", entries):
        yield


# --------------------------------------------------------------------------------------------------
# said without cleverness


def literal(
    graph: Graph, states: Sequence[Mapping[int, int]], conflicted: Collection[int]
) -> AuthChains:
    """Return the difference of whole chains, and the conflicted subgraph.

    The subgraph has the events between two in conflict: all that reach one and are reached by one.
    """
    every = [chain(graph, set(state.values())) for state in states]
    between = {
        nid for nid in chain(graph, conflicted) if not chain(graph, [nid]).isdisjoint(conflicted)
    }
    return AuthChains(
        set[int]().union(*every) - every[0].intersection(*every), between | set(conflicted)
    )


def differing(states: Sequence[Mapping[int, int]]) -> set[int]:
    return {key for key in set().union(*states) if len({state.get(key) for state in states}) > 1}


# --------------------------------------------------------------------------------------------------
# any graph at all


def states_of(rng: Random, world: AuthGraphWorld) -> list[dict[int, int]]:
    """Two to four states that have some entries in common."""
    base = {key: rng.choice([0, *nids[-6:]]) for key, nids in world.of_key.items()}
    states = [base]
    for _ in range(rng.randint(1, 3)):
        keys = rng.sample(list(base), rng.randint(1, 4))
        states.append(
            {**rng.choice(states), **{key: rng.choice([0, *world.of_key[key]]) for key in keys}}
        )
    return [{key: nid for key, nid in state.items() if nid} for state in states]


@pytest.mark.parametrize("known,rejected", [(0, False), (500, False), (500, True)])
def test_any_graph(*, known: int, rejected: bool) -> None:
    """The result equals that of whole chains.

    So does the walk, which is used where a state has a rejected event.
    """
    found: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES or 80, deadline=None, database=None, derandomize=not EXAMPLES)
    @given(seed=st.integers(0, 1 << 32), runs=st.integers(1, 30))
    def check(seed: int, runs: int) -> None:
        rng = Random(seed)
        world = world_of(rng, runs, rejected=rejected)
        for _ in range(5):
            states = states_of(rng, world)
            keys = differing(states)
            if not keys:
                continue
            groups = [group(number, state) for number, state in enumerate(states, 1)]
            conflicted = {state[key] for state in states for key in keys if key in state}
            wanted = literal(world.graph, states, conflicted)
            assert walked(world.change_set, groups, keys) == wanted
            with known_state(known), watched(found):
                assert auth_difference(world.change_set, groups, keys) == wanted
            found["difference"] += bool(wanted.difference)
            found["between"] += len(wanted.subgraph) > len(conflicted)
            found["asked"] += 1

    check()
    assert min(found["difference"], found["between"]) > 20
    assert found["walked"] > 20 if rejected else not found["walked"]
    assert found["walked"] < found["asked"] * 0.8


@contextmanager
def watched(found: Counter[str]) -> Iterator[None]:
    """Count what is walked."""

    def counted(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> AuthChains:
        found["walked"] += 1
        return walked(change_set, states, keys)

    with mock.patch.object(auth_differences, "walked", counted):
        yield


def test_a_long_chain_is_not_walked() -> None:
    """The last two of 2,500 changes of the power levels are in conflict.

    Once closures are cached, the plan reads hardly more events than these.
    """
    world = AuthGraphWorld()
    world.add(1, 1, ())
    world.add(2, 3, (1,))
    world.add(3, 2, (1, 2))
    for nid in range(4, 2_501):
        world.add(nid, 2, (1, 2, nid - 1))
    states = [group(1, {1: 1, 3: 2, 2: 2_498}), group(2, {1: 1, 3: 2, 2: 2_500})]
    wanted = AuthChains({2_498, 2_499}, {2_498, 2_499, 2_500})
    assert (
        auth_difference(world.change_set, states, {2})
        == wanted
        == walked(world.change_set, states, {2})
    )
    looked_at: set[int] = set()

    def looking(find: Callable[[int], EventRow | None]) -> Callable[[int], EventRow | None]:
        def look(nid: int) -> EventRow | None:
            looked_at.add(nid)
            return find(nid)

        return look

    with (
        mock.patch.object(
            world.change_set.events, "find_row", looking(world.change_set.events.find_row)
        ),
        mock.patch.object(
            world.change_set.events, "row_in_memory", looking(world.change_set.events.row_in_memory)
        ),
    ):
        assert auth_difference(world.change_set, states, {2}) == wanted
        assert looked_at <= {1, 2, *range(2_497, 2_501)}
        looked_at.clear()
        assert walked(world.change_set, states, {2}) == wanted
        assert len(looked_at) == 2_500  # the walk would not pass


# --------------------------------------------------------------------------------------------------
# in the database


@pytest.mark.parametrize("known", [0, 500])
@pytest.mark.parametrize("version", ["6", "12"])
async def test_rooms_in_the_database(dsn: str, version: str, known: int) -> None:
    """States of a room, partly stored, partly planned.

    The process that queries them has all of them in its caches, some, or none.
    """
    rng = Random(known)
    async with storage.open(dsn, server_name=SERVER) as store:
        for seed in range(EXAMPLES or 2):
            room = generate_room(SHAPES["fork_heavy"], 260, seed=seed, version=version, sign=False)
            pdus = [event.pdu for event in room.events]
            await store.append(pdus[:200], room_version=version)
            async with store.database.connection() as conn:
                graph = {
                    nid: tuple(auth)
                    for nid, auth in await conn.fetch(SQL_GRAPH, room.room_id, row=AuthGraphRow)
                }
                stored = await read_groups(conn, await conn.fetchvals(SQL_GROUPS, room.room_id))
                cold = [caches() for _ in range(3)]
                for turn in range(30):
                    change_set = ChangeSet(
                        store.writer.caches if turn % 3 == 0 else cold[turn % 3],
                        NidBlocks(),
                        SERVER,
                    )
                    groups = list(stored.values())
                    if turn % 6 == 0:
                        groups += await planned(
                            conn, change_set, [parse(pdu, version) for pdu in pdus[200:]]
                        )
                        graph |= {
                            nid: new.row.auth_events
                            for nid, new in change_set.events.new_events.items()
                        }
                    await compare(
                        conn,
                        change_set,
                        graph,
                        rng.sample(groups[-20:] if turn % 2 else groups, 3),
                        known,
                    )
                    if not change_set.events.new_events:
                        absorb(change_set.caches, change_set)


async def test_an_auth_event_that_is_not_held_is_named(dsn: str) -> None:
    room = RoomBuilder("11", sign=False)
    room.start("@alice:s1.test")
    bob = room.join("@bob:s2.test")
    lost = room.events[0]
    async with storage.open(dsn, server_name=SERVER) as store, store.database.connection() as conn:
        await store.append(room.pdus)
        nids = [
            await conn.fetchval(
                "SELECT event_nid FROM events WHERE event_id = $1::text", one.event_id
            )
            for one in (bob, lost)
        ]
        await conn.execute("DELETE FROM events WHERE event_nid = $1::bigint", nids[1])
        change_set = ChangeSet(caches(), NidBlocks(), SERVER)
        with pytest.raises(StorageCorrupt) as caught:
            await asked(conn, change_set, lambda: auth_graph(change_set, nids[:1]))
        assert caught.value.ids["event_nids"] == nids[1:]


async def planned(conn: Connection, change_set: ChangeSet, events: Sequence[Event]) -> list[Group]:
    """Plan these events into the change set; the states that they make."""
    await fill_blocks(
        conn,
        change_set.blocks,
        {"event_nids": 500, "state_group_nids": 500, "room_nids": 1},
    )
    for event in events:
        result = await asked(
            conn, change_set, partial(plan_event, change_set, IncomingEvent(event, "live"))
        )
        assert result.is_stored
    return list(change_set.states.new_groups.values())


async def compare(
    conn: Connection, change_set: ChangeSet, graph: Graph, groups: Sequence[Group], known: int
) -> None:
    states = [dict(one.entries) for one in groups]
    keys = differing(states)
    if keys:
        wanted = literal(
            graph, states, {state[key] for state in states for key in keys if key in state}
        )
        with known_state(known):
            assert (
                await asked(conn, change_set, lambda: auth_difference(change_set, groups, keys))
                == wanted
            )


async def asked(conn: Connection, change_set: ChangeSet, ask: Callable[[], V]) -> V:
    """An answer, when what it takes is loaded."""
    while True:
        try:
            return ask()
        except MissingData as needs:
            await load(conn, change_set, needs)
