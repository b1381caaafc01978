"""From received PDUs to events in an order in which they can be stored.

The room version comes from the store where the room is known, else from a create event in the batch, else from the caller.
"""

import heapq
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import orjson

from storage.errors import InvalidEvent, InvalidSignature, UnknownRoomVersion
from storage.event import Event, parse, required_signers, verify
from storage.ids import EventId
from storage.persist.results import AppendResult

Pdu = bytes | dict[str, Any]
VerifyKeys = Mapping[tuple[str, str], Any] | Callable[[str, str], Awaitable[Any]]


def room_ids(pdus: Iterable[Pdu]) -> list[str | None]:
    """The room each PDU says it is of, None where that cannot be read (or is not said: create events of version 12)."""
    return [_text(_peek(pdu).get("room_id")) for pdu in pdus]


def versions(pdus: Sequence[Pdu], rooms: Sequence[str | None], known: Mapping[str, str], given: str | None) -> list[str | None]:
    """The room version to read each PDU by; None if there is no way to know."""
    created: dict[str, str] = {}
    own: list[str | None] = [None] * len(pdus)
    for index, (pdu, room_id) in enumerate(zip(pdus, rooms, strict=True)):
        content = _created(pdu)
        if content is not None:
            own[index] = version = _text(content.get("room_version", "1")) or "?"
            if room_id is not None:
                created.setdefault(room_id, version)
    fallback = given or next((version for version in own if version is not None), None)
    return [known.get(room or "") or own[index] or created.get(room or "") or fallback for index, room in enumerate(rooms)]


def _created(pdu: Pdu) -> Mapping[str, Any] | None:
    """The content of a create event; None for other events."""
    if isinstance(pdu, bytes) and b"m.room.create" not in pdu:
        return None
    peeked = _peek(pdu)
    if peeked.get("type") != "m.room.create" or peeked.get("state_key") != "":
        return None
    content = peeked.get("content")
    return content if isinstance(content, dict) else {}


def _peek(pdu: Pdu) -> Mapping[str, Any]:
    """The PDU as far as it can be read at a glance; {} where it cannot (parsing will say why)."""
    if isinstance(pdu, dict):
        return pdu
    try:
        peeked = orjson.loads(pdu)
    except (orjson.JSONDecodeError, TypeError):
        return {}
    return peeked if isinstance(peeked, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def read(pdu: Pdu, version: str | None) -> Event | AppendResult:
    """The event, or the answer that it is invalid."""
    if version is None:
        return AppendResult(None, "invalid", "the room is not known: give room_version, or its create event in the same batch")
    try:
        return parse(pdu, version)
    except UnknownRoomVersion as error:
        return AppendResult(None, "invalid", str(error))
    except InvalidEvent as error:
        return AppendResult(error.event_id, "invalid", error.reason)  # type: ignore[arg-type]  # an id that was read is one


async def check_signatures(event: Event, keys: VerifyKeys) -> AppendResult | None:
    """The answer that the event is invalid if a signature that it must have is missing or wrong; else None.

    Of each server that must sign, one signature by a key that is known is enough. Source: server-server API, "Validating
    hashes and signatures on received events".
    """
    for server in sorted(required_signers(event)):
        reason = await _refusal(event, server, keys)
        if reason is not None:
            return AppendResult(event.event_id, "invalid", f"signature of {server}: {reason}")
    return None


async def _refusal(event: Event, server: str, keys: VerifyKeys) -> str | None:
    signatures = event.json.get("signatures", {}).get(server)
    reason = "there is none"
    for key_id in signatures if isinstance(signatures, dict) else ():
        key = await _key(keys, server, key_id)
        if key is None:
            reason = f"the key {key_id} is not known"
            continue
        try:
            verify(event.json, event.room_version.identifier, server, key)
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
    """The positions of the events in an order in which they can be stored.

    Again and again the first whose parents and auth events in the batch have all had their turn; in a circle, which the ids of
    versions 1 and 2 can form, the first of those left.
    """
    places: dict[EventId, list[int]] = {}
    for index, event in enumerate(events):
        places.setdefault(event.event_id, []).append(index)
    waits = [_within(event, places) for event in events]
    if all(before < index for index, befores in enumerate(waits) for before in befores):
        return list(range(len(events)))
    return _kahn(waits)


def _kahn(waits: Sequence[set[int]]) -> list[int]:
    followers: dict[int, list[int]] = {}
    for index, befores in enumerate(waits):
        for before in befores:
            followers.setdefault(before, []).append(index)
    left = [len(befores) for befores in waits]
    free = [index for index, count in enumerate(left) if count == 0]
    waiting = dict.fromkeys(range(len(waits)))
    ordered: list[int] = []
    while waiting:
        index = heapq.heappop(free) if free else next(iter(waiting))
        if index not in waiting:
            continue  # was let go ahead in a circle
        del waiting[index]
        ordered.append(index)
        for follower in followers.get(index, ()):
            left[follower] -= 1
            if left[follower] == 0:
                heapq.heappush(free, follower)
    return ordered


def _within(event: Event, places: Mapping[EventId, Sequence[int]]) -> set[int]:
    """The positions of the parents and auth events (and the create event that a room id names) that are in the batch."""
    named = {*event.prev_event_ids, *event.auth_event_ids}
    if event.room_version.create_room_id:
        named.add(EventId("$" + event.room_id[1:]))
    named.discard(event.event_id)
    return {place for one in named for place in places.get(one, ())}
