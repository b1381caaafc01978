"""A writer's caches may be stale, as others write too.

If it writes by them it is refused, and if it does not write, they must not matter.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import storage
from storage import StorageCorrupt, Store
from storage.testing import RoomBuilder

RETRY = "storage.persist.commit.retry"
ALONE = storage.Config(follow_ms=3_600_000)
SQL_OLD_ENDS = """
UPDATE rooms
SET forward_extremities = ARRAY[(SELECT event_nid FROM events WHERE event_id = $1::text)]
WHERE room_id = $2::text
"""


@asynccontextmanager
async def two_stores(dsn: str) -> AsyncIterator[tuple[Store, Store]]:
    """On one database; neither hears of the other."""
    async with (
        storage.open(dsn, server_name="s1.test", config=ALONE) as one,
        storage.open(dsn, server_name="s1.test", instance_name="two", config=ALONE) as two,
    ):
        yield one, two


async def test_an_outlier_that_another_store_has_made_live_is_a_parent(dsn: str) -> None:
    """To say that parents are missing, nothing is written, so nobody would refuse it."""
    room = RoomBuilder("11", seed=1)
    admin = room.user(1)
    room.start(admin)
    beginning = list(room.pdus)
    parent, child = room.message(admin, "first"), room.message(admin, "second")
    async with two_stores(dsn) as (one, two):
        await one.append(beginning)
        [held] = await one.append([parent.pdu], origin="outlier")
        [live] = await two.append([parent.pdu])
        [last] = await one.append([child.pdu])
        assert [held.outcome, live.outcome, last.outcome] == ["stored"] * 3
        assert await two.forward_extremities(room.room_id) == {child.event_id}


async def test_an_outlier_that_another_store_has_made_live_is_a_duplicate(dsn: str) -> None:
    """Also where its parents are missing, and only the other store was told the state before it."""
    room = RoomBuilder("11", seed=1)
    admin = room.user(1)
    room.start(admin)
    beginning = list(room.pdus)
    state = list(room.state.values())
    room.message(admin, "lost")
    held = room.message(admin, "held")
    async with two_stores(dsn) as (one, two):
        await one.append(beginning)
        [first] = await one.append([held.pdu], origin="outlier")
        [live] = await two.append([held.pdu], state_before={held.event_id: state})
        [again] = await one.append([held.pdu])
        assert [first.outcome, live.outcome, again.outcome] == ["stored", "stored", "duplicate"]


class OldEnds:
    """An event arrives that is prev_event of the room's only extremity, which another store wrote.

    By its caches this store would leave the room without an extremity. Another event makes it
    query the event, which returns the gap but not the room. The parent of that other event is one
    of two kinds:

    * in another room: the first plan answers it, and the second looks it up, under the locks;
    * unknown: the first plan looks it up.
    """

    def __init__(self) -> None:
        self.room, self.other = RoomBuilder("11", seed=1), RoomBuilder("11", seed=2)
        self.admin = self.room.user(1)
        for room in (self.room, self.other):
            room.start(self.admin)
        self.beginnings = [list(room.pdus) for room in (self.room, self.other)]
        self.state = list(self.room.state.values())
        self.before = self.room.heads
        self.lost = self.room.message(self.admin, "lost")
        self.end = self.room.message(self.admin, "end", prev=[*self.before, self.lost])

    def strange(self, parent: str) -> bytes:
        return (
            self.room.at(*self.before)
            .message(self.admin, "strange", extra={"prev_events": [parent]})
            .pdu
        )

    async def begin(self, one: Store, two: Store) -> None:
        for beginning in self.beginnings:
            await one.append(beginning)
        [held] = await two.append([self.end.pdu], state_before={self.end.event_id: self.state})
        assert held.outcome == "stored"


@pytest.mark.parametrize("known", [True, False])
async def test_a_plan_that_goes_wrong_on_what_is_remembered_is_not_believed(
    dsn: str, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    caplog.set_level("DEBUG", RETRY)
    old = OldEnds()
    strange = old.strange(old.other.heads[0] if known else "$unknown")
    async with two_stores(dsn) as (one, two):
        await old.begin(one, two)
        results = await one.append([old.lost.pdu, strange])
        assert [result.outcome for result in results] == ["stored", "missing_parents"]
        assert await one.forward_extremities(old.room.room_id) == {old.end.event_id}
    assert [one.levelname for one in caplog.records if one.name == RETRY] == ["DEBUG"]
    assert "no forward extremity is left" in caplog.text


async def test_a_plan_that_goes_wrong_on_what_the_database_says_is_believed(dsn: str) -> None:
    """Here the table itself has the old ends.

    Only who appends to that room is told; what was to be written with it is.
    """
    old = OldEnds()
    async with two_stores(dsn) as (one, two):
        await old.begin(one, two)
        async with one.database.connection() as conn:
            await conn.execute(SQL_OLD_ENDS, old.before[0], old.room.room_id)
        said = old.other.message(old.admin, "said")
        answers: list[Any] = await asyncio.gather(
            one.append([old.lost.pdu, old.strange("$unknown")]),
            one.append([said.pdu]),
            return_exceptions=True,
        )
        broken, fine = answers
        assert isinstance(broken, StorageCorrupt)
        assert (broken.reason, broken.ids) == (
            "no forward extremity is left",
            {"room_id": old.room.room_id},
        )
        assert not isinstance(fine, BaseException)
        assert [result.outcome for result in fine] == ["stored"]
