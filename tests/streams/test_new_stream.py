"""A new stream: a table, a declaration and a write statement; then all else works for it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final, LiteralString, NamedTuple

import asyncpg
import pytest

import storage
from storage import Store
from storage.database.connection import Connection
from storage.streams import SyncToken, position_poller
from storage.streams.feed import Advance, StreamRow
from storage.streams.position_poller import follow_once
from storage.streams.registry import STREAMS, Declaration
from storage.streams.stream_writer import StreamWriter, WrittenRows

QUIET = storage.Config(follow_ms=3_600_000)

TABLE = """
CREATE SEQUENCE marks_stream AS bigint START 2;
CREATE TABLE marks (
    stream_id bigint PRIMARY KEY,
    user_id text COLLATE "C" NOT NULL,
    mark text COLLATE "C" NOT NULL,
    writer_nid smallint NOT NULL
);
"""

SQL_MARKS_ROWS: Final[LiteralString] = """
SELECT m.stream_id, w.instance_name, m.user_id, m.mark
FROM marks m
JOIN writers w USING (writer_nid)
WHERE m.stream_id > $1::bigint AND m.stream_id <= $2::bigint
    AND ($3::text IS NULL OR w.instance_name = $3::text)
ORDER BY m.stream_id
LIMIT $4::bigint
"""

SQL_ADD_MARK: Final[LiteralString] = """
WITH
fact AS (
    INSERT INTO marks (stream_id, user_id, mark, writer_nid)
    VALUES (nextval('marks_stream'), $1::text, $2::text, $3::smallint)
    RETURNING stream_id
),
position AS (
    UPDATE stream_positions
    SET stream_id = GREATEST(stream_positions.stream_id, fact.stream_id)
    FROM fact
    WHERE stream_name = 'marks' AND instance_name = $4::text AND epoch = $5::int
    RETURNING stream_positions.stream_id
)
SELECT fact.stream_id, CASE
        WHEN EXISTS (SELECT FROM position) THEN (SELECT count(*)::int FROM stream_positions
            WHERE stream_name = 'marks')
        ELSE refuse_old_writer($4::text)::int
    END AS writers
