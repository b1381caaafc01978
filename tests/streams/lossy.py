"""Helpers of the tests of failovers and restored backups: a room that loses its last events.

Also the reports that a store gets about it.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import storage
from storage import EventId, Store, UserId
from storage.config import Config
from storage.streams.feed import Advance
from storage.testing import RoomBuilder
from tests.failover import ReplicatedPair
from tests.maintenance.rooms import SERVER

ALICE = UserId("@alice:s1.test")
CONFIG = Config(follow_ms=50, pool_size_max=4, cache_reads=True)
SELDOM = replace(CONFIG, follow_ms=3_600_000)
LOST = 120


class FailoverRoom:
    """A room, what is stored of it, and how to go on after its end was lost."""

    def __init__(self, seed: int = 7) -> None:
        self.seed = seed
        self.builder = RoomBuilder("11", seed=seed)
        self.builder.start(ALICE)
        self.stored = 0
        self.histories = 1

    async def write(self, store: Store, count: int) -> list[EventId]:
        """Append so many more; their ids."""
        for number in range(count):
            self.builder.message(ALICE, f"{self.histories} {self.stored} {number}")
        results = await store.append(self.builder.pdus[self.stored :])
        assert {result.outcome for result in results} == {"stored"}
        new = [event.event_id for event in self.builder.events[self.stored :]]
        self.stored = len(self.builder.events)
        return new

    def back_to(self, count: int) -> None:
        """The room as it was then: what comes next is another history."""
        kept, self.builder = self.builder.events[:count], RoomBuilder("11", seed=self.seed)
        self.builder.start(ALICE)
        for event in kept[len(self.builder.events) :]:
            self.builder.message(ALICE, str(event.content["body"]))
        assert [event.event_id for event in self.builder.events] == [
            event.event_id for event in kept
        ]
        self.stored = count
        self.histories += 1


class FeedRecorder:
    """The event ids that the feed of a store tells."""

    def __init__(self, store: Store) -> None:
        self.ids: list[EventId] = []
        self._more = asyncio.Event()
        store.streams.feed.subscribe(self._told)

    def _told(self, advance: Advance) -> None:
        if advance.stream_name == "events":
            self.ids += [fact.row[0] for fact in advance.rows]
            self._more.set()

    async def reached(self, ids: list[EventId]) -> None:
        """Wait for these."""
        while not set(ids) <= set(self.ids):
            self._more.clear()
            await self._more.wait()


def opened(
    pair: ReplicatedPair, name: str, config: Config = CONFIG, dsn: str | None = None
) -> "AbstractAsyncContextManager[Store]":
    return storage.open(dsn or pair.dsn, server_name=SERVER, instance_name=name, config=config)


async def timeline(
    store: Store, since: str | None, *, timeout_ms: int = 0
) -> tuple[list[EventId], str]:
    answer = await store.sync(ALICE, since=since, timeline_limit=1000, timeout_ms=timeout_ms)
    return [
        event.event_id for joined in answer.join.values() for event in joined.timeline.events
    ], answer.next_batch
