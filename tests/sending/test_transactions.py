"""Transactions: a request that a client repeats makes one event."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import storage
from storage import Store
from storage.errors import InputError
from storage.ids import EventId, RoomId
from storage.maintenance.expiry import delete_old_transactions
from storage.maintenance.purge.run import purge_history, purge_room
from storage.rebuild import rebuild
from tests.maintenance.rooms import findings
from tests.persist.tables import row_counts
from tests.sending.stores import ALICE, BOB, PUBLIC, SERVER, joined, opened, say

pytestmark = pytest.mark.every_postgres

FIRST = ("DEVICE", "m1")


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with opened(dsn) as store:
        yield store


@pytest.fixture
async def room_id(store: Store) -> RoomId:
    return await store.create_room(ALICE, initial_state=[PUBLIC])


async def stored(store: Store) -> list[tuple[str, str, str]]:
    async with store.database.connection() as conn:
        return [
            tuple(row)
            for row in await conn._driver.fetch(
                "SELECT device_id, transaction_id, event_id FROM local_transactions ORDER BY 1, 2"
            )
        ]


async def messages(store: Store, room_id: RoomId) -> int:
    page = await store.messages(room_id, ALICE, limit=1_000)
    return sum(event.type == "m.room.message" for event in page.chunk)


@pytest.mark.parametrize("kind", ["m.room.message", "m.room.topic"])
async def test_a_repeated_request_returns_the_first_event(
    store: Store, room_id: RoomId, kind: str
) -> None:
    """A message and a state event are written by different statements."""
    key = "" if kind == "m.room.topic" else None
    sent = [
        await store.send(room_id, ALICE, kind, {"topic": str(n)}, state_key=key, transaction=FIRST)
        for n in range(3)
    ]
    assert [one.outcome for one in sent] == ["stored", "duplicate", "duplicate"]
    assert {one.event_id for one in sent} == {sent[0].event_id}
    assert {one.stream_ordering for one in sent} == {sent[0].stream_ordering}
    assert sent[0].topological_ordering == sent[2].topological_ordering
    store.writer.caches.rows.pop(sent[0].event_id)
    again = await store.send(room_id, ALICE, kind, {}, state_key=key, transaction=FIRST)
    assert again == sent[1]
    assert await stored(store) == [(*FIRST, sent[0].event_id)]


async def test_other_requests_make_other_events(store: Store, room_id: RoomId) -> None:
    await joined(store, room_id, BOB)
    other = await store.create_room(ALICE)
    sent = [
        await say(store, room_id, FIRST),
        await say(store, room_id, ("DEVICE", "m2")),
        await say(store, room_id, ("OTHER", "m1")),
        await say(store, room_id, FIRST, sender=BOB),
        await say(store, other, FIRST),
        await say(store, room_id),
        await say(store, room_id),
    ]
    assert [one.outcome for one in sent] == ["stored"] * 7
    assert len(await stored(store)) == 5


async def of_each_path(store: Store, room_id: RoomId, target: EventId, other: EventId) -> Any:
    """The results of requests with different paths and one transaction id."""
    paths: list[dict[str, Any]] = [
        {"type": "m.room.message"},
        {"type": "m.reaction"},
        {"type": "m.room.redaction", "redacts": target},
        {"type": "m.room.redaction", "redacts": other},
        {"type": "org.state", "state_key": ""},
        {"type": "org.state", "state_key": "a"},
        {"type": "org.state"},
    ]
    return [
        await store.send(room_id, ALICE, content={}, transaction=FIRST, **path) for path in paths
    ]


async def test_a_request_with_another_path_is_another_request(
    store: Store, room_id: RoomId, dsn: str
) -> None:
    targets = [(await say(store, room_id)).event_id for _ in range(2)]
    first = await of_each_path(store, room_id, *targets)
    assert [one.outcome for one in first] == ["stored"] * 7
    assert len({one.event_id for one in first}) == 7
    assert [event.redacted_by for event in (await store.events(targets)).values()] == [
        first[2].event_id,
        first[3].event_id,
    ]
    store.writer.caches.transactions.clear()
    async with opened(dsn, "second") as second:
        for other in (store, second):  # one knows the device, and one looks the requests up
            again = await of_each_path(other, room_id, *targets)
            assert again == [one._replace(outcome="duplicate") for one in first]
    odd = await say(store, room_id, ("DEVICE", "\x1fm1"))
    for result, chosen in ((odd, "\x1fm1"), *((one, "m1") for one in first)):
        [event] = (await store.events([result.event_id])).values()
        [shown] = await store.client_events(ALICE, [event], device_id="DEVICE")
        assert shown["unsigned"]["transaction_id"] == chosen
    assert await findings(store) == []


async def test_concurrent_requests_with_different_paths(dsn: str) -> None:
    async with opened(dsn) as one, opened(dsn, "second") as two:
        room_id = await one.create_room(ALICE)
        for repetition in range(3):
            sent = await asyncio.gather(
                *(
                    store.send(room_id, ALICE, kind, {}, transaction=("DEVICE", str(repetition)))
                    for kind in ("m.room.message", "m.reaction", "org.other")
                    for store in (one, two)
                )
            )
            assert sorted(result.outcome for result in sent) == ["duplicate"] * 3 + ["stored"] * 3
            assert all(sent[at].event_id == sent[at + 1].event_id for at in (0, 2, 4))


async def test_requests_that_an_earlier_release_stored(store: Store, room_id: RoomId) -> None:
    """It stored ids without paths, also of redactions."""
    said = (await say(store, room_id)).event_id
    requests: list[dict[str, Any]] = [
        {"type": "m.room.redaction", "content": {}, "redacts": said, "transaction": FIRST},
        {"type": "m.reaction", "content": {}, "transaction": ("DEVICE", "m2")},
    ]
    first = [await store.send(room_id, ALICE, **one) for one in requests]
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE local_transactions SET transaction_id = right(transaction_id, 2)"
        )
    assert [row[1] for row in await stored(store)] == ["m1", "m2"]
    for forgets in (("transactions", "devices"), ("transactions",)):
        for name in forgets:
            getattr(store.writer.caches, name).clear()
        again = [await store.send(room_id, ALICE, **one) for one in requests]
        assert again == [one._replace(outcome="duplicate") for one in first]
    assert (await say(store, room_id, FIRST)).outcome == "stored"
    assert (await say(store, room_id, FIRST)).outcome == "duplicate"


async def test_a_repeated_request_after_a_restart(dsn: str) -> None:
    async with opened(dsn) as store:
        room_id = await store.create_room(ALICE)
        first = await say(store, room_id, FIRST)
    async with opened(dsn) as store:
        before = await row_counts(store.database)
        again = await say(store, room_id, FIRST, other="content")
        assert (again.outcome, again.event_id) == ("duplicate", first.event_id)
        assert again.stream_ordering == first.stream_ordering
        assert await row_counts(store.database) == before


async def test_a_user_who_has_left_gets_the_first_event(store: Store, room_id: RoomId) -> None:
    await joined(store, room_id, BOB)
    first = await say(store, room_id, FIRST, sender=BOB)
    await store.send(room_id, BOB, "m.room.member", {"membership": "leave"}, state_key=BOB)
    again = await say(store, room_id, FIRST, sender=BOB)
    assert (again.outcome, again.event_id) == ("duplicate", first.event_id)


async def test_concurrent_requests_of_one_store_make_one_event(
    store: Store, room_id: RoomId
) -> None:
    sent = await asyncio.gather(*(say(store, room_id, FIRST) for _ in range(20)))
    assert sorted(one.outcome for one in sent) == ["duplicate"] * 19 + ["stored"]
    assert len({one.event_id for one in sent}) == 1
    assert None not in {one.stream_ordering for one in sent}
    assert await messages(store, room_id) == 1


async def test_concurrent_requests_of_two_stores_make_one_event_each(dsn: str) -> None:
    """Both look up each request before the other has stored it."""
    async with opened(dsn) as one, opened(dsn, "second") as two:
        room_id = await one.create_room(ALICE)
        for repetition in range(5):
            keys = [("DEVICE", f"{repetition}.{n}") for n in range(8)]
            sent = await asyncio.gather(
                *(say(store, room_id, key) for key in keys for store in (one, two))
            )
            assert sorted(result.outcome for result in sent) == ["duplicate"] * 8 + ["stored"] * 8
            assert all(sent[at].event_id == sent[at + 1].event_id for at in range(0, 16, 2))
        assert await messages(one, room_id) == 40
        assert len(await one.forward_extremities(room_id)) == 1


async def test_a_request_that_is_stored_after_its_look_up_is_refused_by_its_key(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of the second store begins after the write of the first one, so it is not stale."""
    async with opened(dsn) as one, opened(dsn, "second") as two:
        room_id = await one.create_room(ALICE)
        first = await say(one, room_id, FIRST)
        await say(one, room_id)
        with monkeypatch.context() as patch:
            patch.setattr("storage.persist.send._repeated", _nothing)
            again = await say(two, room_id, FIRST)
        assert again == first._replace(outcome="duplicate")
        assert await messages(two, room_id) == 2


