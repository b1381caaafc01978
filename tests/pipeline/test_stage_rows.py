"""What tasks stage, each some rows of every room, is stored as it was where the rows come from."""

import asyncio
from typing import Any

from storage.pipeline.imports.data_frame_writer import EventWriter, StagedByTask
from storage.pipeline.imports.stage_rows import RowStager, StagingTask
from storage.pipeline.imports.validate import LineValidator
from storage.pipeline.source.filters import split
from storage.pipeline.source.options import Options
from storage.pipeline.source.reader import EventReader
from storage.pipeline.source.rows import COLUMNS
from storage.testing import ODD_SOME, SHAPES, build_room, deliver_with_gap, generate_room
from tests.pipeline.stores import SERVER, fill, tables


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
    writer.commit([*messages, None])


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
