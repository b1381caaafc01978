"""Make the first events of a room: create event, join of the creator, power levels, initial state.

Nobody else can write to a room that does not exist, so all events are built before they are stored.
Each is authorised by the state that the ones before it have made.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from storage import arguments as args
from storage.auth import auth_event_keys, check
from storage.auth.own_events import own_content
from storage.database.connection import Database
from storage.errors import StorageCorrupt
from storage.event import Event, parse, sign
from storage.event.building import EventTemplate, cite, outline, unsigned_event
from storage.event.versions import RoomVersion, version_of
from storage.ids import RoomId, StateKey, UserId
from storage.persist.append import AppendOptions, append
from storage.persist.commit.group_commit import Writer
from storage.persist.model.local_event import Signer
from storage.persist.send import OPAQUE_BYTES

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
