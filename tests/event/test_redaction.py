"""Redaction in the form of every room version; beside the published pairs."""

from typing import Any

import pytest

from storage.event import redact
from tests.event.building import VERSIONS, signed_pdu, unsigned_pdu

MEMBER = {
    "membership": "join",
    "displayname": "x",
    "join_authorised_via_users_server": "@b:c",
    "third_party_invite": {"signed": {"token": "t"}, "display_name": "d"},
}
POWER = {
    "ban": 1,
    "events": {},
    "events_default": 1,
    "invite": 1,
    "kick": 1,
    "notifications": {},
    "redact": 1,
    "state_default": 1,
    "users": {},
    "users_default": 1,
}
MANY = {
    "creator": "@a:b",
    "m.federate": True,
    "aliases": [],
    "history_visibility": "shared",
    "redacts": "$x",
    "join_rule": "public",
    "allow": [1],
}

# type -> [(first version in which it holds, what is kept)]
KEPT: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "m.room.message": [(1, {})],
    "m.room.create": [(1, {"creator": "@a:b"}), (11, MANY)],
    "m.room.aliases": [(1, {"aliases": []}), (6, {})],
    "m.room.history_visibility": [(1, {"history_visibility": "shared"})],
    "m.room.redaction": [(1, {}), (11, {"redacts": "$x"})],
    "m.room.join_rules": [(1, {"join_rule": "public"}), (8, {"join_rule": "public", "allow": [1]})],
    "m.room.member": [
        (1, {"membership": "join"}),
        (9, {"membership": "join", "join_authorised_via_users_server": "@b:c"}),
        (
            11,
            {
                "membership": "join",
                "join_authorised_via_users_server": "@b:c",
                "third_party_invite": {"signed": {"token": "t"}},
            },
        ),
    ],
    "m.room.power_levels": [
        (1, {key: value for key, value in POWER.items() if key not in ("invite", "notifications")}),
        (11, {key: value for key, value in POWER.items() if key != "notifications"}),
    ],
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("event_type", KEPT)
def test_what_is_kept_of_the_content(version: str, event_type: str) -> None:
    content = {"m.room.member": MEMBER, "m.room.power_levels": POWER}.get(event_type, MANY)
    wanted = [kept for first, kept in KEPT[event_type] if first <= int(version)][-1]
    assert redact({"type": event_type, "content": content}, version)["content"] == wanted


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_kept_at_the_top(version: str) -> None:
    old = {"prev_state": [], "origin": "b", "membership": "join"}
    gone = {"unsigned": {"age": 1}, "redacts": "$x", "age_ts": 1, "unknown": 1}
    pdu = {**signed_pdu(version), "event_id": "$a:b", "state_key": ""}
    wanted = {**pdu, "content": {}, **(old if int(version) < 11 else {})}
    assert redact({**pdu, **old, **gone}, version) == wanted


@pytest.mark.parametrize("content", [None, [], "text", 5])
def test_a_content_that_is_no_object_becomes_one(content: object) -> None:
    assert redact({"type": "m.room.create", "content": content}, "11") == {
        "type": "m.room.create",
        "content": {},
    }
    assert redact({"type": ["m.room.create"], "content": {}}, "1") == {
        "type": ["m.room.create"],
        "content": {},
    }


@pytest.mark.parametrize("invite", [None, 5, [], {}, {"display_name": "d"}])
def test_a_third_party_invite_without_signed_is_dropped(invite: object) -> None:
    assert (
        redact({"type": "m.room.member", "content": {"third_party_invite": invite}}, "11")[
            "content"
        ]
        == {}
    )


def test_the_argument_is_left_alone() -> None:
    pdu = unsigned_pdu("11", unsigned={"age": 1})
    redact(pdu, "11")
    assert pdu == unsigned_pdu("11", unsigned={"age": 1})
