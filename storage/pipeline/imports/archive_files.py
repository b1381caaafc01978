"""The files of an import, and the ranges of them that executors read.

NDJSON is read by byte ranges, with true line numbers, and Parquet by row groups. Files with
/backfill responses are read whole: one response per file, or one per line. They are recognised by
their name, ``….json``, or by their first bytes. Paths are those of
`storage.pipeline.file_systems`, and must mean the same on every executor.
"""

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from storage.errors import InputError
from storage.pipeline.file_systems import below, opened
from storage.pipeline.imports.lines import FILE_SHIFT, FileRange, answered

RANGE_BYTES_MAX: Final = 32 << 20
RANGE_BYTES_MIN: Final = 1 << 20
RANGES_EACH: Final = 3
"""Ranges of NDJSON per concurrent task, unless they become too small or too large."""

SMALL_FILES_MAX: Final = 1_000
"""The maximum number of small ranges per task."""

ANSWER: Final = re.compile(
    rb'\s*\{(?:\s*"(?:origin|origin_server_ts)"\s*:\s*(?:"[^"]*"|[0-9]+)\s*,)*\s*"pdus"\s*:\s*\['
)
"""The start of a file with /backfill responses."""

HEAD_BYTES: Final = 4096


class ArchiveFile(NamedTuple):
    """A file to import.

    ``at``: the index of its path among those given; ``within``: its index in that path. ``groups``:
    the numbers of rows in its row groups (Parquet). ``is_answer``: it has /backfill responses.
    """

    at: int
    within: int
    path: str
    size: int
    groups: tuple[int, ...] | None = None
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class ArchiveFiles:
    """The files to import; ``broken``: Parquet files that cannot be read, with the reason."""

    files: tuple[ArchiveFile, ...]
    broken: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the file names for dead letters."""
        return tuple(one.path for one in self.files)

    def line_of(self, file: int, number: int) -> tuple[int | None, int | None]:
        """Return the line or row for dead letters, and the PDU's index in a /backfill response."""
        line, pdu = answered(number) if self.files[file].is_answer else (number, 0)
        return line or None, pdu or None

    def ranges(self, tasks: int) -> list[FileRange]:
        """Return all ranges, in the order of the files; `numbered` adds line numbers later.

        Each task gets the same number of ranges, so that none waits long.
        """
        total = sum(one.size for one in self.files if one.groups is None)
        each = max(RANGES_EACH, ceil(total / (tasks * RANGE_BYTES_MAX)))
        length = max(ceil(total / (tasks * each)), RANGE_BYTES_MIN)
        return [span for file, one in enumerate(self.files) for span in _of_file(file, one, length)]


def found(paths: Sequence[str]) -> ArchiveFiles:
    """Return the files of these paths.

    Raise `InputError` for a missing path or an unknown format.
    """
    files: list[ArchiveFile] = []
    broken: dict[str, str] = {}
    for at, path in enumerate(paths):
        where, inner = opened(path)
        info = where.get_file_info(inner)
        if info.type == fs.FileType.NotFound:
            raise InputError(f"{path}: there is no such file or folder")
        infos = [info] if info.type == fs.FileType.File else _files(where, inner)
        tables = [one for one in infos if one.path.endswith(".parquet")]
        if not tables and any(one.path.endswith((".gz", ".zst", ".zip")) for one in infos):
            raise InputError(f"{path}: compressed files cannot be read in parts: unpack them")
        for within, one in enumerate(tables or infos):
            full = _named(path, one.path.removeprefix(inner).lstrip("/"), one.path)
            try:
                groups = _groups(where, one.path) if tables else None
                files.append(
                    ArchiveFile(
                        at,
                        within,
                        full,
                        one.size,
                        groups,
                        is_answer=groups is None and _is_answer(where, one.path),
                    )
                )
            except (pa.ArrowException, OSError, InputError) as error:
                broken[one.path] = str(error)
    return ArchiveFiles(tuple(files), broken)


