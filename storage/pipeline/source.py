"""`RoomEvents`: the events of a store as a data source of Spark, format "room_events".

    spark.dataSource.register(RoomEvents)
    spark.read.format("room_events").option("dsn", dsn).load()

A batch read sees what was committed when it was planned: tasks share the numbers of the events in stretches, and each leaves out what the
position of that moment does not cover. Columns: those of the schema or of the option ``columns``; others are not fetched (Spark does not tell
a Python source which columns a query uses). With the option ``pushdown`` filters on room, type, sender and id by equality are applied by
Postgres. Spark wants to be told of it as well (``spark.sql.python.filterPushdown.enabled``) and refuses a source that pushes unasked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.types import StructType

from storage.database.arrow import arrow_snapshot
from storage.pipeline.options import Options
from storage.pipeline.positions import Bounds, between, current, deployment_of, token_of
from storage.pipeline.rows import ddl, read_rows
from storage.pipeline.selecting import Chosen, Select, by_number, by_position, numbers, outliers_of, room_numbers, split, taken
from storage.pipeline.sink import EventWriter
from storage.pipeline.streaming import EventStream
from storage.streams import SyncToken

Kind = Literal["numbers", "positions", "outliers"]
SELECT: Final[Mapping[Kind, Select]] = {"numbers": by_number, "positions": by_position, "outliers": outliers_of}


@dataclass
class Stretch(InputPartition):
    """What one task reads, from ``begin`` to before ``end``: numbers of events, stream orderings, or numbers of rooms with outliers."""

    begin: int
    end: int
    bounds: Bounds
    kind: Kind


class RoomEvents(DataSource):
    """The data source. Options: `storage.pipeline.options.Options`."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "room_events"

    def schema(self) -> str:
        """The columns asked for, all unless there is an option ``columns``."""
        return ddl(Options.of(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads events once."""
        asked = _asked(self.options, schema)
        return FilteringReader(asked) if asked.pushdown else EventReader(asked)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Follows the streams of events."""
        return EventStream(_asked(self.options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Appends events; ``overwrite`` is refused."""
        return EventWriter(Options.of(self.options), schema.fieldNames(), overwrite=overwrite)


def _asked(options: Mapping[str, str], schema: StructType) -> Options:
    """The options, with the columns of the schema that is read by."""
    found = Options.of(options)
    return replace(found, columns=Options.of({"dsn": found.dsn, "columns": ",".join(schema.fieldNames())}).columns)


class EventReader(DataSourceReader):
    """One batch read."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.chosen = Chosen()

    def partitions(self) -> Sequence[InputPartition]:
        """Stretches of numbers, or after a token of stream orderings."""
        options = self.options
        with arrow_snapshot(options.dsn) as conn:
            deployment = deployment_of(conn)
            since = SyncToken() if options.since is None else token_of(conn, options.since, deployment)
            upto = current(conn) if options.upto is None else token_of(conn, options.upto, deployment)
            bounds = between(conn, since, upto)
            ranges: dict[Kind, tuple[int, int]] = {}
            if options.since is None and options.outliers:
                ranges["numbers"] = numbers(conn)
            else:
                ranges["positions"] = (bounds.after + 1, bounds.upto)
                if options.outliers:
                    ranges["outliers"] = room_numbers(conn)
        return [
            Stretch(begin, end, bounds, kind)
            for kind, (first, last) in ranges.items()
            for begin, end in split(first, last, options.partitions if kind != "outliers" else 1)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The events of a stretch."""
        assert isinstance(partition, Stretch)  # noqa: S101  # what `partitions` gave
        with arrow_snapshot(self.options.dsn) as conn:
            for nids in SELECT[partition.kind](conn, partition.begin, partition.end, partition.bounds, self.chosen):
                yield from read_rows(conn, nids, self.options.columns)


class FilteringReader(EventReader):
    """One batch read that takes filters of the query."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Keep those that Postgres applies; the others are Spark's."""
        self.chosen, left = taken(filters, self.chosen)
        return left
