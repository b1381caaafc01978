"""Many small rooms, and many small passes, make few files and few requests.

Files are bounded in both ways: a small one is the last of its task and day, or waits for a
compaction, and a large one is split.
"""

import asyncio
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr

import storage
from storage.pipeline import answers, export_parquet, import_archive, mirror
from storage.pipeline.export import FILE_ROWS, _gathered
from storage.pipeline.imports.intern_names import BundleLocation, cleared, neighbours, spread_number
from storage.pipeline.imports.lines import found, numbered
from storage.pipeline.imports.load_rooms import grouped
from storage.pipeline.imports.plan_rooms import BundledRoom, rooms_of
from storage.pipeline.imports.run import EVENTS_EACH, SPREAD, _task, loading_tasks
from storage.pipeline.imports.stage import staging
from storage.pipeline.imports.validate import LineValidator, TaskValidation, scanned_range
from storage.pipeline.lake import delta_table
from storage.pipeline.lake.rounds import MirrorPass
from storage.testing import RoomBuilder
from tests.long_run import long_run
from tests.pipeline.mirrored import differences
from tests.pipeline.stores import SERVER

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

ROOMS = 300
TASKS = 4
PASSES = 16


@pytest.fixture(scope="module")
def created() -> list[bytes]:
    """The create events of many rooms."""
    rooms = [RoomBuilder("11", seed=seed, sign=False) for seed in range(ROOMS)]
    return [room.create(room.user(1)).pdu for room in rooms]


def examined(archive: Path, dsn: str, work: Path) -> list[pa.RecordBatch]:
    """The first step of an import, in this process."""
    cleared(str(work))
    with staging(dsn) as number:
        looked = [(span, *scanned_range(span)) for span in found([str(archive)]).ranges(1)]
        counts = {(span.file, span.begin): count for span, count, _ in looked}
        versions = {room: version for _, _, rooms in looked for room, version in rooms.items()}
        stage = TaskValidation(LineValidator(versions), dsn, number, str(work))
        return list(stage.run(numbered([span for span, _, _ in looked], counts)))


class NoReader:
    """Locations are enough here."""

    def get(self, place: BundleLocation) -> bytes:
        raise AssertionError(place)


def rooms_of_task(batches: list[pa.RecordBatch], task: int) -> Iterator[BundledRoom]:
    """The rooms of a task as Spark deals and sorts them."""
    rows = sorted(
        (spread_number(row["room_id"]), row["room_id"], row["first"], at, row)
        for at, row in enumerate(row for batch in batches for row in batch.to_pylist())
    )
    mine = [row for number, *_, row in rows if number * TASKS >> 32 == task]
    return rooms_of([pa.RecordBatch.from_pylist(mine, schema=batches[0].schema)], NoReader())


async def test_the_small_rooms_of_a_task_lie_together(
    dsn: str, tmp_path: Path, created: list[bytes]
) -> None:
    """A group of rooms is one request. In the order of the archive, nearly each room would be."""
    (tmp_path / "rooms.ndjson").write_bytes(b"\n".join(created))
    batches = await asyncio.to_thread(examined, tmp_path / "rooms.ndjson", dsn, tmp_path / "work")
    sizes = []
    for task in range(TASKS):
        groups = list(grouped(rooms_of_task(batches, task), part=40))
        sizes += [len(group) for group in groups]
        for group in groups:
            places: list[BundleLocation] = sorted(place for room in group for place in room.places)
            assert len(list(neighbours(places))) == 1
            ends = [one.start + one.length for one in places]
            assert ends[:-1] == [one.start for one in places[1:]]  # nothing unwanted is read
    assert sum(sizes) == ROOMS
    assert max(sizes) == 40
    assert len(sizes) <= ROOMS / 40 + TASKS


def test_loading_tasks_are_bounded() -> None:
    for events in (1, 300, 1_000_000, 10**9):
        tasks = loading_tasks(None, 8, events)
        assert tasks % 8 == 0
        assert 0 <= tasks - math.ceil(events / EVENTS_EACH) < 8 or tasks == 8
    assert loading_tasks(3, 8, 10**9) == 3


def test_spark_spreads_rooms_as_the_files_do(spark: SparkSession) -> None:
    rooms = ["!a:b", "", "!Raum_ä🎈:s1.test"]
    frame = spark.createDataFrame([(room, 1) for room in rooms], "room_id string, events bigint")
    found = frame.select(expr(SPREAD), _task(frame, TASKS, 1_000)).collect()
    numbers = list(map(spread_number, rooms))
    assert [tuple(row) for row in found] == [(one, one * TASKS >> 32) for one in numbers]


