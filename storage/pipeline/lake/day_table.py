"""A daily table of answers, in Delta Lake's format, and the days of `events` that it follows.

A commit replaces the rows of some days. Its metadata has the version of the mirror's `events` that
the table has read. So a refresh finds the days whose files have changed:

  events, version 7    day=2024-05-01 part-a            day=2024-05-02 part-b
  events, version 9    day=2024-05-01 part-a part-c                              changed: both days
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from storage.errors import InputError
from storage.pipeline.lake.delta_table import (
    commit_files,
    created,
    keep_log,
    last_metadata,
    vacuum,
)
from storage.pipeline.lake.files import MirrorFile
from storage.pipeline.lake.tables import MirrorTable

ANSWER: Final = "answer"
"""The key of a commit's metadata with the `AnswerState`."""


@dataclass(frozen=True, slots=True)
class AnswerState:
    """The version of `events` that a daily table has read, the id of `events`, and the query."""

    source: str
    version: int
    definition: str


@dataclass(frozen=True, slots=True)
class MirroredDays:
    """The files of `events` at a version, and their rows, by day. ``source``: the table's id."""

    source: str
    version: int
    files: dict[str, frozenset[str]]
    rows: dict[str, int]

    @classmethod
    def of(cls, folder: str, version: int | None = None) -> Self:
        """Read the log: now, or as of a version. Raise `InputError` where there is none."""
        try:
            delta = DeltaTable(folder, version=version)
        except (DeltaError, TableNotFoundError) as error:
            raise InputError(
                f"{folder}: the mirror has no such table or version: {error}"
            ) from error
        found: dict[str, set[str]] = {}
        rows: Counter[str] = Counter()
        for row in _actions(delta):
            day = str(row["partition.day"])
            found.setdefault(day, set()).add(row["path"])
            rows[day] += row["num_records"]
        days = {day: frozenset(paths) for day, paths in sorted(found.items())}
        return cls(str(delta.metadata().id), delta.version(), days, rows)

    def changed_since(self, earlier: Self) -> set[str]:
        """Return the days whose files are not the same as at an earlier version."""
        return {
            day
            for day in {*self.files, *earlier.files}
            if self.files.get(day) != earlier.files.get(day)
        }

    def paths(self, days: Collection[str]) -> list[str]:
        """Return the files of these days, below the folder."""
        return [path for day in sorted(days) for path in sorted(self.files.get(day, ()))]


class DayTable:
    """A daily table in a folder."""

    def __init__(self, table: MirrorTable, folder: str, delta: DeltaTable) -> None:
        self.table = table
        self.folder = folder
        self._delta = delta

    @classmethod
    def open(cls, folder: str, table: MirrorTable, keep_hours: int) -> Self:
        """Open the table, or make an empty one. Raise `InputError` for something else there."""
        try:
            delta = DeltaTable(folder)
        except TableNotFoundError:
            delta = created(folder, table, ANSWER, keep_hours)
        except DeltaError as error:
            raise InputError(f"{folder} is no table of answers: {error}") from error
        if pa.schema(delta.schema()).names != table.schema.names:
            raise InputError(f"{folder} is no table of this release's answers: use a new folder")
        keep_log(delta, keep_hours)
        return cls(table, folder, delta)

    def state(self) -> AnswerState | None:
        """Return what the table was made of; None if it is new, or the log does not know it."""
        found = last_metadata(self._delta, ANSWER)
        return None if found is None else AnswerState(**found)

    def paths(self) -> list[str]:
        """Return the files of the table, below its folder."""
        return [file.path for file in _day_files(self._delta)]

    def replace(
        self, days: Collection[str] | None, files: Sequence[MirrorFile], state: AnswerState
    ) -> None:
        """Replace the rows of these days, or of all, in one commit.

        Raise `StorageError` if another process has refreshed the table since it was opened.
        """
        removed = [file for file in _day_files(self._delta) if days is None or file.day in days]
        commit_files(self._delta, self.table, files, removed, {ANSWER: asdict(state)})

    def vacuum(self, keep_hours: int) -> None:
        """Delete files that no version of the last hours needs."""
        state = self.state()
        metadata = {} if state is None else {ANSWER: asdict(state)}
        vacuum(self._delta, self.table, keep_hours, metadata)


def _day_files(delta: DeltaTable) -> list[MirrorFile]:
    return [
        MirrorFile(
            row["path"], row["size_bytes"], row["num_records"], 0, 0, str(row["partition.day"])
        )
        for row in _actions(delta)
    ]


def _actions(delta: DeltaTable) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
    return rows
