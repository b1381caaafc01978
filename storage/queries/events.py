"""Single events, by id.

Every read returns `StoredEvent`: the columns of the row, the received bytes, and a dict to serve.
The dict is pruned if a redaction took effect, or if only the redacted form was ever valid. Bytes
are decoded when they are needed (`storage.codec`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from operator import attrgetter
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes, decode_recent, is_long, is_plain, plain
from storage.database.columns import USER_SEES, WHOLE
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import redact
from storage.event.hashes import canonical
from storage.event.reading import read_trusted
from storage.event.versions import version_of
from storage.ids import EventId, RoomId, ServerName, UserId
from storage.turns import Turns, parts

SQL_EVENTS: Final[LiteralString] = """
SELECT s.*,
    CASE WHEN s.soft_failed THEN (
        SELECT e.refused FROM events e WHERE e.event_nid = s.event_nid
    ) END AS refused
FROM unnest($1::text[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM stored_events WHERE event_id = wanted.id OFFSET 0) AS s
"""


EVENTS_MAX: Final = 5_000
"""Events of one statement: some milliseconds to encode their ids, and to read their rows."""


VALUES_MAX: Final = 100_000
"""Lists and objects in the long events of one response."""


class StoredEventRow(NamedTuple):
    """One event as every query selects it: the columns of the view `stored_events`."""

    event_nid: int
    event_id: EventId
    room_id: RoomId
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
    json: StoredBytes


TEMPLATE_EVENT: Final[LiteralString] = """
{event}.event_nid, {event}.event_id, {room}.room_id, {room}.room_version,
{event}.stream_ordering, {event}.topological_ordering,
claimed_depth({event}.depth, {event}.topological_ordering) AS depth,
CASE WHEN {event}.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
    WHERE b.event_nid = {event}.redacted_by) END AS redacted_by,
{event}.rejected, {event}.soft_failed, {event}.outlier, {event}.redacted_form, {event}.encoding,
{event}.json
"""
"""The columns of `StoredEventRow`, where the statement has read the event and its room already."""


class ReaderEventRow(NamedTuple):
    """One event for a user or a server. ``withheld``: they get the redacted form only."""

    withheld: bool
    event: StoredEventRow


class RoomEventRow(NamedTuple):
    """One event of a room whose id and version the statement returns beside it, or once."""

    event_id: EventId
    stream_ordering: int | None
    topological_ordering: int | None
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool
    outlier: bool
    redacted_form: bool
    json: StoredBytes


PART_ROOM_EVENT: Final[LiteralString] = """
e.event_id, e.stream_ordering, e.topological_ordering,
CASE WHEN e.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
    WHERE b.event_nid = e.redacted_by) END AS redacted_by,
