"""Open a store: check the database, enter it as a writer, and close everything in reverse order."""

import logging
import os
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import replace
from typing import Any, NamedTuple

from signedjson.types import SigningKey

from storage import arguments as args
from storage.config import Config
from storage.database.connection import Database, Observer
from storage.database.deployment import settled
from storage.database.embedded import embedded_postgres, naming_folder
from storage.database.migrate import MigrationOptions, check_schema, migrate
from storage.errors import InputError
from storage.event.signatures import OldKey, read_old_keys
from storage.persist import Writer
from storage.persist.commit.arrival_clock import last_received_ms
from storage.persist.commit.group_commit import WRITER_READS
from storage.persist.partial_marks import drop_lost_marks
from storage.store.background import running
from storage.store.facade import Store
from storage.store.open_standby import open_reader, reads_beside
from storage.store.unopened import unopened
from storage.streams import startup
from storage.streams.identity import Identity
from storage.streams.position_poller import follow
from storage.streams.published_facts import declaration
from storage.streams.reenter_database import DatabaseEntry, stay_entered
from storage.streams.registry import Streams

logger: logging.Logger = logging.getLogger(__name__)


class OpenWriter(NamedTuple):
    """A writer of a database, with all that it needs."""

    database: Database
    streams: Streams
    writer: Writer
    identity: Identity


@unopened
@asynccontextmanager
async def open_store(
    dsn: str | None = None,
    *,
    server_name: str | None = None,
    instance_name: str = "main",
    config: Config | None = None,
    migrate: bool = False,
    observer: Observer | None = None,
    signing_key: SigningKey | None = None,
    old_signing_keys: Mapping[str, Mapping[str, Any]] | None = None,
    replica_dsn: str | None = None,
    read_only: bool = False,
) -> AsyncIterator[Store]:
    """Open a store for the length of a block: ``async with storage.open(…) as store:``.

    ``dsn`` None starts the embedded Postgres and migrates it; with a DSN the schema must be
    there unless ``migrate`` is set. The first store that opens a database sets its
    ``server_name``. Later you may leave it out. Another name raises `WrongServerName`, unless the
    database is still empty.
    ``instance_name`` must be unique among the processes on the database: 1 to 40 printable
    ASCII characters without spaces. `InstanceNameTaken` is raised while another process uses
    the name. ``observer`` is called for every statement. ``signing_key`` signs the events of
    `Store.send` and `Store.create_room`.
    ``old_signing_keys`` are those that it has replaced, in the form of ``old_verify_keys``:
    ``{"ed25519:1": {"key": "base64…", "expired_ts": ms}}``. They verify own events up to that time,
    which other servers return when a room is joined again.

    ``replica_dsn`` is the DSN of a standby of the database. It answers reads, as soon as it has
    replayed the tokens of the call and all that this process knows; else the primary does.
    ``read_only`` opens ``dsn``, which may be a standby, to read alone: calls that write raise
    `ReadOnly`, and reads wait `Config.replica_wait_ms` for their tokens, and then raise
    `ReplicaBehind`.

    Raise `SchemaOutOfDate`, `DatabaseUnavailable`, or
    `InputError` for a DSN that cannot be read, or a malformed server name or key.
    """
    startup.check_name(instance_name)  # before anything is started, or migrated
    if server_name is not None:
        args.own_server(server_name)
    old_keys = _old_keys(signing_key, old_signing_keys)
    config = replace(config or Config.from_env(), instance_name=instance_name)
    if read_only:
        if dsn is None or migrate or replica_dsn is not None:
            raise InputError("read_only wants the DSN of one server, and does not migrate it")
        async with (
            open_reader(dsn, server_name=server_name, config=config, observer=observer) as reader,
            _opened(Store(*reader, signing_key, old_signing_keys=old_keys)) as store,
        ):
            yield store
        return
    async with AsyncExitStack() as stack:
        if dsn is None:
            _note_unused_variable()
            dsn = await stack.enter_async_context(embedded_postgres(config=config))
            naming: AbstractContextManager[None] = naming_folder(config.database_schema)
            migrate = True
        else:
            naming = nullcontext()
        if migrate:
            await _migrate(dsn, how=MigrationOptions(database_schema=config.database_schema))
        opening = open_writer(
            dsn, server_name=server_name, config=config, observer=observer, told_of=None
        )
        with naming:
            opened = await stack.enter_async_context(opening)
        if replica_dsn is not None:
            await stack.enter_async_context(_reads_beside(opened, replica_dsn, observer))
        await drop_lost_marks(opened.database)
        store = Store(*opened, signing_key, old_signing_keys=old_keys)
        yield await stack.enter_async_context(_opened(store))


