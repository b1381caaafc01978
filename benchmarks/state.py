"""State groups by growing size: disk usage of a state change, rows that a read folds, read times.

Rooms come from benchmarks/big_rooms.py. One of them is also appended by ``store.append``, which
must have written the same rows. The rules for new roots are compared by computed rows alone.
`FACTOR` and `RADIX` of storage/state/paths.py are the best values of this table:

  (entries per change, bytes on disk per change, rows folded by a read on average, entries folded
  over the state's size)

Reads are cold: the store caches nothing, Postgres is warm. Other load affects the clock, so the
minimum and the CPU time are given with the median.
"""

import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import storage
from benchmarks.big_rooms import (
    BigRoomHistory,
    BigRoomTables,
    StateEventNumbers,
    WrittenGroup,
    appended,
    user_name,
)
from benchmarks.harness import Bench, Trips, percentiles, show, spent
from storage import Store
from storage.state import paths

SIZES: Final = {
    "500 members": BigRoomHistory(500, 5_500),
    "5,000 members": BigRoomHistory(5_000, 55_000),
    "20,000 members": BigRoomHistory(20_000, 20_000),
    "50,000 members": BigRoomHistory(50_000, 60_000),
    "spam, 1,000 joins and leaves": BigRoomHistory(100, 1_000, newcomers=True),
    "spam, 10,000": BigRoomHistory(100, 10_000, newcomers=True),
    "spam, 100,000": BigRoomHistory(100, 100_000, newcomers=True),
}
APPENDED: Final = BigRoomHistory(300, 2_000, forks=0.05)
RULES: Final = [(radix, factor) for radix in (4, 8, 16) for factor in (0.5, 1.0, 2.0)]
PATTERNS: Final = {
    "calm": BigRoomHistory(1_000, 11_000),
    "forks": BigRoomHistory(1_000, 11_000, forks=0.2),
    "long forks": BigRoomHistory(1_000, 11_000, forks=0.02, longest=100),
    "spam": BigRoomHistory(100, 11_000, newcomers=True),
}
ROW_BYTES: Final = 32 + 4 + 8 * 2 + 4 * 3 + 22 + 7
"""Header, line pointer, columns of fixed width, index entries."""
ARRAY_BYTES: Final = 21
READS: Final = 60
SQL_GROUPS: Final = """
SELECT array_to_string(ARRAY[entry_count, cardinality(path_of(state_group)),
    coalesce(cardinality(key_nids), 0) + coalesce(cardinality(member_key_nids), 0)
        + (event_nid IS NOT NULL)::int], ' ')
FROM state_groups
"""
GROUPS_AT_ONCE: Final = 100


async def run(bench: Bench) -> None:
    """Measure sizes and reads, the agreement with the store, the rules."""
    await _agree(bench)
    for name, history in SIZES.items():
        bench.results[name] = await _measure(bench, history.smaller() if bench.quick else history)
    bench.results["rules"] = _rules(bench)
    bench.write()
    _show(bench)


async def _agree(bench: Bench) -> None:
    """Check that the store writes the computed rows."""
    history = APPENDED.smaller() if bench.quick else APPENDED
    sheet = BigRoomTables.of(history, keep_events=False)
    async with bench.database() as dsn, storage.open(dsn, server_name="s1.test") as store:
        await appended(store, history)
        async with store.database.connection() as conn:
            written = await conn.fetchvals(SQL_GROUPS)
    expected = [f"{one.row.entry_count} {one.parts} {one.delta}" for one in sheet.groups]
    if sorted(written) != sorted(expected):
        raise RuntimeError("the store has written other groups than the computed ones")
    bench.results["appended"] = {"groups": len(written), "agrees": True}


async def _measure(bench: Bench, history: BigRoomHistory) -> dict[str, Any]:
    sheet = BigRoomTables.of(history, chains=True)
    told = _written(sheet.groups, len(sheet.events))
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name="s1.test", observer=trips) as store,
    ):
        trips.opened()
        async with store.database.connection() as conn:
            await sheet.copy(conn)
            size = int(await conn.fetchval("SELECT pg_total_relation_size('state_groups')"))
            await conn.execute("VACUUM ANALYZE")  # as autovacuum does after so many rows
        told |= {
            "changes": len(sheet.events),
            "mb": round(size / 1e6, 1),
            "bytes_per_change": round(size / len(sheet.events)),
        }
        if not history.newcomers:
            told["reads"] = await _reads(bench, store, trips, sheet)
    return told


def _written(groups: list[WrittenGroup], changes: int) -> dict[str, Any]:
    rows = [one.parts for one in groups]
    entries = sum(one.delta for one in groups)
    estimate = sum(map(_estimated, groups))
    return {
        "entries_per_change": round(entries / changes, 2),
        "rows_max": max(rows),
        "rows_mean": round(sum(rows) / len(rows), 1),
        "roots": sum(one == 1 for one in rows),
        "folded_over_size": round(
            sum(one.folded / max(one.row.entry_count, 1) for one in groups) / len(groups), 2
        ),
        "bytes_per_change_estimated": round(estimate / changes),
    }


