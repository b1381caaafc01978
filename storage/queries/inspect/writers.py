"""The writers of all streams: their positions, when they entered, and whether a process is live."""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

SQL_WRITERS: Final[LiteralString] = """
SELECT p.stream_name, p.instance_name, p.stream_id, p.entered_at, p.epoch,
    max(p.stream_id) OVER (PARTITION BY p.stream_name) - p.stream_id AS behind,
    EXISTS (
        SELECT
        FROM pg_stat_activity a
        WHERE a.datname = current_database()
            AND is_session_of(a.application_name, p.instance_name)
    ) AS is_live
FROM stream_positions p
ORDER BY p.stream_name, p.instance_name
"""

SQL_PURGED: Final[LiteralString] = """
SELECT stream_name, purged_upto
FROM purged_streams
ORDER BY stream_name
"""

SQL_LOST: Final[LiteralString] = """
SELECT stream_name, lost_after, lost_upto
FROM lost_positions
ORDER BY stream_name, lost_upto
"""


class WriterPositionRow(NamedTuple):
    """The position of a writer in a stream.

    ``behind``: how far it is behind the furthest writer of the stream, in positions. ``is_live``: a
    session of a process with this name is open, on this server.
    """

    stream_name: str
    instance_name: str
    stream_id: int
    entered_at: int
    epoch: int
    behind: int
    is_live: bool


class PurgedStreamRow(NamedTuple):
    """The position up to which facts of a stream may be deleted."""

    stream_name: str
    purged_upto: int


class LostRangeRow(NamedTuple):
    """Positions that a restore of the database removed."""

    stream_name: str
    lost_after: int
    lost_upto: int


async def writers(conn: Connection) -> list[WriterPositionRow]:
    return await conn.fetch(SQL_WRITERS, row=WriterPositionRow)


async def purged_streams(conn: Connection) -> list[PurgedStreamRow]:
    """Return the streams with deleted facts."""
    return await conn.fetch(SQL_PURGED, row=PurgedStreamRow)


async def lost_ranges(conn: Connection) -> list[LostRangeRow]:
    """Return the gaps that restores left in the streams."""
    return await conn.fetch(SQL_LOST, row=LostRangeRow)
