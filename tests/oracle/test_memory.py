"""Syncs from what processes remember, beside syncs that read everything and beside the oracle.

Two stores write to one database, and both are queried. Their caches are tiny, or not. Each gets
notifications of the other now and then, or of one stream only, and one of them is reopened now and
then. `STORAGE_EXAMPLES` says how many rooms.
"""

import os
from collections import Counter
from collections.abc import Collection
from contextlib import AsyncExitStack
from typing import Any

import pytest

import storage
from storage import Store, Sync, SyncFilter
from storage.ids import UserId
from storage.queries.sync import SyncRequest, has_no_changes, no_changes, sync, timeline_only
from storage.streams.position_poller import follow_once
from storage.streams.registry import STREAMS
from tests.oracle.example_databases import ExampleDatabases
from tests.oracle.facts import Audience
from tests.oracle.machine import RoomMachine, run_machine
from tests.oracle.store_subject import StoreSubject
from tests.oracle.syncing import Answer
from tests.oracle.test_store import LOCAL, SERVER
from tests.oracle.worlds import SERVERS
from tests.small_limits import cached_entries

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "3"))
NEVER_MS = 3_600_000


class TwoStores(StoreSubject):
    """The writer of the other tests, and a second one.

    ``ways``: how often a sync went which way.
    """

    def __init__(self, dsn: str, ways: Counter[str]) -> None:
        super().__init__(dsn, server_name=SERVER, follow_ms=NEVER_MS)
        self.dsn, self.ways, self.turn = dsn, ways, 0
        self.others = AsyncExitStack()
        self.second = self.run(self._open())

    async def _open(self) -> Store:
        config = storage.Config(pool_size_max=2, follow_ms=NEVER_MS)
        return await self.others.enter_async_context(
            storage.open(
                self.dsn, server_name=SERVER, instance_name=f"second{self.turn}", config=config
            )
        )

    def close(self) -> None:
        self.run(self.others.aclose())
        super().close()

    def writer(self) -> Store:
        """Return the store that makes the next write."""
        self.turn += 1
        return self.second if self.turn % 3 == 0 else self.store

    def sync(
        self,
        user_id: str,
        since: Any | None,
        limit: int,
        wanted: SyncFilter,
        ignored: Collection[str] = (),
    ) -> Answer:
        self.turn += 1
        self.run(self._hear())
        for store in (self.second, self.store):
            self.run(self._compare(store, user_id, since, limit))
        return super().sync(user_id, since, limit, wanted, ignored)

    async def _hear(self) -> None:
        """Of everything, of one stream, or of nothing; or forget everything."""
        if self.turn % 11 == 0:
            await self.others.aclose()
            self.second = await self._open()
        for store in (self.second, self.store):
            if self.turn % 4 == 0:
                await follow_once(store.database, store.streams)
            elif self.turn % 4 == 1:
                await _hear_of(store, ("events", "caches")[self.turn // 4 % 2])

    async def _compare(self, store: Store, user_id: str, since: str | None, limit: int) -> None:
        """In one snapshot the same, token and all."""
        asked = SyncRequest.of(
            user_id,
            since,
            timeline_limit=limit,
            rooms_limit=None,
            full_state=False,
            server_name=SERVER,
            deployment=store.deployment_id,
            config=store.database.config,
        )
        memory = store.memory
        async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
            told: list[Sync] = [await sync(conn, asked)]
            if has_no_changes(asked, memory):
                found = await no_changes(conn, asked, memory)
                told += [] if found is None else [found[0]]
                if found is not None and found[1].room_ids is not None:
                    assert sorted(found[1].room_ids) == sorted(
                        await store.rooms_of(UserId(user_id))
                    ), "the rooms to wait for"
                self.ways["changes after all" if found is None else "quiet"] += 1
            told.append(await sync(conn, asked, memory=memory))
            if since is not None:
                timelines = await timeline_only(conn, asked, memory)
                told += [] if timelines is None else [timelines[0]]
                self.ways["not brief" if timelines is None else "brief"] += 1
                snapshot = await memory.snapshot(conn, asked.user_id)
                position = asked.since.position("events") if asked.since is not None else None
                assert position is not None
                among = snapshot.candidates(position.meet(snapshot.positions["events"]))
                self.ways[
                    "all rooms" if among is None else "some rooms" if among else "no rooms"
                ] += 1
        assert all(one == told[0] for one in told)


async def _hear_of(store: Store, stream_name: str) -> None:
    """Catch up with the others in one stream only."""
    async with store.database.connection() as conn:
        rows = await conn.fetchvals(
            "SELECT instance_name || ' ' || stream_id FROM stream_positions"
            " WHERE stream_name = $1::text AND instance_name <> $2::text",
            stream_name,
            store.instance_name,
        )
        for row in rows:
            writer, position = row.split(" ")
            known = store.streams[stream_name].positions().get(writer)
            if known is not None:
                facts = await STREAMS[stream_name].read(
                    conn, known, int(position), writer, 1_000_000
                )
                store.streams.advance(stream_name, writer, int(position), facts, local=False)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("limits", [{}, {"memberships": 3, "rooms": 1}], ids=["large", "tiny"])
def test_what_is_remembered_changes_no_answer(
    databases: ExampleDatabases, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_entries(monkeypatch, **limits)
    ways: Counter[str] = Counter()

    class Machine(RoomMachine):
        audience = Audience(LOCAL, SERVERS)
        syncing = LOCAL

        def open_subject(self) -> StoreSubject:
            dsn = databases.open()
            return TwoStores(dsn, ways)

        def close_subject(self, subject: Any) -> None:
            subject.close()
            databases.close()

    run_machine(Machine, examples=EXAMPLES, steps=20)
    if EXAMPLES >= 15:
        assert {"all rooms", "some rooms", "no rooms", "quiet", "brief", "not brief"} <= ways.keys()
