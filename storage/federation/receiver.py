"""`Receiver`: what a homeserver does with the events of other servers.

It checks signatures, fills gaps, and stores. It holds no state of rooms: only the keys of other
servers, and a lock for each room with a gap.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from storage import arguments as args
from storage.errors import (
    AuthDenied,
    InputError,
    InvalidSignature,
    StorageClosed,
    StorageError,
    UnknownRoom,
)
from storage.event import Event, parse
from storage.federation import joining
from storage.federation.gap import BackfillResult, Results, backfill_room, fill_gap
from storage.federation.invites import (
    END_MEMBERSHIPS,
    InviteResult,
    ShownState,
    is_local_membership,
    is_own_leave,
    read_again,
    read_membership,
    read_shown_state,
    signed,
    store_in_room,
    store_out_of_band,
)
from storage.federation.joining import JoinResult, OmittedMembers
from storage.federation.keys import KeyedLocks, KeyRing, own_keys
from storage.federation.remote import JsonObject, ReceiverLimits, Remote
from storage.federation.requests import TaskRequests, claim_of, read_authorization
from storage.federation.room_task import RoomTask
from storage.ids import EventId, RoomId, ServerName
from storage.persist import AppendResult, partial_marks, receive
from storage.persist.receive import Pdu
from storage.queries.federation import KnownRoom, stored_rooms
from storage.queries.gaps import PartialRoom, unfilled
from storage.store.facade import Store
from storage.turns import in_turns

# --------------------------------------------------------------------------------------------------
# Fill the gaps that earlier transactions of a room have left open.
#
# The gap before an event may be too large to be filled at once, or its server may fail meanwhile.
# The event is then stored with a missing parent. Later transactions of the room fill the gap with
# backfill, so that nobody has to page back for events that other servers have sent.

ROOMS_MAX: Final = 10_000


class LeftGaps:
    """The rooms that have none, as far as this process knows. Every other room is looked at."""

    def __init__(self) -> None:
        self._whole: set[RoomId] = set()

    def may_have(self, room_id: RoomId) -> bool:
        return room_id not in self._whole

    def left(self, room_id: RoomId) -> None:
        """Note that a gap of the room may have stayed open."""
        self._whole.discard(room_id)

    async def fill(self, task: RoomTask, origin: ServerName) -> None:
        """Request a page of what the room lacks, of this server first."""
        since_ms = time.time_ns() // 1_000_000 - int(task.limits.left_gap_seconds * 1_000)
        async with task.store.database.connection() as conn:
            missing = await unfilled(conn, task.room_id, task.own_name, since_ms)
        if missing:
            limit = task.limits.backfill_max
            await backfill_room(task, limit, only=missing, first=[origin])
            return
        if len(self._whole) >= ROOMS_MAX:
            self._whole.clear()
        self._whole.add(task.room_id)


T = TypeVar("T")

logger: Final = logging.getLogger(__name__)


class Receiver:
    """The events of other servers, for one store. Make one for each store and keep it.

    Every call may be repeated: stored events are "duplicate". Errors of the database are raised as
    `append` raises them; failures of other servers never are.
    """

    def __init__(
        self, store: Store, remote: Remote, *, limits: ReceiverLimits | None = None
    ) -> None:
        self.store = store
        self._remote = remote
        checked_limits = ReceiverLimits() if limits is None else limits
        self.limits = args.instance(checked_limits, ReceiverLimits, "limits")
        self.joins, self._rooms, self._left_gaps = KeyedLocks(), KeyedLocks(), LeftGaps()
        self._completing, self._was_joined = KeyedLocks(), asyncio.Event()
        self._keys = KeyRing(remote, self.limits, own_keys(store))

    async def check_signed(self, server: str, signed: JsonObject) -> None:
        """Raise `InvalidSignature` unless a server has signed a JSON object with a key valid now.

        Use it for the requests of other servers: the object has ``method``, ``uri``, ``origin``,
        ``destination``, ``content`` if there is a body, and ``signatures``. Keys that are not known
        are requested, as for events.

        Source: server-server API, "Request Authentication".
        """
        name, signed_object = args.server(server), args.mapping(signed, "signed")
        await self._keys.check_signed(name, signed_object, self.limits.request_seconds)

    async def check_request(
        self, method: str, uri: str, authorization: str | None, content: JsonObject | None
    ) -> ServerName:
        """Return the server that signed a request. `InvalidSignature`: answer 401.

        ``uri`` is the path with the query as it was sent. ``authorization`` is the header of that
        name, or None. ``content`` is the JSON object of the body. It is None without a body.
        """
        body = None if content is None else args.mapping(content, "content")
        header = read_authorization(authorization)
        if header.destination not in ("", self.store.server_name):
            raise InvalidSignature(
                f"it is for {header.destination}", server_name=header.origin, key_id=header.key_id
            )
        names = args.text(method), args.text(uri), header.origin, self.store.server_name
        signed = claim_of(*names, body)
        signed["signatures"] = {header.origin: {header.key_id: header.signature}}
        await self.check_signed(header.origin, signed)
        return ServerName(header.origin)

    # ---------------------------------------------------------------------------------------------
    # rooms

    async def known_room(self, room_id: str) -> KnownRoom | None:
        """Return the version of a room, and whether a local user is joined to it now."""
        return (await self._known_rooms([args.room(room_id)])).get(room_id)

    async def version_of(self, room_id: str) -> str:
        """Return the version of a room. `UnknownRoom`."""
        room = await self.known_room(room_id)
        if room is None:
            raise UnknownRoom(room_id)
        return room.room_version

    # ---------------------------------------------------------------------------------------------
    # transactions

    async def transaction(self, origin: str, pdus: Iterable[Pdu]) -> dict[EventId, AppendResult]:
        """Store the PDUs of another server's transaction, and return their results by event id.

        Gaps are filled with requests to ``origin``, then to other servers in the room. An event
        whose gap stays open is "missing_parents". PDUs of a room that this server is not in are
        "invalid", except for the end of a local user's invite or knock. A PDU without a readable
        event id, or of an unknown room, has no result.

        Answer 200 with ``{"pdus": {event_id: {} or {"error": result.reason}}}``. `InputError` for
        more PDUs than `ReceiverLimits.pdus_max`: answer 400.

        Source: server-server API, "Transactions", "Checks performed on receipt of a PDU".
        """
        server, batch = args.server(origin), args.pdus(pdus)
        if len(batch) > self.limits.pdus_max:
            raise InputError(
                f"the transaction has {len(batch)} PDUs: at most {self.limits.pdus_max} are read"
            )
        by_room, results = await self._by_room(batch)
        turns = asyncio.Semaphore(self.limits.rooms_at_once)

        async def receive_room(room: KnownRoom, here: Sequence[Pdu]) -> Results:
            async with turns:
                if room.is_resident:
                    return await self._receive(server, room, here)
                return await self._receive_outside(room, here)

        for room_results in await _all(
            [receive_room(room, here) for room, here in by_room.items()]
        ):
            results.update(room_results)
        return results

    async def accepted(self, origin: str, pdu: Pdu, room_version: str) -> AppendResult:
        """Store one event as `transaction` does. `AuthDenied` if the room does not accept it.

        Use it for the events of send_join, send_knock and send_leave. A user may leave by the
        state that is here after the last user of this server has left. `InvalidEvent`.
        """
        event = parse(args.pdu(pdu), args.text(room_version))
        event_id, room = event.event_id, await self.known_room(event.room_id)
        if room is not None and not room.is_resident and is_own_leave(event):
            results = await self._receive(args.server(origin), room, [pdu])
        else:
            results = await self.transaction(origin, [pdu])
        result = results.get(event_id, AppendResult(event_id, "invalid", "it cannot be read"))
        kept = await self.store.event(event_id) if result.is_stored else None
        if kept is None or kept.outlier or kept.rejected is not None or kept.soft_failed:
            reason = result.reason or (kept and kept.rejected) or result.outcome
            raise AuthDenied(reason, rule="event.not_accepted", event_id=event_id)
        return result

    async def _by_room(self, pdus: Sequence[Pdu]) -> tuple[dict[KnownRoom, list[Pdu]], Results]:
        """Return the PDUs of known rooms, and refusals of others whose ids can be read."""
        rooms = [
            _room_of(pdu, receive.header_of(pdu))
            async for pdu in in_turns(pdus, size=receive.size_of)
        ]
        room_ids = {room for room, _ in rooms if room is not None}
        # a server sends events as soon as it has accepted a join, which is not stored here yet
        await self.joins.released(room_ids, self.limits.task_seconds)
        rooms_by_id = await self._known_rooms(room_ids)
        by_room: dict[KnownRoom, list[Pdu]] = {}
        refused: Results = {}
        for pdu, (room_id, event_id) in zip(pdus, rooms, strict=True):
            room = rooms_by_id.get(room_id or "")
            if room is not None:
                by_room.setdefault(room, []).append(pdu)
            elif event_id is not None:
                refused[event_id] = _not_in_room(event_id, room_id)
            else:
                logger.info("a PDU is ignored: its room %s is not known", room_id)
        return by_room, refused

    async def _known_rooms(self, room_ids: Iterable[str]) -> dict[str, KnownRoom]:
        async with self.store.database.connection() as conn:
            return await stored_rooms(conn, room_ids, self.store.server_name)

    async def _receive(self, origin: ServerName, room: KnownRoom, pdus: Sequence[Pdu]) -> Results:
        task = self._task(room.room_id, room.room_version)
        read = await task.read(pdus)
        results = read.refused | await task.append(read.events.values())
        waiting = _waiting(read.events, results)
        if waiting:
            results |= await self._fill_gap(task, origin, waiting)
        elif self._left_gaps.may_have(room.room_id):
            await self._fill_left_gaps(task, origin)
        return results

    async def _fill_left_gaps(self, task: RoomTask, origin: ServerName) -> None:
        """Fill what earlier transactions have left open, unless a gap is being filled now."""
        lock = self._rooms.lock(task.room_id)
        if not lock.locked():
            async with lock:
                await self._left_gaps.fill(task, origin)

    async def _fill_gap(
        self, task: RoomTask, origin: ServerName, waiting: Mapping[EventId, Event]
    ) -> Results:
        """Fill one gap of a room at a time: the next one may then be smaller, or closed."""
        lock = self._rooms.lock(task.room_id)
        try:
            async with asyncio.timeout(task.requests.seconds_left):
                await lock.acquire()
        except TimeoutError:
            return {
                event_id: AppendResult(
                    event_id, "missing_parents", "another gap of the room is being filled"
                )
                for event_id in waiting
            }
        try:
            results = await task.append(waiting.values())
            blocked = _waiting(waiting, results)
            if blocked:
                self._left_gaps.left(task.room_id)
                results |= await fill_gap(task, await task.servers(origin), blocked)
            return results
        finally:
            lock.release()

    async def _receive_outside(self, room: KnownRoom, pdus: Sequence[Pdu]) -> Results:
        """Refuse the PDUs of a room that this server is not in, except ends of memberships."""
        task = self._task(room.room_id, room.room_version)
        parsed = await task.parse(pdus)
        results = dict(parsed.refused)
        for event_id, event in parsed.events.items():
            if is_local_membership(event, self.store.server_name, END_MEMBERSHIPS):
                results[event_id] = await store_out_of_band(task, event, event.raw)
            else:
                results[event_id] = _not_in_room(event_id, room.room_id)
        return results

    # ---------------------------------------------------------------------------------------------
    # memberships of local users

    async def joined(
        self, origin: str, join_pdu: Pdu, response: Any, room_version: str
    ) -> JoinResult:
        """Store the answer of ``origin`` to send_join: the state before the join, then the join.

        ``response`` is the decoded JSON object. Everything is checked before anything is stored; a
        response that is cut off or wrong is "refused", and nothing is stored. Then try another
        server.

        The response may omit the members (``members_omitted``, with ``servers_in_room``). Then the
        room can be used at once, and the result is partial: `run` fetches the members.
        """
        server, version = args.server(origin), args.text(room_version)
        try:
            join = joining.read_join(join_pdu, version, self.store.server_name)
        except joining.Refused as refused:
            return JoinResult("refused", fault=refused.fault, reason=refused.reason)
        try:
            return await self._join(server, join, response)
        except joining.Refused as refused:
            return JoinResult(
                "refused",
                join.room_id,
                join.event_id,
                join.sender,
                refused.fault,
                refused.reason,
                refused.result,
            )

    async def _join(self, origin: ServerName, join: Event, response: Any) -> JoinResult:
        task = self._task(join.room_id, join.room_version.identifier)
        await partial_marks.drop_lost_marks(self.store.database)
        room = (await self._known_rooms([join.room_id])).get(join.room_id)
        await joining.refuse_other_version(task, room)
        read = joining.read_response(response, self.limits.state_events_max)
        if read.servers is None:
            return await joining.store_join(task, await joining.checked_join(task, join, read))
        async with self._rooms.lock(join.room_id):
            room = (await self._known_rooms([join.room_id])).get(join.room_id)
            if room is None or not room.is_resident:
                checked = await joining.checked_join(task, join, read)
                mark = OmittedMembers(origin, read.servers)
                result = await joining.store_join(task, checked, mark)
                self._was_joined.set()
                return result
        # without the lock: the join may have a gap, and filling it needs the lock
        return await self._join_resident(task, origin, room, join, read)

    async def _join_resident(
        self,
        task: RoomTask,
        origin: ServerName,
        room: KnownRoom,
        join: Event,
        response: joining.JoinResponse,
    ) -> JoinResult:
        """Store a join to a room that this server is in, as an event of a transaction.

        The state in the response is not needed.
        """
        signed = await joining.signed_join(task, join, response.join)
        results = await self._receive(origin, room, [signed.raw])
        result = await joining.outcome_of(task, join, results[join.event_id], {})
        return replace(result, is_partial=await self.partial_room(join.room_id) is not None)

    async def partial_room(self, room_id: str) -> PartialRoom | None:
        """Return the room if members of it are missing."""
        partial_rooms = await self.store.partial_rooms()
        return next((room for room in partial_rooms if room.room_id == room_id), None)

    async def complete(self, room_id: str) -> bool:
        """Fetch the members that a join left out, and complete the state of the room.

        Return whether all members are known now. If no server has returned them, call it again
        later. It is one transaction, so a call that is interrupted changes nothing. `UnknownRoom`.
        """
        known_room = (await self._known_rooms([args.room(room_id)])).get(room_id)
        if known_room is None:
            raise UnknownRoom(room_id)
        room = await self.partial_room(room_id)
        if room is None:
            return True
        async with self._completing.lock(room_id):
            if await self.partial_room(room_id) is None:
                return True
            return await joining.complete(self._task(room_id, known_room.room_version), room)

    async def complete_partial_rooms(self) -> list[RoomId]:
        """Complete every room of which members are missing; return those that are complete now.

        Marks of joins that were never stored, of processes that were killed, are dropped.
        Call it at start, and from time to time: it goes on where a process has ended. One room is
        fetched at a time. An error of a room is logged, and the next room follows. `StorageClosed`.
        """
        await partial_marks.drop_lost_marks(self.store.database)
        rooms = [room.room_id for room in await self.store.partial_rooms()]
        return [room_id for room_id in rooms if await self._could_complete(room_id)]

    async def _could_complete(self, room_id: RoomId) -> bool:
        try:
            return await self.complete(room_id)
        except StorageClosed:
            raise
        except StorageError as error:
            logger.warning("%s keeps missing members: %s", room_id, error)
            return False

    async def run(self) -> None:
        """Complete rooms of which members are missing, until it is cancelled.

        It looks every `ReceiverLimits.completing_seconds`, and as soon as a room was joined with
        the members omitted. Errors of the database and of servers are logged. Raise `StorageClosed`
        after the store was closed.
        """
        while True:
            self._was_joined.clear()
            try:
                await self.complete_partial_rooms()
            except StorageClosed:
                raise
            except StorageError as error:
                logger.warning("rooms with missing members wait: %s", error)
            with contextlib.suppress(TimeoutError):  # then look for what another process has joined
                async with asyncio.timeout(self.limits.completing_seconds):
                    await self._was_joined.wait()

    async def shown_state(self, room_id: str, room_version: str, pdus: object) -> ShownState:
        """Check the ``invite_room_state`` or ``knock_room_state`` of another server: PDUs."""
        return await read_shown_state(self._task(args.room(room_id), args.text(room_version)), pdus)

    async def invited(
        self, pdu: Pdu, room_version: str, stripped_state: Iterable[Mapping[str, Any]] = ()
    ) -> InviteResult:
        """Store an invite of a local user that another server has sent.

        ``stripped_state`` is that of `shown_state`; malformed events of it are skipped. See
        `InviteResult` for what to answer.
        """
        version = args.text(room_version)
        event = read_membership(pdu, version, self.store.server_name, {"invite"})
        if isinstance(event, AppendResult):
            return InviteResult(event, {})
        room = (await self._known_rooms([event.room_id])).get(event.room_id)
        if room is not None and room.room_version != version:
            event = read_again(event, room.room_version)
            if isinstance(event, AppendResult):
                return InviteResult(event, {})
        task = self._task(event.room_id, event.room_version.identifier)
        whole = signed(self.store, event)
        if room is not None and room.is_resident:
            return InviteResult(await store_in_room(task, event, whole), whole)
        return InviteResult(await store_out_of_band(task, event, whole, stripped_state), whole)

    async def knocked(
        self, pdu: Pdu, room_version: str, stripped_state: Iterable[Mapping[str, Any]] = ()
    ) -> AppendResult:
        """Store a local user's knock that another server has accepted (send_knock).

        ``stripped_state`` is that of `shown_state`.
        """
        return await self._out_of_band(pdu, room_version, {"knock"}, stripped_state)

    async def left(self, pdu: Pdu, room_version: str) -> AppendResult:
        """Store a local user's leave that another server has accepted (send_leave).

        It rejects an invite, or takes a knock back, while no local user is in the room.
        """
        return await self._out_of_band(pdu, room_version, END_MEMBERSHIPS, ())

    async def _out_of_band(
        self,
        pdu: Pdu,
        room_version: str,
        memberships: Collection[str],
        stripped_state: Iterable[Mapping[str, Any]],
    ) -> AppendResult:
        version = args.text(room_version)
        event = read_membership(pdu, version, self.store.server_name, memberships)
        if isinstance(event, AppendResult):
            return event
        task = self._task(event.room_id, version)
        if "knock" in memberships:
            try:
                await joining.forget_false_claim(task)
            except joining.Refused as refused:
                return AppendResult(event.event_id, "invalid", refused.reason)
        return await store_out_of_band(task, event, pdu, stripped_state)

    # ---------------------------------------------------------------------------------------------
    # history

    async def backfill(self, room_id: str, limit: int) -> BackfillResult:
        """Request at most ``limit`` events of history for the latest gaps of a room. `UnknownRoom`.

        The servers in the room are asked in turn, until each of the missing events is stored.
        Failures are recorded as by `Store.gap_failed`. `InputError` for a limit below 1.
        """
        if args.whole(limit, "limit") < 1:
            raise InputError(f"limit {limit}: it must be 1 or more")
        room_version = await self.version_of(room_id)
        most = args.limit(limit, self.limits.backfill_max)
        return await backfill_room(self._task(room_id, room_version), most)

    def _task(self, room_id: str, room_version: str) -> RoomTask:
        requests = TaskRequests(self._remote, self.limits)
        return RoomTask(
            self.store, (RoomId(room_id), room_version), self._keys, requests, self.limits
        )


def _waiting(events: Mapping[EventId, Event], results: Results) -> dict[EventId, Event]:
    return {
        event_id: event
        for event_id, event in events.items()
        if results[event_id].outcome == "missing_parents"
    }


def _room_of(pdu: Pdu, header: Mapping[str, Any]) -> tuple[str | None, EventId | None]:
    """Return the room id of a PDU, and its event id if that can be read without the room.

    A create event names its version, and from version 12 on it has no room id.
    """
    room_id = header.get("room_id")
    room = room_id if args.is_text(room_id) else None
    if header.get("type") != "m.room.create":
        return room, None
    content = header.get("content")
    version = content.get("room_version", "1") if isinstance(content, dict) else None
    event = receive.read(pdu, dict(header), version if isinstance(version, str) else None)
    return (event.room_id if isinstance(event, Event) else room), event.event_id


def _not_in_room(event_id: EventId, room_id: str | None) -> AppendResult:
    return AppendResult(event_id, "invalid", f"this server is not in the room {room_id}")


async def _all(jobs: Sequence[Awaitable[T]]) -> list[T]:
    """Run them at the same time; if one fails, end the others before its error is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
