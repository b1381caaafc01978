"""`readmit`: lift the verdict of the caller on a refused event.

An event that is not refused needs no write, and so nothing would notice that a cached row is out of
date. So its row is read first: only a refused event goes to the writer.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Database
from storage.errors import InputError, UnknownEvent
from storage.ids import EventId, RoomId
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
