"""PDUs in lines of text: one per line, alone or in an envelope, cut out byte for byte.

A line is a PDU, or an envelope ``{"pdu": {…}, "room_version": "11", "origin": "live",
"state_before": ["$…", …]}``. Only ``pdu`` is required; unknown keys are ignored. The last of
duplicate keys counts, as in every server. ``"refused": "spam"`` is a verdict of the caller on the
event. A line with ``"readmit": true`` stores nothing: the event of an earlier line is readmitted.
``"second_create": true``: the room has another create event, which is stored before this one.
Instead of ``pdu`` there may be ``pdu_base64`` (RFC 4648, padded), for bytes that no line can hold,
such as those with line breaks. An object that has a ``sender`` is a PDU, whatever else it has. So a
PDU with a key ``pdu`` of its own is not mistaken for an envelope.

Other servers signed and hashed the bytes of a PDU, so they must stay unchanged. Nothing is encoded
again: the JSON reader returns where in the text each value ends, and that range of the line is the
PDU. A text that was decoded strictly from UTF-8 encodes to the same bytes, so the reader can work
on text.

This module does not validate PDUs. It reads any line that is JSON; `storage.event.parse` reports
what is wrong with the PDU.
"""

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeGuard, cast

import orjson

from storage.errors import InvalidEvent
from storage.event.model import Event
from storage.event.reading import without_unsigned

Origin = Literal["live", "backfill", "outlier", "out_of_band"]

READMITTED: Final = "readmitted later"
"""The reason in an export for the arrival of an event that was readmitted since."""

SECOND_CREATE: Final = "create.second"
"""The rule in the column ``rejected`` of an export by which a room has one create event."""

ORIGINS: Final = ("live", "backfill", "outlier", "out_of_band")
OUTLIERS: Final = ("outlier", "out_of_band")
"""The origins of events that are stored without a position in the timeline."""

WHITESPACE: Final = " \t\r\n"

# numbers are only looked at; float reads one of any length
_READER: Final = json.JSONDecoder(parse_int=float, strict=False)


@dataclass(frozen=True, slots=True)
class Line:
    """The contents of a line.

    ``origin``, ``room_version``, ``state_before``, ``stripped_state`` and ``refused`` are None
    where the line does not give them.

    ``room_id`` and ``depth`` are the PDU's own, unchecked: enough to sort by, not to store. They
    are None where there is none.

    ``stray_keys``: an import has removed them (`without_extra_keys`).
    """

    pdu: bytes
    room_version: str | None = None
    origin: Origin | None = None
    state_before: tuple[str, ...] | None = None
    stripped_state: tuple[dict[str, Any], ...] | None = None
    refused: str | None = None
    readmit: bool = False
    second_create: bool = False
    room_id: str | None = field(default=None, compare=False)
    depth: float | None = field(default=None, compare=False)
    stray_keys: bool = field(default=False, compare=False)


def read_line(raw: bytes) -> Line:
    """Read the PDU of a line, with or without the line break.

    Raise `InvalidEvent` with the reason if the line is wrong.
    """
    try:
        return _read_line(raw)
    except RecursionError:
        cut = without_unsigned(raw)  # of a PDU, it is dropped anyway if it is nested so deeply
    try:
        return _read_line(cut or raw)
    except RecursionError:
        raise InvalidEvent("nested too deeply") from None


def _read_line(raw: bytes) -> Line:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidEvent(f"not UTF-8: byte {error.start + 1} of the line") from None
    try:
        start = _skip(text, 0)
        value, end = _READER.raw_decode(text, start)
        if _skip(text, end) != len(text):
            raise InvalidEvent(
                f"not JSON: there is more after the end of the value, at character {end + 1}"
            )
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at").rstrip(": ")
        raise InvalidEvent(f"not JSON: {reason} at character {error.pos + 1}") from None
    if not isinstance(value, dict):
        raise InvalidEvent("not a JSON object")
    if "sender" in value or value.keys().isdisjoint(("pdu", "pdu_base64")):
        return _of_pdu(text[start:end].encode(), value)
    return _opened(text, start, value)


def envelope(
    pdu: bytes,
    room_version: str | None,
    origin: str | None,
    state_before: Sequence[str] | None = None,
    stripped_state: Sequence[Mapping[str, Any]] | None = None,
    *,
    refused: str | None = None,
    readmit: bool = False,
    second_create: bool = False,
) -> bytes:
    """Return a line that `read_line` reads back as these values.

    The PDU is embedded as it is, or as base64 where it is no JSON object on one line.
    """
    try:
        plain = b"\n" not in pdu and read_line(pdu).pdu == pdu
    except InvalidEvent:
        plain = False
    prefix, value = (
        (b'{"pdu":', pdu) if plain else (b'{"pdu_base64":', orjson.dumps(b64encode(pdu).decode()))
    )
    options = {
        "room_version": room_version,
        "origin": origin,
        "state_before": state_before,
        "stripped_state": stripped_state,
        "refused": refused,
        "readmit": readmit or None,
        "second_create": second_create or None,
    }
    rest = orjson.dumps({name: option for name, option in options.items() if option is not None})
    return prefix + value + (b"," if len(rest) > len(b"{}") else b"") + rest[1:]


