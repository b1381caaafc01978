"""Operations: jobs, purges, sizes, running statements, and the caches and calls of this process.

Reads: `storage.database.background`, `storage.maintenance.purge.job`, `storage.database.sizes`,
`storage.queries.inspect.activity`, `Store.partial_rooms`; the counters of the store.
"""

from typing import Any, Final

from starlette.responses import Response

from storage.database.background import jobs
from storage.database.sizes import database_bytes, table_sizes
from storage.inspector.visit import Visit
from storage.maintenance.purge import job as purges
from storage.observability.counters import Distribution
from storage.queries.inspect.activity import running
from storage.store.catalogue import QUESTIONS
from storage.store.facade import Store

PURGES_SHOWN: Final = 20


async def page(visit: Visit) -> Response:
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
    found = [
        {
            "name": name,
            "count": len(times),
            "mean_ms": 1000 * times.total / len(times),
            "most_ms": quantile_ms(times, 0.95),
        }
        for name, times in store.measures.calls.items()
        if len(times)
    ]
    return sorted(found, key=lambda call: -call["mean_ms"] * call["count"])


def quantile_ms(times: Distribution, share: float) -> float | None:
    """Return a bound in milliseconds that so many of the times keep; None above all bounds."""
    wanted, seen = share * len(times), 0
    for bound, count in zip(times.bounds, times.counts, strict=False):
        seen += count
        if seen >= wanted:
            return 1000 * bound
    return None
