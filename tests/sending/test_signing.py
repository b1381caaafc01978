"""Signing takes time, so the locks of a room are not held meanwhile, except by the last attempt."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

import storage
from storage import Store
from storage.database.connection import ATTEMPTS_MAX
from storage.event import sign
from storage.ids import RoomId
from storage.persist.commit.retry import SQL_LOCK_ROOMS
from storage.persist.write.all_tables import write
from storage.persist.write.messages_only import SQL_WRITE_ONE_MESSAGE
from storage.testing import RoomBuilder
from tests.sending.stores import opened, say

pytestmark = pytest.mark.every_postgres

ALONE: Final = storage.Config(follow_ms=3_600_000)
NAMES: Final = {SQL_LOCK_ROOMS: "lock", SQL_WRITE_ONE_MESSAGE: "write"}


class Steps:
    """The steps of a store in order: lock, sign, write."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.paused = False  # while the other store signs

        def signing(*given: Any) -> dict[str, Any]:
            if not self.paused:
                self.seen.append("sign")
            return sign(*given)

        patch.setattr("storage.persist.plan.event.sign", signing)

    def before(self, statement: str) -> None:
        if statement in NAMES:
            self.seen.append(NAMES[statement])

    def after(self, statement: str, seconds: float) -> None:
        pass


@asynccontextmanager
async def two_stores(
    dsn: str, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Store, Store, RoomBuilder, Steps]]:
    """Yield two stores with one room in their caches, and the steps of the first one."""
    room = RoomBuilder("11", seed=1)
    room.start(room.user(1))
    steps = Steps(patch)
    async with (
        opened(dsn, config=ALONE, observer=steps) as one,
        opened(dsn, "two", config=ALONE) as two,
    ):
        await one.append(room.pdus)
        await say(two, room.room_id, sender=room.user(1))
        yield one, two, room, steps


async def test_a_refused_send_is_signed_again_without_locks(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_stores(dsn, monkeypatch) as (one, _, room, steps):
        sent = await say(one, room.room_id, sender=room.user(1))
        assert steps.seen[-4:] == ["sign", "write", "sign", "write"]
        assert await one.forward_extremities(room.room_id) == {sent.event_id}


async def test_a_send_among_appends_is_signed_without_locks(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one batch, and one refused write."""
    async with two_stores(dsn, monkeypatch) as (one, _, room, steps):
        received = room.message(room.user(1), "received")
        del steps.seen[:]
        [appended], sent = await asyncio.gather(
            one.append([received.pdu]), say(one, room.room_id, sender=room.user(1))
        )
        assert (appended.outcome, sent.outcome) == ("stored", "stored")
        assert steps.seen.count("sign") == 2
        assert "lock" not in steps.seen


async def test_the_last_attempt_signs_under_the_locks(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process is faster each time, until it has to wait."""
    async with two_stores(dsn, monkeypatch) as (one, two, room, steps):
        rival = Rival(two, room.room_id, room.user(1))
        monkeypatch.setattr("storage.persist.commit.retry.write", rival.before(steps))
        del steps.seen[:]
        sent = await say(one, room.room_id, sender=room.user(1))
        assert sent.outcome == "stored"
        assert steps.seen == ["sign", "write"] * (ATTEMPTS_MAX - 1) + ["lock", "sign", "write"]


class Rival:
    """Sends to the room before each write of the other store that holds no lock."""

    def __init__(self, store: Store, room_id: RoomId, sender: str) -> None:
        self._store, self._room_id, self._sender = store, room_id, sender

    def before(self, steps: Steps) -> Callable[..., Any]:
        async def writing(conn: Any, change_set: Any, author: Any, at: int) -> Any:
            if author.instance_name == "main" and "lock" not in steps.seen:
                steps.paused = True
                await say(self._store, self._room_id, sender=self._sender)
                steps.paused = False
            return await write(conn, change_set, author, at)

        return writing
