"""Memberships of local users in rooms that this server is not in: invites, knocks, and their ends.

They are stored out of band: there is no state to authorise them by. The signature of the sender's
server is checked.

Another server shows some state of the room with them, as PDUs. Source: server-server API, "Inviting
to a room" (`invite_room_state`) and "Knocking upon a room" (`knock_room_state`).
"""

import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from storage.errors import InputError
from storage.event import Event, parse, sign
from storage.event.building import EventTemplate, cite, unsigned_event
from storage.event.versions import version_of
from storage.federation.room_task import RoomTask
from storage.ids import EventId, StateKey, UserId, server_name_of
from storage.persist import AppendResult, receive
from storage.persist.model.incoming import Signer
from storage.persist.receive import BYTES_MAX, Pdu, read_stripped_state
from storage.persist.send import OPAQUE_BYTES
from storage.queries.events import StoredEvent
from storage.queries.sync.state import strip
from storage.store.facade import Store
from storage.turns import in_turns

CREATE: Final = ("m.room.create", "")
END_MEMBERSHIPS: Final = frozenset({"leave", "ban"})
SHOWN_MAX: Final = 100
"""Events of a shown state that are looked at; some ten are usual."""


class ShownState(NamedTuple):
    """The state of a room that another server shows with an invite or to a user who knocked.

    ``stripped`` are the usable events, as clients get them. ``fault`` says why a server may refuse
    the invite, or is None.
    """

    stripped: list[dict[str, Any]]
    fault: str | None


@dataclass(frozen=True, slots=True)
class InviteResult:
    """The outcome of an invite, and the event to answer the request with.

    ``pdu`` is the invite as the other server gets it back, with the signature of this server if the
    store has a signing key. Answer 200 with it if `is_welcome`, else 403 with ``result.reason``.

    ``result.outcome`` is "stored"; "duplicate" if the invite was stored before; "missing_parents"
    if this server is in the room already, and the invite will come again in a transaction;
    otherwise the invite is refused.
    """

    result: AppendResult
    pdu: dict[str, Any]

    @property
    def is_welcome(self) -> bool:
        """Return whether the other server may go on with the invite."""
        return self.result.outcome in ("stored", "redacted", "duplicate", "missing_parents")


def read_membership(
    pdu: Pdu, room_version: str, server_name: str, memberships: Collection[str]
) -> Event | AppendResult:
    """Return a membership of a local user, or an "invalid" result."""
    event = receive.read(pdu, receive.header_of(pdu), room_version)
    if isinstance(event, AppendResult) or is_local_membership(event, server_name, memberships):
        return event
    return AppendResult(
        event.event_id,
        "invalid",
        f"it is no {' or '.join(sorted(memberships))} of a user of {server_name}",
    )


def read_again(event: Event, room_version: str) -> Event | AppendResult:
    """Return an event as the version of its room reads it.

    The result is "invalid" if that is another event: then one of the versions is wrong.
    """
    reread = receive.read(event.raw, receive.header_of(event.raw), room_version)
    if isinstance(reread, Event) and reread.event_id == event.event_id:
        return reread
    return AppendResult(event.event_id, "invalid", f"here the room has version {room_version}")


def is_local_membership(event: Event, server_name: str, memberships: Collection[str]) -> bool:
    """Return whether an event gives a user of this server one of these memberships."""
    membership = event.content.get("membership")
    return (
        event.type == "m.room.member"
        and event.state_key is not None
        and server_name_of(event.state_key) == server_name
        and isinstance(membership, str)  # others have no hash
        and membership in memberships
    )


def is_own_leave(event: Event) -> bool:
    """Return whether a user ends their own membership."""
    membership = event.type, event.content.get("membership"), event.state_key
    return membership == ("m.room.member", "leave", event.sender)


