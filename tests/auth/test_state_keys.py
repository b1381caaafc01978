"""Ids taken apart, and the state keys that an event's authorisation looks at."""

import pytest

from storage.auth import auth_event_keys, keys_needed
from storage.auth.auth_events import third_party_token
from storage.auth.state_keys import domain_of, is_user_id
from tests.auth.events import make_create, make_event

USER_IDS = {
    "@a:b": True,
    "@:b": True,
    "@a:b:8448": True,
    "@a:b:": True,
    "@A/ü:b": True,
    "@" + "a" * 252 + ":b": True,
    "@" + "a" * 253 + ":b": False,
    "@" + "é" * 127 + ":b": False,
    "@a:": False,
    "@a": False,
    "a:b": False,
    "!a:b": False,
    "": False,
}


@pytest.mark.parametrize("text", USER_IDS)
def test_a_user_id_has_a_sigil_a_server_and_255_bytes(text: str) -> None:
    assert is_user_id(text) is USER_IDS[text]


@pytest.mark.parametrize("value", [None, 5, ["@a:b"], {"@a:b": 1}])
def test_only_text_is_a_user_id(value: object) -> None:
    assert is_user_id(value) is False


def test_the_domain_of_an_id_follows_its_first_colon() -> None:
    assert [domain_of(text) for text in ("!r:b", "@a:b:8448", "$abc", "!r:")] == [
        "b",
        "b:8448",
        None,
        "",
    ]


ALWAYS = {("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.member", "@a:x")}
RULES, TARGET = ("m.room.join_rules", ""), ("m.room.member", "@b:x")
INVITE = {"membership": "invite", "third_party_invite": {"signed": {"token": "t"}}}
RESTRICTED = {"membership": "join", "join_authorised_via_users_server": "@c:x"}


@pytest.mark.parametrize(
    "content,keys",
    [
        ({}, {TARGET}),
        ({"membership": "leave"}, {TARGET}),
        ({"membership": "ban"}, {TARGET}),
        ({"membership": "join"}, {TARGET, RULES}),
        ({"membership": "knock"}, {TARGET, RULES}),
        ({"membership": "invite"}, {TARGET, RULES}),
        (INVITE, {TARGET, RULES, ("m.room.third_party_invite", "t")}),
        ({**INVITE, "membership": "join"}, {TARGET, RULES}),
        (RESTRICTED, {TARGET, RULES, ("m.room.member", "@c:x")}),
        ({**RESTRICTED, "membership": "invite"}, {TARGET, RULES}),
        ({**RESTRICTED, "join_authorised_via_users_server": "@c\0:x"}, {TARGET, RULES}),
        ({**RESTRICTED, "join_authorised_via_users_server": 5}, {TARGET, RULES}),
    ],
)
def test_the_state_that_a_membership_depends_on(
    content: dict[str, object], keys: set[tuple[str, str]]
) -> None:
    event = make_event("11", "$e", "m.room.member", "@a:x", "@b:x", content)
    assert keys_needed(event) == auth_event_keys(event) == ALWAYS | keys


def test_the_state_that_other_events_depend_on() -> None:
    message = {
        version: make_event(version, "$e", "m.room.message", "@a:x")
        for version in ("7", "11", "12")
    }
    assert (
        keys_needed(message["11"])
        == auth_event_keys(message["11"])
        == keys_needed(message["12"])
        == ALWAYS
    )
    assert auth_event_keys(message["12"]) == ALWAYS - {("m.room.create", "")}
    assert keys_needed(make_create("11")) == auth_event_keys(make_create("11")) == set()
    early = make_event("7", "$e", "m.room.member", "@a:x", "@b:x", RESTRICTED)
    assert keys_needed(early) == ALWAYS | {TARGET, RULES}
    assert (
        keys_needed(make_event("11", "$e", "m.room.member", "@a:x", None, {"membership": "leave"}))
        == ALWAYS
    )


def test_a_token_is_text_without_nul() -> None:
    assert third_party_token(INVITE) == "t"
    for signed in ({"token": "a\0b"}, {"token": 5}, {}, "t", None):
        assert third_party_token({"third_party_invite": {"signed": signed}}) is None
    assert third_party_token({"third_party_invite": {}}) is None
    assert third_party_token({"third_party_invite": "t"}) is None
    assert third_party_token({}) is None
