"""Where reads go: to the primary, or to a standby that has replayed what they need.

    reads = Reads(database)                            # the primary alone
    reads = Reads(database, standby)                   # with ``replica_dsn``
    reads = Reads(database, standby, read_only=True)   # a standby alone

    await reads.run(lambda conn: members(conn, room), tokens=(at,))

A read on the standby that fails is repeated on the primary: the standby may be gone, behind, or
replay something that the read stands in the way of (a recovery conflict). So the work of a read
must have no effect outside of its connection, except for caches that any snapshot may fill.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from storage import arguments as args
from storage.database.connection import (
    ATTEMPTS_MAX,
    RETRY_MS_FIRST,
    Connection,
    Database,
)
from storage.errors import (
    DatabaseConflict,
    DatabaseError,
    DatabaseUnavailable,
    ReadOnly,
    ReplicaBehind,
)
from storage.observability.counters import READ_OUTCOMES
from storage.streams.feed import NOTHING, Need
from storage.streams.positions import VectorPosition

if TYPE_CHECKING:
    from storage.streams.standby import Standby

T = TypeVar("T")
Work = Callable[[Connection], Awaitable[T]]

STANDBY, BEHIND, CANCELLED, FAILED, RESTING = READ_OUTCOMES
"""The outcomes of reads: after all but the first one the primary has answered."""


class Reads:
    """The reads of one store."""

    def __init__(
        self,
        database: Database,
        standby: "Standby | None" = None,
        *,
        read_only: bool = False,
    ) -> None:
        self.standby: Standby | None = standby
        self.read_only: bool = read_only
        self._database = database

    async def run(
        self, work: Work[T], *, tokens: Iterable[str | None] = (), snapshot: bool = False
    ) -> T:
        """Run a read whose answer includes the facts that ``tokens`` cover.

        ``snapshot``: all its statements read one state. `InvalidToken`; `ReplicaBehind` if there is
        only a standby.
        """
        if self.standby is None:
            return await self._of_primary(work, snapshot=snapshot)
        need = Need.of(tokens, self.standby.deployment_id)
        if self.read_only:
            return await self._of_standby(self.standby, work, need, snapshot=snapshot)
        return await self._of_either(self.standby, work, need, snapshot=snapshot)

    async def of_primary(self, work: Work[T]) -> T:
        """Run a read on the primary, or on the standby of a read-only store."""
        if self.standby is not None and self.read_only:
            return await self._of_standby(self.standby, work, NOTHING, snapshot=False)
        with self.using_primary():
            return await self._of_primary(work, snapshot=False)

    @contextmanager
    def using_primary(self) -> Iterator[None]:
        """Run a block that uses the primary: later reads of the standby include what it saw."""
        try:
            yield
        finally:
            if self.standby is not None:
                self.standby.note_use()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Run a block that writes. Raise `ReadOnly` if the store only reads."""
        if self.read_only:
            raise ReadOnly
        with self.using_primary():
            yield

    async def _of_primary(self, work: Work[T], *, snapshot: bool) -> T:
        if not snapshot:
            async with self._database.connection() as conn:
                return await work(conn)
        async with self._database.transaction(isolation="repeatable_read", readonly=True) as conn:
            return await work(conn)

    async def _of_either(
        self, standby: "Standby", work: Work[T], need: Need, *, snapshot: bool
    ) -> T:
        outcome, answer = await _tried(standby, work, need, snapshot=snapshot)
        self._database.measures.replica_reads[outcome] += 1
        if answer is not None:
            return answer[0]
        with self.using_primary():
            return await self._of_primary(work, snapshot=snapshot)

    async def _of_standby(
        self, standby: "Standby", work: Work[T], need: Need, *, snapshot: bool
    ) -> T:
        """Read from the only server; repeat a read that it cancels, or that loses its session.

        One that has taken longer than `Config.pool_acquire_timeout_ms` is not repeated: the server
        hangs, or the read is too slow for it.
        """
        config, measures = self._database.config, self._database.measures
        last_repeat = perf_counter() + config.pool_acquire_timeout_ms / 1000
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                answer = await standby.read(work, need, snapshot=snapshot)
            except (DatabaseConflict, DatabaseUnavailable) as error:
                is_cancelled = isinstance(error, DatabaseConflict)
                measures.replica_reads[CANCELLED if is_cancelled else FAILED] += 1
                if attempt == ATTEMPTS_MAX or perf_counter() > last_repeat:
                    raise
                await asyncio.sleep(RETRY_MS_FIRST * 2**attempt / 1000)
            except ReplicaBehind:
                measures.replica_reads[BEHIND] += 1
                raise
            else:
                measures.replica_reads[STANDBY] += 1
                return answer
        raise AssertionError("the last attempt returns or raises")


async def _tried(
    standby: "Standby", work: Work[T], need: Need, *, snapshot: bool
) -> tuple[str, tuple[T] | None]:
    """Read from the standby; return the outcome, and no answer if the primary has to give it."""
    if standby.is_resting:
        return RESTING, None
    try:
        return STANDBY, (await standby.read(work, need, snapshot=snapshot),)
    except ReplicaBehind:
        return BEHIND, None
    except DatabaseConflict:
        return CANCELLED, None
    except DatabaseError as error:
        standby.rest(str(error))
        return FAILED, None


# --------------------------------------------------------------------------------------------------
# Positions as arguments of reads: a number, or a vector position, which is exact per writer.


def vector(position: int | VectorPosition, name: str) -> VectorPosition:
    """Return the position as a vector. Raise `InputError` for another value."""
    return (
        position
        if isinstance(position, VectorPosition)
        else VectorPosition(args.position(position, name))
    )


def parts(position: VectorPosition) -> tuple[int, list[str], list[int]]:
    """Return the arguments of a statement: ``min``, and the writers that are further."""
    return (
        position.min,
        [writer for writer, _ in position.items],
        [number for _, number in position.items],
    )
