"""What tasks stage, each some rows of every room, is stored as it was where the rows come from."""

import asyncio
from typing import Any

import pytest

import storage
from storage.database.arrow_results import arrow_session
from storage.pipeline.imports.append_events import Loader, TaskAttempt
from storage.pipeline.imports.load_rooms import BulkWriter, LoadedLines
from storage.pipeline.imports.stage_rows import (
    EventWriter,
    RowStager,
    StagedBundles,
    StagedByTask,
    StagingTask,
    gathered,
)
from storage.pipeline.imports.validate import LineValidator
from storage.pipeline.source.filters import Options, split
from storage.pipeline.source.reader import EventReader
from storage.pipeline.source.rows import COLUMNS
from storage.rebuild.planner import CannotPlan
from storage.testing import ODD_SOME, SHAPES, build_room, deliver_with_gap, generate_room
from tests.maintenance.rooms import findings
from tests.pipeline.stores import SERVER, fill, tables
from tests.pipeline.test_verdicts_kept import fill_with_verdicts


async def logical(dsn: str) -> dict[str, Any]:
    """Return all tables, without traces of the order of arrival.

    Those are state groups that outliers had, and positions that were reordered.
    """
    found = await tables(dsn)
    return {
        **found,
        "counts": {
            name: found["counts"][name]
            for name in ("rooms", "events", "missing_events", "current_state")
        },
    }


def copied(source: str, target: str, partitions: int) -> None:
    """Do what Spark does: read parts, write each part by a task, end the write on the driver."""
    writer, messages = gathered_rows(source, target, partitions)
    writer.commit([*messages, None])


def gathered_rows(
    source: str, target: str, partitions: int
) -> tuple[EventWriter, list[StagedByTask]]:
    """Do so up to the end of the tasks."""
    reader = EventReader(Options(source, partitions=partitions))
    writer = EventWriter(Options(target, server_name=SERVER), COLUMNS, overwrite=False)
    messages = []
    for number, part in list(enumerate(reader.partitions()))[::-1]:
        with RowStager(
            writer.target, writer.number, StagingTask(number, number + 10), LineValidator({})
        ) as gatherer:
            for batch in reader.read(part):
                for begin, end in split(0, batch.num_rows - 1, 3):
                    gatherer.take(batch.slice(begin, end - begin))
            gatherer.end()
        messages.append(
            StagedByTask(gatherer.bundles, len(gatherer.refused), tuple(gatherer.refused))
        )
    assert len(messages) == partitions
    return writer, messages


async def test_rooms_that_span_partitions_are_copied_whole(dsn: str, another_dsn: str) -> None:
    odd = SHAPES["small_chat"].replaced(odd=ODD_SOME)
    rooms = [
        generate_room(odd, 40, seed=seed, version=("10", "12")[seed % 2], sign=False)
        for seed in range(3)
    ]
    rooms.append(deliver_with_gap(build_room(SHAPES["fork_heavy"], 40, seed=7, sign=False), 12, 20))
    for room in rooms:
        await fill(dsn, room)
    await asyncio.to_thread(copied, dsn, another_dsn, 8)
    assert await logical(another_dsn) == await logical(dsn)
    await asyncio.to_thread(copied, dsn, another_dsn, 3)
    assert await logical(another_dsn) == await logical(dsn)


async def test_refused_and_readmitted_events_are_copied(dsn: str, another_dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        await fill_with_verdicts(store, 3)
    for _ in range(2):  # the second time all is there already
        await asyncio.to_thread(copied, dsn, another_dsn, 5)
        async with storage.open(another_dsn, server_name=SERVER) as copy:
            assert await findings(copy) == []
        assert await logical(another_dsn) == await logical(dsn)


async def test_a_room_that_is_not_written_in_bulk_leaves_no_write_in_flight(
    dsn: str, another_dsn: str
) -> None:
    """Its session would be ended, perhaps while the events are appended with it."""
    await fill(dsn, generate_room(SHAPES["small_chat"], 20, seed=1, sign=False))

    def work() -> None:
        copied(dsn, another_dsn, 1)
        writer, [message] = gathered_rows(dsn, another_dsn, 1)
        session = arrow_session(another_dsn, config=writer.options.config)
        with Loader(writer.target, TaskAttempt(0)) as loader, session as conn:
            [room] = gathered(message.bundles, StagedBundles(conn, writer.number))
            bulk = BulkWriter(loader.store, writer.number, 100)
            with pytest.raises(CannotPlan):
                loader.runner.run(bulk.load([room], LoadedLines()))
            assert not loader.store.streams.unsettled
        writer.abort([])

    await asyncio.to_thread(work)
