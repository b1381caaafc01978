"""Metrics of a store for Prometheus, collected at each scrape.

    from storage.observability.prometheus import expose

    expose(store)  # in the default registry, which a homeserver's /metrics serves already
    expose(store, my_registry)  # or in another one

Counters and timings come from `storage.observability.counters`. Current values (queues, positions,
caches, connections) are looked up at the scrape, and sizes on disk are measured once a minute at
most: a store that nobody scrapes does nothing for this.
`room-storage serve --http-port` serves them by itself. Labels are names of calls, outcomes,
classes of errors, caches, streams and writers; never users, rooms or events. One store per
registry: a second one needs a registry of its own.

docs/grafana.json and docs/alerts.yml use these metrics.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, product
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from storage.errors import DatabaseError
from storage.observability.counters import FAILURES, READ_OUTCOMES, Distribution
from storage.observability.instrument import MEASURED
from storage.store.facade import Store

PREFIX: Final = "room_storage"
DATABASE_ERRORS: Final = [
    DatabaseError.__name__,
    *(one.__name__ for one in DatabaseError.__subclasses__()),
]


class StoreCollector(Collector):
    """The metrics of one store, built at each scrape. May be called from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """Return the metrics, so that the registry finds duplicate names."""
        return [family for part in PARTS for family in part(self._store)]

    def collect(self) -> Iterator[Metric]:
        for part in PARTS:
            yield from part(self._store)


def expose(store: Store, registry: CollectorRegistry = REGISTRY) -> StoreCollector:
    """Register the metrics of this store.

    Pass the result to `registry.unregister` when the store is closed. Raise ValueError if there is
    one already.
    """
    collector = StoreCollector(store)
    registry.register(collector)
    return collector


def calls(store: Store) -> Iterator[Metric]:
    measures = store.measures
    yield _histograms(
        "call_seconds",
        "Time of calls, by name; of sync and first_sync without the waiting.",
        "call",
        measures.calls,
    )
    errors = CounterMetricFamily(
        f"{PREFIX}_call_errors", "Exceptions of calls, by call and class.", labels=["call", "error"]
    )
    # Prometheus sees no increase in a series that begins with its first error. So the series of
    # errors that call for an alert begin at 0.
    none_yet = dict.fromkeys(product(sorted(MEASURED), FAILURES), 0)
    for (call, error), count in (none_yet | dict(measures.call_errors)).items():
        errors.add_metric([call, error], count)
    yield errors
    yield _counters("events", "Events given to append, by outcome.", "outcome", measures.outcomes)
    yield _counter(
        "unwritable_events",
        "Events that are invalid because the database refuses to store them: defects.",
        measures.unwritable_events,
    )
    yield _histogram("append_events", "Events given to one append.", measures.append_events)


def writer(store: Store) -> Iterator[Metric]:
    measures = store.measures
    yield _histogram(
        "write_seconds",
        "Time of one write: the statement that stores what was planned, and its commit.",
        measures.writes,
    )
    yield _histogram("write_events", "Events in one write.", measures.write_events)
    yield _counter(
        "writer_statements",
        "Statements of the writer, loading and writing: round trips.",
        measures.writer_statements,
    )
    yield _counter(
        "clock_steps_back",
        "How often the clock had gone back by more than a minute when events were written.",
        measures.clock_steps_back,
    )
    yield _gauge("writer_queue_appends", "Appends that are not planned yet.", store.writer.queued)
    yield _gauge(
        "writer_in_hand_appends", "Appends that wait for their answer.", store.writer.in_hand
    )
    yield _histogram(
        "resolution_seconds",
        "Processor time of state resolutions, without loading.",
        store.writer.caches.resolutions,
    )
    yield _gauges(
        "writer_cache_entries",
        "Entries in the caches of the writer.",
        "cache",
        store.writer.caches.sizes(),
    )


def caches(store: Store) -> Iterator[Metric]:
    counted = {**store.caches.counted(), **store.sliding.counted()}
    hits = {name: cache.hits for name, cache in counted.items()}
    misses = {name: cache.misses for name, cache in counted.items()}
    yield _counters("cache_hits", "Look-ups with a result from the cache.", "cache", hits)
    yield _counters("cache_misses", "Look-ups without a result from the cache.", "cache", misses)
    yield _gauges(
        "cache_entries",
        "Entries of a cache.",
        "cache",
        {name: len(cache) for name, cache in counted.items()},
    )


