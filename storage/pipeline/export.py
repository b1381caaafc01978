"""`export_parquet`: export a whole store, or the events since a token, as verified Parquet.

  events/exported=1/day=2026-11-20/part-….parquet      the columns of `RoomEvents`, with the
                                                        received bytes
  state_deltas/exported=1/part-….parquet                what each stream ordering changed in the
                                                        current state of its room
  visibility/exported=1/part-….parquet                  the principals of each audience, as ranges;
                                                        the table at the time of the export
  manifests/1.json                                      the token up to which it goes, and the
                                                        numbers of rows

Each export adds a number. An export from the token of an earlier one adds the new rows. An event is
written again if it was readmitted since: the row then has its ``arrival_ordering`` as well.
Outliers have no stream position, so each export writes all of them again, and the latest copy
counts. `import_archive` of the folder ``events`` imports an export. Events that are already stored
return "duplicate".
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date, timedelta
from itertools import zip_longest
from math import ceil
from typing import Any, Final, LiteralString, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import SparkSession

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_snapshot
from storage.errors import InputError, StorageCorrupt
from storage.pipeline.file_systems import opened
from storage.pipeline.session import executor_errors
from storage.pipeline.source.filters import Chosen, by_position, outliers_of, room_numbers, split
from storage.pipeline.source.rows import ARROW_SCHEMA, COLUMNS, read_rows, spark_ddl
from storage.pipeline.source.token_bounds import Bounds, between, current, deployment_of, token_of
from storage.streams import SyncToken

SQL_STATE_DELTAS: Final[LiteralString] = """
SELECT d.stream_ordering, r.room_id, t.type, k.state_key, e.event_id, o.event_id AS prev_event_id
FROM state_deltas d
JOIN rooms r USING (room_nid)
JOIN state_keys k USING (state_key_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN events e ON e.event_nid = d.event_nid
LEFT JOIN events o ON o.event_nid = d.prev_event_nid
JOIN unnest($3::bigint[], $4::bool[], $5::bigint[], $6::bigint[]) AS b (writer_nid, backfilled,
    after_id, upto_id)
    ON b.writer_nid = d.writer_nid AND NOT b.backfilled
WHERE d.room_nid >= $1::bigint AND d.room_nid < $2::bigint
    AND d.stream_ordering > b.after_id AND d.stream_ordering <= b.upto_id
ORDER BY d.room_nid, d.stream_ordering
"""

SQL_VISIBILITY: Final[LiteralString] = """
SELECT r.room_id, p.name AS principal, lower(a.span) AS first_audience,
    upper(a.span) AS end_audience, v.last_join_topological
FROM whole_visibility v
JOIN rooms r USING (room_nid)
JOIN principals p USING (principal_nid)
CROSS JOIN LATERAL unnest(v.audiences) AS a (span)
WHERE v.room_nid >= $1::bigint AND v.room_nid < $2::bigint
ORDER BY v.room_nid, p.name, first_audience
"""

STATE_DELTAS: Final = pa.schema(
    [
        ("stream_ordering", pa.int64()),
        ("room_id", pa.string()),
        ("type", pa.string()),
        ("state_key", pa.string()),
        ("event_id", pa.string()),
        ("prev_event_id", pa.string()),
    ]
)
VISIBILITY: Final = pa.schema(
    [
        ("room_id", pa.string()),
        ("principal", pa.string()),
        ("first_audience", pa.int64()),
        ("end_audience", pa.int64()),
        ("last_join_topological", pa.int64()),
    ]
)
TABLES: Final = {"events": ARROW_SCHEMA, "state_deltas": STATE_DELTAS, "visibility": VISIBILITY}
WRITTEN: Final = pa.schema([("name", pa.string()), ("rows", pa.int64())])
REPEATED: Final = frozenset(
    [
        "room_id",
        "room_version",
        "type",
        "state_key",
        "sender",
        "origin",
        "rejected",
        "principal",
        "auth_events",
    ]
)
"""Columns with few distinct values, written with a dictionary."""

ROOMS_PER_STATEMENT: Final = 200
PARTITIONS: Final = 8
FILE_ROWS: Final = 40_000
"""A file of a task and a day has at most so many rows, and those of one more page or statement."""

EVENTS_EACH: Final = 10_000
"""Positions of a task, unless that makes too many tasks: few new events make one file a day."""
DAY_MS: Final = 86_400_000
EPOCH: Final = date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Export:
    """One export.

    ``upto`` is the token to continue from; ``since`` the token from which this one continued, None
    for a whole one.
    """

    number: int
    since: str | None
    upto: str
    events: int
    state_deltas: int
    visibility: int


@executor_errors()
def export_parquet(
    spark: SparkSession,
    dsn: str,
    path: str,
    since: str | None = None,
    *,
    partitions: int = PARTITIONS,
    verify: bool = True,
) -> Export:
    """Write events, state deltas and visibility below ``path``, or those after the token ``since``.

    ``since`` is the `Export.upto` of an earlier export. At most ``partitions`` tasks read at once,
    with one connection each. ``verify`` reads the files back. Raise `StorageCorrupt` if their
    events or bytes differ from the store. Raise `InvalidToken` or `DatabaseError`.
    """
    where, folder = opened(path)
    number = 1 + max((_number(info.base_name) for info in _manifests(where, folder)), default=0)
    with arrow_snapshot(dsn) as conn:
        deployment = deployment_of(conn)
        start = SyncToken() if since is None else token_of(conn, since, deployment)
        end = current(conn)
    tokens = (start.print(deployment), end.print(deployment))
    ranges = _ranges(dsn, tokens, partitions)
    task = ExportTask(dsn, tokens, path.rstrip("/"), number, verify=verify)
    for name in TABLES:
        _empty(task.folder(name))
    written = _run(spark, ranges, task)
    made = Export(
        number,
        since,
        tokens[1],
        *(sum(row["rows"] for row in written if row["name"] == name) for name in TABLES),
    )
    _write_manifest(where, f"{folder}/manifests", made)
    return made


def _write_manifest(where: Any, folder: str, made: Export) -> None:
    """Write the manifest; a crash leaves either the whole file or none."""
    where.create_dir(folder, recursive=True)
    begun = f"{folder}/{made.number}.json.new"
    with where.open_output_stream(begun) as file:
        file.write(json.dumps(asdict(made)).encode())
    where.move(begun, f"{folder}/{made.number}.json")


def last_export(path: str) -> Export | None:
    """Return the latest export below a path, to continue from; None where there is none.

    Raise `InputError` for a manifest that cannot be read.
    """
    where, folder = opened(path)
    manifests = sorted(_manifests(where, folder), key=lambda info: _number(info.base_name))
    if not manifests:
        return None
    with where.open_input_file(manifests[-1].path) as file:
        return _read_manifest(
            f"{path.rstrip('/')}/manifests/{manifests[-1].base_name}", file.read()
        )


def _read_manifest(name: str, text: bytes) -> Export:
    """Return the export that a manifest describes.

    Raise `InputError` with the file name and the defect.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{name} is no manifest of an export: it is cut off, or no JSON ({error})."
            " Remove it, or give the token to continue from"
        ) from None
    manifest = value if isinstance(value, dict) else {}
    names = {one.name for one in fields(Export)}
    if manifest.keys() != names:
        lacks, more = (
            ", ".join(sorted(some)) or "nothing"
            for some in (names - manifest.keys(), manifest.keys() - names)
        )
        raise InputError(
            f"{name} is no manifest of an export: it lacks {lacks}, and has too much: {more}"
        )
    counts = [manifest[one] for one in ("number", "events", "state_deltas", "visibility")]
    if not (
        all(type(one) is int for one in counts)
        and isinstance(manifest["upto"], str)
        and isinstance(manifest["since"], str | None)
    ):
        raise InputError(f"{name} is no manifest of an export: a field has a value of another type")
    return Export(**manifest)


