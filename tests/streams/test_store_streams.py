"""Streams of a real store: facts, positions, writers that come, idle and vanish, wake-ups.

Also small stores.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

import storage
from storage import Store, UnknownRoom
from storage.database.explained import ExplainingConnection
from storage.streams import SyncToken, VectorPosition, account_data, to_device
from storage.streams.feed import Advance
from storage.streams.position_poller import follow_once
from storage.testing import RoomBuilder

QUIET = storage.Config(follow_ms=3_600_000)  # following is done by hand in these tests


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as opened:
        yield opened


@pytest.fixture
async def second(dsn: str, store: Store) -> AsyncIterator[Store]:
    async with storage.open(
        dsn, server_name="s1.test", instance_name="second", config=QUIET
    ) as opened:
        yield opened


def room_of(users: int = 2, seed: int = 1) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed)
    room.start(room.user(1))
    for number in range(2, users + 1):
        room.join(room.user(number))
    return room


async def test_every_event_is_a_fact_of_its_writer(store: Store) -> None:
    room = room_of()
    told: list[Advance] = []
    store.streams.feed.subscribe(told.append)
    results = await store.append(room.pdus)
    events = store.streams["events"]
    facts = await events.rows(0, events.linear(), 100)
    assert [fact.stream_id for fact in facts] == [result.stream_ordering for result in results]
    assert [fact.row for fact in facts] == [
        [one.event_id, room.room_id, one.json["type"], one.json["state_key"], None]
        for one in room.events
    ]
    assert {fact.instance_name for fact in facts} == {"main"}
    assert [fact for advance in told for fact in advance.rows] == facts
    assert events.linear() == facts[-1].stream_id


async def test_rows_come_in_pages(store: Store) -> None:
    await store.append(room_of(5).pdus)
    events = store.streams["events"]
    everything = await events.rows(0, events.linear(), 100)
    paged = []
    at = 0
    while page := await events.rows(at, events.linear(), 3):
        paged += page
        at = page[-1].stream_id
    assert paged == everything


async def test_another_process_follows_through_the_database(store: Store, second: Store) -> None:
    told: list[Advance] = []
    second.streams.feed.subscribe(told.append)
    await store.append(room_of().pdus)
    await follow_once(second.database, second.streams)
    facts = [fact for advance in told if advance.stream_name == "events" for fact in advance.rows]
    assert facts == await store.streams["events"].rows(0, 1_000_000, 100)
    assert second.streams["events"].positions()["main"] == facts[-1].stream_id
    assert not any(advance.local for advance in told if advance.rows)


async def test_an_idle_writer_holds_nobody_back(store: Store, second: Store) -> None:
    await store.append(room_of().pdus)
    last = store.streams["events"].positions()["main"]
    assert store.streams["events"].linear() < last, "the write made the second writer known"
    await follow_once(second.database, second.streams)
    await follow_once(store.database, store.streams)
    assert store.streams["events"].linear() >= last


async def test_nine_idle_writers_hold_a_busy_one_back_for_one_look_at_the_table(dsn: str) -> None:
    """Each polls every `follow_ms`, 250 ms: the linear position follows within two polls."""
    assert storage.Config().follow_ms <= 250
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(
                storage.open(dsn, server_name="s1.test", instance_name=f"w{number}", config=QUIET)
            )
            for number in range(10)
        ]
        busy, room = stores[0], room_of()
        await busy.append(room.pdus)
        for number in range(3):
            await busy.append([room.message(room.user(1), str(number)).pdu])
            last = busy.streams["events"].positions()["w0"]
            for store in stores:  # in this order the busy one looks before the others have moved
                await follow_once(store.database, store.streams)
            await follow_once(busy.database, busy.streams)
            assert busy.streams["events"].linear() == last
            assert busy.streams["events"].current() == VectorPosition(last)


async def test_the_linear_position_follows_a_busy_writer(dsn: str) -> None:
    """Ten processes with default settings and no replication.

    Both the busy one and an idle one are checked.
    """
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(
                storage.open(dsn, server_name="s1.test", instance_name=f"w{number}")
            )
            for number in range(10)
        ]
        busy, room = stores[0], room_of()
        await busy.append(room.pdus)
        for number in range(5):
            await _follow(busy, stores[-1], room.message(room.user(1), str(number)).pdu)


async def _follow(busy: Store, idle: Store, pdu: bytes) -> None:
    """Append, and wait until both know that nothing below this event can come any more."""
    [result] = await busy.append([pdu])
    while min(store.streams["events"].linear() for store in (busy, idle)) < (
        result.stream_ordering or 0
    ):
        moved = asyncio.Event()
        ends = [
            store.streams.feed.subscribe(lambda _, moved=moved: moved.set())  # type: ignore[misc]
            for store in (busy, idle)
        ]
        await moved.wait()
        for end in ends:
            end()


async def test_a_writer_in_the_middle_of_a_write_is_not_moved(store: Store, second: Store) -> None:
    with second.streams.writing("events"):
        await store.append(room_of().pdus)
        await follow_once(second.database, second.streams)
        await follow_once(store.database, store.streams)
        assert store.streams["events"].linear() < store.streams["events"].positions()["main"]
    await follow_once(second.database, second.streams)
    await follow_once(store.database, store.streams)
    assert store.streams["events"].linear() >= store.streams["events"].positions()["main"]


async def test_a_writer_that_is_gone_holds_nobody_back(dsn: str, store: Store) -> None:
    async with storage.open(dsn, server_name="s1.test", instance_name="gone", config=QUIET) as gone:
        await gone.append(room_of(seed=3).pdus)
    await store.append(room_of().pdus)
    while store.streams["events"].linear() < store.streams["events"].positions()["main"]:
        await follow_once(
            store.database, store.streams
        )  # until Postgres has ended the sessions of the one that is gone


async def test_positions_survive_a_restart(dsn: str) -> None:
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as before:
        await before.append(room_of().pdus)
        last = before.streams["events"].positions()["main"]
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as after:
        assert after.streams["events"].positions()["main"] >= last


async def test_a_sequence_behind_its_table_is_set_forward(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    room = room_of()
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as before:
        await before.append(room.pdus)
        async with before.database.connection() as conn:
            for sequence in ("events_stream", "event_nids", "state_group_nids"):
                await conn.execute(f"SELECT setval('{sequence}', 1, false)")
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as after:
        room.message(room.user(1), "after")
        [result] = await after.append(room.pdus[-1:])
        assert result.outcome == "stored"
    assert caplog.text.count("set forward") == 3


async def test_a_sequence_whose_facts_are_gone_is_set_forward_too(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The device has received its message, so the table is empty.

    Readers are past it all the same, and would never see a smaller id.
    """
    reader = storage.UserId("@user1:s1.test")
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as before:
        last = await before.to_device.send({reader: {"device": {"n": 1}}})
        await before.to_device.delete(reader, "device", last)
        since = (await before.sync(reader)).next_batch
        async with before.database.connection() as conn:
            await conn.execute("SELECT setval('to_device_stream', 1, false)")
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as after:
        assert await after.to_device.send({reader: {"device": {"n": 2}}}) > last
        assert after.positions_of(since)["to_device"].min == last
    assert caplog.text.count("set forward") == 1


