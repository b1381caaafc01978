"""`export_parquet`: a store as Parquet, whole or what came since a token, verified by reading back.

    events/exported=1/day=2026-11-20/part-….parquet      the columns of `RoomEvents`, received bytes among them
    state_deltas/exported=1/part-….parquet                what each stream ordering changed in the current state of its room
    visibility/exported=1/part-….parquet                  who may see which audiences, as intervals; the table as it was then
    manifests/1.json                                      the token up to which it goes, and how many rows there are

Each export adds a number. One that goes on from another's token adds what is new; events are never written twice. Outliers, whose place in
no stream tells that they are new, are written again each time: the latest copy counts. An export is imported by `import_archive` of its folder
``events``; what was stored answers "duplicate".
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, LiteralString

import pyarrow as pa
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from storage.database.arrow import ArrowConnection, arrow_snapshot
from storage.errors import InputError, StorageCorrupt
from storage.pipeline.archives import literal, opened
from storage.pipeline.positions import between, current, deployment_of
from storage.pipeline.rows import ARROW_SCHEMA, spark_ddl
from storage.pipeline.selecting import room_numbers, split
from storage.pipeline.source import RoomEvents
from storage.streams import SyncToken

SQL_STATE_DELTAS: Final[LiteralString] = """
SELECT d.stream_ordering, r.room_id, t.type, k.state_key, e.event_id, o.event_id AS prev_event_id
FROM state_deltas d
JOIN rooms r USING (room_nid)
JOIN state_keys k USING (state_key_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN events e ON e.event_nid = d.event_nid
LEFT JOIN events o ON o.event_nid = d.prev_event_nid
JOIN unnest($3::bigint[], $4::bool[], $5::bigint[], $6::bigint[]) AS b (writer_nid, backfilled, after_id, upto_id)
    ON b.writer_nid = d.writer_nid AND NOT b.backfilled
WHERE d.room_nid >= $1::bigint AND d.room_nid < $2::bigint
    AND d.stream_ordering > b.after_id AND d.stream_ordering <= b.upto_id
ORDER BY d.room_nid, d.stream_ordering
"""

SQL_VISIBILITY: Final[LiteralString] = """
SELECT r.room_id, p.name AS principal, lower(a.stretch) AS first_audience, upper(a.stretch) AS end_audience, v.last_join_topological
FROM visibility v
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
ROOMS_PER_STATEMENT: Final = 200
PARTITIONS: Final = 8


@dataclass(frozen=True, slots=True)
class Export:
    """One export. ``upto`` is the token to go on from; ``since`` that from which this one went on, None for a whole one."""

    number: int
    since: str | None
    upto: str
    events: int
    state_deltas: int
    visibility: int


def export_parquet(
    spark: SparkSession, dsn: str, path: str, since: str | None = None, *, partitions: int = PARTITIONS, verify: bool = True
) -> Export:
    """Write events, state deltas and visibility below ``path``; with ``since`` (an earlier `Export.upto`) what came after it.

    ``partitions`` tasks at most read at once, each by one connection. ``verify`` reads the files back: `StorageCorrupt` if they have other
    events, or other bytes, than the store. `InvalidToken`, `DatabaseError`.
    """
    where, folder = opened(path)
    number = 1 + max((_number(info.base_name) for info in _manifests(where, folder)), default=0)
    with arrow_snapshot(dsn) as conn:
        deployment = deployment_of(conn)
        start = SyncToken() if since is None else SyncToken.parse(since, deployment)
        end = current(conn)
    token = end.print(deployment)
    tokens = (start.print(deployment), token)
    base = path.rstrip("/")
    folders = {name: f"{base}/{name}/exported={number}" for name in TABLES}
    events = _events(spark, dsn, since, token, partitions)
    day = f.to_date(f.timestamp_millis("received_ts"))
    events.withColumn("day", day).write.mode("overwrite").partitionBy("day").parquet(folders["events"])
    for name in ("state_deltas", "visibility"):
        _of_rooms(spark, dsn, tokens, partitions, name).write.mode("overwrite").parquet(folders[name])
    written = {name: spark.read.schema(spark_ddl(schema)).parquet(literal(folders[name])) for name, schema in TABLES.items()}
    if verify:
        _read_back(written["events"], events)
    counts = [frame.count() for frame in written.values()]
    made = Export(number, since, token, *counts)
    where.create_dir(f"{folder}/manifests", recursive=True)
    with where.open_output_stream(f"{folder}/manifests/{number}.json") as file:
        file.write(json.dumps(asdict(made)).encode())
    return made


def last_export(path: str) -> Export | None:
    """The export made last below a path, to go on from."""
    where, folder = opened(path)
    manifests = sorted(_manifests(where, folder), key=lambda info: _number(info.base_name))
    if not manifests:
        return None
    with where.open_input_file(manifests[-1].path) as file:
        return Export(**json.loads(file.read()))


def _manifests(where: Any, folder: str) -> list[Any]:
    found = where.get_file_info(fs.FileSelector(f"{folder}/manifests", allow_not_found=True))
    return [info for info in found if info.base_name.endswith(".json")]


def _number(name: str) -> int:
    number = name.removesuffix(".json")
    if not number.isdecimal():
        raise InputError(f"{name} is no manifest of an export")
    return int(number)


def _events(spark: SparkSession, dsn: str, since: str | None, upto: str, partitions: int) -> DataFrame:
    spark.dataSource.register(RoomEvents)
    options = {"dsn": dsn, "partitions": str(partitions), "upto": upto, "outliers": "true"}
    return spark.read.format("room_events").options(**options, **({} if since is None else {"since": since})).load()


def _read_back(written: DataFrame, stored: DataFrame) -> None:
    """Compare ids, bytes and verdicts: how many rows, and the sums of their hashes."""
    columns = ["event_id", "pdu", "stream_ordering", "topological_ordering", "rejected"]
    found, expected = (
        frame.agg(f.count("*").alias("n"), f.sum(f.xxhash64(*columns).cast("decimal(38,0)")).alias("digest")).collect()[0]
        for frame in (written.where("origin <> 'outlier'"), stored.where("origin <> 'outlier'"))
    )
    if tuple(found) != tuple(expected):
        raise StorageCorrupt("the export differs from the store", found=tuple(found), expected=tuple(expected))


def _of_rooms(spark: SparkSession, dsn: str, tokens: tuple[str, str], partitions: int, what: str) -> DataFrame:
    """A table of all rooms, each task some stretches of room numbers."""
    with arrow_snapshot(dsn) as conn:
        first, last = room_numbers(conn)
    stretches = list(split(first, last, partitions))
    frame = spark.createDataFrame(stretches, "begin bigint, end bigint").repartition(len(stretches), "begin")
    schema = TABLES[what]

    def read(batches: Any) -> Any:
        with arrow_snapshot(dsn) as conn:
            for batch in batches:
                for given in batch.to_pylist():
                    for table in _tables(conn, given["begin"], given["end"], tokens, what):
                        yield from table.cast(schema).combine_chunks().to_batches()

    return frame.mapInArrow(read, spark_ddl(schema))


def _tables(conn: ArrowConnection, begin: int, end: int, tokens: tuple[str, str], what: str) -> Any:
    deployment = deployment_of(conn)
    since, upto = (SyncToken.parse(token, deployment) for token in tokens)
    bounds = between(conn, since, upto)
    for first, after in split(begin, end - 1, max((end - begin) // ROOMS_PER_STATEMENT, 1)):
        if what == "state_deltas":
            yield conn.table(SQL_STATE_DELTAS, first, after, *bounds.columns())
        else:
            yield conn.table(SQL_VISIBILITY, first, after)