def _named(path: str, rest: str, inner: str) -> str:
    """Return how executors open a file: ``rest`` of its path is below ``path``."""
    if "://" not in path:
        return inner
    return below(path, rest) if rest else path


def literal(path: str) -> str:
    """Return a path that Spark reads literally: some characters would be patterns."""
    return re.sub(r"([\\\[\]{}*?])", r"\\\1", path)


def numbered(
    ranges: Iterable[FileRange], counts: Mapping[tuple[int, int], int]
) -> Iterator[FileRange]:
    """Yield the ranges with the number of the first line of each.

    ``counts``: lines by file and first byte.
    """
    number, file = 1, None
    for one in ranges:
        if one.kind != "lines":
            yield one
            continue
        number, file = (number if one.file == file else 1), one.file
        count = counts[one.file, one.begin]
        yield one._replace(number=number, lines=count)
        number += count


def together(ranges: Sequence[FileRange]) -> list[list[FileRange]]:
    """Return the ranges of each task: one, or as many consecutive small ones as fill a task."""
    tasks: list[list[FileRange]] = []
    room = 0
    for one in ranges:
        size = _size(one)
        if size > room or len(tasks[-1]) >= SMALL_FILES_MAX:
            tasks.append([])
            room = RANGE_BYTES_MIN
        tasks[-1].append(one)
        room -= size
    return tasks


def bounded(tasks: Sequence[list[FileRange]], most: int | None) -> list[list[FileRange]]:
    """Return the same in at most ``most`` tasks, so that no more run at once.

    The next ranges always go to the task with the least work.
    """
    if most is None or len(tasks) <= most:
        return list(tasks)
    shares: list[list[FileRange]] = [[] for _ in range(most)]
    loads = [(0, index) for index in range(most)]
    for some in tasks:
        load, index = heapq.heappop(loads)
        shares[index] += some
        heapq.heappush(loads, (load + sum(_size(one) for one in some), index))
    return shares


def _size(one: FileRange) -> int:
    return one.end - one.begin if one.kind in {"lines", "answer"} else RANGE_BYTES_MIN


def _of_file(file: int, one: ArchiveFile, length: int) -> Iterator[FileRange]:
    if one.is_answer:
        yield FileRange(
            "answer", one.at, file, one.within, one.path, 0, one.size, 0, 1 << FILE_SHIFT
        )
        return
    if one.groups is None:
        for begin in range(0, one.size, length):
            yield FileRange(
                "lines", one.at, file, one.within, one.path, begin, min(begin + length, one.size)
            )
        return
    number = 1
    for group, rows in enumerate(one.groups):
        yield FileRange("rows", one.at, file, one.within, one.path, group, group + 1, number, rows)
        number += rows


def _is_answer(where: Any, path: str) -> bool:
    if path.endswith(".json"):
        return True
    with where.open_input_file(path) as file:
        return ANSWER.match(file.read(HEAD_BYTES)) is not None


def _files(where: Any, folder: str) -> list[Any]:
    """Return data files below a folder, by name.

    Spark writes other files, whose names begin with ``_`` or ``.``; they are skipped.
    """
    infos = where.get_file_info(fs.FileSelector(folder, recursive=True))
    files = [
        info for info in infos if info.type == fs.FileType.File and info.base_name[0] not in "_."
    ]
    return sorted(files, key=lambda info: str(info.path))


def _groups(where: Any, path: str) -> tuple[int, ...]:
    """Return the numbers of rows in each row group of a Parquet file, from its footer."""
    with where.open_input_file(path) as file:
        parquet = pq.ParquetFile(file)
        if "pdu" not in parquet.schema_arrow.names:
            raise InputError("it has no column pdu")
        return tuple(
            parquet.metadata.row_group(group).num_rows
            for group in range(parquet.metadata.num_row_groups)
        )
