"""Build a new event: from its parts to the PDU, before it is hashed and signed.

The caller chooses the parents and the auth events (`storage.persist.plan.event`). This module
knows how each room version writes them down. Source: room versions 1 to 12, "Event format".
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from storage.event.hashes import reference_hash, unpadded
from storage.event.model import Event, make_event
from storage.event.reading import read_trusted
from storage.event.versions import RoomVersion
from storage.ids import EventId, RoomId, UserId, server_name_of

DEPTH_MAX: Final = 2**53 - 1
"""The largest depth of a new event: an integer of canonical JSON in every version."""


class Citation(NamedTuple):
    """An event that a new event cites. Versions 1 and 2 cite its reference hash, too."""

    event_id: EventId
    reference_hash: str = ""


class EventTemplate(NamedTuple):
    """The parts of a new event that its sender chooses.

    ``room_id`` is None for a create event whose id makes the room id. ``opaque`` is the local part
    of the event id in versions 1 and 2, where the sender's server chooses it.
    """

    room_id: RoomId | None
    sender: UserId
    type: str
    content: dict[str, Any]
    state_key: str | None
    redacts: EventId | None
    origin_server_ts: int
    opaque: str


def unsigned_event(
    template: EventTemplate,
    version: RoomVersion,
    *,
    prev_events: Sequence[Citation],
    auth_events: Sequence[Citation],
    depth: int,
) -> dict[str, Any]:
    """Return the PDU of an event with these parents, without hashes and signatures."""
    pdu: dict[str, Any] = {
        "auth_events": _references(auth_events, version),
        "content": content_of(template, version),
        "depth": min(depth, DEPTH_MAX),
        "origin_server_ts": template.origin_server_ts,
        "prev_events": _references(prev_events, version),
        "sender": template.sender,
        "type": template.type,
    }
    if template.room_id is not None:
        pdu["room_id"] = template.room_id
    if template.state_key is not None:
        pdu["state_key"] = template.state_key
    if template.redacts is not None and not version.redacts_in_content:
        pdu["redacts"] = template.redacts
    if version.reference_pairs:
        pdu["event_id"] = chosen_id(template)
    return pdu


def chosen_id(template: EventTemplate) -> EventId:
    """Return the event id that the sender's server chooses in versions 1 and 2."""
    return EventId(f"${template.opaque}:{server_name_of(template.sender)}")


def content_of(template: EventTemplate, version: RoomVersion) -> dict[str, Any]:
    """Return the content of the event; from version 11 on it names the target of a redaction."""
    if template.redacts is None or not version.redacts_in_content:
        return template.content
    return {**template.content, "redacts": template.redacts}


def outline(template: EventTemplate, version: RoomVersion) -> Event:
    """Return the event without parents and auth events, to look up what its auth check reads."""
    return make_event(
        chosen_id(template) if version.reference_pairs else EventId(""),
        template.room_id or RoomId(""),
        version,
        template.type,
        template.sender,
        template.state_key,
        content_of(template, version),
        0,
        template.origin_server_ts,
        (),
        (),
        template.redacts,
        b"",
        {},
        True,
        None,  # the fields of an event, in order
    )


def cite(event: Event) -> Citation:
    """Return the citation of an event, with its reference hash in versions 1 and 2."""
    version = event.room_version
    if not version.reference_pairs:
        return Citation(event.event_id)
    # a cached event may have lost its parsed object
    pdu = read_trusted(event.raw, strict=version.strict_canonical_json)
    return Citation(event.event_id, unpadded(reference_hash(pdu, version)))


def _references(cited: Iterable[Citation], version: RoomVersion) -> list[Any]:
    if not version.reference_pairs:
        return [citation.event_id for citation in cited]
    return [[citation.event_id, {"sha256": citation.reference_hash}] for citation in cited]
