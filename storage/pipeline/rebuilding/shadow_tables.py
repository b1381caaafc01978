"""Tables aside: temporary ones of a session, which stand before the live ones under the same names.

So the statements of the planner and of the write read and fill them as they are, and nothing of it
is seen by anybody else; they vanish with the session, whatever becomes of it. Names (principals,
types, state keys) and the sequences of numbers are shared with the live tables, positions are not.
`ShadowTables.live` turns the session back for a while: there a plain name is the live table, and
``pg_temp.name`` the one aside.

Plans are made while the tables are empty, and stay, so they use indexes alone.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, LiteralString, Self

from storage.database.connection import Connection
from storage.errors import StorageCorrupt

SQL_SETTINGS: Final[LiteralString] = """
SET temp_buffers = '64MB';
SET enable_seqscan = off
"""

SQL_PUT_ASIDE: Final[LiteralString] = """
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
                'principals', 'event_types', 'state_keys', 'import_events')
    LOOP
        EXECUTE format('CREATE TEMP TABLE %1$I (LIKE %1$I INCLUDING ALL)', name);
    END LOOP;
    CREATE TEMP SEQUENCE events_stream START 2;
    CREATE TEMP SEQUENCE caches_stream START 2;
    CREATE TEMP TABLE same_groups (aside bigint PRIMARY KEY, live bigint NOT NULL);
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

SQL_IS_ASIDE: Final[LiteralString] = """
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
SELECT * FROM events WHERE event_id = ANY($1::text[])
ON CONFLICT DO NOTHING
"""

SQL_FOREIGN_ROOMS: Final[LiteralString] = """
INSERT INTO pg_temp.rooms
SELECT * FROM rooms WHERE room_nid IN (SELECT room_nid FROM events WHERE event_id = ANY($1::text[]))
ON CONFLICT DO NOTHING
"""


class ShadowTables:
    """A session with tables aside.

    Its connection is not to be used for anything else afterwards.
    """

    def __init__(self, conn: Connection, path: str) -> None:
        self.conn = conn
        self._path = path

    @classmethod
    async def of(cls, conn: Connection) -> Self:
        """Make the tables. ``conn``: in autocommit."""
        await conn.execute(SQL_SETTINGS)
        path: str = await conn.fetchval(SQL_PATH)
        await conn.execute(SQL_PUT_ASIDE)
        return cls(conn, path)

    @asynccontextmanager
    async def live(self, *, large: bool = False) -> AsyncIterator[Connection]:
        """While plain names are the live tables.

        ``large``: what is aside was counted, and may be read as it lies.
        """
        await self.conn.execute(SQL_SET_PATH, f"{self._path}, pg_temp", "on" if large else "off")
        try:
            yield self.conn
        except BaseException:
            if not self.conn.in_transaction:  # else its end sets back what it has set
                await self._turn_back()
            raise
        await self._turn_back()

    async def _turn_back(self) -> None:
        await self.conn.execute(SQL_SET_PATH, self._path, "off")

    async def check(self) -> None:
        """`StorageCorrupt` unless plain names are tables aside: to be asked before writing to them."""
        if not await self.conn.fetchval(SQL_IS_ASIDE):
            raise StorageCorrupt("a session has lost its tables aside")

    async def count(self) -> None:
        """Let Postgres know how large the tables aside are."""
        await self.conn.execute(SQL_COUNTED)

    async def empty(self) -> None:
        """Forget what is in the tables."""
        await self.conn.execute(SQL_EMPTY)

    async def copy_foreign(self, event_ids: Iterable[str]) -> None:
        """Events of other rooms, which the planner has to see to refuse them."""
        ids = list(event_ids)
        async with self.live() as conn:
            await conn.execute(SQL_FOREIGN_EVENTS, ids)
            await conn.execute(SQL_FOREIGN_ROOMS, ids)
