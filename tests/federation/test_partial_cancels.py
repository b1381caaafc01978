"""A join with the members omitted is cancelled while its append waits behind another write."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from storage import AppendResult
from storage.event import event_id
from storage.federation import JoinResult
from tests.federation.partial import omitted
from tests.federation.peers import Homeserver
from tests.federation.rooms import PUBLIC
from tests.homeserver.agreement import WAIT_S, until
from tests.postgres import SQL_WAITING

TRIPS = 20
"""A cancelled join that does not wait for its append takes its mark back in fewer round trips."""


def is_of(incoming: Sequence[Any], wanted: str) -> bool:
    """Whether an append is of this event, which another server has made."""
    events = [getattr(one, "event", None) for one in incoming]
    return [event and event.event_id for event in events] == [wanted]


async def marks(server: Homeserver) -> int:
    """How many rooms are marked; `Store.partial_rooms` waits for the join."""
    async with server.store.database.connection() as conn:
        return int(await conn.fetchval("SELECT count(*) FROM partial_rooms"))


@asynccontextmanager
async def cancelled_join(
    two: list[Homeserver], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[JoinResult]]:
    """Cancel a join whose append is queued behind a write that waits for a lock."""
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    await one.do(room_id, "ann", "m.room.member", {"membership": "join"}, state_key=one.user("ann"))
    elsewhere = await other.store.create_room(other.user())
    join = await other.make_join(room_id, one, "user")
    response = omitted(await one.send_join(join), "12", [one.name])
    queued, writing = asyncio.Event(), list[asyncio.Task[Any]]()
    append = other.store.writer.append

    async def append_behind(incoming: Sequence[Any], **how: Any) -> list[AppendResult]:
        if is_of(incoming, event_id(join, "12")):
            await conn.execute("SELECT FROM rooms WHERE room_id = $1 FOR UPDATE", elsewhere)
            writing.append(asyncio.create_task(other.say(elsewhere, "slow")))
            await until(is_waiting)
            queued.set()
        return await append(incoming, **how)

    async def is_waiting() -> bool:
        return bool(await conn.fetchval(SQL_WAITING))

    monkeypatch.setattr(other.store.writer, "append", append_behind)
    conn = await asyncpg.connect(dsn)
    try:
        lock = conn.transaction()
        await lock.start()
        joining = asyncio.create_task(other.receiver.joined(one.name, join, response, "12"))
        async with asyncio.timeout(WAIT_S):
            await queued.wait()
        joining.cancel()
        yield joining
        await lock.rollback()
        with pytest.raises(asyncio.CancelledError):
            await joining
        await writing[0]
        await other.say(elsewhere, "later")  # after the join
    finally:
        await conn.close()
    [room] = await other.store.partial_rooms()
    assert room.join_event_id == event_id(join, "12")
    assert await other.receiver.complete(room_id)
    assert await other.store.current_state(room_id) == await one.store.current_state(room_id)


async def test_the_mark_of_a_join_stays_if_it_is_stored_after_all(
    two: list[Homeserver], another_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cancelled_join(two, another_dsn, monkeypatch):
        for _ in range(TRIPS):
            assert await marks(two[1]) == 1


async def test_a_second_cancellation_ends_the_wait_and_leaves_the_mark(
    two: list[Homeserver], another_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cancelled_join(two, another_dsn, monkeypatch) as joining:
        assert await marks(two[1]) == 1
        joining.cancel()
        await asyncio.wait([joining])
        assert await marks(two[1]) == 1
