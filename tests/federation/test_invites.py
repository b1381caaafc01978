"""Invites, knocks and what ends them, and PDUs of rooms that this server is not in."""

from typing import Any

from storage import RoomId
from storage.event import event_id, sign, verify
from storage.testing import signing_key, verify_key
from storage.testing.keys import foreign_signing_key
from tests.federation.peers import Homeserver
from tests.federation.rooms import PUBLIC, agree, outcomes, shared_room

Json = dict[str, Any]
NAME = {"type": "m.room.name", "state_key": "", "sender": "@user:s1.test", "content": {"name": "x"}}


async def invite(one: Homeserver, room_id: RoomId, guest: str) -> Json:
    content = {"membership": "invite"}
    return await one.do(room_id, "user", "m.room.member", content, state_key=guest)


async def test_an_invite_is_signed_and_in_sync_once(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    sent = await invite(one, room_id, other.user())
    shown = [NAME, {"type": 5}, "nothing"]
    first = await other.receiver.invited(sent, "12", shown)  # type: ignore[arg-type]
    again = await other.receiver.invited(sent, "12", [NAME])
    assert (first.result.outcome, again.result.outcome) == ("stored", "duplicate")
    assert first.is_welcome
    assert again.is_welcome
    verify(first.pdu, "12", "s2.test", verify_key("s2.test"))
    verify(first.pdu, "12", "s1.test", verify_key("s1.test"))
    answer = await other.store.sync(other.user())
    assert [one["type"] for one in answer.invite[room_id].invite_state] == [
        "m.room.name",
        "m.room.member",
    ]


async def test_an_invite_after_the_join_changes_nothing(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    sent = await invite(one, room_id, other.user())
    assert (await other.join(room_id, one)).outcome == "joined"
    late = await other.receiver.invited(sent, "12", [NAME])
    assert (late.result.outcome, late.is_welcome) == ("duplicate", True)
    answer = await other.store.sync(other.user())
    assert list(answer.join) == [room_id]
    assert answer.invite == {}
    await agree(room_id, one, other)


async def test_an_invite_to_a_room_that_this_server_is_in_comes_with_a_transaction(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    await one.say(room_id, "it is not delivered")
    sent = await invite(one, room_id, other.user("guest"))
    asked = await other.receiver.invited(sent, "12", [NAME])
    assert (asked.result.outcome, asked.is_welcome) == ("missing_parents", True)
    assert await outcomes(other, one, sent) == ["stored"]
    assert list((await other.store.sync(other.user("guest"))).invite) == [room_id]
    await agree(room_id, one, other)


async def test_a_forged_invite_is_refused(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    sent = await invite(one, room_id, other.user())
    del sent["signatures"]
    forged = sign(sent, "12", "s1.test", foreign_signing_key("s1.test"))
    refused = await other.receiver.invited(forged, "12", [])
    assert (refused.result.outcome, refused.is_welcome) == ("invalid", False)
    assert (await other.store.sync(other.user())).invite == {}


async def test_only_an_invite_of_a_local_user_in_a_known_version_is_an_invite(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    elsewhere = await invite(one, room_id, "@user:s9.test")
    message = await one.say(room_id, "no invite")
    for pdu, version in ((elsewhere, "12"), (message, "12"), (elsewhere, "99"), ({}, "12")):
        refused = await other.receiver.invited(pdu, version, [])
        assert refused.result.outcome == "invalid"


async def test_a_membership_that_is_no_text_is_refused_alone(two: list[Homeserver]) -> None:
    one, other = two
    outside = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    sent = await invite(one, outside, other.user())
    await other.receiver.invited(sent, "12", [])
    shared = await shared_room(one, other)
    message = await one.say(shared, "of another room")
    for membership in ({"is": "invite"}, ["leave"], None, 7):
        content = {"membership": membership}
        odd = sign({**sent, "content": content}, "12", "s1.test", signing_key("s1.test"))
        refused = await other.receiver.invited(odd, "12", [])
        assert (refused.result.outcome, refused.is_welcome) == ("invalid", False)
        assert await outcomes(other, one, odd, message) in (
            ["invalid", "stored"],
            ["invalid", "duplicate"],
        )


async def test_an_invite_is_rejected_and_sent_again(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    await other.receiver.invited(await invite(one, room_id, other.user()), "12", [])
    template = await one.store.template(
        room_id, other.user(), "m.room.member", {"membership": "leave"}, state_key=other.user()
    )
    leave = sign(template, "12", "s2.test", signing_key("s2.test"))
    assert await outcomes(one, other, leave) == ["stored"]
    assert (await other.receiver.left(leave, "12")).outcome == "stored"
    assert (await other.store.sync(other.user())).invite == {}
    second = await other.receiver.invited(await invite(one, room_id, other.user()), "12", [])
    assert second.result.outcome == "stored"
    assert list((await other.store.sync(other.user())).invite) == [room_id]


async def test_a_knock_is_stored_and_denied_by_a_transaction(two: list[Homeserver]) -> None:
    one, other = two
    rule = ("m.room.join_rules", "", {"join_rule": "knock"})
    room_id = await one.store.create_room(one.user(), initial_state=[rule])
    template = await one.store.template(
        room_id, other.user(), "m.room.member", {"membership": "knock"}, state_key=other.user()
    )
    knock = sign(template, "12", "s2.test", signing_key("s2.test"))
    assert await outcomes(one, other, knock) == ["stored"]
    assert (await other.receiver.knocked(knock, "12", [NAME])).outcome == "stored"
    assert list((await other.store.sync(other.user())).knock) == [room_id]
    denied = await one.do(
        room_id, "user", "m.room.member", {"membership": "leave"}, state_key=other.user()
    )
    assert await outcomes(other, one, denied) == ["stored"]
    assert (await other.store.sync(other.user())).knock == {}


async def test_a_pdu_of_a_room_that_this_server_is_not_in_is_refused(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    await other.receiver.invited(await invite(one, room_id, other.user()), "12", [])
    sent = await one.say(room_id, "not for you")
    results = await other.receive(one, [sent])
    [result] = results.values()
    assert (result.outcome, result.reason) == (
        "invalid",
        f"this server is not in the room {room_id}",
    )
    assert await other.store.events(results) == {}


async def test_the_events_of_an_unknown_room_make_no_room(two: list[Homeserver]) -> None:
    one, other = two
    for version in ("11", "12"):
        room_id = await one.store.create_room(one.user(), room_version=version)
        state = await one.store.events((await one.store.current_state(room_id)).values())
        created = next(event.json for event in state.values() if event.type == "m.room.create")
        results = await other.receive(one, [event.json for event in state.values()])
        assert list(results) == [event_id(created, version)]
        assert [result.outcome for result in results.values()] == ["invalid"]
        assert (await other.receive(one, [{"no": "pdu"}, {}])) == {}
    assert (await other.store.sync(other.user())).join == {}
