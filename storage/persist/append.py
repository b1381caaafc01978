"""`append`: receive PDUs and return one result each, in the order given."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, LiteralString, NamedTuple

from storage import arguments as args
from storage.database.connection import Database
from storage.database.prepared import prepare_ahead
from storage.errors import InputError
from storage.event import Event
from storage.event.reading import as_written
from storage.ids import EventId
from storage.observability.opentelemetry import tracing
from storage.persist import receive
from storage.persist import receive as stripped
from storage.persist.commit.group_commit import Writer
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.results import ORIGINS, AppendResult, Origin
from storage.persist.receive import Pdu, StrippedState, VerifyKeys
from storage.turns import TURN_BYTES, Turns, in_turns, pause_if_long

logger: logging.Logger = logging.getLogger(__name__)

USUAL: Final = frozenset({"stored", "duplicate"})
FLAGGED_OUTCOMES: Final = frozenset({"rejected", "soft_failed"})

SQL_ROOM_VERSIONS: Final[LiteralString] = """
SELECT room_id, room_version
FROM rooms
WHERE room_id = ANY($1::text[])
"""
prepare_ahead(SQL_ROOM_VERSIONS, writes=True)


class RoomVersionRow(NamedTuple):
    """The version of a room."""

    room_id: str
    room_version: str


class AppendOptions(NamedTuple):
    """The options of `append`.

    With ``origin`` "out_of_band", the events are memberships of local users in rooms that this
    server is not in. They are invites and knocks over federation, and the events that end them.
    They need no auth events. ``stripped_state`` has the stripped state events that came with each
    of them, for /sync.

    Such an event is ``invalid`` if this server is in the room, or if there is nothing to end. As an
    auth event and in a state it counts as missing until it is appended again with its auth events.
    It may then be an outlier or a timeline event.

    ``refused`` has the reasons of the caller to refuse events, by event.

    ``partial_join`` is a join of the batch whose state before it lacks members. It is ``invalid``
    if no mark of it makes the room partial (`NOT_MARKED`).

    ``room_versions``, by room, stand before what create events of the batch say.
    """

    room_version: str | None
    origin: Origin
    state_before: receive.StatesBefore | None
    stripped_state: StrippedState | None
    verify_keys: VerifyKeys | None
    refused: receive.Refused | None = None
    room_versions: Mapping[str, str] | None = None
    partial_join: EventId | None = None


async def append(
    database: Database, writer: Writer, batch: Iterable[Pdu], options: AppendOptions
) -> list[AppendResult]:
    """Read, check and store a batch.

    Raise `InputError` for a malformed list or a malformed state before anything is written.
    """
    pdus = args.pdus(batch)
    if options.room_version is not None:
        args.instance(options.room_version, str, "room_version")
    if options.origin not in ORIGINS:
        raise InputError(f"origin is {options.origin!r}: it must be one of {', '.join(ORIGINS)}")
    receive.check_keys(options.verify_keys)
    shown = stripped.read_stripped_state(options.stripped_state, options.origin)
    states = receive.read_states_before(options.state_before)
    refused = receive.read_refused(options.refused, options.origin)
    turn = _QueueTurn(writer)
    if sum(map(receive.size_of, pdus)) > TURN_BYTES and not callable(options.verify_keys):
        await turn.take()
    try:
        return await _append(database, turn, pdus, options, (states, shown, refused))
    finally:
        turn.leave()


class _QueueTurn:
    """The place of a large batch in the order of the calls, while it is read in turns.

    Later calls wait, so that a child is queued after its parent. Keys that a function requests are
    not waited for: another server may not answer.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.is_taken = False

    async def take(self) -> None:
        self.writer.version_waiters += 1
        try:
            await self.writer.version_lock.acquire()
        except BaseException:
            self.writer.version_waiters -= 1
            raise
        self.is_taken = True

    def leave(self) -> None:
        """Let the next call go on. Nothing happens the second time."""
        if self.is_taken:
            self.is_taken = False
            self.writer.version_lock.release()
            self.writer.version_waiters -= 1


