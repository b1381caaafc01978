"""The rules on an event's own auth events, and which ones are to be chosen."""

from collections.abc import Mapping

import pytest

from storage.auth import auth_event_keys, check_auth_events, keys_needed
from storage.errors import AuthDenied
from storage.event import Event
from storage.ids import EventId
from tests.auth.events import CREATOR, make_create, make_event, member

CREATE = ("m.room.create", "")
POWER = ("m.room.power_levels", "")
RULES = ("m.room.join_rules", "")
NOBODY: frozenset[EventId] = frozenset()


def room(version: str) -> dict[EventId, Event]:
    create = make_create(version)
    power = make_event(
        version,
        "$power:a",
        *("m.room.power_levels", CREATOR, "", {"users": {}}),
        room_id=create.room_id,
    )
    rules = make_event(
        version,
        "$rules:a",
        *("m.room.join_rules", CREATOR, "", {"join_rule": "public"}),
        room_id=create.room_id,
    )
    joined = member(version, CREATOR, "join", room_id=create.room_id)
    guest = member(version, "@guest:b", "join", room_id=create.room_id)
    return {e.event_id: e for e in (create, power, rules, joined, guest)}


def message(version: str, *auth: str, room_id: str | None = None) -> Event:
    events = room(version)
    return make_event(
        version,
        "$message:a",
        "m.room.message",
        CREATOR,
        None,
        room_id=room_id or events[EventId("$create:a")].room_id,
        auth=auth,
    )


def denied_rule(
    event: Event, events: dict[EventId, Event], rejected: frozenset[EventId] = NOBODY
) -> str:
    with pytest.raises(AuthDenied) as denial:
        check_auth_events(event, events, rejected)
    return denial.value.rule


@pytest.mark.parametrize("version", ["1", "6", "11"])
def test_right_auth_events_pass(version: str) -> None:
    check_auth_events(
        message(version, "$create:a", "$power:a", "$m-creator:a"), room(version), NOBODY
    )
    check_auth_events(message(version, "$create:a", "$m-creator:a"), room(version), NOBODY)


def test_version_12_names_its_create_event_by_the_room_id_only() -> None:
    events = room("12")
    check_auth_events(message("12", "$power:a", "$m-creator:a"), events, NOBODY)
    assert (
        denied_rule(message("12", "$create:a", "$power:a", "$m-creator:a"), events)
        == "auth_events.superfluous"
    )
    assert (
        denied_rule(message("12", "$m-creator:a"), events, frozenset({EventId("$create:a")}))
        == "room.create_rejected"
    )
    del events[EventId("$create:a")]
    assert denied_rule(message("12", "$m-creator:a"), events) == "room.no_create"
    events = room("12")
    elsewhere = message("12", room_id="!power:a")
    assert denied_rule(elsewhere, events) == "room.no_create"


@pytest.mark.parametrize("version", ["1", "11"])
def test_wrong_auth_events_are_refused(version: str) -> None:
    events = room(version)
    full = ("$create:a", "$power:a", "$m-creator:a")
    assert (
        denied_rule(message(version, "$power:a", "$m-creator:a"), events) == "auth_events.no_create"
    )
    assert denied_rule(message(version, *full, "$power:a"), events) == "auth_events.duplicate"
    assert denied_rule(message(version, *full, "$rules:a"), events) == "auth_events.superfluous"
    assert denied_rule(message(version, *full, "$m-guest:b"), events) == "auth_events.superfluous"
    assert denied_rule(message(version, *full, "$unknown:a"), events) == "auth_events.missing"
    assert (
        denied_rule(message(version, *full), events, frozenset({EventId("$power:a")}))
        == "auth_events.rejected"
    )
    assert denied_rule(message(version, "$create:a", "$power:a"), events) == "sender.not_joined"
    events[EventId("$message2:a")] = make_event(version, "$message2:a", "m.room.message", CREATOR)
    assert denied_rule(message(version, *full, "$message2:a"), events) == "auth_events.superfluous"
    second = make_event(version, "$power2:a", "m.room.power_levels", CREATOR, "", {})
    assert (
        denied_rule(message(version, *full, "$power2:a"), events | {second.event_id: second})
        == "auth_events.duplicate"
    )
    foreign = make_event(
        version, "$power:a", "m.room.power_levels", CREATOR, "", {}, room_id="!other:a"
    )
    assert (
        denied_rule(message(version, *full), events | {foreign.event_id: foreign})
        == "auth_events.other_room"
    )


def test_rejected_events_that_are_not_cited_do_not_matter() -> None:
    check_auth_events(
        message("10", "$create:a", "$m-creator:a"),
        room("10"),
        frozenset({EventId("$power:a"), EventId("$rules:a")}),
    )


