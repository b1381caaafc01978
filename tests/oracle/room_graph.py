"""Events and rooms of the oracle: its record of an event, versions, and the causal order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from storage.errors import (
    UnknownRoomVersion,
)
from storage.event import Event, peek
from storage.ids import EventId, RoomId, StateKey

Outcome = Literal[
    "stored", "duplicate", "rejected", "soft_failed", "redacted", "missing_parents", "invalid"
]


Origin = Literal["live", "backfill", "outlier"]


State = dict[StateKey, EventId]


Pdu = bytes | dict[str, Any]


CREATE = ("m.room.create", "")


@dataclass
class OracleEvent:
    """An event that is held, and what was decided when it came."""

    event: Event
    origin: Origin
    arrival: int  # the oracle's stream ordering: 1, 2, 3 … over all rooms, outliers too
    rejected: bool
    soft_failed: bool
    state_before: State | None  # None: an outlier
    refused: str | None = None  # the reason of the caller; such an event is soft-failed
    first_arrival: int = 0  # of a readmitted event: its arrival when it was refused

    @property
    def outlier(self) -> bool:
        return self.origin == "outlier"

    @property
    def came(self) -> int:
        """When it came in the timeline, which for a readmitted event is before its arrival."""
        return self.first_arrival or self.arrival

    @property
    def accepted(self) -> bool:
        """An event of the timeline that nothing speaks against."""
        return not (self.outlier or self.rejected or self.soft_failed)


def read_pdu(pdu: Pdu) -> dict[str, Any]:
    read = peek(pdu) if isinstance(pdu, bytes) else pdu
    if not isinstance(read, dict):
        raise TypeError(f"a PDU is an object, not {read!r}")
    return read


def said_version(read: Mapping[str, Any]) -> str | None:
    """The room version that a create event says."""
    if (read["type"], read.get("state_key")) != CREATE:
        return None
    return str(read["content"].get("room_version", "1"))


def version_of(pdu: Pdu, versions: Mapping[RoomId, str], named: str | None) -> str:
    """Return the room's version, known or from its create event in the batch.

    A create event has its own version. For an unknown room it is the version the caller names.
    """
    read = read_pdu(pdu)
    version = versions.get(read.get("room_id", ""), said_version(read) or named)
    if version is None:
        raise UnknownRoomVersion(version)
    return version


def cited(event: Event) -> tuple[EventId, ...]:
    """Return the auth events; from room version 12 on also the create event.

    There the room id names the create event.
    """
    if event.room_version.create_room_id and event.type != CREATE[0]:
        return (*event.auth_event_ids, EventId("$" + event.room_id[1:]))
    return event.auth_event_ids


def in_causal_order(events: Mapping[int, Event]) -> list[int]:
    """Return the positions of a batch in causal order.

    Repeatedly take the first event whose prev_events and auth events in the batch are all taken.
    """
    waiting = dict(events)
    ordered: list[int] = []
    while waiting:
        ids = {event.event_id for event in waiting.values()}
        free = [
            place
            for place, event in waiting.items()
            if not (ids - {event.event_id}) & {*event.prev_event_ids, *cited(event)}
        ]
        ordered.append(
            (free or list(waiting))[0]
        )  # in a circle (ids of versions 1 and 2 can form one) nobody is free
        del waiting[ordered[-1]]
    return ordered
