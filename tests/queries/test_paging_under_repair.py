"""Paging while history arrives: a client reads a room page by page while events are inserted.

It gets each event once: those stored when it began, and those that arrive ahead of it. Parents come
before children, or children before parents. Where depths are forged, filling a gap
reorders events (storage/graph/topological_ordering.py) past the client's position, also repeatedly.
Two kinds of event are skipped on purpose: new events inserted behind the cursor and, when paging
forwards, a parent that arrives after its child was returned.
"""

import os
import random
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import pytest

from storage import Store
from storage.ids import EventId
from storage.queries.pagination.page import Direction
from storage.streams import PaginationToken
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.conftest import StatementLog
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


def in_thread(room: RoomBuilder, number: int) -> dict[str, object]:
    """Every message is in one thread, below the room's beginning: `relations` has pages too."""
    return {
        "body": str(number),
        "m.relates_to": {"rel_type": "m.thread", "event_id": room.events[0].event_id},
    }


def grown(
    chance: random.Random, seed: int, *, honest: bool
) -> tuple[RoomBuilder, list[BuiltEvent]]:
    """A room of forks and merges: (the room, what is said in it)."""
    room = new_room(members=[LOCAL], seed=seed)
    said: list[BuiltEvent] = []
    for _ in range(chance.randint(3, 5)):
        branches = room.fork(chance.randint(1, 3))
        for branch in branches:
            for _ in range(chance.randint(1, 4)):
                claimed = (
                    {}
                    if honest or chance.random() < 0.6
                    else {"depth": chance.choice([1, 5, 9, 15, 40])}
                )
                content = in_thread(room, len(said))
                message = branch.send(ADMIN, "m.room.message", content, **claimed)  # type: ignore[arg-type]
                said.append(message)
        room.heads = room.graph.maximal([head for branch in branches for head in branch.heads])
        said.append(room.send(ADMIN, "m.room.message", in_thread(room, len(said))))
    return room, said


Place = tuple[int, int]
NOWHERE = (2**63, 0)
Question = Literal["messages", "relations", "recursive"]


