"""A real store as the subject: each example has its own rooms, each test its own database."""

import asyncio
import itertools
import json
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple
from typing import Any, NamedTuple, TypeVar

import storage
from storage import Aggregations, EventFilter, StoredEvent, SyncFilter
from storage.errors import InputError, UnknownEvent
from storage.ids import EventId, RoomId, StateKey, UserId
from storage.maintenance.verify import Finding, verify
from storage.persist import Origin, Outcome
from storage.queries.pagination.page import Direction
from tests.oracle.facts import Audience, Facts, Stretch
from tests.oracle.filtering import passes
from tests.oracle.oracle import Position
from tests.oracle.syncing import Answer, RoomAnswer

T = TypeVar("T")

SQL_HELD = """
SELECT e.event_id, e.outlier, e.rejected IS NOT NULL AS rejected, e.soft_failed,
    e.refused, b.event_id AS redacted_by,
    e.topological_ordering, e.stream_ordering
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN events b ON b.event_nid = e.redacted_by
WHERE r.room_id = $1::text
"""


class SubjectEventRow(NamedTuple):
    event_id: str
    outlier: bool
    rejected: bool
    soft_failed: bool
    refused: str | None
    redacted_by: str | None
    topological_ordering: int | None
    stream_ordering: int | None


class StoreSubject:
    """`tests.oracle.facts.Subject` over a `storage.Store`, running its coroutines to their end."""

    def __init__(
        self, dsn: str, *, server_name: str = "s2.test", writers: int = 1, **limits: Any
    ) -> None:
        """``writers``: so many stores on one database, which write and answer in turn."""
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        config = storage.Config(pool_size_max=2, **limits)
        names = ["main", *(f"other{number}" for number in range(1, writers))]
        self.stores = [
            self.run(
                self.stack.enter_async_context(
                    storage.open(dsn, server_name=server_name, instance_name=name, config=config)
                )
            )
            for name in names
        ]
        self.store = self.stores[0]
        self.in_turn = itertools.cycle(self.stores)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 60))

    def close(self) -> None:
        """At the end of every example nothing in the tables contradicts anything else."""
        try:
            findings = self.run(self._verify())
            assert not findings, "\n".join(map(str, findings))
        finally:
            self.run(self.stack.aclose())
            self.runner.close()

    async def _verify(self) -> list[Finding]:
        return [
            finding
            async for finding in verify(self.store.database, server_name=self.store.server_name)
        ]

    def append(
        self,
        pdus: Sequence[bytes],
        *,
        room_version: str | None,
        origin: Origin,
        state_before: Mapping[EventId, Sequence[EventId]] | None,
        refused: Mapping[EventId, str] | None = None,
    ) -> list[tuple[EventId | None, Outcome]]:
        results = self.run(
            self.writer().append(
                pdus,
                room_version=room_version,
                origin=origin,
                state_before=state_before,
                refused=refused,
            )
        )
        return [(result.event_id, result.outcome) for result in results]

    def forget(self, room_id: RoomId, user_id: str) -> None:
        self.run(self.writer().forget(user_id, room_id))

    def readmit(self, event_id: EventId) -> Outcome:
        try:
            return self.run(self.writer().readmit(event_id)).outcome
        except InputError:
            return "invalid"

    def writer(self) -> storage.Store:
        """Return the store that makes the next write."""
        return next(self.in_turn)

    def positions(self, room_id: RoomId) -> dict[EventId, Position]:
        rows = self.run(self._held(room_id))
        return {
            EventId(row.event_id): (row.topological_ordering, row.stream_ordering)
            for row in rows
            if row.topological_ordering is not None and row.stream_ordering is not None
        }

    def facts(self, room_id: RoomId, audience: Audience, known: Collection[EventId] = ()) -> Facts:
        return self.run(self._facts(room_id, audience, known))

    async def _held(self, room_id: RoomId) -> list[SubjectEventRow]:
        async with self.store.database.connection() as conn:
            return await conn.fetch(SQL_HELD, room_id, row=SubjectEventRow)

    def sync(
        self,
        user_id: str,
        since: Any | None,
        limit: int,
        wanted: SyncFilter,
        ignored: Collection[str] = (),
    ) -> Answer:
        silent = [UserId(user) for user in ignored]
        told = self.run(
            next(self.in_turn).sync(
                UserId(user_id), since=since, timeline_limit=limit, filter=wanted, ignored=silent
            )
        )
        for room_id, room in told.join.items() if not silent else ():
            self.run(self._joined_up(room_id, user_id, room.timeline, wanted.timeline))
        return answer_of(told)

    def send(self, user_id: str, device_id: str, bodies: Sequence[str]) -> None:
        self.run(self._send(UserId(user_id), device_id, bodies))

    async def _send(self, user_id: UserId, device_id: str, bodies: Sequence[str]) -> None:
        for body in bodies:
            await self.store.to_device.send({user_id: {device_id: {"content": {"body": body}}}})

    def receive(self, user_id: str, device_id: str, since: str | None) -> tuple[list[str], str]:
        return self.run(self._receive(UserId(user_id), device_id, since))

    async def _receive(
        self, user_id: UserId, device_id: str, since: str | None
    ) -> tuple[list[str], str]:
        """As the documentation of `ToDevice.inbox` says."""
        inboxes = self.store.to_device
        if since is not None:
            await inboxes.delete(user_id, device_id, self.store.positions_of(since)["to_device"])
        token = (await self.store.sync(user_id, since=since)).next_batch
        found = await inboxes.inbox(
            user_id, device_id, upto=self.store.positions_of(token)["to_device"]
        )
        return [json.loads(one.content)["content"]["body"] for one in found], token

    def between(
        self, room_id: RoomId, user_id: str, stretch: Stretch, wanted: EventFilter
    ) -> list[EventId]:
        since, upto, direction = stretch
        from_, to = (upto, since) if direction == "b" else (since, upto)
        return self.run(
            self._messages(room_id, user_id, direction, 3, from_=from_, to=to, filter=wanted)
        )

    def page_back(
        self, room_id: RoomId, user_id: str, at: str | None
    ) -> tuple[list[EventId], str | None]:
        return self.run(self._page_back(room_id, user_id, at))

    async def _page_back(
        self, room_id: RoomId, user_id: str, at: str | None = None
    ) -> tuple[list[EventId], str | None]:
        page = await self.store.messages(
            room_id, UserId(user_id), from_=at, limit=self.store.database.config.page_limit_max
        )
        return _ids(page.chunk), page.end

    async def _joined_up(
        self, room_id: RoomId, user_id: str, timeline: storage.Timeline, wanted: EventFilter
    ) -> None:
        """Follow prev_batch to the beginning.

        It returns all visible events outside the timeline, once each, children before parents.
        """
        found: list[StoredEvent] = []
        at: str | None = timeline.prev_batch
        while at is not None:
            page = await self.store.messages(
                room_id, UserId(user_id), from_=at, limit=3, filter=wanted
            )
            found += page.chunk
            at = page.end
        orders = [event.topological_ordering or 0 for event in found]
        assert orders == sorted(orders, reverse=True), "not in order"
        ids = _ids([*found, *timeline.events])
        assert len(ids) == len(set(ids)), "told twice"
        visible = await self.store.visible_to_user(
            user_id, [EventId(row.event_id) for row in await self._held(room_id)]
        )
        events = (await self.store.events(visible)).values()
        due = {
            event.event_id
            for event in events
            if passes(wanted, event.type, event.sender, event.content)
        }
        assert set(ids) == due, "holes, or more than is visible"

    async def _facts(
        self, room_id: RoomId, audience: Audience, known: Collection[EventId]
    ) -> Facts:
        rows = await self._held(room_id)
        events = await self.store.events([EventId(row.event_id) for row in rows])
        new = [
            EventId(row.event_id) for row in rows if not row.outlier and row.event_id not in known
        ]
        return {
            "flags": {
                EventId(row.event_id): (
                    row.outlier,
                    row.rejected,
                    row.soft_failed,
                    row.refused,
                    row.redacted_by,
                )
                for row in rows
            },
            **await self._state_facts(room_id, new),
            **await self._reader_facts(room_id, audience, new, events),
            **await self._walk_facts(room_id, new, events, rows),
            **await self._auth_facts(room_id, audience, new, known, events),
        }

    async def _state_facts(self, room_id: RoomId, new: Sequence[EventId]) -> Facts:
        store = self.store
        return {
            "state before": {event_id: await store.state_before(event_id) for event_id in new},
            "state after": {event_id: await store.state_after(event_id) for event_id in new},
            "current state": await store.current_state(room_id),
            "forward extremities": set(await store.forward_extremities(room_id)),
            "backward extremities": await store.backward_extremities(room_id),
        }

    async def _reader_facts(
        self,
        room_id: RoomId,
        audience: Audience,
        new: Sequence[EventId],
        held: Mapping[EventId, StoredEvent],
    ) -> Facts:
        store, users = self.store, audience.users
        times = {held[event_id].json["origin_server_ts"] for event_id in new}
        return {
            "seen by user": {user: await store.visible_to_user(user, held) for user in users},
            "messages": {user: await self._messages(room_id, user, "b", 3) for user in users},
            "messages forwards": {
                user: await self._messages(room_id, user, "f", 4) for user in users
            },
            "goes on at a gap": {
                user: (await self._page_back(room_id, user))[1] is not None for user in users
            },
            "context": {
                user: {one: await self._context(one, user) for one in new} for user in users
            },
            "near": {
                user: {time: await self._near(room_id, user, time) for time in times}
                for user in users
            },
            "relations": {
                user: {one: await self._relations(one, user) for one in held} for user in users
            },
            "indirect": {
                user: {one: await self._indirect(one, user) for one in held} for user in users
            },
            "aggregations": {user: await self._aggregations(list(held), user) for user in users},
        }

    async def _walk_facts(
        self,
        room_id: RoomId,
        new: Sequence[EventId],
        held: Mapping[EventId, StoredEvent],
        rows: Sequence[SubjectEventRow],
    ) -> Facts:
        store, most = self.store, self.store.database.config.page_limit_max
        latest = sorted(await store.forward_extremities(room_id))
        timeline = [EventId(row.event_id) for row in rows if not row.outlier]
        earliest = [event_id for event_id in timeline if not _parents(held[event_id])]
        return {
            "backfill": await self._backfill(room_id, latest, most),
            "backfill 3": await self._backfill(room_id, latest, 3),
            "missing events": _ids(
                await store.missing_events(room_id, earliest, latest, limit=most)
            ),
            "backfill of each": {one: await self._backfill(room_id, [one], 4) for one in new},
            "missing events of each": {
                one: _ids(
                    await store.missing_events(room_id, earliest, [one], limit=3, min_depth=2)
                )
                for one in new
            },
        }

    async def _auth_facts(
        self,
        room_id: RoomId,
        audience: Audience,
        new: Sequence[EventId],
        known: Collection[EventId],
        held: Mapping[EventId, StoredEvent],
    ) -> Facts:
        store, servers = self.store, audience.servers
        latest = sorted(await store.forward_extremities(room_id))
        not_known = [event_id for event_id in held if event_id not in known]
        return {
            "seen by server": {
                server: await store.visible_to_server(server, held) for server in servers
            },
            "resident": {server: await store.is_resident(server, room_id) for server in servers},
            "sent to server": {
                server: await self._sent(server, room_id, latest) for server in servers
            },
            "state ids": {one: await self._state_ids(one) for one in {*latest, *new}},
            "event auth": {one: set(_ids(await store.event_auth(one))) for one in not_known},
            "chain difference": await store.auth_chain_difference(
                [(await store.state_after(one)).values() for one in new]
            ),
            "auth chains": {one: await store.auth_chain_ids([one]) for one in not_known},
        }

    async def _messages(
        self,
        room_id: RoomId,
        user_id: str,
        direction: Direction,
        limit: int,
        *,
        from_: str | None = None,
        **how: Any,
    ) -> list[EventId]:
        """The whole history, or some of it, by pages."""
        found: list[EventId] = []
        at = from_
        while True:
            page = await self.store.messages(
                room_id, UserId(user_id), from_=at, direction=direction, limit=limit, **how
            )
            found += _ids(page.chunk)
            at = page.end
            if at is None:
                return found

    async def _context(
        self, event_id: EventId, user_id: str
    ) -> tuple[list[EventId], list[EventId], dict[StateKey, EventId]] | None:
        try:
            found = await self.store.context(event_id, user_id, limit=5)
        except UnknownEvent:
            return None
        return _ids(found.events_before), _ids(found.events_after), _state(found.state)

    async def _near(
        self, room_id: RoomId, user_id: str, timestamp_ms: int
    ) -> tuple[EventId | None, EventId | None]:
        found = [
            await self.store.event_near(room_id, user_id, timestamp_ms, direction)
            for direction in ("b", "f")
        ]
        before, after = (None if event is None else event.event_id for event in found)
        return before, after

    async def _relations(self, event_id: EventId, user_id: str) -> list[EventId] | None:
        """All that relates to an event, oldest first, by pages of two."""
        found: list[EventId] = []
        at = None
        try:
            while True:
                page = await self.store.relations(event_id, user_id, from_=at, limit=2)
                found += _ids(page.chunk)
                at = page.end
                if at is None:
                    return found[::-1]
        except UnknownEvent:
            return None

    async def _indirect(self, event_id: EventId, user_id: str) -> list[EventId] | None:
        try:
            return _ids(
                (
                    await self.store.relations(
                        event_id, user_id, direction="f", limit=1_000, recurse=True
                    )
                ).chunk
            )
        except UnknownEvent:
            return None

    async def _aggregations(self, held: Sequence[EventId], user_id: str) -> dict[EventId, Any]:
        found = await self.store.aggregations(user_id, held)
        return {event_id: _aggregated(found.get(event_id, Aggregations())) for event_id in held}

    async def _backfill(self, room_id: RoomId, latest: list[EventId], limit: int) -> list[EventId]:
        return _ids(await self.store.backfill(room_id, latest, limit)) if latest else []

    async def _sent(
        self, server: str, room_id: RoomId, latest: list[EventId]
    ) -> dict[EventId, bool]:
        """Return the events of all history that the server gets, and whether each is redacted."""
        limit = self.store.database.config.page_limit_max
        found = (
            await self.store.backfill(room_id, latest, limit, server_name=server) if latest else []
        )
        return {event.event_id: event.withheld for event in found}

    async def _state_ids(self, event_id: EventId) -> tuple[set[EventId], set[EventId]]:
        answer = await self.store.state_ids(event_id)
        return set(answer.state_ids), set(answer.auth_chain_ids)


