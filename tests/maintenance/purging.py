"""Helpers of the purge tests: a room, a look at a value, a purge, and a purge that stops midway."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from storage import Store
from storage.maintenance.purge import purge_history
from storage.streams.position_poller import follow_once
from storage.testing import RoomBuilder
from tests.maintenance.rooms import SERVER
from tests.postgres import others_ended

ALICE, BOB = "@alice:s1.test", "@bob:s2.test"


def chat(messages: int) -> RoomBuilder:
    room = RoomBuilder("11")
    room.start(ALICE, name="The pantry")
    room.join(BOB)
    for number in range(messages):
        room.message(BOB if number % 2 else ALICE, f"message {number}")
    return room


async def value(store: Store, sql: str, *args: object) -> Any:
    async with store.database.connection() as conn:
        return await conn.fetchval(sql, *args)


async def purge(store: Store, room: RoomBuilder, at: int, **more: Any) -> int:
    """Purge below an event, and have the store hear of it."""
    point = room.events[at].event_id
    await others_ended(store.database)
    purged = await purge_history(
        store.database, room.room_id, server_name=SERVER, before_event_id=point, **more
    )
    await follow_once(store.database, store.streams)
    return purged.events


class Stop:
    """A purge, stopped where it calls this function of a module for the ``turn``-th time.

    ``turns``: how often it came there so far.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, *, turn: int = 1
    ) -> None:
        self.turns = 0
        self._turn = turn
        self._called = getattr(module, name)
        self._reached, self._go = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(module, name, self._stopped)

    async def _stopped(self, *given: Any) -> Any:
        self.turns += 1
        if self.turns == self._turn:
            self._reached.set()
            await self._go.wait()
        return await self._called(*given)

    @asynccontextmanager
    async def during(self, purging: Awaitable[Any]) -> AsyncIterator[None]:
        """The block runs while the purge stands there; after it the purge goes on to its end."""
        task = asyncio.ensure_future(purging)
        await self._reached.wait()
        try:
            yield
        finally:
            self._go.set()
            await task


class PurgeKilled(Exception):  # noqa: N818  # what a test throws into a purge
    """The purge is cut short."""


FOLLOWED = {
    "account_data",
    "archive_garbage",
    "audiences",
    "auth_chain_links",
    "auth_chains",
    "current_state",
    "dropped_extremities",
    "events",
    "gap_failures",
    "local_transactions",
    "memberships",
    "missing_events",
    "reordered_events",
    "out_of_band_memberships",
    "outlier_memberships",
    "partial_rooms",
    "past_visibility",
    "purge_jobs",
    "purge_retained_events",
    "receipts",
    "rooms",
    "sliding_rooms",
    "state_deltas",
    "state_groups",
    "visibility",
    "waiting_redactions",
}
