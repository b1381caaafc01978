"""The answer to send_join: check all of it in memory, store the state, then the join.

Nothing is written before everything is checked. The state and its auth chain are then stored as
outliers, and the join is stored last, with the state before it. A process that is killed in between
leaves outliers, which no client sees; the same call completes the join.

Source: server-server API, "Joining rooms".
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from storage import arguments as args
from storage.auth import check, check_auth_events, keys_needed
from storage.errors import AuthDenied, InvalidIdentifier
from storage.event import ROOM_VERSIONS, Event, required_signers
from storage.event.model import auth_ids_of
from storage.federation.remote import RemoteError
from storage.federation.requests import pdus_in
from storage.federation.room_task import ReadEvents, RoomTask
from storage.ids import EventId, RoomId, ServerName, StateKey, UserId, server_name_of
from storage.maintenance.purge.room import forget_claimed_room, is_claimed
from storage.persist import AppendResult, partial_marks, receive
from storage.persist.plan.partial_state import NOT_MARKED
from storage.persist.receive import Pdu
from storage.queries import gaps
from storage.queries.federation import KnownRoom, StoredKey, stored_rooms
from storage.queries.gaps import PartialRoom
from storage.rebuild import complete as complete_state
from storage.streams.position_poller import follow_once

# --------------------------------------------------------------------------------------------------
# Request the state before an event whose parents are missing.
#
# The answer is not believed as it is:
#
# - Each event must be a state event of this room, signed, and allowed by its own auth events.
# - A state with two events of one key, or without the create event, is refused as a whole.
# - A state of which an event is not returned is refused as well. The next server then returns the
#   rest: the events that were returned are stored.
# - An event that is returned, but not signed or not allowed, is left out, unless another event of
#   the state depends on it.
#
# A server can still return an older state of the same room, or leave out entries. So a state that
# does not allow the event itself is used only if no other server returns one that does.

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
            fetched = await _from_server(task, server, event)
        except RemoteError as error:
            task.requests.failures.setdefault(server, str(error))
            continue
        if fetched.allows:
            return fetched
        second = second or fetched
    return second


async def _from_server(task: RoomTask, server: ServerName, event: Event) -> FetchedState:
    state_ids, chain_ids = await task.requests.state_ids(server, task.room_id, event.event_id)
    event_ids = dict.fromkeys([*state_ids, *chain_ids, *auth_ids_of(event)])
    stored = await task.stored(event_ids)
    lacking = [
        event_id for event_id in event_ids if event_id not in stored or stored[event_id].out_of_band
    ]
    fetched, left_out = await _fetched(task, server, event, lacking)
    stored = await task.stored(event_ids)
    if unreturned := event_ids.keys() - stored.keys() - left_out.keys():
        reason = f"it did not return {len(unreturned)} of {len(lacking)} events of its state"
        raise refused(task, server, reason)
    lost = {
        event_id
        for event_id in event_ids
        if event_id not in stored or not stored[event_id].is_authorised
    }
    # an auth event that is stored as rejected decides on the event itself: it is rejected, too
    needed = {event_id for other in fetched for event_id in lost.intersection(auth_ids_of(other))}
    if needed := needed | (set(auth_ids_of(event)) & lost - stored.keys()):
        raise refused(task, server, f"its state lacks {min(needed)}, which others cite")
    entries = _fetched_entries(task, server, state_ids, stored, left_out)
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
    left_out = {event_id: refusal.reason or "" for event_id, refusal in read.refused.items()}
    for event_id in read.events:
        result = results.get(event_id)
        if result is None or not result.is_stored or result.outcome == "rejected":
            left_out[event_id] = (
                "the auth rules refuse it" if result is None else str(result.reason)
            )
    return [fetched for key, fetched in read.events.items() if key not in left_out], left_out


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

    async def fetch(event_id: EventId) -> list[Pdu]:
        async with turns:
            try:
                return await task.requests.event(server, event_id)
            except RemoteError:  # recorded in task.requests.failures
                return []

    return [pdu for pdus in await asyncio.gather(*map(fetch, event_ids)) for pdu in pdus]


def _fetched_entries(
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


# --------------------------------------------------------------------------------------------------
# Joins with the members omitted (MSC3706), and the request for the rest.
#
# The answer to send_join has the state without most members, and the servers in the room. The room
# can be used at once; its state is partial until the members are fetched from another server.
#
# Source: server-server API, `PUT /_matrix/federation/v2/send_join`.

MEMBER: Final = "m.room.member"
SERVERS_MAX: Final = 100_000


class OmittedMembers(NamedTuple):
    """The server that answered without the members, and the servers in the room."""

    origin: ServerName
    servers: Collection[ServerName]


def servers_of(response: Mapping[str, Any]) -> frozenset[ServerName] | None:
    """Return the servers in the room if the members are omitted, else None. `RemoteError`."""
    if not response.get("members_omitted"):
        return None
    names = response.get("servers_in_room")
    if not isinstance(names, list) or len(names) > SERVERS_MAX:
        raise RemoteError("the members are omitted, and the response has no list servers_in_room")
    try:
        return frozenset(map(args.server, names))
    except InvalidIdentifier as error:
        raise RemoteError(f"servers_in_room: {error}") from error


def cited_members(join: Event, events: Mapping[EventId, Event]) -> dict[StateKey, EventId]:
    """Return the memberships that a join names as auth events: the state before it has them."""
    return {
        events[event_id].key: event_id
        for event_id in join.auth_event_ids
        if event_id in events
        and events[event_id].type == MEMBER
        and events[event_id].state_key is not None
    }


async def left_before(task: RoomTask) -> dict[StateKey, EventId]:
    """Return the memberships of local users from an earlier stay: the state before the join."""
    async with task.store.database.connection() as conn:
        return await gaps.own_members(conn, task.room_id, task.own_name)


class MarkLost(Exception):  # noqa: N818  # control flow, not an error
    """The mark of a join was dropped before the join was stored. Make it again."""


@dataclass(slots=True)
class JoinMark:
    """Whether a room is marked as partial for a join, and the append of that join."""

    is_set: bool
    appending: asyncio.Task[AppendResult] | None = None

    async def append(self, task: RoomTask, join: Event, state: Iterable[EventId]) -> AppendResult:
        """Store the join. If it is marked, a cancelled caller does not cancel it: see `marked`.

        `MarkLost` if another process has dropped the mark.
        """
        if not self.is_set:
            return (await task.append([join], state_before={join.event_id: state}))[join.event_id]
        self.appending = asyncio.create_task(task.append_partial(join, state))
        result = await asyncio.shield(self.appending)
        if result.reason == NOT_MARKED:
            raise MarkLost
        return result


@asynccontextmanager
async def marked(
    task: RoomTask, join: Event, mark: OmittedMembers | None
) -> AsyncIterator[JoinMark]:
    """Mark the room as partial while a join is stored; take it back if that fails.

    A cancelled append may still be written, so the mark stays until the append has ended. It also
    stays if a second cancellation ends that wait. Without ``mark``, the room is not marked.
    """
    if mark is None:
        yield JoinMark(is_set=False)
        return
    database = task.store.database
    async with database.transaction() as conn:
        is_marked = await partial_marks.begin(conn, task.room_id, join.event_id, *mark)
    made = JoinMark(is_marked)
    try:
        yield made
    except BaseException:
        if made.appending is not None:
            await asyncio.wait([made.appending])
        async with database.transaction() as conn:
            await partial_marks.abandon(conn, task.room_id, join.event_id)
        raise


async def complete(task: RoomTask, room: PartialRoom) -> bool:
    """Fetch the members of a partial room, and complete it; return whether that was possible.

    Its origin is asked first, then the other servers in the room.
    """
    join = (await task.loaded([room.join_event_id])).get(room.join_event_id)
    if join is None:
        return False
    fetched = await state_before(task, await task.servers(room.origin), join)
    if fetched is None or not fetched.allows:
        logger.info(
            "the members of a room are still missing: %s",
            task.requests.reason(),
            extra={"room_id": task.room_id},
        )
        return False
    store = task.store
    is_complete = await complete_state(
        store.database, task.room_id, fetched.ids, server_name=task.own_name
    )
    await follow_once(store.database, store.streams)  # wakes the syncs of this process now
    return is_complete


MARKS_MAX: Final = 5
"""So often the mark of a join is made. Another process drops it only when it opens or joins."""
DECISIVE: Final = frozenset({CREATE, ("m.room.power_levels", ""), ("m.room.join_rules", "")})

JoinOutcome = Literal["joined", "duplicate", "refused"]
JoinFault = Literal[
    "malformed_join",
    "malformed_response",
    "unsigned_join",
    "wrong_room",
    "wrong_version",
    "two_events_of_one_key",
    "state_incomplete",
    "not_allowed",
    "not_stored",
]
"""Why a join is refused. `JoinResult` explains each."""


@dataclass(frozen=True, slots=True)
class JoinResult:
    """The outcome of a join over federation.

    ``outcome``: "joined"; "duplicate" if this join was stored before; "refused" if it is not
    stored. ``fault`` then says why, and ``reason`` has the details:

    - ``malformed_join``: it is no join of a local user in a known room version; do not repeat it
    - ``unsigned_join``: a signature of the join is missing or wrong
    - ``malformed_response``: the response is cut off, or not one of send_join
    - ``wrong_room``: the response has an event of another room
    - ``wrong_version``: the room has another version
    - ``two_events_of_one_key``: its state is no state
    - ``state_incomplete``: an event is missing, unsigned or refused, and the join depends on it
    - ``not_allowed``: the state, or its own auth events, do not allow the join
    - ``not_stored``: `append` refused the join; ``result`` says why

    ``left_out`` has events of the response that were not used, each with the reason: their
    signatures could not be checked, or the auth rules refuse them.

    ``is_partial``: the response has not all members, and they are still missing. The room can be
    used; `Receiver.complete` fetches the rest.
    """

    outcome: JoinOutcome
    room_id: RoomId | None = None
    event_id: EventId | None = None
    user_id: UserId | None = None
    fault: JoinFault | None = None
    reason: str | None = None
    result: AppendResult | None = None
    left_out: Mapping[EventId, str] = field(default_factory=dict)
    is_partial: bool = False


class Refused(Exception):  # noqa: N818  # `Receiver.joined` turns it into a JoinResult
    """The join is refused."""

    def __init__(self, fault: JoinFault, reason: str, result: AppendResult | None = None) -> None:
        super().__init__(reason)
        self.fault: JoinFault = fault
        self.reason = reason
        self.result = result


class JoinResponse(NamedTuple):
    """The PDUs of a response of send_join. ``join`` is the join as the other server signed it."""

    state: list[Pdu]
    auth_chain: list[Pdu]
    join: Pdu | None
    servers: frozenset[ServerName] | None = None
    """The servers in the room, if the members are omitted."""


class CheckedJoin(NamedTuple):
    """A join that may be stored, with the state before it and the events that are not stored."""

    join: Event
    entries: dict[StateKey, EventId]
    outliers: dict[EventId, Event]
    left_out: dict[EventId, str]


def read_join(pdu: Pdu, room_version: str, server_name: str) -> Event:
    """Return the join of a local user; raise `Refused`."""
    if room_version not in ROOM_VERSIONS:
        raise Refused("malformed_join", f"room version {room_version!r} is not known")
    event = receive.read(pdu, receive.header_of(pdu), room_version)
    if isinstance(event, AppendResult):
        raise Refused("malformed_join", event.reason or "")
    if event.type != "m.room.member" or event.content.get("membership") != "join":
        raise Refused("malformed_join", f"it is no join: {event!r}")
    if not event.room_version.may_have_room(event.room_id):
        raise Refused("malformed_join", f"{event.room_id} is no room of version {room_version}")
    if event.state_key != event.sender or server_name_of(event.sender) != server_name:
        raise Refused("malformed_join", f"{event.state_key} is no user of {server_name}")
    return event


def read_response(response: Any, limit: int) -> JoinResponse:
    """Return the PDUs of a response; raise `Refused` if it is cut off."""
    if not isinstance(response, dict):
        raise Refused("malformed_response", "it is no JSON object")
    event = response.get("event")
    try:
        return JoinResponse(
            pdus_in(response, "state", limit),
            pdus_in(response, "auth_chain", limit),
            event if isinstance(event, bytes | dict) else None,
            servers_of(response),
        )
    except RemoteError as error:
        raise Refused("malformed_response", str(error)) from error


async def refuse_other_version(task: RoomTask, room: KnownRoom | None) -> None:
    """Raise `Refused` if the room has another version, which a stored event of it proves.

    The version in an invite is a claim of another server.
    """
    if room is None or room.room_version == task.room_version:
        return
    async with task.store.database.connection() as conn:
        if not await is_claimed(conn, task.room_id):
            raise Refused("wrong_version", f"the room has version {room.room_version}")


async def checked_join(task: RoomTask, join: Event, response: JoinResponse) -> CheckedJoin:
    """Check a response; raise `Refused`."""
    signed = await signed_join(task, join, response.join)
    listed, chain = await task.parse(response.state), await task.parse(response.auth_chain)
    parsed = ReadEvents(chain.events | listed.events, chain.refused | listed.refused)
    _refuse_other_rooms(task, parsed.events.values())
    stored = await task.stored(parsed.events)
    _refuse_other_events(task, parsed.events, stored)
    new = {
        event_id: event
        for event_id, event in parsed.events.items()
        if not _was_checked(stored.get(event_id))
    }
    unsigned = await task.verify(new)
    signed_events = {event_id: event for event_id, event in new.items() if event_id not in unsigned}
    authorised = await task.authorise(signed_events)
    left_out = {
        event_id: refusal.reason or "" for event_id, refusal in (parsed.refused | unsigned).items()
    }
    left_out |= authorised.left_out
    entries = _entries(listed.events, stored, authorised.events)
    if response.servers is not None:
        accepted = {event_id for event_id, key in stored.items() if key.is_authorised}
        usable = {event_id: parsed.events[event_id] for event_id in accepted} | authorised.events
        cited = cited_members(signed, usable)
        entries = await left_before(task) | cited | entries
    _refuse_if_incomplete(signed, parsed.events, entries, left_out)
    await _refuse_if_not_allowed(task, signed, entries, authorised.events)
    return CheckedJoin(signed, entries, authorised.events, left_out)


def _was_checked(stored: StoredKey | None) -> bool:
    """Return whether an event was checked before, whatever came of it."""
    return stored is not None and not stored.out_of_band


async def signed_join(task: RoomTask, join: Event, returned: Pdu | None) -> Event:
    """Return the join with its own bytes, and the signatures of servers that must sign it, too.

    Nothing else is taken of the event that the other server has returned: it has the same id also
    with another name in its content, which the id does not cover.
    """
    read = await task.read([_with_signatures(join, returned)])
    if join.event_id in read.events:
        return read.events[join.event_id]
    refusal = read.refused.get(join.event_id)
    raise Refused("unsigned_join", (refusal and refusal.reason) or f"it is not of {task.room_id}")


def _with_signatures(join: Event, returned: Pdu | None) -> Pdu:
    if returned is None:
        return join.raw
    signatures = receive.header_of(returned).get("signatures")
    own = join.json.get("signatures", {})
    added = {
        server: signatures[server]
        for server in required_signers(join)
        if isinstance(signatures, dict)
        and server not in own
        and isinstance(signatures.get(server), dict)
    }
    return {**join.json, "signatures": {**own, **added}} if added else join.raw


def _refuse_other_rooms(task: RoomTask, parsed: Iterable[Event]) -> None:
    """Raise `Refused` for an event of another room, or for a room of another version."""
    for event in parsed:
        if event.room_id != task.room_id:
            raise Refused("wrong_room", f"{event.event_id} is of room {event.room_id}")
        version = event.content.get("room_version", "1")
        if event.type == CREATE[0] and version != task.room_version:
            raise Refused("wrong_version", f"the room has version {version!r}")


def _refuse_other_events(
    task: RoomTask, parsed: Mapping[EventId, Event], stored: Mapping[EventId, StoredKey]
) -> None:
    """Raise `Refused` for an event under the id of another one, which only versions 1 and 2 allow.

    A stored event is not checked again, so its id must not stand for what the response says.
    """
    for event_id, key in stored.items():
        event = parsed[event_id]
        if key.room_id != task.room_id:
            raise Refused("wrong_room", f"{event_id} is of room {key.room_id}")
        if (key.type, key.state_key) != (event.type, event.state_key):
            raise Refused("malformed_response", f"{event_id} is another event")


def _entries(
    listed: Mapping[EventId, Event],
    stored: Mapping[EventId, StoredKey],
    authorised: Mapping[EventId, Event],
) -> dict[StateKey, EventId]:
    """Return the state by key; raise `Refused` for one that no room can have."""
    entries: dict[StateKey, EventId] = {}
    for event_id, event in listed.items():
        if event.state_key is None:
            raise Refused("malformed_response", f"{event_id} is no state event")
        key = stored.get(event_id)
        if event_id not in authorised and (key is None or not key.is_authorised):
            continue
        first = entries.setdefault(event.key, event_id)
        if first != event_id:
            raise Refused("two_events_of_one_key", f"{first} and {event_id} are both {event.key}")
    return entries


def _refuse_if_incomplete(
    join: Event,
    parsed: Mapping[EventId, Event],
    entries: Mapping[StateKey, EventId],
    left_out: Mapping[EventId, str],
) -> None:
    """Raise `Refused` if the join, or the power to change the room, depends on what is left out."""
    for event_id, reason in left_out.items():
        event = parsed.get(event_id)
        if event_id in join.auth_event_ids or (event is not None and _is_decisive(event)):
            raise Refused("state_incomplete", f"{event_id} cannot be used: {reason}")
    if CREATE not in entries:
        raise Refused("state_incomplete", "there is no create event")
    lacking = set(join.auth_event_ids) - parsed.keys()
    if lacking:
        raise Refused("state_incomplete", f"the auth events {sorted(lacking)} are not returned")


def _is_decisive(event: Event) -> bool:
    return event.state_key is not None and event.key in DECISIVE


async def _refuse_if_not_allowed(
    task: RoomTask,
    join: Event,
    entries: Mapping[StateKey, EventId],
    new: Mapping[EventId, Event],
) -> None:
    """Raise `Refused` unless its auth events and the state before it allow the join."""
    keys = {CREATE, *keys_needed(join)} & entries.keys()
    needed = {*(entries[key] for key in keys), *auth_ids_of(join)} - new.keys()
    events = {**await task.loaded(needed), **new}
    try:
        check_auth_events(join, events, frozenset())
        check(join, {key: events[entries[key]] for key in keys}, join.room_version)
    except AuthDenied as denied:
        raise Refused("not_allowed", f"{denied.rule}: {denied.reason}") from denied


async def store_join(
    task: RoomTask, checked: CheckedJoin, mark: OmittedMembers | None = None
) -> JoinResult:
    """Store the state as outliers, then the join. ``mark``: the members are omitted."""
    join, left_out = checked.join, dict(checked.left_out)
    await forget_false_claim(task)
    outliers = await task.append(checked.outliers.values(), origin="outlier")
    for event_id, result in outliers.items():
        if not result.is_stored or result.outcome == "rejected":
            left_out[event_id] = result.reason or result.outcome
    for key, event_id in checked.entries.items():
        if key in DECISIVE and event_id in left_out:
            raise Refused("state_incomplete", f"{event_id} cannot be used: {left_out[event_id]}")
    state = [entry_id for entry_id in checked.entries.values() if entry_id not in left_out]
    for _ in range(MARKS_MAX):
        with suppress(MarkLost):
            async with marked(task, join, mark) as made:
                if mark is not None and not made.is_set:
                    await _refuse_unless_stored(task, join)
                result = await made.append(task, join, state)
                joined = await outcome_of(task, join, result, left_out)
            return replace(joined, is_partial=made.is_set)
    raise Refused("not_stored", "other joins of the room are being stored: repeat it later")


async def forget_false_claim(task: RoomTask) -> None:
    """Delete what is stored of a room if its version was only claimed, and is another one."""
    async with task.store.database.connection() as conn:
        rooms = await stored_rooms(conn, [task.room_id], task.own_name)
    room = rooms.get(task.room_id)
    if room is None or room.room_version == task.room_version:
        return
    if not await forget_claimed_room(task.store.database, task.room_id):
        raise Refused("wrong_version", f"the room has version {room.room_version}")
    await follow_once(task.store.database, task.store.streams)  # the writer has cached the room


async def _refuse_unless_stored(task: RoomTask, join: Event) -> None:
    """Raise `Refused` for a new join while another one has marked the room as partial."""
    key = (await task.stored([join.event_id])).get(join.event_id)
    if key is None or key.outlier:
        raise Refused("not_stored", "another join of the room is being stored: repeat it later")


async def outcome_of(
    task: RoomTask, join: Event, result: AppendResult, left_out: Mapping[EventId, str]
) -> JoinResult:
    """Return the result of a join that was appended; raise `Refused` if it does not count."""
    outcome: JoinOutcome = "duplicate" if result.outcome == "duplicate" else "joined"
    kept = await task.store.event(join.event_id)
    if kept is None or kept.rejected is not None or kept.soft_failed:
        why = result.reason or (kept and kept.rejected) or result.outcome
        raise Refused("not_stored", why, result)
    return JoinResult(
        outcome, join.room_id, join.event_id, UserId(join.sender), None, None, result, left_out
    )
