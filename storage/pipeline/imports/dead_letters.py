"""Write the events that an import did not store, as Parquet, with the lines they came from."""

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import SparkSession

from storage.errors import InputError
from storage.pipeline.file_systems import below, emptied, io_errors, opened, renamed
from storage.pipeline.imports.lines import ArchiveFiles, placed
from storage.pipeline.imports.task_rows import rows_in, task_per_files
from storage.pipeline.synapse.source import Synapse

REJECTED: Final = ("bad_file", "bad_line", "invalid", "missing_parents")

DEAD_LETTERS: Final = pa.schema(
    [
        ("source", pa.string()),
        ("line", pa.int64()),
        ("part", pa.int64()),
        ("outcome", pa.string()),
        ("event_id", pa.string()),
        ("reason", pa.string()),
        ("missing", pa.list_(pa.string())),
        ("pdu", pa.binary()),
    ]
)
"""Events that were not stored.

``line``: from 1; for Parquet the number of the row, for a Synapse the stream ordering; null for a
file that cannot be read. ``part``: the index of the PDU in a /backfill response, from 1; null where
the response itself is bad.
"""

OWN_FILES: Final = re.compile(r"\.?(part-.+\.parquet|_[0-9a-f]{16}\.parquet|_SUCCESS)(\.crc)?")
"""Files that imports leave in a folder of rejects, those of earlier releases among them."""

WRITTEN: Final = pa.schema([("name", pa.string())])


def refuse_others(path: str) -> None:
    """Raise `InputError` for a folder with anything that is not from an import: it would be lost.

    Raise `StorageError` if it cannot be read.
    """
    where, inner = opened(path)
    with io_errors(path, "written to"):
        infos = where.get_file_info(fs.FileSelector(inner, allow_not_found=True))
    for info in infos:
        if not (info.is_file and OWN_FILES.fullmatch(info.base_name)):
            raise InputError(
                f"{path} has {info.base_name}, which is not from an import: rejects replace all "
                "that is in their folder, so name a new one"
            )


def write_dead_letters(
    spark: SparkSession,
    work: str,
    files: Sequence[str],
    sources: ArchiveFiles | Synapse,
    path: str,
) -> None:
    """Write the rejects of files in the folder ``work``; replace what is below ``path``.

    A task writes under a hidden name of its own. The driver renames the files of the attempts that
    count. The driver writes one file itself, with the broken files: it has the columns even if
    nothing was rejected. Raise `StorageError`, and see `refuse_others`.
    """
    refuse_others(path)
    emptied(path)
    broken = [
        {"source": source, "outcome": "bad_file", "reason": reason, "missing": []}
        for source, reason in sources.broken.items()
    ]
    first = _written(path, [pa.RecordBatch.from_pylist(broken, schema=DEAD_LETTERS)])
    names = [first]
    if files:
        task = DeadLetterTask(work, path, sources)
        names += [row["name"] for row in task_per_files(spark, files, task.run, WRITTEN).collect()]
    renamed(path, ((name, f"part-{at:05}.parquet") for at, name in enumerate(names)))


@dataclass(frozen=True, slots=True)
class DeadLetterTask:
    """Writes the rejects of some files in the folder ``work`` below ``path``."""

    work: str
    path: str
    sources: ArchiveFiles | Synapse

    def run(self, files: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """Yield the name of the file that it has written, if there are any rejects."""
        some = list(files)
        if some:
            row = {"name": _written(self.path, map(self._letters, rows_in(self.work, some)))}
            yield pa.RecordBatch.from_pylist([row], schema=WRITTEN)

    def _letters(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows: list[dict[str, Any]] = []
        for row in batch.to_pylist():
            if row["outcome"] in REJECTED:
                file, number = placed(row["place"])
                line, part = self.sources.line_of(file, number)
                source = {"source": self.sources.names[file], "line": line, "part": part}
                rows.append({**row, **source, "missing": row["missing"] or []})
        return pa.RecordBatch.from_pylist(rows, schema=DEAD_LETTERS)


def _written(path: str, batches: Iterable[pa.RecordBatch]) -> str:
    name = f"_{secrets.token_hex(8)}.parquet"
    where, inner = opened(below(path, name))
    with (
        io_errors(path, "written to"),
        pq.ParquetWriter(inner, DEAD_LETTERS, filesystem=where) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
    return name
