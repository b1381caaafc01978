"""A join with the members omitted, once it is complete, equals a join with the whole answer.

Two stores of one server join the same random room: one with the whole answer of send_join, one with
the members omitted. Both receive the same transactions: messages and state of known and unknown
senders, joins, leaves, kicks, bans, power levels, history visibility, forks and gaps, and events
that local users send. The second store is completed at a random moment, and more arrives after it.
Then all tables are equal, row for row (tests/persist/whole_rows.py). The exceptions:

- the position of the completion: the state deltas written there are compared as the state that
  they lead to, and the positions of memberships that changed there are its own;
- the state deltas before it: clients of the stores may have got others, for an event that the
  partial state had refused. So they are compared as the state that they lead to as well, and the
  positions of memberships are those of the last of them (test_partial_positions.py);
- an event that the partial state had refused and the whole state accepts: it is new to clients, so
  it has a position of the completion, and what it changed came with other events;
- a room in which the whole state has no local user any more gets no further events;
- what is left out of every comparison, with the reasons: `COLUMNS_LEFT_OUT`, `TABLES_LEFT_OUT`.

During the fill, each pair of an event and a reader (user or server) that is visible is visible in
the other store at the same moment, and after the completion. The exceptions are an event that the
whole state refuses, and a redaction of it, which has no effect then; and an event at which the
whole state has lost the join of the reader.

`STORAGE_EXAMPLES` is the number of rooms, and `STORAGE_SEED` the first of them.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import asyncpg
import pytest

import storage
from storage import EventId, RoomId
from storage.database.connection import Database
from storage.persist import partial_marks
from storage.testing import signing_key
from tests.federation.partial_worlds import READERS, SERVER, PartialWorld, Replica
from tests.maintenance.rooms import findings
from tests.persist.row_differences import differences
from tests.persist.whole_rows import StoreRows, rows_of

FIRST: Final = int(os.environ.get("STORAGE_SEED", "0"))
SEEDS: Final = (
    range(FIRST, FIRST + int(os.environ["STORAGE_EXAMPLES"]))
    if "STORAGE_EXAMPLES" in os.environ
    else (0, 1, 3, 8, 124, 413)
)

WITH_A_KILLED_JOIN: Final = 8

DAMAGES: Final = (
    """UPDATE events SET soft_failed = NOT soft_failed
        WHERE event_nid = (SELECT max(event_nid) FROM events WHERE NOT outlier)""",
    "DELETE FROM current_state WHERE membership = 5",
    "UPDATE visibility SET audiences = '{}'",
    "UPDATE memberships SET stream_ordering = stream_ordering + 1",
    """UPDATE state_deltas SET prev_event_nid = event_nid
        WHERE stream_ordering = (SELECT max(stream_ordering) FROM state_deltas)""",
)


@dataclass
class Play:
    """A world, the two stores, and what was counted. ``first`` may be partial."""

    world: PartialWorld
    first: Replica
    second: Replica
    pairs: int = 0
    """Pairs of an event and a reader that were compared during the fill and after it."""
    hidden: set[EventId] | None = None
    """Those that were refused right before the completion; None if it ran with a transaction."""

    async def run(self, *, is_partial: bool) -> None:
        world = self.world
        if world.random.random() < 0.2:
            await world.stayed(self.first, self.second)
        for _ in range(world.random.randint(0, 4)):
            world.act()
        join = world.joins(READERS[0])
        await world.join(self.first, join, is_partial=is_partial)
        await world.join(self.second, join, is_partial=False)
        steps = world.random.randint(4, 24)
        complete_at = world.random.randint(0, steps) if is_partial else None
        finn_at = world.random.randint(0, 2 * steps)
        for step in range(steps):
            for _ in range(world.random.randint(0, 3)):
                world.act()
            if await self.is_over():
                break
            if step == finn_at:
                await self.finn()
            await self.step(completing=step == complete_at)
        if is_partial and await self.first.store.partial_rooms():
            await self.complete()
        while await self.deliver():
            pass
        await self.look()

    async def step(self, *, completing: bool) -> None:
        if completing and self.world.random.random() < 0.5:
            await asyncio.gather(self.deliver(), self.first.receiver.complete_partial_rooms())
        elif completing:
            await self.complete()
        elif self.world.random.random() < 0.2:
            await self.world.send(self.first, self.second)
        elif self.world.random.random() < 0.1:
            for replica in (self.first, self.second):
                await replica.receiver.backfill(self.world.room.room_id, 5)
        else:
            await self.deliver()
        if completing or self.world.random.random() < 0.4:
            await self.look()

    async def finn(self) -> None:
        join = self.world.joins(READERS[1])
        for replica in (self.first, self.second):
            await self.world.join(replica, join, is_partial=True)

    async def is_over(self) -> bool:
        """Return whether the whole state says that no local user is in the room any more.

        It may be a resolution with an old fork that says so. Then the other store refuses the
        events that come, and the partial one does not know of it.
        """
        members = await self.second.store.member_ids(self.world.room.room_id)
        return not set(READERS).intersection(members)

    async def deliver(self) -> bool:
        if await self.is_over():
            return False
        chain = self.world.batch()
        for replica in (self.first, self.second):
            await self.world.deliver(replica, chain)
        return bool(chain)

    async def complete(self) -> None:
        before = await self.world.seen(self.first)
        self.hidden = await self.world.refused(self.first)
        await self.first.receiver.complete_partial_rooms()
        assert await self.first.store.partial_rooms() == []
        refused = await self.world.refused(self.first)
        after = await self.world.seen(self.first)
        assert self.unexplained(before - after, refused) == set()

    async def look(self) -> None:
        """Compare what is visible with the other store."""
        seen, whole = await self.world.seen(self.first), await self.world.seen(self.second)
        refused = await self.world.refused(self.second)
        self.pairs += len(seen)
        assert self.unexplained(seen - whole, refused) == set()

    def unexplained(
        self, pairs: Iterable[tuple[EventId, str]], refused: set[EventId]
    ) -> set[tuple[EventId, str]]:
        return {pair for pair in pairs if pair[0] not in refused and not self.world.has_lost(*pair)}

    def check_moved(self, moved: Iterable[str]) -> None:
        """Check that only events which were refused have new positions."""
        if self.hidden is not None:
            assert set(moved) <= self.hidden


async def played(seed: int, *dsns: str, is_partial: bool) -> tuple[Play, list[StoreRows]]:
    """Play a world on two databases, and read their tables."""
    world = PartialWorld(seed)
    async with AsyncExitStack() as stack:
        key = signing_key(SERVER)
        first, second = [
            Replica.of(
                await stack.enter_async_context(
                    storage.open(dsn, server_name=SERVER, signing_key=key)
                ),
                world.remote,
            )
            for dsn in dsns
        ]
        play = Play(world, first, second)
        await play.run(is_partial=is_partial)
        assert await findings(first.store) == []
    return play, [await rows_of(dsn) for dsn in dsns]


async def agreeing(seed: int, *dsns: str) -> Play:
    play, [completed, full] = await played(seed, *dsns, is_partial=True)
    moved = completed.moved
    found = differences(full, completed, moved)
    assert not found, "\n".join(found)
    play.check_moved(moved)
    return play


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_completed_room_equals_a_full_join(
    seed: int, dsn: str, another_dsn: str, record_property: Callable[[str, object], None]
) -> None:
    play = await agreeing(seed, dsn, another_dsn)
    record_property("pairs", play.pairs)


async def test_the_worlds_notice_the_mark_of_a_killed_join(
    dsn: str, another_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That stays. A join with the members omitted takes it, and one with the whole answer not."""

    async def nothing(_: Database) -> list[RoomId]:
        return []

    monkeypatch.setattr(partial_marks, "drop_lost_marks", nothing)
    with pytest.raises(AssertionError):
        await agreeing(WITH_A_KILLED_JOIN, dsn, another_dsn)


async def test_two_full_joins_are_equal_and_a_difference_is_found(
    dsn: str, another_dsn: str
) -> None:
    _, [one, other] = await played(1, dsn, another_dsn, is_partial=False)
    assert differences(other, one) == []
    connection = await asyncpg.connect(another_dsn)
    for sql in DAMAGES:
        await connection.execute(sql)
        after = await rows_of(another_dsn)
        assert differences(after, one) != [], sql
        assert len(differences(after, other)) > 0, sql
        one = other = after
    await connection.close()
