"""State resolution at a merge: forks that differ in 20 entries, in rooms of growing size.

A round forks the room, changes ten entries on each branch, and appends all but the last event. The
benchmark measures the append of that event, which resolves both branches into the current state,
with warm caches. It is compared with a state event after the merge, which resolves nothing. The
difference is the resolution, with everything that it loads and stores.
"""

import statistics
import time
from typing import Any, Final

import storage
from benchmarks.harness import Bench, Trips, percentiles, show
from storage.testing import RoomBuilder

SIZES: Final = (50, 500, 5_000, 50_000)
QUICK_SIZES: Final = (50, 500)
DIFFERENCES: Final = 10  # on each branch
SERVER: Final = "s1.test"


async def run(bench: Bench) -> None:
    """Measure each size, and show the growth."""
    for members in QUICK_SIZES if bench.quick else SIZES:
        bench.results[f"{members} members"] = await _measure(
            bench, members, rounds=bench.size(20, 4)
        )
    _show(bench)
    bench.write()


async def _measure(bench: Bench, members: int, rounds: int) -> dict[str, Any]:
    room = RoomBuilder("11", seed=1, sign=False, exact=False)
    admin = room.user(1)
    room.start(admin)
    for number in range(2, members + 1):
        room.join(room.user(number))
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER, observer=trips) as store,
    ):
        trips.opened()
        sent = 0
        merging: list[float] = []
        plain: list[float] = []
        statements: list[int] = []
        for turn in range(rounds + 2):  # the first two warm up
            sent = await _fork(store, room, admin, turn, sent)
            before = trips.count
            merging.append(await _timed(store, room.events[-1].pdu))
            statements.append(trips.count - before)
            await store.append([room.message(admin, "merged").pdu])
            plain.append(
                await _timed(store, room.state_event(admin, "m.test", {"plain": turn}, "plain").pdu)
            )
            sent += 3
        state = await store.current_state(room.room_id)
        if len(state) != len(room.state):
            raise AssertionError(f"{len(state)} entries, expected {len(room.state)}")
    return {
        "merge ms": percentiles(merging[2:], factor=1000),
        "plain state event ms": percentiles(plain[2:], factor=1000),
        "resolution ms (difference of medians)": round(
            (statistics.median(merging[2:]) - statistics.median(plain[2:])) * 1000, 3
        ),
        "statements": percentiles(statements[2:], digits=1),
    }


async def _fork(store: storage.Store, room: RoomBuilder, admin: str, turn: int, sent: int) -> int:
    """Create two branches that differ in ten entries each, half with the same keys.

    Append all but the last event.
    """
    (other,) = room.fork(1)
    for branch, first in ((room, 0), (other, DIFFERENCES // 2)):
        for number in range(first, first + DIFFERENCES):
            branch.state_event(admin, "m.test", {"turn": turn, "from": first}, f"key {number}")
    room.merge(other)
    pdus = [event.pdu for event in room.events[sent:-1]]
    for at in range(0, len(pdus), 500):
        await store.append(pdus[at : at + 500], room_version="11")
    return len(room.events) - 1


async def _timed(store: storage.Store, pdu: bytes) -> float:
    start = time.perf_counter()
    [result] = await store.append([pdu])
    if result.outcome != "stored":
        raise AssertionError(result)
    return time.perf_counter() - start


def _show(bench: Bench) -> None:
    columns = ["room", "resolution ms", "at the fork p50 ms", "plain p50 ms", "statements p50"]
    rows = [
        [
            name,
            found["resolution ms (difference of medians)"],
            found["merge ms"]["p50"],
            found["plain state event ms"]["p50"],
            found["statements"]["p50"],
        ]
        for name, found in bench.results.items()
    ]
    show("The current state of two branches that differ in 15 keys", columns, rows)