e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.json
"""
"""The columns of `RoomEventRow` of the event `e`."""


class EventWithVerdictRow(NamedTuple):
    """One event as `StoredEventRow` has it, and the reason why the caller refused it."""

    event: StoredEventRow
    refused: str | None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event of the store.

    ``raw`` are the received bytes; serve ``json``.

    The first access to `json`, `content`, `type`, `sender`, `depth` or the `state_key` of a state
    event decodes and parses the bytes. So a state of thousands of members can be listed and
    compared without parsing.
    `StorageCorrupt` if the stored bytes are damaged, or no event any more.
    """

    event_id: EventId
    room_id: RoomId
    room_version: str
    stream_ordering: int | None
    topological_ordering: int | None
    _stored: StoredBytes = field(compare=False)
    """The stored bytes, or the bytes of ``raw`` after the first access to it."""
    redacted_by: EventId | None
    rejected: str | None
    soft_failed: bool
    outlier: bool
    pruned: bool = False
    """``json`` is the redacted form.

    A redaction took effect, or no other form was ever valid, or the event is ``withheld``.
    """
    withheld: bool = False
    """The reader gets the redacted form only: neither ``json`` nor ``raw`` has more."""
    relations: "Aggregations | None" = None
    """The aggregations. None: there are none, or the read did not request them."""
    _json: dict[str, Any] | None = field(default=None, compare=False)
    """``json``, after the first access."""
    refused: str | None = None
    """The reason why the caller refused the event. Only `Store.event` and `Store.events` read it.
    """

    def __repr__(self) -> str:
        try:
            key = "" if self.state_key is None else f" state_key={self.state_key!r}"
            text = f"{self.type}{key} sender={self.sender}"
        except StorageCorrupt:
            text = "unreadable"
        at = f"{self.topological_ordering}/{self.stream_ordering}"
        return f"<StoredEvent {self.event_id} {text} at {at}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredEvent):
            return NotImplemented
        return _compared(self) == _compared(other) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.event_id)

    def __getstate__(self) -> list[Any]:
        """Pickle the decoded bytes: another process may not have their dictionary."""
        return [plain(self.raw) if name == "_stored" else getattr(self, name) for name in _FIELDS]

    @property
    def raw(self) -> bytes:
        """Return the received bytes.

        In a read for another server, they are the canonical JSON of ``json`` where that is the
        redacted form.
        """
        raw = decode_recent(self._stored, self.event_id, self.room_id)
        if not is_plain(self._stored):
            object.__setattr__(self, "_stored", raw)
        return raw

    @property
    def json(self) -> dict[str, Any]:
        """Return the dict to serve: as received, or in the redacted form.

        Shared, not copied: treat it as immutable.
        """
        if self._json is None:
            object.__setattr__(
                self,
                "_json",
                event_json(
                    self.event_id,
                    decode_recent(self._stored, self.event_id, self.room_id),
                    self.room_version,
                    redacted=self.pruned and not self.withheld,
                ),
            )
        return self._json  # type: ignore[return-value]  # set in the line before

    @property
    def type(self) -> str:
        """Return the type."""
        return self.json["type"]  # type: ignore[no-any-return]  # `event_json` has checked

    @property
    def sender(self) -> UserId:
        """Return the sender."""
        return self.json["sender"]  # type: ignore[no-any-return]

    @property
    def state_key(self) -> str | None:
        """Return the state key. None: not a state event."""
        if self._json is None:
            raw = decode_recent(self._stored, self.event_id, self.room_id)
            if b"state_key" not in raw and b"\\u" not in raw:  # which may spell these letters
                return None
        return self.json.get("state_key")

    @property
    def depth(self) -> int:
        """Return the depth that the sender claims."""
        return self.json["depth"]  # type: ignore[no-any-return]

    @property
    def content(self) -> dict[str, Any]:
        """Return the content to serve."""
        content = self.json.get("content")
        return content if isinstance(content, dict) else {}


@dataclass(frozen=True, slots=True)
class ThreadSummary:
    """A thread: its last event in topological order, and the number of its events.

    ``participated``: the reader sent the root or one of these events.
    """

    latest_event: StoredEvent
    count: int
    participated: bool


@dataclass(frozen=True, slots=True)
class Aggregations:
    """The aggregations of an event: m.replace, m.thread, m.reference.

    Client-server API, "Aggregations of child events".
    """

    replacement: StoredEvent | None = None
    thread: ThreadSummary | None = None
    references: tuple[EventId, ...] = ()

    def bundle(self, show: Callable[[StoredEvent], Any]) -> dict[str, Any]:
        """Return the ``m.relations`` of the event's ``unsigned``.

        ``show`` formats an event for clients, with its own `relations`.
        """
        bundle: dict[str, Any] = {}
        if self.replacement is not None:
            bundle["m.replace"] = show(self.replacement)
        if self.thread is not None:
            thread = self.thread
            summary = {
                "latest_event": show(thread.latest_event),
                "count": thread.count,
                "current_user_participated": thread.participated,
            }
            bundle["m.thread"] = summary
        if self.references:
            bundle["m.reference"] = {
                "chunk": [{"event_id": event_id} for event_id in self.references]
            }
        return bundle


def size_of(event: StoredEvent) -> int:
    """Return the bytes of a long event, and 0 for another one (`storage.turns`)."""
    return len(event.raw) if is_long(event._stored) else 0  # noqa: SLF001


async def served_at_once(events: Sequence[StoredEvent]) -> int:
    """Return how many of the events, from the first one on, a response has: at least one.

    Together they have `VALUES_MAX` lists and objects. An event may have 30,000. Each is an object
    for the garbage collector, which stops everything while it visits them. Only long events count.
    """
    left, turns = VALUES_MAX, Turns()
    for number, event in enumerate(events):
        if not is_long(event._stored):  # noqa: SLF001
            continue
        try:
            raw = event.raw
        except StorageCorrupt:  # whoever serves the event gets the error
            continue
        left -= raw.count(b"[") + raw.count(b"{")
        if left < 0 and number > 0:
            return number
        await turns.took(len(raw))
    return len(events)