def pdus_of(raw: bytes) -> list[bytes]:
    """Return the PDUs of a /backfill response, ``{"pdus": [{…}, …], …}``, byte for byte.

    Raise `InvalidEvent` with the reason if the response is wrong.
    """
    try:
        text = raw.decode()
        value = _READER.decode(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InvalidEvent(f"not JSON: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("pdus"), list):
        raise InvalidEvent("not an object with a list pdus")
    listed = cast("str", member(text, _skip(text, 0), "pdus"))
    pdus: list[bytes] = []
    at = _skip(listed, 1)
    while listed[at] != "]":
        _, end = _READER.raw_decode(listed, at)
        pdus.append(listed[at:end].encode())
        at = _skip(listed, end)
        if listed[at] == ",":
            at = _skip(listed, at + 1)
    return pdus


def member(text: str, start: int, key: str) -> str | None:
    """Return the text of a member's value in the JSON object that begins at ``start``.

    The last member of that name counts. The text must have been read as JSON before.
    """
    member_text = None
    at = _skip(text, start + 1)
    while text[at] != "}":
        name, at = _READER.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)  # past the colon
        _, at = _READER.raw_decode(text, begin)
        if name == key:
            member_text = text[begin:at]
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return member_text


def _opened(text: str, start: int, members: dict[str, Any]) -> Line:
    pdu = (
        _encoded(members["pdu_base64"])
        if "pdu_base64" in members
        else _cut(text, start, members["pdu"])
    )
    room_version, origin, state = (
        members.get("room_version"),
        members.get("origin"),
        members.get("state_before"),
    )
    if not isinstance(room_version, str | None):
        raise InvalidEvent("room_version is not a string")
    if origin is not None and origin not in ORIGINS:
        raise InvalidEvent(f"origin {origin!r} is none of {', '.join(ORIGINS)}")
    if state is not None and not _are_strings(state):
        raise InvalidEvent("state_before is not a list of event ids")
    refused, readmit = members.get("refused"), members.get("readmit", False)
    if not isinstance(refused, str | None):
        raise InvalidEvent("refused is not a string")
    second = members.get("second_create", False)
    for name, flag in (("readmit", readmit), ("second_create", second)):
        if not isinstance(flag, bool):
            raise InvalidEvent(f"{name} is neither true nor false")
    line = replace(
        pdu,
        room_version=room_version,
        origin=origin,
        state_before=None if state is None else tuple(state),
        refused=refused,
        readmit=readmit,
        second_create=second,
    )
    return (
        line
        if members.get("stripped_state") is None
        else replace(line, stripped_state=_stripped(text, start))
    )


def _stripped(text: str, start: int) -> tuple[dict[str, Any], ...]:
    """Read the stripped state of the envelope that begins at ``start`` a second time.

    The first reader turned its numbers into floats.
    """
    try:
        stripped = orjson.loads(cast("str", member(text, start, "stripped_state")))
    except orjson.JSONDecodeError as error:
        # half of a surrogate pair, or a number that is out of range
        raise InvalidEvent(f"stripped_state is not JSON: {error}") from None
    if not isinstance(stripped, list) or not all(isinstance(item, dict) for item in stripped):
        raise InvalidEvent("stripped_state is not a list of objects")
    return tuple(stripped)


def _cut(text: str, start: int, pdu: object) -> Line:
    """Cut out the PDU of the envelope that begins at ``start``."""
    if not isinstance(pdu, dict):
        raise InvalidEvent("pdu is not an object")
    return _of_pdu(cast("str", member(text, start, "pdu")).encode(), pdu)


def _encoded(value: object) -> Line:
    """Decode the PDU that is given as base64."""
    try:
        raw = b64decode(cast("str", value), validate=True)
        pdu = _READER.decode(raw.decode())
    except (TypeError, ValueError, RecursionError) as error:  # wrong base64, UTF-8 or JSON
        raise InvalidEvent(f"pdu_base64 is not JSON in base64: {error}") from None
    if not isinstance(pdu, dict):
        raise InvalidEvent("pdu_base64 is not an object")
    return _of_pdu(raw, pdu)


def _of_pdu(raw: bytes, pdu: dict[str, Any]) -> Line:
    room_id, depth = pdu.get("room_id"), pdu.get("depth")
    return Line(
        raw,
        room_id=room_id if isinstance(room_id, str) else None,
        depth=depth if isinstance(depth, float) and math.isfinite(depth) else None,
    )


def _are_strings(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _skip(text: str, at: int) -> int:
    """Return the first position from ``at`` on that is not JSON white space."""
    while at < len(text) and text[at] in WHITESPACE:
        at += 1
    return at


# --------------------------------------------------------------------------------------------------
# Whether an event has the name, the alias or the type of its room: a column of `events`.
#
# Statements read it for all rooms of a user, without the bytes of the events.

DESCRIBING: Final[Mapping[str, str]] = {
    "m.room.canonical_alias": "alias",
    "m.room.create": "type",
    "m.room.name": "name",
}
"""The key of the content, by event type."""


def describes_room(event: Event) -> bool | None:
    """Return whether it does; None for an event of another type, or with a state key."""
    if event.state_key != "":
        return None
    return describes(event.type, event.content)


def describes(event_type: str, content: Mapping[str, Any]) -> bool | None:
    """Return whether this content does; None for another type.

    An empty text is no name and no alias, but it is a type.
    """
    key = DESCRIBING.get(event_type)
    if key is None:
        return None
    value = content.get(key)
    return isinstance(value, str) and (value != "" or event_type == "m.room.create")
