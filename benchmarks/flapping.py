"""A user who leaves and rejoins repeatedly, and the only user of another server who does the same.

Measure reads, writes and disk by the number of flaps. Each size is a room with separate users. All
are queried in turn, so that other load affects all of them. A flap is six events: both users join,
the admin writes, both leave, the admin writes. The history visibility is "joined", so each flap
hides an event. Pages begin at the end of the room, at its middle and at its beginning. WAL is
counted without full-page images, which depend on checkpoints and on the size of the database.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString, NamedTuple

import storage
from benchmarks.harness import Bench, percentiles, show
from storage import Store
from storage.testing import BuiltEvent, RoomBuilder

SIZES: Final = (10, 100, 1_000, 10_000)
QUICK_SIZES: Final = (10, 100)
PAGE: Final = 20
BEFORE: Final = 50  # messages before the first flap, so that a page is full at every size
TOGETHER: Final = 80  # flaps in an append, while a room is filled
SERVER: Final = "s1.test"
ADMIN: Final = f"@admin:{SERVER}"

SQL_COST: Final[LiteralString] = """
SELECT (
        SELECT sum(pg_total_relation_size(c.oid))::bigint
        FROM pg_class c
        WHERE c.relkind = 'r' AND c.relname IN ('visibility', 'past_visibility')
    ) AS visibility, pg_database_size(current_database()) AS all