class PagingReader:
    """Somebody who pages through the room, and who reckons what they have to see."""

    def __init__(
        self,
        store: Store,
        room: RoomBuilder,
        direction: Direction,
        before: Order,
        question: Question,
    ) -> None:
        self.store, self.room, self.direction, self.question = store, room, direction, question
        self.seen: list[EventId] = []
        self.thread = {event.event_id for event in room.events if event.type == "m.room.message"}
        self.at: str | None = None
        self.place: Place | None = None
        self.due = {one for one in before if question == "messages" or one in self.thread}
        self.done = False
        self.below: Place | None = None
        self.covered: set[EventId] = set()
        self.earlier = 0
        self.behind: set[EventId] = set()

    async def begin_around(self, event: BuiltEvent, before: Order) -> None:
        """Begin beside an event, by a token of `context`."""
        around = await self.store.context(event.event_id, LOCAL, limit=0)
        self.at, self.place = (
            around.start if self.direction == "b" else around.end,
            before[event.event_id],
        )
        self.due = {
            one
            for one, place in before.items()
            if one in self.due
            and (place < self.place if self.direction == "b" else place > self.place)
        }

    async def turn(self, limit: int) -> None:
        asked: dict[str, Any] = {"from_": self.at, "direction": self.direction, "limit": limit}
        if self.question == "messages":
            page = await self.store.messages(self.room.room_id, LOCAL, **asked)
        else:
            page = await self.store.relations(
                self.room.events[0].event_id, LOCAL, recurse=self.question == "recursive", **asked
            )
        self.seen += ids(page.chunk)
        if page.chunk:
            last = (page.chunk[-1].topological_ordering or 0, page.chunk[-1].stream_ordering or 0)
            furthest = min if self.direction == "b" else max
            self.place = last if self.place is None else furthest(self.place, last)
        self.at, self.done = page.end, page.end is None
        if page.end is not None:
            self.earlier = max(
                self.earlier, len(PaginationToken.parse(page.end, self.store.deployment_id).earlier)
            )

    def begin_at_sync(self, token: str, covered: Iterable[EventId]) -> None:
        """Begin at a sync token, forwards: what it covers is not due, nor what is backfilled."""
        self.at, self.below = token, NOWHERE
        self.covered = set(covered)
        self.due -= self.covered

    async def begin_turned(self, limit: int, before: Order) -> None:
        """Begin forwards at the position of a walk that went back from a timeline by a page.

        Events above that position are due, and those in the timeline or after it, at any position.
        """
        timeline = (
            (await self.store.sync(LOCAL, timeline_limit=limit)).join[self.room.room_id].timeline
        )
        page = await self.store.messages(
            self.room.room_id, LOCAL, from_=timeline.prev_batch, limit=limit
        )
        self.at, self.below = page.end, before[page.chunk[-1].event_id] if page.chunk else NOWHERE
        self.covered = {one for one, place in before.items() if place < self.below} - set(
            ids(timeline.events)
        )
        self.due -= self.covered

    def told(
        self, event_id: EventId, place: Place, children: Iterable[EventId], *, backfilled: bool
    ) -> None:
        """An event has arrived, below these of those that were there."""
        if self.done:
            return
        if (
            backfilled
            and self.below is not None
            and (place < self.below or not self.covered.isdisjoint(children))
        ):
            self.covered.add(event_id)
            return
        if self.direction == "b":
            ahead = self.place is None or place < self.place
        else:
            ahead = self.place is None or (place > self.place and self.behind.isdisjoint(children))
        if ahead:
            self.due.add(event_id)

    def passed(self, order: Order) -> None:
        """This is the order now: what lies behind the walk forwards stays so, wherever it moves."""
        self.behind |= {
            one for one, place in order.items() if self.place is not None and place <= self.place
        }


class Course(NamedTuple):
    """The result: events due, returned and reordered, and earlier positions in a token."""

    due: set[EventId]
    seen: list[EventId]
    moved: set[EventId]
    earlier: int


def check_parents_first(room: RoomBuilder, turned: Sequence[EventId], seed: int) -> None:
    at = {event_id: place for place, event_id in enumerate(turned)}
    for event in room.events:
        for parent in event.prev_events:
            assert at.get(parent, -1) < at.get(event.event_id, len(at)), (
                seed,
                event.event_id,
                parent,
            )


async def course(
    store: Store,
    seed: int,
    direction: Direction,
    *,
    honest: bool,
    question: Question = "messages",
    beside: Literal["token", "turned"] | None = None,
) -> Course:
    """Page through a room of which part is stored, while the rest arrives.

    Start at the beginning of the room, or go forwards from a position beside a timeline.
    """
    chance = random.Random(f"{seed} {direction} {honest}")
    room, said = grown(chance, 2 * seed + honest + 1_000 * (direction == "f"), honest=honest)
    late = {event.event_id for event in said[:-1] if chance.random() < 0.5}
    state = list(said[0].state_before.values())
    held = [event for event in room.events if event.event_id not in late]
    halfway, token = (len(held) + len(state)) // 2, ""
    for number, event in enumerate(held):
        token = (
            (await store.sync(LOCAL)).next_batch
            if beside == "token" and number == halfway
            else token
        )
        assert set(await append(store, event, state_before={event.event_id: state})) == {"stored"}
    before = await order_of(store, room)
    reader, moved, known = (
        PagingReader(store, room, direction, before, question),
        set[EventId](),
        before,
    )
    if beside == "token":
        reader.begin_at_sync(token, ids(held[:halfway]))
    elif beside == "turned":
        await reader.begin_turned(chance.randint(1, 6), before)
    elif chance.random() < 0.3:
        await reader.begin_around(chance.choice(held), before)
    waiting = [event for event in said if event.event_id in late]
    chance.shuffle(waiting)
    together = chance.random() < 0.3
    while not reader.done:
        await reader.turn(chance.randint(1, 4))
        reader.passed(known)
        arriving = [waiting.pop() for _ in range(min(len(waiting), chance.randint(0, 3)))]
        for batch in (
            ([arriving] if together else [[event] for event in arriving]) if arriving else []
        ):
            origin = chance.choice(["backfill", "backfill", "live"])
            assert set(
                await append(
                    store, *batch, origin=origin, state_before={e.event_id: state for e in batch}
                )
            ) == {"stored"}
            now = await order_of(store, room)
            moved |= {one for one, place in known.items() if now[one] != place}
            for event in batch:
                children = [
                    child.event_id
                    for child in said
                    if event.event_id in child.prev_events and child.event_id in known
                ]
                reader.told(
                    event.event_id, now[event.event_id], children, backfilled=origin == "backfill"
                )
            known = now
            reader.passed(known)
    turned = [] if beside else reader.seen if direction == "f" else reader.seen[::-1]
    check_parents_first(room, turned, seed)
    return Course(reader.due, reader.seen, moved, reader.earlier)