def streams(store: Store) -> Iterator[Metric]:
    """Yield the position of each writer, as known to this process."""
    positions = GaugeMetricFamily(
        f"{PREFIX}_stream_position",
        "Position of a writer in a stream.",
        labels=["stream", "writer"],
    )
    lags = GaugeMetricFamily(
        f"{PREFIX}_stream_lag",
        "Distance to the furthest writer.",
        labels=["stream", "writer"],
    )
    for name, stream in store.streams.items():
        known = dict(stream.positions())
        furthest = max(known.values(), default=0)
        for instance_name, position in known.items():
            positions.add_metric([name, instance_name], position)
            lags.add_metric([name, instance_name], furthest - position)
    yield positions
    yield lags
    yield _gauge(
        "stream_poll_age_seconds",
        "Seconds since the positions of all writers were last read.",
        time.monotonic() - store.measures.streams_polled_at,
    )


def database(store: Store) -> Iterator[Metric]:
    """Yield the metrics of the pool and of Postgres."""
    measures = store.measures
    opened, used, waiting = store.database.connections
    yield _gauge("pool_connections", "Open connections.", opened)
    yield _gauge("pool_connections_used", "Connections in use.", used)
    yield _gauge(
        "pool_connections_max",
        "Largest number of connections.",
        store.database.config.pool_size_max,
    )
    yield _gauge("pool_waiting", "Callers that wait for a connection.", waiting)
    yield _histogram(
        "pool_wait_seconds",
        "Wait for a connection, if none was idle.",
        measures.pool_waits,
    )
    yield _counter(
        "statements",
        "Statements sent, BEGIN and COMMIT included: round trips.",
        measures.statements,
    )
    yield _counters(
        "database_errors",
        "Errors of Postgres or of the connection, by class.",
        "error",
        dict.fromkeys(DATABASE_ERRORS, 0) | dict(measures.database_errors),  # as those of calls
    )


def replica(store: Store) -> Iterator[Metric]:
    """Yield the metrics of reads on a standby."""
    measures, standby = store.measures, store.reads.standby
    yield _counters(
        "replica_reads",
        "Reads of a store with a standby, by outcome; all but standby are those of the primary.",
        "outcome",
        {outcome: measures.replica_reads[outcome] for outcome in READ_OUTCOMES},
    )
    yield _histogram(
        "replica_wait_seconds",
        "Wait of reads for a standby that had not replayed what they need.",
        measures.replica_waits,
    )
    yield _gauge(
        "replica_resting",
        "1 while reads leave the standby alone, because it failed or is behind.",
        float(standby is not None and standby.is_resting),
    )


def sizes(store: Store) -> Iterator[Metric]:
    """Yield the sizes on disk, at most a minute older than the scrape before."""
    size = GaugeMetricFamily(
        f"{PREFIX}_table_bytes",
        "Bytes on disk of a table: rows, large values (TOAST), indexes.",
        labels=["table", "part"],
    )
    rows = GaugeMetricFamily(
        f"{PREFIX}_table_rows", "Rows of a table, as Postgres estimates them.", labels=["table"]
    )
    database = GaugeMetricFamily(f"{PREFIX}_database_bytes", "Bytes on disk of the database.")
    known = store.sizes.latest()
    if known is not None:
        database.add_metric([], known.database_bytes)
        for table in known.tables:
            rows.add_metric([table.table_name], table.rows_estimate)
            size.add_metric([table.table_name, "rows"], table.table_bytes)
            size.add_metric([table.table_name, "large_values"], table.toast_bytes)
            size.add_metric([table.table_name, "indexes"], table.index_bytes)
    yield size
    yield rows
    yield database


PARTS: Final[tuple[Callable[[Store], Iterator[Metric]], ...]] = (
    calls,
    writer,
    caches,
    streams,
    database,
    replica,
    sizes,
)


def _counter(name: str, documentation: str, value: int) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", documentation, value=value)


def _counters(name: str, documentation: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", documentation, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], value)
    return family


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", documentation, value=value)


def _gauges(name: str, documentation: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, documentation: str, values: Distribution) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", documentation)
    family.add_metric([], _buckets(values), values.total)
    return family


def _histograms(
    name: str, documentation: str, label: str, values: Mapping[str, Distribution]
) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", documentation, labels=[label])
    for key, value in list(values.items()):
        family.add_metric([key], _buckets(value), value.total)
    return family


def _buckets(values: Distribution) -> list[tuple[str, float]]:
    """Return the cumulative counts of the exposition format."""
    names = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(list(values.counts))), strict=True))