async def _nothing(*_: object) -> None:
    return None


async def test_a_cancelled_request_is_not_sent_twice(store: Store, room_id: RoomId) -> None:
    """The write goes on without its caller."""
    first = asyncio.create_task(say(store, room_id, FIRST))
    while not store.writer.in_hand:  # noqa: ASYNC110  # the queue has no signal
        await asyncio.sleep(0)
    first.cancel()
    again = await say(store, room_id, FIRST)
    await asyncio.gather(first, return_exceptions=True)
    assert again.outcome == "duplicate"
    assert await messages(store, room_id) == 1


async def test_a_refused_request_can_be_repeated(store: Store) -> None:
    room_id = await store.create_room(ALICE)
    with pytest.raises(storage.AuthDenied):
        await say(store, room_id, FIRST, sender=BOB)
    assert await stored(store) == []
    await store.send(room_id, ALICE, "m.room.member", {"membership": "invite"}, state_key=BOB)
    await joined(store, room_id, BOB)
    assert (await say(store, room_id, FIRST, sender=BOB)).outcome == "stored"


async def test_a_redacted_event_still_answers(store: Store, room_id: RoomId) -> None:
    first = await say(store, room_id, FIRST)
    await store.send(room_id, ALICE, "m.room.redaction", {}, redacts=first.event_id)
    again = await say(store, room_id, FIRST)
    assert (again.outcome, again.event_id) == ("duplicate", first.event_id)


