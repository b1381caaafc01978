"""Helpers of the writer tests: statement counts, a connection that loses results, stored rows."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import asyncpg

import storage
from storage import AppendResult, Store
from storage.persist.write.all_tables import SQL_WRITE, SQL_WRITE_STATE_EVENT
from storage.persist.write.messages_only import SQL_WRITE_MESSAGES, SQL_WRITE_ONE_MESSAGE
from storage.streams.feed import Advance, StreamRow
from storage.testing import RoomBuilder
from tests.pausing import pause
from tests.persist.connection_breaker import AnswerEater

QUIET = storage.Config(follow_ms=3_600_000)


ONE_CONNECTION = storage.Config(follow_ms=3_600_000, pool_size_max=1)


WRITES = (SQL_WRITE, SQL_WRITE_STATE_EVENT, SQL_WRITE_MESSAGES, SQL_WRITE_ONE_MESSAGE)


STORED = "SELECT event_id, stream_ordering FROM events WHERE NOT outlier ORDER BY stream_ordering"


WAITING = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
    "AND wait_event = 'advisory'"
)


HOLD = "SELECT pg_advisory_lock(1919905645, room_nid) FROM rooms"
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'not this one' USING ERRCODE = 'check_violation', CONSTRAINT = 'refused';
END
$$;
"""


class AnsweredStatements:
    """An observer that counts what is sent, and what of it is answered."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.answered: list[str] = []

    def before(self, statement: str) -> None:
        self.sent.append(statement)

    def after(self, statement: str, _: float) -> None:
        self.answered.append(statement)

    def writes(self) -> int:
        return sum(statement in WRITES for statement in self.sent)

    def refused(self) -> int:
        return self.writes() - sum(statement in WRITES for statement in self.answered)


def room_of(seed: int, messages: int) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed, sign=False)
    room.start(room.user(1))
    for _ in range(messages):
        room.message(room.user(1), "x")
    return room


@asynccontextmanager
async def admin_of(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def lossy(dsn: str) -> AsyncIterator[tuple[AnswerEater, Store]]:
    """A store behind a proxy that loses answers; with one connection."""
    async with (
        AnswerEater(dsn) as eater,
        storage.open(
            eater.dsn, server_name="s1.test", config=ONE_CONNECTION, observer=eater
        ) as store,
    ):
        yield eater, store


async def waiting_write(admin: asyncpg.Connection) -> int:
    """The backend of a write that waits for its room, once there is one."""
    while (pid := await admin.fetchval(WAITING)) is None:
        await pause()
    return int(pid)


async def stored(admin: asyncpg.Connection) -> dict[str | None, int]:
    return {row[0]: row[1] for row in await admin.fetch(STORED)}


def listen(store: Store) -> list[StreamRow]:
    told: list[StreamRow] = []

    def hear(advance: Advance) -> None:
        if advance.stream_name == "events":
            told.extend(advance.rows)

    store.streams.feed.subscribe(hear)
    return told


def outcomes(results: Iterable[AppendResult]) -> set[str]:
    return {result.outcome for result in results}
