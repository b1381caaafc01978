"""Logs: ids, and never a word of what anybody said."""

import asyncio
import logging
import random
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest

import storage
from storage import Config, Store
from storage.database import Database
from storage.maintenance.censor import censor
from storage.persist.commit.retry import SQL_LOCK_ROOMS
from storage.replication import Client, Server
from storage.testing import Odd, RoomBuilder, build_room
from tests.maintenance.rooms import LIVELY, SERVER, findings

ALICE, MALLORY = "@alice:s1.test", "@mallory:s2.test"
DOCS = Path(__file__).resolve().parents[2] / "docs"
STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
SQL_KILL = """
SELECT pg_terminate_backend(pid)
FROM pg_stat_activity
WHERE application_name LIKE 'room-storage main%' AND datname = current_database()
"""
ODD = Odd(
    content_hash=0.05,
    rejected=0.08,
    soft_failed=0.05,
    bad_signature=0.05,
    oversized=0.03,
    early_redaction=0.05,
)


class LogRecords(logging.Handler):
    """Everything that anybody logs, however unimportant."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.taken: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.taken.append(record)

    def extras(self, name: str) -> list[dict[str, object]]:
        """The attributes that records of a logger have besides the usual ones."""
        return [
            {key: value for key, value in vars(one).items() if key not in STANDARD}
            for one in self.taken
            if one.name == name
        ]

    def text(self) -> str:
        """All that stands in the records, tracebacks included."""
        parts: list[str] = []
        for one in self.taken:
            parts += [
                one.getMessage(),
                repr(one.args),
                *(repr(value) for key, value in vars(one).items() if key not in STANDARD),
            ]
            parts += (
                traceback.format_exception(*one.exc_info)
                if one.exc_info and one.exc_info[0]
                else []
            )
        return "\n".join(parts)


@pytest.fixture
def records() -> Iterator[LogRecords]:
    handler, root = LogRecords(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER, config=Config(follow_ms=20)) as opened:
        yield opened


async def test_what_was_not_simply_stored_is_told_with_its_ids(
    store: Store, records: LogRecords
) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(ALICE)
    damaged = room.message(ALICE, damage="content_hash")
    refused = room.send(MALLORY, "m.room.message", {"body": "x"}, expected="rejected")
    [*_, lost] = [room.message(ALICE) for _ in range(2)]
    fine = [event for event in room.events if event not in (lost, room.events[-2])]
    await store.append([event.pdu for event in fine])
    await store.append([lost.pdu, b"{}"])
    told = records.extras("storage.persist.append")
    assert [(one["outcome"], one["event_id"], one["room_id"], one["rule"]) for one in told] == [
        ("redacted", damaged.event_id, room.room_id, None),
        ("rejected", refused.event_id, room.room_id, "sender.not_joined"),
        ("missing_parents", lost.event_id, room.room_id, None),
        ("invalid", None, None, None),
    ]
    assert {one.levelno for one in records.taken if one.name == "storage.persist.append"} == {
        logging.INFO
    }


def words_of(value: object) -> Iterator[str]:
    """The longer texts in a content."""
    if isinstance(value, str) and len(value) > 7 and value[0] not in "@!$#":
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from words_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from words_of(part)


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_that_was_said_is_logged(
    dsn: str, store: Store, records: LogRecords, seed: int
) -> None:
    """A random room with many refused, lost, reordered and cut-off events.

    Writers conflict, replication runs, and the database goes away.
    """
    rng = random.Random(seed)
    room = build_room(LIVELY.replaced(odd=ODD), 150, seed=seed, sign=False)
    pdus = [event.pdu for event in room.events]
    said = {word for pdu in pdus for word in words_of(orjson.loads(pdu).get("content"))}
    assert len(said) > 50
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(await Server(store).serve())
        second = await stack.enter_async_context(
            storage.open(dsn, server_name=SERVER, instance_name="second")
        )
        await stack.enter_async_context(Client(second, *server.address[:2]))
        for at in range(0, len(pdus), 10):
            batch = [
                *pdus[at : at + 10],
                pdus[rng.randrange(len(pdus))],
                pdus[at][: rng.randrange(len(pdus[at]))],
            ]
            await asyncio.gather(store.append(batch), second.append(batch))
            await store.sync(ALICE)
        await censor(store.database, older_than_ms=0)
        await findings(store)
        async with (
            await Database.open(dsn, config=Config(instance_name="killer")) as other,
            other.transaction() as conn,
        ):
            await conn.execute(SQL_LOCK_ROOMS, [room.room_id])
            last = asyncio.gather(
                *(store.append([pdu]) for pdu in pdus[-5:]), return_exceptions=True
            )
            await conn.execute(SQL_KILL)
        await last
    assert {"storage.persist.append", "storage.maintenance.censor"} <= {
        one.name for one in records.taken
    }
    text = records.text()
    assert [word for word in said if word in text] == []


def test_all_loggers_are_documented() -> None:
    everybody = logging.Logger.manager.loggerDict.items()
    known = {
        name
        for name, one in everybody
        if name.startswith("storage.") and isinstance(one, logging.Logger)
    }
    assert len(known) > 10
    page = (DOCS / "how-to/monitoring.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| `storage")]
    named = [
        name.strip("`").removesuffix(".*")
        for row in rows
        for name in row.split("|")[1].strip().split(", ")
    ]
    assert [name for name in known if not any(name.startswith(one) for one in named)] == []
