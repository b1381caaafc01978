"""Request the state before an event whose parents are missing.

The answer is not believed as it is:

- Each event must be a state event of this room, signed, and allowed by its own auth events.
- A state with two events of one key, or without the create event, is refused as a whole.
- A state of which an event is not returned is refused as well. The next server then returns the
  rest: the events that were returned are stored.
- An event that is returned, but not signed or not allowed, is left out, unless another event of
  the state depends on it.

A server can still return an older state of the same room, or leave out entries. So a state that
does not allow the event itself is used only if no other server returns one that does.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from storage.auth import check, keys_needed
from storage.errors import AuthDenied
from storage.event import Event
from storage.event.references import auth_ids_of
from storage.federation.remote import RemoteError
from storage.federation.room_task import RoomTask
from storage.ids import EventId, ServerName, StateKey
from storage.persist.receive import Pdu
from storage.queries.receiving import StoredKey

logger: Final = logging.getLogger(__name__)

CREATE: Final = ("m.room.create", "")


class FetchedState(NamedTuple):
    """The state before an event: its stored events, and why others of the answer are left out."""

    ids: tuple[EventId, ...]
    left_out: dict[EventId, str]
    allows: bool
    """Whether the event is allowed in this state."""


async def state_before(
    task: RoomTask, servers: Sequence[ServerName], event: Event
) -> FetchedState | None:
    """Return the state before an event; None if no server returns a usable one.

    The events of the state, and their auth chains, are stored as outliers.
    """
    second: FetchedState | None = None
    for server in servers:
        try:
            found = await _from_server(task, server, event)
        except RemoteError as error:
            task.requests.failures.setdefault(server, str(error))
            continue
        if found.allows:
            return found
        second = second or found
    return second


async def _from_server(task: RoomTask, server: ServerName, event: Event) -> FetchedState:
    state_ids, chain_ids = await task.requests.state_ids(server, task.room_id, event.event_id)
    wanted = dict.fromkeys([*state_ids, *chain_ids, *auth_ids_of(event)])
    stored = await task.stored(wanted)
    lacking = [one for one in wanted if one not in stored or stored[one].out_of_band]
    fetched, left_out = await _fetched(task, server, event, lacking)
    stored = await task.stored(wanted)
    if unreturned := wanted.keys() - stored.keys() - left_out.keys():
        reason = f"it did not return {len(unreturned)} of {len(lacking)} events of its state"
        raise refused(task, server, reason)
    lost = {one for one in wanted if one not in stored or not stored[one].is_authorised}
    # an auth event that is stored as rejected decides on the event itself: it is rejected, too
    needed = {one for other in fetched for one in lost.intersection(auth_ids_of(other))}
    if needed := needed | (set(auth_ids_of(event)) & lost - stored.keys()):
        raise refused(task, server, f"its state lacks {min(needed)}, which others cite")
    entries = _entries(task, server, state_ids, stored, left_out)
    if left_out:
        logger.info("%d events of the state before %s are left out", len(left_out), event.event_id)
    return FetchedState(tuple(entries.values()), left_out, await _allows(task, entries, event))


async def _fetched(
    task: RoomTask, server: ServerName, event: Event, lacking: Sequence[EventId]
) -> tuple[list[Event], dict[EventId, str]]:
    """Store the lacking events that the server returns. Return those that are accepted.

    Also return why others are left out.
    """
    pdus = await _pdus(task, server, event, lacking)
    read = await task.read(pdus, only=frozenset(lacking))
    if read.foreign:
        raise refused(task, server, f"its state holds {min(read.foreign)} of another room")
    results = await task.append_chain(read.events, event)
    left_out = {one: refusal.reason or "" for one, refusal in read.refused.items()}
    for one in read.events:
        result = results.get(one)
        if result is None or not result.is_stored or result.outcome == "rejected":
            left_out[one] = "the auth rules refuse it" if result is None else str(result.reason)
    return [one for key, one in read.events.items() if key not in left_out], left_out


async def _pdus(
    task: RoomTask, server: ServerName, event: Event, lacking: Sequence[EventId]
) -> list[Pdu]:
    if not lacking:
        return []
    if len(lacking) > task.limits.single_events_max:
        return await task.requests.state(server, task.room_id, event.event_id)
    return await single_events(task, server, lacking)


async def single_events(
    task: RoomTask, server: ServerName, event_ids: Iterable[EventId]
) -> list[Pdu]:
    """Request events one by one, a few at the same time; those that fail are left out."""
    turns = asyncio.Semaphore(task.limits.requests_at_once)

    async def one(event_id: EventId) -> list[Pdu]:
        async with turns:
            try:
                return await task.requests.event(server, event_id)
            except RemoteError:  # recorded in task.requests.failures
                return []

    return [pdu for found in await asyncio.gather(*map(one, event_ids)) for pdu in found]


def _entries(
    task: RoomTask,
    server: ServerName,
    state_ids: Iterable[EventId],
    stored: Mapping[EventId, StoredKey],
    left_out: dict[EventId, str],
) -> dict[StateKey, EventId]:
    """Return the state by key; raise `RemoteError` for one that no room can have."""
    entries: dict[StateKey, EventId] = {}
    for event_id in state_ids:
        key = stored.get(event_id)
        if key is None or not key.is_authorised:
            left_out.setdefault(event_id, "it is rejected")
            continue
        if key.room_id != task.room_id or key.state_key is None:
            raise refused(task, server, f"its state holds {event_id}, no state of this room")
        first = entries.setdefault((key.type, key.state_key), event_id)
        if first != event_id:
            raise refused(task, server, f"its state holds {first} and {event_id} for one key")
    if CREATE not in entries:
        raise refused(task, server, "its state has no create event")
    return entries


def refused(task: RoomTask, server: ServerName, reason: str) -> RemoteError:
    """Return the error for an answer that cannot be used, and record it."""
    task.requests.failures[server] = reason
    return RemoteError(reason)


async def _allows(task: RoomTask, entries: Mapping[StateKey, EventId], event: Event) -> bool:
    keys = {CREATE, *keys_needed(event)} & entries.keys()
    events = await task.loaded(entries[key] for key in keys)
    state = {key: events[entries[key]] for key in keys if entries[key] in events}
    try:
        check(event, state, event.room_version)
    except AuthDenied:
        return False
    return True
