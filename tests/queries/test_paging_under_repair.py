"""Paging while history arrives: what a client sees who goes through a room page by page, when events come in between.

Where senders tell honest depths, an event never moves in the order: whoever pages sees what was there, and what arrives before they
get there, each once. Where depths are forged, filling a gap may move events up (storage/graph/order.py). Then a page backwards repeats
nothing and may pass over only events that moved; a page forwards passes over nothing and may repeat only events that moved.
"""

import os
import random
from typing import NamedTuple

import pytest

from storage import Store
from storage.ids import EventId
from storage.queries.messages import Direction
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, append, ids, new_room

ROOMS = int(os.environ.get("STORAGE_ROOMS", "12"))

SQL_ORDER = """
SELECT e.event_id, e.topological_ordering, e.stream_ordering
FROM events e
JOIN rooms r USING (room_nid)
WHERE r.room_id = $1::text AND NOT e.outlier
"""


class OrderRow(NamedTuple):
    event_id: str
    topological_ordering: int
    stream_ordering: int


Order = dict[EventId, tuple[int, int]]


async def order_of(store: Store, room: RoomBuilder) -> Order:
    async with store.database.connection() as conn:
        rows = await conn.fetch(SQL_ORDER, room.room_id, row=OrderRow)
    return {EventId(row.event_id): (row.topological_ordering, row.stream_ordering) for row in rows}


def grown(chance: random.Random, seed: int, *, honest: bool) -> tuple[RoomBuilder, list[BuiltEvent]]:
    """A room of forks and merges: (the room, what is said in it)."""
    room = new_room(members=[LOCAL], seed=seed)
    said: list[BuiltEvent] = []
    for _ in range(chance.randint(3, 5)):
        branches = room.fork(chance.randint(1, 3))
        for branch in branches:
            for _ in range(chance.randint(1, 4)):
                claimed = {} if honest or chance.random() < 0.6 else {"depth": chance.choice([1, 5, 9, 15, 40])}
                said.append(branch.message(ADMIN, str(len(said)), **claimed))  # type: ignore[arg-type]  # a key of How
        room.heads = room.graph.maximal([head for branch in branches for head in branch.heads])
        said.append(room.message(ADMIN, str(len(said))))
    return room, said


class Reader:
    """Somebody who pages through the room, and who reckons what they have to see."""

    def __init__(self, store: Store, room: RoomBuilder, direction: Direction, before: Order) -> None:
        self.store, self.room, self.direction = store, room, direction
        self.seen: list[EventId] = []
        self.at: str | None = None
        self.place: tuple[int, int] | None = None
        self.due = set(before)
        self.done = False

    async def turn(self, limit: int) -> None:
        page = await self.store.messages(self.room.room_id, LOCAL, from_=self.at, direction=self.direction, limit=limit)
        self.seen += ids(page.chunk)
        if page.chunk:
            self.place = (page.chunk[-1].topological_ordering or 0, page.chunk[-1].stream_ordering or 0)
        self.at, self.done = page.end, page.end is None

    def told(self, event_id: EventId, place: tuple[int, int]) -> None:
        """An event has arrived."""
        ahead = self.place is None or (place < self.place if self.direction == "b" else place > self.place)
        if ahead and not self.done:
            self.due.add(event_id)


class Course(NamedTuple):
    """How it went: what should have been seen, what was, and what moved."""

    due: set[EventId]
    seen: list[EventId]
    moved: set[EventId]


async def course(store: Store, seed: int, direction: Direction, *, honest: bool) -> Course:
    """One room: some of it is held, the rest arrives while it is paged through."""
    chance = random.Random(f"{seed} {direction} {honest}")
    room, said = grown(chance, 2 * seed + honest + 1_000 * (direction == "f"), honest=honest)
    late = {event.event_id for event in said[:-1] if chance.random() < 0.5}
    state = list(said[0].state_before.values())
    for event in room.events:
        if event.event_id not in late:
            assert set(await append(store, event, state_before={event.event_id: state})) == {"stored"}
    before = await order_of(store, room)
    reader, moved, known = Reader(store, room, direction, before), set[EventId](), before
    waiting = [event for event in said if event.event_id in late]
    chance.shuffle(waiting)
    while not reader.done:
        await reader.turn(chance.randint(1, 4))
        for event in [waiting.pop() for _ in range(min(len(waiting), chance.randint(0, 3)))]:
            origin = chance.choice(["backfill", "backfill", "live"])
            assert set(await append(store, event, origin=origin, state_before={event.event_id: state})) == {"stored"}
            now = await order_of(store, room)
            moved |= {one for one, place in known.items() if now[one] != place}
            reader.told(event.event_id, now[event.event_id])
            known = now
    return Course(reader.due, reader.seen, moved)


@pytest.mark.parametrize("direction", ["b", "f"])
async def test_with_honest_depths_each_event_is_seen_once_and_none_is_lost(store: Store, direction: Direction) -> None:
    for seed in range(ROOMS):
        went = await course(store, seed, direction, honest=True)
        assert (seed, went.moved) == (seed, set())
        assert (seed, sorted(went.seen)) == (seed, sorted(went.due))


@pytest.mark.parametrize("direction", ["b", "f"])
async def test_with_forged_depths_only_what_moved_is_passed_over_or_repeated(store: Store, direction: Direction) -> None:
    any_moved = False
    for seed in range(2 * ROOMS):
        went = await course(store, seed, direction, honest=False)
        any_moved |= bool(went.moved)
        lost = went.due - set(went.seen)
        repeated = {one for one in went.seen if went.seen.count(one) > 1}
        assert set(went.seen) <= went.due | went.moved, seed
        assert lost | repeated <= went.moved, seed
        assert not (repeated if direction == "b" else lost), seed
    assert any_moved


async def test_what_moves_up_after_a_sync_is_met_from_its_prev_batch(store: Store) -> None:
    """Above everything that there was when the token was made: its first page begins above everything that there is."""
    room = new_room(members=[LOCAL])
    held = len(room.events)
    missing = [room.message(ADMIN, f"missing {number}") for number in range(20)]
    forged = room.message(ADMIN, "forged", depth=1)
    last = room.message(ADMIN, "last")
    assert set(await append(store, *room.events[:held])) == {"stored"}
    state = list(forged.state_before.values())
    assert await append(store, forged, last, state_before={forged.event_id: state}) == ["stored", "stored"]
    timeline = (await store.sync(LOCAL, timeline_limit=1)).join[room.room_id].timeline
    assert ids(timeline.events) == [last.event_id]
    before = await order_of(store, room)
    assert set(await append(store, *missing, origin="backfill")) == {"stored"}
    after = await order_of(store, room)
    assert after[forged.event_id][0] > max(place for place, _ in before.values())
    page = await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch, limit=100)
    assert ids(page.chunk) == ids([*room.events[:held], *missing, forged])[::-1]
    assert page.end is None
