"""An event without its bytes: the data that planning needs, packed by the thousand.

State events, and events whose content the auth rules read, include their bytes. All others have
their identifying fields, their edges, and the content that the tables need: a relation, a URL. So a
room of a million messages is planned from some 300 bytes a message. The bytes of each line wait in
the table `import_events`, under its place.

A list of tuples is packed by `marshal`, which takes a microsecond an event. Packed data never
outlives the job, which has one version of Python.
"""

import marshal
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from storage.auth import CONTENT_MATTERS
from storage.event import ROOM_VERSIONS, Event, load, relation_of
from storage.event.model import make_event
from storage.event.ndjson import Origin
from storage.event.references import implied_auth_ids
from storage.persist.model.event_view import CONTENT_KEYS
from storage.pipeline.imports.lines import LineContent

NOTHING: Final[dict[str, Any]] = {}


class SlimEvent(NamedTuple):
    """A valid line.

    ``rank``: its position among the lines of its path; ``place``: where its bytes are staged;
    ``whole``: its bytes, or None.
    """

    rank: int
    place: int
    event_id: str
    origin: Origin
    valid: bool
    type: str
    sender: str
    state_key: str | None
    depth: int
    origin_server_ts: int
    prev_events: tuple[str, ...]
    auth_events: tuple[str, ...]
    content: dict[str, Any]
    whole: bytes | None
    state_before: tuple[str, ...] | None
    refused: str | None = None
    readmit: bool = False
    """The event is stored and refused: accept it."""
    second: bool = False
    """A second create event of the room: store it after the first one."""


def slim_line(event: Event, rank: int, place: int, given: LineContent) -> tuple[Any, ...]:
    return slim(
        event,
        rank,
        place,
        given.origin,
        given.state_before,
        refused=given.refused,
        readmit=given.readmit,
        second=given.second,
    )


def slim(
    event: Event,
    rank: int,
    place: int,
    origin: Origin,
    state_before: tuple[str, ...] | None,
    *,
    refused: str | None = None,
    readmit: bool = False,
    second: bool = False,
) -> tuple[Any, ...]:
    """Return the fields of a `SlimEvent`, as they are packed."""
    whole = event.state_key is not None or event.type in CONTENT_MATTERS
    return (
        rank,
        place,
        event.event_id,
        origin,
        event.content_hash_valid,
        event.type,
        event.sender,
        event.state_key,
        event.depth,
        event.origin_server_ts,
        event.prev_event_ids,
        event.auth_event_ids,
        NOTHING if whole else _reduced(event),
        event.raw if whole else None,
        state_before,
        refused,
        readmit,
        second,
    )


def _reduced(event: Event) -> dict[str, Any]:
    """Return the part of a content that `EventView.stored_columns` reads."""
    content = event.content
    left: dict[str, Any] = {key: None for key in CONTENT_KEYS if key in content}
    if "m.relates_to" in content and (relation := relation_of(event)) is not None:
        left["m.relates_to"] = {"rel_type": relation.rel_type, "event_id": relation.event_id}
        if "m.new_content" in content:
            left["m.new_content"] = None
    return left


def event_of(one: SlimEvent, room_id: str, version: str) -> Event:
    """Return the event as planning takes it; without its bytes, unless it is whole."""
    if one.whole is not None:
        return load(one.whole, version, one.event_id, redacted=not one.valid)
    return make_event(
        one.event_id,
        room_id,
        ROOM_VERSIONS[version],
        one.type,
        one.sender,
        None,
        one.content,
        one.depth,
        one.origin_server_ts,
        one.prev_events,
        one.auth_events,
        None,
        b"",
        NOTHING,
        one.valid,
        None,
    )


def packed(rows: Iterable[Any]) -> bytes:
    return marshal.dumps(list(rows))


def unpacked(data: bytes) -> Iterable[SlimEvent]:
    """Yield the rows again."""
    rows = marshal.loads(data)  # noqa: S302  # the result of `packed` in another task of this job
    return map(SlimEvent._make, rows)


def needs(one: SlimEvent, room_id: str, version: str) -> list[str]:
    """Return the ids that must be stored before this event.

    These are its auth events, and its parents, or the state given instead of them. Parents have a
    leading ``^``: for them an outlier is not enough. A readmission needs the event.
    """
    if one.readmit:
        return ["^" + one.event_id]
    if one.origin == "out_of_band":
        return []
    needed = [*one.auth_events, *implied_auth_ids(ROOM_VERSIONS[version], one.type, room_id)]
    if one.origin == "outlier":
        return needed
    if one.state_before is not None:
        return [*needed, *one.state_before]
    return [*needed, *("^" + parent for parent in one.prev_events)]