# As in `storage.event.model`: a frozen dataclass sets its fields one by one. An unfrozen twin
# takes a quarter of the time.
_FIELDS: Final = tuple(field.name for field in fields(StoredEvent))
_MutableEvent: Final[Any] = make_dataclass("_MutableEvent", _FIELDS, slots=True, eq=False)

_compared: Final = attrgetter(*(field.name for field in fields(StoredEvent) if field.compare))
"""The values of two equal events, but for their bytes."""


def stored_of(
    row: StoredEventRow,
    *,
    redacted: bool = True,
    withheld: bool = False,
    sent: bool = False,
    refused: str | None = None,
) -> StoredEvent:
    """Return the event of a row.

    Reads of thousands of events spend much of their time here, so it parses nothing that the read
    does not need.

    ``redacted`` False shows the content also where a redaction took effect. ``withheld`` hides it
    in any case.

    ``sent``: the event goes to another server, so ``raw`` never has more than ``json``.
    """
    (
        _,
        event_id,
        room_id,
        version,
        stream,
        topological,
        _,
        redacted_by,
        rejected,
        soft_failed,
        outlier,
        redacted_form,
        _,
        stored_bytes,
    ) = row
    pruned = withheld or redacted_form or (redacted and redacted_by is not None)
    json = None
    if withheld or (sent and pruned):
        raw = decode_recent(stored_bytes, event_id, room_id)
        json = event_json(event_id, raw, version, redacted=True)
        stored_bytes = StoredBytes(canonical(json))
    event = _MutableEvent(
        event_id,
        room_id,
        version,
        stream,
        topological,
        stored_bytes,
        redacted_by,
        rejected,
        soft_failed,
        outlier,
        pruned,
        withheld,
        None,
        json,
        refused,
    )
    event.__class__ = StoredEvent
    made: StoredEvent = event
    return made


def event_of_room(
    room_id: RoomId, room_version: str, columns: Sequence[Any], *, withheld: bool = False
) -> StoredEvent:
    """Return an event of a known room: for queries that select the columns of the room once.

    ``columns``: those of `RoomEventRow`, in its order.
    """
    (
        event_id,
        stream,
        topological,
        redacted_by,
        rejected,
        soft_failed,
        outlier,
        redacted_form,
        stored_bytes,
    ) = columns
    pruned = withheld or redacted_form or redacted_by is not None
    json = None
    if withheld:
        raw = decode_recent(stored_bytes, event_id, room_id)
        json = event_json(event_id, raw, room_version, redacted=True)
        stored_bytes = canonical(json)
    event = _MutableEvent(
        event_id,
        room_id,
        room_version,
        stream,
        topological,
        stored_bytes,
        redacted_by,
        rejected,
        soft_failed,
        outlier,
        pruned,
        withheld,
        None,
        json,
        None,
    )
    event.__class__ = StoredEvent
    made: StoredEvent = event
    return made


def event_json(
    event_id: EventId, raw: bytes, room_version: str, *, redacted: bool
) -> dict[str, Any]:
    """Return the event in the bytes, whole or redacted. `StorageCorrupt` for other bytes."""
    try:
        json = read_trusted(raw, strict=version_of(room_version).strict_canonical_json)
        if type(json["type"]) is str and type(json["sender"]) is str and "depth" in json:
            return redact(json, room_version) if redacted else json
    except (InvalidEvent, KeyError, TypeError) as error:
        raise StorageCorrupt(
            f"the bytes of an event cannot be read: {error}", event_id=event_id
        ) from error
    raise StorageCorrupt("the bytes of an event are not those of an event", event_id=event_id)


def related_id(stored_bytes: StoredBytes, event_id: str, room_id: str) -> EventId:
    """Return the id of the event that an event relates to. `StorageCorrupt`: it relates to none."""
    raw = decode_recent(stored_bytes, event_id, room_id)
    try:
        return EventId(orjson.loads(raw)["content"]["m.relates_to"]["event_id"])
    except (KeyError, TypeError) as error:
        raise StorageCorrupt("a relation is not in its event", event_id=event_id) from error


