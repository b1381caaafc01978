"""Opening a store: the database is looked at, the writer enters, and what was begun is ended in the opposite order."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from storage.config import Config
from storage.database.connection import Database, Observer
from storage.database.deployment import settled
from storage.database.embedded import embedded_postgres
from storage.database.migrate import MigrationOptions, check_schema, migrate
from storage.persist import Writer
from storage.persist.commit.group_commit import WRITER_READS
from storage.store.facade import Store
from storage.streams import startup
from storage.streams.identity import Identity
from storage.streams.position_poller import follow
from storage.streams.reentry import DatabaseEntry, stay_entered
from storage.streams.registry import STREAMS, Streams


class OpenWriter(NamedTuple):
    """What writes to a database, and all that writing needs."""

    database: Database
    streams: Streams
    writer: Writer
    identity: Identity


@asynccontextmanager
async def open_store(
    dsn: str | None = None,
    *,
    server_name: str | None = None,
    instance_name: str = "main",
    config: Config | None = None,
    migrate: bool = False,
    observer: Observer | None = None,
) -> AsyncIterator[Store]:
    """A store, closed at the end of the block (api.md, "Opening").

    ``dsn`` None starts the embedded Postgres and migrates it; with a DSN the schema must be there
    unless ``migrate`` is set. ``server_name`` may be left out where the database remembers it: the
    first store that opens sets it, another one is `WrongServerName`. ``instance_name`` is this
    process's own among those on the database, 1 to 40 printable ASCII characters without spaces;
    `InstanceNameTaken` while another one works under it. ``observer`` is told of every statement.
    `SchemaOutOfDate`, `DatabaseUnavailable`, `InputError` for a DSN that cannot be read.
    """
    startup.check_name(instance_name)  # before anything is started, or migrated
    config = replace(config or Config.from_env(), instance_name=instance_name)
    async with AsyncExitStack() as stack:
        if dsn is None:
            dsn = await stack.enter_async_context(embedded_postgres(config=config))
            migrate = True
        if migrate:
            await _migrate(dsn, how=MigrationOptions(database_schema=config.database_schema))
        opening = open_writer(
            dsn, server_name=server_name, config=config, observer=observer, told_of=STREAMS.keys()
        )
        store = Store(*await stack.enter_async_context(opening))
        stack.callback(store.notifier.close)
        yield store


@asynccontextmanager
async def open_writer(
    dsn: str,
    *,
    server_name: str | None,
    config: Config,
    observer: Observer | None = None,
    told_of: Collection[str] = WRITER_READS,
) -> AsyncIterator[OpenWriter]:
    """What a store writes with, for who does nothing else: of what others write it is told the facts of the streams ``told_of`` only.

    Otherwise as `open_store`; the name is that of ``config``.
    """
    instance_name = config.instance_name
    startup.check_name(instance_name)
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(
            await Database.open(dsn, config=config, observer=observer, mark=secrets.token_hex(4))
        )
        async with database.connection() as conn:
            await check_schema(conn)
            deployment_id, name = await settled(conn, server_name)
            await startup.be_alone(conn, instance_name, wait_ms=config.enter_wait_ms)
        async with database.transaction() as conn:
            own = await startup.entered(conn, instance_name)
        streams = Streams(database, instance_name, own.positions, own.epochs, lost=own.lost)
        entry = DatabaseEntry(database, streams, name, deployment_id, own.mark)
        database.watch(entry.is_same)
        writer = Writer(database, streams, server_name=name, writer_nid=own.writer_nid)
        await stack.enter_async_context(
            running(stay_entered(entry, told_of=told_of))
        )  # also while the writer writes its last
        writer.start()
        stack.push_async_callback(writer.close)
        await stack.enter_async_context(
            running(follow(database, streams, every_ms=config.follow_ms, told_of=told_of))
        )
        yield OpenWriter(
            database, streams, writer, Identity(name, instance_name, own.writer_nid, deployment_id)
        )


_migrate = migrate


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A background task as long as the block; it is cancelled and awaited at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
