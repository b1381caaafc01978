"""Reading the same rooms here and in Synapse, in turn on one Postgres.

Both sides are queried twice: first with empty caches (Postgres stays warm), then again. Here, only
the cached states and auth chains are dropped before the first query; few other caches remain
(README). Each side runs once more before, untimed, because a short query takes twice as long after
a pause. Both collect garbage before that, and freeze what is left. Both end with parsed events, and
do not encode a response. Each result is compared with the other side's.

The limit of a read is a bare index range of as many rows in the same round: of the events' bytes,
or of ids alone if the result is ids. Nothing is parsed there.

Not comparable: a sync of Synapse also queries receipts, account data, presence, devices and push
counts, of which there are none here. Its pages and syncs come from its handlers.
"""

import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.harness import Bench, percentiles, spent, spread, stored
from benchmarks.peers import limits, whole
from benchmarks.peers.writes import BATCH, Sides, still
from storage import StoredEvent
from storage.ids import EventId, RoomId
from storage.queries.federation import StateIds
from storage.streams.caches import ChainMemory
from storage.testing import RoomBuilder

SERVER: Final = "s1.test"
ME: Final = f"@me:{SERVER}"
ROOMS: Final = 100
OTHERS: Final = 200
OTHER: Final = f"@other:{SERVER}"
CHANGED: Final = 10
TIMELINE: Final = 20
MEMBERS: Final = 12
SERVERS: Final = [f"s{number}.test" for number in range(1, 21)]


@dataclass(slots=True)
class PeerRooms:
    """The rooms with their builders, and the number of events sent of each."""

    small: list[RoomBuilder]
    hall: RoomBuilder
    sent: dict[str, int] = field(default_factory=dict)
    since: tuple[str, str] = ("", "")
    """Sync tokens, here and there."""

    def unsent(self, room: RoomBuilder) -> list[bytes]:
        """Return the unsent events of a room, and count them as sent."""
        start = self.sent.get(room.room_id, 0)
        self.sent[room.room_id] = len(room.events)
        return [event.pdu for event in room.events[start:]]


@dataclass(frozen=True, slots=True)
class ReadPair:
    """A query for both sides: the call here, and the peer's command with its arguments.

    `same` returns whether the results agree. `bodies`: the result is events, not ids alone.
    """

    ours: Callable[[], Awaitable[Any]]
    what: str
    given: dict[str, Any]
    same: Callable[[Any, Any], bool]
    bodies: bool = False


def build(bench: Bench) -> PeerRooms:
    """Build a hundred small rooms of one user, and a large one, to which most were invited."""
    small = []
    for number in range(ROOMS):
        room = RoomBuilder("11", seed=20_000 + number, servers=SERVERS)
        room.start(ME)
        for user in range(2, MEMBERS + 1):
            room.join(room.user(user))
        for at in range(TIMELINE + 5):
            room.message(room.user(2 + at % (MEMBERS - 1)), f"message {at}")
        small.append(room)
    hall = RoomBuilder("11", seed=30_000, servers=SERVERS, checked=False, exact=False)
    hall.start(ME)
    members, talk = bench.size(5_000, 300), bench.size(3_000, 500)
    for user in range(2, members + 1):
        if user % 5:  # so the auth chain of the state is nearly as long as the state
            hall.invite(ME, hall.user(user))
        hall.join(hall.user(user))
    for at in range(talk):
        speaker = hall.user(2 + at * 7 % (members - 1))
        if at % 20 == 0:
            hall.join(speaker, displayname=f"name {at}")
        else:
            hall.message(speaker, f"message {at}")
    return PeerRooms(small, hall)


async def store_others(sides: Sides, count: int) -> None:
    """Store rooms of another user on both sides, or here alone: nothing reads or writes them.

    With them, statistics are those of a homeserver: a room is a small part of a table.
    """
    rooms = []
    for number in range(count):
        room = RoomBuilder("11", seed=50_000 + number, servers=SERVERS, sign=False)
        room.start(OTHER)
        room.join(room.user(2))
        for at in range(TIMELINE):
            room.message(OTHER, f"message {at}")
        rooms.append(whole.Whole(room.room_id, room.pdus))
    if sides.peer:
        await whole.store(sides, rooms)
    else:
        for one in rooms:
            await stored(sides.store, one.pdus)
    for look in sides.looks.values():
        await look.execute("VACUUM ANALYZE")