def signed(store: Store, event: Event) -> dict[str, Any]:
    """Return an event with the signature of this server, if the store has a signing key."""
    if store.signing_key is None:
        return event.json
    return sign(event.json, event.room_version, store.server_name, store.signing_key)


async def store_out_of_band(
    task: RoomTask, event: Event, pdu: Pdu, stripped_state: Iterable[Mapping[str, Any]] = ()
) -> AppendResult:
    """Store a membership out of band, after a check of its signature."""
    refusal = (await task.verify({event.event_id: event})).get(event.event_id)
    if refusal is not None:
        return refusal
    shown = usable_stripped_state(event.event_id, stripped_state)
    [result] = await task.store.append(
        [pdu],
        room_version=task.room_version,
        origin="out_of_band",
        stripped_state={event.event_id: shown} if shown else None,
    )
    return result


def end_of(
    ended: StoredEvent, user_id: UserId, content: Mapping[str, Any], signer: Signer
) -> dict[str, Any]:
    """Return a signed leave that ends an invite or a knock here. `InvalidEvent`.

    It cites that event alone. The other auth events are not stored, and no other server gets it.
    """
    version = version_of(ended.room_version)
    event = parse(ended.raw, version)
    now_ms, opaque = time.time_ns() // 1_000_000, secrets.token_urlsafe(OPAQUE_BYTES)
    template = EventTemplate(
        event.room_id, user_id, "m.room.member", dict(content), user_id, None, now_ms, opaque
    )
    cited = [cite(event)]
    leave = sign(
        unsigned_event(
            template, version, prev_events=cited, auth_events=cited, depth=event.depth + 1
        ),
        version,
        *signer,
    )
    parse(leave, version)
    return leave


async def store_in_room(task: RoomTask, event: Event, pdu: Pdu) -> AppendResult:
    """Store an invite to a room that this server is in, if its parents are stored."""
    refusal = (await task.verify({event.event_id: event})).get(event.event_id)
    if refusal is not None:
        return refusal
    if event.event_id in await task.stored([event.event_id]):
        return AppendResult(event.event_id, "duplicate")
    [result] = await task.store.append([pdu], room_version=task.room_version)
    return result


async def read_shown_state(task: RoomTask, pdus: object) -> ShownState:
    """Check a shown state: signed state events of the room, its create event among them.

    Leave out all others. An event is no fault if its server cannot be asked for its keys: that
    server may be gone for ever, and the rest of the state is enough.
    """
    listed = pdus[:SHOWN_MAX] if isinstance(pdus, list) else []
    read = [
        receive.read(pdu, receive.header_of(pdu), task.room_version)
        async for pdu in in_turns(listed, size=receive.size_of)
    ]
    events = {parsed.event_id: parsed for parsed in read if isinstance(parsed, Event)}
    refused = await task.verify(events)
    faults = [result.reason or "" for result in read if isinstance(result, AppendResult)]
    shown: dict[StateKey, Event] = {}
    for event_id, event in events.items():
        if event.room_id != task.room_id or event.state_key is None:
            faults.append(f"{event_id} is no state event of {task.room_id}")
        elif event_id not in refused:
            shown[event.key] = event
        elif not task.lacks_keys_of(event):
            faults.append(refused[event_id].reason or "")
    if CREATE not in shown:
        faults.append("there is no create event")
    return ShownState(
        [strip(state_event.json) for state_event in shown.values()], faults[0] if faults else None
    )


def usable_stripped_state(
    event_id: EventId, stripped_state: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the well-formed events of a stripped state, as many as may be stored."""
    shown: list[Mapping[str, Any]] = []
    size = 0
    for stripped in list(stripped_state)[:SHOWN_MAX] if isinstance(stripped_state, list) else ():
        try:
            size += len(read_stripped_state({event_id: [stripped]}, "out_of_band")[event_id])
        except InputError:  # it is for show only: the invite counts without it
            continue
        if size <= BYTES_MAX:
            shown.append(stripped)
    return shown
