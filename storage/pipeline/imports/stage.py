"""Stage the received bytes of an import in the table `import_events`, by COPY.

They have the form of `events.json`: the executors encode them, and a load copies them.

Each import, and each write of a data frame, has a number, and touches only rows of that number. One
import runs at a time. Its driver holds a lock for its lifetime, and removes its rows at the end,
also on failure. Three kinds of advisory lock coordinate the sessions; all but the first include the
number:

  * IMPORT: held by the driver of an import. Another import is refused meanwhile.
  * ALIVE: held by the driver of this import. A task that finds it free is left over, and stages
    nothing.
  * WORK: shared by the transactions of tasks. Rows are removed when no task works on them.

A killed driver leaves rows. The next import removes rows of numbers that are not in use.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.arrow_results import ArrowConnection, arrow_session
from storage.database.connection import Connection
from storage.database.placeholders import fill
from storage.errors import DatabaseConflict, DatabaseError
from storage.rebuild.planner import BYTES_DELETED

SQL_LOCK_IMPORT: Final[LiteralString] = fill("""
SELECT pg_try_advisory_lock({LOCK_IMPORT}) AS is_free
""")

SQL_IMPORT_NUMBER: Final[LiteralString] = """
SELECT nextval('import_numbers')::int AS number
"""

SQL_LIVE: Final[LiteralString] = fill("""
SELECT pg_advisory_lock({LOCK_IMPORT_ALIVE}, $1::int)::text AS alive
""")

SQL_DIE: Final[LiteralString] = fill("""
SELECT pg_advisory_unlock({LOCK_IMPORT_ALIVE}, $1::int) AS is_dead
""")

SQL_IS_DEAD: Final[LiteralString] = fill("""
SELECT pg_try_advisory_xact_lock_shared({LOCK_IMPORT_ALIVE}, $1::int) AS is_dead
""")

SQL_WORK: Final[LiteralString] = fill("""
SELECT pg_advisory_xact_lock_shared({LOCK_IMPORT_WORK}, $1::int)::text AS is_held
""")

SQL_HOLD: Final[LiteralString] = fill("""
SELECT pg_advisory_lock_shared({LOCK_IMPORT_WORK}, $1::int)::text AS is_held
""")

SQL_WAIT_FOR_WORK: Final[LiteralString] = fill("""
SELECT pg_advisory_xact_lock({LOCK_IMPORT_WORK}, $1::int)::text AS is_over
""")

SQL_PATIENCE: Final[LiteralString] = """
SET LOCAL lock_timeout = '30s'
"""

SQL_NUMBERS: Final[LiteralString] = """
WITH RECURSIVE found AS (
    (SELECT import_number FROM import_events ORDER BY import_number LIMIT 1)
    UNION ALL
    SELECT (SELECT e.import_number FROM import_events e WHERE e.import_number > f.import_number
        ORDER BY e.import_number LIMIT 1)
    FROM found f
    WHERE f.import_number IS NOT NULL
)
SELECT import_number AS number FROM found WHERE import_number IS NOT NULL
"""

SQL_IS_LEFT: Final[LiteralString] = fill("""
SELECT pg_try_advisory_xact_lock({LOCK_IMPORT_WORK}, $1::int) AS is_left
""")

SQL_LOCK_TABLE: Final[LiteralString] = """
LOCK TABLE import_events IN ACCESS EXCLUSIVE MODE NOWAIT
"""

SQL_BOUNDS: Final[LiteralString] = """
SELECT min(import_number) AS first, max(import_number) AS last
FROM import_events
"""

SQL_EMPTY: Final[LiteralString] = """
TRUNCATE import_events
"""

SQL_REMOVE: Final[LiteralString] = """
WITH removed AS (DELETE FROM import_events WHERE import_number = $1::int RETURNING 1)
SELECT count(*) AS rows FROM removed
"""

SQL_LOCK_RANGE: Final[LiteralString] = fill("""
SELECT pg_advisory_xact_lock(
    hashint8extended($2::bigint, {LOCK_IMPORT_RANGE}::bigint << 31 | $1::int)
)
""")

SQL_FORGET_RANGE: Final[LiteralString] = """
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


class StagedRow(NamedTuple):
    """The bytes at a place."""

    json: StoredBytes


class StagedEvent(NamedTuple):
    """An event, and the place where its bytes are staged."""

    place: int
    event_id: str
    room_id: str


@contextmanager
def staging(dsn: str) -> Iterator[int]:
    """Yield the number of a new import, and remove its rows at the end.

    Raise `DatabaseConflict` while another import runs.
    """
    with arrow_session(dsn) as conn:
        if not conn.rows(SQL_LOCK_IMPORT)[0]["is_free"]:
            raise DatabaseConflict(
                "another import on Spark is running on this database: wait for its end"
            )
        for left in conn.rows(SQL_NUMBERS):
            _remove_left(conn, left["number"])
        number = new_number(conn)
        conn.rows(SQL_LIVE, number)
        try:
            yield number
        except BaseException as error:
            _end_failed(conn, number, error)
            raise
        _end(conn, number)