def _manifests(where: Any, folder: str) -> list[Any]:
    infos = where.get_file_info(fs.FileSelector(f"{folder}/manifests", allow_not_found=True))
    return [info for info in infos if info.base_name.endswith(".json")]


def _number(name: str) -> int:
    number = name.removesuffix(".json")
    if not number.isdecimal():
        raise InputError(f"{name} is no manifest of an export")
    return int(number)


# ------------------------------------------------------------------------------------------------
# ranges


class ExportRange(NamedTuple):
    """The rows that a task writes: ``begin`` to before ``end``.

    They are stream orderings for ``events``, and room nids for outliers and the other tables.
    """

    number: int
    name: str
    begin: int
    end: int
    outliers: bool = False


def _ranges(dsn: str, tokens: tuple[str, str], partitions: int) -> list[ExportRange]:
    with arrow_snapshot(dsn) as conn:
        bounds = _bounds(conn, tokens)
        first, last = room_numbers(conn)
    positions = _split(bounds.after + 1, bounds.upto, partitions, EVENTS_EACH)
    rooms = _split(first, last, partitions, ROOMS_PER_STATEMENT)
    spans = [("events", *pair, False) for pair in positions]
    spans += [("events", *pair, True) for pair in rooms]
    spans += [(name, *pair, False) for name in ("state_deltas", "visibility") for pair in rooms]
    return [ExportRange(number, *span) for number, span in enumerate(spans)]


def _split(first: int, last: int, most: int, each: int) -> list[tuple[int, int]]:
    """Split a range into parts of ``each``, or larger ones if these were more than ``most``."""
    return list(split(first, last, max(min(most, ceil((last + 1 - first) / each)), 1)))


def _bounds(conn: ArrowConnection, tokens: tuple[str, str]) -> Bounds:
    deployment = deployment_of(conn)
    since, upto = (SyncToken.parse(token, deployment) for token in tokens)
    return between(conn, since, upto)


