"""Invites, knocks and what ends them, and PDUs of rooms that this server is not in."""

from collections.abc import Callable
from typing import Any, Final

import pytest

from storage import EventId, InputError, RoomId, responses
from storage.event import event_id, parse, sign, verify
from storage.federation import RemoteError
from storage.testing import signing_key, verify_key
from storage.testing.assembly import foreign_signing_key
from tests.federation.peers import Homeserver, fail
from tests.federation.rooms import PUBLIC, agree, outcomes, shared_room, state_pdus

Json = dict[str, Any]
NAME = {"type": "m.room.name", "state_key": "", "sender": "@user:s1.test", "content": {"name": "x"}}


STRIPPED: Final = ("type", "state_key", "sender", "content")
TYPES: Final = frozenset(
    {
        "m.room.create",
        "m.room.history_visibility",
        "m.room.join_rules",
        "m.room.name",
        "m.room.power_levels",
    }
)
"""The state of the rooms below, without members. A server may show more than the usual types."""


def signed_anew(pdu: Json, version: str, by: str = "s1.test", **changes: Any) -> Json:
    bare = {key: value for key, value in pdu.items() if key != "signatures"} | changes
    return sign(bare, version, by, signing_key(by))


def forged(pdu: Json, version: str) -> Json:
    return sign(pdu | {"signatures": {}}, version, "s1.test", foreign_signing_key("s1.test"))


def with_name(change: Callable[[Json, str], object]) -> Callable[[list[Json], str], list[Any]]:
    """Show the name otherwise."""
    return lambda shown, version: [
        change(one, version) if one["type"] == "m.room.name" else one for one in shown
    ]


FAULTS: Final[dict[str, tuple[Callable[[list[Json], str], list[Any]], frozenset[str]]]] = {
    "nothing": (lambda _, __: [], frozenset()),
    "no create event": (
        lambda shown, _: [one for one in shown if one["type"] != "m.room.create"],
        TYPES - {"m.room.create"},
    ),
    "stripped events": (
        lambda shown, _: [{key: one[key] for key in STRIPPED} for one in shown],
        frozenset(),
    ),
    "an event of another room": (
        with_name(lambda one, version: signed_anew(one, version, room_id="!other:s1.test")),
        TYPES - {"m.room.name"},
    ),
    "a wrong signature": (with_name(forged), TYPES - {"m.room.name"}),
    "no signature": (with_name(lambda one, _: one | {"signatures": {}}), TYPES - {"m.room.name"}),
    "no state event": (
        with_name(
            lambda one, version: signed_anew(
                {key: value for key, value in one.items() if key != "state_key"}, version
            )
        ),
        TYPES - {"m.room.name"},
    ),
    "no event": (with_name(lambda _, __: "m.room.name"), TYPES - {"m.room.name"}),
}
"""What an invite may show, and the types that are left of it."""


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