async def events(
    conn: Connection, event_ids: Iterable[EventId], *, redacted: bool = True
) -> dict[EventId, StoredEvent]:
    stored: dict[EventId, StoredEvent] = {}
    async for part in parts(list(event_ids), EVENTS_MAX):
        rows = await conn.fetch(SQL_EVENTS, part, row=EventWithVerdictRow)
        stored |= {
            row.event.event_id: stored_of(row.event, redacted=redacted, refused=row.refused)
            for row in rows
        }
    return stored


# --------------------------------------------------------------------------------------------------
# The visible ones among some events, for a user or a server.
#
# The schema has the condition: `user_sees`, `server_sees`, `server_gets`.

SQL_VISIBLE_TO_USER: Final[LiteralString] = compose(
    """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid
)
SELECT visible.event_id
FROM reader
CROSS JOIN unnest($2::text[]) AS one (id)
CROSS JOIN LATERAL (
    SELECT e.event_id
    FROM events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS s
    WHERE e.event_id = one.id
        AND user_sees(e, :user_sees.of(s))
    OFFSET 0
) AS visible
""",
    USER_SEES,
).sql

SQL_VISIBLE_TO_SERVER: Final[LiteralString] = compose(
    """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid
)
SELECT visible.event_id
FROM reader
CROSS JOIN unnest($2::text[]) AS one (id)
CROSS JOIN LATERAL (
    SELECT e.event_id
    FROM events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS s
    WHERE e.event_id = one.id
        AND server_sees(e, s.own_audiences, s.shared_audiences, s.world_audiences, s.reader_nid,
            s.unread)
        AND server_gets(e, s.joined_audiences, s.world_audiences, s.reader_nid, s.unread)
        AND :whole.of(s)
        -- nor any event of a room whose members are not all known
        AND NOT EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = e.room_nid)
    OFFSET 0
) AS visible
""",
    WHOLE,
).sql

SQL_VISIBLE_AFTER_LEAVING: Final[LiteralString] = """
WITH reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid
)
SELECT visible.event_id
FROM reader
CROSS JOIN unnest($2::text[]) AS one (id)
CROSS JOIN LATERAL (
    SELECT e.event_id
    FROM events e
    CROSS JOIN LATERAL visibility_of(e.room_nid, reader.principal_nid) AS s
    -- audiences are numbered as they begin, so this one began before the last user had left
    CROSS JOIN LATERAL (SELECT e.audience < upper(s.own_audiences) AS is_earlier) AS leaving
    WHERE e.event_id = one.id
        AND server_sees(e, s.own_audiences,
            CASE WHEN leaving.is_earlier THEN s.shared_audiences END, s.world_audiences,
            s.reader_nid, CASE WHEN leaving.is_earlier THEN s.unread END)
        AND server_gets(e, s.joined_audiences, s.world_audiences, s.reader_nid, s.unread)
        AND NOT EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = e.room_nid)
    OFFSET 0
) AS visible
"""


async def visible_to_user(
    conn: Connection, user_id: UserId, event_ids: Iterable[EventId]
) -> set[EventId]:
    """Return the events that a local user may see (client-server API, room history visibility).

    Unknown events are not among them.
    """
    return set(await conn.fetchvals(SQL_VISIBLE_TO_USER, user_id, list(event_ids)))


async def visible_to_server(
    conn: Connection, server_name: ServerName, event_ids: Iterable[EventId]
) -> set[EventId]:
    """Return the events that a server may have whole.

    For a server that was never in the room these are the world-readable ones. Soft-failed events
    are checked like others. Rejected events are never among them. Those of an erased sender are,
    if a user of the server was in the room then.
    """
    return set(await conn.fetchvals(SQL_VISIBLE_TO_SERVER, server_name, list(event_ids)))


async def visible_after_leaving(
    conn: Connection, server_name: ServerName, event_ids: Iterable[EventId]
) -> set[EventId]:
    """Return the events that a server may have, although no user of it is joined now.

    Those of erased senders are among them, for the redacted form. Under "shared", these are the
    events from before its last user has left. Others are as in `visible_to_server`.
    """
    return set(await conn.fetchvals(SQL_VISIBLE_AFTER_LEAVING, server_name, list(event_ids)))
