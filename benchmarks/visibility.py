"""Visibility: its size in a room with many members, and its cost for a page.

Pages have 100 events of a room under "joined", in which events before a user's join are hidden. Two
variants of the statement run in turn with it: without any filter, and with the filter but without
the topological ranges that have visible events. One user is absent nearly all the time. A page
after the return crosses all that is hidden.
"""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import storage
from benchmarks.harness import Bench, append_all, spent, spread
from storage.database.connection import Connection
from storage.queries import messages
from storage.queries.events import stored_of
from storage.queries.filters import ANY_EVENT
from storage.queries.messages import TimelinePageRow
from storage.queries.pagination.page import BEGINNING, PageRange
from storage.queries.pagination.statements import range_values
from storage.streams import PaginationToken
from storage.streams.positions import LARGEST_POSITION
from storage.testing import RoomBuilder

SERVER: Final = "s1.test"
ADMIN: Final = f"@admin:{SERVER}"
ABSENT: Final = f"@absent:{SERVER}"
PAGE: Final = 100
BATCH: Final = 500
CHURN: Final = 0.1  # of the users leave and rejoin
PRESENT: Final = 2 * PAGE  # events that the absent user sees before, and again after

FILTER: Final = """AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences,
    r.world_audiences, r.shared_before, r.reader_nid, r.unread)"""
RANGES: Final = """topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
    CASE WHEN false THEN lowest.topological_ordering ELSE $9::bigint END,
    CASE WHEN false THEN 0 ELSE $17::bigint + 1 END,
    CASE WHEN false THEN $17::bigint + 1 ELSE 0 END)"""
EVERYWHERE: Final = """(
    SELECT 0::bigint AS lowest, 9223372036854775807 AS highest, s.*
    FROM visibility_of(r.room_nid, r.principal_nid) AS s
)"""
NOTHING: Final = "(SELECT 0::bigint AS lowest, 9223372036854775807 AS highest)"
WITHHELD: Final = """NOT was_there(e, r.joined_since, r.joined_audiences)
    AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
    AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld"""

SQL_BYTES: Final = """
SELECT sum(pg_table_size(oid) + pg_indexes_size(oid))::bigint
FROM pg_class
WHERE relname IN ('visibility', 'audiences')
"""


def without(sql: str, *parts: tuple[str, str]) -> str:
    """Replace parts of a statement, each of which must be there; white space may differ."""
    for old, new in parts:
        pattern = r"\s+".join(map(re.escape, old.split()))
        sql, count = re.subn(pattern, lambda _, new=new: new, sql)  # type: ignore[misc]
        if not count:
            raise ValueError(f"the statement has changed: no {old!r} in it")
    return sql


ORDINARY: Final = messages.SQL_PAGE.ordinary.backwards
PLAIN: Final = without(ORDINARY.sql, (RANGES, EVERYWHERE))
UNFILTERED: Final = without(
    ORDINARY.sql, (RANGES, NOTHING), (FILTER, ""), (WITHHELD, "false AS withheld")
)


@dataclass(frozen=True, slots=True)
class VisibleRoomHistory:
    """A number of events; users join all along, and a share of them leave and rejoin."""

    events: int
    local: int
    remote: int
    servers: int

    def build(self) -> RoomBuilder:
        """Return the room. The absent user is in it at the begin and at the end."""
        rng = random.Random(1)
        users = [f"@u{number}:{SERVER}" for number in range(self.local - 2)]
        users += [f"@r{number}:h{number % self.servers}.test" for number in range(self.remote)]
        rng.shuffle(users)
        room = RoomBuilder("11", sign=False, checked=False, exact=False)
        room.start(ADMIN, history_visibility="joined")
        changes: list[tuple[Callable[[str], object], str]] = [(room.join, user) for user in users]
        for user in rng.sample(users, int(len(users) * CHURN)):
            changes += [(room.leave, user), (room.join, user)]
        total = self.events - len(room.events)
        arrival, departure, back = PRESENT, 2 * PRESENT, total - PRESENT
        free = sorted({*range(1, total)} - {arrival, departure, back})
        at = dict(zip(sorted(rng.sample(free, len(changes))), changes, strict=True))
        at[arrival] = at[back] = room.join, ABSENT
        at[departure] = room.leave, ABSENT
        for place in range(total):
            act, user = at.get(place, (room.message, ADMIN))
            act(user)
        return room


FULL: Final = VisibleRoomHistory(events=100_000, local=2_000, remote=10_000, servers=400)
QUICK: Final = VisibleRoomHistory(events=5_000, local=100, remote=400, servers=20)


