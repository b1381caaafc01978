"""Writes to a stream with a small store: one statement takes ids, writes facts, sets the position.

Within a process the writes of one stream follow one another, so a position never passes an id that
is still in flight. A write runs to its end even if its caller is cancelled, so committed facts are
always published. After a lost response, `InFlight` determines the outcome of the write.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import (
    CommitUnknown,
    DatabaseConflict,
    DatabaseUnavailable,
    InstanceNameTaken,
    StorageError,
)
from storage.streams.feed import StreamRow
from storage.streams.id_generator import IdGenerator, Reservation
from storage.streams.position_poller import learn_writers, missed_rows
from storage.streams.reads import Reads
from storage.streams.registry import Restart, Streams
from storage.streams.startup import new_writer_epoch

# --------------------------------------------------------------------------------------------------
# The ids that a writer has in flight, until their outcome is known, even after a lost response.
#
# A statement takes its ids, writes its facts and commits. If the connection is lost before the
# response, the statement may be done, running, still in transit, or may never run. Until that is
# known, no position may pass the ids it may have. So the lock on the positions stays, and the
# writer begins a new epoch in `stream_positions`. Every write updates that row, and only in its own
# epoch. So the update of the epoch waits for a running write, and a later one is refused. The facts
# committed by then are read from the tables and published; there will be no others. That is correct
# whatever is between us and Postgres. The backend of a lost connection is also terminated, if it
# can be found, so that the wait is short.

SQL_END_BACKEND: Final[LiteralString] = """
SELECT pg_terminate_backend(a.pid)
FROM pg_stat_activity a
WHERE a.pid = $1::int AND a.pid <> pg_backend_pid() AND is_session_of(a.application_name, $2::text)
"""

SQL_NEW_WRITER_EPOCH: Final[LiteralString] = """
UPDATE stream_positions
SET epoch = $4::int
WHERE instance_name = $1::text AND stream_name = ANY($2::text[]) AND epoch = ANY($3::int[])
RETURNING stream_id
"""

LOST: Final = (DatabaseUnavailable, CommitUnknown)
"""Errors that leave it open whether a statement was executed."""


class Author(NamedTuple):
    """The writer in the form that statements take: writer nid, instance name, and epoch."""

    writer_nid: int
    instance_name: str
    writer_epoch: int


class InFlight:
    """The writes of one writer that may be in flight in some streams; one write at a time.

        with in_flight.writing():
            in_flight.sent(conn)        before the statement, which names `author`
            …
            in_flight.answered()        its response is here, and other writers are known

    If a block ends in between, its ids stay in flight until `settle`. The exception is an error
    that means that nothing was done.
    """

    def __init__(
        self, database: Database, streams: Streams, names: Sequence[str], writer_nid: int
    ) -> None:
        self._database = database
        self._streams = streams
        self._names = names
        self._writer_nid = writer_nid
        self._reservations: list[tuple[IdGenerator, Reservation]] = []
        self._unanswered: Connection | None = None
        """The connection of the statement whose outcome is unknown; perhaps back in the pool."""
        self._settle_lock = asyncio.Lock()
        self._settled: Mapping[str, Sequence[StreamRow]] = {}
        self._begun_epochs: list[int] = []
        """Epochs that may have begun: the response was lost."""
        self._generation = 0
        self._restarted: Mapping[str, Sequence[StreamRow]] | None = None
        """The facts of the unanswered write in a database that replaced the one it was sent to."""
        streams.on_restart(self._restart)

    @property
    def author(self) -> Author:
        """Return the author for the next statement."""
        return Author(
            self._writer_nid,
            self._streams.instance_name,
            self._streams.writer_epochs.get(self._names[0], 0),
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run a block in which ids may be taken. Nothing may be unsettled."""
        self._settled, self._restarted = {}, None
        for generator in (self._streams[name].generator for name in self._names):
            self._reservations.append((generator, generator.hold()))
        try:
            yield
        except LOST:
            raise
        except StorageError:
            self._unanswered = None
            raise
        finally:
            if self._unanswered is None:
                self._let_go()
            else:
                self._streams.unsettled[self.settle] = None

    def _let_go(self) -> None:
        while self._reservations:
            generator, reservation = self._reservations.pop()
            generator.let_go(reservation)

    def sent(self, conn: Connection) -> None:
        """Record that a statement was sent: its outcome is unknown from here on."""
        self._unanswered = conn
        self._generation = self._database.connection_generation

    def answered(self) -> None:
        """Record that the outcome is known again.

        Raise `DatabaseReplaced` if the response came from a database that was replaced meanwhile.
        """
        if (
            self._unanswered is not None
            and self._generation != self._database.connection_generation
        ):
            raise self._database.guard.error()
        self._unanswered = None

    def _restart(self, restart: Restart) -> None:
        """Note the outcome of an unanswered write in the database that was entered again.

        Its facts there are known, and there will be no more of it.
        """
        self._writer_nid = restart.writer_nid
        self._begun_epochs.clear()
        if self._unanswered is not None:
            self._restarted = {name: restart.missed.get(name, ()) for name in self._names}

    async def settle(self) -> Mapping[str, Sequence[StreamRow]]:
        """Return the facts of the last write, by stream, if its response was lost.

        The outcome is determined and published now, or was by an earlier call. Without such a write
        nothing is done. Raise `CommitUnknown` if it cannot be determined now; the ids stay in
        flight then. Raise `InstanceNameTaken` if it never can be.
        """
        async with self._settle_lock:
            if self.settle in self._streams.unsettled:
                try:
                    self._settled = await self._find_out()
                except (*LOST, DatabaseConflict) as error:
                    raise CommitUnknown(
                        f"it is not known whether a write was done: {error.reason}",
                        sqlstate=error.sqlstate,
                    ) from error
            return self._settled

    async def ready(self) -> None:
        """Settle an unsettled write; await it before writing.

        Raise `DatabaseUnavailable` if that fails; nothing was written then.
        """
        if not (self.settle in self._streams.unsettled or self._settle_lock.locked()):
            return
        try:
            await self.settle()
        except CommitUnknown as error:
            raise DatabaseUnavailable(error.reason, sqlstate=error.sqlstate) from error

    async def _find_out(self) -> Mapping[str, Sequence[StreamRow]]:
        missed: Mapping[str, tuple[int, Sequence[StreamRow]]] = {}
        async with self._database.connection() as conn:  # perhaps after a restart
            if self._restarted is None:
                await self._end_backend(conn)
                await self._begin_writer_epoch(conn)
                missed = await missed_rows(conn, self._streams, self._names)
        del self._streams.unsettled[self.settle]
        self._unanswered = None
        self._let_go()
        if self._restarted is not None:
            return {name: rows for name, rows in self._restarted.items() if rows}
        for name, (position, rows) in missed.items():
            self._streams.advance(name, self._streams.instance_name, position, rows)
        return {name: rows for name, (_, rows) in missed.items() if rows}

    async def _end_backend(self, conn: Connection) -> None:
        """End the session of the write, if its connection is lost.

        If the connection is open, the statement has ended: Postgres has answered, or the pool has
        waited for its end. The session may have been lent to another caller since.
        """
        if self._unanswered is not None and self._unanswered.is_closed:
            await conn.execute(
                SQL_END_BACKEND, self._unanswered.backend_pid, self._streams.instance_name
            )

    async def _begin_writer_epoch(self, conn: Connection) -> None:
        """Wait for a running write, and refuse a later one."""
        author, writer_epoch = self.author, new_writer_epoch()
        self._begun_epochs.append(writer_epoch)
        mine = [author.writer_epoch, *self._begun_epochs]
        if len(
            await conn.fetchvals(
                SQL_NEW_WRITER_EPOCH, author.instance_name, list(self._names), mine, writer_epoch
            )
        ) != len(self._names):
            raise InstanceNameTaken(
                f"another process has taken over the name {author.instance_name}"
            )
        self._streams.writer_epochs.update(dict.fromkeys(self._names, writer_epoch))
        self._begun_epochs.clear()