def _estimated(group: WrittenGroup) -> int:
    arrays = sum(one is not None for one in group.row if isinstance(one, list))
    path = 1 + len(group.row.path or b"")
    return ROW_BYTES + path + ARRAY_BYTES * arrays + 12 * group.delta


# ------------------------------------------------------------------------------------------------
# reads


async def _reads(bench: Bench, store: Store, trips: Trips, sheet: BigRoomTables) -> dict[str, Any]:
    rng = random.Random(2)
    late = sheet.events[len(sheet.events) // 2 :]
    member = ("m.room.member", user_name(7))

    def ids(count: int) -> list[storage.EventId]:
        return [storage.EventId(event.event_id) for event in rng.sample(late, count)]

    questions: dict[str, Callable[[], Awaitable[Any]]] = {
        "whole state": lambda: store.state_before(ids(1)[0]),
        "one member at 100 groups": lambda: store.states_before(ids(GROUPS_AT_ONCE), keys=[member]),
        "power levels at 100 groups": lambda: store.states_before(
            ids(GROUPS_AT_ONCE), keys=[("m.room.power_levels", "")]
        ),
        "all but members": lambda: store.state_before(
            ids(1)[0], types=["m.room.power_levels", "m.room.join_rules", "m.room.create"]
        ),
    }
    _check(await store.state_before(storage.EventId(late[-1].event_id)), sheet, late[-1])
    return {name: await _timed(bench, trips, question) for name, question in questions.items()}


def _check(state: dict[Any, Any], sheet: BigRoomTables, event: StateEventNumbers) -> None:
    """Check that loading and reading lost no entry."""
    size = next(one.row.entry_count for one in sheet.groups if one.row.state_group == event.before)
    if len(state) != size:
        raise RuntimeError(f"{len(state)} entries read, {size} written")


async def _timed(
    bench: Bench, trips: Trips, question: Callable[[], Awaitable[Any]]
) -> dict[str, Any]:
    reads = bench.size(READS, 5)
    for _ in range(6):  # plans become generic
        await question()
    gc.collect()
    gc.freeze()  # keep the benchmark's own room out of garbage collection
    trips.count = 0
    latencies = []
    with spent(bench.server) as took:
        for _ in range(reads):
            start = time.perf_counter()
            answer = await question()
            latencies.append(time.perf_counter() - start)
            del answer  # freed off the clock
    gc.unfreeze()
    cpu = {
        "python_ms": round(took.python / reads * 1e3, 2),
        "postgres_ms": round(took.backends / reads * 1e3, 2),
    }
    best = {"min": round(min(latencies) * 1e3, 3)}
    return {
        "ms": best | percentiles(latencies, factor=1e3),
        "cpu": cpu,
        "statements": trips.count / reads,
    }


# ------------------------------------------------------------------------------------------------
# rules


@contextmanager
def _rule(radix: int, factor: float) -> Iterator[None]:
    """Use levels with another radix and another factor for roots."""
    before = paths.RADIX, paths.FACTOR
    paths.RADIX, paths.FACTOR = radix, factor  # type: ignore[misc]
    try:
        yield
    finally:
        paths.RADIX, paths.FACTOR = before  # type: ignore[misc]


def _rules(bench: Bench) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for radix, factor in RULES:
        for name, history in PATTERNS.items():
            with _rule(radix, factor):
                sheet = BigRoomTables.of(
                    history.smaller() if bench.quick else history, keep_events=False
                )
            told.setdefault(f"radix {radix}, factor {factor}", {})[name] = _written(
                sheet.groups, len(sheet.events)
            )
    return told


# ------------------------------------------------------------------------------------------------
# results


def _show(bench: Bench) -> None:
    sizes = {name: bench.results[name] for name in SIZES}
    keys = [
        "changes",
        "entries_per_change",
        "rows_max",
        "rows_mean",
        "roots",
        "mb",
        "bytes_per_change",
        "bytes_per_change_estimated",
    ]
    show(
        "state groups",
        ["room", *keys],
        [[name, *(one[key] for key in keys)] for name, one in sizes.items()],
    )
    rows = [
        [
            name,
            question,
            one["ms"]["min"],
            one["ms"]["p50"],
            one["cpu"]["python_ms"],
            one["cpu"]["postgres_ms"],
            one["statements"],
        ]
        for name, size in sizes.items()
        for question, one in size.get("reads", {}).items()
    ]
    show(
        "reads",
        ["room", "question", "min ms", "p50 ms", "Python CPU ms", "Postgres CPU ms", "statements"],
        rows,
    )
    keys = ["entries_per_change", "bytes_per_change_estimated", "rows_mean", "folded_over_size"]
    rows = [
        [rule, *(" / ".join(str(one[key]) for key in keys) for one in told.values())]
        for rule, told in bench.results["rules"].items()
    ]
    show(
        "rules: entries a change / bytes a change / rows a read / entries folded over size",
        ["rule", *PATTERNS],
        rows,
    )
