"""One table of the mirror, in Delta Lake's format. Only this module writes by deltalake.

A pass is one commit. It adds files, removes those that it has rewritten, and has the position that
the table then has, so a pass happens once or not at all. The commit also has the number of the pass
under the application id `APPLICATION`: of two processes that write to one table at once, one fails.

  commit 7   add day=2024-05-01/part-4a….parquet   remove day=2024-04-30/part-9c….parquet
             txn room-storage 7                    mirror {"position": "s1~4f2a90c1~…", …}
"""

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from storage.errors import InputError, StorageError
from storage.pipeline.imports.lines import opened
from storage.pipeline.lake.tables import SCHEMA_VERSION, MirrorTable

# --------------------------------------------------------------------------------------------------
# The Parquet files of a table, and what the log says about them.
#
# A file is written under a name that no other has, and belongs to the table once a commit names it.
# After a crash it stays unnamed, and vacuum deletes it.

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
        statistics: dict[str, Any] = {"numRecords": self.rows}
        if key:
            statistics |= {
                "minValues": {key: self.first},
                "maxValues": {key: self.last},
                "nullCount": {key: 0},
            }
        return json.dumps(statistics)


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
    waiting: list[pa.Table] = []
    for table in tables:
        waiting += [table] if table.num_rows else []
        rows, size = (sum(getattr(one, what) for one in waiting) for what in ("num_rows", "nbytes"))
        if rows >= FILE_ROWS or size >= FILE_BYTES:
            yield pa.concat_tables(waiting)
            waiting.clear()
    if waiting:
        yield pa.concat_tables(waiting)


def read_file(folder: str, table: MirrorTable, path: str, columns: list[str]) -> pa.Table:
    """Return some columns of a file. ``path``: below the folder."""
    schema = pa.schema([table.schema.field(name) for name in columns])
    return pa.concat_tables([schema.empty_table(), *file_parts(folder, table, path, columns)])


def file_parts(
    folder: str, table: MirrorTable, path: str, columns: list[str]
) -> Iterator[pa.Table]:
    """Yield the same in parts of at most `PART_ROWS`."""
    where, inner = opened(folder)
    schema = pa.schema([table.schema.field(name) for name in columns])
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
            yield part.select(columns).cast(schema)


