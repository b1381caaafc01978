"""The CPU time of an append by part, of Python and of Postgres, per event.

  python -m benchmarks profile

It writes benchmarks/results/profile.json and docs/benchmarks/append-profile.md.

Python is sampled by its CPU time (`Sampler`). Each sample counts for the innermost function of the
engine or the driver, including the C functions it calls. There are some hundreds of samples, so
parts below one in a hundred say little. Postgres' time comes from its processes' clocks.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import storage
from benchmarks.figures import read
from benchmarks.harness import Bench, Sampler, Spent, append_all, note, spent
from storage.testing import SHAPES, stream_room

SERVER: Final = "s1.test"
SEED: Final = 8_000
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks" / "append-profile.md"
ELSEWHERE: Final = "event loop, benchmark"


class ProfilePart(NamedTuple):
    """Some files of the engine, by prefixes of their paths, and the purpose of their time."""

    name: str
    buys: str
    files: tuple[str, ...]


PARTS: Final = (
    ProfilePart(
        "read and hash",
        "limits, ids, numbers; content hash and event id: two encodings, two SHA-256",
        ("storage/event/",),
    ),
    ProfilePart(
        "encode",
        "the stored form of the bytes: compact form, zstd with a dictionary, checksum",
        ("storage/codec/",),
    ),
    ProfilePart(
        "take in",
        "the room's version, parents before children, a result per event",
        (
            *(f"storage/persist/{name}" for name in ("receive", "append")),
            "storage/persist/model/results",
            "storage/store/",
            "storage/observability/instrument",
        ),
    ),
    ProfilePart("load", "data that the caches lack, in one statement", ("storage/persist/load/",)),
    ProfilePart(
        "authorise",
        "the auth rules against the auth events, the state before it, the current state",
        ("storage/auth/", "storage/persist/plan/auth_checks"),
    ),
    ProfilePart(
        "state",
        "the state after it, forks merged, auth chains",
        (
            "storage/state/",
            "storage/graph/",
            "storage/persist/plan/state",
            "storage/persist/plan/auth_difference",
        ),
    ),
    ProfilePart(
        "sight",
        "its visibility, for all later readers",
        ("storage/visibility/", "storage/persist/plan/audience"),
    ),
    ProfilePart(
        "plan",
        "position, extremities, redactions, relations; a change set that can be dropped",
        (
            "storage/persist/plan/",
            *(f"storage/persist/model/{name}" for name in ("change_set", "cache")),
        ),
    ),
    ProfilePart(
        "rows",
        "one array per column, as text, for one statement",
        (
            *(f"storage/database/{name}" for name in ("columns", "placeholders")),
            "storage/persist/model/rows",
            "storage/persist/write/",
        ),
    ),
    ProfilePart(
        "queue and commit",
        "many appends in one commit, retried after a conflict; caches filled",
        ("storage/persist/",),
    ),
    ProfilePart(
        "tell",
        "positions, notifier, caches of readers",
        ("storage/streams/", "storage/replication/"),
    ),
    ProfilePart(
        "driver",
        "sending and receiving, a ready connection",
        ("asyncpg/", "storage/database/"),
    ),
    ProfilePart("names, measures", "nids for ids, metrics", ("storage/",)),
)


class ProfileScenario(NamedTuple):
    """Events of a small chat by one caller, in batches."""

    name: str
    batch: int
    events: int


SCENARIOS: Final = (
    ProfileScenario("one at a time", 1, 4_000),
    ProfileScenario("batches of 100", 100, 24_000),
)


async def run(bench: Bench) -> None:
    """Run each scenario in a fresh database; only full runs write the page."""
    for scenario in SCENARIOS:
        bench.results[scenario.name] = await _measure(
            bench, scenario, max(scenario.events // (20 if bench.quick else 1), 10 * scenario.batch)
        )
    path = bench.write()
    if not bench.quick:
        PAGE.write_text(page(read(path)), encoding="utf-8")
        note(f"{PAGE} written from {path}")


async def _measure(bench: Bench, scenario: ProfileScenario, count: int) -> dict[str, Any]:
    warm = 10 * scenario.batch + 200
    pdus = [
        event.pdu
        for event in stream_room(SHAPES["small_chat"], warm + count, seed=SEED, sign=False)
    ]
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        await append_all(store, pdus[:warm], scenario.batch)
        gc.collect()
        gc.freeze()
        sampler = Sampler()
        with spent(bench.server) as used, _collector() as collected, sampler.running():
            await append_all(store, pdus[warm:], scenario.batch)
        gc.unfreeze()
    return _told(sampler, used, collected(), count)


@contextmanager
def _collector() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the garbage collector's CPU seconds during the block.

    They count for the part that made it run.
    """
    seconds, began = 0.0, 0.0

    def noted(phase: str, _: dict[str, int]) -> None:
        nonlocal seconds, began
        if phase == "start":
            began = time.process_time()
        else:
            seconds += time.process_time() - began

    gc.callbacks.append(noted)
    try:
        yield lambda: seconds
    finally:
        gc.callbacks.remove(noted)


