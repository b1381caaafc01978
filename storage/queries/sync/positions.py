"""The positions of the streams in a snapshot.

A position and its facts are written in one transaction (storage/persist/write/all_tables.py), so
within one snapshot the positions are those of exactly the facts that can be read.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.prepared import prepare_ahead
from storage.database.sql_template import fill
from storage.streams import SyncToken, VectorPosition

TEMPLATE_POSITIONS: Final[LiteralString] = """
SELECT 'writer' AS kind, stream_name, instance_name, stream_id AS position
FROM stream_positions
WHERE stream_name <> 'backfill'
UNION ALL
SELECT 'purged', stream_name, NULL, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
{others}
"""
SQL_POSITIONS: Final[LiteralString] = fill(TEMPLATE_POSITIONS, others="")
prepare_ahead(SQL_POSITIONS)

SQL_POSITIONS_OF_CONNECTION: Final[LiteralString] = fill(
    TEMPLATE_POSITIONS,
    others="""
UNION ALL
SELECT 'connection', 'events', NULL, c.used_ts
FROM sliding_connections c
JOIN principals u USING (principal_nid)
WHERE c.connection_nid = $1::bigint AND ($2::bigint = c.base OR $2::bigint = ANY(c.unconfirmed))
    AND u.name = $3::text AND c.device_id = $4::text AND c.conn_id = $5::text
""",
)
"""Also returns when a connection was in use, if the state of its `pos` is valid."""

ACCOUNT_DATA: Final = "account_data"
RECEIPTS: Final = "receipts"
TO_DEVICE: Final = "to_device"
BESIDE: Final = (ACCOUNT_DATA, RECEIPTS, TO_DEVICE)
"""Streams of which a sync returns the position alone. The store of each returns its facts."""

STREAMS: Final = ("events", *BESIDE)
"""The built-in streams of a sync token. Those that the process has defined are also in it."""

NOT_SYNCED: Final = ("backfill", "caches")
"""Streams that no token has."""

PART_STREAMS: Final[LiteralString] = "stream_name <> 'backfill'"
"""The streams of tokens, and the caches that a sync reads, for statements with other rows."""

WRITER: Final = "writer"
PURGED: Final = "purged"


class WriterRow(NamedTuple):
    """A position in a stream: of a writer, or up to which the stream is purged ("purged").

    A purged row has no ``instance_name``. Below its position facts may be missing.
    """

    kind: str
    stream_name: str
    instance_name: str | None
    position: int


class Reached(NamedTuple):
    """The positions of the streams of a sync token, and up to which the events may be purged."""

    token: SyncToken
    purged_upto: int


async def where(conn: Connection) -> Reached:
    """Return how far the streams are."""
    return reached_by(await writers(conn))


async def writers(conn: Connection) -> list[WriterRow]:
    """Return the position of each writer in each stream, and of the purge of the events."""
    return await conn.fetch(SQL_POSITIONS, row=WriterRow)


def reached_by(rows: Iterable[WriterRow]) -> Reached:
    """Return the positions of the streams for those of their writers. Recent ones are cached."""
    return _reached_by(tuple(rows))


@lru_cache(maxsize=64)
def _reached_by(rows: tuple[WriterRow, ...]) -> Reached:
    named = {row.stream_name for row in rows if row.kind == WRITER}.difference(NOT_SYNCED)
    found = {name: vector(positions_in(rows, name)) for name in named.union(STREAMS)}
    purged = (row.position for row in rows if row.kind == PURGED)
    return Reached(SyncToken.of(found), max(purged, default=0))


def covered(reached: SyncToken, defined: frozenset[str], given: SyncToken | None) -> SyncToken:
    """Return the positions that a response covers: of the built-in and of the ``defined`` streams.

    A response has no facts of a stream that only other processes have defined. So the token keeps
    the position that it has in ``given``, the token of the client, and lacks it without one.
    """
    if all(name in STREAMS or name in defined for name, _ in reached.streams):
        return reached
    known = {} if given is None else given.positions()
    return SyncToken(
        tuple(
            (name, at if name in STREAMS or name in defined else at.meet(known[name]))
            for name, at in reached.streams
            if name in STREAMS or name in defined or name in known
        )
    )


def positions_in(rows: Iterable[WriterRow], stream_name: str) -> dict[str, int]:
    return {
        row.instance_name or "": row.position
        for row in rows
        if row.kind == WRITER and row.stream_name == stream_name
    }


async def positions(conn: Connection) -> dict[str, VectorPosition]:
    """Return the position of each stream of a sync token."""
    return (await where(conn)).token.positions()


def vector(writers: Mapping[str, int]) -> VectorPosition:
    return VectorPosition.of(min(writers.values(), default=0), writers)


def events_of(token: SyncToken) -> VectorPosition:
    return token.position("events") or VectorPosition()


def reached(token: SyncToken) -> int:
    """Return the stream ordering above which the token covers no event."""
    return events_of(token).furthest()
