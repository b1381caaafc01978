"""Open a store: check the database, enter it as a writer, and close everything in reverse order."""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import replace
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, ParamSpec

from signedjson.types import SigningKey

from storage import arguments as args
from storage.config import Config
from storage.database.connection import Connection, Database, Observer
from storage.database.deployment import deployment, settled
from storage.database.embedded import embedded_postgres, naming_folder
from storage.database.migrate import MigrationOptions, check_schema, migrate
from storage.database.pool import begun
from storage.errors import InputError, WrongServerName
from storage.event.signatures import OldKey, read_old_keys
from storage.persist import Writer
from storage.persist.commit.group_commit import WRITER_READS
from storage.persist.commit.publish import last_received_ms
from storage.persist.partial_marks import drop_lost_marks
from storage.store.facade import Store
from storage.streams import startup
from storage.streams.position_poller import follow
from storage.streams.published_facts import declaration
from storage.streams.reads import Reads
from storage.streams.reenter_database import DatabaseEntry, stay_entered
from storage.streams.registry import Restart, Streams
from storage.streams.restore_detection import Identity, LostPositions, lost
from storage.streams.standby import OtherDatabaseError, Standby

# --------------------------------------------------------------------------------------------------
# The value of `storage.open`: a store that is not open before `async with`.
#
# A store that is used without it has no attributes. The error says what to write.

P = ParamSpec("P")

WRITE: Final = "write `async with storage.open(…) as store:`"


class UnopenedStore(AbstractAsyncContextManager[Store]):
    """A context manager whose block has the open store."""

    def __init__(self, opening: AbstractAsyncContextManager[Store]) -> None:
        self._opening = opening

    async def __aenter__(self) -> Store:
        return await self._opening.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._opening.__aexit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the store is not open, so it has no {name!r}: {WRITE}")

    def __await__(self) -> NoReturn:
        raise TypeError(f"storage.open cannot be awaited: {WRITE}")