def _told(sampler: Sampler, used: Spent, collected: float, count: int) -> dict[str, Any]:
    looks: Counter[str] = Counter()
    for file, times in sampler.innermost.items():
        looks[part_of(file)] += times
    each = sampler.seconds / max(looks.total(), 1) / count * 1e6
    return {
        "events": count,
        "looks": looks.total(),
        "python_us": {name: round(times * each, 1) for name, times in looks.most_common()},
        "python_all_us": round(sampler.seconds / count * 1e6, 1),
        "of_it_collector_us": round(collected / count * 1e6, 1),
        "postgres_us": {
            "the statement": round(used.backends / count * 1e6, 1),
            "log and pages": round(used.background / count * 1e6, 1),
        },
        "clock_us": round(used.clock / count * 1e6, 1),
    }


def part_of(file: str) -> str:
    """Return the part of a file's time; "" is a sample outside of engine and driver."""
    for part in PARTS:
        if any(f"/{begin}" in file for begin in part.files):
            return part.name
    return ELSEWHERE


def _names(results: dict[str, Any]) -> list[str]:
    """Return the sampled parts, in the order in which an event goes through them."""
    met = {name for one in results.values() for name in one["python_us"]}
    return [name for name in [*(part.name for part in PARTS), ELSEWHERE] if name in met]


def page(document: dict[str, Any]) -> str:
    """Return the table of a results file in Markdown."""
    results, on = document["results"], document["on"]
    buys = {part.name: part.buys for part in PARTS} | {
        ELSEWHERE: "tasks and futures; the callers themselves"
    }
    kinds = list(results)
    lines = [
        "# Where the time of an append goes",
        "",
        "Made by `python -m benchmarks profile`: CPU time in microseconds per event, by the part",
        "of the engine. The events are a small chat with 6 % state events and 3 % forks.",
        "Signatures are not checked.",
        "",
        f"Commit {on['commit']}, {document['when'][:10]}; Python {on['python']}, {on['postgres']}.",
        (
            f"{on['machine']['processor']}, {on['machine']['cores']} cores;"
            f" the load was {on['machine']['load'][1]:.0f}."
        ),
        "",
        f"| | {' | '.join(kinds)} | purpose |",
        f"|---|{'---|' * len(kinds)}---|",
    ]
    lines += [
        _line(name, [results[kind]["python_us"].get(name, 0.0) for kind in kinds], buys[name])
        for name in _names(results)
    ]
    sums = {
        "**Python**": (
            "python_all_us",
            None,
            "of that the garbage collector: "
            + ", ".join(f"{results[kind]['of_it_collector_us']}" for kind in kinds),
        ),
        "**Postgres, the statement**": (
            "postgres_us",
            "the statement",
            "rows, indexes, commit, compare-and-set of the room's version",
        ),
        "**Postgres, log and pages**": (
            "postgres_us",
            "log and pages",
            "durability of commits",
        ),
        "on the clock": (
            "clock_us",
            None,
            "with the wait for the disk, and for a CPU under other load",
        ),
    }
    for name, (key, inner, text) in sums.items():
        lines.append(
            _line(
                name,
                [
                    results[kind][key] if inner is None else results[kind][key][inner]
                    for kind in kinds
                ],
                text,
            )
        )
    return "\n".join(lines) + "\n"


def _line(name: str, values: Sequence[float], text: str) -> str:
    return f"| {name} | {' | '.join(f'{value:,.1f}' for value in values)} | {text} |"
