"""A sample of the stored events, decoded.

It is of pages of the table that Postgres chooses at random. So it is spread over time, and over
rooms as the events are; but of many rooms none has more than `ROOM_SHARE` of it. The cost follows
from the size of the sample, not of the table.
"""

import random
from collections import Counter
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.connection import Connection
from storage.errors import StorageCorrupt

ROOM_SHARE: Final = 0.1
ROWS_OF_PAGE: Final = 4
"""A quarter of the events in one page of the table: the sample is of more pages than it needs."""
PAGE_BYTES: Final = 8_192

SQL_PAGES: Final[LiteralString] = """
SELECT pg_relation_size('events') / $1::bigint
"""

SQL_SAMPLE: Final[LiteralString] = """
SELECT e.event_id, r.room_id, e.json
FROM events e TABLESAMPLE SYSTEM ($1::real) REPEATABLE ($2::int)
JOIN rooms r USING (room_nid)
ORDER BY e.event_nid
"""


class SampledEventRow(NamedTuple):
    """An event of the sample."""

    event_id: str
    room_id: str
    json: StoredBytes


class SampledEvent(NamedTuple):
    """An event of the sample, decoded, and its stored form."""

    raw: bytes
    event_id: str
    room_id: str
    stored: StoredBytes


async def sample_events(conn: Connection, events: int, seed: int) -> list[SampledEvent]:
    """Return events of pages chosen at random, at most so many, in random order.

    The same ``seed`` chooses the same events of an unchanged table. Events that cannot be decoded
    are left out.
    """
    pages: int = await conn.fetchval(SQL_PAGES, PAGE_BYTES)
    percent = min(100.0, 100 * events / (ROWS_OF_PAGE * max(pages, 1)))
    rows = await conn.fetch(SQL_SAMPLE, percent, seed, row=SampledEventRow)
    random.Random(seed).shuffle(rows)  # noqa: S311  # no secret
    share = max(ROOM_SHARE, 1 / max(len({row.room_id for row in rows}), 1))
    most = max(1, int(share * min(events, len(rows))))
    rooms = Counter[str]()
    found: list[SampledEvent] = []
    for row in rows:
        if rooms[row.room_id] < most and len(found) < events:
            try:
                raw = decode(row.json, row.event_id, row.room_id)
            except StorageCorrupt:  # `verify` reports it
                continue
            rooms[row.room_id] += 1
            found.append(SampledEvent(raw, row.event_id, row.room_id, row.json))
    return found