async def store(sides: Sides, world: PeerRooms) -> dict[str, Any]:
    """Store everything on both sides; return the disk usage by kind of room."""
    assert sides.peer is not None
    told = {}
    for name, rooms in (("small rooms", world.small), ("a large room", [world.hall])):
        told[name] = await whole.store(
            sides, [whole.Whole(room.room_id, world.unsent(room)) for room in rooms]
        )
    await sides.peer.ask("register", user_id=ME)
    await sides.peer.ask("settle", quiet_seconds=2.0, timeout_seconds=60.0)
    for look in sides.looks.values():
        await look.execute("VACUUM ANALYZE")
    return told


# ------------------------------------------------------------------------------------------------
# the questions


Prepare = Callable[[Sides, PeerRooms, int], Awaitable[ReadPair]]


def questions() -> dict[str, Prepare]:
    """Return the queries by name, in the order of the table."""
    return {
        f"incremental sync, {CHANGED} of {ROOMS} rooms changed": _incremental,
        f"initial sync, {ROOMS} rooms, {TIMELINE} events each": _initial,
        "a page of 100": _page,
        "backfill of 100": _backfill,
        "missing events, 20": _missing,
        "state before an old event": _state_before,
        "state ids with auth chain": _state_ids,
        "auth chain of the current state": _auth_chain,
        "auth chain difference, old and current state": _auth_difference,
    }


def _parsed(events: Iterable[StoredEvent]) -> list[EventId]:
    """Return their ids, after parsing their JSON as the peer does."""
    found = []
    for event in events:
        assert event.json
        found.append(event.event_id)
    return found


async def _incremental(sides: Sides, world: PeerRooms, number: int) -> ReadPair:
    assert sides.peer is not None
    ours, theirs = await sides.store.sync(ME, rooms_limit=1), await sides.peer.ask("token")
    for room in [world.small[(number * CHANGED + at) % ROOMS] for at in range(CHANGED)]:
        room.message(room.user(2), f"news {number}")
        await store_on_both(sides, world.unsent(room))
    return _sync(sides, ours.next_batch, theirs["token"], 10)


async def _initial(
    sides: Sides, _world: PeerRooms, _number: int
) -> ReadPair:  # the same every round
    return _sync(sides, None, None, TIMELINE)


def _sync(sides: Sides, since: str | None, their_since: str | None, limit: int) -> ReadPair:
    async def ours() -> dict[str, list[EventId]]:
        answer = await sides.store.sync(ME, since=since, timeline_limit=limit)
        return {room: _parsed(joined.timeline.events) for room, joined in answer.join.items()}

    return ReadPair(
        ours, "sync", {"user_id": ME, "since": their_since, "limit": limit}, _equal, bodies=True
    )


def _old(world: PeerRooms, number: int) -> EventId:
    """Return an old event of the hall, another each round."""
    events = world.hall.events
    talk = len(events) // 4
    return EventId(events[-(150 + number * 37 % (talk - 150))].event_id)


async def _page(sides: Sides, world: PeerRooms, number: int) -> ReadPair:
    """Read a page; each round's is the one before that of the last round, modulo four."""
    assert sides.peer is not None
    room, start, end = RoomId(world.hall.room_id), None, None
    for _ in range(number % 4 + 1):
        start = (await sides.store.messages(room, ME, from_=start, limit=BATCH)).end
        told = await sides.peer.ask(
            "ask", what="messages", room_id=room, user_id=ME, start=end, limit=BATCH
        )
        end = told["answer"]["end"]

    async def ours() -> list[EventId]:
        return _parsed((await sides.store.messages(room, ME, from_=start, limit=BATCH)).chunk)

    given = {"room_id": room, "user_id": ME, "start": end, "limit": BATCH}
    return ReadPair(
        ours, "messages", given, lambda mine, told: bool(mine == told["ids"]), bodies=True
    )


async def _backfill(sides: Sides, world: PeerRooms, number: int) -> ReadPair:
    room, event = RoomId(world.hall.room_id), _old(world, number)

    async def ours() -> list[EventId]:
        return _parsed(await sides.store.backfill(room, [event], BATCH, server_name=SERVERS[1]))

    return ReadPair(
        ours,
        "backfill",
        {"room_id": room, "event_id": event, "limit": BATCH, "server": SERVERS[1]},
        _same_set,
        bodies=True,
    )


