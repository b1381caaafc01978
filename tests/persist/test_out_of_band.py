"""Invites and knocks over federation, and what ends them, in rooms that this server is not in."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import storage
from storage import Store
from storage.errors import InputError
from storage.event.ndjson import read_line
from storage.ids import EventId, UserId
from storage.maintenance.archive import archive, rooms_to_archive
from storage.maintenance.purge import purge_room
from storage.maintenance.verify import verify
from storage.testing import BuiltEvent, RoomBuilder

HERE, ALICE, BOB = "here.test", UserId("@alice:here.test"), UserId("@bob:here.test")
VERSIONS = [str(number) for number in range(1, 13)]
NAME = {
    "type": "m.room.name",
    "state_key": "",
    "sender": "@user1:s1.test",
    "content": {"name": "Elsewhere"},
}


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=HERE) as opened:
        yield opened


def elsewhere(version: str = "11", join_rule: str = "invite", seed: int = 1) -> RoomBuilder:
    """A room of other servers."""
    room = RoomBuilder(version, seed=seed)
    room.start(room.user(1), join_rule=join_rule)
    return room


async def out_of_band(
    store: Store, room: RoomBuilder, *events: BuiltEvent, shown: Any = None
) -> list[str]:
    given = None if shown is None else {EventId(events[0].event_id): shown}
    pdus = [event.pdu for event in events]
    answers = await store.append(
        pdus,
        origin="out_of_band",
        room_version=room.version,
        stripped_state=given,
        verify_keys=room.keys,
    )
    return [answer.outcome for answer in answers]


async def joined(store: Store, room: RoomBuilder, join: BuiltEvent) -> None:
    """Store the state and auth events as outliers, then the join, as servers do after send_join."""
    at = [event.event_id for event in room.events].index(join.event_id)
    state = set(join.state_before.values())
    await store.append(
        [event.pdu for event in room.events[:at] if event.type != "m.room.message"],
        origin="outlier",
        room_version=room.version,
    )
    [result] = await store.append([join.pdu], state_before={join.event_id: state})
    assert result.outcome == "stored", result


async def is_sound(store: Store) -> bool:
    return [finding async for finding in verify(store.database, server_name=HERE)] == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_invite_is_told_at_once_with_its_stripped_state(
    store: Store, version: str
) -> None:
    room = elsewhere(version)
    before = (await store.sync(ALICE)).next_batch
    invite = room.invite(room.user(1), ALICE)
    shown = [
        NAME,
        {**NAME, "type": "m.room.topic", "content": {"topic": "\0 \\ é"}, "origin_server_ts": 5},
    ]
    assert await out_of_band(store, room, invite, shown=shown) == ["stored"]
    sync = await store.sync(ALICE)
    for since in (before, None):
        sync = await store.sync(ALICE, since=since)
        assert (list(sync.invite), sync.join, sync.leave, sync.knock) == (
            [room.room_id],
            {},
            {},
            {},
        )
        name, topic, own = sync.invite[room.room_id].invite_state
        assert (name, topic["content"], set(topic)) == (NAME, {"topic": "\0 \\ é"}, set(NAME))
        assert (own["type"], own["state_key"], own["content"]["membership"]) == (
            "m.room.member",
            ALICE,
            "invite",
        )
    assert (await store.sync(ALICE, since=sync.next_batch)).is_empty
    assert (await store.sync(BOB)).is_empty
    assert await out_of_band(store, room, invite, shown=[]) == ["duplicate"]
    assert len((await store.sync(ALICE)).invite[room.room_id].invite_state) == 3
    held = await store.event(invite.event_id)
    assert held is not None
    assert (held.raw, held.outlier, held.rejected, await store.rooms_of(ALICE)) == (
        invite.pdu,
        True,
        None,
        [],
    )
    assert await is_sound(store)


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_user_rejects_an_invite(store: Store, version: str) -> None:
    room = elsewhere(version)
    assert await out_of_band(store, room, room.invite(room.user(1), ALICE), shown=[NAME]) == [
        "stored"
    ]
    before = (await store.sync(ALICE)).next_batch
    leave = room.leave(ALICE)
    assert await out_of_band(store, room, leave) == ["stored"]
    sync = await store.sync(ALICE, since=before)
    assert (sync.invite, list(sync.leave)) == ({}, [room.room_id])
    assert [event.event_id for event in sync.leave[room.room_id].timeline.events] == [
        leave.event_id
    ]
    assert (await store.sync(ALICE)).is_empty
    assert await out_of_band(store, room, room.invite(room.user(1), ALICE)) == ["stored"]
    assert list((await store.sync(ALICE, since=sync.next_batch)).invite) == [room.room_id]
    assert await is_sound(store)


@pytest.mark.parametrize("version", VERSIONS[6:])
@pytest.mark.parametrize("answer", ["invite", "kick", "ban", "leave"])
async def test_a_knock_and_its_answers(store: Store, version: str, answer: str) -> None:
    room = elsewhere(version, "knock")
    knock = room.knock(ALICE)
    assert await out_of_band(store, room, knock, shown=[NAME]) == ["stored"]
    sync = await store.sync(ALICE)
    assert [event["type"] for event in sync.knock[room.room_id].knock_state] == [
        "m.room.name",
        "m.room.member",
    ]
    answered = (
        room.leave(ALICE) if answer == "leave" else getattr(room, answer)(room.user(1), ALICE)
    )
    assert await out_of_band(store, room, answered) == ["stored"]
    after = await store.sync(ALICE, since=sync.next_batch)
    assert after.knock == {}
    assert list(after.invite if answer == "invite" else after.leave) == [room.room_id]
    if answer == "invite":
        assert len(after.invite[room.room_id].invite_state) == 1
    assert await is_sound(store)


async def test_the_inviter_retracts_an_invite(store: Store) -> None:
    room = elsewhere()
    assert await out_of_band(
        store, room, room.invite(room.user(1), ALICE), room.kick(room.user(1), ALICE)
    ) == ["stored", "stored"]
    assert list((await store.sync(ALICE)).invite) == []


async def test_a_stranger_retracts_nothing(store: Store) -> None:
    room = RoomBuilder("11", seed=1, checked=False)
    room.start(room.user(1), join_rule="knock")
    knock = room.knock(ALICE)
    cited = [room.state[key] for key in (("m.room.create", ""), ("m.room.power_levels", ""))]
    strange = room.kick(room.user(2), ALICE, auth=cited)
    assert await out_of_band(store, room, knock, strange) == ["stored", "invalid"]
    assert list((await store.sync(ALICE)).knock) == [room.room_id]


async def test_what_cannot_come_out_of_band_is_invalid(store: Store) -> None:
    room = RoomBuilder("11", seed=1, checked=False)
    admin = room.user(1)
    room.start(admin)
    refused = {
        "only m.room.member": room.topic(admin, "one"),
        "is not a user of here.test": room.invite(admin, room.user(2)),
        "is neither invited nor knocking": room.kick(admin, ALICE),
        "neither invited": room.leave(ALICE),
        "a join needs the state": room.join(ALICE),
        "membership 'odd'": room.member(admin, ALICE, "odd"),
        "invites themselves": room.invite(ALICE, ALICE),
        "no knock": room.member(admin, ALICE, "knock"),
    }
    for reason, event in refused.items():
        [answer] = await store.append([event.pdu], origin="out_of_band", room_version="11")
        assert (answer.event_id, answer.outcome) == (event.event_id, "invalid")
        assert reason in (answer.reason or "")
        assert await store.event(event.event_id) is None
    old = elsewhere("6", seed=2)
    knock = RoomBuilder("7", seed=2)
    knock.start(knock.user(1), join_rule="knock")
    [answer] = await store.append(
        [knock.knock(ALICE).pdu], origin="out_of_band", room_version=old.version
    )
    assert answer.outcome == "invalid"
    [answer] = await store.append(
        [room.invite(admin, ALICE).pdu], origin="out_of_band", room_version="12"
    )
    assert answer.outcome == "invalid"
    unsigned = RoomBuilder("11", seed=3, sign=False)
    unsigned.start(unsigned.user(1))
    assert await out_of_band(store, unsigned, unsigned.invite(unsigned.user(1), ALICE)) == [
        "invalid"
    ]
    [answer] = await store.append([room.invite(admin, ALICE).pdu], origin="out_of_band")
    assert answer.outcome == "invalid"
    async with store.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM rooms") == 0


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_join_follows_the_invite_and_then_a_leave_and_another_invite(
    store: Store, version: str
) -> None:
    room = elsewhere(version)
    admin = room.user(1)
    invite = room.invite(admin, ALICE)
    assert await out_of_band(store, room, invite, shown=[NAME]) == ["stored"]
    invited = (await store.sync(ALICE)).next_batch
    join = room.join(ALICE)
    await joined(store, room, join)
    sync = await store.sync(ALICE, since=invited)
    assert (list(sync.join), sync.invite) == ([room.room_id], {})
    assert await store.current_state(room.room_id) == dict(join.state_after)
    assert {event.event_id for event in await store.event_auth(join.event_id)} >= {invite.event_id}
    assert await out_of_band(store, room, room.invite(admin, BOB)) == ["invalid"]
    await store.append([room.pdus[-1], room.message(ALICE, "hello").pdu, room.leave(ALICE).pdu])
    assert await store.rooms_of(ALICE) == []
    left = (await store.sync(ALICE, since=sync.next_batch)).next_batch
    room.message(admin, "this server is not told")
    again = room.invite(admin, ALICE)
    assert await out_of_band(store, room, again, shown=[NAME]) == ["stored"]
    assert len((await store.sync(ALICE, since=left)).invite[room.room_id].invite_state) == 2
    assert await is_sound(store)
    rejoin = room.join(ALICE)
    await joined(store, room, rejoin)
    by_version = (
        [] if version == "1" else [room.room_id]
    )  # its resolution does not ask how the older leave came to be a join
    assert await store.rooms_of(ALICE) == by_version
    assert await is_sound(store)


async def test_what_names_an_event_out_of_band_waits_for_its_auth_events(store: Store) -> None:
    room = elsewhere()
    invite = room.invite(room.user(1), ALICE)
    await out_of_band(store, room, invite)
    join = room.join(ALICE)
    state = list(join.state_before.values())
    [result] = await store.append([invite.pdu], origin="outlier", room_version="11")
    assert (result.outcome, set(result.missing)) == ("missing_parents", set(invite.auth_events))
    await store.append(
        [event.pdu for event in room.events[:-2]], origin="outlier", room_version="11"
    )
    [result] = await store.append([join.pdu], state_before={join.event_id: state})
    assert (result.outcome, result.missing) == ("missing_parents", (invite.event_id,) * 1)
    [result] = await store.append([invite.pdu], origin="outlier")
    assert result.outcome == "stored"
    [result] = await store.append([invite.pdu], origin="outlier")
    assert result.outcome == "duplicate"
    assert list((await store.sync(ALICE)).invite) == [room.room_id]
    [result] = await store.append([join.pdu], state_before={join.event_id: state})
    assert result.outcome == "stored"
    assert await is_sound(store)


async def test_an_old_invite_that_is_authorised_later_is_not_told_again(store: Store) -> None:
    room = elsewhere()
    admin = room.user(1)
    await out_of_band(store, room, room.invite(admin, ALICE), room.leave(ALICE))
    after = (await store.sync(ALICE)).next_batch
    results = await store.append(room.pdus, origin="outlier", room_version="11")
    assert {result.outcome for result in results} == {"stored"}
    assert (await store.sync(ALICE, since=after)).is_empty
    assert await is_sound(store)


async def test_an_invite_that_its_auth_events_refuse_is_rejected_when_they_come(
    store: Store,
) -> None:
    room = RoomBuilder("11", seed=1, checked=False)
    room.start(room.user(1))
    forged = room.invite(room.user(2), ALICE)
    assert await out_of_band(store, room, forged) == ["stored"]
    results = await store.append(room.pdus, origin="outlier", room_version="11")
    assert results[-1].outcome == "rejected"
    assert await is_sound(store)


async def test_a_join_of_this_server_overrules_what_came_out_of_band(store: Store) -> None:
    """Bob's invite was retracted without this server's knowledge, Alice's led to a join."""
    room = elsewhere()
    admin = room.user(1)
    invite = room.invite(admin, ALICE)
    branch = room.fork(1)[0]
    lost = branch.invite(admin, BOB)
    assert await out_of_band(store, room, invite, shown=[NAME]) == ["stored"]
    assert await out_of_band(store, room, lost) == ["stored"]
    before = (await store.sync(BOB)).next_batch
    join = room.join(ALICE)
    state = [event for event in room.events if event.event_id in set(join.state_before.values())]
    await store.append([event.pdu for event in state], origin="outlier")
    waiting = await store.sync(BOB, since=before)
    assert waiting.is_empty
    [result] = await store.append(
        [join.pdu], state_before={join.event_id: [event.event_id for event in state]}
    )
    assert result.outcome == "stored"
    sync = await store.sync(BOB, since=waiting.next_batch)
    assert (sync.invite, list(sync.leave)) == ({}, [room.room_id])
    assert (await store.sync(BOB)).is_empty
    async with store.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM out_of_band_memberships") == 0
    assert await is_sound(store)


