"""Shadow tables: temporary tables of a session that hide the live ones under the same names.

The statements of planning and of the write read and fill them without a change. No other session
sees them, and they end with the session. Names (principals, types, state keys) and the sequences of
nids are shared with the live tables; positions are not. `ShadowTables.live` switches the session
back for a while: there a plain name is the live table, and ``pg_temp.name`` the shadow table.

Statements are planned while the tables are empty, and keep their plans. So they use indexes only.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, LiteralString, Self

from storage.database.connection import Connection, Database
from storage.errors import StorageCorrupt

SQL_SETTINGS: Final[LiteralString] = """
SET temp_buffers = '64MB';
SET enable_seqscan = off
"""

SQL_CREATE_SHADOWS: Final[LiteralString] = """
DO $$
DECLARE
    live CONSTANT oid = (SELECT relnamespace FROM pg_class WHERE oid = 'events'::regclass);
    name text;
BEGIN
    CREATE TEMP VIEW import_events AS SELECT event_nid AS place, 0 AS import_number, json
        FROM events;
    FOR name IN
        SELECT relname
        FROM pg_class
        WHERE relnamespace = live AND relkind = 'r'
            AND relname NOT IN ('alembic_version', 'schema_compatibility', 'deployment',
                'principals', 'event_types', 'state_keys', 'dictionaries', 'archive_packs',
                'import_events')
    LOOP
        EXECUTE format('CREATE TEMP TABLE %1$I (LIKE %1$I INCLUDING ALL)', name);
    END LOOP;
    CREATE TEMP SEQUENCE events_stream START 2;
    CREATE TEMP SEQUENCE caches_stream START 2;
    CREATE TEMP TABLE same_groups (shadow bigint PRIMARY KEY, live bigint NOT NULL);
END
$$
"""

SQL_EMPTY: Final[LiteralString] = """
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT relname FROM pg_class
        WHERE relnamespace = pg_my_temp_schema() AND relkind = 'r'
    LOOP
        EXECUTE format('TRUNCATE pg_temp.%I', name);
    END LOOP;
END
$$
"""

SQL_PATH: Final[LiteralString] = """
SELECT current_setting('search_path')
"""

SQL_SET_PATH: Final[LiteralString] = """
SELECT set_config('search_path', $1::text, false), set_config('enable_seqscan', $2::text, false)
"""

SQL_HAS_SHADOWS: Final[LiteralString] = """
SELECT relpersistence = 't'
FROM pg_class
WHERE oid = to_regclass('events')
"""

SQL_COUNTED: Final[LiteralString] = """
ANALYZE pg_temp.events;
ANALYZE pg_temp.state_groups;
ANALYZE pg_temp.auth_chains;
ANALYZE pg_temp.auth_chain_links;
ANALYZE pg_temp.visibility;
ANALYZE pg_temp.past_visibility;
ANALYZE pg_temp.audiences;
ANALYZE pg_temp.current_state;
ANALYZE pg_temp.missing_events
"""

SQL_FOREIGN_EVENTS: Final[LiteralString] = """
INSERT INTO pg_temp.events
SELECT * FROM events WHERE event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
))
ON CONFLICT DO NOTHING
"""

SQL_FOREIGN_ROOMS: Final[LiteralString] = """
INSERT INTO pg_temp.rooms
SELECT * FROM rooms WHERE room_nid IN (SELECT room_nid FROM events WHERE event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
)))
ON CONFLICT DO NOTHING
"""


class ShadowTables:
    """A session with shadow tables.

    Do not use its connection for anything else afterwards.
    """

    def __init__(self, conn: Connection, path: str) -> None:
        self.conn = conn
        self._path = path

    @classmethod
    async def of(cls, conn: Connection) -> Self:
        """Create the tables. ``conn``: in autocommit."""
        await conn.execute(SQL_SETTINGS)
        path: str = await conn.fetchval(SQL_PATH)
        await conn.execute(SQL_CREATE_SHADOWS)
        return cls(conn, path)

    @classmethod
    @asynccontextmanager
    async def opened(cls, database: Database) -> AsyncIterator[Self]:
        """Create the tables in a session outside the pool, and drop them at the end."""
        async with database.apart() as conn:
            yield await cls.of(conn)
            await conn.execute("DISCARD TEMP")  # the end of a session is not waited for

    @asynccontextmanager
    async def live(self, *, large: bool = False) -> AsyncIterator[Connection]:
        """Make plain names the live tables for a while.

        ``large``: the shadow tables were analysed, so sequential scans are allowed.
        """
        await self.conn.execute(SQL_SET_PATH, f"{self._path}, pg_temp", "on" if large else "off")
        try:
            yield self.conn
        except BaseException:
            # the end of a transaction sets back what it has set, and that of a session everything
            if not (self.conn.is_closed or self.conn.in_transaction):
                await self._turn_back()
            raise
        await self._turn_back()

    async def _turn_back(self) -> None:
        await self.conn.execute(SQL_SET_PATH, self._path, "off")

    async def check(self) -> None:
        """Raise `StorageCorrupt` unless plain names are shadow tables. Call before each write."""
        if not await self.conn.fetchval(SQL_HAS_SHADOWS):
            raise StorageCorrupt("a session has lost its shadow tables")

    async def count(self) -> None:
        await self.conn.execute(SQL_COUNTED)

    async def empty(self) -> None:
        await self.conn.execute(SQL_EMPTY)

    async def copy_foreign(self, event_ids: Iterable[str]) -> None:
        """Copy events of other rooms: the planner has to see them to refuse them."""
        ids = list(event_ids)
        async with self.live() as conn:
            await conn.execute(SQL_FOREIGN_EVENTS, ids)
            await conn.execute(SQL_FOREIGN_ROOMS, ids)
