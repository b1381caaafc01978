"""Storing the same signed events here and in Synapse, in turn, on one Postgres.

Both sides take text and end with durable rows, and neither checks signatures. Here that is
`store.append`: parsing, content hash, authorisation, state, visibility. There it is Synapse's own
code for an event that it has accepted: event object, state before it, state group, persist. The
scenario "received over federation" adds authorisation, push rules and notifications: everything
that a transaction of another server goes through after its signatures.

Not comparable: Synapse has no batches of unrelated rooms. A batch there is a chain of events in one
room, as for the first events of a room that it creates, so rooms of that scenario have no forks.
Its statements are counted where they pass, one for several pages of rows. Its background work (user
directory, room statistics: its defaults) counts in the scenario in which it happens.
"""

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import asyncpg

from benchmarks.harness import Bench, Trips, append_all, append_timed, percentiles, spent, spread
from benchmarks.peers import limits
from benchmarks.peers.process import SynapseProcess
from storage import Store
from storage.testing import SHAPES, GeneratedRoom, RoomBuilder, Shape, generate_room

BASE_EVENTS: Final = 30  # of each room, stored before the measurement
BATCH: Final = 100
SQL_WAL: Final = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
SQL_BYTES: Final = """
SELECT sum(pg_total_relation_size(class.oid))
FROM pg_class class
    JOIN pg_namespace namespace ON namespace.oid = class.relnamespace
WHERE class.relkind IN ('r', 'm', 'S')
    AND namespace.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
"""

SQL_BYTES_OF: Final = """
SELECT COALESCE(sum(pg_total_relation_size(class.oid)), 0)
FROM pg_class class
WHERE class.relname = ANY($1::text[]) AND class.relkind = 'r'
"""
# no counterpart here: full-text search, and rows that are deleted after some time
PEER_EXTRAS: Final = [
    "cache_invalidation_stream_by_instance",
    "event_push_actions",
    "event_push_actions_staging",
    "event_push_summary",
    "event_search",
    "event_txn_id",
    "event_txn_id_device_id",
    "stream_ordering_to_exterm",
    "user_directory",
    "user_directory_search",
]

STEADY: Final = SHAPES["small_chat"].replaced(fork_rate=0.0)


@dataclass(frozen=True, slots=True)
class PeerScenario:
    """Clients that store batches, each after its last is done; each has separate rooms, in turn."""

    name: str
    seed: int
    rooms: int
    batch: int
    clients: int
    how: str
    """What the peer does: see its driver's `persist`."""
    shape: Shape = SHAPES["small_chat"]
    storm: bool = False
    base: int = BASE_EVENTS


def scenarios(bench: Bench) -> list[PeerScenario]:
    """Return the scenarios in the order in which they run."""
    members, rooms = bench.size(5_000, 200), bench.size(10, 4)
    crowd = SHAPES["big_room"].replaced(members=members, rush=1.0, fork_rate=0.0)
    return [
        PeerScenario("one at a time, small rooms", 11_000, rooms, 1, 1, "single"),
        PeerScenario("one at a time, received over federation", 12_000, rooms, 1, 1, "receive"),
        PeerScenario("8 rooms at once", 13_000, 8, 1, 8, "single"),
        PeerScenario("batches of 10, one room", 14_000, 1, 10, 1, "linear", STEADY),
        PeerScenario("batches of 100, one room", 15_000, 1, 100, 1, "linear", STEADY),
        PeerScenario("joins and leaves, one at a time", 16_000, 1, 1, 1, "single", storm=True),
        PeerScenario(
            f"one at a time, room of {members:,} members",
            17_000,
            1,
            1,
            1,
            "single",
            crowd,
            base=members + BASE_EVENTS,
        ),
    ]


# ------------------------------------------------------------------------------------------------
# input


class SentRoom(NamedTuple):
    """A room as it is sent."""

    room_id: str
    version: str
    pdus: list[bytes]