async def test_an_invite_wakes_a_waiting_sync(store: Store) -> None:
    room = elsewhere()
    since = (await store.sync(ALICE)).next_batch
    waiting = asyncio.create_task(store.sync(ALICE, since=since, timeout_ms=600_000))
    async with asyncio.timeout(60):
        while not store.notifier._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await out_of_band(store, room, room.invite(room.user(1), ALICE))
    assert list((await asyncio.wait_for(waiting, 60)).invite) == [room.room_id]


async def test_another_store_shows_the_invite_and_knows_when_it_was_authorised(dsn: str) -> None:
    room = elsewhere()
    invite, join = room.invite(room.user(1), ALICE), room.join(ALICE)
    async with (
        storage.open(dsn, server_name=HERE, instance_name="one") as one,
        storage.open(dsn, server_name=HERE, instance_name="two") as two,
    ):
        assert await out_of_band(one, room, invite, shown=[NAME]) == ["stored"]
        assert len((await two.sync(ALICE)).invite[room.room_id].invite_state) == 2
        results = await two.append([event.pdu for event in room.events[:-1]], origin="outlier")
        assert {result.outcome for result in results} == {"stored"}
        [result] = await one.append(
            [join.pdu], state_before={join.event_id: list(join.state_before.values())}
        )
        assert result.outcome == "stored"
        assert list((await two.sync(ALICE)).join) == [room.room_id]
        assert await is_sound(one)


