"""Where the time of an append goes, and what it buys: processor time by part, of Python and of Postgres, per event.

    python -m benchmarks profile       # benchmarks/results/profile.json, and docs/append-profile.md from it

Python is looked at every so often in its own CPU time (`Sampler`), and each look counts for the innermost function that is of the engine or of
the driver, with what that calls in C. Looks are some hundreds, so parts below one in a hundred say little. Postgres is told by its clocks.
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
from benchmarks.harness import Bench, Sampler, Spent, note, show, spent
from storage.testing import SHAPES, stream_room

SERVER: Final = "s1.test"
SEED: Final = 8_000
PAGE: Final = Path(__file__).parents[1] / "docs" / "append-profile.md"
ELSEWHERE: Final = "event loop, benchmark"


class ProfilePart(NamedTuple):
    """Some files of the engine, by how their paths begin, and what their time buys."""

    name: str
    buys: str
    files: tuple[str, ...]


PARTS: Final = (
    ProfilePart("read and hash", "limits, ids, numbers; content hash and event id: two encodings, two SHA-256", ("storage/event/",)),
    ProfilePart("take in", "the room's version, parents before children, an answer per event", ("storage/persist/receive", "storage/persist/append", "storage/persist/given_states", "storage/persist/model/results", "storage/store/", "storage/observability/instrument")),
    ProfilePart("load", "what the caches lack, in one statement", ("storage/persist/load/",)),
    ProfilePart("authorise", "the auth rules against the auth events, the state before it, the current state", ("storage/auth/", "storage/persist/plan/auth_checks")),
    ProfilePart("state", "the state after it, forks merged, auth chains", ("storage/state/", "storage/graph/", *(f"storage/persist/plan/{name}" for name in ("state", "auth_difference", "auth_walk", "chain_cover", "extremity_limit", "resolution_events")))),
    ProfilePart("sight", "who may see it, for every reader to come", ("storage/visibility/", "storage/persist/plan/audience")),
    ProfilePart("plan", "order, extremities, redactions, relations; a draft that can be dropped", ("storage/persist/plan/", "storage/persist/model/event_changes", "storage/persist/model/change_set", "storage/persist/model/cache")),
    ProfilePart("rows", "one array a column, as text, for one statement", ("storage/persist/model/rows", "storage/database/array_text", "storage/persist/write/")),
    ProfilePart("queue and commit", "many appends in one commit, tried again where a room moved; caches filled", ("storage/persist/",)),
    ProfilePart("tell", "positions, notifier, caches of readers", ("storage/streams/", "storage/replication/")),
    ProfilePart("driver", "sending and reading, a connection at hand", ("asyncpg/", "storage/database/")),
    ProfilePart("names, measures", "numbers for ids, metrics", ("storage/",)),
)  # fmt: skip


class ProfileScenario(NamedTuple):
    """So many events of a small chat by one caller, in batches."""

    name: str
    batch: int
    events: int


SCENARIOS: Final = (
    ProfileScenario("one at a time", 1, 4_000),
    ProfileScenario("batches of 100", 100, 24_000),
)


async def run(bench: Bench) -> None:
    """Each scenario in a fresh database; the page is written from full runs alone."""
    for scenario in SCENARIOS:
        bench.results[scenario.name] = await _measure(
            bench, scenario, max(scenario.events // (20 if bench.quick else 1), 10 * scenario.batch)
        )
    path = bench.write()
    rows = [
        [part, *(bench.results[one.name]["python_us"].get(part, 0) for one in SCENARIOS)]
        for part in _names(bench.results)
    ]
    show(
        "processor time of an append, us an event", ["part", *(one.name for one in SCENARIOS)], rows
    )
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
        await _append(store, pdus[:warm], scenario.batch)
        gc.collect()
        gc.freeze()
        sampler = Sampler()
        with spent(bench.server) as used, _collector() as collected, sampler.running():
            await _append(store, pdus[warm:], scenario.batch)
        gc.unfreeze()
    return _told(sampler, used, collected(), count)


async def _append(store: storage.Store, pdus: Sequence[bytes], batch: int) -> None:
    for at in range(0, len(pdus), batch):
        results = await store.append(pdus[at : at + batch])
        if any(result.outcome not in {"stored", "soft_failed"} for result in results):
            raise RuntimeError(f"not stored: {results[:3]}")


@contextmanager
def _collector() -> Iterator[Callable[[], float]]:
    """CPU seconds that the collector of garbage takes during the block; it falls into whatever part made it run."""
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
    """The part that a file's time belongs to; "" is a look outside of engine and driver."""
    for part in PARTS:
        if any(f"/{begin}" in file for begin in part.files):
            return part.name
    return ELSEWHERE


def _names(results: dict[str, Any]) -> list[str]:
    """The parts that were met, in the order in which an event goes through them."""
    met = {name for one in results.values() for name in one["python_us"]}
    return [name for name in [*(part.name for part in PARTS), ELSEWHERE] if name in met]


def page(document: dict[str, Any]) -> str:
    """The table in Markdown, of a results file."""
    results, on = document["results"], document["on"]
    buys = {part.name: part.buys for part in PARTS} | {
        ELSEWHERE: "tasks and futures; the callers themselves"
    }
    kinds = list(results)
    lines = [
        "# Where the time of an append goes",
        "",
        "Made by `python -m benchmarks profile`: processor time in microseconds an event, of a small chat with 6 % state events and 3 % forks,",
        "by the part of the engine in which it is spent. Signatures are not checked.",
        "",
        f"Commit {on['commit']}, {document['when'][:10]}; Python {on['python']}, {on['postgres']}.",
        f"{on['machine']['processor']}, {on['machine']['cores']} cores; the load was {on['machine']['load'][1]:.0f}.",
        "",
        f"| | {' | '.join(kinds)} | what it buys |",
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
            "of that the collector of garbage: "
            + ", ".join(f"{results[kind]['of_it_collector_us']}" for kind in kinds),
        ),
        "**Postgres, the statement**": (
            "postgres_us",
            "the statement",
            "rows, indexes, commit, compare and set of the room's version",
        ),
        "**Postgres, log and pages**": (
            "postgres_us",
            "log and pages",
            "what was committed survives",
        ),
        "on the clock": (
            "clock_us",
            None,
            "with the wait for the disk, and for a processor if others are busy",
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
