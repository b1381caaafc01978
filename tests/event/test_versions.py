"""The table of room versions against the features that each version's page introduces."""

import pickle
from collections.abc import Mapping
from dataclasses import replace

import pytest

from storage.event import ROOM_VERSIONS, RoomVersion
from storage.event.versions import _table, version_of

# flag -> the versions in which it is set
FLAGS = {
    "reference_pairs": range(1, 3),
    "redaction_by_auth_rule": range(1, 3),
    "special_case_aliases": range(1, 6),
    "enforce_key_validity": range(5, 13),
    "strict_canonical_json": range(6, 13),
    "limit_notifications_power": range(6, 13),
    "knock": range(7, 13),
    "restricted_join": range(8, 13),
    "knock_restricted": range(10, 13),
    "creator_is_sender": range(11, 13),
    "strict_key_bytes": range(11, 13),
    "redacts_in_content": range(11, 13),
    "redaction_keeps_create": range(11, 13),
    "redaction_keeps_signed_invite": range(11, 13),
    "create_room_id": range(12, 13),
    "privileged_creators": range(12, 13),
}


# The top-level keys that a redaction keeps, and those that it keeps before version 11.
KEPT = [
    "event_id",
    "type",
    "room_id",
    "sender",
    "state_key",
    "content",
    "hashes",
    "signatures",
    "depth",
    "prev_events",
    "auth_events",
    "origin_server_ts",
]
KEPT_BEFORE_11 = ["prev_state", "origin", "membership"]

POWER_LEVELS = "ban events events_default kick redact state_default users users_default"
# event type -> the versions in which a redaction keeps these keys of the content
CONTENT = {
    "m.room.member": {
        range(1, 9): "membership",
        range(9, 13): "membership join_authorised_via_users_server",
    },
    "m.room.create": {range(1, 11): "creator"},
    "m.room.join_rules": {range(1, 8): "join_rule", range(8, 13): "join_rule allow"},
    "m.room.power_levels": {range(1, 11): POWER_LEVELS, range(11, 13): POWER_LEVELS + " invite"},
    "m.room.aliases": {range(1, 6): "aliases"},
    "m.room.history_visibility": {range(1, 13): "history_visibility"},
    "m.room.redaction": {range(11, 13): "redacts"},
}


@pytest.fixture(params=["in use", "made now"])
def table(request: pytest.FixtureRequest) -> Mapping[str, RoomVersion]:
    """Return the table that the package uses, or one that is made while the test runs."""
    return ROOM_VERSIONS if request.param == "in use" else _table()


def test_versions_1_to_12(table: Mapping[str, RoomVersion]) -> None:
    assert list(table) == [str(n) for n in range(1, 13)]
    assert all(version.identifier == identifier for identifier, version in table.items())
    flags = {
        name
        for name in RoomVersion.__dataclass_fields__
        if isinstance(getattr(table["1"], name), bool)
    }
    assert flags == set(FLAGS)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags(table: Mapping[str, RoomVersion], flag: str) -> None:
    assert [
        int(identifier) for identifier, version in table.items() if getattr(version, flag) is True
    ] == list(FLAGS[flag])
    assert all(getattr(version, flag) in (True, False) for version in table.values())


def test_choices(table: Mapping[str, RoomVersion]) -> None:
    versions = table.values()
    assert [v.event_id_format for v in versions] == ["in_pdu"] * 2 + ["base64"] + [
        "url_safe_base64"
    ] * 9
    assert [v.state_resolution for v in versions] == ["v1"] + ["v2"] * 10 + ["v2.1"]
    assert [v.power_levels for v in versions] == ["float"] * 5 + ["string"] * 4 + ["integer"] * 3


def test_keys_that_a_redaction_keeps(table: Mapping[str, RoomVersion]) -> None:
    for identifier, version in table.items():
        assert version.redaction_keys == {*KEPT, *(KEPT_BEFORE_11 if int(identifier) < 11 else ())}


def test_content_that_a_redaction_keeps(table: Mapping[str, RoomVersion]) -> None:
    for identifier, version in table.items():
        wanted = {
            kind: keys.split()
            for kind, by in CONTENT.items()
            for versions, keys in by.items()
            if int(identifier) in versions
        }
        assert version.redaction_content == {kind: frozenset(keys) for kind, keys in wanted.items()}


def test_common_keys_are_those_that_a_redaction_keeps_and_unsigned() -> None:
    """An event with no other key loses none at its top level.

    Its id is not counted, because later versions do not write it.
    """
    made = replace(ROOM_VERSIONS["11"], redaction_keys=frozenset({"event_id", "type", "depth"}))
    assert made.common_keys == {"type", "depth", "unsigned"}


def test_a_version_is_one_object() -> None:
    for version in ROOM_VERSIONS.values():
        assert version_of(version) is version_of(version.identifier) is version
        assert pickle.loads(pickle.dumps(version)) is version


def test_room_ids_name_a_server_before_version_12(table: Mapping[str, RoomVersion]) -> None:
    """From version 12 on the id of a room is made of the hash of its create event."""
    for identifier, version in table.items():
        is_hash = int(identifier) >= 12
        assert (version.may_have_room("!room:a"), version.may_have_room("!room")) == (
            not is_hash,
            is_hash,
        )
