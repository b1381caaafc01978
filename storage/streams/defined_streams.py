"""Streams that the homeserver defines, for facts of its own: typing, device lists, presence.

    typing = store.define_stream("typing", keep_ms=600_000)
    await typing.publish(room_id, {"user_ids": ["@alice:example.org"]}, wakes=[room_id])
    facts = await typing.rows(after, upto)

A fact never changes. The latest one of a key stays until it expires (``keep_ms``). Each `publish`
deletes earlier facts of its key that are older than SUPERSEDED_KEEP_MS, and a few expired facts of
other keys. So a table has at most a row per key, and those of the last minute.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Final, LiteralString

import orjson

from storage import arguments as args
from storage.database.connection import Connection, Database
from storage.database.placeholders import fill
from storage.errors import InputError, ReadOnly, UnknownStream
from storage.streams.feed import StreamRow
from storage.streams.positions import LARGEST_POSITION, VectorPosition
from storage.streams.published_facts import PublishedFact, PublishedRow
from storage.streams.reads import parts, vector
from storage.streams.registry import STREAMS, Restart, Streams
from storage.streams.startup import join
from storage.streams.stream_writer import StreamWriter, WrittenIdRow, WrittenRows

NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
STREAMS_MAX: Final = 32
"""Most streams that a process defines: each makes every sync token longer."""
KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 65_536
WAKES_MAX: Final = 10_000

SUPERSEDED_KEEP_MS: Final = 60_000
"""A superseded fact is kept so long. A process that follows within this time wakes for it."""

SQL_PUBLISH: Final[LiteralString] = """
WITH
now AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ts
),
fact AS (
    INSERT INTO published_facts (stream_id, published_ts, writer_nid, stream_name, key, value,
        wakes)
    SELECT nextval('published_facts_stream'), now.ts, $7::smallint, $1::text, $2::text, $3::bytea,
        $4::text[]
    FROM now
    RETURNING stream_id
),
position AS (
    UPDATE stream_positions
    SET stream_id = GREATEST(stream_positions.stream_id, fact.stream_id)
    FROM fact
    WHERE stream_name = $1::text AND instance_name = $8::text AND epoch = $9::int
    RETURNING stream_positions.stream_id
),
superseded AS (  -- by this one, which has a larger id than each that the snapshot shows
    DELETE FROM published_facts
    WHERE stream_name = $1::text AND stream_id = ANY(ARRAY(
        SELECT f.stream_id
        FROM published_facts f
        CROSS JOIN now
        WHERE f.key = $2::text AND f.stream_name = $1::text AND f.published_ts < now.ts - $5::bigint
        ORDER BY f.stream_id
        LIMIT 10
        FOR UPDATE OF f SKIP LOCKED
    ))
),
expired AS (  -- more than one, so that they get fewer
    DELETE FROM published_facts
    WHERE stream_name = $1::text AND stream_id = ANY(ARRAY(
        SELECT f.stream_id
        FROM (
            SELECT o.stream_id
            FROM published_facts o
            WHERE o.stream_name = $1::text AND o.key <> $2::text
            ORDER BY o.stream_id
            LIMIT 4
        ) AS oldest
        JOIN published_facts f ON f.stream_name = $1::text AND f.stream_id = oldest.stream_id
        CROSS JOIN now
        WHERE f.published_ts < now.ts - $6::bigint
        FOR UPDATE OF f SKIP LOCKED
    ))
)
SELECT stream_id, CASE
        WHEN EXISTS (SELECT FROM position) THEN (SELECT count(*)::int FROM stream_positions
            WHERE stream_name = $1::text)
        ELSE refuse_old_writer($8::text)::int
    END AS writers
FROM fact
"""

TEMPLATE_ROWS: Final[LiteralString] = """
SELECT f.stream_id, w.instance_name, f.key, f.value, f.wakes
FROM published_facts f
JOIN writers w USING (writer_nid)
LEFT JOIN unnest($3::text[], $4::bigint[]) AS a (instance_name, stream_id) USING (instance_name)
LEFT JOIN unnest($6::text[], $7::bigint[]) AS u (instance_name, stream_id) USING (instance_name)
WHERE f.stream_name = $1::text {of_keys}
    AND f.stream_id > $2::bigint AND f.stream_id <= $8::bigint
    AND f.stream_id > COALESCE(a.stream_id, $2::bigint)
    AND f.stream_id <= COALESCE(u.stream_id, $5::bigint)
