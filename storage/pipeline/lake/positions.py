"""The position of a table: how far it has followed the streams, as the text of a token.

The streams "events" and "backfill" have the new events. "caches" says which stored rows changed
since: an event that a redaction or a reordering changed, rows that a purge deleted, or that
something changed everywhere, as a repair does.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.source.token_bounds import (
    SQL_WRITER_NIDS,
    position_of,
)
from storage.streams import SyncToken, VectorPosition

STREAMS: Final = ("backfill", "caches", "events")

SQL_MIRROR_POSITIONS: Final[LiteralString] = """
SELECT s.stream_name, s.instance_name, s.stream_id
FROM stream_positions s
WHERE s.stream_name IN ('events', 'backfill', 'caches')
"""


def current_position(conn: ArrowConnection) -> SyncToken:
    """Return the position of the three streams in this snapshot."""
    writers: dict[str, dict[str, int]] = {name: {} for name in STREAMS}
    for row in conn.rows(SQL_MIRROR_POSITIONS):
        writers[row["stream_name"]][row["instance_name"]] = row["stream_id"]
    return SyncToken.of(
        {
            name: VectorPosition.of(min(found.values(), default=0), found)
            for name, found in writers.items()
        }
    )


class CacheBounds(NamedTuple):
    """The requested facts of the stream "caches": of each writer, after and up to an id."""

    writer_nids: list[int]
    after: list[int]
    upto: list[int]


def cache_bounds(conn: ArrowConnection, start: SyncToken, end: SyncToken) -> CacheBounds:
    """Return the facts of "caches" that ``end`` covers and ``start`` does not."""
    found = CacheBounds([], [], [])
    for row in conn.rows(SQL_WRITER_NIDS):
        after, upto = (
            position_of(token, "caches").position(row["instance_name"]) for token in (start, end)
        )
        if upto > after:
            for column, value in zip(found, (row["writer_nid"], after, upto), strict=True):
                column.append(value)
    return found