def _empty(folder: str) -> None:
    """Remove the files that an unfinished export left there."""
    where, inner = opened(folder)
    where.create_dir(inner, recursive=True)
    where.delete_dir_contents(inner)


def _tasks(ranges: Sequence[ExportRange]) -> list[list[ExportRange]]:
    """Return the ranges of each task, which has one connection.

    A task gets a range of events, and all other tables for some rooms, which is little.
    """
    events = [[one] for one in ranges if one.name == "events" and not one.outliers]
    rooms: dict[int, list[ExportRange]] = {}
    for one in ranges:
        if one.name != "events" or one.outliers:
            rooms.setdefault(one.begin, []).append(one)
    return [[*some, *others] for some, others in zip_longest(events, rooms.values(), fillvalue=())]


def _run(spark: SparkSession, ranges: list[ExportRange], task: "ExportTask") -> list[Any]:
    tasks = _tasks(ranges)

    def write(batches: Any) -> Any:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pylist(list(task.files(tasks[index])), schema=WRITTEN)

    frame = spark.range(0, len(tasks), 1, max(len(tasks), 1))
    return frame.mapInArrow(write, spark_ddl(WRITTEN)).collect()


# ------------------------------------------------------------------------------------------------
# files


@dataclass(frozen=True, slots=True)
class ExportTask:
    """Writes ranges as files."""

    dsn: str = field(repr=False)  # it may contain a password
    tokens: tuple[str, str]
    path: str
    number: int
    verify: bool
    config: Config = field(default_factory=Config.from_env)

    def folder(self, name: str) -> str:
        """Return the folder of a table's files."""
        return f"{self.path}/{name}/exported={self.number}"

    def files(self, ranges: Iterable[ExportRange]) -> Iterator[dict[str, Any]]:
        """Write the files of some ranges, and yield each as a row of `WRITTEN`.

        A crash leaves either a whole file or none under its name.
        """
        with arrow_snapshot(self.dsn, config=self.config) as conn:
            bounds = _bounds(conn, self.tokens)
            for span in ranges:
                for at, (day, table) in enumerate(_gathered(self._tables(conn, bounds, span))):
                    folder = self.folder(span.name) + (f"/day={day}" if day else "")
                    yield {
                        "name": span.name,
                        "rows": self._file(folder, f"part-{span.number:05}-{at:04}.parquet", table),
                    }

    def _tables(
        self, conn: ArrowConnection, bounds: Bounds, span: ExportRange
    ) -> Iterator[tuple[str, pa.Table]]:
        """Yield the tables to write, by day for events."""
        if span.name != "events":
            for first, after in split(
                span.begin,
                span.end - 1,
                max((span.end - span.begin) // ROOMS_PER_STATEMENT, 1),
            ):
                arguments = bounds.columns() if span.name == "state_deltas" else ()
                statement = SQL_STATE_DELTAS if span.name == "state_deltas" else SQL_VISIBILITY
                yield "", conn.table(statement, first, after, *arguments).cast(TABLES[span.name])
            return
        select = outliers_of if span.outliers else by_position
        for nids in select(conn, span.begin, span.end, bounds, Chosen()):
            yield from _by_day(pa.Table.from_batches(read_rows(conn, nids, COLUMNS), ARROW_SCHEMA))

    def _file(self, folder: str, name: str, table: pa.Table) -> int:
        """Write a file, read it back, and give it its name.

        Raise `StorageCorrupt` if the content differs.
        """
        where, inner = opened(folder)
        where.create_dir(inner, recursive=True)
        begun = f"{inner}/_{secrets.token_hex(4)}-{name}"
        pq.write_table(
            table,
            begun,
            filesystem=where,
            use_dictionary=[one for one in table.schema.names if one in REPEATED],
        )
        if self.verify and not pq.read_table(begun, filesystem=where, partitioning=None).equals(
            table
        ):
            raise StorageCorrupt("a file of the export differs from what was written", file=name)
        where.move(begun, f"{inner}/{name}")
        return int(table.num_rows)


def _by_day(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield the rows by day of receipt, in order of days."""
    days = pc.divide(table.column("received_ts"), DAY_MS)
    days_of_rows = sorted(pc.unique(days).to_pylist())
    for day in days_of_rows:
        yield (
            str(EPOCH + timedelta(days=day)),
            table if len(days_of_rows) == 1 else table.filter(pc.equal(days, day)),
        )


def _gathered(tables: Iterable[tuple[str, pa.Table]]) -> Iterator[tuple[str, pa.Table]]:
    """Yield the tables of each day, concatenated until they are large enough for a file."""
    waiting: dict[str, list[pa.Table]] = {}
    for day, table in tables:
        waiting.setdefault(day, []).append(table)
        if sum(one.num_rows for one in waiting[day]) >= FILE_ROWS:
            yield day, pa.concat_tables(waiting.pop(day))
    for day, left in waiting.items():
        whole = pa.concat_tables(left)
        if whole.num_rows:
            yield day, whole