"""

SQL_WAL: Final[LiteralString] = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"

Question = Callable[[], Awaitable[Any]]


class FlappingCostRow(NamedTuple):
    """Bytes of the tables that decide visibility, with their indexes, and of the database."""

    visibility: int
    all: int


class FlappingRoom:
    """A room with a number of flaps.

    Its users are joined while pages are requested, except in those "having left".
    """

    def __init__(self, store: Store, size: int) -> None:
        self.store, self.size = store, size
        self.user, self.server = f"@bridge{size}:{SERVER}", f"s{size}.test"
        self.bot = f"@bot:{self.server}"
        self.builder = RoomBuilder("11", seed=size, sign=False)
        self.comings: list[storage.EventId] = []
        self.last = storage.EventId("")
        self.new: list[bytes] = []

    @property
    def room_id(self) -> storage.RoomId:
        """Return the id of the room."""
        return self.builder.room_id

    async def fill(self) -> None:
        """Append all flaps. Before them both users are joined for a while."""
        self.builder.start(ADMIN, history_visibility="joined")
        self.new += self.builder.pdus
        self.come()
        for _ in range(BEFORE):
            self.add(self.builder.message(ADMIN))
        self.go()
        for at in range(0, self.size, TOGETHER):
            for _ in range(min(TOGETHER, self.size - at)):
                self.come()
                self.add(self.builder.message(ADMIN))
                self.go()
                self.add(self.builder.message(ADMIN))
            await self.send()

    def add(self, event: BuiltEvent) -> None:
        """Queue an event."""
        self.new.append(event.pdu)
        self.last = event.event_id

    def come(self) -> None:
        """Queue joins of both users."""
        for user in (self.user, self.bot):
            self.add(self.builder.join(user))
        self.comings.append(self.last)

    def go(self) -> None:
        """Queue leaves of both users."""
        for user in (self.user, self.bot):
            self.add(self.builder.leave(user))

    async def send(self) -> None:
        """Append the queued events."""
        await self.store.append(self.new, room_version="11")
        self.new.clear()

    async def flap(self) -> dict[str, float]:
        """Add a flap, event by event; return the seconds of local events."""
        builder, user, bot = self.builder, self.user, self.bot
        steps: dict[str, Callable[[], BuiltEvent]] = {
            "a join": lambda: builder.join(user),
            "of the bot": lambda: builder.join(bot),
            "a message": lambda: builder.message(ADMIN),
            "a leave": lambda: builder.leave(user),
            "the bot's": lambda: builder.leave(bot),
            "hidden": lambda: builder.message(ADMIN),
        }
        taken = {}
        for name, step in steps.items():
            self.add(step())
            start = time.perf_counter()
            await self.send()
            taken[name] = time.perf_counter() - start
        return taken


async def run(bench: Bench) -> None:
    """Fill the rooms, then measure writes and reads of all of them in turn."""
    sizes = QUICK_SIZES if bench.quick else SIZES
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        rooms = {size: FlappingRoom(store, size) for size in sizes}
        bench.results["bytes"] = {"visibility for a flap": {}, "all for a flap": {}}
        for size, room in rooms.items():
            before = await _cost(store)
            await room.fill()
            after = await _cost(store)
            for name, one, other in zip(bench.results["bytes"], before, after, strict=True):
                bench.results["bytes"][name][str(size)] = round((other - one) / size)
        bench.results["ms"] = {}
        await _reads(
            bench, {size: await _pages(room, ", having left") for size, room in rooms.items()}
        )
        await _reads(bench, {size: await _questions(room) for size, room in rooms.items()})
        async with _without_full_pages(store):
            await _writes(bench, rooms, rounds=bench.size(20, 3))
    _show(bench, sizes)
    bench.write()


async def _cost(store: Store) -> FlappingCostRow:
    async with store.database.connection() as conn:
        await conn.execute("VACUUM ANALYZE")
        [row] = await conn.fetch(SQL_COST, row=FlappingCostRow)
        return row


@asynccontextmanager
async def _without_full_pages(store: Store) -> AsyncIterator[None]:
    """Run the block with WAL without full-page images."""
    async with store.database.connection() as conn:
        try:
            await conn.execute("ALTER SYSTEM SET full_page_writes = off")
            await conn.execute("SELECT pg_reload_conf()")
            yield
        finally:
            await conn.execute("ALTER SYSTEM RESET full_page_writes")
            await conn.execute("SELECT pg_reload_conf()")


async def _writes(bench: Bench, rooms: Mapping[int, FlappingRoom], rounds: int) -> None:
    """Measure flaps, in turn. Both users of a room are joined before."""
    for room in rooms.values():
        room.go()
        await room.send()
    taken: dict[str, dict[int, list[float]]] = {}
    wal: dict[str, int] = {str(size): 0 for size in rooms}
    for _ in range(rounds):
        for size, room in rooms.items():
            before = await _wal(room.store)
            for name, seconds in (await room.flap()).items():
                taken.setdefault(name, {}).setdefault(size, []).append(seconds)
            wal[str(size)] += await _wal(room.store) - before
    bench.results["bytes"]["WAL for a flap"] = {
        size: round(number / rounds) for size, number in wal.items()
    }
    for name in ("a join", "a leave", "a message"):
        bench.results["ms"][name] = {
            str(size): percentiles(times, factor=1000)["p50"] for size, times in taken[name].items()
        }


async def _wal(store: Store) -> int:
    async with store.database.connection() as conn:
        written: int = await conn.fetchval(SQL_WAL)
        return written


async def _pages(room: FlappingRoom, when: str = "") -> dict[str, Question]:
    store, room_id, user = room.store, room.room_id, room.user
    middle = room.comings[len(room.comings) // 2 - 2]
    token = (await store.context(middle, user, limit=0)).start
    return {
        f"a page{when}": lambda: store.messages(room_id, user, limit=PAGE),
        f"a page from the middle{when}": lambda: store.messages(
            room_id, user, from_=token, limit=PAGE
        ),
        f"a page forwards{when}": lambda: store.messages(
            room_id, user, from_=token, direction="f", limit=PAGE
        ),
        f"a page from the beginning{when}": lambda: store.messages(
            room_id, user, direction="f", limit=PAGE
        ),
    }


async def _questions(room: FlappingRoom) -> dict[str, Question]:
    """Return the pages once the users are joined again, and the queries of a joined user."""
    store = room.store
    before = (await store.sync(room.user)).next_batch
    room.come()
    room.add(room.builder.message(ADMIN))
    await room.send()
    last = room.last
    old = [event.event_id for event in room.builder.events[: BEFORE + 60]][-100:]
    return await _pages(room) | {
        "sync": lambda: store.sync(room.user, since=before, timeline_limit=20),
        "initial sync": lambda: store.sync(room.user, timeline_limit=20),
        "the admin's page": lambda: store.messages(room.room_id, ADMIN, limit=PAGE),
        "backfill for the server": lambda: store.backfill(
            room.room_id, [last], PAGE, server_name=room.server
        ),
        "100 old events by id": lambda: store.visible_to_user(room.user, old),
    }


async def _reads(bench: Bench, asked: Mapping[int, Mapping[str, Question]]) -> None:
    for name in next(iter(asked.values())):
        times: dict[int, list[float]] = {size: [] for size in asked}
        for turn in range(bench.size(200, 5) + 1):
            for size, questions in asked.items():
                start = time.perf_counter()
                await questions[name]()
                if turn:  # the first round warms up
                    times[size].append(time.perf_counter() - start)
        bench.results["ms"][name] = {
            str(size): percentiles(taken, factor=1000)["p50"] for size, taken in times.items()
        }


def _show(bench: Bench, sizes: tuple[int, ...]) -> None:
    for kind, title in {
        "ms": "p50 ms, flaps before it:",
        "bytes": "bytes, flaps before it:",
    }.items():
        rows = [
            [name, *found.values(), _growth(*found.values())]
            for name, found in bench.results[kind].items()
        ]
        show("A user who flaps", [title, *map(str, sizes), "grown by"], rows)


def _growth(first: float, *others: float) -> float | str:
    return round(others[-1] / first, 2) if first else "-"
