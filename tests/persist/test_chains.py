"""The auth difference and the conflicted subgraph, found by closures, against the chains themselves."""

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
from immutables import Map

import storage
from storage.database import Connection
from storage.errors import StorageCorrupt
from storage.event import Event, parse
from storage.persist import chains
from storage.persist.chains import auth_difference
from storage.persist.commit import absorb
from storage.persist.context import Needs
from storage.persist.draft import Blocks, Draft
from storage.persist.load import fill_blocks, load
from storage.persist.plan import Incoming, plan_event
from storage.persist.questions import GraphRow
from storage.persist.rows import EventRow
from storage.persist.walk import Chains, auth_graph, walked
from storage.state.groups import Group, root_group
from storage.state.read import read_groups
from storage.testing import SHAPES, RoomBuilder, generate_room
from storage.visibility.numbers import NOTHING
from tests.persist.worlds import SERVER, Graph, World, caches, chain, world_of

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "0"))
SQL_GRAPH = """
SELECT event_nid, auth_events
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
    with mock.patch.object(chains, "KNOWN_STATE", entries):
        yield


# ------------------------------------------------------------------------------------------------------- said without cleverness


def literal(graph: Graph, states: Sequence[Mapping[int, int]], conflicted: Collection[int]) -> Chains:
    """The difference of whole chains; of the events in conflict those between two of them, and all that reach one and are reached by one."""
    every = [chain(graph, set(state.values())) for state in states]
    between = {nid for nid in chain(graph, conflicted) if not chain(graph, [nid]).isdisjoint(conflicted)}
    return Chains(set[int]().union(*every) - every[0].intersection(*every), between | set(conflicted))


def differing(states: Sequence[Mapping[int, int]]) -> set[int]:
    return {key for key in set().union(*states) if len({state.get(key) for state in states}) > 1}


# ----------------------------------------------------------------------------------------------------------------- any graph at all


def states_of(rng: Random, world: World) -> list[dict[int, int]]:
    """Two to four states that have some entries in common."""
    base = {key: rng.choice([0, *nids[-6:]]) for key, nids in world.of_key.items()}
    states = [base]
    for _ in range(rng.randint(1, 3)):
        keys = rng.sample(list(base), rng.randint(1, 4))
        states.append({**rng.choice(states), **{key: rng.choice([0, *world.of_key[key]]) for key in keys}})
    return [{key: nid for key, nid in state.items() if nid} for state in states]


@pytest.mark.parametrize("known,rejected", [(0, False), (500, False), (500, True)])
def test_any_graph(*, known: int, rejected: bool) -> None:
    """As whole chains tell; and so does the walk, which is taken where a rejected event is in a state."""
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
            assert walked(world.draft, groups, keys) == wanted
            with known_state(known), watched(found):
                assert auth_difference(world.draft, groups, keys) == wanted
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

    def counted(draft: Draft, states: Sequence[Group], keys: set[int]) -> Chains:
        found["walked"] += 1
        return walked(draft, states, keys)

    with mock.patch.object(chains, "walked", counted):
        yield


def test_a_long_chain_is_not_walked() -> None:
    """Of 2,500 changes of the power levels the last two are in conflict: once closures are at hand, hardly more than these are looked at."""
    world = World()
    world.add(1, 1, ())
    world.add(2, 3, (1,))
    world.add(3, 2, (1, 2))
    for nid in range(4, 2_501):
        world.add(nid, 2, (1, 2, nid - 1))
    states = [group(1, {1: 1, 3: 2, 2: 2_498}), group(2, {1: 1, 3: 2, 2: 2_500})]
    wanted = Chains({2_498, 2_499}, {2_498, 2_499, 2_500})
    assert auth_difference(world.draft, states, {2}) == wanted == walked(world.draft, states, {2})
    looked_at: set[int] = set()

    def looking(find: Callable[[int], EventRow | None]) -> Callable[[int], EventRow | None]:
        def look(nid: int) -> EventRow | None:
            looked_at.add(nid)
            return find(nid)

        return look

    with (
        mock.patch.object(world.draft, "find_row", looking(world.draft.find_row)),
        mock.patch.object(world.draft, "known_row", looking(world.draft.known_row)),
    ):
        assert auth_difference(world.draft, states, {2}) == wanted
        assert looked_at <= {1, 2, *range(2_497, 2_501)}
        looked_at.clear()
        assert walked(world.draft, states, {2}) == wanted
        assert len(looked_at) == 2_500  # the walk would not pass


# ----------------------------------------------------------------------------------------------------------------- in the database


@pytest.mark.parametrize("known", [0, 500])
@pytest.mark.parametrize("version", ["6", "12"])
async def test_rooms_in_the_database(dsn: str, version: str, known: int) -> None:
    """States of a room, of which much is stored and the rest is planned: asked by a process that remembers all, something or nothing."""
    rng = Random(known)
    async with storage.open(dsn, server_name=SERVER) as store:
        for seed in range(EXAMPLES or 2):
            room = generate_room(SHAPES["fork_heavy"], 260, seed=seed, version=version, sign=False)
            pdus = [event.pdu for event in room.events]
            await store.append(pdus[:200], room_version=version)
            async with store.database.connection() as conn:
                graph = {nid: tuple(auth) for nid, auth in await conn.fetch(SQL_GRAPH, room.room_id, row=GraphRow)}
                stored = await read_groups(conn, await conn.fetchvals(SQL_GROUPS, room.room_id))
                cold = [caches() for _ in range(3)]
                for turn in range(30):
                    draft = Draft(store.writer.caches if turn % 3 == 0 else cold[turn % 3], Blocks(), SERVER)
                    groups = list(stored.values())
                    if turn % 6 == 0:
                        groups += await planned(conn, draft, [parse(pdu, version) for pdu in pdus[200:]])
                        graph |= {nid: new.row.auth_events for nid, new in draft.new_events.items()}
                    await compare(conn, draft, graph, rng.sample(groups[-20:] if turn % 2 else groups, 3), known)
                    if not draft.new_events:
                        absorb(draft.caches, draft)


async def test_an_auth_event_that_is_not_held_is_named(dsn: str) -> None:
    room = RoomBuilder("11", sign=False)
    room.start("@alice:s1.test")
    bob = room.join("@bob:s2.test")
    lost = room.events[0]
    async with storage.open(dsn, server_name=SERVER) as store, store.database.connection() as conn:
        await store.append(room.pdus)
        nids = [await conn.fetchval("SELECT event_nid FROM events WHERE event_id = $1::text", one.event_id) for one in (bob, lost)]
        await conn.execute("DELETE FROM events WHERE event_nid = $1::bigint", nids[1])
        draft = Draft(caches(), Blocks(), SERVER)
        with pytest.raises(StorageCorrupt) as caught:
            await asked(conn, draft, lambda: auth_graph(draft, nids[:1]))
        assert caught.value.ids["event_nids"] == nids[1:]


async def planned(conn: Connection, draft: Draft, events: Sequence[Event]) -> list[Group]:
    """Plan these events into the draft; the states that they make."""
    await fill_blocks(conn, draft.blocks, {"event_nids": 500, "state_group_nids": 500, "auth_chain_nids": 500, "room_nids": 1})
    for event in events:
        result = await asked(conn, draft, partial(plan_event, draft, Incoming(event, "live")))
        assert result.is_stored
    return list(draft.new_groups.values())


async def compare(conn: Connection, draft: Draft, graph: Graph, groups: Sequence[Group], known: int) -> None:
    states = [dict(one.entries) for one in groups]
    keys = differing(states)
    if keys:
        wanted = literal(graph, states, {state[key] for state in states for key in keys if key in state})
        with known_state(known):
            assert await asked(conn, draft, lambda: auth_difference(draft, groups, keys)) == wanted


async def asked(conn: Connection, draft: Draft, ask: Callable[[], V]) -> V:
    """An answer, when what it takes is loaded."""
    while True:
        try:
            return ask()
        except Needs as needs:
            await load(conn, draft, needs)
