"""The registry of streams: one declaration per stream.

A stream has a name, a sequence, and a statement that reads its facts. `STREAMS` lists them. A new
one needs a declaration here, a table in a migration, and a test. `Streams` is the state of one
process: the known position of each writer in each stream.

`storage.streams.stream_rows` reads their facts. A homeserver adds streams of its own: all of them
have one table (`storage.streams.published_facts`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

from storage import arguments as args
from storage.database.connection import Connection, Database
from storage.streams import stream_rows
from storage.streams.caches import CURRENT_STATE, FORGOTTEN
from storage.streams.feed import Advance, Feed, StreamRow
from storage.streams.id_generator import IdGenerator
from storage.streams.positions import VectorPosition
from storage.streams.reads import Reads
from storage.streams.restore_detection import JUMP, LostPositions
from storage.streams.tokens import SyncToken

# --------------------------------------------------------------------------------------------------
# Stream ids from the sequences of Postgres.

SQL_ALLOCATE: Final[LiteralString] = """
SELECT nextval($1::text::regclass)
FROM generate_series(1, $2::int)
"""


def allocator(database: Database, sequence: str) -> Callable[[int], Awaitable[Sequence[int]]]:
    """Return the function that takes n ids from a sequence, for `IdGenerator`."""

    async def allocate(count: int) -> Sequence[int]:
        async with database.connection() as conn:
            return await conn.fetchvals(SQL_ALLOCATE, sequence, count)

    return allocate


Read = Callable[[Connection, int, int, str | None, int], Awaitable[list[StreamRow]]]


@dataclass(frozen=True, slots=True)
class Declaration:
    """A stream: its name, the sequence of its ids, and the function that reads its facts.

    ``wakes`` returns the keys of the notifier for a fact: room ids and user ids.
    """

    name: str
    sequence: str
    read: Read
    wakes: Callable[[Sequence[Any]], Sequence[str]]


def _nobody(_: Sequence[Any]) -> Sequence[str]:
    return ()


def _first(row: Sequence[Any]) -> Sequence[str]:
    return (row[0],)


def _room_and_member(row: Sequence[Any]) -> Sequence[str]:
    _, room_id, event_type, state_key, _ = row
    return (room_id, state_key) if event_type == "m.room.member" and state_key else (room_id,)


def _room_or_owner(row: Sequence[Any]) -> Sequence[str]:
    """Return the room of a receipt, or the user of a private one.

    The row may come from a process of another release.
    """
    is_private = len(row) > 2 and row[1] == stream_rows.PRIVATE
    return (row[2],) if is_private else (row[0],)


def _resolved_members(row: Sequence[Any]) -> Sequence[str]:
    """Return the users whose membership resolution changed, or `forget`: no event names them."""
    return row[1][1:] if row[0] in (CURRENT_STATE, FORGOTTEN) and row[1] is not None else ()


STREAMS: Final[Mapping[str, Declaration]] = {
    declaration.name: declaration
    for declaration in (
        Declaration("events", "events_stream", stream_rows.events, _room_and_member),
        Declaration("backfill", "events_stream", stream_rows.backfill, _nobody),
        Declaration("account_data", "account_data_stream", stream_rows.account_data, _first),
        Declaration("to_device", "to_device_stream", stream_rows.to_device, _first),
        Declaration("receipts", "receipts_stream", stream_rows.receipts, _room_or_owner),
        Declaration("caches", "caches_stream", stream_rows.caches, _resolved_members),
    )
}


NOTHING_LOST: Final = LostPositions()


class Stream:
    """One stream as this process knows it."""

    def __init__(
        self, declaration: Declaration, streams: "Streams", generator: IdGenerator
    ) -> None:
        self.declaration = declaration
        self.name: str = declaration.name
        self.generator = generator
        self._streams = streams

    def __repr__(self) -> str:
        return f"<Stream {self.name} at {self.current()}>"

    def current(self) -> VectorPosition:
        """Return the vector token: the linear position, and the writers known to be further."""
        return VectorPosition.of(self.linear(), self.generator.positions())

    def linear(self) -> int:
        """Return the id up to which all facts of all writers have completed.

        It is the smallest position of any writer, including this one. The own position moves only
        after a step that knows every writer: an own write, or a read of the table. So the result
        stays below the ids of a new writer, even one that this process does not know.
        """
        return min(self.generator.positions().values())

    def positions(self) -> dict[str, int]:
        """Return the known position of each writer."""
        return self.generator.positions()

    async def rows(
        self, after: int, upto: int, limit: int, *, instance_name: str | None = None
    ) -> list[StreamRow]:
        """Return at most ``limit`` facts with ``after < stream_id <= upto``, in stream order.

        They are those of one writer, or of all. Raise `InputError` for malformed arguments.
        """
        after, upto, limit = (
            args.position(after, "after"),
            args.position(upto, "upto"),
            args.position(limit, "limit"),
        )
        if instance_name is not None:
            args.text(instance_name)
        return await self._streams.reads.of_primary(
            lambda conn: self.declaration.read(conn, after, upto, instance_name, limit)
        )


class Restart(NamedTuple):
    """A store has entered a database that replaced another one.

    ``missed`` are its own facts there without a response.
    """

    writer_nid: int
    missed: Mapping[str, Sequence[StreamRow]]


class Streams(Mapping[str, Stream]):
    """All streams of a store, and the feed that publishes their advances.

    ``lost`` are the positions that restores removed, by stream.
    """

    def __init__(
        self,
        database: Database,
        instance_name: str,
        positions: Mapping[str, Mapping[str, int]],
        writer_epochs: Mapping[str, int] | None = None,
        *,
        lost: Mapping[str, LostPositions] | None = None,
        read_only: bool = False,
    ) -> None:
        self.instance_name = instance_name
        # this process writes nothing, so it is not among the writers
        self.read_only: bool = read_only
        # of this writer, by stream (`storage.streams.stream_writer`)
        self.writer_epochs: dict[str, int] = dict(writer_epochs or {})
        self.feed: Feed = Feed()
        # names of streams that the homeserver defines, and that are not entered yet
        # (`storage.streams.startup`)
        self.to_enter: set[str] = set()
        self.joining: asyncio.Lock = asyncio.Lock()
        # settle a write with a lost response
        self.unsettled: dict[Callable[[], Awaitable[object]], None] = {}
        self.lost: Mapping[str, LostPositions] = lost or {}
        self.reads: Reads = Reads(database)
        self._database = database
        self._restarts: list[Callable[[Restart], None]] = []
        self._streams = {
            name: Stream(declaration, self, self._generator(declaration, positions.get(name, {})))
            for name, declaration in STREAMS.items()
        }

    def _generator(self, declaration: Declaration, positions: Mapping[str, int]) -> IdGenerator:
        generator = IdGenerator(allocator(self._database, declaration.sequence), self.instance_name)
        for writer, position in positions.items():
            generator.advance(writer, position, completed=False)
        if self.read_only:
            self._keep_up(generator)
        return generator

    def keep_up(self) -> None:
        """Move the position of a process that does not write behind those of the writers."""
        for stream in self._streams.values():
            self._keep_up(stream.generator)

    def _keep_up(self, generator: IdGenerator) -> None:
        writers = generator.positions()
        del writers[self.instance_name]
        generator.advance(self.instance_name, min(writers.values(), default=0), completed=False)

    def add(
        self, declaration: Declaration, positions: Mapping[str, int], writer_epoch: int
    ) -> None:
        """Add a stream that this process has entered, with the positions of its writers then.

        One that is there already is left as it is.
        """
        name = declaration.name
        if name in self._streams:
            return
        self.writer_epochs[name] = writer_epoch
        self._streams[name] = Stream(declaration, self, self._generator(declaration, positions))
        for writer, position in positions.items():  # news before that are not known
            self.feed.publish(Advance(name, writer, position, position, (), local=False))

    @property
    def defined(self) -> list[str]:
        """Return the names of the streams that homeservers have defined."""
        return [name for name in self._streams if name not in STREAMS]

    def lost_in(self, stream_name: str) -> LostPositions:
        """Return the positions of a stream that restores removed."""
        return self.lost.get(stream_name, NOTHING_LOST)

    def refuse_lost(self, text: str, token: SyncToken) -> None:
        """Raise `ResyncNeeded` for a token, given as ``text``, of facts that a restore removed."""
        for name, position in token.streams:
            self.lost_in(name).refuse(text, position)

    def on_restart(self, subscriber: Callable[[Restart], None]) -> None:
        """Call this after each restart, before any later fact is published."""
        self._restarts.append(subscriber)

    def restart(
        self,
        positions: Mapping[str, Mapping[str, int]],
        writer_epochs: Mapping[str, int],
        lost: Mapping[str, LostPositions],
        restart: Restart,
    ) -> None:
        """Reset to a database that replaced the known one; ``positions`` are those in its tables.

        A writer may be further in the tables than was known. It starts at its known position,
        because its facts are still to be read.
        """
        previous = {name: stream.positions() for name, stream in self._streams.items()}
        self.writer_epochs, self.lost = dict(writer_epochs), lost
        for name, stream in self._streams.items():
            begin = {
                writer: self.lost_in(name).before(
                    writer, min(position, previous[name].get(writer, position))
                )
                for writer, position in positions.get(name, {}).items()
            }
            stream.generator = self._generator(stream.declaration, begin)
        for subscriber in self._restarts:
            subscriber(restart)
        for name in self._streams:
            if self.instance_name in positions.get(name, {}):
                self.advance(
                    name,
                    self.instance_name,
                    positions[name][self.instance_name],
                    restart.missed.get(name, ()),
                )

    def leaps(self, stream_name: str, instance_name: str, position: int) -> bool:
        """Return whether a writer's position is so far ahead that a gap must lie between."""
        previous = self._streams[stream_name].positions().get(instance_name, 0)
        return position - max(previous, self.lost_in(stream_name).upto) >= JUMP

    async def confirm(self) -> None:
        """Check whether the database is still the one that was entered.

        Raise `DatabaseReplaced` if not.
        """
        await self._database.confirm()

    def __getitem__(self, name: str) -> Stream:
        return self._streams[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def writing(self, stream_name: str) -> Iterator[None]:
        """Run a block in which this process may have ids of the stream in flight."""
        with self._streams[stream_name].generator.holding():
            yield

    def is_writing(self, stream_name: str) -> bool:
        """Return whether this process may have ids of the stream in flight."""
        return self._streams[stream_name].generator.is_busy

    def meet(self, stream_name: str, instance_name: str, entered_at: int) -> None:
        """Add an unknown writer: all its facts are above ``entered_at``."""
        self._streams[stream_name].generator.advance(instance_name, entered_at, completed=False)
        self.feed.publish(Advance(stream_name, instance_name, 0, entered_at, (), local=False))

    def advance(
        self,
        stream_name: str,
        instance_name: str,
        current: int,
        rows: Sequence[StreamRow],
        *,
        local: bool = True,
    ) -> None:
        """Record a writer's new position and publish it.

        An older position changes nothing.

        A position inside the writer's gap changes nothing either: it is from before the restore,
        and the facts up to there are lost.
        """
        generator = self._streams[stream_name].generator
        previous = generator.positions().get(instance_name, 0)
        if current <= previous or self.lost_in(stream_name).holds(instance_name, current):
            return
        # fetched facts may have been published meanwhile
        new_rows = [row for row in rows if row.stream_id > previous]
        if new_rows:
            generator.advance(instance_name, new_rows[-1].stream_id)
        if not new_rows or new_rows[-1].stream_id != current:
            generator.advance(instance_name, current, completed=False)
        self.feed.publish(Advance(stream_name, instance_name, previous, current, new_rows, local))
