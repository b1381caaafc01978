"""What the tests of the pipeline share: stores filled event by event, and their tables."""

from typing import Any

import asyncpg

import storage
from storage.database import Database
from storage.testing import GeneratedRoom
from tests.persist.tables import SQL_LOGICAL, logical_tables, row_counts

SERVER = "s1.test"


async def fill(dsn: str, room: GeneratedRoom, name: str = "main") -> None:
    """Append a room, event by event."""
    async with storage.open(dsn, server_name=SERVER, instance_name=name) as store:
        for event in room:
            given = {} if event.state_before is None else {event.event_id: event.state_before}
            await store.append(
                [event.pdu],
                room_version=event.room_version,
                origin=event.origin,
                state_before=given,
            )


async def large_tables(dsn: str) -> dict[str, Any]:
    """The same without what is written out for each event: whole states, and who sees it."""
    connection = await asyncpg.connect(dsn)
    try:
        return {
            name: list(map(tuple, await connection.fetch(sql)))
            for name, sql in SQL_LOGICAL.items()
            if name not in {"states", "seen"}
        }
    finally:
        await connection.close()


async def tables(dsn: str) -> dict[str, Any]:
    """Every table without numbers and positions, and how many rows each has."""
    async with await Database.open(dsn) as database:
        return {**await logical_tables(database), "counts": await row_counts(database)}
