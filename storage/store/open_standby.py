"""Open the reads of a store on a standby: beside its primary, or alone.

A store with ``read_only`` enters nothing: it is no writer, and Postgres refuses each write of its
sessions. It follows the positions of the writers as they are on its server. Facts that a restore
removed are read at the start, and again when the server has replayed a restore.
"""

import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from storage.config import Config
from storage.database.connection import Connection, Database, Observer
from storage.database.deployment import deployment
from storage.database.migrate import check_schema
from storage.database.transaction import begun
from storage.errors import InputError, WrongServerName
from storage.persist import Writer
from storage.store.background import running
from storage.streams import startup
from storage.streams.identity import Identity
from storage.streams.position_poller import follow
from storage.streams.published_facts import declaration
from storage.streams.reads import Reads
from storage.streams.registry import Restart, Streams
from storage.streams.restore_detection import LostPositions, lost
from storage.streams.standby import OtherDatabaseError, Standby

logger: logging.Logger = logging.getLogger(__name__)

NO_WRITER: int = 0
"""The writer nid of a store that writes nothing."""


class OpenReader(NamedTuple):
    """A database that is only read; the writer refuses to work."""

    database: Database
    streams: Streams
    writer: Writer
    identity: Identity


class Found(NamedTuple):
    """The values that a read-only store reads at the start, as of one moment."""

    deployment_id: str
    server_name: str
    positions: Mapping[str, Mapping[str, int]]
    lost: Mapping[str, LostPositions]


@asynccontextmanager
async def reads_beside(
    replica_dsn: str,
    database: Database,
    streams: Streams,
    deployment_id: str,
    *,
    observer: Observer | None = None,
) -> AsyncIterator[None]:
    """Lead the reads of a store that writes to ``database`` to a standby for the time of a block.

    A standby that does not answer yet is used later. `InputError` for one of another database.
    """
    if database.config.synchronous_commit == "off":
        raise InputError("replica_dsn needs a synchronous_commit other than off")
    async with AsyncExitStack() as stack:
        replica = await Database.open(
            replica_dsn, config=database.config, observer=observer, read_only=True, fill=False
        )
        await stack.enter_async_context(replica)
        replica.measures = database.measures
        standby = Standby(replica, streams, deployment_id, primary=database)
        try:
            await standby.begin()
        except OtherDatabaseError as error:
            raise InputError("replica_dsn leads to another database than the DSN") from error
        await stack.enter_async_context(running(standby.keep()))
        await stack.enter_async_context(running(standby.watch()))
        if database.config.prepare_ahead:
            await stack.enter_async_context(running(replica.prepared.run()))
        streams.reads = Reads(database, standby)
        yield


@asynccontextmanager
async def open_reader(
    dsn: str, *, server_name: str | None, config: Config, observer: Observer | None = None
) -> AsyncIterator[OpenReader]:
    """Open a store that only reads, on a standby or on a primary."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(
            await Database.open(dsn, config=config, observer=observer, read_only=True)
        )
        async with database.connection() as conn:
            await check_schema(conn)
            found = await _found(conn, server_name)
        # not among the names of the writers, one of which may be that of this process
        name = f"reader.{secrets.token_hex(8)}"
        streams = Streams(database, name, found.positions, lost=found.lost, read_only=True)
        _add_defined(streams, found)

        async def reload(conn: Connection) -> None:
            again = await _found(conn, found.server_name)
            streams.restart(again.positions, {}, again.lost, Restart(NO_WRITER, {}))
            _add_defined(streams, again)
            database.guard.enter_again()
            logger.warning("the database was restored: caches are empty, positions are read again")

        standby = Standby(database, streams, found.deployment_id, reload=reload)
        await standby.begin()  # it ends the other sessions, also one that prepares
        if config.prepare_ahead:
            await stack.enter_async_context(running(database.prepared.run()))
        streams.reads = Reads(database, standby, read_only=True)
        writer = Writer(database, streams, server_name=found.server_name, writer_nid=NO_WRITER)
        await stack.enter_async_context(
            running(follow(database, streams, every_ms=config.follow_ms))
        )
        yield OpenReader(
            database,
            streams,
            writer,
            Identity(found.server_name, config.instance_name, NO_WRITER, found.deployment_id),
        )


def _add_defined(streams: Streams, found: Found) -> None:
    for name in found.positions.keys() - streams.keys():
        streams.add(declaration(name), found.positions[name], 0)
    streams.keep_up()


async def _found(conn: Connection, server_name: str | None) -> Found:
    """Read the identity of the database and its positions."""
    async with begun(conn, isolation="repeatable_read", readonly=True):
        known = await deployment(conn)
        if known is None or known.server_name is None:
            raise InputError("no store was opened in this database yet: open one on the primary")
        if server_name not in {None, known.server_name}:
            raise WrongServerName(str(server_name), found=known.server_name)
        return Found(
            known.deployment_id,
            known.server_name,
            await startup.positions(conn),
            await lost(conn),
        )