@pytest.mark.parametrize(
    "shown",
    [
        "text",
        5,
        [5],
        ["text"],
        [{}],
        [{**NAME, "type": 5}],
        [{**NAME, "content": "text"}],
        [{**NAME, "state_key": None}],
        [{**NAME, "sender": "\ud800"}],
        [{**NAME, "content": {"a": 1 << 70}}],
        [{**NAME, "content": {"a": float("nan")}}],
        [{**NAME, "content": {"name": "x" * 100_000}}] * 3,
    ],
)
async def test_stripped_state_that_is_malformed_or_too_large_is_an_input_error(
    store: Store, shown: Any
) -> None:
    room = elsewhere()
    with pytest.raises(InputError, match="stripped_state"):
        await out_of_band(store, room, room.invite(room.user(1), ALICE), shown=shown)
    assert (await store.sync(ALICE)).is_empty


async def test_arguments_that_do_not_go_together_are_an_input_error(store: Store) -> None:
    room = elsewhere()
    given: Any = {room.invite(room.user(1), ALICE).event_id: [NAME]}
    with pytest.raises(InputError, match="out_of_band"):
        await store.append(room.pdus, stripped_state=given, room_version="11")
    sideways: Any = "sideways"
    with pytest.raises(InputError, match="live, backfill, outlier, out_of_band"):
        await store.append(room.pdus, origin=sideways, room_version="11")


async def test_an_archive_tells_what_came_out_of_band_with_its_stripped_state(store: Store) -> None:
    room = elsewhere()
    invite = room.invite(room.user(1), ALICE)
    await out_of_band(store, room, invite, shown=[NAME])
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        [held] = await rooms_to_archive(conn)
        [[line]] = [lines async for lines in archive(conn, held)]
    read = read_line(line)
    assert (read.pdu, read.room_version, read.origin, read.stripped_state) == (
        invite.pdu,
        "11",
        "out_of_band",
        (NAME,),
    )


async def test_a_purged_room_keeps_nothing_of_what_came_out_of_band(store: Store) -> None:
    room = elsewhere()
    await out_of_band(store, room, room.invite(room.user(1), ALICE), shown=[NAME])
    await purge_room(store.database, room.room_id, server_name=HERE)
    assert (await store.sync(ALICE)).is_empty
    async with store.database.connection() as conn:
        for table in (
            "events",
            "rooms",
            "memberships",
            "outlier_memberships",
            "out_of_band_memberships",
        ):
            assert await conn.fetchval(f"SELECT count(*) FROM {table}") == 0, table
    assert await is_sound(store)
