"""The Python part of an append: CPU time per event, by stage from bytes to statement parameters.

Batches of 100 events of a small chat go through each stage, and are not written. Then they are
appended, so that the next batch meets the caches of a running store. All rounds do the same, and
the best of each batch counts, so other load hardly matters.
"""

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import storage
from benchmarks.harness import Bench, show
from storage.database import Connection
from storage.event import Event
from storage.persist import receive
from storage.persist.load.lookups import fill_blocks
from storage.persist.load.on_demand import load
from storage.persist.load.prefetch import prefetch
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.plan.event import plan_event
from storage.persist.write import all_tables, messages_only
from storage.persist.write.dependencies import invalidations
from storage.streams.stream_writer import Author
from storage.testing import SHAPES, generate_room

SERVER: Final = "s1.test"
BATCH: Final = 100
SEED: Final = 7_000
AUTHOR: Final = Author(1, "main", 1)

Stages = dict[str, float]


async def run(bench: Bench) -> None:
    """Run rounds on fresh databases; the first batch creates the room and is not counted."""
    count = bench.size(40, 5)
    room = generate_room(SHAPES["small_chat"], (count + 1) * BATCH, seed=SEED)
    pdus = [event.pdu for event in room.events]
    batches = [pdus[at : at + BATCH] for at in range(0, len(pdus), BATCH)]
    rounds = [await _round(bench, batches) for _ in range(bench.size(5, 2))]
    best = {
        stage: sum(min(own[at][stage] for own in rounds) for at in range(count))
        / (count * BATCH)
        * 1e6
        for stage in rounds[0][0]
    }
    told = {name: round(us, 2) for name, us in best.items()}
    bench.results["one room, 100"] = {"batches": count, "rounds": len(rounds), "us_per_event": told}
    bench.write()
    rows = [[name, f"{us:.1f}"] for name, us in best.items()]
    show(
        "planning (processor time of the best rounds)",
        ["stage", "us an event"],
        [*rows, ["together", f"{sum(best.values()):.1f}"]],
    )


async def _round(bench: Bench, batches: Sequence[Sequence[bytes]]) -> list[Stages]:
    measured = []
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        await store.append(batches[0])
        gc.collect()
        gc.disable()
        try:
            for batch in batches[1:]:
                measured.append(await _stages(store, batch))
                await store.append(batch)
        finally:
            gc.enable()
    return measured


async def _stages(store: storage.Store, pdus: Sequence[bytes]) -> Stages:
    """Run one batch through the stages before the statement."""
    took: Stages = {}
    known = {room_id: row.room_version for room_id, row in store.writer.caches.rooms.items()}
    with _spent(took, "read at a glance, room version"):
        glanced = list(map(receive.header_of, pdus))
        versions = receive.versions(glanced, receive.room_ids(glanced), known, {}, None)
    with _spent(took, "parse, check, hash"):
        read = [
            receive.read(pdu, one, version)
            for pdu, one, version in zip(pdus, glanced, versions, strict=True)
        ]
    events = [event for event in read if isinstance(event, Event)]
    with _spent(took, "order"):
        incoming = [IncomingEvent(events[at], "live") for at in receive.in_order(events)]
    change_set = ChangeSet(store.writer.caches, NidBlocks(), SERVER)
    async with store.database.connection() as conn:
        await fill_blocks(
            conn,
            change_set.blocks,
            {"event_nids": 2 * BATCH, "state_group_nids": 2 * BATCH, "room_nids": 1},
        )
        with _spent(took, "prefetch"):
            await (
                await prefetch(partial(load, conn), change_set, incoming, assume_new=True)
            ).finished()
        took["plan"] = await _planned(conn, change_set, incoming)
    with _spent(took, "parameters"):
        _parameters(change_set)
    return took


async def _planned(
    conn: Connection, change_set: ChangeSet, incoming: Sequence[IncomingEvent]
) -> float:
    """Return the CPU time of the plan, without loading missing data."""
    seconds = 0.0
    left = deque(incoming)
    while left:
        needs = None
        start = time.process_time()
        try:
            while left:
                plan_event(change_set, left[0])
                left.popleft()
        except MissingData as lacking:
            needs = lacking
        seconds += time.process_time() - start
        if needs is not None:
            await load(conn, change_set, needs)
    return seconds


def _parameters(change_set: ChangeSet) -> list[object]:
    if messages_only.has_messages_only(change_set):
        statement = messages_only.statement_for(change_set)
        return messages_only.arguments(statement, change_set, AUTHOR, 0)
    return all_tables.arguments(change_set, AUTHOR, 0, invalidations(change_set))


@contextmanager
def _spent(stages: Stages, name: str) -> Iterator[None]:
    start = time.process_time()
    yield
    stages[name] = time.process_time() - start