def new_number(conn: ArrowConnection) -> int:
    """Return a number that no other import or write has."""
    number: int = conn.rows(SQL_IMPORT_NUMBER)[0]["number"]
    return number


def remove(conn: ArrowConnection, number: int) -> None:
    """Remove the rows of a number; truncate the table if it has no others and is not in use."""
    if not _emptied(conn, number):
        conn.rows(SQL_REMOVE, number)


def _end(conn: ArrowConnection, number: int) -> None:
    """Keep tasks of this import from staging more, wait for running ones, and remove all rows."""
    conn.rows(SQL_DIE, number)
    with transaction(conn):
        conn.execute(SQL_PATIENCE)
        # A task that is killed only now leaves its rows to the next import.
        with suppress(DatabaseConflict):
            conn.rows(SQL_WAIT_FOR_WORK, number)
    remove(conn, number)


def _end_failed(conn: ArrowConnection, number: int, error: BaseException) -> None:
    try:
        _end(conn, number)
    except DatabaseError as lost:
        error.add_note(
            f"The staged bytes of import {number} are left in the database ({lost}):"
            " the next import removes them."
        )


def _remove_left(conn: ArrowConnection, number: int) -> None:
    """Remove the rows of an earlier, killed import, unless its tasks still work on them."""
    with transaction(conn):
        if conn.rows(SQL_IS_LEFT, number)[0]["is_left"]:
            conn.rows(SQL_REMOVE, number)


def _emptied(conn: ArrowConnection, number: int) -> bool:
    with suppress(DatabaseConflict), transaction(conn):  # the table is in use
        conn.execute(SQL_LOCK_TABLE)
        [bounds] = conn.rows(SQL_BOUNDS)
        if {bounds["first"], bounds["last"]} <= {None, number}:
            conn.execute(SQL_EMPTY)
            return True
    return False


@contextmanager
def transaction(conn: ArrowConnection) -> Iterator[None]:
    """Run a block in a transaction of an `arrow_session`."""
    conn.execute("BEGIN")
    try:
        yield
    except BaseException:
        conn.execute("ROLLBACK")
        raise
    conn.execute("COMMIT")


def hold(conn: ArrowConnection, number: int) -> None:
    """Lock the rows of a number until the session ends."""
    conn.rows(SQL_HOLD, number)


async def work(conn: Connection, number: int) -> None:
    """Lock the rows of a number until the transaction ends."""
    await conn.execute(SQL_WORK, number)


async def work_for_import(conn: Connection, number: int) -> None:
    """Do the same for a task of an import. Raise `DatabaseConflict` if the import has ended."""
    await work(conn, number)
    if await conn.fetchval(SQL_IS_DEAD, number):
        raise _ended_import(number)


@contextmanager
def working(conn: ArrowConnection, number: int) -> Iterator[None]:
    """Run a block in a transaction that locks the rows of a number.

    Raise `DatabaseConflict` if the import has ended.
    """
    with transaction(conn):
        conn.rows(SQL_WORK, number)
        if conn.rows(SQL_IS_DEAD, number)[0]["is_dead"]:
            raise _ended_import(number)
        yield


def _ended_import(number: int) -> DatabaseConflict:
    return DatabaseConflict(
        f"import {number} has ended, or its driver has lost its session: this task was left over"
    )


async def forget(conn: Connection, number: int, first: int, end: int) -> None:
    """Delete the rows that another attempt has staged at these places.

    Of two attempts that run at once, the second waits for the first: it stages the same bytes, in
    the same transaction in which it deletes them.
    """
    await conn.execute(SQL_LOCK_RANGE, number, first)
    await conn.execute(SQL_FORGET_RANGE, number, first, end)


async def put(conn: Connection, number: int, rows: Iterable[tuple[int, object]]) -> None:
    """Stage the stored bytes of events, and bundles, by their places."""
    await conn.copy_in("import_events", COLUMNS, ((place, number, data) for place, data in rows))


async def staged(conn: Connection, number: int, events: Sequence[StagedEvent]) -> list[bytes]:
    """Return the bytes of these events.

    Raise `DatabaseConflict` if some are gone: the database has crashed meanwhile.
    """
    places = [event.place for event in events]
    rows = await conn.fetch(SQL_STAGED, number, places, row=StagedRow)
    if len(rows) != len(places):
        raise DatabaseConflict(BYTES_DELETED)
    return [
        decode(row.json, event.event_id, event.room_id)
        for row, event in zip(rows, events, strict=True)
    ]
