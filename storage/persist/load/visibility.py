"""Load audiences, and the principals that belong to them."""

from collections.abc import Collection
from typing import Final, LiteralString, NamedTuple

from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import UNSEEN, AudienceRow, PastRow, VisibilityRow
from storage.visibility import multirange

SQL_VISIBILITY: Final[LiteralString] = """
SELECT v.room_nid, v.principal_nid, v.audiences::text AS audiences, v.last_join_topological,
    v.joined_count, v.invited_count,
    COALESCE(v.invited_audiences, '{}')::text AS invited_audiences, v.first_audience
FROM unnest($1::int[], $2::int[]) AS wanted (room_nid, principal_nid)
CROSS JOIN LATERAL (
    SELECT * FROM visibility
    WHERE room_nid = wanted.room_nid AND principal_nid = wanted.principal_nid
    OFFSET 0
) AS v
"""

SQL_PAST: Final[LiteralString] = """
SELECT wanted.room_nid, wanted.principal_nid, p.first_audience, COALESCE((
        SELECT min(o.first_audience)
        FROM past_visibility o
        WHERE o.room_nid = wanted.room_nid AND o.principal_nid = wanted.principal_nid
            AND o.first_audience > p.first_audience
    ), v.first_audience) AS end_audience, p.audiences::text AS audiences,
        COALESCE(p.invited_audiences, '{}')::text AS invited_audiences
FROM unnest($1::int[], $2::int[], $3::bigint[]) AS wanted (room_nid, principal_nid, audience)
CROSS JOIN LATERAL (
    SELECT *
    FROM past_visibility o
    WHERE o.room_nid = wanted.room_nid AND o.principal_nid = wanted.principal_nid
        AND o.first_audience <= wanted.audience
    ORDER BY o.first_audience DESC
    LIMIT 1
) AS p
CROSS JOIN LATERAL (
    SELECT first_audience
    FROM visibility
    WHERE room_nid = wanted.room_nid AND principal_nid = wanted.principal_nid
    OFFSET 0
) AS v
"""

SQL_AUDIENCES: Final[LiteralString] = """
SELECT a.room_nid, a.audience, a.branches, a.continued, a.opened_topological
FROM unnest($1::int[], $2::bigint[]) AS wanted (room_nid, audience)
CROSS JOIN LATERAL (
    SELECT * FROM audiences
    WHERE room_nid = wanted.room_nid AND audience = wanted.audience
    OFFSET 0
) AS a
"""


class LoadedVisibilityRow(NamedTuple):
    """A row of `visibility`."""

    room_nid: int
    principal_nid: int
    audiences: str
    last_join_topological: int | None
    joined_count: int
    invited_count: int
    invited_audiences: str
    first_audience: int | None


class LoadedPastRow(NamedTuple):
    """A row of `past_visibility`, and where the next one begins."""

    room_nid: int
    principal_nid: int
    first_audience: int
    end_audience: int
    audiences: str
    invited_audiences: str


class AudienceNumberRow(NamedTuple):
    """A row of `audiences`."""

    room_nid: int
    audience: int
    branches: int
    continued: bool | None
    opened_topological: int | None


async def load_visibility(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int]]
) -> None:
    for key in keys:
        change_set.visibility.current.setdefault(key, UNSEEN)
    for row in await conn.fetch(
        SQL_VISIBILITY, [key[0] for key in keys], [key[1] for key in keys], row=LoadedVisibilityRow
    ):
        if (row.room_nid, row.principal_nid) not in change_set.visibility.new_visibility:
            change_set.visibility.current[row.room_nid, row.principal_nid] = VisibilityRow(
                multirange.from_text(row.audiences),
                row.last_join_topological,
                row.joined_count,
                row.invited_count,
                multirange.from_text(row.invited_audiences),
                row.first_audience,
            )


async def load_past(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int, int]]
) -> None:
    """Load rows of old audiences.

    Without a row the principal is in none of them: a purge has deleted the row.
    """
    for row in await conn.fetch(SQL_PAST, *transposed(keys, 3), row=LoadedPastRow):
        seen = multirange.from_text(row.audiences), multirange.from_text(row.invited_audiences)
        _keep_past(change_set, row[:2], PastRow(row.first_audience, row.end_audience, *seen))
    for room_nid, principal_nid, _ in keys:
        if not change_set.visibility.past.get((room_nid, principal_nid)):
            end = change_set.visibility.visible(room_nid, principal_nid).first_audience or 0
            _keep_past(
                change_set,
                (room_nid, principal_nid),
                PastRow(0, end, multirange.EMPTY, multirange.EMPTY),
            )


def _keep_past(change_set: ChangeSet, key: tuple[int, int], row: PastRow) -> None:
    """Keep a row of the table, unless the change set has a newer one."""
    change_set.visibility.past.setdefault(key, {}).setdefault(row.first_audience, row)


async def load_audiences(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int]]
) -> None:
    for row in await conn.fetch(
        SQL_AUDIENCES, [key[0] for key in keys], [key[1] for key in keys], row=AudienceNumberRow
    ):
        if (row.room_nid, row.audience) not in change_set.visibility.new_audiences:
            change_set.visibility.audiences[row.room_nid, row.audience] = AudienceRow(
                row.branches, bool(row.continued), row.opened_topological
            )
