"""Walks over hostile graphs: rows read, and the same results as a naive walk.

Rooms are kept apart.
"""

import random
from collections.abc import Sequence
from typing import Any, LiteralString, NamedTuple

import pytest

from storage import Store
from storage.queries import federation
from storage.queries.events import ReaderEventRow
from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.oracle import Oracle
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, new_room

PARENTS = 20
SERVER = "s9.test"  # never joined: walks are made for it, and nothing is given

SQL_READ = """
SELECT COALESCE(sum(idx_tup_fetch), 0)::bigint, COALESCE(sum(seq_tup_read), 0)::bigint
FROM pg_stat_xact_user_tables
WHERE relname = 'events'
"""


class ReadRow(NamedTuple):
    by_index: int
    by_scan: int


async def rows_read(store: Store, sql: LiteralString, *args: Any) -> int:
    """Rows of `events` that a statement looks up, as Postgres counts them, within functions too."""
    async with store.database.transaction(readonly=True) as conn:
        for way in (
            "seqscan",
            "hashjoin",
            "mergejoin",
        ):  # as in tables that are not small; what is counted is what the walk asks for
            await conn.execute(f"SET LOCAL enable_{way} = off")
        before = await conn.fetchrow(SQL_READ, row=ReadRow)
        await conn.fetch(sql, *args, row=ReaderEventRow)
        after = await conn.fetchrow(SQL_READ, row=ReadRow)
    assert before is not None
    assert after is not None
    assert after.by_scan == before.by_scan
    return after.by_index - before.by_index


def braided(layers: int) -> tuple[RoomBuilder, BuiltEvent]:
    """Layers of 20 events, each of which names the whole layer before it."""
    room = new_room(members=[LOCAL])
    for _ in range(layers):
        branches = room.fork(PARENTS)
        for branch in branches:
            branch.message(ADMIN)
        room.merge(*branches)
    return room, room.message(ADMIN)


def combed(teeth: int) -> tuple[RoomBuilder, BuiltEvent]:
    """A chain in which each event has 19 long branches as prev_events: each step widens it."""
    room = new_room(members=[LOCAL])
    for _ in range(teeth):
        branches = room.fork(PARENTS)
        for branch in branches[1:]:
            branch.message(ADMIN)
            branch.message(ADMIN)
        branches[0].message(ADMIN)
        room.merge(*branches)
        room.message(ADMIN)
    return room, room.events[-1]


def chained(length: int) -> tuple[RoomBuilder, BuiltEvent]:
    room = new_room(members=[LOCAL])
    return room, [room.message(ADMIN) for _ in range(length)][-1]


GRAPHS = {"braid": lambda: braided(6), "comb": lambda: combed(4), "chain": lambda: chained(150)}


@pytest.mark.parametrize("graph", GRAPHS)
async def test_what_is_read_is_bounded_by_what_is_asked_for_and_by_the_limit_of_rows(
    store: Store, graph: str
) -> None:
    room, top = GRAPHS[graph]()
    await deliver(store, room)
    for limit in (1, 5, 20):
        # each event given: itself, its parents, and once more to be told
        most = limit * (PARENTS + 4) + 10
        assert (
            await rows_read(
                store, federation.SQL_BACKFILL, room.room_id, [top.event_id], limit, SERVER, 20_000
            )
            <= most
        )
        assert (
            await rows_read(
                store,
                federation.SQL_MISSING,
                room.room_id,
                [],
                [top.event_id],
                limit,
                0,
                SERVER,
                20_000,
            )
            <= most
        )
    # A walk looks up at most rows_max events as parents. It looks up each again when it is
    # returned, and for its own parents.
    for rows_max in (10, 60):
        most = 4 * (rows_max + PARENTS) + 10
        assert (
            await rows_read(
                store,
                federation.SQL_BACKFILL,
                room.room_id,
                [top.event_id],
                10_000,
                SERVER,
                rows_max,
            )
            <= most
        )
        assert (
            await rows_read(
                store,
                federation.SQL_MISSING,
                room.room_id,
                [],
                [top.event_id],
                10_000,
                0,
                SERVER,
                rows_max,
            )
            <= most
        )
        deep = [
            [],
            [top.event_id],
            10_000,
            10**6,
            SERVER,
            rows_max,
        ]  # nothing is that deep: all is walked through, nothing is given
        assert await rows_read(store, federation.SQL_MISSING, room.room_id, *deep) <= most


