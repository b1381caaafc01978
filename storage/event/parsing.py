"""Parsing: received bytes to an Event, with every check that needs only the event itself.

A server drops an event that is refused here (receipt of a PDU, check 1). Two things are not checked
here: signatures, which need keys, and the authorisation rules, because a rejected event is stored.

Decisions where the specification is silent:
* NUL: Postgres cannot store it as text, so an id, type or state_key with a NUL is refused; in
  content it is data.
* `redacts` that is no event id names no event and reads as None; the event itself is accepted.
* Up to version 10, a `type` or `state_key` of more than 255 bytes is read if it has at most 255
  characters. Other servers store such an event as rejected, and so do the auth rules here.
* An empty `type` and an empty `state_key` are text like any other; empty ids are refused.
* A missing `hashes` or `signatures` is refused; `hashes` without the right sha256 is a wrong
  content hash.
* Ids need their sigil, and a server name where a server has to sign (sender; event_id in versions
  1 and 2).

Source: Matrix specification, server-server API, "Checks performed on receipt of a PDU"; room
versions, "Event format"; client-server API, "Size limits".
"""

from typing import Any, Final, NoReturn

from storage.errors import InvalidEvent
from storage.event.hashes import canonical, event_id, hashed, redact
from storage.event.model import Event, make_event
from storage.event.reading import read, read_trusted
from storage.event.versions import RoomVersion, version_of
from storage.ids import EventId, RoomId, UserId, server_name_of

MAX_ID_BYTES: Final = 255
SHORT: Final = 63  # so many characters fit 255 bytes in any script
MAX_PREV_EVENTS: Final = 20
MAX_AUTH_EVENTS: Final = 10
MIN_BIGINT: Final = -(2**63)
MAX_BIGINT: Final = 2**63 - 1  # a depth must be below it, a timestamp must fit
_OBJECTS: Final = ("content", "hashes", "signatures")


def parse(
    pdu: bytes | dict[str, Any],
    room_version: str | RoomVersion,
    *,
    header: dict[str, Any] | None = None,
) -> Event:
    """Read and check one PDU; a dict is encoded as canonical JSON first.

    `header` is the result of `peek` for these bytes, so that they are read once.

    A bad `unsigned` is dropped from the event and from its bytes: any server may have written it.

    Raise InvalidEvent with the reason, and with the event's id where it can be computed. Raise
    UnknownRoomVersion for an unknown version. A wrong content hash is no error: the event is
    returned in its redacted form, with `content_hash_valid` False.
    """
    version = version_of(room_version)
    if isinstance(pdu, dict):
        raw, header = _encoded(pdu), None
    else:
        raw = pdu if type(pdu) is bytes else bytes(memoryview(pdu))
    json, exact, raw = read(raw, strict=version.strict_canonical_json, header=header)
    try:
        _check(json, version)
        fits, event_id, signed = hashed(json, version, exact=exact)
    except InvalidEvent as error:
        raise error.of(_id_if_any(json, version)) from error.__cause__
    shown = json if fits else redact(json, version)
    return _event(raw, shown, version, event_id, content_hash_valid=fits, signed=signed)


def _encoded(pdu: dict[str, Any]) -> bytes:
    try:
        return canonical(pdu)
    except InvalidEvent:
        if "unsigned" not in pdu:
            raise
        return canonical({key: value for key, value in pdu.items() if key != "unsigned"})


def load(
    raw: bytes, room_version: str | RoomVersion, event_id: str, *, redacted: bool = False
) -> Event:
    """Return the event of stored bytes that `parse` accepted before: no checks, no hashes.

    `redacted` returns the redacted form with `content_hash_valid` False, for any reason of
    redaction.
    """
    version = version_of(room_version)
    json = read_trusted(raw, strict=version.strict_canonical_json)
    if redacted:
        json = redact(json, version)
    return _event(raw, json, version, EventId(event_id), content_hash_valid=not redacted)


