"""Invites and knocks that end without the server that they came from."""

from typing import Any

import pytest

from storage import AppendResult, AuthDenied, EventId, RoomId, UnknownRoom
from storage.federation import RemoteError
from storage.maintenance.verify import verify
from tests.federation.peers import Fault, Homeserver, as_json, fail
from tests.federation.rooms import agree, shared_room
from tests.federation.test_memberships import KNOCK, VERSIONS, json_of, lies, membership
from tests.sliding.client import SlidingClient

Json = dict[str, Any]


async def refuse(_: Json) -> Json:
    raise RemoteError("you are not welcome", status=403, errcode="M_FORBIDDEN")


async def ended(server: Homeserver, room_id: RoomId, left: AppendResult, since: str) -> None:
    """Check that a user of the server sees that they have left, and that it is sent to nobody."""
    assert left.outcome == "stored"
    assert await membership(server, room_id, server) == "leave"
    sync = await server.store.sync(server.user(), since=since)
    assert (sync.invite, sync.knock, list(sync.leave)) == ({}, {}, [room_id])
    [leave] = sync.leave[room_id].timeline.events
    assert (leave.event_id, leave.content["reason"]) == (left.event_id, "no")
    assert (await server.store.sync(server.user())).is_empty
    sent = [one.event_id for one in await server.store.outbox(0)]
    assert left.event_id not in sent
    await server.store.forget(server.user(), room_id)
    assert [one async for one in verify(server.store.database, server_name=server.name)] == []


@pytest.mark.parametrize(
    "version,request_name,fault",
    [
        ("1", "make_leave", fail),
        ("2", "send_leave", refuse),
        ("3", "make_leave", lies("sender", "@eve:s2.test")),
        ("10", "send_leave", refuse),
        ("12", "make_leave", fail),
    ],
)
async def test_an_invite_is_rejected_here_if_its_server_does_not_answer(
    two: list[Homeserver], version: str, request_name: str, fault: Fault
) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), room_version=version)
    for _ in range(2):
        await one.memberships.invite(one.user(), room_id, other.user())
        since = (await other.store.sync(other.user())).next_batch
        other.network.faults["s1.test", request_name] = fault
        left = await other.memberships.leave(other.user(), room_id, content={"reason": "no"})
        await ended(other, room_id, left, since)
        other.network.faults.clear()
    with pytest.raises(RemoteError) as refused:
        await other.memberships.leave(other.user("stranger"), room_id, ["s1.test"])
    assert refused.value.status is None
    await one.memberships.invite(one.user(), room_id, other.user())
    assert (await other.memberships.join(other.user(), room_id)).outcome == "joined"
    await agree(room_id, one, other)


@pytest.mark.parametrize("version", ["7", "11", "12"])
async def test_a_knock_is_taken_back_here_if_its_server_refuses(
    two: list[Homeserver], version: str
) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), room_version=version, initial_state=[KNOCK])
    await other.memberships.knock(other.user(), room_id, ["s1.test"])
    since = (await other.store.sync(other.user())).next_batch
    client = SlidingClient(other.store, other.user())
    assert (await client.sync((0, 9))).rooms[room_id].membership == "knock"
    other.network.faults["s1.test", "send_leave"] = refuse
    left = await other.memberships.leave(other.user(), room_id, content={"reason": "no"})
    assert (await client.sync((0, 9))).rooms[room_id].membership == "leave"
    await ended(other, room_id, left, since)
    assert other.network.calls["make_leave"] == 1  # of the server that the stripped state names


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_invite_is_rejected_after_the_last_member_has_left(
    two: list[Homeserver], version: str
) -> None:
    """The state of the room is here, and no other server has one."""
    one, other = two
    guest = one.user("guest")
    room_id = await one.store.create_room(one.user(), room_version=version)
    for user in (guest, other.user()):
        await one.memberships.invite(one.user(), room_id, user)
    await one.memberships.leave(one.user(), room_id)
    left = await one.memberships.leave(guest, room_id)
    assert left.outcome == "stored"
    assert (await one.store.sync(guest)).invite == {}
    event = await one.store.event(left.event_id or EventId(""))
    assert event is not None
    assert not event.outlier
    rejected = await other.memberships.leave(other.user(), room_id)
    assert await membership(one, room_id, other) == "leave"
    again = await other.store.event(rejected.event_id or EventId(""))
    assert again is not None
    answer = await one.responder.take_membership(
        "s2.test", "leave", room_id, again.event_id, as_json(again)
    )
    assert answer == {}
    with pytest.raises(AuthDenied):
        await one.responder.make_membership("s2.test", "leave", room_id, other.user())
    for change in ("join", "knock"):
        with pytest.raises(UnknownRoom):
            await one.responder.make_membership("s2.test", change, room_id, other.user(), VERSIONS)
    with pytest.raises(UnknownRoom):
        await one.responder.make_membership("s2.test", "leave", room_id, other.user("stranger"))


async def test_an_invite_is_rejected_through_a_server_that_is_still_in_the_room(
    two: list[Homeserver],
) -> None:
    one, other = two
    guests = [one.user("guest"), one.user("second")]
    room_id = await shared_room(one, other)
    for guest in guests:
        invite = await one.memberships.invite(one.user(), room_id, guest)
        await other.receive(one, [await json_of(one, invite.event_id)])
    gone = await one.memberships.leave(one.user(), room_id)
    await other.receive(one, [await json_of(one, gone.event_id)])
    await one.memberships.leave(guests[0], room_id)
    assert await other.store.membership(room_id, guests[0]) == "leave"
    one.network.faults["s2.test", "make_leave"] = fail
    left = await one.memberships.leave(guests[1], room_id)
    assert await one.store.membership(room_id, guests[1]) == "leave"
    await other.receive(one, [await json_of(one, left.event_id)])  # the outbox names the server
    [named] = [
        set(sent.servers) for sent in await one.store.outbox(0) if sent.event_id == left.event_id
    ]
    assert "s2.test" in named
    with pytest.raises(UnknownRoom):  # it is in the room, and this server is not
        await one.responder.make_membership("s2.test", "leave", room_id, other.user())