async def test_an_archive_of_small_files_makes_few(
    spark: SparkSession, dsn: str, tmp_path: Path, created: list[bytes]
) -> None:
    (tmp_path / "archive").mkdir()
    for number, pdu in enumerate(created):
        (tmp_path / "archive" / f"{number}.ndjson").write_bytes(pdu + b"\n")
    summary = import_archive(
        spark,
        [str(tmp_path / "archive")],
        dsn,
        server_name=SERVER,
        work=str(tmp_path / "work"),
    )
    assert summary.outcomes == {"stored": ROOMS}
    assert len(list((tmp_path / "work" / "bundles").iterdir())) == 1
    made = export_parquet(spark, dsn, str(tmp_path / "export"))
    assert made.events == ROOMS
    files = [len(list((tmp_path / "export" / name).rglob("*.parquet"))) for name in TABLES]
    assert files == [1, 2, 2]  # 200 rooms a task
    export_parquet(spark, dsn, str(tmp_path / "export"), since=made.upto)
    again = [len(list((tmp_path / "export" / name).rglob("*.parquet"))) for name in TABLES]
    assert again == [1, 2, 4]  # visibility is that of the moment


TABLES = ("events", "state_deltas", "visibility")


def test_files_of_an_export_are_bounded() -> None:
    """Pages of two days, in turns: a file is large, or the last of its day."""
    page, days = 7_000, ["2026-01-01", "2026-01-02"]
    pages = [(days[at % 2], pa.table({"n": range(at * page, (at + 1) * page)})) for at in range(25)]
    files = list(_gathered(pages))
    sizes = {day: [one.num_rows for name, one in files if name == day] for day in days}
    assert {day: sum(some) for day, some in sizes.items()} == {days[0]: 13 * page, days[1]: 84_000}
    for some in sizes.values():
        assert all(FILE_ROWS <= rows < FILE_ROWS + page for rows in some[:-1])
        assert some[-1] < FILE_ROWS + page


@pytest.mark.parametrize("passes", [4, pytest.param(100, marks=long_run)])
async def test_a_day_of_small_passes_ends_in_few_files(
    spark: SparkSession,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    passes: int,
) -> None:
    """One process makes all passes, or each makes fewer than lie between two compactions.

    A version has the same rows after them; the answers stay the same, too.
    """
    monkeypatch.setattr(delta_table, "SMALL_FILES_MAX", 6)
    folder, files, rows = str(tmp_path), list[int](), dict[int, int]()
    room = RoomBuilder("11", seed=1, sign=False, servers=[SERVER])
    room.start(room.user(1))
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        mirror(None, dsn, folder, ("events",), once=True)
        for first in range(0, PASSES, passes):
            stop = threading.Event()
            news = asyncio.Queue[MirrorPass]()
            running = asyncio.create_task(following(dsn, folder, stop, news))
            for number in range(first, min(first + passes, PASSES)):
                await store.append([room.message(room.user(1), f"{number}").pdu])
                while DeltaTable(tmp_path / "events").count() < len(room.pdus):
                    await news.get()
                table = DeltaTable(tmp_path / "events")
                files.append(len(table.file_uris()))
                rows[table.version()] = table.count()
            stop.set()
            await running
    assert max(files) <= 6 + 2
    assert len(rows) == PASSES
    assert {at: DeltaTable(tmp_path / "events", version=at).count() for at in rows} == rows
    if passes == 4:
        before = counted(spark, folder)
        mirror(None, dsn, folder, once=True)
        assert len(DeltaTable(tmp_path / "events").file_uris()) == 1
        assert await differences(dsn, tmp_path) == {}
        assert counted(spark, folder) == before


def counted(spark: SparkSession, folder: str) -> list[tuple[object, ...]]:
    [answer] = answers(spark, folder, ("activity",), tasks=1).values()
    return sorted(tuple(row) for row in answer.rows.collect())


async def following(
    dsn: str, folder: str, stop: threading.Event, news: asyncio.Queue[MirrorPass]
) -> None:
    """Follow the store with a pass for each change."""
    loop = asyncio.get_running_loop()

    def report(made: MirrorPass) -> None:
        loop.call_soon_threadsafe(news.put_nowait, made)

    await asyncio.to_thread(
        mirror, None, dsn, folder, ("events",), every_s=0.01, stop=stop, report=report
    )
