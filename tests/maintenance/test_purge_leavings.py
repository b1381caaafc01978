"""The end of a purge, beside a writer that comes to need what nothing needed at the first look: it stays."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

import storage
from storage import AppendResult, Config, Store
from storage.maintenance.hold import hold_still
from storage.maintenance.purge import leavings
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.purging import ALICE, BOB, purge
from tests.maintenance.rooms import SERVER, findings


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER, config=Config(purge_pause_ms=0, follow_ms=3_600_000)) as opened:
        yield opened


class Looked:
    """The sweep of a purge, stopped where it has looked up who needs what, and has deleted nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns = 0
        self._reached, self._go = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(leavings, "hold_still", self._stopped)

    async def _stopped(self, conn: Any, room_id: str) -> int:
        self._turns += 1
        if self._turns == 2:  # the first is that of the look
            self._reached.set()
            await self._go.wait()
        return await hold_still(conn, room_id)

    async def beside(self, purging: Awaitable[Any], append: Awaitable[list[AppendResult]]) -> list[AppendResult]:
        """The answers to an append that is written meanwhile."""
        task = asyncio.ensure_future(purging)
        await self._reached.wait()
        answers = await append
        self._go.set()
        await task
        return answers


class Pantry:
    """A room whose topic was set twice before the point of the purge: nothing needs the first once its state groups are gone."""

    def __init__(self) -> None:
        self.room = RoomBuilder("11", sign=False)
        self.room.start(ALICE, name="The pantry")
        self.room.join(BOB)
        self.topic = self.room.topic(ALICE, "jam")
        self.parent = self.room.message(BOB, "which jam?")
        self.room.topic(ALICE, "plum jam")
        for number in range(20):
            self.room.message(BOB, f"message {number}")

    def late(self) -> BuiltEvent:
        """An event that stands on what has gone, under the first topic."""
        return self.room.at(self.parent.event_id).message(BOB, "no idea")

    def forged(self) -> BuiltEvent:
        """A rejected event that cites the first topic."""
        return self.room.topic(BOB, "mine", auth=[self.topic, *self.room.events[:2]], expected="rejected")


async def test_the_first_topic_is_a_leaving(store: Store) -> None:
    """What the others rest on: without a writer beside it, it goes."""
    pantry = Pantry()
    await store.append(pantry.room.pdus)
    await purge(store, pantry.room, 15, local=True)
    assert await store.event(pantry.topic.event_id) is None
    assert await findings(store) == []


async def test_what_a_new_state_group_names_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pantry = Pantry()
    await store.append(pantry.room.pdus)
    late = pantry.late()
    state = {late.event_id: sorted(late.state_before.values())}
    [answer] = await Looked(monkeypatch).beside(purge(store, pantry.room, 15, local=True), store.append([late.pdu], state_before=state))
    assert answer.outcome == "stored"
    assert (await store.state_before(late.event_id))["m.room.topic", ""] == pantry.topic.event_id
    assert await store.event(pantry.topic.event_id) is not None
    assert await findings(store) == []


@pytest.mark.parametrize("origin", ["live", "outlier"])
async def test_what_a_new_event_cites_stays(store: Store, monkeypatch: pytest.MonkeyPatch, origin: Any) -> None:
    pantry = Pantry()
    await store.append(pantry.room.pdus)
    forged = pantry.forged()
    [answer] = await Looked(monkeypatch).beside(purge(store, pantry.room, 15, local=True), store.append([forged.pdu], origin=origin))
    assert answer.outcome == "rejected"
    held = await store.event(forged.event_id)
    assert held is not None
    assert held.outlier is (origin == "outlier")
    assert await store.event(pantry.topic.event_id) is not None
    assert await findings(store) == []