def _by_day(rows: pa.Table) -> list[tuple[str | None, pa.Table]]:
    days = rows.column("day")
    sorted_days = sorted(pc.unique(days).to_pylist())
    return [
        (day.isoformat(), rows if len(sorted_days) == 1 else rows.filter(pc.equal(days, day)))
        for day in sorted_days
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


# --------------------------------------------------------------------------------------------------
# Which small files of a table a compaction merges into one.
#
# Files of a day are taken in order of their keys. So a merged file has a short range of keys again,
# and an update finds its rows in few files:
#
#   rows of the files   20,000   900 | 30,000   700   15,000 | 41,000 | 50,000
#   after the merge     20,900       | 45,700                | 41,000 | 50,000
#
# A merged file has no more rows than any other, because an update rewrites whole files. So a merge
# needs the memory of one file, however many rows the table has.

COMPACT_BYTES: Final = 32 << 20
"""The size of a merged file, at most."""

Merge = Callable[[str, MirrorTable, Sequence[Sequence[MirrorFile]]], list[MirrorFile]]
"""Merge each of these groups of files of the table in this folder; see `merged`."""


def groups_to_merge(files: Iterable[MirrorFile]) -> list[list[MirrorFile]]:
    """Return groups of small files, of two or more, each to become one file of its day."""
    groups: list[list[MirrorFile]] = []
    small = [file for file in files if file.size < COMPACT_BYTES and file.rows < FILE_ROWS]
    for file in sorted(
        small,
        key=lambda small_file: (
            small_file.day or "",
            small_file.first,
            small_file.last,
            small_file.path,
        ),
    ):
        if groups and _is_one_file([*groups[-1], file]):
            groups[-1].append(file)
        else:
            groups.append([file])
    return [group for group in groups if len(group) > 1]


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


APPLICATION: Final = "room-storage"
MIRROR: Final = "mirror"
"""The key of a commit's metadata with the `MirrorState`."""
SMALL_FILES_MAX: Final = 60
"""So many commits go between two compactions, also of several processes that each make fewer."""
LOG_RETENTION: Final = "delta.logRetentionDuration"
MISREAD: Final = frozenset("#?%")
"""Characters of a local path that deltalake reads as those of a URL."""

KeyArray = npt.NDArray[np.int64]
Keys = Collection[int] | KeyArray


@dataclass(frozen=True, slots=True)
class MirrorState:
    """The state of the mirror, which each commit has: how far it has read.

    ``position``: the text of a token. ``erased``: which users were erased then, as a digest.
    """

    position: str
    erased: str = ""

    def metadata(self) -> dict[str, Any]:
        return {
            MIRROR: {
                "position": self.position,
                "erased": self.erased,
                "schema_version": SCHEMA_VERSION,
            }
        }


class LakeTable:
    """A table in a folder below that of the mirror."""

    def __init__(self, table: MirrorTable, folder: str, delta: DeltaTable) -> None:
        self.table = table
        self.folder = folder
        self._delta = delta
        self._commits = self._small_files()

    @classmethod
    def open(cls, root: str, table: MirrorTable, deployment: str, keep_hours: int) -> Self:
        """Open the table, or make an empty one.

        Raise `InputError` for a table of another database, of another version, or of something
        else.
        """
        folder = folder_of(root, table)
        try:
            delta = DeltaTable(folder)
        except TableNotFoundError:
            delta = created(folder, table, deployment, keep_hours)
        except DeltaError as error:
            raise InputError(f"{folder} is no table of a mirror: {error}") from error
        _check(folder, delta, deployment)
        keep_log(delta, keep_hours)
        return cls(table, folder, delta)

    @property
    def version(self) -> int:
        """Return the number of the last commit."""
        return self._delta.version()

    def state(self) -> MirrorState | None:
        """Return what the last pass said; None before the first. Raise `InputError` if it is lost.

        Commits that others made, such as a compaction, come in between.
        """
        if self._delta.transaction_version(APPLICATION) is None:
            return None
        if (metadata := last_metadata(self._delta, MIRROR)) is not None:
            return MirrorState(metadata["position"], metadata["erased"])
        raise InputError(
            f"{self.folder}: the log has lost the position of the mirror: mirror into a new folder"
        )

    def rows(self, columns: list[str], keys: Keys | None = None) -> pa.Table:
        if keys is None:
            return self._chosen(columns, self._files_with(None), None)
        ordered = _key_array(keys)
        key_values = pa.array(ordered, pa.int64())
        files = self._files_with(ordered)
        return self._chosen(columns, files, lambda column: pc.is_in(column, value_set=key_values))

    def within(self, columns: list[str], first: int, last: int) -> pa.Table:
        """Return columns of the rows with keys from ``first`` to ``last``; the key is a column."""
        files = [
            file for file in self._files_with(None) if file.first <= last and file.last >= first
        ]
        return self._chosen(
            columns,
            files,
            lambda column: pc.and_(pc.greater_equal(column, first), pc.less_equal(column, last)),
        )

    def parts(self, columns: list[str]) -> Iterator[pa.Table]:
        """Yield columns of all rows, a part of a file at a time."""
        for file in self._files_with(None):
            yield from file_parts(self.folder, self.table, file.path, columns)

    def _chosen(
        self,
        columns: list[str],
        files: Iterable[MirrorFile],
        choose: Callable[[pa.ChunkedArray], pa.ChunkedArray] | None,
    ) -> pa.Table:
        """Return the rows of these files that ``choose`` accepts by their keys."""
        tables = [pa.schema([self.table.schema.field(name) for name in columns]).empty_table()]
        for file in files:
            parts = file_parts(self.folder, self.table, file.path, columns)
            tables += [
                part if choose is None else part.filter(choose(part.column(self.table.key)))
                for part in parts
            ]
        return pa.concat_tables(tables)

    def commit(
        self,
        added: Iterable[pa.Table | MirrorFile],
        state: MirrorState,
        deleted: Keys = (),
    ) -> None:
        """Delete the rows with a key in ``deleted``, add rows and set the state, in one commit.

        Raise `StorageError` if another process has written meanwhile.
        """
        files: list[MirrorFile] = []
        removed: list[MirrorFile] = []
        for file, kept in self._without(deleted) if len(deleted) else ():
            removed.append(file)
            if kept.num_rows:
                files += write_rows(self.folder, self.table, kept)
        for one in added:
            files += [one] if isinstance(one, MirrorFile) else self.write(one)
        commit_files(self._delta, self.table, files, removed, state.metadata())
        self._commits += 1

    def write(self, rows: pa.Table) -> list[MirrorFile]:
        """Write rows as files that a later commit adds."""
        return list(write_rows(self.folder, self.table, rows)) if rows.num_rows else []

    def compact(self, merge: Merge, *, always: bool = False) -> None:
        """Merge small files in one commit, once there may be many. Rows do not change.

        Raise `StorageError` if another process has written meanwhile.
        """
        if not always and self._commits < SMALL_FILES_MAX:
            return
        self._commits = 0
        groups = groups_to_merge(self._files_with(None))
        state = self.state()
        if state is None or not groups:
            return
        files = merge(self.folder, self.table, groups)
        removed = [file for group in groups for file in group]
        commit_files(self._delta, self.table, files, removed, state.metadata(), changes_rows=False)

    def _small_files(self) -> int:
        """Return how many files fewer a compaction would leave."""
        return sum(len(group) - 1 for group in groups_to_merge(self._files_with(None)))

    def vacuum(self, keep_hours: int) -> list[str]:
        """Delete files that no version of the last hours needs, and return their names."""
        state = self.state()
        if state is None:
            return []
        return vacuum(self._delta, self.table, keep_hours, state.metadata())

    def _without(self, deleted: Keys) -> Iterable[tuple[MirrorFile, pa.Table]]:
        """Yield the files that have rows with these keys, with their other rows."""
        keys = _key_array(deleted)
        values = pa.array(keys, pa.int64())
        for file in self._files_with(keys):
            key_columns = read_file(self.folder, self.table, file.path, [self.table.key])
            going = pc.is_in(key_columns.column(0), value_set=values)
            if pc.any(going).as_py():
                rows = read_file(self.folder, self.table, file.path, self.table.schema.names)
                yield file, rows.filter(pc.invert(going))

    def _files_with(self, keys: KeyArray | None) -> list[MirrorFile]:
        """Return the files whose range has one of these sorted keys."""
        key = self.table.key
        rows = pa.table(self._delta.get_add_actions(flatten=True)).to_pylist()
        files = [
            MirrorFile(
                row["path"],
                row["size_bytes"],
                row["num_records"],
                row[f"min.{key}"],
                row[f"max.{key}"],
                None if (day := row.get("partition.day")) is None else str(day),
            )
            for row in rows
        ]
        if keys is None:
            return files
        first = np.searchsorted(keys, np.asarray([file.first for file in files]), side="left")
        after = np.searchsorted(keys, np.asarray([file.last for file in files]), side="right")
        return [file for file, low, high in zip(files, first, after, strict=True) if low < high]


def folder_of(root: str, table: MirrorTable) -> str:
    """Return the folder of a table: an absolute path, or a URL.

    Raise `InputError` for a path that deltalake would take for another one.
    """
    folder = f"{root.rstrip('/')}/{table.name}"
    if "://" in folder:
        return folder
    path = os.path.abspath(folder)  # noqa: PTH100  # a text: the other form is a URL
    if misread := MISREAD.intersection(path):
        raise InputError(f"{path}: no part of the path may have {' or '.join(sorted(misread))}")
    return path


def files_of(
    root: str, table: MirrorTable, version: int | datetime | None = None
) -> tuple[str, list[str]]:
    """Return the URL of the table's folder, and those of its files: now, or as of then.

    Raise `InputError` where there is no such table or version.
    """
    folder = folder_of(root, table)
    try:
        delta = DeltaTable(folder)
        if version is not None:
            _load_as(delta, version)
        url, added = url_of(folder), pa.table(delta.get_add_actions())
        return url, [f"{url}/{path}" for path in added.column("path").to_pylist()]
    except (DeltaError, TableNotFoundError) as error:
        raise InputError(f"{folder}: the mirror has no such table or version: {error}") from error


def _load_as(delta: DeltaTable, version: int | datetime) -> None:
    """Load a version, or that of a time. Raise `InputError` for what cannot be one."""
    if isinstance(version, datetime):
        delta.load_as_version(version)
        # Of a time before the first version that is left, deltalake loads that version.
        for last in delta.history(1):
            made = datetime.fromtimestamp(last["timestamp"] / 1_000, UTC)
            if version.astimezone(UTC) < made:
                raise InputError(f"{delta.table_uri}: the first version that is left is of {made}")
    elif type(version) is int and version >= 0:
        delta.load_as_version(version)
    else:
        raise InputError(f"version {version!r}: give a number from 0 on, or a datetime")


def last_metadata(delta: DeltaTable, key: str) -> Any:
    """Return the value of this key in the metadata of the last commit that has it, or None."""
    for limit in (1, 20, None):
        for commit in delta.history(limit):
            if (value := commit.get(key)) is not None:
                return value
    return None


def commit_files(
    delta: DeltaTable,
    table: MirrorTable,
    files: Sequence[MirrorFile],
    removed: Sequence[MirrorFile],
    metadata: dict[str, Any],
    *,
    changes_rows: bool = True,
) -> None:
    """Add files and remove others, in one commit with the number of the pass.

    Without ``changes_rows`` those who read changes of the table skip the commit.
    Raise `StorageError` if another process has written since ``delta`` was read.
    """
    now = now_ms()
    actions: list[AddAction | RemoveAction] = [
        AddAction(
            path=file.path,
            size=file.size,
            partition_values=_partition(file.day),
            modification_time=now,
            data_change=changes_rows,
            stats=file.stats(table.key),
        )
        for file in files
    ]
    actions += [
        RemoveAction(
            path=file.path,
            deletion_timestamp=now,
            data_change=changes_rows,
            partition_values=_partition(file.day),
            size=file.size,
        )
        for file in removed
    ]
    number = (delta.transaction_version(APPLICATION) or 0) + 1
    properties = CommitProperties(
        custom_metadata=metadata,
        app_transactions=[Transaction(APPLICATION, number)],
        max_commit_retries=0,
    )
    try:
        with written_below(delta.table_uri):
            delta.create_write_transaction(
                actions,
                "append",
                table.schema,
                ["day"] if table.by_day else [],
                commit_properties=properties,
            )
    except CommitFailedError as error:
        raise StorageError(
            f"{delta.table_uri}: another process has written to this table: {error}."
            " Run one at a time, and run this one again"
        ) from error
    delta.update_incremental()


def vacuum(
    delta: DeltaTable, table: MirrorTable, keep_hours: int, metadata: dict[str, Any]
) -> list[str]:
    """Delete files that no version of the last hours needs, and return their names.

    Raise `StorageError`, and delete nothing, if another process has written since ``delta`` was
    read: its files belong to no version that is known here. A commit proves that there is none, as
    deltalake's own commits of a vacuum go on after those of others.
    """
    delete = partial(
        delta.vacuum,
        retention_hours=keep_hours,
        enforce_retention_duration=False,
        full=True,
        commit_properties=CommitProperties(custom_metadata=metadata),
    )
    with written_below(delta.table_uri, DeltaError):
        if not delete(dry_run=True):
            return []
        commit_files(delta, table, [], [], metadata, changes_rows=False)
        return delete(dry_run=False)


def url_of(path: str) -> str:
    """Return a path as a URL: the file system that Spark takes by default may be another one."""
    return path if "://" in path else f"file://{path}"


def created(folder: str, table: MirrorTable, deployment: str, keep_hours: int) -> DeltaTable:
    """Make an empty table, and return it. ``deployment``: of the store that it follows."""
    with written_below(folder, DeltaError):
        return DeltaTable.create(
            folder,
            table.schema,
            partition_by=["day"] if table.by_day else [],
            name=table.name,
            description=json.dumps(
                {
                    "application": APPLICATION,
                    "schema_version": SCHEMA_VERSION,
                    "deployment": deployment,
                }
            ),
            configuration={
                **({"delta.dataSkippingStatsColumns": table.key} if table.key else {}),
                **_retention(keep_hours),
            },
        )


def keep_log(delta: DeltaTable, keep_hours: int) -> None:
    """Let the log of a table stay so long, if it says less: its versions are read by the log."""
    interval = delta.metadata().configuration.get(LOG_RETENTION, "")
    hours = re.fullmatch("interval ([0-9]+) hours", interval)
    if hours is not None and int(hours[1]) < keep_hours:
        with written_below(delta.table_uri, DeltaError):
            delta.alter.set_table_properties(_retention(keep_hours))


def _retention(keep_hours: int) -> dict[str, str]:
    keep = f"interval {max(keep_hours, 1)} hours"
    return {LOG_RETENTION: keep, "delta.deletedFileRetentionDuration": keep}


def _check(folder: str, delta: DeltaTable, deployment: str) -> None:
    try:
        description: Mapping[str, Any] = json.loads(delta.metadata().description or "{}")
    except ValueError:
        description = {}
    if description.get("application") != APPLICATION:
        raise InputError(f"{folder} is no table of a mirror: another program has made it")
    if description.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{folder} has version {description.get('schema_version')} of the mirror's schema, this"
            f" release has {SCHEMA_VERSION}: mirror into a new folder"
        )
    if description.get("deployment") != deployment:
        raise InputError(
            f"{folder} mirrors the database {description.get('deployment')}, not {deployment}:"
            " mirror into a new folder"
        )


def _key_array(keys: Keys) -> KeyArray:
    """Return the keys in order, each once."""
    return np.unique(np.fromiter(keys, np.int64, len(keys)))


def _partition(day: str | None) -> dict[str, str | None]:
    return {} if day is None else {"day": day}
