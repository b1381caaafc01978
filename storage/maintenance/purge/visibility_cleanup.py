"""Delete rows of `visibility` whose principals are in no audience that is still in use.

An audience is in use if an event has it, or a state group, which gives it to the events sent under
it. A new audience gets a number next to one in use, or a larger one. By default it is visible to
the principals of the audience that it derives from. So some principals are as if they never had a
row: those in no audience in use, not in the room now, with a last join before all remaining events.
Rows are looked up without a lock, and deleted if they are unchanged then.

The row of a server that was joined stays: a server without a row gets less of the remaining events
(server_gets in the schema).
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.placeholders import fill
from storage.maintenance.purge.history import PurgeContext
from storage.maintenance.purge.job import PurgeJob
from storage.persist.room_lock import lock_room_keeping_plans

PAGE: Final = 1_000

SQL_BLIND: Final[LiteralString] = fill("""
WITH
used AS (
    SELECT range_agg(int8range(u.audience, u.audience + 1)) AS audiences
    FROM (
        SELECT audience FROM events WHERE room_nid = $1::int AND NOT outlier
        UNION
        SELECT audience FROM state_groups WHERE room_nid = $1::int
        UNION
        SELECT current_audience FROM rooms WHERE room_nid = $1::int
    ) AS u
),
lowest AS (
    SELECT topological_ordering
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
    ORDER BY topological_ordering, stream_ordering
    LIMIT 1
)
SELECT v.principal_nid, v.audiences::text AS audiences, v.last_join_topological
FROM whole_visibility v
CROSS JOIN LATERAL (
    SELECT name FROM principals WHERE principal_nid = v.principal_nid OFFSET 0
) AS p
WHERE v.room_nid = $1::int AND (p.name LIKE '@%' OR v.audiences = v.invited_audiences)
    AND v.principal_nid > {PRINCIPAL_SHARED} AND v.joined_count = 0 AND v.invited_count = 0
    AND NOT v.audiences && COALESCE((SELECT audiences FROM used), '{}')
    AND (v.last_join_topological IS NULL
        OR v.last_join_topological < (SELECT topological_ordering FROM lowest))
ORDER BY v.principal_nid
""")

SQL_FORGET: Final[LiteralString] = """
WITH gone AS (
    DELETE FROM visibility v
    USING unnest($2::int[], $3::text[], $4::bigint[]) AS b (principal_nid, audiences,
        last_join_topological)
    JOIN whole_visibility w ON w.room_nid = $1::int AND w.principal_nid = b.principal_nid
    WHERE v.room_nid = $1::int AND v.principal_nid = b.principal_nid
        AND w.audiences = b.audiences::int8multirange
        AND v.last_join_topological IS NOT DISTINCT FROM b.last_join_topological
            AND v.joined_count = 0 AND v.invited_count = 0
    RETURNING v.principal_nid
)
DELETE FROM past_visibility p
USING gone
WHERE p.room_nid = $1::int AND p.principal_nid = gone.principal_nid
"""


class UnusedVisibilityRow(NamedTuple):
    """A principal that may see no remaining event, with its audiences and its last join."""

    principal_nid: int
    audiences: str
    last_join_topological: int | None


async def remove_unused_visibility(context: PurgeContext, job: PurgeJob) -> None:
    """Delete these rows in batches."""
    async with context.database.connection() as conn:
        blind = await conn.fetch(SQL_BLIND, job.room_nid, row=UnusedVisibilityRow)
    for start in range(0, len(blind), PAGE):
        await _forget(context, job, blind[start : start + PAGE])


async def _forget(
    context: PurgeContext, job: PurgeJob, page: Sequence[UnusedVisibilityRow]
) -> None:
    columns = [list(column) for column in zip(*page, strict=True)]

    async def work(conn: Connection) -> None:
        await lock_room_keeping_plans(conn, job.room_id)
        context.pace.locked()
        await conn.execute(SQL_FORGET, job.room_nid, *columns)

    with context.pace.measured():
        await context.database.run(work)
    await context.pace.rest(job)
