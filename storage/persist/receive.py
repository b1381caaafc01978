"""Turn received PDUs into events, in an order in which they can be stored.

The room version of a known room comes from the store, or from a caller who names the room.
Otherwise it comes from the room's create event in the batch, or else from the caller.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, LiteralString, NamedTuple, TypeGuard

import orjson

from storage import arguments as args
from storage.arguments import is_text
from storage.database.connection import Database
from storage.errors import InputError, InvalidEvent, InvalidSignature, UnknownRoomVersion
from storage.event import ROOM_VERSIONS, Event, parse, peek, required_signers, verify_event
from storage.event.model import references_of
from storage.event.reading import MAX_PDU_BYTES
from storage.graph.topological_ordering import topological_sort
from storage.ids import EventId, StateKey
from storage.persist.model.results import AppendResult, invalid

Pdu = bytes | dict[str, Any]
SIGNATURES_MAX: Final = 10
"""Signatures of a server that are checked in one event. A large event may have hundreds."""

VerifyKeys = Mapping[tuple[str, str], Any] | Callable[[str, str], Awaitable[Any]]


def header_of(pdu: object) -> dict[str, Any]:
    """Peek at the header of a PDU.

    Return {} for an unreadable one: parsing will return the reason.
    """
    return (pdu if isinstance(pdu, dict) else peek(pdu) if _is_bytes(pdu) else None) or {}


def size_of(pdu: object) -> int:
    """Return the bytes of a PDU; of a dict, which nobody has counted, as many as a PDU may have."""
    return len(pdu) if _is_bytes(pdu) else MAX_PDU_BYTES


def work_of(pdu: object, read: Event | AppendResult) -> int:
    return len(read.raw) if isinstance(read, Event) else size_of(pdu)


def room_ids(headers: Iterable[Mapping[str, Any]]) -> list[str | None]:
    """Return the room id of each PDU.

    It is None if the PDU has none that a table can hold. Create events of version 12 have none.
    """
    return [room if is_text(room := header.get("room_id")) else None for header in headers]


def versions(
    headers: Sequence[Mapping[str, Any]],
    rooms: Sequence[str | None],
    room_versions: Mapping[str, str],
    created: Mapping[str, str],
    default: str | None,
) -> list[str | None]:
    """Return the room version to parse each PDU with, or None if it is unknown.

    ``rooms`` comes from `room_ids`. ``room_versions`` has priority, then a create event of the
    batch (``created``, of `note_create_event`), then ``default``. The version of another room is
    never used. Anybody can send a second create event that says anything, so a caller who knows the
    version of a room names it in ``room_versions``.
    """
    return [
        room_versions.get(room or "")
        or created.get(room or "")
        or _claimed_version(header)
        or default
        for room, header in zip(rooms, headers, strict=True)
    ]


def _claimed_version(header: Mapping[str, Any]) -> str | None:
    """Return the room version in a create event, or "?" if it is not text.

    Return None for another event, also for one whose state_key is not the empty string.
    """
    if header.get("type") != "m.room.create" or header.get("state_key") != "":
        return None
    content = header.get("content")
    version = content.get("room_version", "1") if isinstance(content, dict) else "1"
    return version if is_text(version) else "?"


def note_create_event(created: dict[str, str], pdu: Pdu, header: Mapping[str, Any]) -> None:
    """Record the version of a room by id if the PDU is its create event, and well formed."""
    version = _claimed_version(header)
    event = None if version is None else read(pdu, dict(header), version)
    if isinstance(event, Event):
        note_created(created, event.room_id, event.room_version.identifier)


def note_created(created: dict[str, str], room_id: str, version: str) -> None:
    """Record the room version of a create event. The first create event of a room counts.

    A room id of version 12 is the hash of the create event. A create event of another version that
    merely names such a room is ignored.
    """
    if ROOM_VERSIONS[version].may_have_room(room_id):
        created.setdefault(room_id, version)


def read(pdu: object, header: dict[str, Any], version: str | None) -> Event | AppendResult:
    """Return the event, or an "invalid" result. ``header`` comes from `header_of`."""
    if not (isinstance(pdu, dict) or _is_bytes(pdu)):
        return AppendResult(None, "invalid", _no_pdu(pdu))
    if version is None:
        return AppendResult(
            None,
            "invalid",
            "the room is not known: give room_version, or its create event in the same batch",
        )
    try:
        return parse(pdu, version, header=header or None)
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
    return {index for event_id in named for index in places.get(event_id, ())}


# --------------------------------------------------------------------------------------------------
# Check the states that a caller of `append` gives as `state_before`.
#
# A state has at most one event per key and no rejected event. Ids of events that are not stored are
# no error: the result `missing_parents` lists them. An event of the same batch is checked by its
# key only, because it is not authorised yet.

States = Mapping[EventId, tuple[EventId, ...]]

SQL_STATE_EVENTS: Final[LiteralString] = """
SELECT e.event_id, t.type, k.state_key, e.rejected
FROM unnest($1::text[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.id OFFSET 0) AS e
CROSS JOIN LATERAL (
    SELECT * FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
CROSS JOIN LATERAL (SELECT type FROM event_types WHERE type_nid = k.type_nid OFFSET 0) AS t
"""


StatesBefore = Mapping[EventId, Iterable[EventId]] | Mapping[str, Iterable[str]]
"""The ids of the state before an event, by its id."""


class StateBeforeRow(NamedTuple):
    """A stored state event."""

    event_id: str
    type: str
    state_key: str
    rejected: str | None


def read_states_before(state_before: StatesBefore | None) -> States:
    """Return the states as tuples of distinct event ids.

    Raise `InputError` if it is not a mapping of lists, and `InvalidIdentifier` for a malformed id.
    """
    if state_before is None:
        return {}
    return {
        EventId(event_id): tuple(args.events(ids))
        for event_id, ids in args.mapping(state_before, "state_before").items()
    }


async def check(database: Database, states: States, batch: Iterable[Event]) -> None:
    """Raise `InputError` for a state with two events of one key, or with a rejected event."""
    if not states:
        return
    keys = {event.event_id: event.key for event in batch if event.state_key is not None}
    ids = list({event_id for state in states.values() for event_id in state})
    async with database.connection() as conn:
        rows = {
            row.event_id: row for row in await conn.fetch(SQL_STATE_EVENTS, ids, row=StateBeforeRow)
        }
    keys.update((EventId(row.event_id), (row.type, row.state_key)) for row in rows.values())
    for event_id, state in states.items():
        _check_state(event_id, state, keys, rows)


def _check_state(
    event_id: EventId,
    state: Iterable[EventId],
    keys: Mapping[EventId, StateKey],
    rows: Mapping[str, StateBeforeRow],
) -> None:
    by_key: dict[StateKey, EventId] = {}
    for state_id in state:
        if state_id in rows and rows[state_id].rejected is not None:
            raise InputError(
                f"state_before of {event_id} holds {state_id}, which is rejected: "
                f"{rows[state_id].rejected}"
            )
        if state_id not in keys:
            continue
        first = by_key.setdefault(keys[state_id], state_id)
        if first != state_id:
            raise InputError(
                f"state_before of {event_id} holds two events of {keys[state_id]}: "
                f"{first} and {state_id}"
            )


# --------------------------------------------------------------------------------------------------
# Check the stripped state that a caller of `append` gives with out-of-band events.
#
# It is the part of a room's state that another server shares with an invite or knock.

Stripped = Iterable[Mapping[str, Any]]
StrippedState = Mapping[EventId, Stripped] | Mapping[str, Stripped]

BYTES_MAX: Final = 262_144
"""Maximum size of the stripped state of one event, as JSON.

A room shares some ten state events. Each has at most 65,536 bytes, and most are far smaller.
"""

TEXTS: Final = ("type", "state_key", "sender")


def read_stripped_state(stripped_state: StrippedState | None, origin: str) -> dict[EventId, str]:
    """Return the stripped states as JSON, by event.

    Raise `InputError` if one is malformed, too large, or given with another origin.
    """
    by_event = {} if stripped_state is None else args.mapping(stripped_state, "stripped_state")
    if by_event and origin != "out_of_band":
        raise InputError(f'stripped_state goes with origin="out_of_band", not with {origin!r}')
    return {args.event(event_id): _json(event_id, events) for event_id, events in by_event.items()}


def _json(event_id: EventId, events: Iterable[Mapping[str, Any]]) -> str:
    name = f"stripped_state of {event_id}"
    written = [
        _event(event, f"{name}, event {number},")
        for number, event in enumerate(args.listed(events, name))
    ]
    if (size := sum(map(len, written))) > BYTES_MAX:
        raise InputError(f"{name} has {size} bytes: at most {BYTES_MAX} can be stored")
    return (b"[" + b",".join(written) + b"]").decode()


def _event(event: Mapping[str, Any], name: str) -> bytes:
    packed = args.content(event, name)
    fields = orjson.loads(packed)
    for key in TEXTS:
        if not isinstance(fields.get(key), str):
            raise InputError(f"{name} has no text as {key}")
    if not isinstance(fields.get("content"), dict):
        raise InputError(f"{name} has no object as content")
    return packed


# --------------------------------------------------------------------------------------------------
# Verdicts of the caller on events, such as those of a policy server.
#
# `append` stores an event that the caller refuses as soft-failed, with the reason of the caller.
# The verdict counts only for an event that the auth rules accept. `storage.persist.readmit` lifts
# it.

Refused = Mapping[EventId, str] | Mapping[str, str]
TIMELINE_ORIGINS: Final = ("live", "backfill")
REASON_MAX: Final = 500


def read_refused(refused: Refused | None, origin: str) -> dict[EventId, str]:
    """Return the reasons by event.

    Raise `InputError` for a malformed reason, or for an origin whose events have no verdict.
    """
    reasons = {} if refused is None else args.mapping(refused, "refused")
    if reasons and origin not in TIMELINE_ORIGINS:
        raise InputError(f"refused goes with live or backfilled events, not with {origin!r}")
    return {args.event(event_id): reason_of(reason) for event_id, reason in reasons.items()}


def reason_of(reason: object) -> str:
    """Return the reason of a verdict; raise `InputError` for what is none."""
    if not args.is_text(reason) or not 1 <= len(reason) <= REASON_MAX:
        raise InputError(
            f"the reason of a verdict is {reason!r}: "
            f"a text of 1 to {REASON_MAX} characters is wanted, without NUL and half surrogates"
        )
    return reason


def check_named(refused: Refused, event_ids: Iterable[EventId | None]) -> None:
    """Raise `InputError` if a refused event is not in the batch.

    ``event_ids`` are those of the batch, None for an unreadable PDU. It may have any id, so then
    nothing is raised: a bad PDU never fails its batch.
    """
    ids = set(event_ids)
    if None not in ids and (strange := refused.keys() - ids):
        raise InputError(f"refused has {min(strange)}, which is not among the PDUs")
