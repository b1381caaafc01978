"""How far the streams are in a snapshot.

A position and its facts are written in one transaction (storage/persist/write/all_tables.py), so
within one snapshot the positions are those of exactly the facts that can be read.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.streams import SyncToken, VectorPosition

SQL_POSITIONS: Final[LiteralString] = """
SELECT stream_name, instance_name, stream_id
FROM stream_positions
WHERE stream_name = ANY($1::text[])
UNION ALL
SELECT 'purged', stream_name, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
"""

BESIDE: Final = (
    "account_data",
    "receipts",
    "to_device",
)  # a sync says how far these are; what is in them, the store of each tells
STREAMS: Final = ("events", *BESIDE)  # those of a sync token

PURGED: Final = "purged"


class WriterRow(NamedTuple):
    """How far a writer is in a stream; or ("purged") up to where facts may be gone."""

    stream_name: str
    instance_name: str
    stream_id: int


class Reached(NamedTuple):
    """How far the streams of a sync token are, and up to where the events stream may have been purged."""

    token: SyncToken
    purged_upto: int


async def where(conn: Connection) -> Reached:
    """How far the streams are."""
    return reached_by(await writers(conn, STREAMS))


async def writers(conn: Connection, streams: Sequence[str]) -> list[WriterRow]:
    """How far each writer is in these streams, and up to where the events stream may have been purged."""
    return await conn.fetch(SQL_POSITIONS, list(streams), row=WriterRow)


def reached_by(rows: Iterable[WriterRow]) -> Reached:
    """How far the streams of a sync token are where their writers are there.

    Rows as they were lately are not put together again.
    """
    return _reached_by(tuple(rows))


@lru_cache(maxsize=64)
def _reached_by(rows: tuple[WriterRow, ...]) -> Reached:
    found = {
        name: vector({row.instance_name: row.stream_id for row in rows if row.stream_name == name})
        for name in STREAMS
    }
    return Reached(
        SyncToken.of(found),
        max((row.stream_id for row in rows if row.stream_name == PURGED), default=0),
    )


async def positions(conn: Connection) -> dict[str, VectorPosition]:
    """The position of each stream of a sync token."""
    return (await where(conn)).token.positions()


def vector(writers: Mapping[str, int]) -> VectorPosition:
    """The position of a stream with these writers."""
    return VectorPosition.of(min(writers.values(), default=0), writers)


def events_of(token: SyncToken) -> VectorPosition:
    """The position of a token in the stream "events"."""
    return token.position("events") or VectorPosition()


def reached(token: SyncToken) -> int:
    """No event above this stream ordering is covered by the token."""
    return events_of(token).furthest()
