"""A write is done once, whatever happens to its connection.

It may be slow at its end, late on its way, or of a process that was replaced.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import orjson
import pytest

import storage
from storage import CommitUnknown, DatabaseUnavailable, InstanceNameTaken, InvalidIdentifier, Store
from storage.ids import UserId
from storage.streams import account_data, to_device
from storage.streams.feed import StreamRow
from storage.streams.position_poller import follow_once
from storage.streams.stream_writer import SQL_NEW_WRITER_EPOCH
from storage.testing import RoomBuilder
from tests.pausing import pause
from tests.persist.connection_breaker import AnswerEater
from tests.persist.writing import WRITES
from tests.stored_bytes import bytes_of

QUIET = storage.Config(follow_ms=3_600_000, pool_size_max=1)
USER = UserId("@user1:s1.test")

SLOW_COMMIT = """
CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(0.3);
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER be_slow AFTER INSERT OR UPDATE
    ON {table} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN ({condition}) EXECUTE FUNCTION be_slow();
"""
COMMITTING = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
)

COUNTED = {
    "to_device": "SELECT convert_from(content, 'UTF8') FROM to_device ORDER BY stream_id",
    "account_data": "SELECT convert_from(content, 'UTF8') FROM account_data ORDER BY stream_id",
    "events": "",  # the bytes are encoded
}
SENT: dict[str, tuple[str, ...]] = {
    "to_device": (to_device.SQL_SEND,),
    "account_data": (account_data.SQL_SET,),
    "events": WRITES,
}


async def counted(admin: asyncpg.Connection, stream_name: str) -> list[str]:
    """What is stored, in the order of positions."""
    if stream_name == "events":
        events = map(orjson.loads, (await bytes_of(admin)).values())
        return [one["content"]["body"] for one in events if one["type"] == "m.room.message"]
    return [row[0] for row in await admin.fetch(COUNTED[stream_name])]


class NumberedWriter:
    """Write numbered facts to one stream, and record those that the feed publishes."""

    def __init__(self, store: Store, stream_name: str) -> None:
        self.store = store
        self.stream_name = stream_name
        self.told: list[StreamRow] = []
        self.room = RoomBuilder("11")
        self.room.start(USER)
        store.streams.feed.subscribe(
            lambda advance: self.told.extend(
                advance.rows if advance.stream_name == stream_name else ()
            )
        )

    async def begin(self) -> None:
        """So that the statements are prepared."""
        await self.store.append(self.room.pdus)
        await self.send(0)
        await self.send(1)
        self.told.clear()

    async def send(self, number: int) -> None:
        if self.stream_name == "to_device":
            await self.store.to_device.send({USER: {"device": {"n": number}}})
        elif self.stream_name == "account_data":
            await self.store.account_data.set(USER, f"m.{number}", {"n": number})
        else:
            [result] = await self.store.append([self.room.message(USER, f'{{"n":{number}}}').pdu])
            assert result.outcome in {"stored", "duplicate"}

    def expect_told(self, admin_ids: Sequence[int]) -> None:
        assert [fact.stream_id for fact in self.told] == list(admin_ids)
        assert self.store.streams[self.stream_name].linear() == self.told[-1].stream_id
        assert not self.store.streams.is_writing(self.stream_name)


@asynccontextmanager
async def sending(
    dsn: str, stream_name: str
) -> AsyncIterator[tuple[AnswerEater, NumberedWriter, asyncpg.Connection]]:
    admin = await asyncpg.connect(dsn)
    try:
        async with (
            AnswerEater(dsn) as eater,
            storage.open(eater.dsn, server_name="s1.test", config=QUIET, observer=eater) as store,
        ):
            sender = NumberedWriter(store, stream_name)
            await sender.begin()
            yield eater, sender, admin
    finally:
        await admin.close()


async def hide_session(store: Store) -> None:
    """As behind a pooler: the backend of this connection is not to be found by its name."""
    async with store.database.connection() as conn:
        await conn.execute("SET application_name = 'pooler'")


async def make_commits_slow(admin: asyncpg.Connection, stream_name: str) -> None:
    table, condition = (
        ("events", "NEW.type_nid = 8") if stream_name == "events" else (stream_name, "true")
    )
    await admin.execute(SLOW_COMMIT.format(table=table, condition=condition))


async def slow_commit(admin: asyncpg.Connection) -> int:
    """The backend that is about to commit, once there is one."""
    while (pid := await admin.fetchval(COMMITTING)) is None:
        await pause()
    return int(pid)


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("stream_name", COUNTED)
async def test_a_connection_that_is_lost_while_the_server_commits(
    dsn: str, stream_name: str, hidden: bool
) -> None:
    """The store waits for the commit.

    It ends a backend that it can find first, and makes the write again.
    """
    async with sending(dsn, stream_name) as (eater, sender, admin):
        await make_commits_slow(admin, stream_name)
        if hidden:
            await hide_session(sender.store)
        sent = asyncio.create_task(sender.send(2))
        await slow_commit(admin)
        eater.cut()
        await sent
        assert await counted(admin, stream_name) == [
            '{"n":0}',
            '{"n":1}',
            '{"n":2}',
        ]
        sender.expect_told([await last_id(admin, stream_name)])


@pytest.mark.parametrize("stream_name", COUNTED)
async def test_a_write_that_arrives_after_it_was_given_up(dsn: str, stream_name: str) -> None:
    """The write's connection is lost, so the store looks it up and makes it again.

    Then the first arrives, and is refused.
    """
    async with sending(dsn, stream_name) as (eater, sender, admin):
        await hide_session(sender.store)
        eater.delay(*SENT[stream_name])
        await sender.send(2)
        assert eater.delayed.is_set()
        await eater.deliver()
        assert await counted(admin, stream_name) == [
            '{"n":0}',
            '{"n":1}',
            '{"n":2}',
        ]
        sender.expect_told([await last_id(admin, stream_name)])
        await sender.send(3)


async def last_id(admin: asyncpg.Connection, stream_name: str) -> int:
    column, table = (
        ("stream_ordering", "events") if stream_name == "events" else ("stream_id", stream_name)
    )
    return int(await admin.fetchval(f"SELECT max({column}) FROM {table}"))


async def test_nobody_to_ask_is_said_and_found_out_later(dsn: str) -> None:
    async with sending(dsn, "to_device") as (eater, sender, admin):
        eater.eat(to_device.SQL_SEND)
        eater.away = True
        with pytest.raises(CommitUnknown, match="not known whether a write was done"):
            await sender.send(2)
        with pytest.raises(DatabaseUnavailable):
            await sender.send(3)
        assert (sender.told, sender.store.streams.is_writing("to_device")) == ([], True)
        eater.away = False
        await follow_once(sender.store.database, sender.store.streams)
        sender.expect_told([await last_id(admin, "to_device")])
        assert await counted(admin, "to_device") == [
            '{"n":0}',
            '{"n":1}',
            '{"n":2}',
        ]


async def test_an_epoch_whose_own_answer_is_lost(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up is cut off too, after it began the new epoch: the next one sees it as its own."""
    lost: list[str] = []

    def lose(statement: str, seconds: float) -> None:
        if statement == SQL_NEW_WRITER_EPOCH and len(lost) < 2:
            lost.append(statement)
            raise DatabaseUnavailable(f"lost after {seconds} s")

    async with sending(dsn, "to_device") as (eater, sender, admin):
        eater.eat(to_device.SQL_SEND)
        monkeypatch.setattr(eater, "after", lose)
        with pytest.raises(CommitUnknown):
            await sender.send(2)
        with pytest.raises(DatabaseUnavailable):
            await sender.send(3)
        await sender.send(4)
        assert len(lost) == 2
        assert await counted(admin, "to_device") == [
            '{"n":0}',
            '{"n":1}',
            '{"n":2}',
            '{"n":4}',
        ]
        assert len(sender.told) == 2