async def test_account_data(store: Store) -> None:
    room = room_of()
    await store.append(room.pdus)
    user = storage.UserId("@user1:s1.test")
    first = await store.account_data.set(user, "m.direct", {"a": 1})
    second = await store.account_data.set(user, "m.direct", {"a": 2})
    third = await store.account_data.set(user, "m.tag", {"tags": {}}, room_id=room.room_id)
    assert first < second < third
    assert await store.account_data.get(user) == {"m.direct": {"a": 2}}
    assert await store.account_data.get(user, room_id=room.room_id) == {"m.tag": {"tags": {}}}
    facts = await store.streams["account_data"].rows(0, third, 10)
    assert [fact.row for fact in facts] == [[user, None, "m.direct"], [user, room.room_id, "m.tag"]]
    assert store.streams["account_data"].linear() == third
    with pytest.raises(UnknownRoom):
        await store.account_data.set(user, "m.tag", {}, room_id=storage.RoomId("!nowhere:s1.test"))


async def test_account_data_of_a_room_is_read_alone(store: Store) -> None:
    """Whatever the user has in other rooms, and whatever Postgres estimates."""
    room = room_of()
    await store.append(room.pdus)
    user = storage.UserId("@user1:s1.test")
    await store.account_data.set(user, "m.direct", {})
    await store.account_data.set(user, "m.tag", {}, room_id=room.room_id)
    async with store.database.transaction() as conn:
        await conn.execute(
            """
            INSERT INTO account_data
            SELECT made.*
            FROM account_data d
            CROSS JOIN generate_series(1, 1000) AS n
            CROSS JOIN LATERAL jsonb_populate_record(d, jsonb_build_object(
                'room_nid', d.room_nid + n, 'stream_id', d.stream_id + n * 10)) AS made
            WHERE d.room_nid > 0
            """
        )
        await conn.execute("ANALYZE account_data")
        explaining = ExplainingConnection.over(conn, generic=True)
        for place in (room.room_id, None):
            row = account_data.OwnContentRow
            found = await explaining.fetch(account_data.SQL_OF_SCOPE, user, place, row=row)
            assert [one.type for one in found] == ["m.direct" if place is None else "m.tag"]
            assert explaining.plans[-1].rows_of_tables()["account_data"] == 1


