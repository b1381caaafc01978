"""The facts of all streams that the homeserver defines: one table, and one sequence for their ids.

A defined stream is declared as the built-in ones are, by its name alone. It has positions, writers
and epochs of its own. The sequence is shared, because a process may not create one.

A fact is a key, a value, and the ids of the users and rooms whose waiting syncs it wakes. That is
also its row on the wire: `["!room:example.org", {"user_ids": []}, ["!room:example.org"]]`.
"""

from collections.abc import Sequence
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.database.connection import Connection
from storage.streams.feed import StreamRow
from storage.streams.registry import STREAMS, Declaration

SEQUENCE: Final = "published_facts_stream"

SQL_DEFINE: Final[LiteralString] = """
INSERT INTO defined_streams (stream_name)
SELECT unnest($1::text[])
ON CONFLICT (stream_name) DO NOTHING
"""

SQL_DEFINED: Final[LiteralString] = """
SELECT stream_name
FROM defined_streams
ORDER BY stream_name
"""

SQL_PUBLISHED_ROWS: Final[LiteralString] = """
SELECT f.stream_id, w.instance_name, f.key, f.value, f.wakes
FROM published_facts f
JOIN writers w USING (writer_nid)
WHERE f.stream_name = $5::text AND f.stream_id > $1::bigint AND f.stream_id <= $2::bigint
    AND ($3::text IS NULL OR w.instance_name = $3::text)
ORDER BY f.stream_id
LIMIT $4::bigint
"""


class PublishedRow(NamedTuple):
    """A row of a defined stream; ``value`` is JSON."""

    stream_id: int
    instance_name: str
    key: str
    value: bytes
    wakes: list[str]


class PublishedFact(StreamRow):
    """A fact of a defined stream. Its row is the key, the value, and the ids that it wakes."""

    __slots__ = ()

    @classmethod
    def of(cls, row: PublishedRow) -> "PublishedFact":
        return cls(row.stream_id, row.instance_name, [row.key, orjson.loads(row.value), row.wakes])

    @property
    def key(self) -> str:
        return str(self.row[0])

    @property
    def value(self) -> Any:
        return self.row[1]

    @property
    def wakes(self) -> list[str]:
        """Return the ids of the users and rooms whose waiting syncs it woke."""
        return list(self.row[2])


def declaration(name: str) -> Declaration:
    """Return the declaration of a defined stream."""

    async def read(
        conn: Connection, after: int, upto: int, writer: str | None, limit: int
    ) -> list[StreamRow]:
        rows = await conn.fetch(
            SQL_PUBLISHED_ROWS, after, upto, writer, limit, name, row=PublishedRow
        )
        return [PublishedFact.of(row) for row in rows]

    return Declaration(name, SEQUENCE, read, _wakes)


def _wakes(row: Sequence[Any]) -> Sequence[str]:
    _, _, wakes = row
    return list(wakes)


async def sequences(conn: Connection) -> dict[str, str]:
    """Return the sequence of each stream of the database, built in or defined."""
    built_in = {name: stream.sequence for name, stream in STREAMS.items()}
    return built_in | dict.fromkeys(await conn.fetchvals(SQL_DEFINED), SEQUENCE)
