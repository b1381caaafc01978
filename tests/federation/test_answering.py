"""Responses to other servers: what they may have, and requests that are false."""

from collections.abc import Iterable
from typing import Any

import pytest

from storage import (
    AuthDenied,
    EventId,
    InputError,
    PartialState,
    RoomId,
    UnknownEvent,
    UnknownRoom,
    responses,
)
from storage.event import event_id, sign
from storage.federation import IncompatibleRoomVersion, RemoteError, Responder, Sender
from storage.queries.events import StoredEvent
from storage.testing import signing_key
from tests.federation.partial import join_partially
from tests.federation.peers import Homeserver
from tests.federation.rooms import PUBLIC, agree, shared_room, state_pdus

Json = dict[str, Any]


async def test_a_join_is_made_for_users_of_the_server_in_versions_that_it_knows(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    make, user = one.responder.make_membership, other.user()
    made = await make("s2.test", "join", room_id, user, ["11", "12"])
    assert made["room_version"] == "12"
    with pytest.raises(IncompatibleRoomVersion) as refused:
        await make("s2.test", "join", room_id, user, ["10"])
    assert responses.error(refused.value) == (
        400,
        {
            "errcode": "M_INCOMPATIBLE_ROOM_VERSION",
            "error": f"{room_id} has version 12",
            "room_version": "12",
        },
    )
    with pytest.raises(AuthDenied, match="no user of"):
        await make("s3.test", "join", room_id, user, ["12"])
    with pytest.raises(AuthDenied):
        await make("s2.test", "knock", room_id, user, ["12"])
    with pytest.raises(InputError):
        await make("s2.test", "ban", room_id, user, ["12"])
    with pytest.raises(UnknownRoom):
        await make("s2.test", "join", RoomId("!none"), user, ["12"])
    for version in ("1", "2", "6"):
        how: Json = {"room_version": version, "initial_state": [PUBLIC]}
        old = await one.store.create_room(one.user(), **how)
        if version == "1":  # that is what no version means
            assert (await make("s2.test", "join", old, user))["room_version"] == "1"
        else:
            with pytest.raises(IncompatibleRoomVersion):
                await make("s2.test", "join", old, user)


async def signed_join(one: Homeserver, other: Homeserver, room_id: RoomId, **changes: Any) -> Json:
    made = await one.responder.make_membership("s2.test", "join", room_id, other.user(), ["12"])
    return sign(made["event"] | changes, "12", "s2.test", signing_key("s2.test"))


async def test_only_the_event_of_the_path_is_taken(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    other_room = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    join = await signed_join(one, other, room_id)
    take, join_id = one.responder.take_membership, event_id(join, "12")
    for origin, change, room, id_, pdu in (
        ("s2.test", "join", room_id, "$other", join),
        ("s2.test", "join", other_room, join_id, join),
        ("s2.test", "knock", room_id, join_id, join),
        ("s2.test", "ban", room_id, join_id, join),
        ("s3.test", "join", room_id, join_id, join),
        ("s2.test", "join", room_id, join_id, {}),
        ("s2.test", "join", room_id, join_id, []),
    ):
        with pytest.raises(InputError):
            await take(origin, change, room, id_, pdu)  # type: ignore[arg-type]
    unsigned = join | {"signatures": {}}
    with pytest.raises(AuthDenied):
        await take("s2.test", "join", room_id, join_id, unsigned)
    assert await one.store.membership(room_id, other.user()) is None
    found = await take("s2.test", "join", room_id, join_id, join)
    assert {one["type"] for one in found["state"]} >= {"m.room.create", "m.room.join_rules"}
    assert found["event"] == join
    assert await take("s2.test", "join", room_id, join_id, join) == found


def ids_of(pdus: Iterable[Json]) -> set[str]:
    return {event_id(pdu, "12") for pdu in pdus}


def users_in(response: Json) -> set[str]:
    """The users whose membership is in the state of a response."""
    return {pdu["state_key"] for pdu in response["state"] if pdu["type"] == "m.room.member"}


@pytest.mark.parametrize("is_named", [True, False])
async def test_members_are_omitted_on_request(three: list[Homeserver], *, is_named: bool) -> None:
    one, other, third = three
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    for number in range(8):
        user = one.user(f"m{number}")
        join = {"membership": "join"}
        await one.do(room_id, f"m{number}", "m.room.member", join, state_key=user)
    if is_named:
        await one.do(room_id, "user", "m.room.name", {"name": "Jam"}, state_key="")
    assert (await third.join(room_id, one)).outcome == "joined"
    invite = {"membership": "invite"}
    await one.do(room_id, "m5", "m.room.member", invite, state_key=other.user())
    join = await signed_join(one, other, room_id)
    take, path = one.responder.take_membership, (room_id, event_id(join, "12"))
    small = await take("s2.test", "join", *path, join, omit_members=True)
    assert (small["members_omitted"], small["servers_in_room"]) == (True, ["s1.test", "s3.test"])
    assert await take("s2.test", "join", *path, join, omit_members=True) == small
    whole = await take("s2.test", "join", *path, join)
    assert not {"members_omitted", "servers_in_room"} & whole.keys()
    assert small["event"] == whole["event"]

    def others(response: Json) -> list[Json]:
        found = [pdu for pdu in response["state"] if pdu["type"] != "m.room.member"]
        return sorted(found, key=lambda pdu: str(pdu["type"]))

    assert others(small) == others(whole)
    heroes = set() if is_named else {one.user(), *(one.user(f"m{number}") for number in range(4))}
    assert users_in(small) == {other.user(), *heroes}
    given, kept = ids_of(small["state"]), ids_of(small["auth_chain"])
    assert not given & kept
    assert given < ids_of(whole["state"])
    assert kept <= ids_of([*whole["auth_chain"], *whole["state"]])
    cited = {one_id for pdu in small["state"] for one_id in pdu["auth_events"]}
    assert cited | set(join["auth_events"]) <= given | kept
    joined = await other.receiver.joined("s1.test", join, small, "12")
    assert (joined.outcome, joined.is_partial, joined.left_out) == ("joined", True, {})
    [partial] = await other.store.partial_rooms()
    assert partial.servers == {"s1.test", "s3.test"}
    assert await other.receiver.complete(room_id)
    await agree(room_id, one, other)


async def test_the_state_before_a_join_is_that_of_its_parents(two: list[Homeserver]) -> None:
    """Members and heroes are not those of the current state."""
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    join = await signed_join(one, other, room_id)
    await one.do(
        room_id, "late", "m.room.member", {"membership": "join"}, state_key=one.user("late")
    )
    await one.do(room_id, "user", "m.room.topic", {"topic": "later"}, state_key="")
    found = await one.responder.take_membership(
        "s2.test", "join", room_id, event_id(join, "12"), join, omit_members=True
    )
    assert users_in(found) == {one.user()}
    assert "m.room.topic" not in {pdu["type"] for pdu in found["state"]}
    assert found["servers_in_room"] == ["s1.test"]


async def test_members_are_not_known_while_the_own_state_is_partial(
    three: list[Homeserver],
) -> None:
    one, other, third = three
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    assert (await join_partially(room_id, other, one)).is_partial
    join = await one.responder.make_membership(third.name, "join", room_id, third.user(), ["12"])
    pdu = sign(join["event"], "12", third.name, signing_key(third.name))
    with pytest.raises(PartialState):
        await other.responder.take_membership(
            third.name, "join", room_id, event_id(pdu, "12"), pdu, omit_members=True
        )
    assert await other.store.event(EventId(event_id(pdu, "12"))) is None


async def test_a_refused_join_is_refused_again(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    join = await signed_join(one, other, room_id)
    ban = {"membership": "ban"}
    await one.do(room_id, "user", "m.room.member", ban, state_key=other.user())
    for _ in range(2):
        with pytest.raises(AuthDenied):
            await one.responder.take_membership(
                "s2.test", "join", room_id, event_id(join, "12"), join
            )
    assert await one.store.membership(room_id, other.user()) == "ban"


async def test_an_accepted_join_is_passed_on_to_the_others(three: list[Homeserver]) -> None:
    one, other, third = three
    room_id = await shared_room(one, third)
    passed: list[tuple[set[str], str]] = []

    class RecordingSender(Sender):
        """Records instead of sending."""

        async def pass_on(self, servers: Any, event: StoredEvent) -> None:
            passed.append((set(servers), event.event_id))

    async def send(*_: Any) -> None:
        """Send nothing."""

    responder = Responder(one.receiver, RecordingSender(one.store, send))
    join = await signed_join(one, other, room_id)
    join_id = event_id(join, "12")
    await responder.take_membership("s2.test", "join", room_id, join_id, join)
    assert [(servers - {"s1.test"}, id_) for servers, id_ in passed] == [({"s3.test"}, join_id)]


async def test_history_and_states_are_for_servers_in_the_room(three: list[Homeserver]) -> None:
    one, other, third = three
    room_id = await shared_room(one, other)
    elsewhere = await one.store.create_room(one.user())
    said = [await one.say(room_id, f"message {number}") for number in range(3)]
    first, last = EventId(event_id(said[0], "12")), EventId(event_id(said[-1], "12"))
    answers, origin = one.responder, "s2.test"
    assert (await answers.event(origin, last))["pdus"] == [said[-1]]
    assert (await answers.backfill(origin, room_id, [last], 2))["pdus"] == said[:0:-1]
    between = {"earliest_events": [first], "latest_events": [last]}
    assert (await answers.missing_events(origin, room_id, between))["events"] == [said[1]]
    ids, states = (
        await answers.state_ids(origin, room_id, last),
        await answers.state(origin, room_id, last),
    )
    assert {event_id(pdu, "12") for pdu in states["pdus"]} == set(ids["pdu_ids"])
    assert {event_id(pdu, "12") for pdu in states["auth_chain"]} == set(ids["auth_chain_ids"])
    assert (await answers.event_auth(origin, room_id, last))["auth_chain"]
    at = said[1]["origin_server_ts"]
    near = await answers.timestamp_to_event(origin, room_id, at, "b")
    assert near["origin_server_ts"] <= at
    for request in (answers.state_ids, answers.state, answers.event_auth):
        with pytest.raises(AuthDenied):
            await request(third.name, room_id, last)
        with pytest.raises(UnknownEvent):
            await request(origin, elsewhere, last)
        with pytest.raises(UnknownEvent):
            await request(origin, room_id, "$none")
    with pytest.raises(AuthDenied):
        await answers.timestamp_to_event(third.name, room_id, at, "b")
    with pytest.raises(UnknownEvent):
        await answers.timestamp_to_event(origin, room_id, 1, "b")
    with pytest.raises(UnknownEvent):
        await answers.event(third.name, last)


@pytest.mark.parametrize("visibility", ["joined", "shared", "world_readable"])
async def test_a_server_that_has_left_gets_only_what_it_may_see(
    two: list[Homeserver], visibility: str
) -> None:
    """A server in the room gets the rest in the redacted form."""
    one, other = two
    content = {"history_visibility": visibility}
    state = [PUBLIC, ("m.room.history_visibility", "", content)]
    room_id = await one.store.create_room(one.user(), initial_state=state)
    answers, origin, before = one.responder, other.name, await one.say(room_id, "before")
    await other.join(room_id, one)
    inside = await one.say(room_id, "inside")
    inside_id = EventId(event_id(inside, "12"))
    whole = (await answers.backfill(origin, room_id, [inside_id], 100))["pdus"]
    assert (before in whole) is (visibility != "joined")
    assert event_id(before, "12") in ids_of(whole)
    made = await answers.make_membership(origin, "leave", room_id, other.user())
    leave = sign(made["event"], "12", origin, signing_key(origin))
    leave_id = event_id(leave, "12")
    await answers.take_membership(origin, "leave", room_id, leave_id, leave)
    power = {"users": {one.user("other"): 50}}
    levels = await one.do(room_id, "user", "m.room.power_levels", power, state_key="")
    last_id = event_id(await one.say(room_id, "last"), "12")

    events = [before, inside, leave, levels]
    shown = {"joined": events[1:3], "shared": events[:3], "world_readable": events}[visibility]
    for found in (
        (await answers.backfill(origin, room_id, [last_id], 100))["pdus"][::-1],
        (await answers.missing_events(origin, room_id, {"latest_events": [last_id], "limit": 100}))[
            "events"
        ],
    ):
        assert [pdu for pdu in found if pdu in events] == shown
        assert ids_of(events) & ids_of(found) == ids_of(shown)
    for event in events:
        request = answers.event(origin, EventId(event_id(event, "12")))
        if event in shown:
            assert (await request)["pdus"] == [event]
        else:
            with pytest.raises(UnknownEvent):
                await request


async def test_ids_that_are_no_text_are_unknown(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    wrongs: list[Any] = [[], {}, 7, None]
    for wrong in wrongs:
        with pytest.raises(UnknownEvent):
            await one.responder.event(other.name, wrong)
        with pytest.raises(UnknownEvent):
            await one.responder.state_ids(other.name, room_id, wrong)


async def test_malformed_bodies_are_refused(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    answers = one.responder
    sent = await other.do(
        room_id, "user", "m.room.member", {"membership": "invite"}, state_key=one.user("guest")
    )
    shown = await state_pdus(other, room_id)
    invite = {"event": sent, "room_version": "12", "invite_room_state": shown}
    for body in (
        {},
        invite | {"event": [sent]},
        invite | {"room_version": 12},
        invite | {"room_version": "org.none"},
        invite | {"invite_room_state": "none"},
    ):
        with pytest.raises(InputError):
            await answers.invite(other.name, room_id, event_id(sent, "12"), body)
    for origin, room, id_ in (
        (other.name, room_id, "$other"),
        (other.name, "!other", event_id(sent, "12")),
        ("s3.test", room_id, event_id(sent, "12")),
    ):
        with pytest.raises(InputError) as refused:
            await answers.invite(origin, RoomId(room), id_, invite)
        assert responses.error(refused.value)[1]["errcode"] == "M_INVALID_PARAM"
    with pytest.raises(IncompatibleRoomVersion):
        unknown = invite | {"room_version": "org.none"}
        await answers.invite(other.name, room_id, event_id(sent, "12"), unknown)
    assert (await answers.invite(other.name, room_id, event_id(sent, "12"), invite))["event"]
    for call in (
        answers.transaction("s2.test", {"pdus": {}}),
        answers.missing_events("s2.test", room_id, {"earliest_events": "$a"}),
        answers.missing_events("s2.test", room_id, {"limit": "ten"}),
        answers.timestamp_to_event("s2.test", room_id, 5, "up"),
        answers.timestamp_to_event("s2.test", room_id, 5, ["b"]),  # type: ignore[arg-type]
        answers.transaction("s2.test", []),  # type: ignore[arg-type]
        answers.invite("s2.test", room_id, "$any", None),  # type: ignore[arg-type]
        answers.missing_events("s2.test", room_id, "body"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError):
            await call


async def test_a_transaction_names_what_was_refused(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    said = await one.say(room_id, "hello")
    forged = sign(said | {"content": {}}, "12", "s2.test", signing_key("s2.test"))
    del forged["signatures"]["s1.test"]
    found = await other.responder.transaction("s1.test", {"pdus": [said, forged]})
    assert found["pdus"][event_id(said, "12")] == {}
    assert "signature" in found["pdus"][event_id(forged, "12")]["error"]


def test_errors_of_other_servers_have_a_status() -> None:
    for status, errcode, expected in (
        (403, "M_FORBIDDEN", (403, "M_FORBIDDEN")),
        (404, None, (404, "M_UNKNOWN")),
        (401, "M_UNKNOWN_TOKEN", (502, "M_UNKNOWN")),
        (429, "M_LIMIT_EXCEEDED", (502, "M_UNKNOWN")),
        (None, None, (502, "M_UNKNOWN")),
    ):
        found, body = responses.error(RemoteError("why", status=status, errcode=errcode))
        assert (found, body) == (expected[0], {"errcode": expected[1], "error": "why"})
    errcode = "M_INCOMPATIBLE_ROOM_VERSION"
    passed_on = RemoteError("why", status=400, errcode=errcode, room_version="9")
    form = {"errcode": errcode, "error": "why", "room_version": "9"}
    assert responses.error(passed_on) == (400, form)


async def test_nobody_joins_through_a_server_that_has_left(three: list[Homeserver]) -> None:
    one, other, third = three
    room_id = await shared_room(one, other)
    await other.memberships.leave(other.user(), room_id)
    make, take = other.responder.make_membership, other.responder.take_membership
    for change in ("join", "leave"):
        with pytest.raises(UnknownRoom):
            await make(third.name, change, room_id, third.user(), ["12"])
    join = await one.responder.make_membership(third.name, "join", room_id, third.user(), ["12"])
    pdu = sign(join["event"], "12", third.name, signing_key(third.name))
    with pytest.raises(UnknownRoom):
        await take(third.name, "join", room_id, event_id(pdu, "12"), pdu)
