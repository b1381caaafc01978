"""A compaction merges small files and nothing else: rows, state and earlier versions stay."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from storage.config import Config
from storage.errors import StorageError
from storage.pipeline.lake import bulk, delta_table
from storage.pipeline.lake.bulk import MirrorTasks
from storage.pipeline.lake.delta_table import (
    COMPACT_BYTES,
    FILE_ROWS,
    LakeTable,
    MirrorFile,
    MirrorState,
    gathered,
    groups_to_merge,
)
from storage.pipeline.lake.tables import EVENTS, MirrorTable

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

STATE = MirrorState("s1~position", "erased")
DAYS = [19_000, 19_001]


def rows(arrived: Sequence[int], day: int, text: str = "x") -> pa.Table:
    """Events that arrived there, received on a day."""
    columns = {field.name: pa.nulls(len(arrived), field.type) for field in EVENTS.schema}
    columns["arrived"] = pa.array(arrived, pa.int64())
    columns["event_id"] = pa.array([f"${text}{one}" for one in arrived])
    columns["day"] = pa.array([day] * len(arrived), pa.int32()).cast(pa.date32())
    return pa.table(columns, schema=EVENTS.schema)


def filled(folder: Path) -> LakeTable:
    """A table of 24 commits with files of two days, which overlap."""
    lake = LakeTable.open(str(folder), EVENTS, "here", 1)
    for number in range(24):
        some = range(number // 2, 1_000 + number // 2, 50)
        lake.commit([rows(list(some), DAYS[number % 2])], STATE)
    return lake


def content(table: DeltaTable) -> list[tuple[object, ...]]:
    found = table.to_pyarrow_table().select(["day", "arrived", "event_id"])
    return sorted(zip(*(column.to_pylist() for column in found.columns), strict=True))


def in_process() -> MirrorTasks:
    return MirrorTasks(None, "", 2, Config())


FILES = st.builds(
    MirrorFile,
    path=st.uuids().map(str),
    size=st.one_of(st.integers(1, 9 << 20), st.integers(20 << 20, 40 << 20)),
    rows=st.one_of(st.integers(1, 20_000), st.integers(40_000, 60_000)),
    first=st.integers(0, 1_000),
    last=st.integers(1_000, 2_000),
    day=st.sampled_from([None, "2026-01-01", "2026-01-02"]),
)


@given(st.lists(FILES, max_size=40, unique_by=lambda one: one.path))
def test_groups_are_one_file_each(given_files: list[MirrorFile]) -> None:
    """Nothing that would fit stays apart, and no other file lies between those of a group."""
    groups = groups_to_merge(given_files)
    for group in groups:
        assert len(group) > 1
        assert len({file.day for file in group}) == 1
        assert sum(file.rows for file in group) <= FILE_ROWS
        assert sum(file.size for file in group) <= COMPACT_BYTES
    where = {file.path: at for at, group in enumerate(groups) for file in group}
    assert len(where) == sum(map(len, groups))
    for day in {file.day for file in given_files}:
        small = [
            file
            for file in given_files
            if file.day == day and file.rows < FILE_ROWS and file.size < COMPACT_BYTES
        ]
        small.sort(key=lambda file: (file.first, file.last, file.path))
        seen: list[object] = []
        for one, other in itertools.pairwise(small):
            mine, next_one = (where.get(file.path, file.path) for file in (one, other))
            seen += [mine] if mine not in seen else []
            if mine != next_one:
                assert next_one not in seen
                before = [file for file in small if where.get(file.path, file.path) == mine]
                together = [*before, other]
                assert (
                    sum(file.rows for file in together) > FILE_ROWS
                    or sum(file.size for file in together) > COMPACT_BYTES
                )


@pytest.mark.parametrize("by_tasks", [False, True])
def test_a_compaction_changes_no_row(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_tasks: bool
) -> None:
    """In this process, or by tasks of Spark; then this process reads no file."""
    lake = filled(tmp_path)
    before, version = content(DeltaTable(tmp_path / "events")), lake.version
    tasks = in_process()
    if by_tasks:
        monkeypatch.setattr(bulk, "FEW_ROWS", 0)
        monkeypatch.setattr(delta_table, "opened", unreachable)
        tasks = MirrorTasks(spark, "", 2, Config())
    lake.compact(tasks.merged, always=True)
    monkeypatch.undo()
    assert lake.version == version + 1
    assert lake.state() == STATE
    after = DeltaTable(tmp_path / "events")
    assert len(after.file_uris()) == 2
    assert content(after) == before
    assert content(DeltaTable(tmp_path / "events", version=version)) == before
    for path in after.file_uris():
        arrived = pq.ParquetFile(path).read(["arrived"]).column(0)
        assert arrived.to_pylist() == sorted(arrived.to_pylist())
    actions = log(tmp_path, version + 1)
    changes = [one.get("add") or one.get("remove") for one in actions]
    assert [one["dataChange"] for one in changes if one] == [False] * (2 + 24)
    lake.compact(tasks.merged, always=True)
    assert lake.version == version + 1
    lake.vacuum(0)
    assert content(DeltaTable(tmp_path / "events")) == before


def unreachable(path: str) -> None:
    raise AssertionError(path)


def log(folder: Path, version: int) -> list[dict[str, dict[str, object]]]:
    path = folder / "events" / "_delta_log" / f"{version:020}.json"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_that_are_full_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files hold 20 rows here: those of 20 stay, and pairs of 10 neighbours become one."""
    monkeypatch.setattr(delta_table, "FILE_ROWS", 20)
    lake = LakeTable.open(str(tmp_path), EVENTS, "here", 1)
    for first, count in ((0, 20), (40, 10), (20, 20), (60, 10), (50, 10), (70, 11)):
        lake.commit([rows(list(range(first, first + count)), DAYS[0])], STATE)
    full = {file.path for file in lake._files_with(None) if file.rows == 20}
    lake.compact(in_process().merged, always=True)
    found = {file.path: file for file in lake._files_with(None)}
    assert full < set(found)
    assert sorted((file.first, file.last) for file in found.values()) == [
        (0, 19),
        (20, 39),
        (40, 59),
        (60, 69),
        (70, 80),
    ]


