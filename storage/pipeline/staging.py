"""What an import puts aside in the database until its rooms are stored: the received bytes, by COPY, in the table `import_events`.

One import at a time: its driver holds a lock as long as it lives, and empties the table at its beginning and end.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, LiteralString

from storage.database.arrow import arrow_session
from storage.database.connection import Connection
from storage.errors import DatabaseConflict

SQL_LOCK_IMPORT: Final[LiteralString] = """
SELECT pg_try_advisory_lock(1919905646) AS is_free
"""

SQL_EMPTY: Final[LiteralString] = """
TRUNCATE import_events
"""

SQL_IMPORT_NUMBER: Final[LiteralString] = """
SELECT nextval('import_numbers') AS number
"""

SQL_FORGET_STRETCH: Final[LiteralString] = """
DELETE FROM import_events
WHERE import_number = $1::int AND place >= $2::bigint AND place < $3::bigint
"""

SQL_STAGED: Final[LiteralString] = """
SELECT e.json
FROM unnest($2::bigint[]) WITH ORDINALITY AS wanted (place, ordinal)
CROSS JOIN LATERAL (
    SELECT json FROM import_events WHERE import_number = $1::int AND place = wanted.place OFFSET 0
) AS e
ORDER BY wanted.ordinal
"""

COLUMNS: Final = ("place", "import_number", "json")


@contextmanager
def staging(dsn: str) -> Iterator[int]:
    """The number of a new import, which has the table for itself. `DatabaseConflict` while another import is at work."""
    with arrow_session(dsn) as conn:
        if not conn.rows(SQL_LOCK_IMPORT)[0]["is_free"]:
            raise DatabaseConflict("another import on Spark is at work on this database: wait for its end")
        conn.execute(SQL_EMPTY)
        number: int = conn.rows(SQL_IMPORT_NUMBER)[0]["number"]
        yield number
        conn.execute(SQL_EMPTY)


async def forget(conn: Connection, number: int, first: int, end: int) -> None:
    """What an earlier attempt at these places has left."""
    await conn.execute(SQL_FORGET_STRETCH, number, first, end)


async def put(conn: Connection, number: int, rows: Iterable[tuple[int, bytes]]) -> None:
    """The bytes of lines, by their places."""
    await conn.copy_in("import_events", COLUMNS, ((place, number, raw) for place, raw in rows))


async def staged(conn: Connection, number: int, places: Sequence[int]) -> list[bytes]:
    """The bytes at these places. `DatabaseConflict` where some are gone: the database has crashed meanwhile."""
    found: list[bytes] = await conn.fetchvals(SQL_STAGED, number, list(places))
    if len(found) != len(places):
        raise DatabaseConflict("the bytes that an import had put aside are gone: the database has crashed; run the import again")
    return found