class VisibilityQuery(NamedTuple):
    """A statement, its reader, and the topological position at which it begins."""

    sql: str
    user: str
    top: int

    def arguments(self, room_id: str) -> tuple[object, ...]:
        """Return the arguments of the statement."""
        start = PaginationToken(self.top, LARGEST_POSITION)
        values = range_values(PageRange(start, BEGINNING, "b", PAGE)) | ANY_EVENT.values
        reads = {"room_id": room_id, "user_id": self.user, "ignored": []}
        return tuple(ORDINARY.bind({**values, **reads, "moves": LARGEST_POSITION}))


async def run(bench: Bench) -> None:
    """Measure the size and the pages."""
    history = QUICK if bench.quick else FULL
    room = history.build()
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        await append_all(store, room.pdus, BATCH)
        async with store.database.connection() as conn:
            await conn.execute("VACUUM FULL visibility, audiences")
            await conn.execute("VACUUM ANALYZE")
            size = int(await conn.fetchval(SQL_BYTES))
            principals = history.local + history.servers
            bench.results["size"] = {
                "principals": principals,
                "MB": round(size / 1e6, 2),
                "MB per 10,000 principals": round(size / 1e6 / principals * 10_000, 2),
            }
            pages = PagesInTurn(conn, room.room_id, history)
            bench.results["pages"] = await pages.measured(bench)
            bench.results["plan of a page across what is hidden"] = await pages.plan()


class PagesInTurn:
    """The pages to compare.

    50 events after the absent user came back, a page goes back across the gap.
    """

    def __init__(self, conn: Connection, room_id: str, history: VisibleRoomHistory) -> None:
        self.conn = conn
        self.room_id = room_id
        across = history.events - PRESENT + PAGE // 2
        self.queries = {
            "ordinary, unfiltered": VisibilityQuery(UNFILTERED, ADMIN, across),
            "ordinary, plain filter": VisibilityQuery(PLAIN, ADMIN, across),
            "ordinary": VisibilityQuery(ORDINARY.sql, ADMIN, across),
            "across what is hidden": VisibilityQuery(ORDINARY.sql, ABSENT, across),
        }
        self.scan = VisibilityQuery(PLAIN, ABSENT, across)

    async def page(self, query: VisibilityQuery) -> list[int | None]:
        """Return the nids of a page, whose events are made as `messages` does."""
        rows = await self.conn.fetch(query.sql, *query.arguments(self.room_id), row=TimelinePageRow)
        events = [stored_of(row.event) for row in rows if row.event]
        assert len(events) == PAGE + 1, query
        return [row.event.event_nid for row in rows if row.event]

    async def measured(self, bench: Bench) -> dict[str, Any]:
        """Return the milliseconds of each page, in turn, and of its CPU time on both sides."""
        times: dict[str, list[float]] = {name: [] for name in self.queries}
        for _ in range(bench.size(200, 30)):
            for name, query in self.queries.items():
                begun = time.perf_counter()
                await self.page(query)
                times[name].append((time.perf_counter() - begun) * 1000)
        together, blocks = bench.size(50, 5), bench.size(10, 2)
        cpu = dict.fromkeys(self.queries, 0.0)
        for _ in range(blocks):
            for name, query in self.queries.items():
                with spent(bench.server) as used:
                    for _ in range(together):
                        await self.page(query)
                cpu[name] += (used.python + used.backends) * 1000 / (together * blocks)
        begun = time.perf_counter()
        scanned = await self.page(self.scan)
        scan_ms = (time.perf_counter() - begun) * 1000
        if scanned != await self.page(self.queries["across what is hidden"]):
            raise AssertionError("the page by ranges differs from the page by the filter alone")
        # other load only adds, so ratios use the first tenth
        low = {name: sorted(each)[len(each) // 10] for name, each in times.items()}
        return {
            "ms": {
                name: spread(each, digits=3) | {"p10": round(low[name], 3)}
                for name, each in times.items()
            },
            "cpu ms": {name: round(each, 3) for name, each in cpu.items()}
            | {"ratio": round(cpu["ordinary"] / (cpu["ordinary, unfiltered"] or 1), 3)},
            "across what is hidden, plain filter, ms": round(scan_ms, 1),
            "filter": round(low["ordinary"] / low["ordinary, unfiltered"], 3),
            "across / ordinary": round(low["across what is hidden"] / low["ordinary"], 3),
        }

    async def plan(self) -> list[str]:
        """Return the plan of the page across what is hidden."""
        query = self.queries["across what is hidden"]
        explain = "EXPLAIN (ANALYZE, TIMING OFF, SUMMARY OFF, BUFFERS OFF) "
        return await self.conn.fetchvals(explain + query.sql, *query.arguments(self.room_id))
