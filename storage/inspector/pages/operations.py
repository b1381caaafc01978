"""Operations: jobs, purges, sizes, running statements, and the caches and calls of this process.

Reads: `storage.database.background`, `storage.maintenance.purge.job`, `storage.database.sizes`,
`storage.queries.inspect.rooms`, `Store.partial_rooms`; the counters of the store.
"""

import time
from collections import defaultdict
from typing import Any, Final

from starlette.responses import Response

from storage.database.background import jobs
from storage.database.connection import Connection
from storage.database.explained import QueryPlan
from storage.database.sizes import database_bytes, table_sizes
from storage.inspector.visit import Visit
from storage.maintenance.purge import job as purges
from storage.observability.counters import Distribution
from storage.queries.inspect.rooms import (
    WEEK_MS,
    WriterPositionRow,
    lost_ranges,
    positions_at,
    purged_streams,
    room_growth,
    running,
    week_begins,
    writers,
)
from storage.store.catalogue import (
    QUESTIONS,
    QueryArguments,
    prepared,
    query_of,
    with_token,
)
from storage.store.facade import Store

PURGES_SHOWN: Final = 20


async def operations_page(visit: Visit) -> Response:
    """Show everything that is not about one room."""
    store = visit.store
    return visit.render(
        "operations.html",
        jobs=await visit.read(jobs),
        purges=await purges.jobs(store.database, PURGES_SHOWN),
        purging=await purges.running(store.database),
        tables=await visit.read(table_sizes),
        database_bytes=await visit.read(database_bytes),
        running=await visit.read(running),
        partial=await store.partial_rooms(),
        caches=_caches(store),
        calls=_calls(store),
        connections=store.database.connections,
        queries=QUESTIONS,
        instance_name=store.instance_name,
    )


def _caches(store: Store) -> list[dict[str, Any]]:
    """Return size, limit and hits of each cache of this process."""
    rates = store.caches.hit_rates()
    return [
        {
            "name": name,
            "entries": len(cache),
            "limit": cache.limit,
            "hits": cache.hits,
            "misses": cache.misses,
            "rate": rates[name],
        }
        for name, cache in sorted(store.caches.counted().items())
    ]


def _calls(store: Store) -> list[dict[str, Any]]:
    """Return the calls of this process that took most time in all, with their usual times."""
    calls = [
        {
            "name": name,
            "count": len(times),
            "mean_ms": 1000 * times.total / len(times),
            "most_ms": quantile_ms(times, 0.95),
        }
        for name, times in store.measures.calls.items()
        if len(times)
    ]
    return sorted(calls, key=lambda call: -call["mean_ms"] * call["count"])


def quantile_ms(times: Distribution, share: float) -> float | None:
    """Return a bound in milliseconds that so many of the times keep; None above all bounds."""
    target, seen = share * len(times), 0
    for bound, count in zip(times.bounds, times.counts, strict=False):
        seen += count
        if seen >= target:
            return 1000 * bound
    return None


# --------------------------------------------------------------------------------------------------
# The plans of a latency-critical query on this database, as `room-storage explain` prints them.
#
# Reads: `storage.store.catalogue`, on a connection that explains each statement before it runs. All
# of them are reads, in a read-only transaction.

LAG: Final = 100
FIELDS: Final = ("room", "user", "event", "server", "since", "timestamp")


async def explain_page(visit: Visit) -> Response:
    """Show the form of a query; and its plans, once all arguments are given."""
    name = visit.required("query")
    query = query_of(name)
    arguments = QueryArguments(
        **{field: visit.text(field) for field in FIELDS if field != "timestamp"},
        timestamp=visit.whole("timestamp"),
        limit=min(visit.whole("limit") or 10, 1_000),
    )
    needed = [need for need in query.needs if need != "since"]
    is_complete = all(getattr(arguments, need) is not None for need in needed)
    plans = await _plans(visit, name, arguments) if is_complete else []
    return visit.render(
        "explain.html",
        name=name,
        query=query,
        given=arguments,
        plans=plans,
        trees=[list(described(plan)) for plan in plans],
        behind=LAG,
    )


async def _plans(visit: Visit, name: str, arguments: QueryArguments) -> list[QueryPlan]:
    async def explained(conn: Connection) -> list[QueryPlan]:
        complete = await with_token(conn, name, arguments, LAG)
        return await (await prepared(visit.store.database, conn, name, complete)).plans()

    return await visit.store.reads.run(explained, snapshot=True)


def described(plan: QueryPlan) -> list[tuple[int, str]]:
    """Return the nodes of a plan, with their depth."""
    lines = []
    for depth, node in plan.nodes_by_depth():
        what = [str(node["Node Type"])]
        what += [f"by {node['Index Name']}"] if "Index Name" in node else []
        what += [f"on {node['Relation Name']}"] if "Relation Name" in node else []
        rows = node["Actual Rows"] * node["Actual Loops"]
        time_ms = node["Actual Total Time"] * node["Actual Loops"]
        lines.append((depth, f"{' '.join(what)}: {rows:g} rows, {time_ms:.3f} ms"))
    return lines


# --------------------------------------------------------------------------------------------------
# Growth: the rooms with most new events this week, and the weeks of the whole store.
#
# Reads: `storage.queries.inspect.rooms`; sizes from `storage.database.sizes`.

WEEKS: Final = 8
ROOMS_SHOWN: Final = 30


async def growth_page(visit: Visit) -> Response:
    """Show the growth of this week, compared with the week before."""
    begins = week_begins(time.time_ns() // 1_000_000, WEEKS)
    *positions, end = await visit.read(positions_at, [*begins, begins[-1] + 2 * WEEK_MS])
    this_week = await visit.read(room_growth, positions[-1], end, limit=ROOMS_SHOWN)
    before = await visit.read(room_growth, positions[-2], positions[-1], limit=10 * ROOMS_SHOWN)
    week_ends = [*positions[1:], end]
    weeks = [last - first for first, last in zip(positions, week_ends, strict=True)]
    return visit.render(
        "growth.html",
        this_week=this_week,
        before={row.room_id: row.events for row in before.rooms},
        before_is_whole=before.is_exact and len(before.rooms) < 10 * ROOMS_SHOWN,
        weeks=list(zip(begins, weeks, strict=True))[::-1],
        most=max(weeks),
        since=begins[-1],
        database_bytes=await visit.read(database_bytes),
    )


# --------------------------------------------------------------------------------------------------
# The streams: their writers with positions and lag, and the vector and linear position.
#
# Reads: `Store.streams` for what this process knows; `storage.queries.inspect.rooms` for the
# table.


async def streams_page(visit: Visit) -> Response:
    by_stream: dict[str, list[WriterPositionRow]] = defaultdict(list)
    for row in await visit.read(writers):
        by_stream[row.stream_name].append(row)
    store = visit.store
    streams = {
        name: {
            "linear": stream.linear(),
            "vector": stream.current(),
            "positions": stream.positions(),
            "writers": by_stream.get(name, []),
        }
        for name, stream in sorted(store.streams.items())
    }
    return visit.render(
        "streams.html",
        streams=streams,
        purged=await visit.read(purged_streams),
        lost=await visit.read(lost_ranges),
        instance_name=store.instance_name,
        read_only=store.reads.read_only,
    )