async def _append(
    database: Database,
    turn: _QueueTurn,
    pdus: Sequence[Pdu],
    options: AppendOptions,
    inputs: tuple[receive.States, Mapping[EventId, str], receive.Refused],
) -> list[AppendResult]:
    writer, (states, shown, refused) = turn.writer, inputs
    named = args.room_versions(options.room_versions)
    headers = [receive.header_of(pdu) async for pdu in in_turns(pdus, size=receive.size_of)]
    rooms = receive.room_ids(headers)
    stored = await _stored_versions(
        database, writer, {room for room in rooms if room is not None}, is_alone=turn.is_taken
    )
    room_versions = {**named, **stored} if named else stored
    created = await _created(pdus, headers, rooms, room_versions)
    versions = receive.versions(headers, rooms, room_versions, created, options.room_version)
    results: dict[int, AppendResult] = {}
    events: dict[int, Event] = {}
    turns = Turns()
    for index, version in enumerate(versions):
        read = receive.read(pdus[index], headers[index], version)
        if options.verify_keys is not None and isinstance(read, Event):
            read = await receive.check_signatures(read, options.verify_keys) or read
        if isinstance(read, Event):
            events[index] = as_written(read)
        else:
            results[index] = read
        await turns.took(receive.work_of(pdus[index], read))
    if refused:
        ids = [event.event_id for event in events.values()]
        receive.check_named(refused, [*ids, *(result.event_id for result in results.values())])
    await receive.check(database, states, events.values())
    indexes = list(events)
    await pause_if_long(indexes)
    ordered = [indexes[at] for at in receive.in_order(list(events.values()))]
    await pause_if_long(indexes)
    incoming = [IncomingEvent(events[index], options.origin) for index in ordered]
    if states or shown or refused:
        incoming = [_with_inputs(received, states, shown, refused) for received in incoming]
    if options.partial_join is not None:
        marking = options.partial_join
        incoming = [
            received._replace(is_partial=received.event.event_id == marking)
            for received in incoming
        ]
    if incoming:
        written = await writer.append(incoming, queued=turn.leave)
        results.update(zip(ordered, written, strict=True))
    answers = [results[index] for index in range(len(pdus))]
    _note(answers, rooms, refused)
    return answers


async def _created(
    pdus: Sequence[Pdu],
    headers: Sequence[Mapping[str, Any]],
    rooms: Sequence[str | None],
    room_versions: Mapping[str, str],
) -> dict[str, str]:
    """Return the versions in the create events of rooms that are not known, by room id."""
    created: dict[str, str] = {}
    turns = Turns()
    for pdu, header, room in zip(pdus, headers, rooms, strict=True):
        if header.get("type") == "m.room.create" and room not in room_versions:
            receive.note_create_event(created, pdu, header)
            await turns.took(receive.size_of(pdu))
    return created


def _with_inputs(
    incoming: IncomingEvent,
    states: receive.States,
    shown: Mapping[EventId, str],
    refused: receive.Refused,
) -> IncomingEvent:
    event_id = incoming.event.event_id
    return incoming._replace(
        state_before=states.get(event_id),
        stripped_state=shown.get(event_id),
        refused=refused.get(event_id),
    )


def _note(
    answers: Sequence[AppendResult], rooms: Sequence[str | None], refused: receive.Refused
) -> None:
    """Log results other than stored and duplicate.

    The log has ids and the auth rule ("refused" for the caller's verdict), but no event content,
    and no reason that may quote it. The open span, if any, gets the ids of all events.
    """
    if tracing.tracer is not None:
        tracing.name(rooms, (answer.event_id for answer in answers))
    if not logger.isEnabledFor(logging.INFO):
        return
    for answer, room_id in zip(answers, rooms, strict=True):
        if answer.outcome not in USUAL:
            rule = (
                (answer.reason or "").partition(":")[0]
                if answer.outcome in FLAGGED_OUTCOMES
                else None
            )
            if rule is not None and refused.get(answer.event_id or EventId("")) == answer.reason:
                rule = "refused"
            ids = {
                "event_id": answer.event_id,
                "room_id": room_id,
                "outcome": answer.outcome,
                "rule": rule,
            }
            logger.info("%s: %s", answer.outcome, answer.event_id, extra=ids)


async def _stored_versions(
    database: Database, writer: Writer, room_ids: set[str], *, is_alone: bool
) -> dict[str, str]:
    """Return the versions of the rooms that the store knows.

    The lock keeps calls in their order: a child is queued after its parent. ``is_alone``: the
    caller has it.
    """
    if is_alone:
        return await _looked_up(database, writer, room_ids)
    cached = _cached_versions(writer, room_ids)
    # A counter, because `Lock.locked` is False between a release and the next waiter's turn.
    if len(cached) < len(room_ids) or writer.version_waiters:
        writer.version_waiters += 1
        try:
            async with writer.version_lock:
                return await _looked_up(database, writer, room_ids)
        finally:
            writer.version_waiters -= 1
    return cached


async def _looked_up(database: Database, writer: Writer, room_ids: set[str]) -> dict[str, str]:
    cached = _cached_versions(writer, room_ids)
    if lacking := room_ids - cached.keys():
        async with database.connection() as conn:
            cached.update(await conn.fetch(SQL_ROOM_VERSIONS, list(lacking), row=RoomVersionRow))
    return cached


def _cached_versions(writer: Writer, room_ids: set[str]) -> dict[str, str]:
    if writer.has_removals:  # the room may be among them, and return with another version
        return {}
    return {
        room_id: row.room_version
        for room_id in room_ids
        if (row := writer.caches.rooms.get(room_id)) is not None
    }
