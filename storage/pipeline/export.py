"""`export_parquet`: a store as Parquet, whole or what came since a token, verified by reading back.

    events/exported=1/day=2026-11-20/part-….parquet      the columns of `RoomEvents`, received bytes
                                                         among them
    state_deltas/exported=1/part-….parquet                what each stream ordering changed in the
                                                          current state of its room
    visibility/exported=1/part-….parquet                  who may see which audiences, as intervals;
                                                          the table as it was then
    manifests/1.json                                      the token up to which it goes, and how
                                                          many rows there are

Each export adds a number. One that goes on from another's token adds what is new; events are never
written twice. Outliers, whose place in no stream tells that they are new, are written again each
time: the latest copy counts. An export is imported by `import_archive` of its folder ``events``;
what was stored answers "duplicate".
"""

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date, timedelta
from itertools import zip_longest
from typing import Any, Final, LiteralString, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import SparkSession

from storage.config import Config
from storage.database.arrow import ArrowConnection, arrow_snapshot
from storage.errors import InputError, StorageCorrupt
from storage.pipeline.failures import told
from storage.pipeline.imports.lines import opened
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
SELECT r.room_id, p.name AS principal, lower(a.stretch) AS first_audience,
    upper(a.stretch) AS end_audience, v.last_join_topological
FROM whole_visibility v
JOIN rooms r USING (room_nid)
JOIN principals p USING (principal_nid)
CROSS JOIN LATERAL unnest(v.audiences) AS a (stretch)
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
"""Columns worth a dictionary."""

ROOMS_PER_STATEMENT: Final = 200
PARTITIONS: Final = 8
FILE_ROWS: Final = 40_000
DAY_MS: Final = 86_400_000
EPOCH: Final = date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Export:
    """One export.

    ``upto`` is the token to go on from; ``since`` that from which this one went on, None for a
    whole one.
    """

    number: int
    since: str | None
    upto: str
    events: int
    state_deltas: int
    visibility: int


@told()
def export_parquet(
    spark: SparkSession,
    dsn: str,
    path: str,
    since: str | None = None,
    *,
    partitions: int = PARTITIONS,
    verify: bool = True,
) -> Export:
    """Write events, state deltas and visibility below ``path``; with ``since`` (an earlier `Export.upto`) what came after it.

    ``partitions`` tasks at most read at once, each by one connection. ``verify`` reads the files back: `StorageCorrupt` if they have other
    events, or other bytes, than the store. `InvalidToken`, `DatabaseError`.
    """
    where, folder = opened(path)
    number = 1 + max((_number(info.base_name) for info in _manifests(where, folder)), default=0)
    with arrow_snapshot(dsn) as conn:
        deployment = deployment_of(conn)
        start = SyncToken() if since is None else token_of(conn, since, deployment)
        end = current(conn)
    tokens = (start.print(deployment), end.print(deployment))
    stretches = _stretches(dsn, tokens, partitions)
    task = ExportTask(dsn, tokens, path.rstrip("/"), number, verify=verify)
    for name in TABLES:
        _empty(task.folder(name))
    written = _run(spark, stretches, task)
    made = Export(
        number,
        since,
        tokens[1],
        *(sum(row["rows"] for row in written if row["name"] == name) for name in TABLES),
    )
    _write_manifest(where, f"{folder}/manifests", made)
    return made


def _write_manifest(where: Any, folder: str, made: Export) -> None:
    """Write the manifest; it is whole at its name, or not there."""
    where.create_dir(folder, recursive=True)
    begun = f"{folder}/{made.number}.json.new"
    with where.open_output_stream(begun) as file:
        file.write(json.dumps(asdict(made)).encode())
    where.move(begun, f"{folder}/{made.number}.json")


def last_export(path: str) -> Export | None:
    """The export made last below a path, to go on from; None where there is none.

    `InputError` for a manifest that cannot be read.
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
    """The export that a manifest tells of.

    `InputError` names the file and says what is wrong with it.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{name} is no manifest of an export: it is cut off, or no JSON ({error}). Remove it, or give the token to go on from"
        ) from None
    given = found if isinstance(found, dict) else {}
    wanted = {one.name for one in fields(Export)}
    if given.keys() != wanted:
        lacks, more = (
            ", ".join(sorted(some)) or "nothing"
            for some in (wanted - given.keys(), given.keys() - wanted)
        )
        raise InputError(
            f"{name} is no manifest of an export: it lacks {lacks}, and has too much: {more}"
        )
    counts = [given[one] for one in ("number", "events", "state_deltas", "visibility")]
    if not (
        all(type(one) is int for one in counts)
        and isinstance(given["upto"], str)
        and isinstance(given["since"], str | None)
    ):
        raise InputError(f"{name} is no manifest of an export: a field has a value of another type")
    return Export(**given)


def _manifests(where: Any, folder: str) -> list[Any]:
    found = where.get_file_info(fs.FileSelector(f"{folder}/manifests", allow_not_found=True))
    return [info for info in found if info.base_name.endswith(".json")]


def _number(name: str) -> int:
    number = name.removesuffix(".json")
    if not number.isdecimal():
        raise InputError(f"{name} is no manifest of an export")
    return int(number)


# ---------------------------------------------------------------------------------------------------------------
# stretches


