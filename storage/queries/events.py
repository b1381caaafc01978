"""Single events, by id.

`StoredEvent` is what every read answers with: the row's facts, the received bytes, and a dict to serve, which is pruned
where a redaction took effect or where only the redacted form was ever valid.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, make_dataclass
from functools import cached_property
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.event import redact
from storage.event.hashes import canonical
from storage.event.reading import read_trusted
from storage.event.versions import version_of
from storage.ids import EventId, RoomId, UserId

SQL_EVENTS: Final[LiteralString] = """
SELECT *
FROM stored_events
WHERE event_id = ANY($1::text[])
"""


class StoredRow(NamedTuple):
    """One event as every query selects it: the columns of the view `stored_events`."""

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
    withheld: bool = False
    """Whoever asked may have its redacted form only, and neither ``json`` nor ``raw`` has more."""
    relations: "Aggregations | None" = None
    """What is told together with it, where a read was asked for aggregations. None: nothing, or not asked for."""

    def __repr__(self) -> str:
        key = "" if self.state_key is None else f" state_key={self.state_key!r}"
        return f"<StoredEvent {self.event_id} {self.type}{key} sender={self.sender} at {self.topological_ordering}/{self.stream_ordering}>"

    @cached_property
    def content(self) -> dict[str, Any]:
        """The content to be served."""
        content = self.json.get("content")
        return content if isinstance(content, dict) else {}


@dataclass(frozen=True, slots=True)
class ThreadSummary:
    """A thread: its last event in topological order, how many there are, and whether who asked wrote the root or one of them."""

    latest_event: StoredEvent
    count: int
    participated: bool


@dataclass(frozen=True, slots=True)
class Aggregations:
    """What is told of an event together with it (client-server API, "Aggregations of child events"): m.replace, m.thread, m.reference."""

    replacement: StoredEvent | None = None
    thread: ThreadSummary | None = None
    references: tuple[EventId, ...] = ()

    def bundle(self, show: Callable[[StoredEvent], Any]) -> dict[str, Any]:
        """The ``m.relations`` of the event's ``unsigned``; ``show`` formats an event as clients get it, with its own `relations`."""
        bundle: dict[str, Any] = {}
        if self.replacement is not None:
            bundle["m.replace"] = show(self.replacement)
        if self.thread is not None:
            thread = self.thread
            summary = {"latest_event": show(thread.latest_event), "count": thread.count, "current_user_participated": thread.participated}
            bundle["m.thread"] = summary
        if self.references:
            bundle["m.reference"] = {"chunk": [{"event_id": event_id} for event_id in self.references]}
        return bundle


# As `storage.event.model` makes its events: a frozen dataclass sets its fields one by one, an unfrozen twin in a quarter of the time.
_Draft: Final[Any] = make_dataclass("_Draft", [field.name for field in fields(StoredEvent)], eq=False)


def stored(row: StoredRow, *, redacted: bool = True, withheld: bool = False) -> StoredEvent:
    """The event of a row. ``redacted`` False shows the content also where a redaction took effect; ``withheld`` shows it nowhere.

    Reads of thousands of events spend most of their time here: nothing is looked at that is not answered.
    """
    json = read_trusted(row.json, strict=version_of(row.room_version).strict_canonical_json)
    if withheld or row.redacted_form or (redacted and row.redacted_by is not None):
        json = redact(json, row.room_version)
    event = _Draft(
        row.event_id,
        row.room_id,
        json["type"],
        json["sender"],
        json.get("state_key"),
        row.stream_ordering,
        row.topological_ordering,
        json["depth"],
        canonical(json) if withheld else row.json,
        row.redacted_by,
        row.rejected,
        row.soft_failed,
        row.outlier,
        json,
        row.room_version,
        withheld,
        None,
    )
    event.__class__ = StoredEvent
    made: StoredEvent = event
    return made


def stored_of(columns: Sequence[Any], *, withheld: bool = False) -> StoredEvent:
    """The event of columns in the order of `StoredRow`, for queries that select others besides."""
    return stored(StoredRow._make(columns), withheld=withheld)


async def events(conn: Connection, event_ids: Iterable[EventId], *, redacted: bool = True) -> dict[EventId, StoredEvent]:
    """The events that are held, by id."""
    rows = await conn.fetch(SQL_EVENTS, list(event_ids), row=StoredRow)
    return {EventId(row.event_id): stored(row, redacted=redacted) for row in rows}
