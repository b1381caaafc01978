"""The events that an event depends on, by its room version."""

import pytest

from storage.event import ROOM_VERSIONS, parse
from storage.event.model import auth_ids_of, create_id_of, implied_auth_ids, references_of
from tests.event.building import PAIRED, VERSIONS, signed_pdu

ROOM_ID = "!" + "r" * 43
CREATE_ID = "$" + "r" * 43
PARENTS = ["$" + letter * 43 for letter in "pq"]
LISTED = ["$" + letter * 43 for letter in "ab"]


def cited(version: str, ids: list[str]) -> list[object]:
    return [[one, {"sha256": "x" * 43}] if version in PAIRED else one for one in ids]


@pytest.mark.parametrize("version", VERSIONS)
def test_from_version_12_the_room_id_names_one_more_auth_event(version: str) -> None:
    event = parse(
        signed_pdu(
            version,
            room_id=ROOM_ID,
            prev_events=cited(version, PARENTS),
            auth_events=cited(version, LISTED),
        ),
        version,
    )
    implied = [CREATE_ID] if version == "12" else []
    assert list(auth_ids_of(event)) == [*LISTED, *implied]
    assert list(references_of(event)) == [*PARENTS, *LISTED, *implied]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_create_event_implies_none(version: str) -> None:
    assert implied_auth_ids(ROOM_VERSIONS[version], "m.room.create", ROOM_ID) == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_those_that_a_create_event_lists_do_not_count(version: str) -> None:
    place = {} if version == "12" else {"room_id": ROOM_ID}
    create = {"type": "m.room.create", "state_key": "", "room_id": ..., **place}
    event = parse(signed_pdu(version, **create, auth_events=cited(version, LISTED)), version)
    assert event.auth_event_ids == ()
    assert auth_ids_of(event) == ()


def test_the_create_event_of_a_room_id() -> None:
    assert create_id_of("!abc") == "$abc"