async def test_to_device(store: Store) -> None:
    one, other = storage.UserId("@user1:s1.test"), storage.UserId("@user4:s1.test")
    await store.to_device.send({one: {"A": {"n": 1}, "B": {"n": 2}}, other: {"C": {"n": 3}}})
    last = await store.to_device.send({one: {"A": {"n": 4}}})
    inbox = await store.to_device.inbox(one, "A")
    assert [row.content for row in inbox] == [b'{"n":1}', b'{"n":4}']
    assert inbox[-1].stream_id == last == store.streams["to_device"].linear()
    assert await store.to_device.delete(one, "A", inbox[0].stream_id) == 1
    assert len(await store.to_device.inbox(one, "A")) == 1
    assert len(await store.to_device.inbox(other, "C")) == 1
    assert await store.to_device.send({}) == 0


async def test_what_a_token_covers_is_all_in_the_inbox_and_nothing_else_is_deleted(
    store: Store,
) -> None:
    """More than any page: what is deleted once the client has the token is what it was given."""
    user = storage.UserId("@user1:s1.test")
    for number in range(150):
        await store.to_device.send({user: {"A": {"n": number}}})
    token = (await store.sync(user)).next_batch
    await store.to_device.send({user: {"A": {"n": 150}}})
    covered = store.positions_of(token)["to_device"]
    for upto in (covered.furthest(), covered):
        inbox = await store.to_device.inbox(user, "A", upto=upto)
        assert [json.loads(message.content)["n"] for message in inbox] == list(range(150))
    assert await store.to_device.delete(user, "A", covered) == 150
    [left] = await store.to_device.inbox(user, "A")
    assert json.loads(left.content) == {"n": 150}


async def test_a_page_of_an_inbox_is_deleted_by_its_last_message(store: Store) -> None:
    user = storage.UserId("@user1:s1.test")
    await store.to_device.send({user: {"A": {"n": 0}, "B": {"n": 0}}})
    for number in range(1, 7):
        await store.to_device.send({user: {"A": {"n": number}}})
    found = []
    while page := await store.to_device.inbox(user, "A", limit=3):
        found += [json.loads(message.content)["n"] for message in page]
        assert await store.to_device.delete(user, "A", page[-1].stream_id) == len(page)
    assert found == list(range(7))


async def test_messages_of_a_writer_that_is_behind_are_not_deleted(
    store: Store, second: Store
) -> None:
    """A token covers facts of a writer that is ahead.

    It excludes those for which another writer has taken a smaller id.
    """
    user = storage.UserId("@user1:s1.test")
    first = await store.to_device.send({user: {"A": {"n": 1}}})
    unread = await store.to_device.send({user: {"A": {"n": 2}}})
    ahead = await second.to_device.send({user: {"A": {"n": 3}}})
    covered = VectorPosition.of(first, {"second": ahead})
    given = await store.to_device.inbox(user, "A", upto=covered)
    assert [message.stream_id for message in given] == [first, ahead]
    assert [
        message.stream_id for message in await store.to_device.inbox(user, "A", after=covered)
    ] == [unread]
    assert await store.to_device.delete(user, "A", covered) == 2
    assert [message.stream_id for message in await second.to_device.inbox(user, "A")] == [unread]


SQL_MANY_MESSAGES = """
INSERT INTO to_device (stream_id, principal_nid, writer_nid, device_id, content)
SELECT 1000 + n, d.principal_nid, d.writer_nid, CASE WHEN n % 2 = 0 THEN 'other'
    ELSE d.device_id END, d.content
FROM to_device d
CROSS JOIN generate_series(1, 20000) AS n
"""


async def test_an_inbox_is_read_by_index(store: Store) -> None:
    """Neither other devices nor what lies outside of the positions is looked at."""
    user = storage.UserId("@user1:s1.test")
    await store.to_device.send({user: {"A": {"n": 1}}})
    async with store.database.transaction() as conn:
        await conn.execute(SQL_MANY_MESSAGES)
        await conn.execute("ANALYZE to_device")
        explaining = ExplainingConnection.over(conn, generic=True)
        rows = await explaining.fetch(
            to_device.SQL_INBOX,
            user,
            "A",
            10_000,
            [],
            [],
            10_500,
            ["main"],
            [10_600],
            10_600,
            100,
            row=to_device.MessageRow,
        )
        assert [row.stream_id for row in rows] == list(range(10_001, 10_200, 2))
        assert explaining.plans[-1].rows_of_tables()["to_device"] <= 101
        await explaining.fetchval(
            to_device.SQL_DELETE, user, "A", 1_010, ["other"], [2_000], 1_010
        )  # explained first: so it is done twice
        assert explaining.plans[-1].rows_of_tables()["to_device"] <= 12
    assert (await store.to_device.inbox(user, "A", limit=1))[0].stream_id == 1_011


