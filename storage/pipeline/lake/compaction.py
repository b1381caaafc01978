"""Which small files of a table a compaction merges into one.

Files of a day are taken in order of their keys. So a merged file has a short range of keys again,
and an update finds its rows in few files:

  rows of the files   20,000   900 | 30,000   700   15,000 | 41,000 | 50,000
  after the merge     20,900       | 45,700                | 41,000 | 50,000

A merged file has no more rows than any other, because an update rewrites whole files. So a merge
needs the memory of one file, however many rows the table has.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from storage.pipeline.lake.files import (
    FILE_ROWS,
    MirrorFile,
    gathered,
    read_file,
    write_rows,
)
from storage.pipeline.lake.tables import MirrorTable

COMPACT_BYTES: Final = 32 << 20
"""The size of a merged file, at most."""

Merge = Callable[[str, MirrorTable, Sequence[Sequence[MirrorFile]]], list[MirrorFile]]
"""Merge each of these groups of files of the table in this folder; see `merged`."""


def groups_to_merge(files: Iterable[MirrorFile]) -> list[list[MirrorFile]]:
    """Return groups of small files, of two or more, each to become one file of its day."""
    found: list[list[MirrorFile]] = []
    small = [file for file in files if file.size < COMPACT_BYTES and file.rows < FILE_ROWS]
    for file in sorted(small, key=lambda one: (one.day or "", one.first, one.last, one.path)):
        if found and _is_one_file([*found[-1], file]):
            found[-1].append(file)
        else:
            found.append([file])
    return [group for group in found if len(group) > 1]


def merged(folder: str, table: MirrorTable, paths: Iterable[str]) -> Iterator[MirrorFile]:
    """Write the rows of files of one day as one file, or as several if the rows are very large."""
    names = table.schema.names
    for rows in gathered(read_file(folder, table, path, names) for path in paths):
        yield from write_rows(folder, table, rows)


def _is_one_file(files: Sequence[MirrorFile]) -> bool:
    return (
        files[0].day == files[-1].day
        and sum(file.rows for file in files) <= FILE_ROWS
        and sum(file.size for file in files) <= COMPACT_BYTES
    )
