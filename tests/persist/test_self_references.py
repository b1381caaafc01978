"""Events that name themselves, or each other: senders choose the ids of versions 1 and 2."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.persist import Origin
from storage.rebuild import rebuild
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.rooms import SERVER, findings
from tests.persist.test_malformed_graphs import altered, pairs

VERSIONS = ["1", "2"]
SQL_FLAGS = "SELECT ineffective, redacted_by FROM events WHERE event_id = $1"
SQL_WAITING = "SELECT count(*) FROM waiting_redactions"


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


def begun(version: str) -> RoomBuilder:
    room = RoomBuilder(version, seed=1, checked=False)
    room.start(room.user(1))
    return room


async def flags(store: Store, event: BuiltEvent) -> tuple[bool, object]:
    async with store.database.connection() as conn:
        row = await conn._driver.fetchrow(SQL_FLAGS, event.event_id)
        return row[0], row[1]


async def waiting(store: Store) -> int:
    async with store.database.connection() as conn:
        return int(await conn._driver.fetchval(SQL_WAITING))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("origin", ["live", "backfill", "outlier"])
async def test_a_redaction_of_itself_is_stored_without_effect(
    store: Store, version: str, origin: Origin
) -> None:
    """So are the others of its batch. As an outlier it takes its place later."""
    room = begun(version)
    first, side = len(room.events), room.at(room.events[-1])
    before, after = room.message(room.user(1), "before"), room.message(room.user(1), "after")
    redaction = side.redact(room.user(1), before)
    itself = altered(room, redaction, redacts=redaction.event_id, content={"reason": "mine"})
    await store.append(room.pdus[:first])
    results = await store.append([before.pdu, itself, after.pdu], origin=origin)
    assert [one.outcome for one in results] == ["stored"] * 3
    if origin == "outlier":
        assert (await store.append([itself]))[0].outcome == "stored"
    assert await flags(store, redaction) == (True, None)
    assert await waiting(store) == 0
    kept = await store.event(redaction.event_id)
    assert kept is not None
    assert kept.redacted_by is None
    assert kept.content == {"reason": "mine"}
    assert await findings(store) == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_refused_redaction_of_itself_is_readmitted(store: Store, version: str) -> None:
    room = begun(version)
    redaction = room.redact(room.user(1), room.events[-1])
    itself = altered(room, redaction, redacts=redaction.event_id)
    await store.append(room.pdus[:-1])
    [refused] = await store.append([itself], refused={redaction.event_id: "spam"})
    assert refused.outcome == "soft_failed"
    assert (await store.readmit(redaction.event_id)).outcome == "stored"
    assert await flags(store, redaction) == (True, None)
    assert await waiting(store) == 0
    assert await findings(store) == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_two_redactions_of_each_other_both_take_effect(store: Store, version: str) -> None:
    """The first waits for the second, which redacts it at once."""
    room = begun(version)
    first, second = (room.redact(room.user(1), room.events[-1]) for _ in range(2))
    await store.append(room.pdus[:-2])
    for one, other in ((first, second), (second, first)):
        changed = altered(room, one, redacts=other.event_id)
        assert (await store.append([changed]))[0].outcome == "stored"
    for one, other in ((first, second), (second, first)):
        assert (await store.events([one.event_id]))[one.event_id].redacted_by == other.event_id
        assert (await flags(store, one))[0] is False
    assert await waiting(store) == 0
    assert await findings(store) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("relation", ["m.replace", "m.thread", "m.annotation", "m.reference"])
async def test_an_event_that_relates_to_itself(store: Store, version: str, relation: str) -> None:
    """It is no relation of itself in any read, and a repair finds nothing to change."""
    room = begun(version)
    message = room.message(room.user(1), "mine")
    content = {
        "msgtype": "m.text",
        "body": "mine",
        "m.relates_to": {"rel_type": relation, "event_id": message.event_id, "key": "x"},
        "m.new_content": {"body": "new"},
    }
    later = room.message(room.user(1), "later")
    await store.append(room.pdus[:-2])
    pdus = [altered(room, message, content=content), later.pdu]
    assert [one.outcome for one in await store.append(pdus)] == ["stored"] * 2
    page = await store.messages(room.room_id, room.user(1))
    kept = await store.event(message.event_id)
    assert kept is not None
    events = await store.client_events(room.user(1), [kept, *page.chunk])
    assert "m.relations" not in (events[0] or {}).get("unsigned", {})
    found = await store.relations(message.event_id, room.user(1))
    assert found.chunk == []
    await store.threads(room.room_id, room.user(1))
    await store.unread(room.user(1), [room.room_id])
    await store.sync(room.user(1))
    assert await findings(store) == []
    await rebuild(store.database, room.room_id, server_name=SERVER)
    assert await findings(store) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("field", ["prev_events", "auth_events"])
async def test_an_event_that_is_its_own_parent_or_auth_event(
    store: Store, version: str, field: str
) -> None:
    """It is never complete, and the others of its batch are stored."""
    room = begun(version)
    first = len(room.events)
    before, bad = room.message(room.user(1)), room.at(room.events[-1]).topic(room.user(1), "x")
    given = [*getattr(bad, field), bad.event_id]
    after = room.message(room.user(1))
    await store.append(room.pdus[:first])
    pdus = [before.pdu, altered(room, bad, **{field: pairs(given)}), after.pdu]
    outcomes = [one.outcome for one in await store.append(pdus)]
    assert (outcomes[0], outcomes[2]) == ("stored", "stored")
    assert outcomes[1] in ("missing_parents", "invalid")
    assert await findings(store) == []