def _event(
    raw: bytes,
    json: dict[str, Any],
    version: RoomVersion,
    event_id: EventId,
    *,
    content_hash_valid: bool,
    signed: bytes | None = None,
) -> Event:
    event_type = json["type"]
    prev, auth = json["prev_events"], json["auth_events"]
    if version.reference_pairs:
        prev, auth = [pair[0] for pair in prev], [pair[0] for pair in auth]
    is_create = event_type == "m.room.create"
    own_room = version.create_room_id and is_create
    return make_event(
        event_id,
        RoomId("!" + event_id[1:]) if own_room else json["room_id"],
        version,
        event_type,
        UserId(json["sender"]),
        json.get("state_key"),
        json["content"],
        json["depth"],
        json["origin_server_ts"],
        tuple(prev),
        # the rules ignore those of a create event, which may even be of another room
        () if is_create else tuple(auth),
        _redacts(json, version) if event_type == "m.room.redaction" else None,
        raw,
        json,
        content_hash_valid,
        signed,
    )


def _redacts(json: dict[str, Any], version: RoomVersion) -> str | None:
    target = (json["content"] if version.redacts_in_content else json).get("redacts")
    if isinstance(target, str) and target[:1] == "$" and "\0" not in target and _fits(target):
        return target
    return None


def _id_if_any(json: dict[str, Any], version: RoomVersion) -> EventId | None:
    try:
        return event_id(json, version)
    except InvalidEvent:  # it has no id
        return None


def _check(json: dict[str, Any], version: RoomVersion) -> None:
    event_type = _text(json, "type", strict=version.strict_key_bytes)
    if version.create_room_id and event_type == "m.room.create":
        if "room_id" in json:
            raise InvalidEvent(
                "room_id is in a create event, whose own id names the room", key="room_id"
            )
    else:
        _identifier(json, "room_id", "!")
    _identifier(json, "sender", "@", server=True)
    if version.event_id_format == "in_pdu":
        _identifier(json, "event_id", "$", server=True)
    if "state_key" in json:
        _text(json, "state_key", strict=version.strict_key_bytes)
    for key in _OBJECTS:
        if type(json.get(key)) is not dict:
            _wrong(json, key, "an object")
    _integer(json, "depth", MAX_BIGINT - 1)
    _integer(json, "origin_server_ts", MAX_BIGINT)
    _references(json, "prev_events", MAX_PREV_EVENTS, pairs=version.reference_pairs)
    _references(json, "auth_events", MAX_AUTH_EVENTS, pairs=version.reference_pairs)


def _text(json: dict[str, Any], key: str, *, strict: bool = True) -> str:
    value = json.get(key)
    if type(value) is not str:
        _wrong(json, key, "a string")
    if "\0" in value:
        raise InvalidEvent(f"{key} holds a NUL", key=key)
    if len(value) > SHORT and not _fits(value) and (strict or len(value) > MAX_ID_BYTES):
        raise InvalidEvent(f"{key} is longer than {MAX_ID_BYTES} bytes", kind="too_large", key=key)
    return value


def _identifier(json: dict[str, Any], key: str, sigil: str, *, server: bool = False) -> None:
    value = _text(json, key)
    if value[:1] != sigil or len(value) == 1:
        raise InvalidEvent(f"{key} is not an id that starts with {sigil}", key=key)
    if server and not server_name_of(value):
        raise InvalidEvent(f"{key} has no server name", key=key)


def _integer(json: dict[str, Any], key: str, maximum: int) -> None:
    value = json.get(key)
    if type(value) is not int:
        _wrong(json, key, "an integer")
    if not MIN_BIGINT <= value <= maximum:
        raise InvalidEvent(f"{key} {value} is out of range", kind="number", key=key)


def _references(json: dict[str, Any], key: str, maximum: int, *, pairs: bool) -> None:
    value = json.get(key)
    if type(value) is not list:
        _wrong(json, key, "a list")
    if len(value) > maximum:
        raise InvalidEvent(f"{len(value)} {key}, more than {maximum}", key=key)
    for item in value:
        reference = item
        if pairs:
            if type(item) is not list or len(item) != 2 or type(item[1]) is not dict:
                raise InvalidEvent(f"{key} holds something else than [id, hashes] pairs", key=key)
            reference = item[0]
        if (
            type(reference) is not str
            or reference[:1] != "$"
            or "\0" in reference
            or (len(reference) > SHORT and not _fits(reference))
        ):
            raise InvalidEvent(f"{key} holds something else than event ids", key=key)


def _fits(text: str) -> bool:
    return len(text) <= MAX_ID_BYTES and len(text.encode()) <= MAX_ID_BYTES


def _wrong(json: dict[str, Any], key: str, expected: str) -> NoReturn:
    raise InvalidEvent(f"{key} is not {expected}" if key in json else f"{key} is missing", key=key)
