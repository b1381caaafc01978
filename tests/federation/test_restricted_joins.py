"""Nobody enters a restricted room who is in none of the allowed rooms, whatever a server sends."""

from typing import Any

import pytest

from storage import AuthDenied, EventId, RoomId, responses
from storage.event import event_id, sign
from storage.testing import signing_key
from tests.federation.peers import Homeserver, as_json
from tests.federation.rooms import PUBLIC, agree, shared_room

AUTHORISER = "join_authorised_via_users_server"
VERSIONS = ("8", "11", "12")
JOIN = {"membership": "join"}


def restricted(*spaces: RoomId) -> tuple[str, str, dict[str, Any]]:
    allow = [{"type": "m.room_membership", "room_id": space} for space in spaces]
    return "m.room.join_rules", "", {"join_rule": "restricted", "allow": allow}


async def json_of(server: Homeserver, event_id: EventId | None) -> dict[str, Any]:
    assert event_id is not None
    event = await server.store.event(event_id)
    assert event is not None
    return as_json(event)


async def crafted_join(
    server: Homeserver, room_id: RoomId, version: str, user: str
) -> dict[str, Any]:
    """A join that was made without a template, by somebody who knows the heads and the state."""
    state = await server.store.current_state(room_id)
    keys = [("m.room.power_levels", ""), ("m.room.join_rules", "")]
    keys += [("m.room.member", server.user())]
    keys += [] if version == "12" else [("m.room.create", "")]
    pdu = {
        "type": "m.room.member",
        "room_id": room_id,
        "sender": user,
        "state_key": user,
        "content": {"membership": "join", AUTHORISER: server.user()},
        "depth": 20,
        "origin_server_ts": 1_700_000_000_000,
        "prev_events": list(await server.store.forward_extremities(room_id)),
        "auth_events": [state[key] for key in keys],
    }
    return sign(pdu, version, "s2.test", signing_key("s2.test"))


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_join_without_a_template_is_checked(two: list[Homeserver], version: str) -> None:
    one, other = two
    space = await shared_room(one, other)
    room_id = await one.store.create_room(
        one.user(), room_version=version, initial_state=[restricted(space)]
    )
    take = one.responder.take_membership
    stranger = other.user("stranger")
    pdu = await crafted_join(one, room_id, version, stranger)
    with pytest.raises(AuthDenied, match=r"member\.join\.not_allowed"):
        await take("s2.test", "join", room_id, event_id(pdu, version), pdu)
    assert await one.store.membership(room_id, stranger) is None
    assert await one.store.event(event_id(pdu, version)) is None
    pdu = await crafted_join(one, room_id, version, other.user())
    response = await take("s2.test", "join", room_id, event_id(pdu, version), pdu)
    assert response["event"]["signatures"].keys() == {"s1.test", "s2.test"}
    repeated = await take("s2.test", "join", room_id, event_id(pdu, version), pdu)
    assert repeated["event"] == response["event"]


async def test_a_client_does_not_name_who_authorises_it(two: list[Homeserver]) -> None:
    one, other = two
    space = await shared_room(one, other, version="11")
    room_id = await one.store.create_room(
        one.user(), room_version="11", initial_state=[restricted(space)]
    )
    named = {AUTHORISER: one.user()}
    with pytest.raises(AuthDenied, match=r"member\.join\.not_allowed"):
        await one.memberships.join(one.user("stranger"), room_id, content=named)
    public = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    joined = await other.memberships.join(other.user(), public, ["s1.test"], content=named)
    assert (await json_of(other, joined.event_id))["content"] == JOIN


async def test_another_server_lets_in_whom_this_one_may_not(two: list[Homeserver]) -> None:
    one, other = two
    space = await shared_room(one, other, version="11")
    levels = ("m.room.power_levels", "", {"users": {one.user(): 100}, "invite": 50})
    room_id = await one.store.create_room(
        one.user(), room_version="11", initial_state=[restricted(space), levels]
    )
    await other.memberships.join(other.user(), room_id, ["s1.test"])
    guest = other.user("guest")
    entered = await other.memberships.join(guest, space)
    await one.receive(other, [await json_of(other, entered.event_id)])
    with pytest.raises(AuthDenied) as refused:
        await other.store.send(room_id, guest, "m.room.member", JOIN, state_key=guest)
    assert responses.error(refused.value)[:1] == (400,)
    assert responses.error(refused.value)[1]["errcode"] == "M_UNABLE_TO_GRANT_JOIN"
    joined = await other.memberships.join(guest, room_id)
    assert joined.outcome == "joined"
    assert await one.store.membership(room_id, guest) == "join"
    assert (await json_of(other, joined.event_id))["content"][AUTHORISER] == one.user()
    await agree(room_id, one, other)


async def test_a_server_that_cannot_check_says_so(two: list[Homeserver]) -> None:
    one, other = two
    space = await other.store.create_room(other.user(), initial_state=[PUBLIC])
    room_id = await one.store.create_room(one.user(), initial_state=[restricted(space)])
    with pytest.raises(AuthDenied) as refused:
        await one.responder.make_membership("s2.test", "join", room_id, other.user(), ["12"])
    assert responses.error(refused.value)[0] == 400
    assert responses.error(refused.value)[1]["errcode"] == "M_UNABLE_TO_AUTHORISE_JOIN"
    with pytest.raises(AuthDenied, match=r"member\.join\.cannot_check"):
        await one.memberships.join(one.user("guest"), room_id)
