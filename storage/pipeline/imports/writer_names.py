"""Names of writers for the tasks of a load, registered before the first of them writes.

A process that enters under a new name waits for running writes, and a large room is one write of
many seconds. A task that begins beside it would wait, and keep others waiting. Under a name that is
known, it enters at once (`storage.streams.startup`).
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, LiteralString

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_session
from storage.database.migrate import HEAD_REVISION
from storage.errors import DatabaseConflict
from storage.pipeline.imports.stage import transaction
from storage.streams.positions_lock import SQL_LOCK
from storage.streams.registry import STREAMS

SQL_UNKNOWN: Final[LiteralString] = """
SELECT name
FROM unnest($1::text[]) AS name
WHERE NOT EXISTS (SELECT FROM writers WHERE instance_name = name)
    OR EXISTS (
        SELECT FROM unnest($2::text[]) AS stream
        WHERE NOT EXISTS (
            SELECT FROM stream_positions WHERE stream_name = stream AND instance_name = name
        )
    )
"""

SQL_PATIENCE: Final[LiteralString] = """
SET LOCAL lock_timeout = '1s'
"""

SQL_WRITERS: Final[LiteralString] = """
WITH named AS (
    INSERT INTO writers (instance_name, schema_revision)
    SELECT name, $2::text
    FROM unnest($1::text[]) AS name
    WHERE name NOT IN (SELECT instance_name FROM writers)
    ON CONFLICT (instance_name) DO NOTHING
    RETURNING 1
)
SELECT count(*) AS writers FROM named
"""

SQL_POSITIONS: Final[LiteralString] = """
WITH sequence AS (
    SELECT stream_name, COALESCE(pg_sequence_last_value(name::regclass), 1) AS last
    FROM unnest($2::text[], $3::text[]) AS s (stream_name, name)
),
entered AS (
    INSERT INTO stream_positions (stream_name, instance_name, stream_id, entered_at)
    SELECT s.stream_name, name, s.last, s.last
    FROM unnest($1::text[]) AS name
    CROSS JOIN sequence s
    ON CONFLICT (stream_name, instance_name) DO NOTHING
    RETURNING 1
)
SELECT count(*) AS positions FROM entered
"""


def register_names(dsn: str, names: Sequence[str], *, config: Config) -> None:
    """Register writers that are not known, if no write runs for longer than a second.

    Otherwise a task does so itself, when it can. Raise `DatabaseError`.
    """
    with arrow_session(dsn, config=config) as conn:
        unknown = [row["name"] for row in conn.rows(SQL_UNKNOWN, list(names), list(STREAMS))]
        if unknown:  # else there is no reason to lock the table
            with suppress(DatabaseConflict), transaction(conn):
                _register(conn, unknown)


def _register(conn: ArrowConnection, names: list[str]) -> None:
    conn.execute(SQL_PATIENCE)
    conn.execute(SQL_LOCK)
    conn.rows(SQL_WRITERS, names, HEAD_REVISION)
    sequences = [one.sequence for one in STREAMS.values()]
    conn.rows(SQL_POSITIONS, names, list(STREAMS), sequences)