class ExportRange(NamedTuple):
    """What a task writes: stream orderings of ``events``, or numbers of rooms (for outliers and the other tables), ``begin`` to before ``end``."""

    number: int
    name: str
    begin: int
    end: int
    outliers: bool = False


def _stretches(dsn: str, tokens: tuple[str, str], partitions: int) -> list[ExportRange]:
    with arrow_snapshot(dsn) as conn:
        bounds = _bounds(conn, tokens)
        rooms = room_numbers(conn)
    found = [("events", *pair, False) for pair in split(bounds.after + 1, bounds.upto, partitions)]
    found += [("events", *pair, True) for pair in split(*rooms, partitions)]
    found += [
        (name, *pair, False)
        for name in ("state_deltas", "visibility")
        for pair in split(*rooms, partitions)
    ]
    return [ExportRange(number, *one) for number, one in enumerate(found)]


def _bounds(conn: ArrowConnection, tokens: tuple[str, str]) -> Bounds:
    deployment = deployment_of(conn)
    since, upto = (SyncToken.parse(token, deployment) for token in tokens)
    return between(conn, since, upto)


def _empty(folder: str) -> None:
    """What an export that did not come to its end left there is no part of this one."""
    where, inner = opened(folder)
    where.create_dir(inner, recursive=True)
    where.delete_dir_contents(inner)


def _tasks(stretches: Sequence[ExportRange]) -> list[list[ExportRange]]:
    """What each task writes, by one connection: a stretch of events, and all else of some rooms, which is little."""
    events = [[one] for one in stretches if one.name == "events" and not one.outliers]
    rooms: dict[int, list[ExportRange]] = {}
    for one in stretches:
        if one.name != "events" or one.outliers:
            rooms.setdefault(one.begin, []).append(one)
    return [[*some, *others] for some, others in zip_longest(events, rooms.values(), fillvalue=())]


def _run(spark: SparkSession, stretches: list[ExportRange], task: "ExportTask") -> list[Any]:
    tasks = _tasks(stretches)

    def write(batches: Any) -> Any:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pylist(list(task.files(tasks[index])), schema=WRITTEN)

    frame = spark.range(0, len(tasks), 1, max(len(tasks), 1))
    return frame.mapInArrow(write, spark_ddl(WRITTEN)).collect()


# --------------------------------------------------------------------------------------------------------------------
# files


@dataclass(frozen=True, slots=True)
class ExportTask:
    """Writes stretches as files."""

    dsn: str
    tokens: tuple[str, str]
    path: str
    number: int
    verify: bool
    config: Config = field(default_factory=Config.from_env)

    def folder(self, name: str) -> str:
        """Where the files of a table are."""
        return f"{self.path}/{name}/exported={self.number}"

    def files(self, stretches: Iterable[ExportRange]) -> Iterator[dict[str, Any]]:
        """The files of some stretches, each as a row of `WRITTEN`; whole at their names, or not there."""
        with arrow_snapshot(self.dsn, config=self.config) as conn:
            bounds = _bounds(conn, self.tokens)
            for stretch in stretches:
                for at, (day, table) in enumerate(_gathered(self._tables(conn, bounds, stretch))):
                    folder = self.folder(stretch.name) + (f"/day={day}" if day else "")
                    yield {
                        "name": stretch.name,
                        "rows": self._file(
                            folder, f"part-{stretch.number:05}-{at:04}.parquet", table
                        ),
                    }

    def _tables(
        self, conn: ArrowConnection, bounds: Bounds, stretch: ExportRange
    ) -> Iterator[tuple[str, pa.Table]]:
        """What is to be written, by day where there are days."""
        if stretch.name != "events":
            for first, after in split(
                stretch.begin,
                stretch.end - 1,
                max((stretch.end - stretch.begin) // ROOMS_PER_STATEMENT, 1),
            ):
                arguments = bounds.columns() if stretch.name == "state_deltas" else ()
                statement = SQL_STATE_DELTAS if stretch.name == "state_deltas" else SQL_VISIBILITY
                yield "", conn.table(statement, first, after, *arguments).cast(TABLES[stretch.name])
            return
        select = outliers_of if stretch.outliers else by_position
        for nids in select(conn, stretch.begin, stretch.end, bounds, Chosen()):
            yield from _by_day(pa.Table.from_batches(read_rows(conn, nids, COLUMNS), ARROW_SCHEMA))

    def _file(self, folder: str, name: str, table: pa.Table) -> int:
        """Write a file, read it back, and give it its name.

        `StorageCorrupt` if what is there is not what was written.
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
    """The rows by day of receipt, days in order."""
    days = pc.divide(table.column("received_ts"), DAY_MS)
    found = sorted(pc.unique(days).to_pylist())
    for day in found:
        yield (
            str(EPOCH + timedelta(days=day)),
            table if len(found) == 1 else table.filter(pc.equal(days, day)),
        )


def _gathered(tables: Iterable[tuple[str, pa.Table]]) -> Iterator[tuple[str, pa.Table]]:
    """Tables of one day put together, until they are enough for a file."""
    held: dict[str, list[pa.Table]] = {}
    for day, table in tables:
        held.setdefault(day, []).append(table)
        if sum(one.num_rows for one in held[day]) >= FILE_ROWS:
            yield day, pa.concat_tables(held.pop(day))
    for day, left in held.items():
        whole = pa.concat_tables(left)
        if whole.num_rows:
            yield day, whole