@pytest.mark.parametrize("stream_name", COUNTED)
async def test_a_process_that_was_replaced_writes_no_more(dsn: str, stream_name: str) -> None:
    """Where its sessions could not be seen, another process has entered under its name."""
    async with sending(dsn, stream_name) as (_, sender, admin):
        await hide_session(sender.store)
        async with storage.open(dsn, server_name="s1.test", config=QUIET) as successor:
            with pytest.raises(InstanceNameTaken):
                await sender.send(2)
            await follow_once(sender.store.database, sender.store.streams)
            assert await counted(admin, stream_name) == [
                '{"n":0}',
                '{"n":1}',
            ]
            await successor.to_device.send({USER: {"device": {}}})
            await successor.append([sender.room.message(USER, "successor").pdu], room_version="11")


async def test_a_name_is_one_living_process(dsn: str) -> None:
    impatient = storage.Config(follow_ms=3_600_000, enter_wait_ms=50)
    async with storage.open(dsn, server_name="s1.test", config=impatient) as store:
        with pytest.raises(
            InstanceNameTaken, match="another process is at work under the name main"
        ):
            async with storage.open(dsn, server_name="s1.test", config=impatient):
                pass
        await store.to_device.send({USER: {"device": {}}})
    async with storage.open(dsn, server_name="s1.test", config=impatient):
        pass


@pytest.mark.parametrize("name", ["", "two words", "wörker", "x" * 41, "line\nbreak"])
async def test_a_name_that_cannot_be_one(dsn: str, name: str) -> None:
    with pytest.raises(InvalidIdentifier):
        async with storage.open(dsn, server_name="s1.test", instance_name=name):
            pass