ORDER BY f.stream_id
LIMIT $9::bigint
"""
SQL_ROWS: Final[LiteralString] = fill(TEMPLATE_ROWS, of_keys="")
SQL_ROWS_OF_KEYS: Final[LiteralString] = fill(TEMPLATE_ROWS, of_keys="AND f.key = ANY($10::text[])")


class DefinedStream:
    """A stream of the homeserver's own facts (``store.stream(name)``).

    Await it to enter it as a writer at once. Otherwise its first use does that.
    """

    def __init__(
        self, database: Database, streams: Streams, writer: StreamWriter, keep_ms: int | None
    ) -> None:
        self.name: str = writer.name
        self.keep_ms = keep_ms
        self._database = database
        self._streams = streams
        self._writer = writer

    def __repr__(self) -> str:
        return f"<DefinedStream {self.name}>"

    def __await__(self) -> Generator[Any, Any, "DefinedStream"]:
        return self._entered().__await__()

    async def _entered(self) -> "DefinedStream":
        if self.name not in self._streams:
            await join(self._database, self._streams)
        return self

    async def publish(self, key: str, value: Any, *, wakes: Iterable[str] = ()) -> int:
        """Publish a fact, and return its position.

        ``value`` is any JSON, up to 65,536 bytes, and ``key`` has 1 to 512 bytes. ``wakes`` are the
        ids of local users, and of rooms, whose waiting syncs end. For a fact of a room take the
        room id as key: a purge of the room deletes it.

        Raise `InputError` for malformed arguments. Raise `DatabaseUnavailable` if nothing was
        written, and `CommitUnknown` if the outcome cannot be determined.
        """
        packed, woken = _value(value), _woken(wakes)
        arguments = _key(key), packed, woken, SUPERSEDED_KEEP_MS, self.keep_ms
        if self._streams.read_only:
            raise ReadOnly
        await self

        async def write(conn: Connection) -> WrittenRows:
            writer = self._writer
            [row] = await conn.fetch(
                SQL_PUBLISH, self.name, *arguments, *writer.author, row=WrittenIdRow
            )
            wire_row = [key, orjson.loads(packed), woken]
            return WrittenRows(
                [StreamRow(row.stream_id, writer.instance_name, wire_row)], row.writers
            )

        return await self._writer.write(write)

    async def rows(
        self,
        after: int | VectorPosition = 0,
        upto: int | VectorPosition = LARGEST_POSITION,
        *,
        keys: Iterable[str] | None = None,
        limit: int | None = None,
    ) -> list[PublishedFact]:
        """Return the facts with ``after < position <= upto``, in stream order.

        A key may come several times: the last fact of it counts. With ``keys`` these are the facts
        of some keys. A vector position, as ``Store.positions_of`` returns it, is exact for each
        writer. `InputError` for malformed arguments.
        """
        low, high = vector(after, "after"), vector(upto, "upto")
        most = None if limit is None else args.position(limit, "limit")
        arguments = (self.name, *parts(low), *parts(high), high.furthest(), most)
        of_keys = None if keys is None else args.texts(keys, "keys")
        rows = await self._streams.reads.of_primary(
            lambda conn: (
                conn.fetch(SQL_ROWS, *arguments, row=PublishedRow)
                if of_keys is None
                else conn.fetch(SQL_ROWS_OF_KEYS, *arguments, of_keys, row=PublishedRow)
            )
        )
        return [PublishedFact.of(row) for row in rows]


class DefinedStreams(Mapping[str, DefinedStream]):
    """The streams that this process has defined, by name. A process follows the others, too."""

    def __init__(self, database: Database, streams: Streams, writer_nid: int) -> None:
        self.covered: frozenset[str] = frozenset()
        """Their names, as a set. A sync token of this process has their positions."""
        self._database = database
        self._streams = streams
        self._writer_nid = writer_nid
        self._defined: dict[str, DefinedStream] = {}
        streams.on_restart(self._restart)

    def __getitem__(self, name: str) -> DefinedStream:
        return self._defined[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._defined)

    def __len__(self) -> int:
        return len(self._defined)

    def define(self, name: str, keep_ms: int | None) -> DefinedStream:
        """Define a stream, or change how long the facts of a defined one are kept.

        Raise `InputError` for a malformed or a reserved name.
        """
        _check_name(name)
        keep = None if keep_ms is None else args.position(keep_ms, "keep_ms")
        if stream := self._defined.get(name):
            stream.keep_ms = keep
            return stream
        if len(self._defined) >= STREAMS_MAX:
            raise InputError(f"{STREAMS_MAX} streams are defined: use keys to tell facts apart")
        writer = StreamWriter(name, self._database, self._streams, self._writer_nid)
        stream = self._defined[name] = DefinedStream(self._database, self._streams, writer, keep)
        self.covered |= {name}
        if name not in self._streams:
            self._streams.to_enter.add(name)
        return stream

    def named(self, name: str) -> DefinedStream:
        try:
            return self._defined[args.text(name)]
        except KeyError:
            raise UnknownStream(name) from None

    async def ready(self) -> None:
        """Enter the streams that were defined since the last call."""
        if self._streams.to_enter:
            await join(self._database, self._streams)

    def _restart(self, restart: Restart) -> None:
        self._writer_nid = restart.writer_nid


def _check_name(name: str) -> None:
    """Raise `InputError` for a name that does not fit, or that is reserved."""
    if not NAME.fullmatch(args.text(name)):
        raise InputError(
            f"the name of a stream is {name[:99]!r}: 1 to 40 of a-z, 0-9, _, . and - are wanted, "
            "beginning with a letter"
        )
    if name in STREAMS:
        raise InputError(f"{name} is a stream of the store: choose another name")


def _key(key: str) -> str:
    if not 1 <= len(args.text(key).encode()) <= KEY_BYTES_MAX:
        raise InputError(f"the key of a fact has 1 to {KEY_BYTES_MAX} bytes, not {key[:99]!r}")
    return key


def _value(value: Any) -> bytes:
    packed = args.json_value(value, "value")
    if len(packed) > VALUE_BYTES_MAX:
        raise InputError(f"value has {len(packed)} bytes, more than {VALUE_BYTES_MAX}")
    return packed


def _woken(wakes: Iterable[str]) -> list[str]:
    """Return the ids, each once. Raise `InputError` for what is no id of a user or a room."""
    ids = args.texts(wakes, "wakes")
    if len(ids) > WAKES_MAX:
        raise InputError(f"wakes has {len(ids)} ids, more than {WAKES_MAX}: name rooms instead")
    for woken_id in ids:
        (args.room if woken_id.startswith("!") else args.user)(woken_id)
    return ids
