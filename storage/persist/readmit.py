"""`readmit`: lift the verdict of the caller on a refused event.

An event that is not refused needs no write, and so nothing would notice that a cached row is out of
date. So its row is read first: only a refused event goes to the writer.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import InputError, UnknownEvent
from storage.ids import EventId, RoomId, UserId
from storage.persist.commit.group_commit import Writer
from storage.persist.model.incoming import Readmission
from storage.persist.model.results import AppendResult

SQL_EVENT_TO_READMIT: Final[LiteralString] = """
SELECT r.room_id, e.refused IS NOT NULL AS is_refused, e.outlier, e.rejected, e.soft_failed,
    e.stream_ordering, e.topological_ordering
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_id = $1::text
"""


class EventToReadmitRow(NamedTuple):
    """An event, and whether the caller, the rules or nobody refuses it."""

    room_id: str
    is_refused: bool
    outlier: bool
    rejected: str | None
    soft_failed: bool
    stream_ordering: int | None
    topological_ordering: int | None


async def readmit(database: Database, writer: Writer, event_id: EventId) -> AppendResult:
    """Accept a refused event, at a new stream position.

    The result is a "duplicate" for an event that is accepted already. Raise `UnknownEvent`, or
    `InputError` for an event that the caller did not refuse.
    """
    async with database.connection() as conn:
        row = await conn.fetchrow(SQL_EVENT_TO_READMIT, event_id, row=EventToReadmitRow)
    if row is None:
        raise UnknownEvent(event_id)
    if not row.is_refused:
        return _not_refused(event_id, row)
    [result] = await writer.append([Readmission(event_id, RoomId(row.room_id))])
    if result.outcome == "missing_parents":  # purged meanwhile
        raise UnknownEvent(event_id)
    return result


def _not_refused(event_id: EventId, row: EventToReadmitRow) -> AppendResult:
    if not (row.outlier or row.rejected is not None or row.soft_failed):
        return AppendResult(
            event_id, "duplicate", None, row.stream_ordering, row.topological_ordering
        )
    flag = (
        f"is rejected ({row.rejected})"
        if row.rejected is not None
        else "is an outlier"
        if row.outlier
        else "is soft-failed by the current state"
    )
    raise InputError(f"{event_id} {flag}: the caller did not refuse it")


# --------------------------------------------------------------------------------------------------
# Erase users who asked for it, and undo that.
#
# Their events stay as they are, with signatures. Reads return the redacted form to others. Facts
# that the homeserver has published under their id, such as their presence, lose their values for
# good.

SQL_ERASE: Final[LiteralString] = """
WITH named AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), $1::text
    WHERE NOT EXISTS (SELECT FROM principals WHERE name = $1::text)
    ON CONFLICT (name) DO NOTHING
    RETURNING principal_nid
),
emptied AS (
    UPDATE published_facts
    SET value = 'null'
    WHERE key = $1::text AND value <> 'null'
)
INSERT INTO erased_users (principal_nid, erased_ts)
SELECT principal_nid, $2::bigint FROM named
UNION ALL
SELECT principal_nid, $2::bigint FROM principals WHERE name = $1::text
ON CONFLICT (principal_nid) DO NOTHING
"""

SQL_RESTORE: Final[LiteralString] = """
DELETE FROM erased_users
WHERE principal_nid = (SELECT principal_nid FROM principals WHERE name = $1::text)
"""

SQL_IS_NAMED: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM principals WHERE name = $1::text)
"""


async def is_named(conn: Connection, user_id: UserId) -> bool:
    """Return whether any stored row names the user. If not, the id may be mistyped."""
    exists: bool = await conn.fetchval(SQL_IS_NAMED, user_id)
    return exists


async def erase_user(conn: Connection, user_id: UserId, erased_ts: int) -> bool:
    """Erase a user, and return whether that is new.

    From now on the user's events are returned in full only to users who were in the room then, and
    their servers. State events are still returned in full as part of a state, because they belong
    to the room. The values of facts under the user's id become null: readers still see that there
    was news.
    """
    return await conn.execute(SQL_ERASE, user_id, erased_ts) != "INSERT 0 0"


async def restore_user(conn: Connection, user_id: UserId) -> bool:
    """Undo the erasure of a user, but for emptied facts, and return whether there was one."""
    return await conn.execute(SQL_RESTORE, user_id) != "DELETE 0"
