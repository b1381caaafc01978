"""The writer: group commit of appends one at a time, many at once, in batches, and in storms.

Events are parsed, hashed, authorised, and get their state and audience; signatures are measured
separately, at the end. Each round is followed by a round of the bare durable insert of the same
bytes on the same server, by one client: one row at a time, and 100 by `unnest`. On a busy machine,
compare the shares of a round, and not the rates.
"""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

import asyncpg

import storage
from benchmarks.harness import Bench, percentiles, show, spread
from storage.event import parse
from storage.persist.receive import check_signatures
from storage.persist.write.all_tables import SQL_WRITE
from storage.persist.write.messages_only import SQL_WRITE_MESSAGES, SQL_WRITE_ONE_MESSAGE
from storage.testing import SHAPES, RoomBuilder, Shape, generate_room, verify_keys

SEED: Final = 9_000
WRITES: Final = (SQL_WRITE, SQL_WRITE_MESSAGES, SQL_WRITE_ONE_MESSAGE)
TALKING: Final = SHAPES["small_chat"].replaced(
    mix={"message": 62, "reply": 8, "thread": 5, "reaction": 12, "edit": 4}
)
BASE_EVENTS: Final = 60  # per room, stored before the measurement
BARE_BATCH: Final = 100
BARE_ONES: Final = 500

RAW_TABLE: Final = (
    """CREATE TABLE raw (event_id text COLLATE "C" PRIMARY KEY, json bytea NOT NULL)"""
)
RAW_ONE: Final = "INSERT INTO raw (event_id, json) VALUES ($1::text, $2::bytea)"
RAW_MANY: Final = "INSERT INTO raw SELECT * FROM unnest($1::text[], $2::bytea[])"


class Pdu(NamedTuple):
    """An event as it is sent."""

    event_id: str
    pdu: bytes


@dataclass(frozen=True, slots=True)
class WriterScenario:
    """Clients that take the next batch in turn, each after its last result; ``kind``: of events."""

    name: str
    rooms: int
    batch: int
    clients: int
    events: int
    """Per round."""
    kind: str = "mix"


SCENARIOS: Final = (
    WriterScenario("talk, one at a time", 1, 1, 1, 1_000, "talk"),
    WriterScenario("talk, 64 at once, 50 rooms", 50, 1, 64, 6_000, "talk"),
    WriterScenario("talk, batches of 100, one room", 1, 100, 1, 6_000, "talk"),
    WriterScenario("talk, batches of 100, one room, from 4", 1, 100, 4, 8_000, "talk"),
    WriterScenario("one at a time", 1, 1, 1, 1_000),
    WriterScenario("64 at once, 50 rooms", 50, 1, 64, 4_000),
    WriterScenario("batches of 100, one room", 1, 100, 1, 4_000),
    WriterScenario("batches of 100, one room, from 4", 1, 100, 4, 8_000),
    WriterScenario("joins and leaves, 64 at once", 1, 1, 64, 1_500, "storm"),
    WriterScenario("64 at once, 1 room", 1, 1, 64, 2_000),
    WriterScenario("64 at once, 8 rooms", 8, 1, 64, 2_000),
    WriterScenario("64 at once, 200 rooms", 200, 1, 64, 2_000),
    WriterScenario("batches of 10, one room", 1, 10, 1, 1_500),
    WriterScenario("batches of 1,000, one room", 1, 1_000, 1, 3_000),
)


@dataclass(slots=True)
class WriterStatements:
    """An observer that counts statements, BEGIN and COMMIT, and among them the writes."""

    statements: Counter[str] = field(default_factory=Counter)

    def before(self, statement: str) -> None:
        """See `storage.database.connection.Observer`."""
        self.statements[statement] += 1

    def after(self, statement: str, seconds: float) -> None:
        """See `storage.database.connection.Observer`."""

    def writes(self) -> int:
        """Return the number of transactions that wrote."""
        return sum(self.statements[sql] for sql in WRITES)


class WriterRound(NamedTuple):
    """One round: events per second, round trips, and the latency of each batch in seconds."""

    events: int
    rate: float
    bare_one: float
    bare_many: float
    trips: int
    writes: int
    latencies: list[float]