def _reads_beside(
    opened: OpenWriter, replica_dsn: str, observer: Observer | None
) -> AbstractAsyncContextManager[None]:
    deployment_id = opened.identity.deployment_id
    return reads_beside(
        replica_dsn, opened.database, opened.streams, deployment_id, observer=observer
    )


def _old_keys(
    signing_key: SigningKey | None, old: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, OldKey]:
    """Return the old keys, after a check of all keys. `InputError`."""
    found = {} if old is None else read_old_keys(old)
    if signing_key is not None:
        current = args.signing_key(signing_key)
        if (key_id := f"{current.alg}:{current.version}") in found:
            raise InputError(f"{key_id} is the signing key, and one of old_signing_keys")
    elif found:
        raise InputError("old_signing_keys are given without the signing_key that replaced them")
    return found


@asynccontextmanager
async def _opened(store: Store) -> AsyncIterator[Store]:
    """Run a block with a store, and end its waiting calls after it."""
    try:
        yield store
    finally:
        await store.sizes.close()
        store.notifier.close()


@asynccontextmanager
async def open_writer(
    dsn: str,
    *,
    server_name: str | None,
    config: Config,
    observer: Observer | None = None,
    told_of: Collection[str] | None = WRITER_READS,
) -> AsyncIterator[OpenWriter]:
    """Open only the writing part of a store.

    Of other writers, it reads the facts of the streams ``told_of`` only. None is for a whole store:
    it reads all, and its connections prepare the usual statements. The rest is as in `open_store`,
    and the instance name is that of ``config``.
    """
    instance_name = config.instance_name
    startup.check_name(instance_name)
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(
            await Database.open(dsn, config=config, observer=observer, mark=secrets.token_hex(4))
        )
        async with database.connection() as conn:
            await check_schema(conn)
            if told_of is None and config.prepare_ahead:  # while the rest is opened
                await stack.enter_async_context(running(database.prepared.run()))
            deployment_id, name = await settled(conn, server_name, wait_ms=config.enter_wait_ms)
            await startup.be_alone(conn, instance_name, wait_ms=config.enter_wait_ms)
        async with database.transaction() as conn:
            own = await startup.entered(conn, instance_name)
            database.measures.last_received_ms = await last_received_ms(conn)
        streams = Streams(database, instance_name, own.positions, own.epochs, lost=own.lost)
        for one in own.defined:
            streams.add(declaration(one), own.positions[one], own.epochs[one])
        entry = DatabaseEntry(database, streams, name, deployment_id, own.mark)
        database.watch(entry.is_same)
        writer = Writer(database, streams, server_name=name, writer_nid=own.writer_nid)
        await stack.enter_async_context(
            # entered before the writer starts, so that it ends after the last write
            running(stay_entered(entry, told_of=told_of))
        )
        writer.start()
        stack.push_async_callback(writer.close)
        await stack.enter_async_context(
            running(follow(database, streams, every_ms=config.follow_ms, told_of=told_of))
        )
        yield OpenWriter(
            database, streams, writer, Identity(name, instance_name, own.writer_nid, deployment_id)
        )


def _note_unused_variable() -> None:
    """Warn if the environment names a database that this call does not open."""
    if os.environ.get("STORAGE_DSN") or os.environ.get("STORAGE_DSN_FILE"):
        logger.warning(
            "STORAGE_DSN is set, but storage.open() without a DSN opens the embedded Postgres: "
            "give it os.environ['STORAGE_DSN']"
        )


_migrate = migrate