@pytest.mark.parametrize("direction", ["b", "f"])
async def test_with_honest_depths_nothing_moves(store: Store, direction: Direction) -> None:
    for seed in range(ROOMS):
        went = await course(store, seed, direction, honest=True)
        assert (seed, went.moved) == (seed, set())
        assert (seed, sorted(went.seen)) == (seed, sorted(went.due))


@pytest.mark.parametrize("direction", ["b", "f"])
async def test_with_forged_depths_too_each_event_is_seen_once_and_none_is_lost(
    store: Store, direction: Direction
) -> None:
    any_moved, earlier = False, 0
    for seed in range(2 * ROOMS):
        went = await course(store, seed, direction, honest=False)
        any_moved |= bool(went.moved)
        earlier = max(earlier, went.earlier)
        assert (seed, sorted(went.seen)) == (seed, sorted(went.due))
    assert any_moved
    assert earlier > 0


@pytest.mark.parametrize("direction", ["b", "f"])
@pytest.mark.parametrize("question", ["relations", "recursive"])
async def test_so_it_is_with_pages_of_relations(
    store: Store, direction: Direction, question: Question
) -> None:
    any_moved = False
    for seed in range(ROOMS):
        went = await course(store, seed, direction, honest=False, question=question)
        any_moved |= bool(went.moved & went.due)
        assert (seed, sorted(went.seen)) == (seed, sorted(went.due))
    assert any_moved


@pytest.mark.parametrize("beside", ["token", "turned"])
@pytest.mark.parametrize("question", ["messages", "relations", "recursive"])
async def test_from_beside_a_timeline_each_event_after_it_is_seen_once_and_none_is_lost(
    store: Store, question: Question, beside: Literal["token", "turned"]
) -> None:
    any_moved, earlier = False, 0
    for seed in range(2 * ROOMS):
        went = await course(store, seed, "f", honest=False, question=question, beside=beside)
        any_moved |= bool(went.moved)
        earlier = max(earlier, went.earlier)
        assert (seed, sorted(went.seen)) == (seed, sorted(went.due))
    assert any_moved
    assert earlier > (beside == "token"), (
        "the place at which the walk began, and one that something has moved past"
    )