async def run(bench: Bench) -> None:
    """Run all scenarios, then signatures."""
    for scenario in SCENARIOS:
        rounds = bench.size(3, 2)
        events = (
            scenario.events
            if not bench.quick
            else max(scenario.events // 25, scenario.batch * scenario.clients * 2)
        )
        base, batches = _input(scenario, events * rounds)
        if bench.profile:
            await _profile(bench, scenario, base, batches)
            continue
        bench.results[scenario.name] = _told(
            scenario, await _measure(bench, scenario, base, batches, rounds)
        )
    if not bench.profile:
        bench.results["signatures"] = await _signatures(bench.size(2_000, 200))
        bench.write()
        _show(bench)


# ------------------------------------------------------------------------------------------------
# input


def _input(scenario: WriterScenario, events: int) -> tuple[list[list[bytes]], list[list[Pdu]]]:
    """Return the events stored before, and the batches in the order in which they are taken."""
    each = -(-events // scenario.rooms)
    rooms = [KINDS[scenario.kind](each, SEED + number) for number in range(scenario.rooms)]
    in_turn = [
        event for row in zip(*(room[BASE_EVENTS:] for room in rooms), strict=True) for event in row
    ]
    batches = [in_turn[at : at + scenario.batch] for at in range(0, len(in_turn), scenario.batch)]
    return [[event.pdu for event in room[:BASE_EVENTS]] for room in rooms], batches


def _mix(events: int, seed: int) -> list[Pdu]:
    """Return the usual mix: one event in sixteen changes the state, one in a hundred forks."""
    return _room(SHAPES["small_chat"], events, seed)


def _talk(events: int, seed: int) -> list[Pdu]:
    """Return the mix without state changes: messages, replies, threads, reactions, edits."""
    return _room(TALKING, events, seed)


def _room(shape: Shape, events: int, seed: int) -> list[Pdu]:
    return [
        Pdu(event.event_id, event.pdu)
        for event in generate_room(shape, BASE_EVENTS + events, seed=seed)
    ]


def _storm(events: int, seed: int) -> list[Pdu]:
    room = RoomBuilder("11", seed=seed, sign=False)
    room.start(room.user(0))
    at = 0
    while len(room.events) < BASE_EVENTS + events:
        user = room.user(1 + at % 300)
        (room.leave if room.membership(user) == "join" else room.join)(user)
        at += 1
    return [Pdu(event.event_id, event.pdu) for event in room.events[: BASE_EVENTS + events]]


KINDS: Final = {"mix": _mix, "talk": _talk, "storm": _storm}


# ------------------------------------------------------------------------------------------------
# measuring


async def _measure(
    bench: Bench,
    scenario: WriterScenario,
    base: list[list[bytes]],
    batches: list[list[Pdu]],
    rounds: int,
) -> list[WriterRound]:
    sent = WriterStatements()
    async with (
        bench.database() as dsn,
        bench.database() as raw_dsn,
        storage.open(dsn, server_name="s1.test", observer=sent) as store,
        asyncpg.create_pool(raw_dsn, min_size=1, max_size=1) as pool,
    ):
        await pool.execute(RAW_TABLE)
        for pdus in base:
            await store.append(pdus)
        gc.collect()
        gc.freeze()  # the collector then handles only the store's objects
        size = len(batches) // rounds
        # Warm up the statements of both sides.
        await _clients(store, scenario.clients, iter(batches[: size // 10]), [])
        measured = []
        for number in range(rounds):
            part = batches[number * size : (number + 1) * size]
            measured.append(
                await _round(
                    store, sent, scenario.clients, part[size // 10 :] if number == 0 else part, pool
                )
            )
        gc.unfreeze()
        return measured


async def _round(
    store: storage.Store, sent: WriterStatements, clients: int, batches: list[list[Pdu]], pool: Any
) -> WriterRound:
    events = [event for batch in batches for event in batch]
    ones = min(BARE_ONES, len(events) // 4)
    bare_one = await _bare(pool, RAW_ONE, events[:ones])
    rest = events[ones:]
    many = [rest[at : at + BARE_BATCH] for at in range(0, len(rest), BARE_BATCH)]
    bare_many = await _bare(
        pool,
        RAW_MANY,
        [([one.event_id for one in part], [one.pdu for one in part]) for part in many],
        len(rest),
    )
    sent.statements.clear()
    latencies: list[float] = []
    start = time.perf_counter()
    await _clients(store, clients, iter(batches), latencies)
    rate = len(events) / (time.perf_counter() - start)
    return WriterRound(
        len(events), rate, bare_one, bare_many, sent.statements.total(), sent.writes(), latencies
    )


async def _clients(
    store: storage.Store, clients: int, batches: Iterator[list[Pdu]], latencies: list[float]
) -> None:
    await asyncio.gather(*(_append_all(store, batches, latencies) for _ in range(clients)))


async def _append_all(
    store: storage.Store, batches: Iterator[list[Pdu]], latencies: list[float]
) -> None:
    for batch in batches:
        start = time.perf_counter()
        results = await store.append([event.pdu for event in batch])
        latencies.append(time.perf_counter() - start)
        if any(result.outcome not in {"stored", "soft_failed"} for result in results):
            raise RuntimeError(f"not stored: {results}")


async def _bare(
    pool: Any, sql: str, rows: Sequence[Iterable[Any]], events: int | None = None
) -> float:
    """Return events per second of the bare insert, one execution after the other."""
    async with pool.acquire() as connection:
        statement = await connection.prepare(sql)
        start = time.perf_counter()
        for row in rows:
            await statement.fetch(*row)
        return (len(rows) if events is None else events) / (time.perf_counter() - start)


async def _profile(
    bench: Bench, scenario: WriterScenario, base: list[list[bytes]], batches: list[list[Pdu]]
) -> None:
    async with bench.database() as dsn, storage.open(dsn, server_name="s1.test") as store:
        for pdus in base:
            await store.append(pdus)
        with bench.profiled(scenario.name, sum(map(len, batches))):
            await _clients(store, scenario.clients, iter(batches), [])


async def _signatures(count: int) -> dict[str, float]:
    """Return microseconds of one event's signature check, and of its parsing and hashing."""
    events = [event.pdu for event in generate_room(SHAPES["small_chat"], count, seed=SEED)]
    start = time.perf_counter()
    parsed = [parse(pdu, SHAPES["small_chat"].version) for pdu in events]
    parsing = time.perf_counter() - start
    keys = verify_keys({event.sender.split(":", 1)[1] for event in parsed})
    start = time.perf_counter()
    refused = [
        answer for event in parsed if (answer := await check_signatures(event, keys)) is not None
    ]
    checking = time.perf_counter() - start
    if refused:
        raise RuntimeError(f"refused: {refused[:3]}")
    return {
        "parse_us": round(parsing / count * 1e6, 1),
        "signature_check_us": round(checking / count * 1e6, 1),
    }


# ------------------------------------------------------------------------------------------------
# results


def _told(scenario: WriterScenario, rounds: list[WriterRound]) -> dict[str, Any]:
    writes = sum(one.writes for one in rounds)
    return asdict(scenario) | {
        "rounds": len(rounds),
        "events_per_second": spread([one.rate for one in rounds]),
        "batch_ms": percentiles(
            [latency for one in rounds for latency in one.latencies], factor=1_000
        ),
        "bare_one_row_per_second": spread([one.bare_one for one in rounds]),
        "bare_unnest_100_per_second": spread([one.bare_many for one in rounds]),
        "share_of_bare_one_row": spread([one.rate / one.bare_one for one in rounds], digits=3),
        "share_of_bare_unnest_100": spread([one.rate / one.bare_many for one in rounds], digits=3),
        "events_per_write": round(sum(one.events for one in rounds) / writes, 2),
        "round_trips_per_write": round(sum(one.trips for one in rounds) / writes, 2),
    }


def _show(bench: Bench) -> None:
    columns = [
        "scenario",
        "events/s",
        "p50 ms",
        "p99 ms",
        "events/write",
        "trips/write",
        "bare 1",
        "share",
        "bare 100",
        "share",
    ]
    rows = [
        [
            name,
            f"{one['events_per_second']['median']:,.0f}",
            f"{one['batch_ms']['p50']:.2f}",
            f"{one['batch_ms']['p99']:.2f}",
            one["events_per_write"],
            one["round_trips_per_write"],
            f"{one['bare_one_row_per_second']['median']:,.0f}",
            f"{one['share_of_bare_one_row']['median']:.0%}",
            f"{one['bare_unnest_100_per_second']['median']:,.0f}",
            f"{one['share_of_bare_unnest_100']['median']:.0%}",
        ]
        for name, one in bench.results.items()
        if name != "signatures"
    ]
    show(
        "the writer (medians over rounds; shares of the bare insert in the same round)",
        columns,
        rows,
    )
    show(
        "signatures, apart", ["parse us", "check us"], [list(bench.results["signatures"].values())]
    )
