"""Entering a replaced database again: a promoted standby, or a restored backup.

Each new session is compared with the database that the store entered (`is_same`). If it differs,
nobody gets a session, and the store enters again as if it had just been opened. That means a gap in
every stream (`storage.streams.restore_detection`), a new epoch, positions from the tables, and
empty caches. The same transaction reads the facts of an unanswered write. There will be no more of
it, because its epoch is over. Then the subscribers are informed.

Where nothing was lost, this is a pause of some milliseconds: tokens stay valid, and writes in
progress are done once.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from storage.database.connection import Connection, Database
from storage.database.deployment import deployment
from storage.database.migrate import check_schema
from storage.database.pool import begun
from storage.errors import StorageError, WrongServerName
from storage.streams.feed import StreamRow
from storage.streams.position_poller import EVERYTHING, follow_once
from storage.streams.registry import Restart, Streams
from storage.streams.restore_detection import Mark, PreviousState, check_session
from storage.streams.startup import Entered, be_alone, entered

logger: logging.Logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.25


@dataclass(slots=True)
class DatabaseEntry:
    """The database that a store has entered, and enters again."""

    database: Database
    streams: Streams
    server_name: str
    deployment_id: str
    mark: Mark

    async def is_same(self, conn: Connection) -> bool:
        """Return whether a session leads to the entered database.

        All known facts of all writers must be there.
        """
        session_check = await check_session(conn, self.positions())
        return (
            session_check.identity,
            session_check.lost_upto,
        ) == self.mark and not session_check.has_lost_rows

    def positions(self) -> Mapping[str, Mapping[str, int]]:
        """Return the known position of each writer, by stream."""
        return {name: stream.positions() for name, stream in self.streams.items()}


async def stay_entered(entry: DatabaseEntry, *, read_streams: Collection[str] | None) -> None:
    """Enter again whenever the database is replaced, until cancelled."""
    guard = entry.database.guard
    while True:
        await guard.until_replaced()
        logger.warning("the database was restored, or a standby took over: entering it again")
        while not guard.is_current:
            try:
                await enter_again(entry)
            except StorageError as error:
                if guard.reason != str(error):
                    logger.warning("the database cannot be entered again yet: %s", error)
                guard.reason = str(error)
                await asyncio.sleep(RETRY_SECONDS)
        try:
            await follow_once(entry.database, entry.streams, read_streams)
        except StorageError as error:
            logger.warning("the facts of other writers are read later: %s", error)


async def enter_again(entry: DatabaseEntry) -> None:
    """Enter the current database and reset everything."""
    name, previous = (
        entry.streams.instance_name,
        PreviousState(entry.positions(), entry.mark.lost_upto),
    )
    async with entry.database.apart() as conn:
        await check_schema(conn)
        await _check_deployment(conn, entry)
        await be_alone(conn, name, wait_ms=entry.database.config.enter_wait_ms)
        await check_session(conn, previous.positions)  # raises for a standby
        async with begun(conn):
            own, missed = await _entered(conn, entry, previous)
    entry.mark = own.mark
    entry.streams.restart(
        own.positions, own.writer_epochs, own.lost, Restart(own.writer_nid, missed)
    )
    entry.database.guard.enter_again()
    logger.warning(
        "the database is entered again: caches are empty, streams continue at %d",
        entry.streams["events"].current().furthest(),
    )


async def _entered(
    conn: Connection, entry: DatabaseEntry, previous: PreviousState
) -> tuple[Entered, dict[str, list[StreamRow]]]:
    """Enter, and read the own facts that this process does not know.

    Entering waits for running writes.
    """
    own_name = entry.streams.instance_name
    own = await entered(conn, own_name, previous=previous, defined=entry.streams.defined)
    missed = {
        name: await entry.streams[name].declaration.read(
            conn, writers[own_name], EVERYTHING, own_name, EVERYTHING
        )
        for name, writers in entry.positions().items()
    }
    return own, missed


async def _check_deployment(conn: Connection, entry: DatabaseEntry) -> None:
    """Raise `WrongServerName` or StorageError if this is no copy of the entered database."""
    stored = await deployment(conn)
    if (
        stored is not None
        and stored.server_name is not None
        and stored.server_name != entry.server_name
    ):
        raise WrongServerName(entry.server_name, found=stored.server_name)
    if stored is None or stored.deployment_id != entry.deployment_id:
        raise StorageError(
            "the address leads to a database that is no copy of the one that was opened: "
            "open the store again"
        )