async def _missing(sides: Sides, world: PeerRooms, number: int) -> ReadPair:
    room, event = RoomId(world.hall.room_id), _old(world, number)

    async def ours() -> list[EventId]:
        return _parsed(
            await sides.store.missing_events(room, [], [event], limit=20, server_name=SERVERS[1])
        )

    return ReadPair(
        ours,
        "missing",
        {"room_id": room, "event_id": event, "limit": 20, "server": SERVERS[1]},
        _same_set,
        bodies=True,
    )


async def _state_before(sides: Sides, world: PeerRooms, number: int) -> ReadPair:
    event = _old(world, number)

    async def ours() -> list[EventId]:
        return list((await sides.store.state_before(event)).values())

    return ReadPair(
        ours, "state_before", {"room_id": world.hall.room_id, "event_id": event}, _same_set
    )


async def _state_ids(sides: Sides, world: PeerRooms, number: int) -> ReadPair:
    event = _old(world, number)

    def same(mine: StateIds, told: Any) -> bool:
        return mine.state_ids == set(told["state"]) and mine.auth_chain_ids == set(told["chain"])

    return ReadPair(
        lambda: sides.store.state_ids(event),
        "state_ids",
        {"room_id": world.hall.room_id, "event_id": event},
        same,
    )


async def _auth_chain(
    sides: Sides, world: PeerRooms, _number: int
) -> ReadPair:  # the same every round
    room = RoomId(world.hall.room_id)
    ids = list((await sides.store.current_state(room)).values())
    return ReadPair(
        lambda: sides.store.auth_chain_ids(ids),
        "auth_chain",
        {"room_id": room, "event_ids": ids},
        _same_set,
    )


async def _auth_difference(sides: Sides, world: PeerRooms, number: int) -> ReadPair:
    """Compare the differences of two auth chains.

    Synapse includes the events themselves in their chains, this library does not, as the
    specification defines it. With the differing events added, both are the same.
    """
    room = RoomId(world.hall.room_id)
    old, now = [
        list(one.values())
        for one in (
            await sides.store.state_before(_old(world, number)),
            await sides.store.current_state(room),
        )
    ]
    differ = set(old) ^ set(now)

    def same(mine: Any, told: Any) -> bool:
        return bool(set(mine) | differ == set(told) | differ)

    return ReadPair(
        lambda: sides.store.auth_chain_difference([old, now]),
        "auth_difference",
        {"room_id": room, "sets": [old, now]},
        same,
    )


def _equal(mine: Any, told: Any) -> bool:
    return bool(mine == told)


def _same_set(mine: Any, told: Any) -> bool:
    return set(mine) == set(told)


# ------------------------------------------------------------------------------------------------
# measuring


@dataclass(slots=True)
class ReadCost:
    """The cost of one side's rounds: seconds (clock, Python, Postgres) and statements."""

    clock: list[float] = field(default_factory=list)
    python: list[float] = field(default_factory=list)
    postgres: list[float] = field(default_factory=list)
    statements: list[int] = field(default_factory=list)

    def cpu(self) -> float:
        """Return the median CPU time, here and in Postgres, in seconds."""
        return statistics.median(map(sum, zip(self.python, self.postgres, strict=True)))

    def told(self) -> dict[str, Any]:
        return {
            "ms": percentiles(self.clock, factor=1_000),
            "python_ms": percentiles(self.python, factor=1_000),
            "postgres_ms": percentiles(self.postgres, factor=1_000),
            "statements": percentiles(self.statements, digits=0)["p50"],
        }


async def measure(sides: Sides, world: PeerRooms, prepare: Prepare, rounds: int) -> dict[str, Any]:
    """Run rounds of ours, of theirs with empty caches, and of both again."""
    asked, bare, rows = (
        {name: ReadCost() for name in ("ours", "ours_again", "synapse_cold", "synapse_warm")},
        list[float](),
        0,
    )
    for number in range(-2, rounds):  # two to warm up
        pair = await prepare(sides, world, number + 2)
        await settled(sides)
        into = asked if number >= 0 else {name: ReadCost() for name in asked}
        mine, again = await _ours(sides, pair, into)
        cold, warm = await _theirs(sides, pair, into)
        if not (pair.same(mine, cold) and pair.same(mine, warm) and pair.same(again, warm)):
            raise AssertionError(
                f"{pair.what}: the answers differ: {str(mine)[:600]} and {str(cold)[:600]}"
            )
        rows = _rows(mine)
        taken = await limits.index_range(sides.raw, rows, bodies=pair.bodies)
        bare += [taken] if number >= 0 else []
    return (
        _told(asked)
        | {"rows": rows, "limit": {"ms": percentiles(bare, factor=1_000)}}
        | share_of_limit(bare, asked["ours"])
    )


