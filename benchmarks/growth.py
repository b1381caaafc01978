"""Growth of each read from a room of 1,000 events to one of 16,000, in each state of statistics.

The reads are those of the catalogue (`room-storage explain`), the states those of
benchmarks/statistics_states.py. Each read runs in a session as a store opens it, so by its generic
plan. CPU is that of this process and of Postgres together, the median of the rounds. Rows are those
that the plans touch.
"""

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import storage
from benchmarks.crowd import EVERYWHERE, SERVER
from benchmarks.harness import Bench, note, show
from benchmarks.statistics_states import MEMBER, STATES, BigRoom, StatesServer
from storage.database.connection import Connection
from storage.store.catalogue import QUESTIONS, QueryArguments, prepared, token_behind

SIZES: Final = (1_000, 16_000)
QUICK_SIZES: Final = (1_000, 2_000)
WARM: Final = 3
LIMIT: Final = 100
BEHIND: Final = 50
GROWTH_MAX: Final = 1.5
PAGE_MS_MAX: Final = 2.0
PAGES: Final = ("messages", "messages-forwards", "messages-since")
REMOTE: Final = "h0.test"


async def run(bench: Bench) -> None:
    """Measure every read in every state, in rooms of both sizes."""
    sizes, rounds = (QUICK_SIZES, 3) if bench.quick else (SIZES, 30)
    async with bench.database() as dsn:
        server = StatesServer(
            bench.server.dsn, dsn.rpartition("/")[2].partition("?")[0], f"growth_{time.time_ns()}"
        )
        try:
            for state in STATES:
                note(state.name)
                found = []
                for events in sizes:
                    room = await server.create(state, events)
                    found.append(await _measured(room, rounds))
                    await server.drop(room)
                bench.results[state.name] = {name: _compared(found, name) for name in QUESTIONS}
                bench.write()
        finally:
            await server.close()


def summary(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print for each read the state in which it grows most."""
    columns = ["read", "largest growth", "in the state", "ms there", "rows"]
    show("Growth of reads", columns, _rows(results))


async def _measured(room: BigRoom, rounds: int) -> dict[str, dict[str, Any]]:
    """Return milliseconds of CPU and the rows touched, by the name of the read."""
    async with (
        storage.open(room.dsn, server_name=SERVER) as store,
        store.database.transaction(isolation="repeatable_read", readonly=True) as conn,
    ):
        given = await _arguments(conn, room)
        backend = Path(f"/proc/{conn.backend_pid}/schedstat")
        found = {}
        for name in QUESTIONS:
            times = []
            for _ in range(WARM + rounds):
                call = await prepared(store.database, conn, name, given)
                times.append(await _cpu_ms(backend, call.run))
            call = await prepared(store.database, conn, name, given)
            plans = await call.plans(generic=True)
            found[name] = {
                "cpu_ms": round(statistics.median(times[WARM:]), 3),
                "rows": sum(plan.rows for plan in plans),
            }
        return found


async def _arguments(conn: Connection, room: BigRoom) -> QueryArguments:
    return QueryArguments(
        room=room.room_id,
        user=MEMBER if room.state.others else EVERYWHERE,
        event=room.root_id,
        server=REMOTE,
        since=await token_behind(conn, BEHIND),
        timestamp=room.middle_ts,
        limit=LIMIT,
    )


async def _cpu_ms(backend: Path, call: Callable[[], Awaitable[object]]) -> float:
    """Run a read once; return the milliseconds that it used here and in Postgres."""
    before, python = _postgres_ns(backend), time.process_time()
    await call()
    python = time.process_time() - python
    return python * 1_000 + (_postgres_ns(backend) - before) / 1e6


def _postgres_ns(backend: Path) -> int:
    return int(backend.read_text().split()[0])


def _compared(found: Sequence[Mapping[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    small, large = (one[name] for one in found)
    return {
        "small": small,
        "large": large,
        "growth": round(large["cpu_ms"] / small["cpu_ms"], 2),
        "growth_of_rows": round(large["rows"] / max(small["rows"], 1), 2),
    }


def _rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return for each read the state in which it grows most."""
    rows = []
    for name in QUESTIONS:
        state = max(results, key=lambda one: float(results[one][name]["growth"]))
        worst = results[state][name]
        touched = f"{worst['small']['rows']:,} / {worst['large']['rows']:,}"
        rows.append(
            [name, f"{worst['growth']:.2f}", state, f"{worst['large']['cpu_ms']:.2f}", touched]
        )
    return rows


def rendered(document: Mapping[str, Any]) -> str:
    """Return the table of the page, and what lies beyond the goals."""
    results = document["results"]
    lines = [
        "| Read | Largest growth | In the state | CPU there | Rows, small / large room |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {growth} | {state} | {ms} ms | {rows} |"
            for name, growth, state, ms, rows in _rows(results)
        ),
    ]
    beyond = [
        f"- {name} in the state {state}: {one['growth']:.2f}, {one['large']['cpu_ms']:.2f} ms"
        for state, reads in results.items()
        for name, one in reads.items()
        if one["growth"] > GROWTH_MAX or (name in PAGES and one["large"]["cpu_ms"] > PAGE_MS_MAX)
    ]
    told = ["Beyond the goals:", "", *beyond] if beyond else ["All are within the goals."]
    return "\n".join([*lines, "", *told])
