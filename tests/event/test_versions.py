"""The table of room versions against the features that each version's page introduces."""

import pickle

import pytest

from storage.event import ROOM_VERSIONS, RoomVersion
from storage.event.versions import version_of

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
    "redacts_in_content": range(11, 13),
    "redaction_keeps_create": range(11, 13),
    "redaction_keeps_signed_invite": range(11, 13),
    "create_room_id": range(12, 13),
    "privileged_creators": range(12, 13),
}


def test_versions_1_to_12() -> None:
    assert list(ROOM_VERSIONS) == [str(n) for n in range(1, 13)]
    assert all(version.identifier == identifier for identifier, version in ROOM_VERSIONS.items())
    flags = {name for name in RoomVersion.__dataclass_fields__ if isinstance(getattr(ROOM_VERSIONS["1"], name), bool)}
    assert flags == set(FLAGS)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags(flag: str) -> None:
    assert [int(identifier) for identifier, version in ROOM_VERSIONS.items() if getattr(version, flag)] == list(FLAGS[flag])


def test_choices() -> None:
    versions = ROOM_VERSIONS.values()
    assert [v.event_id_format for v in versions] == ["in_pdu"] * 2 + ["base64"] + ["url_safe_base64"] * 9
    assert [v.state_resolution for v in versions] == ["v1"] + ["v2"] * 10 + ["v2.1"]
    assert [v.power_levels for v in versions] == ["float"] * 5 + ["string"] * 4 + ["integer"] * 3


def test_a_version_is_one_object() -> None:
    for version in ROOM_VERSIONS.values():
        assert version_of(version) is version_of(version.identifier) is version
        assert pickle.loads(pickle.dumps(version)) is version