async def test_the_first_request_of_a_device_costs_one_statement_more(dsn: str) -> None:
    quiet = storage.Config(follow_ms=3_600_000)  # no statements but those of the calls
    async with opened(dsn, config=quiet) as store:
        room_id = await store.create_room(ALICE)
        for number in range(3):
            await say(store, room_id, ("ANOTHER", str(number)))
        costs = [
            await statements(store, room_id, transaction)
            for transaction in (None, FIRST, ("DEVICE", "m2"), FIRST)
        ]
    async with opened(dsn, config=quiet) as store:
        costs.append(await statements(store, room_id, FIRST))
    assert costs == [1, 2, 1, 0, 1]


async def statements(store: Store, room_id: RoomId, transaction: Any) -> int:
    before = store.measures.statements
    await say(store, room_id, transaction)
    return store.measures.statements - before


@pytest.mark.parametrize(
    "transaction",
    [
        "DEVICE",
        (),
        ("DEVICE",),
        ("DEVICE", "m1", "more"),
        {"DEVICE": "m1"},
        ("DEVICE", 1),
        (None, "m1"),
        ("", "m1"),
        ("DEVICE", ""),
        ("DEVICE", "m\0"),
        ("DEVICE", "\ud800"),
        ("DEVICE", "x" * 256),
        ("é" * 128, "m1"),
    ],
)
async def test_a_malformed_transaction_is_refused(
    store: Store, room_id: RoomId, transaction: Any
) -> None:
    with pytest.raises(InputError):
        await say(store, room_id, transaction)
    assert await messages(store, room_id) == 0