FROM fact
"""


class MarkRow(NamedTuple):
    stream_id: int
    instance_name: str
    user_id: str
    mark: str


class AddedRow(NamedTuple):
    stream_id: int
    writers: int


async def read_marks(
    conn: Connection, after: int, upto: int, writer: str | None, limit: int
) -> list[StreamRow]:
    rows = await conn.fetch(SQL_MARKS_ROWS, after, upto, writer, limit, row=MarkRow)
    return [StreamRow(row.stream_id, row.instance_name, [row.user_id, row.mark]) for row in rows]


class Marks:
    """The small store of the stream."""

    def __init__(self, store: Store, writer_nid: int) -> None:
        self._writer = StreamWriter("marks", store.database, store.streams, writer_nid)

    async def add(self, user_id: str, mark: str) -> int:
        writer = self._writer

        async def write(conn: Connection) -> WrittenRows:
            row = await conn.fetchrow(SQL_ADD_MARK, user_id, mark, *writer.author, row=AddedRow)
            assert row is not None
            return WrittenRows(
                [StreamRow(row.stream_id, writer.instance_name, [user_id, mark])], row.writers
            )

        return await writer.write(write)


@pytest.fixture
async def new_stream(dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with the table, and the declaration in the registry."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(TABLE)
    await connection.close()
    monkeypatch.setitem(
        STREAMS, "marks", Declaration("marks", "marks_stream", read_marks, lambda row: row[:1])
    )
    return dsn


@pytest.fixture
async def store(new_stream: str) -> AsyncIterator[Store]:
    async with storage.open(new_stream, server_name="s1.test", config=QUIET) as opened:
        yield opened


@pytest.fixture
async def second(new_stream: str, store: Store) -> AsyncIterator[Store]:
    async with storage.open(
        new_stream, server_name="s1.test", instance_name="second", config=QUIET
    ) as opened:
        yield opened


def listen(store: Store) -> list[StreamRow]:
    told: list[StreamRow] = []

    def hear(advance: Advance) -> None:
        told.extend(advance.rows)

    store.streams.feed.subscribe(hear)
    return told


async def marks_of(store: Store) -> Marks:
    async with store.database.connection() as conn:
        return Marks(
            store,
            await conn.fetchval(
                "SELECT writer_nid FROM writers WHERE instance_name = $1::text", store.instance_name
            ),
        )


async def test_facts_are_written_read_told_and_wake(store: Store, second: Store) -> None:
    told, elsewhere = listen(store), listen(second)
    marks = await marks_of(store)
    seen = SyncToken.of({"marks": store.streams["marks"].current()})
    waiting = asyncio.create_task(
        store.notifier.wait(["@a:s1.test"], after=seen, timeout_ms=60_000)
    )
    await asyncio.sleep(0)
    first = await marks.add("@a:s1.test", "one")
    assert await waiting
    last = await marks.add("@b:s1.test", "two")
    assert first < last
    facts = [
        StreamRow(first, "main", ["@a:s1.test", "one"]),
        StreamRow(last, "main", ["@b:s1.test", "two"]),
    ]
    assert await store.streams["marks"].rows(0, last, 10) == facts
    assert told == facts
    await follow_once(second.database, second.streams)
    assert elsewhere == facts
    await follow_once(store.database, store.streams)
    assert store.streams["marks"].linear() == last


async def test_its_positions_are_part_of_a_token(store: Store) -> None:
    marks = await marks_of(store)
    last = await marks.add("@a:s1.test", "one")
    token = SyncToken.of({name: stream.current() for name, stream in store.streams.items()})
    assert SyncToken.parse(token.print(store.deployment_id), store.deployment_id) == token
    position = token.position("marks")
    assert position is not None
    assert position.covers("main", last)


async def test_its_positions_survive_a_restart(new_stream: str) -> None:
    async with storage.open(new_stream, server_name="s1.test", config=QUIET) as before:
        last = await (await marks_of(before)).add("@a:s1.test", "one")
    async with storage.open(new_stream, server_name="s1.test", config=QUIET) as after:
        assert after.streams["marks"].positions()["main"] >= last
        assert await (await marks_of(after)).add("@a:s1.test", "two") > last


async def test_its_sequence_is_set_forward_after_a_restore(
    new_stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with storage.open(new_stream, server_name="s1.test", config=QUIET) as before:
        last = await (await marks_of(before)).add("@a:s1.test", "one")
        async with before.database.connection() as conn:
            await conn.execute("ALTER SEQUENCE marks_stream RESTART")
    async with storage.open(new_stream, server_name="s1.test", config=QUIET) as after:
        assert await (await marks_of(after)).add("@a:s1.test", "two") > last
    assert "the sequence marks_stream" in caplog.text


@pytest.mark.parametrize("page", [2, 3, 4, 5, 100])
async def test_rows_that_share_an_id_are_never_torn(
    store: Store, second: Store, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """A fact of three rows, read in pages that end in the middle of it."""
    marks = await marks_of(store)
    ids = [await marks.add("@a:s1.test", f"{number}") for number in range(5)]

    async def read_thrice(
        conn: Connection, after: int, upto: int, writer: str | None, limit: int
    ) -> list[StreamRow]:
        facts = await read_marks(conn, after, upto, writer, 100)
        return [
            StreamRow(fact.stream_id, fact.instance_name, [*fact.row, part])
            for fact in facts
            for part in range(3)
        ][:limit]

    monkeypatch.setattr(position_poller, "ROWS_AT_ONCE", page)
    monkeypatch.setattr(
        second.streams["marks"], "declaration", replace(STREAMS["marks"], read=read_thrice)
    )
    elsewhere = listen(second)
    await follow_once(second.database, second.streams)
    assert [(fact.stream_id, fact.row[-1]) for fact in elsewhere] == [
        (stream_id, part) for stream_id in ids for part in range(3)
    ]
