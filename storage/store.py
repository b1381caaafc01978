"""`Store`: what a homeserver holds. It owns the pool, the writer and its caches, and opens a connection for each question.

Every method does one thing: take a connection (or a snapshot), call one function below, give the answer back.
"""

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import time_ns
from typing import Final, LiteralString

from storage.config import Config
from storage.database.connection import Database, Observer
from storage.database.embedded import embedded_postgres
from storage.database.migrate import check_schema, migrate
from storage.ids import EventId, RoomId, UserId
from storage.persist import AppendResult, Origin, Writer
from storage.persist.append import append
from storage.persist.intake import Pdu, VerifyKeys
from storage.queries import events, state
from storage.queries.events import StoredEvent
from storage.queries.state import StateMap

SQL_DEPLOYMENT: Final[LiteralString] = """
INSERT INTO deployment (deployment_id, created_ts)
VALUES ($1::text, $2::bigint)
ON CONFLICT DO NOTHING
"""

SQL_DEPLOYMENT_ID: Final[LiteralString] = """
SELECT deployment_id
FROM deployment
"""


class Store:
    """The rooms of one homeserver, on one database. Opened by `storage.open`."""

    def __init__(self, database: Database, writer: Writer, *, server_name: str, instance_name: str, deployment_id: str) -> None:
        self.database = database
        self.writer = writer
        self.server_name = server_name
        self.instance_name = instance_name
        self.deployment_id = deployment_id

    # ---------------------------------------------------------------------------------------------- writing

    async def append(
        self,
        pdus: Sequence[Pdu],
        *,
        room_version: str | None = None,
        origin: Origin = "live",
        state_before: Mapping[EventId, Iterable[EventId]] | None = None,
        verify_keys: VerifyKeys | None = None,
    ) -> list[AppendResult]:
        """Store PDUs; one result per PDU, in order (api.md, "Writing"). A bad PDU is an outcome, never an exception."""
        return await append(
            self.database, self.writer, pdus, room_version=room_version, origin=origin, state_before=state_before, verify_keys=verify_keys
        )

    # ---------------------------------------------------------------------------------------------- one thing

    async def event(self, event_id: EventId, *, redact: bool = True) -> StoredEvent | None:
        """One event, or None if it is not held. ``redact`` False shows its content also where a redaction took effect."""
        return (await self.events([event_id], redact=redact)).get(event_id)

    async def events(self, event_ids: Iterable[EventId], *, redact: bool = True) -> dict[EventId, StoredEvent]:
        """The events that are held, by id."""
        async with self.database.connection() as conn:
            return await events.events(conn, event_ids, redacted=redact)

    async def state_before(self, event_id: EventId, *, types: Iterable[str] | None = None) -> StateMap:
        """The state before an event. `UnknownEvent`, `StateUnknown` for an outlier."""
        async with self.database.connection() as conn:
            return (await state.states_at(conn, [event_id], after=False, types=types))[event_id]

    async def state_after(self, event_id: EventId, *, types: Iterable[str] | None = None) -> StateMap:
        """The state after an event; that before it unless it is an accepted state event."""
        async with self.database.connection() as conn:
            return (await state.states_at(conn, [event_id], after=True, types=types))[event_id]

    async def current_state(self, room_id: RoomId, *, types: Iterable[str] | None = None) -> StateMap:
        """The current state of a room. `UnknownRoom`."""
        async with self.database.connection() as conn:
            return await state.current_state(conn, room_id, types=types)

    async def forward_extremities(self, room_id: RoomId) -> set[EventId]:
        """The events on which the next one will build. `UnknownRoom`."""
        async with self.database.connection() as conn:
            return await state.forward_extremities(conn, room_id)

    async def backward_extremities(self, room_id: RoomId) -> set[EventId]:
        """The ids of the missing events at which the held history ends. `UnknownRoom`."""
        async with self.database.connection() as conn:
            return await state.backward_extremities(conn, room_id)

    async def rooms_of(self, user_id: UserId) -> list[RoomId]:
        """The rooms that a local user is joined to."""
        async with self.database.connection() as conn:
            return await state.rooms_of(conn, user_id)


@asynccontextmanager
async def open_store(
    dsn: str | None = None,
    *,
    server_name: str,
    instance_name: str = "main",
    config: Config | None = None,
    migrate: bool = False,
    observer: Observer | None = None,
) -> AsyncIterator[Store]:
    """A store, closed at the end of the block (api.md, "Opening").

    ``dsn`` None starts the embedded Postgres and migrates it; with a DSN the schema must be there unless ``migrate`` is set.
    ``observer`` is told of every statement. `SchemaOutOfDate`, `DatabaseUnavailable`, `InputError` for a DSN that cannot be read.
    """
    config = config or Config.from_env()
    async with AsyncExitStack() as stack:
        if dsn is None:
            dsn = await stack.enter_async_context(embedded_postgres(config=config))
            migrate = True
        if migrate:
            await _migrate(dsn)
        database = await stack.enter_async_context(await Database.open(dsn, config=config, observer=observer))
        async with database.connection() as conn:
            await check_schema(conn)
            await conn.execute(SQL_DEPLOYMENT, secrets.token_hex(8), time_ns() // 1_000_000)
            deployment_id = await conn.fetchval(SQL_DEPLOYMENT_ID)
        writer = Writer(database, server_name=server_name, instance_name=instance_name)
        writer.start()
        stack.push_async_callback(writer.close)
        yield Store(database, writer, server_name=server_name, instance_name=instance_name, deployment_id=deployment_id)


_migrate = migrate