async def test_the_longest_ids_are_stored(store: Store, room_id: RoomId) -> None:
    longest = ("ü" * 127 + "x", "\\\"'{},\t" * 36)
    assert (await say(store, room_id, longest)).outcome == "stored"
    assert (await stored(store))[0][:2] == longest
    assert (await say(store, room_id, longest)).outcome == "duplicate"


async def test_a_purged_event_still_answers_until_its_room_is_purged(
    store: Store, room_id: RoomId, dsn: str
) -> None:
    first = await say(store, room_id, FIRST)
    last = [await say(store, room_id) for _ in range(3)][-1]
    await purge_history(
        store.database, room_id, before_event_id=last.event_id, server_name=SERVER, local=True
    )
    assert await store.event(first.event_id) is None
    async with opened(dsn, "second") as other:
        again = await say(other, room_id, FIRST)
        assert (again.outcome, again.event_id) == ("duplicate", first.event_id)
        assert (again.stream_ordering, again.topological_ordering) == (None, None)
    assert await findings(store) == []
    await purge_room(store.database, room_id, server_name=SERVER, force=True)
    assert await stored(store) == []


async def test_other_paths_of_a_purged_event(store: Store, room_id: RoomId, dsn: str) -> None:
    """A purged event has no type any more: the row with the path of the request is certain."""
    first = await say(store, room_id, FIRST)
    reaction: dict[str, Any] = {"type": "m.reaction", "content": {}, "transaction": FIRST}
    second = await store.send(room_id, ALICE, **reaction)
    last = [await say(store, room_id) for _ in range(3)][-1]
    await purge_history(
        store.database, room_id, before_event_id=last.event_id, server_name=SERVER, local=True
    )
    async with opened(dsn, "second") as other:
        sent = await other.send(
            room_id, ALICE, "m.room.redaction", {}, redacts=last.event_id, transaction=FIRST
        )
        assert sent.outcome == "stored"
        for _ in range(2):
            assert (await other.send(room_id, ALICE, **reaction)).event_id == second.event_id
            assert (await say(other, room_id, FIRST)).event_id == first.event_id
            other.writer.caches.devices.clear()
            other.writer.caches.transactions.clear()


async def test_old_transactions_are_deleted(store: Store, room_id: RoomId) -> None:
    for number in range(7):
        await say(store, room_id, ("DEVICE", str(number)))
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE local_transactions SET sent_ts = sent_ts - $1::bigint"
            " WHERE transaction_id < '5'",
            store.database.config.transaction_keep_ms + 1,
        )
    assert await delete_old_transactions(store.database, batch=2) == 5
    assert [row[1] for row in await stored(store)] == ["5", "6"]
    assert await delete_old_transactions(store.database, batch=2) == 0


async def test_a_mistaken_transaction_is_found_and_deleted(store: Store, room_id: RoomId) -> None:
    for number in range(3):
        await say(store, room_id, ("DEVICE", str(number)))
    assert await findings(store) == []
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE local_transactions SET event_id = '$other' WHERE transaction_id = '1'"
        )
    [found] = await findings(store)
    assert (found.check, found.subject) == ("local_transactions", ("$other",))
    assert found.repairable
    await rebuild(store.database, room_id, server_name=SERVER)
    assert await findings(store) == []
    assert [row[1] for row in await stored(store)] == ["0", "2"]