@pytest.mark.parametrize("graph", GRAPHS)
async def test_walks_of_any_limit_agree_with_the_oracle(store: Store, graph: str) -> None:
    room, top = GRAPHS[graph]()
    await deliver(store, room)
    oracle = Oracle()
    oracle.append(room.pdus)
    held = await store.events(ids(room.events))
    oracle.positions = {
        one: (event.topological_ordering or 0, event.stream_ordering or 0)
        for one, event in held.items()
    }
    chance = random.Random(graph)
    for limit in (1, 2, 7, 30, 10_000):
        some = [top.event_id, *chance.sample(ids(room.events), 3)]
        assert ids(await store.backfill(room.room_id, some, limit)) == oracle.backfill(
            room.room_id, some, limit
        )
        early = chance.sample(ids(room.events), 5)
        depth = chance.choice([0, 5, top.depth - 2])
        found = await store.missing_events(room.room_id, early, some, limit=limit, min_depth=depth)
        assert ids(found) == oracle.missing_events(
            room.room_id, early, some, limit=limit, min_depth=depth
        )


async def test_no_more_than_two_statements_with_nothing_cached(
    store: Store, statements: StatementLog
) -> None:
    room, top = braided(2)
    await deliver(store, room)
    statements.take()
    for server, expected in (
        (None, 1),
        ("s1.test", 1),
        (SERVER, 2),
    ):  # a stranger gets nothing, so that the room is looked for
        await store.backfill(room.room_id, [top.event_id], 100, server_name=server)
        assert len(statements.take()) == expected
        await store.missing_events(room.room_id, [], [top.event_id], limit=100, server_name=server)
        assert len(statements.take()) == expected
    assert await store.backfill(room.room_id, ["$none"], 100) == []
    assert len(statements.take()) == 2
    assert await store.missing_events(room.room_id, [], ["$none"]) == []
    assert len(statements.take()) == 2
    await store.event_auth(top.event_id)
    assert len(statements.take()) == 1
    await store.state_ids(top.event_id)
    assert len(statements.take()) <= 2


# --------------------------------------------------------------------------------------------------
# several rooms


async def two_rooms(store: Store) -> tuple[RoomBuilder, RoomBuilder, BuiltEvent, BuiltEvent]:
    """Return (secret's room, other room, secret, event).

    The event in the other room names the secret as its parent.
    """
    secret_room, room = new_room(visibility="joined"), new_room(seed=1)
    secret = secret_room.message(ADMIN, "secret")
    await deliver(store, secret_room)
    await deliver(store, room)
    state = list(room.state.values())
    curious = room.message(ADMIN, "curious", extra={"prev_events": [*room.heads, secret.event_id]})
    assert await append(store, curious, state_before={curious.event_id: state}) == ["stored"]
    return secret_room, room, secret, curious


async def test_walks_stay_in_the_room(store: Store) -> None:
    secret_room, room, secret, curious = await two_rooms(store)
    top = room.message(ADMIN, "top")
    await append(store, top)
    for start in (curious, top):
        found = {
            *ids(await store.backfill(room.room_id, [start.event_id], 100)),
            *ids(await store.missing_events(room.room_id, [], [start.event_id], limit=100)),
        }
        assert set(ids(room.events[:-2])) <= found | {curious.event_id} <= set(ids(room.events))
        assert not found & set(ids(secret_room.events))
    assert await store.backward_extremities(room.room_id) == {secret.event_id}


async def test_what_lies_in_another_room_is_as_if_unknown(store: Store) -> None:
    secret_room, room, secret, curious = await two_rooms(store)
    assert await store.backfill(room.room_id, [secret.event_id], 10) == []
    assert await store.missing_events(room.room_id, [], [secret.event_id]) == []
    assert await store.missing_events(room.room_id, [secret.event_id], [secret.event_id]) == []
    both: Sequence[str] = [secret.event_id, curious.event_id]
    assert ids(await store.backfill(room.room_id, both, 1)) == [curious.event_id]
    assert ids(await store.missing_events(room.room_id, [secret.event_id], both, limit=1)) == [
        room.events[-2].event_id
    ]
    assert ids(await store.backfill(secret_room.room_id, both, 1)) == [secret.event_id]


async def test_the_auth_chain_of_a_refused_event_stays_in_its_room(store: Store) -> None:
    """The sender of an event that cites another room's events does not get those."""
    secret_room, room, _, _ = await two_rooms(store)
    cited = [secret_room.events[0].event_id, *secret_room.state.values()]
    wrong = room.message(ADMIN, "wrong", extra={"auth_events": cited[:3]})
    assert await append(store, wrong) == ["rejected"]
    assert not set(ids(await store.event_auth(wrong.event_id))) & set(ids(secret_room.events))