ATTEMPTS = 5


class WrittenRows(NamedTuple):
    """The result of a write: its facts, and the number of writers of the stream."""

    rows: list[StreamRow]
    writers: int


class WrittenIdRow(NamedTuple):
    """The result of a statement that writes one fact."""

    stream_id: int
    writers: int


Write = Callable[[Connection], Awaitable[WrittenRows]]


class StreamWriter:
    """Writes facts to one stream, for one process.

    ``writer_nid`` is this process's number in `writers`.
    """

    def __init__(self, name: str, database: Database, streams: Streams, writer_nid: int) -> None:
        self.name = name
        self.database = database
        self.instance_name: str = streams.instance_name
        self._streams = streams
        self._in_flight = InFlight(database, streams, (name,), writer_nid)
        self._write_lock = asyncio.Lock()

    @property
    def reads(self) -> Reads:
        return self._streams.reads

    @property
    def author(self) -> Author:
        """Return the author for the statement that is being sent."""
        return self._in_flight.author

    async def write(self, write: Write) -> int:
        """Run a statement that commits on its own; return the largest id of its facts.

        It is done once, even if connections are lost.

        Raise `DatabaseUnavailable` if nothing was written. Raise `CommitUnknown` if the outcome
        cannot be determined; a second call may write the facts twice.
        """
        return await asyncio.shield(asyncio.create_task(self._write(write)))

    async def _write(self, write: Write) -> int:
        async with self._write_lock:
            await self._in_flight.ready()
            rows = await self._attempt(write)
            self._streams.advance(self.name, self.instance_name, rows[-1].stream_id, rows)
            return rows[-1].stream_id

    async def _attempt(self, write: Write) -> Sequence[StreamRow]:
        """Repeat the write until it is done.

        Repeat it after conflicts with others, and once more after a lost connection without result.
        """
        lost = False
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._once(write)
            except DatabaseConflict:
                continue
            except LOST:
                if rows := (await self._in_flight.settle()).get(self.name):
                    return rows
                if lost:
                    raise
                lost = True
        return await self._once(write)

    async def _once(self, write: Write) -> list[StreamRow]:
        with self._in_flight.writing():
            async with self.database.connection() as conn:
                self._in_flight.sent(conn)
                written = await write(conn)
            await learn_writers(self.database, self._streams, self.name, written.writers)
            self._in_flight.answered()
        return sorted(written.rows, key=lambda row: row.stream_id)