async def test_receipts(store: Store) -> None:
    room = room_of()
    await store.append(room.pdus)
    user, event = storage.UserId("@user1:s1.test"), room.events[-1].event_id
    await store.receipts.set(room.room_id, "m.read", user, room.events[0].event_id, {"ts": 1})
    last = await store.receipts.set(room.room_id, "m.read", user, event, {"ts": 2})
    await store.receipts.set(room.room_id, "m.read", user, event, {"ts": 3}, thread_id="main")
    rows = await store.receipts.of_room(room.room_id)
    assert [(row.thread_id, row.event_id, row.data) for row in rows] == [
        (None, event, b'{"ts":2}'),
        ("main", event, b'{"ts":3}'),
    ]
    assert len(await store.receipts.of_room(room.room_id, after=last)) == 1
    with pytest.raises(UnknownRoom):
        await store.receipts.set(storage.RoomId("!nowhere:s1.test"), "m.read", user, event, {})


async def test_a_receipt_that_changes_nothing_leaves_nothing_in_flight(store: Store) -> None:
    room = room_of()
    await store.append(room.pdus)
    user, (first, *_, last) = storage.UserId("@user1:s1.test"), room.events
    at = await store.receipts.set(room.room_id, "m.read", user, last.event_id, {})
    for _ in range(3):
        assert await store.receipts.set(room.room_id, "m.read", user, first.event_id, {}) == at
        assert not store.streams.unsettled
        assert not store.streams.is_writing("receipts")
    assert store.streams["receipts"].linear() == at
    assert await store.receipts.set(room.room_id, "m.read", user, last.event_id, {"ts": 2}) > at


async def test_private_receipts_are_for_their_user_alone(store: Store) -> None:
    room = room_of()
    await store.append(room.pdus)
    user, event = storage.UserId("@user1:s1.test"), room.events[-1].event_id
    now = SyncToken.of({"receipts": store.streams["receipts"].current()})
    await store.receipts.set(room.room_id, "m.read.private", user, event, {})
    assert await store.receipts.of_room(room.room_id) == []
    other = storage.UserId("@user2:s1.test")
    assert await store.receipts.of_room(room.room_id, user_id=other) == []
    [own] = await store.receipts.of_room(room.room_id, user_id=user)
    assert own.receipt_type == "m.read.private"
    assert await store.notifier.wait([user], after=now, timeout_ms=1)
    assert not await store.notifier.wait([room.room_id], after=now, timeout_ms=1)
    [fact] = await store.streams["receipts"].rows(0, own.stream_id, 10)
    assert fact.row[1] == "m.read.private"  # for the other processes


async def test_a_cancelled_write_is_told_all_the_same(store: Store) -> None:
    told: list[Advance] = []
    store.streams.feed.subscribe(told.append)
    heard = asyncio.Event()
    store.streams.feed.subscribe(lambda _: heard.set())
    task = asyncio.create_task(
        store.account_data.set(storage.UserId("@user1:s1.test"), "m.direct", {})
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await heard.wait()
    assert [fact.row for advance in told for fact in advance.rows] == [
        ["@user1:s1.test", None, "m.direct"]
    ]


async def test_waiting_for_news(store: Store) -> None:
    room, other = room_of(), room_of(seed=9)
    await store.append([*room.pdus, *other.pdus])
    now = SyncToken.of({"events": store.streams["events"].current()})
    waiting = asyncio.create_task(store.notifier.wait([room.room_id], after=now, timeout_ms=60_000))
    elsewhere = asyncio.create_task(
        store.notifier.wait(["!elsewhere:s1.test"], after=now, timeout_ms=100)
    )
    await asyncio.sleep(0)
    room.message(room.user(1), "news")
    await store.append(room.pdus[-1:])
    assert await waiting
    assert not await elsewhere


async def test_no_wake_up_is_lost_between_looking_and_waiting(store: Store) -> None:
    room = room_of()
    seen = SyncToken.of({"events": store.streams["events"].current()})
    await store.append(room.pdus)
    assert await store.notifier.wait([room.room_id], after=seen, timeout_ms=60_000)
    assert seen != SyncToken.of({"events": VectorPosition()})


async def test_an_invite_over_federation_is_a_fact(store: Store) -> None:
    room = RoomBuilder("11", servers=("s2.test",), seed=4)
    admin, guest = room.user(1), "@user7:s1.test"
    room.start(admin)
    invite = room.invite(admin, guest)
    chain = [event for event in room.events if event.event_id in invite.auth_events]
    await store.append(
        [*(event.pdu for event in chain), invite.pdu], origin="outlier", room_version="11"
    )
    events = store.streams["events"]
    facts = await events.rows(0, events.linear(), 10)
    assert [fact.row for fact in facts] == [
        [invite.event_id, room.room_id, "m.room.member", guest, None]
    ]