async def _ours(sides: Sides, pair: ReadPair, into: dict[str, ReadCost]) -> tuple[Any, Any]:
    """Return the first result, and that of the same query again."""
    still()
    await pair.ours()
    sides.store.caches.states.forget(None)
    sides.store.caches.chains = ChainMemory(sides.store.caches.chains.limit)
    return await ask_here(sides, pair.ours, into["ours"]), await ask_here(
        sides, pair.ours, into["ours_again"]
    )


async def _theirs(sides: Sides, pair: ReadPair, into: dict[str, ReadCost]) -> tuple[Any, Any]:
    assert sides.peer is not None
    await sides.peer.ask("still")
    await sides.peer.ask("ask", what=pair.what, **pair.given)
    cold = await _ask_there(sides, pair, into["synapse_cold"], cold=True)
    return cold, await _ask_there(sides, pair, into["synapse_warm"], cold=False)


def _rows(answer: Any) -> int:
    """Count the events, or ids, of a result."""
    if isinstance(answer, dict):
        return sum(map(len, answer.values()))
    return (
        len(answer.state_ids) + len(answer.auth_chain_ids)
        if isinstance(answer, StateIds)
        else len(answer)
    )


def share_of_limit(bare: list[float], ours: ReadCost) -> dict[str, Any]:
    """Return how much of each answer's time the bare statement of its round takes."""
    return {
        "share_of_limit": spread(
            [limit / own for limit, own in zip(bare, ours.clock, strict=True)], digits=3
        )
    }


async def ask_here(sides: Sides, ask: Callable[[], Awaitable[Any]], into: ReadCost) -> Any:
    """Return the answer here, and note its cost."""
    before = sides.counts.statements
    with spent(sides.bench.server) as used:
        start, cpu = time.perf_counter(), time.process_time()
        answer = await ask()
        into.clock.append(time.perf_counter() - start)
        into.python.append(time.process_time() - cpu)
    into.postgres.append(used.backends)
    into.statements.append(sides.counts.statements - before)
    return answer


async def _ask_there(sides: Sides, pair: ReadPair, into: ReadCost, *, cold: bool) -> Any:
    assert sides.peer is not None
    if cold:
        await sides.peer.ask("forget")
    with spent(sides.bench.server) as used:
        told = await sides.peer.ask("ask", what=pair.what, **pair.given)
    note_cost(into, told, used.backends)
    return told["answer"]


def note_cost(into: ReadCost, told: dict[str, Any], postgres: float) -> None:
    """Note what the peer says that an answer took, and the seconds of Postgres."""
    into.clock.append(told["seconds"])
    into.python.append(told["python_seconds"])
    into.statements.append(told["statements"])
    into.postgres.append(postgres)


def _told(asked: dict[str, ReadCost]) -> dict[str, Any]:
    told: dict[str, Any] = {name: side.told() for name, side in asked.items()} | {
        "rounds": len(asked["ours"].clock)
    }
    for name, mine in (("cold", asked["ours"]), ("warm", asked["ours_again"])):
        theirs = asked[f"synapse_{name}"]
        told[f"ratio_{name}"] = spread(
            [other / own for own, other in zip(mine.clock, theirs.clock, strict=True)], digits=2
        )
        told[f"cpu_ratio_{name}"] = round(theirs.cpu() / mine.cpu(), 2)
    return told


async def store_on_both(sides: Sides, pdus: Sequence[bytes]) -> None:
    """Store events on both sides, unmeasured, one by one there."""
    assert sides.peer is not None
    await stored(sides.store, pdus)
    await sides.peer.load([[[pdu] for pdu in pdus]])
    await sides.peer.ask("persist", how="single")


async def settled(sides: Sides) -> None:
    """Wait until the peer's background work is idle."""
    assert sides.peer is not None
    await sides.peer.ask("settle", quiet_seconds=0.3, timeout_seconds=10.0)
