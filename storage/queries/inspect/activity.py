"""The statements that run in this database now, the longest first.

Postgres shows the text of another role's statements only to a member of pg_read_all_stats.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

SQL_RUNNING: Final[LiteralString] = """
SELECT a.pid, a.application_name, COALESCE(a.state, '') AS state,
    (extract(epoch FROM clock_timestamp() - COALESCE(a.query_start, a.backend_start))
        * 1000)::bigint AS running_ms,
    COALESCE(a.wait_event_type || ': ' || a.wait_event, '') AS waits_for,
    COALESCE(left(a.query, 2000), '') AS query
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.backend_type = 'client backend'
    AND a.pid <> pg_backend_pid() AND a.state <> 'idle'
ORDER BY a.query_start
LIMIT $1::bigint
"""


class RunningRow(NamedTuple):
    """A session that runs a statement, or has a transaction open."""

    pid: int
    application_name: str
    state: str
    running_ms: int
    waits_for: str
    query: str


async def running(conn: Connection, limit: int = 20) -> list[RunningRow]:
    """Return the sessions that are not idle, the longest statement first."""
    return await conn.fetch(SQL_RUNNING, limit, row=RunningRow)
