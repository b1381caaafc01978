"""What of an append is Python: the stages from bytes to the parameters of the statement, in processor time per event.

Batches of 100 of a small chat are taken through each stage, and not written; then they are appended, so that the next batch meets the
caches of a store that runs. The rounds do the same over again, and the best of each batch counts: so it hardly matters what else the
machine does.
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
from storage.persist import intake, write, write_plain
from storage.persist.context import Needs
from storage.persist.draft import Blocks, Draft
from storage.persist.invalidations import invalidations
from storage.persist.load import fill_blocks, load
from storage.persist.plan import Incoming, plan_event
from storage.persist.prefetch import prefetch
from storage.streams.in_flight import Author
from storage.testing import SHAPES, generate_room

SERVER: Final = "s1.test"
BATCH: Final = 100
SEED: Final = 7_000
AUTHOR: Final = Author(1, "main", 1)

Stages = dict[str, float]


async def run(bench: Bench) -> None:
    """Rounds on databases of their own; the first batch makes the room and is not counted."""
    count = bench.size(40, 5)
    room = generate_room(SHAPES["small_chat"], (count + 1) * BATCH, seed=SEED)
    pdus = [event.pdu for event in room.events]
    batches = [pdus[at : at + BATCH] for at in range(0, len(pdus), BATCH)]
    rounds = [await _round(bench, batches) for _ in range(bench.size(5, 2))]
    best = {stage: sum(min(own[at][stage] for own in rounds) for at in range(count)) / (count * BATCH) * 1e6 for stage in rounds[0][0]}
    told = {name: round(us, 2) for name, us in best.items()}
    bench.results["one room, 100"] = {"batches": count, "rounds": len(rounds), "us_per_event": told}
    bench.write()
    rows = [[name, f"{us:.1f}"] for name, us in best.items()]
    show("planning (processor time of the best rounds)", ["stage", "us an event"], [*rows, ["together", f"{sum(best.values()):.1f}"]])


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
    """One batch, up to the statement."""
    took: Stages = {}
    known = {room_id: row.room_version for room_id, row in store.writer.caches.rooms.items()}
    with _spent(took, "read at a glance, room version"):
        glanced = intake.glances(pdus)
        versions = intake.versions(pdus, glanced, intake.room_ids(glanced), known, None)
    with _spent(took, "parse, check, hash"):
        read = [intake.read(pdu, one, version) for pdu, one, version in zip(pdus, glanced, versions, strict=True)]
    events = [event for event in read if isinstance(event, Event)]
    with _spent(took, "order"):
        incoming = [Incoming(events[at], "live") for at in intake.in_order(events)]
    draft = Draft(store.writer.caches, Blocks(), SERVER)
    async with store.database.connection() as conn:
        await fill_blocks(conn, draft.blocks, {"event_nids": 2 * BATCH, "state_group_nids": 2 * BATCH, "room_nids": 1})
        with _spent(took, "prefetch"):
            await (await prefetch(partial(load, conn), draft, incoming, assume_new=True)).landed()
        took["plan"] = await _planned(conn, draft, incoming)
    with _spent(took, "parameters"):
        _parameters(draft)
    return took


async def _planned(conn: Connection, draft: Draft, incoming: Sequence[Incoming]) -> float:
    """Processor time of the plan, without that of loading what it lacks."""
    seconds = 0.0
    left = deque(incoming)
    while left:
        needs = None
        start = time.process_time()
        try:
            while left:
                plan_event(draft, left[0])
                left.popleft()
        except Needs as lacking:
            needs = lacking
        seconds += time.process_time() - start
        if needs is not None:
            await load(conn, draft, needs)
    return seconds


def _parameters(draft: Draft) -> list[object]:
    if write_plain.is_plain(draft):
        return write_plain.arguments(draft, AUTHOR, 0)
    return write.arguments(draft, AUTHOR, 0, invalidations(draft))


@contextmanager
def _spent(stages: Stages, name: str) -> Iterator[None]:
    start = time.process_time()
    yield
    stages[name] = time.process_time() - start
