"""A large room and one of a thousand events, beside small ones or alone.

benchmarks/crowd_build.py writes them. Both large rooms have an event with relations and threads, and
a local user who is in no other room.
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import asyncpg

from benchmarks.crowd import DEPTH_MS, EVERYWHERE, FIRST_MS, STEP_MS, Crowd, room_id
from benchmarks.crowd_build import build
from storage.database.connection import Connection
from storage.queries.catalogue import QueryArguments, deployment_of, token_behind

HALL, ROOM = 0, 1
"""The numbers of the large room, and of the one of a thousand events."""
EACH: Final = 40
"""Messages of a small room."""
FEWER: Final = 1_000
BEHIND: Final = 50
LIMIT: Final = 20


@dataclass(frozen=True, slots=True)
class UnevenCrowd(Crowd):
    """Rooms of which two are large. ``hall_events``: messages of the largest."""

    hall_events: int = 16_000

    def activity(self) -> list[float]:
        """Return the relative activity of each room."""
        return [self.hall_events, FEWER, *[EACH] * (self.rooms - 2)][: self.rooms]


def uneven(rooms: int, hall_events: int) -> UnevenCrowd:
    """Return so many rooms, of which the first has so many messages."""
    messages = hall_events + FEWER * (rooms > 1) + EACH * max(rooms - 2, 0)
    state = rooms * 21  # what is appended, and the changes
    return UnevenCrowd(rooms, messages + state, 20, body=10, hall_events=hall_events)


SQL_RELATED: Final = """
UPDATE events e
SET relates_to = relation_key(target.event_id), rel_type_nid = CASE WHEN e.event_nid % 3 = 0 THEN 22
    ELSE 21 END,
    json = convert_to(replace(convert_from(e.json, 'UTF8'), '"content":{',
        '"content":{"m.relates_to":{"event_id":"' || target.event_id || '"},'), 'UTF8')
FROM (
    SELECT t.event_id, t.room_nid,
        ARRAY(SELECT m.event_nid FROM events m WHERE m.room_nid = t.room_nid AND m.type_nid = 8
            AND m.topological_ordering > t.topological_ordering
            ORDER BY m.topological_ordering LIMIT 40) AS related
    FROM events t WHERE t.event_id = $1
) AS target
WHERE e.event_nid = ANY(target.related)
"""
SQL_LAST: Final = """
SELECT event_id FROM events
WHERE room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1) AND type_nid = 8
ORDER BY topological_ordering DESC OFFSET 100 LIMIT 1
"""
SQL_MIDDLE: Final = """
SELECT origin_server_ts FROM events
WHERE room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1) AND type_nid = 8
ORDER BY topological_ordering DESC OFFSET 500 LIMIT 1
"""


class UnevenDatabase(NamedTuple):
    """A database, and the arguments of the queries of both rooms."""

    dsn: str
    large: QueryArguments
    small: QueryArguments | None


async def filled(dsn: str, crowd: UnevenCrowd) -> UnevenDatabase:
    """Fill an empty, migrated database."""
    await build(dsn, crowd, told=False)
    driver = await asyncpg.connect(dsn)
    try:
        conn = Connection(driver)
        large = await _arguments(conn, crowd, HALL)
        small = await _arguments(conn, crowd, ROOM) if crowd.rooms > 1 else None
        return UnevenDatabase(dsn, large, small)
    finally:
        await driver.close()


async def _arguments(conn: Connection, crowd: UnevenCrowd, number: int) -> QueryArguments:
    deployment = await deployment_of(conn)
    members = crowd.members(number)
    room = room_id(number)
    event_id = await conn.fetchval(SQL_LAST, room)
    await conn.execute(SQL_RELATED, event_id)
    return QueryArguments(
        room=room,
        user=EVERYWHERE,
        event=event_id,
        server=next(name for name in members if name.startswith("@r")).partition(":")[2],
        since=await token_behind(conn, BEHIND, deployment),
        timestamp=await conn.fetchval(SQL_MIDDLE, room),
        limit=LIMIT,
        deployment=deployment,
    )
