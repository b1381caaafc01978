"""Turn received PDUs into events, in an order in which they can be stored.

The room version of a known room comes from the store, or from a caller who names the room.
Otherwise it comes from the room's create event in the batch, or else from the caller.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

from storage.arguments import is_text
from storage.errors import InputError, InvalidEvent, InvalidSignature, UnknownRoomVersion
from storage.event import ROOM_VERSIONS, Event, glance, parse, required_signers, verify_event
from storage.event.reading import MAX_PDU_BYTES
from storage.event.references import references_of
from storage.graph.topological_sort import topological_sort
from storage.ids import EventId
from storage.persist.model.results import AppendResult, invalid

Pdu = bytes | dict[str, Any]
SIGNATURES_MAX: Final = 10
"""Signatures of a server that are checked in one event. A large event may have hundreds."""

VerifyKeys = Mapping[tuple[str, str], Any] | Callable[[str, str], Awaitable[Any]]


def glance_of(pdu: object) -> dict[str, Any]:
    """Peek at the header of a PDU.

    Return {} for an unreadable one: parsing will return the reason.
    """
    return (pdu if isinstance(pdu, dict) else glance(pdu) if _is_bytes(pdu) else None) or {}


def size_of(pdu: object) -> int:
    """Return the bytes of a PDU; of a dict, which nobody has counted, as many as a PDU may have."""
    return len(pdu) if _is_bytes(pdu) else MAX_PDU_BYTES


def work_of(pdu: object, read: Event | AppendResult) -> int:
    return len(read.raw) if isinstance(read, Event) else size_of(pdu)


def room_ids(glanced: Iterable[Mapping[str, Any]]) -> list[str | None]:
    """Return the room id of each PDU.

    It is None if the PDU has none that a table can hold. Create events of version 12 have none.
    """
    return [room if is_text(room := one.get("room_id")) else None for one in glanced]


def versions(
    glanced: Sequence[Mapping[str, Any]],
    rooms: Sequence[str | None],
    known: Mapping[str, str],
    created: Mapping[str, str],
    given: str | None,
) -> list[str | None]:
    """Return the room version to parse each PDU with, or None if it is unknown.

    ``rooms`` comes from `room_ids`. ``known`` has priority, then a create event of the batch
    (``created``, of `note_create_event`), then ``given``. The version of another room is never
    used. Anybody can send a second create event that says anything, so a caller who knows the
    version of a room names it in ``known``.
    """
    return [
        known.get(room or "") or created.get(room or "") or _said_version(one) or given
        for room, one in zip(rooms, glanced, strict=True)
    ]


def _said_version(glanced: Mapping[str, Any]) -> str | None:
    """Return the room version in a create event, or "?" if it is not text.

    Return None for another event, also for one whose state_key is not the empty string.
    """
    if glanced.get("type") != "m.room.create" or glanced.get("state_key") != "":
        return None
    content = glanced.get("content")
    version = content.get("room_version", "1") if isinstance(content, dict) else "1"
    return version if is_text(version) else "?"


def note_create_event(found: dict[str, str], pdu: Pdu, glanced: Mapping[str, Any]) -> None:
    """Record the version of a room by id if the PDU is its create event, and well formed."""
    version = _said_version(glanced)
    event = None if version is None else read(pdu, dict(glanced), version)
    if isinstance(event, Event):
        note_created(found, event.room_id, event.room_version.identifier)


def note_created(found: dict[str, str], room_id: str, version: str) -> None:
    """Record the room version of a create event. The first create event of a room counts.

    A room id of version 12 is the hash of the create event. A create event of another version that
    merely names such a room is ignored.
    """
    if ROOM_VERSIONS[version].may_have_room(room_id):
        found.setdefault(room_id, version)


def read(pdu: object, glanced: dict[str, Any], version: str | None) -> Event | AppendResult:
    """Return the event, or an "invalid" result. ``glanced`` comes from `glance_of`."""
    if not (isinstance(pdu, dict) or _is_bytes(pdu)):
        return AppendResult(None, "invalid", _no_pdu(pdu))
    if version is None:
        return AppendResult(
            None,
            "invalid",
            "the room is not known: give room_version, or its create event in the same batch",
        )
    try:
        return parse(pdu, version, glanced=glanced or None)
    except UnknownRoomVersion as error:
        return AppendResult(None, "invalid", str(error))
    except InvalidEvent as error:
        return invalid(error, error.event_id)  # type: ignore[arg-type]  # an id that was read is an EventId


def _is_bytes(value: object) -> TypeGuard[bytes]:
    return isinstance(value, bytes | bytearray | memoryview)


def _no_pdu(value: object) -> str:
    return f"a PDU is bytes or a dict, not {type(value).__name__}" + (
        ": write pdu.encode()" if isinstance(value, str) else ""
    )


def check_keys(keys: object) -> None:
    """Raise `InputError` for keys that no signature could be checked with."""
    if keys is None or callable(keys):
        return
    if not isinstance(keys, Mapping):
        raise InputError(
            f"verify_keys is a {type(keys).__name__}: a mapping or an async function is wanted"
        )
    first = next(iter(keys), None)
    if first is not None and not (isinstance(first, tuple) and len(first) == 2):
        raise InputError(
            f"verify_keys has {first!r}: pairs are wanted, "
            'write {("matrix.org", "ed25519:1"): key}'
        )


async def check_signatures(event: Event, keys: VerifyKeys) -> AppendResult | None:
    """Return an "invalid" result if a required signature is missing or wrong, else None.

    For each server that must sign, one signature by a known key is enough, among the first
    `SIGNATURES_MAX` of these. Source: server-server
    API, "Validating hashes and signatures on received events".
    """
    for server in sorted(required_signers(event)):
        reason = await _refusal(event, server, keys)
        if reason is not None:
            return AppendResult(event.event_id, "invalid", f"signature of {server}: {reason}")
    return None


async def _refusal(event: Event, server: str, keys: VerifyKeys) -> str | None:
    signatures = event.json.get("signatures", {}).get(server)
    reason, checked = "there is none", 0
    for key_id in signatures if isinstance(signatures, dict) else ():
        key = await _key(keys, server, key_id)
        if key is None:
            reason = f"verify_keys has no key for {(server, key_id)}"
            continue
        if checked == SIGNATURES_MAX:
            break
        checked += 1
        try:
            verify_event(event, server, key)
        except InvalidSignature as error:
            reason = error.reason
        else:
            return None
    return reason


async def _key(keys: VerifyKeys, server: str, key_id: str) -> Any:
    if isinstance(keys, Mapping):
        return keys.get((server, key_id))
    return await keys(server, key_id)


def in_order(events: Sequence[Event]) -> list[int]:
    """Return the indexes of the events in an order in which they can be stored.

    Each step takes the first event whose parents and auth events in the batch were taken. In a
    cycle it takes the first remaining event. Event ids of versions 1 and 2 can form cycles.
    """
    if _is_in_order(events):
        return list(range(len(events)))
    places: dict[EventId, list[int]] = {}
    for index, event in enumerate(events):
        places.setdefault(event.event_id, []).append(index)
    return topological_sort([_within(event, places) for event in events])


def _is_in_order(events: Sequence[Event]) -> bool:
    """Return whether no event refers to itself or to a later event.

    That is the usual case, and the check takes a tenth of the time of a sort.
    """
    later: set[str] = set()
    for event in reversed(events):
        later.add(event.event_id)
        if not later.isdisjoint(references_of(event)):
            return False
    return True


def _within(event: Event, places: Mapping[EventId, Sequence[int]]) -> set[int]:
    """Return the indexes of the events in the batch that an event refers to."""
    named = {*references_of(event)} - {event.event_id}
    return {place for one in named for place in places.get(one, ())}
