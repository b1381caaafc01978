"""The end of a purge, while a writer begins to need rows that nothing needed before: they stay."""

from typing import Any

import pytest

from storage import Config, Store
from storage.maintenance.purge import run, sweep
from storage.streams.position_poller import follow_once
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.purging import ALICE, BOB, Stop, purge
from tests.maintenance.rooms import findings


@pytest.fixture
def config() -> Config:
    return Config(purge_pause_ms=0, follow_ms=3_600_000)


def looked(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Stop the sweep of a purge after its query for needed rows, before it deletes any.

    The first turn is that of the query.
    """
    return Stop(monkeypatch, sweep, "lock_room_keeping_plans", turn=2)


class Pantry:
    """A room whose topic was set twice before the purge point.

    Nothing needs the first topic once its state groups are gone.
    """

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
        return self.room.topic(
            BOB, "mine", auth=[self.topic, *self.room.events[:2]], expected="rejected"
        )


async def test_the_first_topic_is_a_leaving(store: Store) -> None:
    """What the others rest on: without a writer beside it, it goes."""
    pantry = Pantry()
    await store.append(pantry.room.pdus)
    await purge(store, pantry.room, 15, local=True)
    assert await store.event(pantry.topic.event_id) is None
    assert await findings(store) == []


async def test_what_has_gone_is_forgotten_and_nothing_else(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set of events that an event reaches is slow to query.

    A writer drops it for events that a sweep deleted, and keeps it for all others.
    """
    pantry = Pantry()
    room, caches = pantry.room, store.writer.caches
    room.at(room.events[-1].event_id).topic(ALICE, "figs")
    room.at(room.events[-2].event_id).topic(ALICE, "dates")
    room.message(BOB, "both?")
    await store.append(room.pdus)
    row = caches.rows.row(pantry.topic.event_id)
    assert row is not None
    topic = row.event_nid
    caches.closures[topic] = caches.closures[min(caches.closures)]
    known = set(caches.closures)
    async with Stop(monkeypatch, run, "remove_unused_visibility").during(
        purge(store, room, len(room.events) - 1, local=True)
    ):
        await follow_once(store.database, store.streams)
        await store.append([room.message(BOB, "hello").pdu])
        assert known - caches.closures.keys() == {topic}
        assert topic not in caches.places


async def test_what_a_new_state_group_names_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pantry = Pantry()
    await store.append(pantry.room.pdus)
    late = pantry.late()
    state = {late.event_id: sorted(late.state_before.values())}
    async with looked(monkeypatch).during(purge(store, pantry.room, 15, local=True)):
        [answer] = await store.append([late.pdu], state_before=state)
    assert answer.outcome == "stored"
    assert (await store.state_before(late.event_id))["m.room.topic", ""] == pantry.topic.event_id
    assert await store.event(pantry.topic.event_id) is not None
    assert await findings(store) == []


@pytest.mark.parametrize("origin", ["live", "backfill", "outlier"])
async def test_what_a_new_event_cites_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch, origin: Any
) -> None:
    pantry = Pantry()
    await store.append(pantry.room.pdus)
    forged = pantry.forged()
    async with looked(monkeypatch).during(purge(store, pantry.room, 15, local=True)):
        [answer] = await store.append([forged.pdu], origin=origin)
    assert answer.outcome == "rejected"
    held = await store.event(forged.event_id)
    assert held is not None
    assert held.outlier is (origin == "outlier")
    assert await store.event(pantry.topic.event_id) is not None
    assert await findings(store) == []
