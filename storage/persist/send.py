"""`send`: an event of a local user. Only its content is given; the plan builds the rest."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from storage import arguments as args
from storage.auth import auth_event_keys, check
from storage.auth.auth_events import own_content
from storage.database.connection import Database
from storage.errors import AuthDenied, InputError, InvalidEvent, StorageCorrupt, UnknownRoom
from storage.event import Event, parse, sign
from storage.event.building import EventTemplate, cite, outline, unsigned_event
from storage.event.versions import RoomVersion, version_of
from storage.ids import RoomId, StateKey, UserId
from storage.persist.append import AppendOptions, append
from storage.persist.commit.group_commit import Writer
from storage.persist.load.lookups import first_result
from storage.persist.load.on_demand import load
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import LocalEvent, Signer
from storage.persist.model.missing_data import MissingData
from storage.persist.model.results import (
    AppendResult,
    RequestPath,
    SendResult,
    Transaction,
    TransactionKey,
)
from storage.persist.plan.event import REDACTION, template_of

CREATE: Final = "m.room.create"
STATE_KEYS: Final = {
    "m.room.avatar": '""',
    "m.room.canonical_alias": '""',
    "m.room.encryption": '""',
    "m.room.guest_access": '""',
    "m.room.history_visibility": '""',
    "m.room.join_rules": '""',
    "m.room.member": "the user id",
    "m.room.name": '""',
    "m.room.pinned_events": '""',
    "m.room.power_levels": '""',
    "m.room.server_acl": '""',
    "m.room.third_party_invite": "the token",
    "m.room.tombstone": '""',
    "m.room.topic": '""',
    "m.space.child": "the id of the child",
    "m.space.parent": "the id of the parent",
}
"""The state key of well-known state events. Source: client-server API, "Room events", "Spaces"."""

OPAQUE_BYTES: Final = 18
"""Random bytes of an id that this server chooses."""

LOADS_MAX: Final = 100
"""Most statements for one template; a handful is usual."""


class SendRequest(NamedTuple):
    """The parts of a new event that its sender chooses."""

    room_id: RoomId
    sender: UserId
    type: str
    content: Mapping[str, Any]
    state_key: str | None = None
    redacts: str | None = None
    timestamp_ms: int | None = None
    transaction: tuple[str, str] | None = None


async def send(database: Database, writer: Writer, new: SendRequest, signer: Signer) -> SendResult:
    """Build, sign, authorise and store an event; return its result.

    A repeated transaction returns the id of its first event, with the outcome "duplicate".

    Raise `AuthDenied` if the current state of the room refuses it, `UnknownRoom`, or `InvalidEvent`
    for a content that no event can have. Nothing is stored then.
    """
    if new.type == CREATE:
        raise InputError("a room begins with create_room, not with a create event")
    parts, request = _template(new), _transaction(new)
    if request is not None and (first := await _repeated(database, writer, request)) is not None:
        return SendResult(*first)
    [result] = await writer.append([LocalEvent(parts, signer, new.room_id, request)])
    if result.event_id is None:
        raise _refusal(result, new)
    if result.outcome == "duplicate" and result.stream_ordering is None and request is not None:
        result = await _stored(database, request) or result
    if result.outcome not in ("stored", "duplicate"):
        raise StorageCorrupt("an own event is not accepted", result=result)
    return SendResult(*result)


def _transaction(new: SendRequest) -> Transaction | None:
    if new.transaction is None:
        return None
    key = TransactionKey(new.room_id, new.sender, *new.transaction)
    return Transaction(key, RequestPath(new.type, new.state_key, new.redacts))


async def _repeated(
    database: Database, writer: Writer, request: Transaction
) -> AppendResult | None:
    """Return the result of the first request if it is stored and this process may not know it.

    A device that has just sent a request to this process repeats what the plan knows. If it has
    sent the same one to another process, the primary key refuses the write. So most requests need
    no look-up, and those that a client repeats after a restart need one.
    """
    caches, device = writer.caches, (request.key.sender, request.key.device_id)
    if device in caches.devices or any(key in caches.transactions for key in request.stored_as()):
        return None
    return await _stored(database, request)


async def _stored(database: Database, request: Transaction) -> AppendResult | None:
    async with database.connection() as conn:
        return await first_result(conn, request)


async def template(
    database: Database, writer: Writer, server_name: str, new: SendRequest
) -> dict[str, Any]:
    """Return the PDU that `send` would build now, without hashes and signatures.

    It reads the extremities of the room from the database, and may use cached states. Raise as
    `send` does.
    """
    parts = _template(new)
    change_set = ChangeSet(writer.caches, NidBlocks(), server_name)
    async with database.connection() as conn:
        await load(conn, change_set, MissingData("rooms", (new.room_id,)))
        for _ in range(LOADS_MAX):
            try:
                return template_of(change_set, parts)
            except MissingData as lacking:
                await load(conn, change_set, lacking)
    raise StorageCorrupt("the data of a template is never complete", room_id=new.room_id)


def _template(new: SendRequest) -> EventTemplate:
    """Return the checked parts of a new event; the content is copied.

    Raise `InputError` if it lacks what its type needs, and `InvalidEvent` if other servers fail on
    it.
    """
    kind = args.text(new.type)
    if kind == REDACTION and new.redacts is None:
        raise InputError("a redaction needs redacts, the id of the event to redact")
    if new.state_key is None and kind in STATE_KEYS:
        raise InputError(f"{kind} is a state event: give state_key, {STATE_KEYS[kind]}")
    state_key = None if new.state_key is None else args.text(new.state_key)
    content = own_content(kind, state_key, new.content)
    return EventTemplate(
        new.room_id,
        new.sender,
        kind,
        content,
        state_key,
        None if new.redacts is None else args.event(new.redacts),
        time.time_ns() // 1_000_000 if new.timestamp_ms is None
        else args.position(new.timestamp_ms, "timestamp_ms"),
        secrets.token_urlsafe(OPAQUE_BYTES),
    )  # fmt: skip


def _refusal(result: AppendResult, new: SendRequest) -> InputError:
    """Return the error for an event that was not built."""
    if result.outcome == "missing_parents":
        return UnknownRoom(new.room_id)
    if result.outcome == "invalid":
        return InvalidEvent(result.reason or "", kind=result.kind or "malformed", key=result.key)
    rule, _, reason = (result.reason or "").partition(": ")
    return AuthDenied(reason, rule=rule)


# --------------------------------------------------------------------------------------------------
# Make the first events of a room: create event, join of the creator, power levels, initial state.
#
# Nobody else can write to a room that does not exist, so all events are built before they are
# stored. Each is authorised by the state that the ones before it have made.

InitialEvent = tuple[str, str, Mapping[str, Any]]
"""Type, state key and content of a state event."""

POWER_LEVELS = "m.room.power_levels"


class NewRoom(NamedTuple):
    """The parts of a new room that its creator chooses."""

    creator: UserId
    room_version: str
    content: Mapping[str, Any]
    initial_state: Sequence[InitialEvent]


async def create_room(
    database: Database, writer: Writer, request: NewRoom, signer: Signer
) -> RoomId:
    """Build and store the first events of a room; return its id. See `Store.create_room`."""
    events = first_events(request, signer, time.time_ns() // 1_000_000)
    options = AppendOptions(request.room_version, "live", None, None, None)
    results = await append(database, writer, [event.raw for event in events], options)
    for result in results:
        if result.outcome != "stored":
            raise StorageCorrupt(
                f"an event of a new room is {result.outcome}: {result.reason}",
                event_id=result.event_id,
            )
    return events[0].room_id


def first_events(request: NewRoom, signer: Signer, timestamp_ms: int) -> list[Event]:
    """Return the signed first events of a room, in order. Raise `AuthDenied` for a refused one."""
    version = version_of(request.room_version)
    making = _Making(request, signer, version, timestamp_ms)
    for kind, state_key, content in _contents(request, version):
        making.add(kind, state_key, content)
    return making.events


def _contents(request: NewRoom, version: RoomVersion) -> list[InitialEvent]:
    """Return type, state key and content of the first events, in order."""
    creation = {**request.content, "room_version": version.identifier}
    if not version.creator_is_sender:
        creation["creator"] = request.creator
    first: list[InitialEvent] = [
        ("m.room.create", "", creation),
        ("m.room.member", request.creator, {"membership": "join"}),
    ]
    if not any(kind == POWER_LEVELS and key == "" for kind, key, _ in request.initial_state):
        users = {} if version.privileged_creators else {request.creator: 100}
        first.append((POWER_LEVELS, "", {"users": users}))
    return [*first, *request.initial_state]


class _Making:
    """The events made so far, and their state."""

    def __init__(
        self, request: NewRoom, signer: Signer, version: RoomVersion, timestamp_ms: int
    ) -> None:
        self.events: list[Event] = []
        self._sender = request.creator
        self._signer = signer
        self._version = version
        self._timestamp_ms = timestamp_ms
        self._state: dict[StateKey, Event] = {}
        self._room_id = (
            None
            if version.create_room_id
            else RoomId(f"!{secrets.token_urlsafe(OPAQUE_BYTES)}:{signer.server_name}")
        )

    def add(self, kind: str, state_key: str, content: Mapping[str, Any]) -> None:
        """Build, sign and authorise the next event."""
        template = self._template(kind, state_key, content)
        keys = sorted(auth_event_keys(outline(template, self._version)))
        event = self._signed(template, [self._state[key] for key in keys if key in self._state])
        check(event, self._state, self._version)
        self.events.append(event)
        self._state[event.key] = event
        self._room_id = event.room_id

    def _template(self, kind: str, state_key: str, content: Mapping[str, Any]) -> EventTemplate:
        checked = own_content(args.text(kind), args.text(state_key), content)
        return EventTemplate(
            self._room_id,
            self._sender,
            kind,
            checked,
            state_key,
            None,
            self._timestamp_ms,
            secrets.token_urlsafe(OPAQUE_BYTES),
        )

    def _signed(self, template: EventTemplate, auth_events: Sequence[Event]) -> Event:
        pdu = unsigned_event(
            template,
            self._version,
            prev_events=[cite(event) for event in self.events[-1:]],
            auth_events=[cite(event) for event in auth_events],
            depth=len(self.events) + 1,
        )
        return parse(sign(pdu, self._version, *self._signer), self._version)