@pytest.mark.parametrize("version", ["1", "6", "11", "12"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_an_invite_shows_is_checked(
    two: list[Homeserver], version: str, fault: str
) -> None:
    one, other = two
    name = ("m.room.name", "", {"name": "Jam"})
    rules = [name, ("m.room.history_visibility", "", {"history_visibility": "shared"})]
    rules.append(("m.room.join_rules", "", {"join_rule": "invite"}))
    how: Json = {"room_version": version, "initial_state": rules}
    room_id = await one.store.create_room(one.user(), **how)
    sent = await invite(one, room_id, other.user())
    sent["unsigned"] = {"invite_room_state": [NAME]}  # there it would not be checked
    change, left = FAULTS[fault]
    shown = change(await state_pdus(one, room_id), version)
    body = {"event": sent, "room_version": version, "invite_room_state": shown}
    asked = other.responder.invite(one.name, room_id, event_id(sent, version), body)
    if version == "12":
        with pytest.raises(InputError) as refused:
            await asked
        status, error = responses.error(refused.value)
        assert (status, error["errcode"]) == (400, "M_INVALID_PARAM")
        assert (await other.store.sync(other.user())).invite == {}
        return
    assert (await asked)["event"]["signatures"].keys() == {"s1.test", "s2.test"}
    found = (await other.store.sync(other.user())).invite[room_id].invite_state
    assert {one["type"] for one in found} == left | {"m.room.member"}
    assert all(tuple(sorted(one)) == tuple(sorted(STRIPPED)) for one in found)


async def test_a_server_that_is_gone_for_ever_costs_a_name_and_no_invite(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    sent = await invite(one, room_id, other.user())
    shown = await state_pdus(one, room_id)
    gone = shown[0] | {"type": "m.room.name", "sender": "@user:s9.test", "content": {"name": "x"}}
    gone = signed_anew(gone, "12", by="s9.test", room_id=room_id, state_key="")
    other.network.faults["s9.test", "server_keys"] = fail
    body = {"event": sent, "room_version": "12", "invite_room_state": [*shown, gone]}
    await other.responder.invite(one.name, room_id, event_id(sent, "12"), body)
    found = (await other.store.sync(other.user())).invite[room_id].invite_state
    assert "m.room.create" in {one["type"] for one in found}
    assert "m.room.name" not in {one["type"] for one in found}


async def test_a_room_of_version_12_is_no_room_of_another_version(two: list[Homeserver]) -> None:
    """Else the check of what it shows could be escaped."""
    one, other = two
    room_id = await one.store.create_room(one.user())
    sent = signed_anew(await invite(one, room_id, other.user()), "11")
    body = {"event": sent, "room_version": "11", "invite_room_state": []}
    with pytest.raises(InputError, match="no room of version"):
        await other.responder.invite(one.name, room_id, event_id(sent, "11"), body)


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
    take = one.responder.take_membership
    answer = await take("s2.test", "knock", room_id, event_id(knock, "12"), knock)
    shown = [parse(pdu, "12") for pdu in answer["knock_room_state"]]
    assert {pdu.type for pdu in shown} == {"m.room.create", "m.room.join_rules"}
    for pdu in shown:
        assert pdu.room_id == room_id
        verify(pdu.json, "12", "s1.test", verify_key("s1.test"))
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


async def test_a_client_is_not_blamed_for_what_an_invite_shows(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user())
    for errcode, expected in (
        ("M_INVALID_PARAM", (502, "M_UNKNOWN")),
        ("M_MISSING_PARAM", (502, "M_UNKNOWN")),
        ("M_FORBIDDEN", (400, "M_FORBIDDEN")),
    ):

        async def refuse(_: Json, errcode: str = errcode) -> Json:
            raise RemoteError("no", status=400, errcode=errcode)

        one.network.faults["s2.test", "invite"] = refuse
        with pytest.raises(RemoteError) as refused:
            await one.memberships.invite(one.user(), room_id, other.user())
        status, form = responses.error(refused.value)
        assert (status, form["errcode"]) == expected
        assert refused.value.errcode == errcode


@pytest.mark.parametrize("version", ["1", "3", "6", "10", "11", "12"])
async def test_an_invite_shows_events_of_the_version_of_the_room(
    two: list[Homeserver], version: str
) -> None:
    one, other = two
    named = ("m.room.name", "", {"name": "Jam"})
    how: Json = {"room_version": version, "initial_state": [named]}
    room_id = await one.store.create_room(one.user(), **how)
    bodies = []
    asked = other.responder.invite

    async def invite(origin: str, room: RoomId, event_id: str, body: Json) -> Json:
        bodies.append(body)
        return await asked(origin, room, event_id, body)

    other.responder.invite = invite  # type: ignore[method-assign,assignment]
    await one.memberships.invite(one.user(), room_id, other.user())
    [body] = bodies
    state = await one.store.current_state(room_id, types=["m.room.create", "m.room.name"])
    shown = {parse(pdu, version).event_id for pdu in body["invite_room_state"]}
    assert set(state.values()) <= shown
    found = (await other.store.sync(other.user())).invite[room_id].invite_state
    assert len(found) == len(shown) + 1
    assert all(one.keys() == {"type", "state_key", "sender", "content"} for one in found)


async def test_an_invite_goes_to_the_servers_in_the_room(two: list[Homeserver]) -> None:
    """The invited server has got it already. A leave that ends it is sent to that server."""
    one, other = two
    alone, shared = await one.store.create_room(one.user()), await shared_room(one, other)
    for room_id, servers in ((alone, set[str]()), (shared, {"s2.test"})):
        guest = other.user("guest")
        invite = await one.memberships.invite(one.user(), room_id, guest)
        kick = {"membership": "leave"}
        kicked = await one.store.send(room_id, one.user(), "m.room.member", kick, state_key=guest)
        sent = {one.event_id: set(one.servers) for one in await one.store.outbox(0)}
        assert sent[EventId(invite.event_id or "")] == servers
        assert sent[EventId(kicked.event_id or "")] == {"s2.test"}