def test_a_create_event_is_judged_by_itself() -> None:
    check_auth_events(make_create("10"), {}, NOBODY)
    cited = make_event(
        "10",
        "$create:a",
        *("m.room.create", CREATOR, "", {"creator": CREATOR}),
        prev=(),
        auth=["$nothing:a"],
    )
    check_auth_events(cited, {}, NOBODY)
    assert (
        denied_rule(make_event("10", "$create:a", "m.room.create", CREATOR, "", {}, prev=()), {})
        == "create.creator"
    )


def test_what_a_message_needs() -> None:
    event = message("11")
    assert keys_needed(event) == {CREATE, POWER, ("m.room.member", CREATOR)}
    assert auth_event_keys(event) == keys_needed(event)
    event = message("12")
    assert keys_needed(event) == {CREATE, POWER, ("m.room.member", CREATOR)}
    assert auth_event_keys(event) == {POWER, ("m.room.member", CREATOR)}
    assert keys_needed(make_create("11")) == auth_event_keys(make_create("12")) == set()


def needed_beyond_a_message(version: str, content: Mapping[str, object]) -> set[tuple[str, str]]:
    return keys_needed(
        make_event(version, "$m:a", "m.room.member", CREATOR, "@x:b", content)
    ) - keys_needed(message(version))


@pytest.mark.parametrize("membership", ["join", "invite", "knock"])
def test_what_entering_needs(membership: object) -> None:
    assert needed_beyond_a_message("10", {"membership": membership}) == {
        RULES,
        ("m.room.member", "@x:b"),
    }


@pytest.mark.parametrize("membership", ["leave", "ban", "other", 7, None])
def test_what_other_memberships_need(membership: object) -> None:
    content = {
        "membership": membership,
        "join_authorised_via_users_server": "@y:c",
        "third_party_invite": {"signed": {"token": "t"}},
    }
    assert needed_beyond_a_message("10", content) == {("m.room.member", "@x:b")}


def test_what_special_memberships_need() -> None:
    invite = {
        "membership": "invite",
        "third_party_invite": {"signed": {"token": "t"}},
        "join_authorised_via_users_server": "@y:c",
    }
    assert needed_beyond_a_message("10", invite) == {
        RULES,
        ("m.room.member", "@x:b"),
        ("m.room.third_party_invite", "t"),
    }
    join = {
        "membership": "join",
        "third_party_invite": {"signed": {"token": "t"}},
        "join_authorised_via_users_server": "@y:c",
    }
    assert needed_beyond_a_message("7", join) == {RULES, ("m.room.member", "@x:b")}
    assert needed_beyond_a_message("8", join) == {
        RULES,
        ("m.room.member", "@x:b"),
        ("m.room.member", "@y:c"),
    }


@pytest.mark.parametrize(
    "broken", [None, "x", [], {}, {"signed": None}, {"signed": {}}, {"signed": {"token": 3}}]
)
def test_a_broken_third_party_invite_needs_no_token(broken: object) -> None:
    content = {"membership": "invite", "third_party_invite": broken}
    assert needed_beyond_a_message("10", content) == {RULES, ("m.room.member", "@x:b")}


@pytest.mark.parametrize(
    "version,auth,rejected,reason",
    [
        ("11", ("$create:a", "$unknown:a"), "", "$unknown:a is not stored"),
        ("11", ("$create:a", "$power:a"), "$power:a", "$power:a is rejected"),
        ("11", ("$create:a", "$elsewhere:a"), "", "$elsewhere:a is of room !other:a, not !room:a"),
        ("11", ("$create:a", "$rules:a"), "", "$rules:a is m.room.join_rules with state key ''"),
        (
            "11",
            ("$power:a", "$power:a"),
            "",
            "$power:a and $power:a are both ('m.room.power_levels', '')",
        ),
        ("11", ("$power:a",), "", "no create event among the auth events"),
        ("12", ("$power:a",), "$create:a", "create event $create:a is rejected"),
    ],
)
def test_a_refusal_names_the_auth_event(
    version: str, auth: tuple[str, ...], rejected: str, reason: str
) -> None:
    events = room(version)
    events[EventId("$elsewhere:a")] = member(version, CREATOR, "join", room_id="!other:a")
    with pytest.raises(AuthDenied) as denial:
        check_auth_events(message(version, *auth), events, frozenset({EventId(rejected)}))
    assert denial.value.reason == reason


def test_a_room_id_of_version_12_must_name_a_create_event() -> None:
    with pytest.raises(AuthDenied) as denial:
        check_auth_events(message("12", room_id="!power:a"), room("12"), NOBODY)
    assert denial.value.reason == "room id !power:a does not name a create event that is stored"


def test_a_create_event_needs_no_auth_events() -> None:
    for version in ("1", "11", "12"):
        check_auth_events(make_create(version, sender="@creator:a"), {}, NOBODY)
