"""Second create events, as anybody can send them: they must not say what version a room has."""

from dataclasses import replace
from typing import Any, Final

from storage.event import parse
from storage.event.hashes import content_hash
from storage.event.versions import version_of
from storage.ids import RoomId, server_name_of
from storage.testing import GeneratedEvent, GeneratedRoom

CONTENTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"room_version": "10"},
    {"room_version": "6"},
    {"room_version": "12"},
)
MORE: Final[tuple[dict[str, Any], ...]] = (
    {"room_version": "99"},
    {"room_version": 5},
    {"room_version": None},
)


def planted_creates(room_id: RoomId, version: str) -> list[GeneratedEvent]:
    """Return create events as outliers: they name no version, a wrong one, or none there is.

    From version 12 on the id of a room is made of its create event, so it can have no second one.
    """
    contents = () if version_of(version).create_room_id else (*CONTENTS, *MORE)
    senders = f"@mallory:{server_name_of(room_id)}", "@mallory:evil.test"
    return [
        _planted(room_id, version, sender, content, number)
        for number, content in enumerate(contents)
        for sender in senders
    ]


def _planted(
    room_id: RoomId, version: str, sender: str, content: dict[str, Any], number: int
) -> GeneratedEvent:
    pdu: dict[str, Any] = {
        "auth_events": [],
        "content": {"creator": sender, **content},
        "depth": 1,
        "origin_server_ts": 1_700_000_000_000 + number,
        "prev_events": [],
        "room_id": room_id,
        "sender": sender,
        "signatures": {},
        "state_key": "",
        "type": "m.room.create",
    }
    if version_of(version).event_id_format == "in_pdu":
        pdu["event_id"] = f"$planted{number}:{server_name_of(sender)}"
    pdu["hashes"] = {"sha256": content_hash(pdu)}
    event = parse(pdu, version)
    return GeneratedEvent(event.raw, event.event_id, room_id, version, "outlier")


def with_planted_creates(room: GeneratedRoom, at: int = 0) -> GeneratedRoom:
    """Return the room with such events before this one."""
    planted = planted_creates(room.room_id, room.room_version)
    return replace(room, events=(*room.events[:at], *planted, *room.events[at:]))
