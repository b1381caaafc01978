"""Auth chains from the chain cover: of the current state, and its difference from an old state.

Rooms grow tenfold in members. A fifth of them were invited, and some have left and rejoined, so
that the chain of the state has nearly as many events as the state. Each result is compared with a
walk over the auth events.

Each is read by a process that remembers nothing of it, and again by one that does.
"""

from functools import partial
from typing import Any, Final

import storage
from benchmarks.harness import Bench, Trips, append_all, timed
from storage import Store
from storage.ids import EventId
from storage.streams.caches import ChainMemory
from storage.testing import BuiltEvent, RoomBuilder

SIZES: Final = (50, 500, 5_000)
QUICK_SIZES: Final = (50, 500)
CHANGED: Final = 20  # members in which the old state and the current one differ


async def run(bench: Bench) -> None:
    """Measure each size."""
    for members in QUICK_SIZES if bench.quick else SIZES:
        bench.results[f"{members} members"] = await _measure(
            bench, members, rounds=bench.size(60, 5)
        )


def _room(members: int) -> RoomBuilder:
    room = RoomBuilder("11", seed=1, sign=False, exact=False)
    admin = room.user(1)
    room.start(admin)
    for number in range(2, members + 1):
        user = room.user(number)
        if number % 5 == 0:
            room.invite(admin, user)
        room.join(user)
        if number % 2:
            room.leave(user)
            room.join(user)
    return room


async def _measure(bench: Bench, members: int, rounds: int) -> dict[str, Any]:
    room = _room(members)
    old = set(room.state.values())
    for number in range(2, 2 + min(CHANGED, members // 2)):
        room.leave(room.user(number))
        room.join(room.user(number))
    now = set(room.state.values())
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name="s1.test", observer=trips) as store,
    ):
        trips.opened()
        await append_all(store, room.pdus, 500)
        async with store.database.connection() as conn:
            await conn.execute("VACUUM ANALYZE")  # as autovacuum does after so many rows
        graph = {event.event_id: event for event in room.events}
        chains = [_walk(graph, old), _walk(graph, now)]
        if (
            await store.auth_chain_ids(now) != chains[1]
            or await store.auth_chain_difference([old, now]) != chains[0] ^ chains[1]
        ):
            raise AssertionError("the cover and the walk disagree")
        measured = partial(timed, trips=trips, rounds=rounds, server=bench.server)
        return {
            "state": len(now),
            "chain": len(chains[1]),
            "difference": len(chains[0] ^ chains[1]),
            "chain cost": await measured(lambda: _forgetful(store).auth_chain_ids(now)),
            "chain again cost": await measured(lambda: store.auth_chain_ids(now)),
            "difference cost": await measured(
                lambda: _forgetful(store).auth_chain_difference([old, now])
            ),
            "difference again cost": await measured(
                lambda: store.auth_chain_difference([old, now])
            ),
        }


def _forgetful(store: Store) -> Store:
    store.caches.chains = ChainMemory(store.caches.chains.limit)
    return store


def _walk(graph: dict[EventId, BuiltEvent], ids: set[EventId]) -> set[EventId]:
    found: set[EventId] = set()
    todo = [cited for event_id in ids for cited in graph[event_id].auth_events]
    while todo:
        event_id = todo.pop()
        if event_id not in found:
            found.add(event_id)
            todo.extend(graph[event_id].auth_events)
    return found
