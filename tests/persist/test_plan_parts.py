"""The parts of a decision that need no store.

They are numbers that fit, events that fit their room, and rows that gain values.
"""

from typing import Any

import pytest

from storage.database.names import MEMBERSHIPS
from storage.persist.model.results import AppendResult
from storage.persist.model.rows import EventRow, RoomChanges, RoomRow
from storage.persist.plan.event import INT8_MAX, _goes_on, _int8, _unfit
from tests.auth.events import make_create, make_event


def test_numbers_beyond_64_bits_become_the_largest_that_fit() -> None:
    assert INT8_MAX == 2**63 - 1
    assert [_int8(number) for number in (0, -5, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1)] == [
        0,
        -5,
        2**63 - 1,
        2**63 - 1,
        -(2**63),
        -(2**63),
    ]


def room_of(version: str, *, is_stored: bool = True) -> RoomChanges:
    return RoomChanges.of(RoomRow(7, "!r:a", version, int(is_stored), 1, None, 0, (), 0, ()))


def row_of(**values: Any) -> EventRow:
    """Return the row of a leave in room 7 that is an outlier without auth events."""
    row = EventRow._make(range(len(EventRow._fields)))
    return row._replace(
        **{
            "room_nid": 7,
            "outlier": True,
            "auth_events": (),
            "rejected": None,
            "membership": MEMBERSHIPS["leave"],
            **values,
        }
    )


def test_an_event_that_was_read_by_another_version_is_invalid() -> None:
    """A create event of version 12 proves its version by its room id; no other does."""
    message, create = (
        make_event("11", "$m", "m.room.message", "@a:a"),
        make_create("12", event_id="$create"),
    )
    reason = "read as an event of version 11, while the room has version 10"
    assert _unfit(room_of("10"), message, None) == AppendResult(None, "invalid", reason)
    assert _unfit(room_of("11"), message, None) is None
    assert _unfit(room_of("11"), create, None) is None
    refused = [
        (make_create("11"), "10", 11),
        (make_event("12", "$m", "m.room.message", "@a:a", room_id="!r"), "11", 12),
    ]
    for event, version, read in refused:
        result = _unfit(room_of(version), event, None)
        assert result == AppendResult(
            None,
            "invalid",
            f"read as an event of version {read}, while the room has version {version}",
        )


@pytest.mark.parametrize("version,room_id", [("11", "!r"), ("12", "!r:a")])
def test_a_room_id_that_its_version_cannot_have_is_invalid(version: str, room_id: str) -> None:
    """Where the room is stored under that version, the answer says how to mend it."""
    message = make_event(version, "$m", "m.room.message", "@a:a", room_id=room_id)
    reason = f"{room_id} is not the id of a room of version {version}"
    assert _unfit(room_of(version, is_stored=False), message, None) == AppendResult(
        None, "invalid", reason
    )
    stored = f"{reason}, which it is stored under: `room-storage verify --repair`"
    assert _unfit(room_of(version), message, None) == AppendResult(None, "invalid", stored)


def test_an_id_that_another_room_has_is_a_duplicate() -> None:
    message = make_event("1", "$m:a", "m.room.message", "@a:a")
    assert _unfit(room_of("1"), message, row_of(room_nid=8)) == AppendResult(
        message.event_id, "duplicate"
    )
    assert _unfit(room_of("1"), message, row_of()) is None


def test_an_outlier_goes_on_into_the_timeline_and_what_came_out_of_band_as_an_outlier_too() -> None:
    out_of_band, outlier, placed = row_of(), row_of(auth_events=(1,)), row_of(outlier=False)
    for origin, wanted in {
        "live": [True, True, False],
        "backfill": [True, True, False],
        "outlier": [True, False, False],
    }.items():
        rows = (out_of_band, outlier, placed)
        assert [_goes_on(row, origin) for row in rows] == wanted  # type: ignore[arg-type]
    assert [_goes_on(row, "out_of_band") for row in (out_of_band, outlier, placed)] == [
        False,
        False,
        False,
    ]
