"""Archives as rows: NDJSON in stretches of bytes that executors read apart, with true line numbers; Parquet by Spark itself.

Paths are local or on a file system that pyarrow knows (``s3://``, ``hdfs://``), and must mean the same on every executor.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from storage.errors import InputError
from storage.pipeline.examining import EXAMINED, LINES
from storage.pipeline.rows import spark_ddl

STRETCH_BYTES: Final = 16 << 20
PIECE_BYTES: Final = 1 << 20
LINE_BYTES_MAX: Final = 16 << 20
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
ROWS_MAX: Final = 2_000
"""Lines in one Arrow batch."""


class Source(NamedTuple):
    """A file or folder to import; ``at`` is its place among those given."""

    at: int
    path: str
    size: int


class Stretch(NamedTuple):
    """The lines of a file that begin from ``begin`` to before ``end``; the first of them has the number ``number``."""

    at: int
    path: str
    begin: int
    end: int
    number: int = 1


STRETCHES: Final = "at int, path string, begin bigint, end bigint, number bigint"


@dataclass(frozen=True, slots=True)
class Sources:
    """What is to be imported, by form; ``broken``: Parquet files that cannot be read, with the reason."""

    lines: tuple[Source, ...]
    parquet: tuple[Source, ...]
    broken: Mapping[str, str]


def found(paths: Sequence[str]) -> Sources:
    """The files of these paths; a folder of Parquet files is one source. `InputError` for what is not there, or of another form."""
    lines: list[Source] = []
    parquet: list[Source] = []
    broken: dict[str, str] = {}
    for index, path in enumerate(paths):
        where, at = opened(path)
        info = where.get_file_info(at)
        if info.type == fs.FileType.NotFound:
            raise InputError(f"{path}: there is no such file or folder")
        files = [info] if info.type == fs.FileType.File else _files(where, at)
        tables = [one for one in files if one.path.endswith(".parquet")]
        if tables:
            wrong = {one.path: reason for one in tables if (reason := _damage(where, one.path)) is not None}
            broken |= wrong
            parquet += [Source(index, one.path, one.size) for one in tables if one.path not in wrong]
        elif any(one.path.endswith((".gz", ".zst", ".zip")) for one in files):
            raise InputError(f"{path}: packed files cannot be read in stretches: unpack them")
        else:
            lines += [Source(index, one.path, one.size) for one in files]
    return Sources(tuple(lines), tuple(parquet), broken)


def opened(path: str) -> tuple[Any, str]:
    """The file system of a path, and the path in it. `InputError`."""
    try:
        where, at = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: {error}") from None
    return where, at


def literal(path: str) -> str:
    """A path as Spark reads it by its letters: some would stand for patterns."""
    return re.sub(r"([\\\[\]{}*?])", r"\\\1", path)


def _files(where: Any, folder: str) -> list[Any]:
    """Data files below a folder, by name; what begins with ``_`` or ``.`` is not data (Spark writes such)."""
    infos = where.get_file_info(fs.FileSelector(folder, recursive=True))
    files = [info for info in infos if info.type == fs.FileType.File and info.base_name[0] not in "_."]
    return sorted(files, key=lambda info: str(info.path))


def _damage(where: Any, path: str) -> str | None:
    """What is wrong with a Parquet file as far as its end tells, or its columns."""
    try:
        with where.open_input_file(path) as file:
            names = pq.ParquetFile(file).schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        return str(error)
    return None if "pdu" in names else "it has no column pdu"


# ----------------------------------------------------------------------------------------------------------------- lines


def lines_frame(spark: SparkSession, sources: Iterable[Source], *, stretch_bytes: int = STRETCH_BYTES) -> DataFrame | None:
    """The lines of NDJSON files as `LINES`; None for no files. Line breaks are counted first, in parallel."""
    stretches = [
        Stretch(one.at, one.path, begin, min(begin + stretch_bytes, one.size))
        for one in sources
        for begin in range(0, one.size, stretch_bytes)
    ]
    if not stretches:
        return None
    counted = _frame(spark, stretches).mapInArrow(_count_all, "at int, path string, begin bigint, lines bigint").collect()
    counts = {(row["at"], row["path"], row["begin"]): row["lines"] for row in counted}
    return _frame(spark, list(_numbered(stretches, counts))).mapInArrow(_read_all, spark_ddl(LINES))


def _frame(spark: SparkSession, stretches: Sequence[Stretch]) -> DataFrame:
    """A partition each."""
    return spark.createDataFrame([tuple(one) for one in stretches], STRETCHES).repartition(len(stretches), "at", "path", "begin")


def _numbered(stretches: Iterable[Stretch], counts: Mapping[tuple[int, str, int], int]) -> Iterator[Stretch]:
    number, file = 1, None
    for one in stretches:
        if (one.at, one.path) != file:
            number, file = 1, (one.at, one.path)
        yield one._replace(number=number)
        number += counts[one.at, one.path, one.begin]


def _count_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    names = ["at", "path", "begin", "lines"]
    for batch in batches:
        rows = [Stretch(**row) for row in batch.to_pylist()]
        counted = [(one.at, one.path, one.begin, sum(1 for _ in _lines(one))) for one in rows]
        columns = [
            pa.array([row[at] for row in counted], kind) for at, kind in enumerate([pa.int32(), pa.string(), pa.int64(), pa.int64()])
        ]
        yield pa.RecordBatch.from_arrays(columns, names)


def _read_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for row in batch.to_pylist():
            stretch = Stretch(**row)
            rows: list[dict[str, Any]] = []
            for number, raw in enumerate(_lines(stretch), stretch.number):
                if raw.strip():
                    rows.append({"path_index": stretch.at, "place": number, "source": stretch.path, "line": number, "raw": raw})
                if len(rows) == ROWS_MAX:
                    yield pa.RecordBatch.from_pylist(rows, schema=LINES)
                    rows = []
            yield pa.RecordBatch.from_pylist(rows, schema=LINES)


def _lines(stretch: Stretch) -> Iterator[bytes]:
    """The lines that begin within the stretch, the last one to its end, without line breaks. Too long ones are cut off."""
    where, path = opened(stretch.path)
    with where.open_input_file(path) as file:
        at = stretch.begin
        if at:  # pass over what is left of a line that began before: nothing but its break if one begins just here
            file.seek(at - 1)
            at += len(_line(file)) - 1
            file.seek(at)
        rest = b""
        while at < stretch.end and (piece := file.read(PIECE_BYTES)):
            *ended, rest = (rest + piece).split(b"\n")
            for one in ended:
                if at < stretch.end:
                    yield _kept(one, at)
                at += len(one) + 1
        if rest and at < stretch.end:
            yield _kept(rest, at)


def _kept(line: bytes, at: int) -> bytes:
    return (line if at else line.removeprefix(BYTE_ORDER_MARK))[: LINE_BYTES_MAX + 1]


def _line(file: Any) -> bytes:
    """What is left of the line at hand, with its break."""
    parts: list[bytes] = []
    while piece := file.read(PIECE_BYTES):
        head, found_break, _ = piece.partition(b"\n")
        parts += [head, found_break]
        if found_break:
            break
    return b"".join(parts)


# --------------------------------------------------------------------------------------------------------------- Parquet


def parquet_frame(spark: SparkSession, sources: Sequence[Source]) -> DataFrame | None:
    """The rows of Parquet files as `LINES`; None for no files. Exports are taken in the order of their stream."""
    frames = [_of_path(spark, index, [one.path for one in sources if one.at == index]) for index in sorted({one.at for one in sources})]
    if not frames:
        return None
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame)
    return whole


def _of_path(spark: SparkSession, index: int, files: Sequence[str]) -> DataFrame:
    frame = spark.read.option("mergeSchema", "true").parquet(*map(literal, files))
    line = f.col("_metadata.row_index") + 1
    place = f.coalesce(f.col("stream_ordering"), f.lit(0)) if "stream_ordering" in frame.columns else line
    given: dict[str, Any] = {
        "path_index": f.lit(index),
        "place": place.cast("bigint"),
        "source": f.col("_metadata.file_path"),
        "line": line.cast("bigint"),
        "raw": f.lit(None).cast("binary"),
    }
    for name in ("pdu", "room_version", "origin", "state_before"):
        kind = spark_ddl(pa.schema([LINES.field(name)])).partition(" ")[2]
        given[name] = f.col(name).cast(kind) if name in frame.columns else f.lit(None).cast(kind)
    return frame.select(*(given[name].alias(name) for name in LINES.names))


def broken_frame(spark: SparkSession, broken: Mapping[str, str]) -> DataFrame:
    """A row for each file that cannot be read, as `EXAMINED`."""
    rows = [{"source": path, "outcome": "bad_file", "reason": reason} for path, reason in broken.items()]
    filled = [tuple(row.get(name) for name in EXAMINED.names) for row in rows]
    return spark.createDataFrame(filled, spark_ddl(EXAMINED))
