"""The Parquet files of a table, and what the log says about them.

A file is written under a name that no other has, and belongs to the table once a commit names it.
After a crash it stays unnamed, and vacuum deletes it.
"""

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import StorageError
from storage.pipeline.imports.lines import opened
from storage.pipeline.lake.tables import MirrorTable

FILE_ROWS: Final = 50_000
"""Rows of a file at most: an update rewrites whole files."""
PART_ROWS: Final = 5_000
"""Rows of a file that are read at a time."""
FILE_BYTES: Final = 256 << 20
"""Bytes in memory after which the rows of a file are enough, where events are very large."""


@dataclass(frozen=True, slots=True)
class MirrorFile:
    """A file of a table, with what the log has of it.

    ``first`` and ``last``: the range of the key in its rows. No commit names it yet, if it was just
    written.
    """

    path: str
    size: int
    rows: int
    first: int
    last: int
    day: str | None

    def stats(self, key: str) -> str:
        """Return the statistics of the log: the number of rows, and the range of the key."""
        found: dict[str, Any] = {"numRecords": self.rows}
        if key:
            found |= {
                "minValues": {key: self.first},
                "maxValues": {key: self.last},
                "nullCount": {key: 0},
            }
        return json.dumps(found)


@contextmanager
def written_below(folder: str, other: type[Exception] = OSError) -> Iterator[None]:
    """Raise `StorageError` where a file cannot be written: a full disk, a lost privilege.

    ``other``: an error of a library that means the same.
    """
    try:
        yield
    except (OSError, other) as error:
        raise StorageError(
            f"{folder}: the table cannot be written: {' '.join(str(error).split())}."
            " Its last version stays as it is; mend the cause and run this again"
        ) from error


def write_rows(folder: str, table: MirrorTable, rows: pa.Table) -> Iterator[MirrorFile]:
    """Write rows as files, in order of the key, those of a day by themselves."""
    for day, some in _by_day(rows) if table.by_day else [(None, rows)]:
        ordered = (some.sort_by(table.key) if table.key else some).select(table.columns.names)
        for start in range(0, ordered.num_rows, FILE_ROWS):
            yield _write(folder, table, ordered.slice(start, FILE_ROWS), day)


def gathered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows of these tables in tables of about a file each; nothing for no rows."""
    held: list[pa.Table] = []
    for table in tables:
        held += [table] if table.num_rows else []
        rows, size = (sum(getattr(one, what) for one in held) for what in ("num_rows", "nbytes"))
        if rows >= FILE_ROWS or size >= FILE_BYTES:
            yield pa.concat_tables(held)
            held.clear()
    if held:
        yield pa.concat_tables(held)


def read_file(folder: str, table: MirrorTable, path: str, columns: list[str]) -> pa.Table:
    """Return some columns of a file. ``path``: below the folder."""
    wanted = pa.schema([table.schema.field(one) for one in columns])
    return pa.concat_tables([wanted.empty_table(), *file_parts(folder, table, path, columns)])


def file_parts(
    folder: str, table: MirrorTable, path: str, columns: list[str]
) -> Iterator[pa.Table]:
    """Yield the same in parts of at most `PART_ROWS`."""
    where, inner = opened(folder)
    wanted = pa.schema([table.schema.field(one) for one in columns])
    day = path.partition("/")[0].removeprefix("day=")
    with where.open_input_file(f"{inner}/{path}") as file:
        parts = pq.ParquetFile(file, pre_buffer=True).iter_batches(
            PART_ROWS, columns=[name for name in columns if name != "day"], use_threads=False
        )
        for batch in parts:
            part = pa.Table.from_batches([batch])
            if "day" in columns:
                days = pa.repeat(pa.scalar(date.fromisoformat(day), pa.date32()), part.num_rows)
                part = part.append_column("day", days)
            yield part.select(columns).cast(wanted)


def _by_day(rows: pa.Table) -> list[tuple[str | None, pa.Table]]:
    days = rows.column("day")
    found = sorted(pc.unique(days).to_pylist())
    return [
        (day.isoformat(), rows if len(found) == 1 else rows.filter(pc.equal(days, day)))
        for day in found
    ]


def _write(folder: str, table: MirrorTable, rows: pa.Table, day: str | None) -> MirrorFile:
    where, inner = opened(folder)
    path = f"{f'day={day}/' if day else ''}part-{secrets.token_hex(12)}.parquet"
    with written_below(folder):
        where.create_dir(f"{inner}/{path}".rpartition("/")[0], recursive=True)
        with where.open_output_stream(f"{inner}/{path}") as file:
            pq.write_table(rows, file, compression="zstd")
            size = file.tell()
    range_of: Any = pc.min_max(rows.column(table.key)) if table.key else {}
    first, last = (range_of[end].as_py() if range_of else 0 for end in ("min", "max"))
    return MirrorFile(path, size, rows.num_rows, first, last, day)


def now_ms() -> int:
    """Return the time for the log."""
    return time.time_ns() // 1_000_000
