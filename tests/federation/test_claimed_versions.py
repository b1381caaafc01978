"""Room versions in invites, which are claims of another server."""

from typing import Any

import pytest

from storage import AppendResult, RoomId
from storage.event import event_id, sign, verify
from storage.testing import signing_key, verify_key
from tests.federation.peers import Homeserver
from tests.federation.rooms import PUBLIC, agree, shared_room
from tests.maintenance.rooms import findings

Json = dict[str, Any]
KNOCK = ("m.room.join_rules", "", {"join_rule": "knock"})


def claim(room_id: RoomId, by: Homeserver, guest: str, version: str) -> Json:
    """An invite of a server that need not be in the room."""
    pdu: Json = {
        "type": "m.room.member",
        "room_id": room_id,
        "sender": by.user(),
        "state_key": guest,
        "content": {"membership": "invite"},
        "prev_events": [],
        "auth_events": [],
        "depth": 1,
        "origin_server_ts": 1,
    }
    if version in ("1", "2"):
        pdu["event_id"] = f"$invite:{by.name}"
    return sign(pdu, version, by.name, signing_key(by.name))


@pytest.mark.parametrize("version, claimed", [("11", "10"), ("1", "11"), ("11", "1")])
async def test_a_false_version_in_an_invite_keeps_nobody_out_of_the_room(
    three: list[Homeserver], version: str, claimed: str
) -> None:
    one, here, liar = three
    room_id = await one.store.create_room(one.user(), room_version=version, initial_state=[PUBLIC])
    false = await here.receiver.invited(claim(room_id, liar, here.user("guest"), claimed), claimed)
    assert false.result.outcome == "stored"
    joined = await here.memberships.join(here.user(), room_id, [one.name])
    assert joined.outcome == "joined"
    assert (await here.store.sync(here.user("guest"))).invite == {}
    assert await here.version(room_id) == version
    await one.receive(here, [await here.say(room_id, "inside")])
    await agree(room_id, one, here)
    assert await findings(here.store) == []


async def test_a_false_version_in_an_invite_keeps_no_knock_away(three: list[Homeserver]) -> None:
    one, here, liar = three
    room_id = await one.store.create_room(one.user(), room_version="7", initial_state=[KNOCK])
    await here.receiver.invited(claim(room_id, liar, here.user("guest"), "1"), "1")
    assert (await here.memberships.knock(here.user(), room_id, [one.name])).outcome == "stored"
    assert list((await here.store.sync(here.user())).knock) == [room_id]
    member = "m.room.member"
    invited = await one.do(room_id, "user", member, {"membership": "invite"}, state_key=here.user())
    assert (await here.receiver.invited(invited, "7")).is_welcome
    assert await findings(here.store) == []


async def test_a_stored_room_keeps_its_version(two: list[Homeserver]) -> None:
    one, here = two
    room_id = await shared_room(one, here, version="11")
    member, leave = "m.room.member", {"membership": "leave"}
    await here.do(room_id, "user", member, leave, state_key=here.user())
    unsigned = claim(room_id, here, here.user(), "10") | {"content": {"membership": "join"}}
    join = sign(unsigned, "10", "s2.test", signing_key("s2.test"))
    refused = await here.receiver.joined(one.name, join, {"state": [], "auth_chain": []}, "10")
    assert refused.fault == "wrong_version"
    assert await here.version(room_id) == "11"


@pytest.mark.parametrize("is_inside", [True, False])
async def test_an_invite_is_read_in_the_version_of_its_room(
    two: list[Homeserver], is_inside: bool
) -> None:
    one, here = two
    room_id = await shared_room(one, here, version="11")
    member, guest = "m.room.member", here.user("guest")
    if not is_inside:
        leave = {"membership": "leave"}
        await one.receive(
            here, [await here.do(room_id, "user", member, leave, state_key=here.user())]
        )
    sent = await one.do(room_id, "user", member, {"membership": "invite"}, state_key=guest)
    asked = await here.receiver.invited(sent, "10")
    assert asked.is_welcome
    verify(asked.pdu, "11", here.name, verify_key(here.name))
    other = claim(room_id, one, guest, "1")
    refused = await here.receiver.invited(other, "1")
    assert refused.result == AppendResult(
        event_id(other, "1"), "invalid", "here the room has version 11"
    )