async def test_walks_that_meet_at_a_token_share_nothing_and_lack_nothing(store: Store) -> None:
    """Also with events reordered after the token was made, both ways."""
    for seed in range(ROOMS):
        chance = random.Random(seed)
        room, said = grown(chance, 5_000 + seed, honest=False)
        late = {event.event_id for event in said[:-1] if chance.random() < 0.5}
        state = list(said[0].state_before.values())
        for event in room.events:
            if event.event_id not in late:
                await append(store, event, state_before={event.event_id: state})
        tokens: list[str] = []
        waiting = [event for event in said if event.event_id in late]
        chance.shuffle(waiting)
        for event in waiting:
            direction: Direction = chance.choice(["b", "f"])
            page = await store.messages(
                room.room_id,
                LOCAL,
                direction=direction,
                limit=chance.randint(1, 20),
                from_=chance.choice([None, *tokens]),
            )
            tokens += [page.end] if page.end else []
            await append(store, event, origin="backfill", state_before={event.event_id: state})
        everything = sorted((await order_of(store, room)).keys())
        for token in tokens:
            way = PaginationToken.parse(token, store.deployment_id).direction
            if way in ("", "b"):
                assert (
                    sorted(
                        await walk(store, room, "b", None, token)
                        + await walk(store, room, "b", token, None)
                    )
                    == everything
                ), (
                    seed,
                    token,
                )
            if way in ("", "f"):
                assert (
                    sorted(
                        await walk(store, room, "f", None, token)
                        + await walk(store, room, "f", token, None)
                    )
                    == everything
                ), (
                    seed,
                    token,
                )


async def walk(
    store: Store, room: RoomBuilder, direction: Direction, from_: str | None, to: str | None
) -> list[EventId]:
    found: list[EventId] = []
    while True:
        page = await store.messages(
            room.room_id, LOCAL, direction=direction, from_=from_, to=to, limit=3
        )
        found += ids(page.chunk)
        if page.end is None:
            return found
        from_ = page.end


async def test_what_moves_up_after_a_sync_is_met_from_its_prev_batch(store: Store) -> None:
    """The reordered event is above all events of the token's time.

    So the first page begins above all events that the room has now.
    """
    room = new_room(members=[LOCAL])
    held = len(room.events)
    missing = [room.message(ADMIN, f"missing {number}") for number in range(20)]
    forged = room.message(ADMIN, "forged", depth=1)
    last = room.message(ADMIN, "last")
    assert set(await append(store, *room.events[:held])) == {"stored"}
    state = list(forged.state_before.values())
    assert await append(store, forged, last, state_before={forged.event_id: state}) == [
        "stored",
        "stored",
    ]
    timeline = (await store.sync(LOCAL, timeline_limit=1)).join[room.room_id].timeline
    assert ids(timeline.events) == [last.event_id]
    before = await order_of(store, room)
    assert set(await append(store, *missing, origin="backfill")) == {"stored"}
    after = await order_of(store, room)
    assert after[forged.event_id][0] > max(place for place, _ in before.values())
    page = await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch, limit=100)
    assert ids(page.chunk) == ids([*room.events[:held], *missing, forged])[::-1]
    assert page.end is None


async def test_a_page_after_a_move_takes_two_statements_and_the_next_one_again(
    store: Store, statements: StatementLog
) -> None:
    """Such pages hold earlier places until what has moved is through.

    Where nothing has moved since, a page takes one.
    """
    room = new_room(members=[LOCAL])
    held = list(room.events)
    missing = [room.message(ADMIN, f"missing {number}") for number in range(20)]
    forged = room.message(ADMIN, "forged", depth=3)
    assert set(await append(store, *held)) == {"stored"}
    state = {event.event_id: list(forged.state_before.values()) for event in (forged, missing[-1])}
    assert await append(store, forged, state_before=state) == ["stored"]
    end = (await store.context(forged.event_id, LOCAL, limit=0)).end
    assert set(
        await append(
            store,
            *missing[10:],
            origin="backfill",
            state_before={missing[10].event_id: state[forged.event_id]},
        )
    ) == {"stored"}
    page_from = partial(store.messages, room.room_id, LOCAL, limit=1)
    statements.take()
    page = await page_from(from_=end)
    assert len(statements.take()) == 2
    assert ids(page.chunk) == [forged.event_id]
    assert page.end is not None
    assert ids((await page_from(from_=page.end)).chunk) == ids(held[2:3])
    assert len(statements.take()) == 2
    again = await page_from()
    assert len(statements.take()) == 1
    await page_from(from_=again.end)
    assert len(statements.take()) == 1