def _aggregated(
    one: Aggregations,
) -> tuple[EventId | None, tuple[EventId, int, bool] | None, list[EventId]]:
    edit, thread = one.replacement, one.thread
    summary = (
        None
        if thread is None
        else (thread.latest_event.event_id, thread.count, thread.participated)
    )
    return None if edit is None else edit.event_id, summary, list(one.references)


def _ids(events: Iterable[StoredEvent]) -> list[EventId]:
    return [event.event_id for event in events]


def _parents(event: StoredEvent) -> list[Any]:
    return list(event.json["prev_events"])


def answer_of(told: storage.Sync) -> Answer:
    """Return a response in the form of the oracle."""
    return Answer(
        next_batch=told.next_batch,
        join={room_id: _room(room) for room_id, room in told.join.items()},
        leave={room_id: _room(room) for room_id, room in told.leave.items()},
        invite=set(told.invite),
        knock=set(told.knock),
    )


def _room(room: Any) -> RoomAnswer:
    return RoomAnswer(
        timeline=_ids(room.timeline.events),
        limited=room.timeline.limited,
        state=_state(room.state),
        state_after=_state(room.state_after),
        removed=set(room.state_removed),
        summary=None if room.summary is None else astuple(room.summary),
    )


def _state(events: Iterable[StoredEvent]) -> dict[tuple[str, str], EventId]:
    return {
        (event.type, event.state_key): event.event_id
        for event in events
        if event.state_key is not None
    }
