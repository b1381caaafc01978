"""A real store in the place of the subject: each example has rooms of its own in a database of the test's own."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeVar

import storage
from storage.ids import EventId, RoomId
from storage.persist import Origin, Outcome
from tests.oracle.facts import EVERYTHING, Audience, Facts
from tests.oracle.oracle import Position

T = TypeVar("T")

SQL_HELD = """
SELECT e.event_id, e.outlier, e.rejected IS NOT NULL AS rejected, e.soft_failed, b.event_id AS redacted_by,
    e.topological_ordering, e.stream_ordering
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN events b ON b.event_nid = e.redacted_by
WHERE r.room_id = $1::text
"""


class HeldRow(NamedTuple):
    event_id: str
    outlier: bool
    rejected: bool
    soft_failed: bool
    redacted_by: str | None
    topological_ordering: int | None
    stream_ordering: int | None


class StoreSubject:
    """`tests.oracle.facts.Subject` over a `storage.Store`, running its coroutines to their end."""

    def __init__(self, dsn: str, *, server_name: str = "s1.test") -> None:
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        config = storage.Config(pool_size_max=2)
        self.store = self.run(self.stack.enter_async_context(storage.open(dsn, server_name=server_name, config=config)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 60))

    def close(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()

    def append(
        self,
        pdus: Sequence[bytes],
        *,
        room_version: str | None,
        origin: Origin,
        state_before: Mapping[EventId, Sequence[EventId]] | None,
    ) -> list[tuple[EventId | None, Outcome]]:
        results = self.run(self.store.append(pdus, room_version=room_version, origin=origin, state_before=state_before))
        return [(result.event_id, result.outcome) for result in results]

    def positions(self, room_id: RoomId) -> dict[EventId, Position]:
        rows = self.run(self._held(room_id))
        return {
            EventId(row.event_id): (row.topological_ordering, row.stream_ordering)
            for row in rows
            if row.topological_ordering is not None and row.stream_ordering is not None
        }

    def facts(self, room_id: RoomId, audience: Audience) -> Facts:
        return self.run(self._facts(room_id, audience))

    async def _held(self, room_id: RoomId) -> list[HeldRow]:
        async with self.store.database.connection() as conn:
            return await conn.fetch(SQL_HELD, room_id, row=HeldRow)

    async def _facts(self, room_id: RoomId, audience: Audience) -> Facts:
        store = self.store
        rows = await self._held(room_id)
        held = [EventId(row.event_id) for row in rows]
        timeline = [EventId(row.event_id) for row in rows if not row.outlier]
        return {
            "flags": {EventId(row.event_id): (row.outlier, row.rejected, row.soft_failed, row.redacted_by) for row in rows},
            "state before": {event_id: await store.state_before(event_id) for event_id in timeline},
            "state after": {event_id: await store.state_after(event_id) for event_id in timeline},
            "current state": await store.current_state(room_id),
            "forward extremities": await store.forward_extremities(room_id),
            "backward extremities": await store.backward_extremities(room_id),
        }
