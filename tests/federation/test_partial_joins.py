"""Joins with the members omitted: what works before the members are fetched, and after it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import asyncpg
import pytest

import storage
from storage import (
    EventId,
    PartialState,
    RoomId,
    SlidingList,
    SlidingSyncRequest,
    StorageClosed,
    responses,
)
from storage.event import event_id, sign
from storage.federation import Responder
from storage.maintenance.archive import rooms_to_archive
from storage.maintenance.purge import purge_history
from storage.rebuild import Rebuilder, completion
from storage.streams import SyncToken, VectorPosition
from storage.testing import signing_key
from tests.federation.partial import Json, join_partially, omitted
from tests.federation.peers import QUICK, Homeserver, fail, start
from tests.federation.rooms import PUBLIC, agree
from tests.homeserver.agreement import WAIT_S, until
from tests.maintenance.rooms import findings

MEMBERS = ("ann", "bob", "cid")


async def crowded(one: Homeserver, version: str = "12") -> RoomId:
    """A public room of the first server with a name and a few members."""
    state = [PUBLIC, ("m.room.name", "", {"name": "Jam"})]
    room_id = await one.store.create_room(one.user(), room_version=version, initial_state=state)
    for name in MEMBERS:
        await member(one, room_id, name, name, "join")
    return room_id


async def member(
    server: Homeserver, room_id: RoomId, sender: str, name: str, membership: str
) -> Json:
    return await server.do(
        room_id, sender, "m.room.member", {"membership": membership}, state_key=server.user(name)
    )


async def is_complete(server: Homeserver, room_id: RoomId) -> bool:
    return await server.receiver.partial_room(room_id) is None


async def delivered(server: Homeserver, origin: Homeserver, *pdus: Json) -> list[str]:
    return [result.outcome for result in (await server.receive(origin, pdus)).values()]


async def test_a_receiver_completes_rooms_by_itself(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await crowded(one)
    running = asyncio.ensure_future(other.receiver.run())
    assert (await join_partially(room_id, other, one)).is_partial
    at_once = other.receiver.limits.completing_seconds / 2
    await asyncio.wait_for(until(is_complete, other, room_id), at_once)
    running.cancel()
    assert one.user("ann") in await other.store.member_ids(room_id)


REFUSE_ONE = """
CREATE FUNCTION refuse_one() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF OLD.room_nid = (SELECT room_nid FROM rooms WHERE room_id = '{room_id}') THEN
        RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014';
    END IF;
    RETURN OLD;
