"""Single events, by id.

`StoredEvent` is what every read answers with: the row's facts, the received bytes, and a dict to serve, which is pruned
where a redaction took effect or where only the redacted form was ever valid.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.event import load as load_event
from storage.event import redact
from storage.ids import EventId, RoomId, UserId

SQL_EVENTS: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, e.stream_ordering, e.topological_ordering, e.depth,
    b.event_id AS redacted_by, e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding, e.json
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN events b ON b.event_nid = e.redacted_by
WHERE e.event_id = ANY($1::text[])
"""


class StoredRow(NamedTuple):
    """One event as every query selects it: these columns, in this order."""

    event_nid: int
    event_id: str
    room_id: str
    room_version: str
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool
    outlier: bool
    redacted_form: bool
    encoding: int
    json: bytes


@dataclass(frozen=True)
class StoredEvent:
    """An event of the store. ``raw`` are the received bytes; ``json`` is to be served (api.md, "Reading one thing")."""

    event_id: EventId
    room_id: RoomId
    type: str
    sender: UserId
    state_key: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int
    raw: bytes
    redacted_by: EventId | None
    rejected: str | None
    soft_failed: bool
    outlier: bool
    json: dict[str, Any]
    room_version: str

    def __repr__(self) -> str:
        key = "" if self.state_key is None else f" state_key={self.state_key!r}"
        return f"<StoredEvent {self.event_id} {self.type}{key} sender={self.sender} at {self.topological_ordering}/{self.stream_ordering}>"

    @cached_property
    def content(self) -> dict[str, Any]:
        """The content to be served."""
        content = self.json.get("content")
        return content if isinstance(content, dict) else {}


def stored(row: StoredRow, *, redacted: bool = True) -> StoredEvent:
    """The event of a row. ``redacted`` False shows the content also where a redaction took effect."""
    event = load_event(row.json, row.room_version, row.event_id, redacted=row.redacted_form)
    json = event.json
    if redacted and row.redacted_by is not None:
        json = redact(json, row.room_version)
    return StoredEvent(
        event_id=event.event_id,
        room_id=event.room_id,
        type=event.type,
        sender=event.sender,
        state_key=event.state_key,
        stream_ordering=row.stream_ordering,
        topological_ordering=row.topological_ordering,
        depth=event.depth,
        raw=row.json,
        redacted_by=None if row.redacted_by is None else EventId(row.redacted_by),
        rejected=row.rejected,
        soft_failed=row.soft_failed,
        outlier=row.outlier,
        json=json,
        room_version=row.room_version,
    )


async def events(conn: Connection, event_ids: Iterable[EventId], *, redacted: bool = True) -> dict[EventId, StoredEvent]:
    """The events that are held, by id."""
    rows = await conn.fetch(SQL_EVENTS, list(event_ids), row=StoredRow)
    return {EventId(row.event_id): stored(row, redacted=redacted) for row in rows}