def test_many_commits_are_compacted_and_few_are_not(tmp_path: Path) -> None:
    lake = filled(tmp_path)
    lake.compact(in_process().merged)
    assert len(DeltaTable(tmp_path / "events").file_uris()) == 24
    for number in range(delta_table.SMALL_FILES_MAX - 24):
        lake.commit([rows([number], DAYS[0])], STATE)
    again = LakeTable.open(str(tmp_path), EVENTS, "here", 1)  # it counts the files
    again.commit([rows([1], DAYS[0])], STATE)
    again.commit([rows([1], DAYS[0])], STATE)
    again.compact(in_process().merged)
    assert len(DeltaTable(tmp_path / "events").file_uris()) == 2


def test_a_compaction_that_dies_leaves_unnamed_files(tmp_path: Path) -> None:
    lake = filled(tmp_path)
    before, named = content(DeltaTable(tmp_path / "events")), parquet(tmp_path)

    def dying(
        folder: str, table: MirrorTable, groups: Sequence[Sequence[MirrorFile]]
    ) -> list[MirrorFile]:
        in_process().merged(folder, table, groups)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lake.compact(dying, always=True)
    assert parquet(tmp_path) > named
    assert content(DeltaTable(tmp_path / "events")) == before
    again = LakeTable.open(str(tmp_path), EVENTS, "here", 1)
    again.vacuum(0)
    assert parquet(tmp_path) == named
    assert content(DeltaTable(tmp_path / "events")) == before


def parquet(folder: Path) -> set[Path]:
    return set((folder / "events").rglob("*.parquet"))


@pytest.mark.parametrize("compacts_first", [False, True])
def test_the_second_of_a_compaction_and_a_writer_fails(
    tmp_path: Path, *, compacts_first: bool
) -> None:
    one = filled(tmp_path)
    other = LakeTable.open(str(tmp_path), EVENTS, "here", 1)

    def compacting() -> None:
        one.compact(in_process().merged, always=True)

    def writing() -> None:
        other.commit([rows([5_000], DAYS[0])], STATE, [100])

    first, second = (compacting, writing) if compacts_first else (writing, compacting)
    first()
    expected = content(DeltaTable(tmp_path / "events"))
    with pytest.raises(StorageError, match="another process has written"):
        second()
    assert content(DeltaTable(tmp_path / "events")) == expected


@given(st.lists(st.integers(0, 30_000), max_size=12))
def test_gathered_tables_are_about_a_file(sizes: list[int]) -> None:
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    given_tables = [
        pa.table({"n": np.arange(at, at + size)}) for at, size in zip(starts, sizes, strict=True)
    ]
    found = list(gathered(given_tables))
    numbers = [one.column(0).to_numpy() for one in found]
    assert np.array_equal(np.concatenate([[], *numbers]), np.arange(sum(sizes)))
    assert all(FILE_ROWS <= one.num_rows < FILE_ROWS + 30_000 for one in found[:-1])
    assert all(0 < one.num_rows < FILE_ROWS + 30_000 for one in found)


def test_large_rows_are_gathered_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_table, "FILE_BYTES", 1_000)
    tables = [pa.table({"n": ["x" * 400]})] * 7
    assert [one.num_rows for one in gathered(tables)] == [3, 3, 1]