def unopened(
    open_: Callable[P, AbstractAsyncContextManager[Store]],
) -> Callable[P, AbstractAsyncContextManager[Store]]:
    """Decorate a function that opens a store."""

    @wraps(open_)
    def call(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[Store]:
        return UnopenedStore(open_(*args, **kwargs))

    # for `help`: the annotation of the generator says nothing of `async with`
    returned = AbstractAsyncContextManager[Store]
    call.__annotations__ = {**call.__annotations__, "return": returned}
    call.__signature__ = signature(open_).replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


# --------------------------------------------------------------------------------------------------
# Background tasks of a store.

logger: logging.Logger = logging.getLogger(__name__)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a background task during the block. Cancel and await it at the end.

    If the task fails, log the exception at once. The block goes on.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error(
            "the background task %s has failed, and stays away until the store is opened again",
            task.get_coro().__qualname__,  # type: ignore[union-attr]
            exc_info=error,
        )


# --------------------------------------------------------------------------------------------------
# Open the reads of a store on a standby: beside its primary, or alone.
#
# A store with ``read_only`` enters nothing: it is no writer, and Postgres refuses each write of its
# sessions. It follows the positions of the writers as they are on its server. Facts that a restore
# removed are read at the start, and again when the server has replayed a restore.

NO_WRITER: int = 0
"""The writer nid of a store that writes nothing."""


class OpenReader(NamedTuple):
    """A database that is only read; the writer refuses to work."""

    database: Database
    streams: Streams
    writer: Writer
    identity: Identity


class ReaderStart(NamedTuple):
    """The values that a read-only store reads at the start, as of one moment."""

    deployment_id: str
    server_name: str
    positions: Mapping[str, Mapping[str, int]]
    lost: Mapping[str, LostPositions]


@asynccontextmanager
async def standby_reads(
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
            start = await _read_start(conn, server_name)
        # not among the names of the writers, one of which may be that of this process
        name = f"reader.{secrets.token_hex(8)}"
        streams = Streams(database, name, start.positions, lost=start.lost, read_only=True)
        _add_defined(streams, start)

        async def reload(conn: Connection) -> None:
            again = await _read_start(conn, start.server_name)
            streams.restart(again.positions, {}, again.lost, Restart(NO_WRITER, {}))
            _add_defined(streams, again)
            database.guard.enter_again()
            logger.warning("the database was restored: caches are empty, positions are read again")

        standby = Standby(database, streams, start.deployment_id, reload=reload)
        await standby.begin()  # it ends the other sessions, also one that prepares
        if config.prepare_ahead:
            await stack.enter_async_context(running(database.prepared.run()))
        streams.reads = Reads(database, standby, read_only=True)
        writer = Writer(database, streams, server_name=start.server_name, writer_nid=NO_WRITER)
        await stack.enter_async_context(
            running(follow(database, streams, every_ms=config.follow_ms))
        )
        yield OpenReader(
            database,
            streams,
            writer,
            Identity(start.server_name, config.instance_name, NO_WRITER, start.deployment_id),
        )


def _add_defined(streams: Streams, start: ReaderStart) -> None:
    for name in start.positions.keys() - streams.keys():
        streams.add(declaration(name), start.positions[name], 0)
    streams.keep_up()


async def _read_start(conn: Connection, server_name: str | None) -> ReaderStart:
    """Read the identity of the database and its positions."""
    async with begun(conn, isolation="repeatable_read", readonly=True):
        identity = await deployment(conn)
        if identity is None or identity.server_name is None:
            raise InputError("no store was opened in this database yet: open one on the primary")
        if server_name not in {None, identity.server_name}:
            raise WrongServerName(str(server_name), found=identity.server_name)
        return ReaderStart(
            identity.deployment_id,
            identity.server_name,
            await startup.positions(conn),
            await lost(conn),
        )


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
            dsn, server_name=server_name, config=config, observer=observer, read_streams=None
        )
        with naming:
            opened = await stack.enter_async_context(opening)
        if replica_dsn is not None:
            await stack.enter_async_context(_standby_reads(opened, replica_dsn, observer))
        await drop_lost_marks(opened.database)
        store = Store(*opened, signing_key, old_signing_keys=old_keys)
        yield await stack.enter_async_context(_opened(store))


def _standby_reads(
    opened: OpenWriter, replica_dsn: str, observer: Observer | None
) -> AbstractAsyncContextManager[None]:
    deployment_id = opened.identity.deployment_id
    return standby_reads(
        replica_dsn, opened.database, opened.streams, deployment_id, observer=observer
    )


def _old_keys(
    signing_key: SigningKey | None, old: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, OldKey]:
    """Return the old keys, after a check of all keys. `InputError`."""
    old_keys = {} if old is None else read_old_keys(old)
    if signing_key is not None:
        current = args.signing_key(signing_key)
        if (key_id := f"{current.alg}:{current.version}") in old_keys:
            raise InputError(f"{key_id} is the signing key, and one of old_signing_keys")
    elif old_keys:
        raise InputError("old_signing_keys are given without the signing_key that replaced them")
    return old_keys


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
    read_streams: Collection[str] | None = WRITER_READS,
) -> AsyncIterator[OpenWriter]:
    """Open only the writing part of a store.

    Of other writers, it reads the facts of the streams ``read_streams`` only. None is for a whole
    store: it reads all, and its connections prepare the usual statements. The rest is as in
    `open_store`, and the instance name is that of ``config``.
    """
    instance_name = config.instance_name
    startup.check_name(instance_name)
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(
            await Database.open(dsn, config=config, observer=observer, mark=secrets.token_hex(4))
        )
        async with database.connection() as conn:
            await check_schema(conn)
            if read_streams is None and config.prepare_ahead:  # while the rest is opened
                await stack.enter_async_context(running(database.prepared.run()))
            deployment_id, name = await settled(conn, server_name, wait_ms=config.enter_wait_ms)
            await startup.be_alone(conn, instance_name, wait_ms=config.enter_wait_ms)
        async with database.transaction() as conn:
            own = await startup.entered(conn, instance_name)
            database.measures.last_received_ms = await last_received_ms(conn)
        streams = Streams(database, instance_name, own.positions, own.writer_epochs, lost=own.lost)
        for stream in own.defined:
            streams.add(declaration(stream), own.positions[stream], own.writer_epochs[stream])
        entry = DatabaseEntry(database, streams, name, deployment_id, own.mark)
        database.watch(entry.is_same)
        writer = Writer(database, streams, server_name=name, writer_nid=own.writer_nid)
        await stack.enter_async_context(
            # entered before the writer starts, so that it ends after the last write
            running(stay_entered(entry, read_streams=read_streams))
        )
        writer.start()
        stack.push_async_callback(writer.close)
        await stack.enter_async_context(
            running(follow(database, streams, every_ms=config.follow_ms, read_streams=read_streams))
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