END $$;
CREATE TRIGGER refuse_one BEFORE DELETE ON partial_rooms
FOR EACH ROW EXECUTE FUNCTION refuse_one()
"""
"""Makes the completion of a room fail."""


async def test_a_room_that_cannot_be_completed_delays_no_other(
    two: list[Homeserver], another_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = two
    rooms = [await crowded(one), await crowded(one)]
    for room_id in rooms:
        await join_partially(room_id, other, one)
    first, second = [room.room_id for room in await other.store.partial_rooms()]
    conn = await asyncpg.connect(another_dsn)
    try:
        await conn.execute(REFUSE_ONE.format(room_id=first))
        assert await other.receiver.complete_partial_rooms() == [second]
        assert first in caplog.text
        assert not await is_complete(other, first)
        await conn.execute("DROP TRIGGER refuse_one ON partial_rooms")
    finally:
        await conn.close()
    assert await other.receiver.complete_partial_rooms() == [first]
    await agree(first, *two)


async def test_the_end_of_the_store_ends_a_receiver(dsn: str) -> None:
    async with AsyncExitStack() as stack:
        [one] = await start(stack, [dsn], limits=replace(QUICK, completing_seconds=0.01))
        running = asyncio.create_task(one.receiver.run())
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(StorageClosed):
            await running


async def test_a_join_is_repeated_whose_invite_is_stored_already(two: list[Homeserver]) -> None:
    """A process was killed after it had stored the outliers of the response."""
    one, other = two
    room_id = await one.store.create_room(one.user())
    await member(one, room_id, "user", "ann", "invite")
    await member(one, room_id, "ann", "ann", "join")
    invite = {"membership": "invite"}
    await one.do(room_id, "user", "m.room.member", invite, state_key=other.user())
    join = await other.make_join(room_id, one, "user")
    answer = omitted(await one.send_join(join), "12", [one.name])
    invited = [pdu for pdu in answer["auth_chain"] if pdu.get("state_key") == other.user()]
    assert [pdu["content"]["membership"] for pdu in invited] == ["invite"]
    await other.store.append(
        [*answer["state"], *answer["auth_chain"]], room_version="12", origin="outlier"
    )
    joined = await other.receiver.joined(one.name, join, answer, "12")
    assert (joined.outcome, joined.is_partial) == ("joined", True), joined
    assert joined.event_id is not None
    before = await other.store.state_before(joined.event_id)
    assert before["m.room.member", other.user()] == event_id(invited[0], "12")
    assert await other.receiver.complete(room_id)
    await agree(room_id, one, other)
    assert await findings(other.store, room_id) == []


@pytest.mark.parametrize("version", ["1", "12"])
async def test_a_partial_room_is_used_and_completed(two: list[Homeserver], version: str) -> None:
    one, other = two
    room_id = await crowded(one, version)
    joined = await join_partially(room_id, other, one)
    assert (joined.outcome, joined.is_partial) == ("joined", True), joined
    [partial] = await other.store.partial_rooms()
    assert (partial.room_id, partial.join_event_id) == (room_id, joined.event_id)
    assert (partial.origin, sorted(partial.servers)) == ("s1.test", ["s1.test"])
    assert other.user() in await other.store.member_ids(room_id)
    assert one.user("ann") not in await other.store.member_ids(room_id)

    assert await delivered(other, one, await one.say(room_id, "hello", "ann")) == ["stored"]
    assert one.user("ann") in await other.store.member_ids(room_id)
    assert await delivered(one, other, await other.say(room_id, "hello ann")) == ["stored"]
    before = await other.store.sync(other.user())
    bodies = [event.json["content"].get("body") for event in before.join[room_id].timeline.events]
    assert bodies[-2:] == ["hello", "hello ann"]
    assert await findings(other.store, room_id) == []

    waiting = asyncio.ensure_future(
        other.store.sync(other.user(), since=before.next_batch, timeout_ms=60_000)
    )
    assert await other.receiver.complete_partial_rooms() == [room_id]
    async with other.store.database.connection() as conn:
        position = await conn.fetchval("SELECT max(completed_at) FROM rooms")
    assert other.store.streams["events"].positions()["maintenance"] >= position  # waits for no poll
    after = await waiting
    assert await other.store.partial_rooms() == []
    assert await other.receiver.complete(room_id)
    await agree(room_id, one, other)
    assert await findings(other.store, room_id) == []
    assert after.join[room_id].timeline.events == []
    came = {event.state_key for event in after.join[room_id].state_after}
    assert came == {one.user("bob"), one.user("cid"), one.user()}
    shared = await other.store.sharing_changes(other.user(), before.next_batch, after.next_batch)
    assert shared.gained == came
    again = await other.store.sync(other.user(), since=after.next_batch)
    assert room_id not in again.join
    assert await delivered(other, one, await one.say(room_id, "more", "bob")) == ["stored"]
    last = await other.store.sync(other.user(), since=again.next_batch)
    assert last.join[room_id].state_after == []


async def test_requests_that_need_all_members_are_refused(
    two: list[Homeserver], another_dsn: str
) -> None:
    one, other = two
    room_id = await crowded(one)
    joined = await join_partially(room_id, other, one)
    assert joined.event_id is not None
    assert await delivered(other, one, await one.say(room_id, "hello", "ann")) == ["stored"]
    mine = await other.say(room_id, "mine")
    assert await delivered(one, other, mine) == ["stored"]
    said = EventId(event_id(mine, "12"))
    store, join = other.store, {"membership": "join"}
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "state_ids": lambda: store.state_ids(said),
        "backfill": lambda: store.backfill(room_id, [said], 5, server_name="s1.test"),
        "missing": lambda: store.missing_events(room_id, [], [said], server_name="s1.test"),
        "time": lambda: store.timestamp_to_event(room_id, 0, "f", server_name="s1.test"),
        "template": lambda: store.template(
            room_id, "@x:s3.test", "m.room.member", join, state_key="@x:s3.test"
        ),
        "send": lambda: store.send(
            room_id, other.user("b"), "m.room.member", join, state_key=other.user("b")
        ),
        "purge": lambda: purge_history(
            store.database, room_id, server_name="s2.test", before_event_id=said
        ),
    }
    for name, call in calls.items():
        with pytest.raises(PartialState) as raised:
            await call()
        assert raised.value.room_id == room_id, name
        assert responses.error(raised.value)[0] == 503
    async with store.database.connection() as conn:
        with pytest.raises(PartialState):
            await rooms_to_archive(conn, [room_id])
        assert [room.is_partial for room in await rooms_to_archive(conn)] == [True]
        async with Rebuilder.opened(another_dsn, "s2.test") as rebuilder:
            assert (await rebuilder.rebuild(room_id)).events == 0, "a rebuild keeps it partial"
    assert await store.visible_to_server("s1.test", [said]) == set()
    assert await store.joined_servers(room_id) == {"s1.test", "s2.test"}
    assert (await store.outbox(0))[-1].servers == {"s1.test"}
    assert await store.is_resident("s1.test", room_id)
    assert not await store.is_resident("s3.test", room_id)
    assert len(await store.backfill(room_id, [said], 5)) == 3
    responder = Responder(other.receiver)
    leaver = await one.make_join(room_id, one, "dan")
    with pytest.raises(PartialState):
        await responder.take_membership("s1.test", "join", room_id, event_id(leaver, "12"), leaver)
    # a second user enters through the other server, and an event of a user who leaves is believed
    second = await join_partially(room_id, other, one, "b")
    assert (second.outcome, second.is_partial) == ("joined", True)
    third = await other.memberships.join(other.user("c"), room_id)
    assert (third.outcome, other.network.calls["send_join"]) == ("joined", 1)
    for name in ("bob", "ann"):
        left = await member(one, room_id, name, name, "leave")
        assert await delivered(other, one, left) == ["stored"]
    assert not await store.is_resident("s1.test", room_id)

    assert await other.receiver.complete(room_id)
    for name in ("state_ids", "backfill", "missing", "time", "template"):
        assert await calls[name]() is not None, name
    assert await store.visible_to_server("s1.test", [said]) == {said}
    assert await store.is_resident("s1.test", room_id)
    await agree(room_id, one, other)


def message(
    server: Homeserver, name: str, room_id: RoomId, prev: Sequence[str], auth: Sequence[str]
) -> Json:
    """A message that cites what it likes."""
    return sign(
        {
            "type": "m.room.message",
            "room_id": room_id,
            "sender": server.user(name),
            "content": {"body": f"of {name}"},
            "depth": 50,
            "origin_server_ts": 1,
            "prev_events": prev,
            "auth_events": auth,
        },
        "12",
        server.name,
        signing_key(server.name),
    )


async def test_an_event_of_a_banned_user_goes(two: list[Homeserver]) -> None:
    """The one kind of event that is shown before the completion and not after it."""
    one, other = two
    room_id = await crowded(one)
    ann = (await one.store.current_state(room_id))["m.room.member", one.user("ann")]
    await member(one, room_id, "user", "ann", "ban")
    joined = await join_partially(room_id, other, one)
    levels = (await one.store.current_state(room_id))["m.room.power_levels", ""]
    assert joined.event_id is not None
    hostile = message(one, "ann", room_id, [joined.event_id], [levels, ann])
    old = await one.store.event(ann)
    assert old is not None
    await other.store.append([old.raw], room_version="12", origin="outlier")
    assert await delivered(other, one, hostile) == ["stored"]
    # a member from after the join was not omitted: the event had to have the join as ancestor
    new = await member(one, room_id, "dan", "dan", "join")
    await other.store.append([new], room_version="12", origin="outlier")
    early = message(one, "dan", room_id, [joined.event_id], [levels, event_id(new, "12")])
    assert await delivered(other, one, early) == ["rejected"]
    reply = EventId(event_id(await other.say(room_id, "go away"), "12"))
    bad = EventId(event_id(hostile, "12"))
    assert await other.store.visible_to_user(other.user(), [bad, reply]) == {bad, reply}
    assert await other.store.membership(room_id, one.user("ann")) == "join"
    before = await other.store.sync(other.user())

    assert await other.receiver.complete(room_id)
    stored = await other.store.events([bad, reply])
    assert stored[bad].rejected is not None
    assert stored[bad].stream_ordering is not None
    assert await other.store.visible_to_user(other.user(), [bad, reply]) == {reply}
    after = await other.store.sync(other.user(), since=before.next_batch)
    [ban] = [one_ for one_ in after.join[room_id].state_after if one_.state_key == one.user("ann")]
    assert ban.json["content"]["membership"] == "ban"
    assert await findings(other.store, room_id) == []


async def test_an_event_of_an_older_fork_waits_for_the_members(two: list[Homeserver]) -> None:
    """Its user may have been banned since, for all that the state says."""
    one, other = two
    room_id = await crowded(one)
    state = await one.store.current_state(room_id)
    prev = await one.store.forward_extremities(room_id)
    assert (await join_partially(room_id, other, one)).is_partial
    auth = [state["m.room.power_levels", ""], state["m.room.member", one.user("bob")]]
    late = message(one, "bob", room_id, list(prev), auth)
    await one.store.append([late])
    before = await other.store.sync(other.user())
    assert await delivered(other, one, late) == ["soft_failed"]
    hidden = await other.store.sync(other.user(), since=before.next_batch)
    came = [event for room in hidden.join.values() for event in room.timeline.events]
    assert event_id(late, "12") not in {event.event_id for event in came}

    assert await other.receiver.complete(room_id)
    after = await other.store.sync(other.user(), since=hidden.next_batch)
    [shown] = after.join[room_id].timeline.events
    assert shown.event_id == event_id(late, "12")
    assert await findings(other.store, room_id) == []


async def test_no_reader_misses_the_members(two: list[Homeserver]) -> None:
    """Sliding sync sends them once, and so does a sync whose token is further in other writers."""
    one, other = two
    store = other.store
    room_id = await crowded(one)
    await join_partially(room_id, other, one)
    wanted = SlidingList([(0, 9)], timeline_limit=5, required_state=[("m.room.member", "*")])
    request = SlidingSyncRequest(lists={"all": wanted})
    known = await store.sliding_sync(other.user(), request, device_id="D")
    assert members_of(known, room_id) == {other.user()}
    before = store.positions_of((await store.sync(other.user())).next_batch)["events"]

    assert await other.receiver.complete(room_id)
    await store.create_room(other.user("elsewhere"))
    told = await store.sliding_sync(other.user(), request, device_id="D", pos=known.pos)
    assert members_of(told, room_id) == {one.user(), *map(one.user, MEMBERS)}
    again = await store.sliding_sync(other.user(), request, device_id="D", pos=told.pos)
    assert room_id not in again.rooms
    await other.receive(one, [await one.say(room_id, "more", "bob")])
    last = await store.sliding_sync(other.user(), request, device_id="D", pos=again.pos)
    assert members_of(last, room_id) == set()

    now = store.positions_of((await store.sync(other.user())).next_batch)["events"]
    lagging = VectorPosition.of(before.min, {"main": now.position("main")})
    token = SyncToken.of({"events": lagging}).print(store.deployment_id)
    found = (await store.sync(other.user(), since=token)).join[room_id]
    assert {event.state_key for event in found.state_after} == {one.user(), *map(one.user, MEMBERS)}


def members_of(found: storage.SlidingSync, room_id: RoomId) -> set[str | None]:
    return {event.state_key for event in found.rooms[room_id].required_state}


async def test_a_completion_that_fails_changes_nothing_and_goes_on(
    two: list[Homeserver], another_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, which has read and written the room before, goes on after it as well."""
    one, other = two
    room_id = await crowded(one)
    joined = await join_partially(room_id, other, one)
    async with storage.open(
        another_dsn,
        server_name="s2.test",
        instance_name="second",
        signing_key=signing_key("s2.test"),
    ) as second:
        await second.send(room_id, other.user(), "m.room.message", {"body": "one"})
        before = await second.sync(other.user())
        state = await second.current_state(room_id)
        other.network.faults["s1.test", "state_ids"] = fail
        assert not await other.receiver.complete(room_id)
        del other.network.faults["s1.test", "state_ids"]

        async def broken(*_: object) -> None:
            raise RuntimeError

        with monkeypatch.context() as patch:
            patch.setattr(completion, "publish", broken)
            with pytest.raises(RuntimeError):
                await other.receiver.complete(room_id)
        assert [room.room_id for room in await second.partial_rooms()] == [room_id]
        assert await second.current_state(room_id) == state
        assert await findings(second, room_id) == []

        async with other.store.database.connection() as conn:  # as if it had been refused
            await conn.execute(
                "UPDATE events SET soft_failed = true WHERE sender_nid = (SELECT principal_nid "
                "FROM principals WHERE name = $1::text) AND state_key_nid IS NULL",
                other.user(),
            )
        assert await other.receiver.complete(room_id)
        after = await second.sync(other.user(), since=before.next_batch)
        [new] = after.join[room_id].timeline.events  # accepted only now: it is new to clients
        assert new.json["content"] == {"body": "one"}
        assert len(after.join[room_id].state_after) == 4
        await second.send(room_id, other.user(), "m.room.message", {"body": "two"})
        again = await join_partially_again(room_id, other, one, joined.event_id)
        assert (again.outcome, again.is_partial) == ("duplicate", False)
        assert await findings(second, room_id) == []
    await agree(room_id, other)