def rooms_of(scenario: PeerScenario, events: int) -> list[SentRoom]:
    """Return its rooms, with `events` in all after their bases."""
    each = scenario.base + -(-events // scenario.rooms)
    return [
        _storm(each, scenario.seed + number)
        if scenario.storm
        else _chat(scenario.shape, each, scenario.seed + number)
        for number in range(scenario.rooms)
    ]


def _chat(shape: Shape, events: int, seed: int) -> SentRoom:
    room: GeneratedRoom = generate_room(shape, events, seed=seed)
    return SentRoom(room.room_id, room.room_version, [event.pdu for event in room])


def _storm(events: int, seed: int) -> SentRoom:
    """Return a room of 300 users who come and go, and one of this server who stays.

    Synapse would leave a room without a local user.
    """
    room = RoomBuilder("11", seed=seed)
    room.start("@stays:s1.test")
    at = 0
    while len(room.events) < events:
        user = room.user(1 + at % 300)
        (room.leave if room.membership(user) == "join" else room.join)(user)
        at += 1
    return SentRoom(room.room_id, "11", room.pdus[:events])


def clients_of(
    scenario: PeerScenario, rooms: Sequence[SentRoom], start: int, end: int
) -> list[list[list[bytes]]]:
    """Return the batches of each client: its rooms' events from `start` to `end` after the base."""
    found = []
    for client in range(scenario.clients):
        own = [
            room.pdus[scenario.base + start : scenario.base + end]
            for room in rooms[client :: scenario.clients]
        ]
        in_turn = [pdu for row in zip(*own, strict=True) for pdu in row]
        found.append(
            [in_turn[at : at + scenario.batch] for at in range(0, len(in_turn), scenario.batch)]
        )
    return found


# ------------------------------------------------------------------------------------------------
# both sides


@dataclass(slots=True)
class StatementCounts(Trips):
    """An observer that counts statements without BEGIN and COMMIT, and transactions.

    The store's background queries, some a second, are left out.
    """

    statements: int = 0
    transactions: int = 0
    _open: set[int] = field(default_factory=set)

    def before(self, statement: str) -> None:
        if self.is_upkeep():
            return
        task = id(asyncio.current_task())
        if statement.startswith("BEGIN"):
            self._open.add(task)
            self.transactions += 1
        elif statement.startswith(("COMMIT", "ROLLBACK")):
            self._open.discard(task)
        else:
            self.statements += 1
            self.transactions += task not in self._open


class PeerWriteRound(NamedTuple):
    """One round of one side; seconds, and counts of the whole round."""

    events: int
    seconds: float
    python: float
    postgres: float
    statements: int
    transactions: int
    wal: int
    latencies: list[float]


@dataclass(slots=True)
class Sides:
    """Both sides, and a monitoring connection for each."""

    bench: Bench
    store: Store
    counts: StatementCounts
    peer: SynapseProcess | None
    """None if only this side runs."""
    raw: Any
    """A pool on a database for the bare inserts."""
    looks: dict[str, Any]

    async def known(self, rooms: Sequence[SentRoom]) -> None:
        """Register rooms with the peer before their events come."""
        for room in rooms if self.peer else ():
            assert self.peer is not None
            await self.peer.ask("room", room_id=room.room_id, room_version=room.version)

    async def begin(self, scenario: PeerScenario, rooms: Sequence[SentRoom]) -> None:
        """Store the bases on both sides."""
        await self.known(rooms)
        how, size = (
            ("linear", BATCH) if scenario.shape.fork_rate == 0 or scenario.storm else ("single", 1)
        )
        base = [room.pdus[: scenario.base] for room in rooms]
        for pdus in base:
            await append_all(self.store, pdus, BATCH)
        if self.peer:
            await self.peer.load(
                [[pdus[at : at + size] for at in range(0, len(pdus), size)] for pdus in base]
            )
            await self.peer.ask("persist", how=how)
            await self.peer.ask("settle", quiet_seconds=0.5, timeout_seconds=20.0)

    async def ours(self, clients: list[list[list[bytes]]]) -> PeerWriteRound:
        """Run a round here."""
        events, latencies = _count(clients), list[float]()
        statements, transactions = self.counts.statements, self.counts.transactions
        still()
        wal = await self.looks["ours"].fetchval(SQL_WAL)
        with spent(self.bench.server) as used:
            await asyncio.gather(
                *(append_timed(self.store, batches, latencies) for batches in clients)
            )
        wal = await self.looks["ours"].fetchval(SQL_WAL) - wal
        counted = (self.counts.statements - statements, self.counts.transactions - transactions)
        return PeerWriteRound(
            events, used.clock, used.python, used.backends, *counted, int(wal), latencies
        )

    async def theirs(self, clients: list[list[list[bytes]]], how: str) -> PeerWriteRound:
        """Run a round there."""
        assert self.peer is not None
        return await asked_to_persist(self.bench, self.peer, self.looks["synapse"], clients, how)

    async def sizes(self) -> dict[str, int]:
        """Return the bytes of all tables and indexes of each side."""
        return {name: int(await look.fetchval(SQL_BYTES)) for name, look in self.looks.items()}

    async def extras(self) -> int:
        """Return the bytes of the peer's tables that have no counterpart here."""
        return int(await self.looks["synapse"].fetchval(SQL_BYTES_OF, PEER_EXTRAS))


async def asked_to_persist(
    bench: Bench, peer: SynapseProcess, look: Any, clients: list[list[list[bytes]]], how: str
) -> PeerWriteRound:
    """Run a round in a peer; `look` is a monitoring connection to its database."""
    await peer.load(clients)
    await peer.ask("still")
    wal = await look.fetchval(SQL_WAL)
    with spent(bench.server) as used:
        told = await peer.ask("persist", how=how)
    wal = await look.fetchval(SQL_WAL) - wal
    return PeerWriteRound(
        _count(clients),
        told["seconds"],
        told["python_seconds"],
        used.backends,
        told["statements"],
        told["transactions"],
        int(wal),
        told["latencies"],
    )


def still() -> None:
    """Collect garbage, and take what is left out of the next collections: both sides do."""
    gc.collect()
    gc.freeze()


def _count(clients: list[list[list[bytes]]]) -> int:
    return sum(len(batch) for batches in clients for batch in batches)


async def connect(sides: dict[str, str]) -> dict[str, Any]:
    """Open a monitoring connection to each database."""
    return {name: await asyncpg.connect(dsn) for name, dsn in sides.items()}


# ------------------------------------------------------------------------------------------------
# measuring


async def measure(sides: Sides, scenario: PeerScenario, events: int, rounds: int) -> dict[str, Any]:
    """Run rounds of both, in turn; the side that begins alternates."""
    warm = max(scenario.batch * scenario.clients, scenario.rooms, events // 5)
    each = -(-events // scenario.rooms)
    first = -(-warm // scenario.rooms)
    rooms = rooms_of(scenario, (first + each * rounds) * scenario.rooms)
    await sides.begin(scenario, rooms)
    await _round(sides, scenario, clients_of(scenario, rooms, 0, first), 0)
    before, parts, bare = await sides.sizes(), list[dict[str, PeerWriteRound]](), list[float]()
    for number in range(rounds):
        clients = clients_of(scenario, rooms, first + number * each, first + (number + 1) * each)
        bare.append(await limits.bare_inserts(sides.raw, clients))
        parts.append(await _round(sides, scenario, clients, number))
    after = await sides.sizes()
    raw = [len(pdu) for room in rooms for pdu in room.pdus[scenario.base + first :]]
    return told(
        scenario,
        parts,
        bare,
        {name: after[name] - before[name] for name in after},
        sum(raw) / len(raw),
    )


async def _round(
    sides: Sides, scenario: PeerScenario, clients: list[list[list[bytes]]], number: int
) -> dict[str, PeerWriteRound]:
    found: dict[str, PeerWriteRound] = {}
    for name in ("ours", "synapse") if number % 2 else ("synapse", "ours"):
        if name == "ours":
            found[name] = await sides.ours(clients)
        elif sides.peer:
            found[name] = await sides.theirs(clients, scenario.how)
    return found


def told(
    scenario: PeerScenario,
    parts: list[dict[str, PeerWriteRound]],
    bare: list[float],
    grown: dict[str, int],
    raw: float,
) -> dict[str, Any]:
    """Return the figures of a scenario as JSON."""
    found: dict[str, Any] = {
        "rooms": scenario.rooms,
        "batch": scenario.batch,
        "clients": scenario.clients,
        "rounds": len(parts),
        "events_per_round": parts[0]["ours"].events,
        "raw_bytes_per_event": round(raw),
        "limit_events_per_second": spread(bare),
        "share_of_limit": spread(
            [_rate(part["ours"]) / limit for part, limit in zip(parts, bare, strict=True)], digits=3
        ),
    }
    for name in parts[0]:
        own = [part[name] for part in parts]
        found[name] = _one_side(own) | {
            "bytes_per_event": round(grown[name] / sum(part.events for part in own))
        }
    if "synapse" in found:
        found["ratio"] = {
            "events_per_second": spread(
                [_rate(part["ours"]) / _rate(part["synapse"]) for part in parts], digits=2
            ),
            "cpu": spread([_cpu(part["synapse"]) / _cpu(part["ours"]) for part in parts], digits=2),
            "bytes": round(
                found["synapse"]["bytes_per_event"] / max(found["ours"]["bytes_per_event"], 1), 2
            ),
            "wal": round(
                found["synapse"]["wal_bytes_per_event"]
                / max(found["ours"]["wal_bytes_per_event"], 1),
                2,
            ),
        }
    return found


def _rate(part: PeerWriteRound) -> float:
    return part.events / part.seconds


def _cpu(part: PeerWriteRound) -> float:
    return (part.python + part.postgres) / part.events


def _one_side(parts: list[PeerWriteRound]) -> dict[str, Any]:
    events = sum(part.events for part in parts)

    def each(of: Callable[[PeerWriteRound], float]) -> dict[str, float]:
        return spread([of(part) / part.events * 1e6 for part in parts])

    return {
        "events_per_second": spread([_rate(part) for part in parts]),
        "batch_ms": percentiles(
            [latency for part in parts for latency in part.latencies], factor=1_000
        ),
        "python_us_per_event": each(lambda part: part.python),
        "postgres_us_per_event": each(lambda part: part.postgres),
        "statements_per_event": round(sum(part.statements for part in parts) / events, 3),
        "transactions_per_event": round(sum(part.transactions for part in parts) / events, 3),
        "wal_bytes_per_event": round(sum(part.wal for part in parts) / events),
    }
