"""What an operator does while the soak (benchmarks/soak.py) runs: one thing, to one room or user.

Rooms are purged, collected, verified and archived. Users are forgotten, and redacted events are
censored.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import storage
from benchmarks.soak_rooms import SERVER
from storage import RoomId, UserId
from storage.config import Config
from storage.database import Database
from storage.maintenance.censor import censor, remove_content
from storage.maintenance.cold_archive import archive_events
from storage.maintenance.purge import purge_history
from storage.maintenance.state_group_gc import collect
from storage.maintenance.verify import verify

GRACE_S: Final = 1.0
"""The time for which a replaced pack stays readable, in seconds."""

CONFIG: Final = Config(instance_name="upkeep", statement_timeout_ms=600_000)

SQL_ROOMS: Final = "SELECT room_id FROM rooms ORDER BY room_nid"
SQL_ANY_EVENT: Final = """
SELECT event_id
FROM events
JOIN rooms USING (room_nid)
WHERE room_id = $1 AND NOT outlier AND NOT backfilled
ORDER BY random()
LIMIT 1
"""
SQL_ANY_SENDER: Final = """
SELECT p.name
FROM (SELECT DISTINCT sender_nid FROM events JOIN rooms USING (room_nid) WHERE room_id = $1) AS s
JOIN principals p ON p.principal_nid = s.sender_nid
WHERE p.name <> ALL($2::text[])
ORDER BY random()
LIMIT 1
"""


@dataclass(slots=True)
class Upkeep:
    """The operator. ``kept`` are users who are never forgotten; ``forgotten`` are those who are."""

    dsn: str
    chance: random.Random
    counts: Counter[str]
    folder: Path
    kept: list[str]
    forgotten: set[UserId] = field(default_factory=set)

    async def __call__(self) -> None:
        """Do one thing to a room, as a command does: with connections of its own."""
        async with await Database.open(self.dsn, config=CONFIG) as database:
            async with database.connection() as conn:
                rooms = await conn.fetchvals(SQL_ROOMS)
            work = (
                *(self.purge, self.collect, self.verify),
                *(self.archive, self.forget_user, self.censor),
            )
            if rooms:
                await self.chance.choice(work)(database, RoomId(self.chance.choice(rooms)))

    async def purge(self, database: Database, room_id: RoomId) -> None:
        """Purge the history before an event."""
        async with database.connection() as conn:
            event_id = await conn.fetchval(SQL_ANY_EVENT, room_id)
        try:
            done = await purge_history(
                database, room_id, server_name=SERVER, before_event_id=event_id
            )
        except storage.InputError as error:
            self.counts[f"purges refused: {type(error).__name__}"] += 1
            return
        self.counts["purges"] += 1
        self.counts["events purged"] += done.events

    async def collect(self, database: Database, room_id: RoomId) -> None:
        """Delete unused state groups."""
        freed = await collect(database, room_id)
        self.counts["state groups freed"] += freed.state_groups

    async def verify(self, database: Database, room_id: RoomId) -> None:
        """Verify the room."""
        found = [
            finding async for finding in verify(database, server_name=SERVER, room_ids=[room_id])
        ]
        self.counts["rooms verified meanwhile"] += 1
        self.counts["findings meanwhile"] += len(found)
        for finding in found:
            print("finding:", finding)

    async def archive(self, database: Database, room_id: RoomId) -> None:
        """Archive the events of the room, however new."""
        done = await archive_events(
            database,
            older_than_ms=0,
            url=str(self.folder),
            room_ids=[room_id],
            grace_s=GRACE_S,
        )
        self.counts["events archived"] += done.events

    async def forget_user(self, database: Database, room_id: RoomId) -> None:
        """Erase a user of the room, and sometimes remove their content."""
        async with database.connection() as conn:
            user = await conn.fetchval(SQL_ANY_SENDER, room_id, self.kept)
        if user is None:
            return
        self.forgotten.add(UserId(user))
        done = await remove_content(database, UserId(user))
        self.counts["users forgotten"] += 1
        self.counts["events without content"] += done.removed

    async def censor(self, database: Database, _: RoomId) -> None:
        """Censor all redacted events."""
        done = await censor(database, older_than_ms=0)
        self.counts["events censored"] += done.censored