async def join_partially_again(
    room_id: RoomId, server: Homeserver, resident: Homeserver, event: EventId | None
) -> storage.federation.JoinResult:
    """The same answer once more, as after a lost response."""
    assert event is not None
    stored = await server.store.event(event)
    assert stored is not None
    answer = {
        **await resident.state_at(event, "state"),
        "event": stored.json,
        "members_omitted": True,
        "servers_in_room": ["s1.test"],
    }
    return await server.receiver.joined("s1.test", stored.json, answer, "12")


async def test_a_room_is_joined_again_with_its_history(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await crowded(one)
    assert (await other.join(room_id, one)).outcome == "joined"
    early = await one.say(room_id, "early", "bob")
    assert await delivered(other, one, early) == ["stored"]
    left = await member(other, room_id, "user", "user", "leave")
    assert await delivered(one, other, left) == ["stored"]
    await one.say(room_id, "between", "cid")
    joined = await join_partially(room_id, other, one, "second")
    assert joined.is_partial
    assert joined.event_id is not None
    before = await other.store.state_before(joined.event_id)
    assert before["m.room.member", other.user()] == event_id(left, "12")
    assert ("m.room.member", one.user("bob")) not in before
    assert await delivered(other, one, await one.say(room_id, "late", "ann")) == ["stored"]
    assert await findings(other.store, room_id) == []
    seen = await page(other, room_id)
    assert await other.receiver.complete(room_id)
    assert await findings(other.store, room_id) == []
    assert seen <= await page(other, room_id)
    assert await other.store.current_state(room_id) == await one.store.current_state(room_id)


async def page(server: Homeserver, room_id: RoomId) -> set[EventId]:
    found = await server.store.messages(room_id, server.user("second"), limit=100)
    return {event.event_id for event in found.chunk}
