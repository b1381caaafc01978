"""Find the main line of a room: from its last event back to its first, always to the latest parent.

Audiences of the main line are cheap: the range of a principal simply grows. Other events are
exceptions to it. While a room is written, the main line is the history of its current state, of
which only the end is still known. Any path gives correct answers.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose

SQL_BACKWARDS: Final[LiteralString] = compose(
    """
SELECT event_nid, stream_ordering, topological_ordering, :prev_nids.call AS prev_events
FROM events
WHERE room_nid = $1::int
    AND NOT outlier
    AND (topological_ordering, stream_ordering) < ($2::bigint, $3::bigint)
ORDER BY topological_ordering DESC, stream_ordering DESC
LIMIT $4::bigint
""",
    PREV_NIDS,
).sql

SQL_GAP_NIDS: Final[LiteralString] = """
SELECT event_nid
FROM missing_events
WHERE room_nid = $1::int
"""

BATCH: Final = 2_000
AFTER_ALL: Final = (1 << 63) - 1


class BackRow(NamedTuple):
    """An event of the way back."""

    event_nid: int
    stream_ordering: int
    topological_ordering: int
    prev_events: list[int]


async def main_line(conn: Connection, room_nid: int, ends: set[int]) -> set[int]:
    """Return the nids of the events on it.

    ``ends``: the events at which it may end; if empty, it ends at the latest event. Below a gap it
    continues with the next event.
    """
    gaps = set(await conn.fetchvals(SQL_GAP_NIDS, room_nid))
    line: set[int] = set()
    wanted = ends
    at = (AFTER_ALL, AFTER_ALL)
    while rows := await conn.fetch(SQL_BACKWARDS, room_nid, *at, BATCH, row=BackRow):
        for row in rows:
            if not wanted or row.event_nid in wanted:
                line.add(row.event_nid)
                wanted = set(row.prev_events) - gaps
        at = (rows[-1].topological_ordering, rows[-1].stream_ordering)
    return line
