"""The input of a rebuild: the received bytes of a room's events in the order of arrival.

The bytes do not say which events are history or outliers, nor their nids and positions. They also
lack the state before an event that came before its parents, which a caller gave. That is read from
the stored states, if they are readable.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.connection import Connection
from storage.database.names import MEMBERSHIP_NAMES
from storage.database.placeholders import compose, fill
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import ROOM_VERSIONS, Event, load, parse
from storage.event.model import make_event
from storage.ids import EventId, RoomId
from storage.maintenance.room_states import PART_ROOM_EVENTS, RoomStates
from storage.maintenance.verify.event_loader import SQL_EVENT_IDS as SQL_IDS_OF
from storage.maintenance.verify.event_loader import NidRow, id_of_bytes, version_of_id
from storage.maintenance.verify.graph import doubled_events
from storage.persist.model.results import Origin
from storage.rebuild.planner import SlimEvent, slim

CONTENT_NEEDED: Final = frozenset(
    {
        "m.room.create",
        "m.room.history_visibility",
        "m.room.join_rules",
        "m.room.power_levels",
        "m.room.redaction",
        "m.room.third_party_invite",
    }
)
"""Types of events whose content decides about other events, but for memberships."""

SQL_TIMELINE_STEPS: Final[LiteralString] = """
WITH latest AS (
    SELECT event_nid, stream_ordering, arrival_ordering
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND stream_ordering > $2::bigint
)
SELECT event_nid, COALESCE(arrival_ordering, stream_ordering) AS position, false AS is_readmission
FROM latest
WHERE COALESCE(arrival_ordering, stream_ordering) > $2::bigint
UNION ALL
SELECT event_nid, stream_ordering, true
FROM latest
WHERE arrival_ordering IS NOT NULL
ORDER BY position
"""

SQL_OUTLIER_NIDS: Final[LiteralString] = """
SELECT event_nid
FROM events
WHERE room_nid = $1::int AND outlier
ORDER BY event_nid
"""

SQL_FIRST_CREATE: Final[LiteralString] = fill("""
SELECT event_nid
FROM events
WHERE room_nid = $1::int AND type_nid = {TYPE_CREATE} AND state_key_nid = {KEY_CREATE}
    AND rejected IS NULL
    AND EXISTS (SELECT FROM events WHERE room_nid = $1::int AND outlier
        AND starts_with(rejected, 'create.second'))
""")
"""The create event of a room that has others: these were rejected because they came after it."""

SQL_ARRIVALS: Final[LiteralString] = """
SELECT e.*
FROM unnest($1::bigint[]) WITH ORDINALITY AS wanted (event_nid, ordinal)
CROSS JOIN LATERAL (
    SELECT x.event_nid, x.event_id, x.stream_ordering, x.outlier, x.backfilled,
        x.state_group_before, x.state_group_after, x.json,
        is_out_of_band(x), x.encoding = 1 AS is_censored, x.redacted_form,
        COALESCE(x.refused, CASE WHEN x.arrival_ordering IS NOT NULL THEN 'readmitted' END)
            AS refused
    FROM events x
    WHERE event_nid = wanted.event_nid
    OFFSET 0
) AS e
ORDER BY wanted.ordinal
"""

SQL_NAMED: Final[LiteralString] = """
SELECT event_id, event_nid, room_nid, true AS is_held
FROM events
WHERE event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
))
UNION ALL
SELECT m.event_id, m.event_nid, m.room_nid, false
FROM missing_events m
WHERE m.event_id = ANY($1::text[])
    AND NOT EXISTS (SELECT FROM events e WHERE e.event_id = m.event_id)
"""

TEMPLATE_NAMED_NIDS: Final[LiteralString] = """
SELECT event_nid
FROM {events} AS e
WHERE rejected IS NOT NULL OR $2::boolean
ORDER BY event_nid
"""

SQL_NAMED_NIDS: Final[LiteralString] = fill(TEMPLATE_NAMED_NIDS, events=PART_ROOM_EVENTS)

SQL_IDS: Final[LiteralString] = """
SELECT event_nid, event_id, json
FROM events
WHERE event_nid = ANY($1::bigint[])
"""

IDS: Final = 1_000
"""Events whose bytes are compared with their ids at once."""

SQL_TWINS: Final[LiteralString] = """
SELECT event_nid
FROM events
WHERE event_nid = ANY($1::bigint[]) AND room_nid = $2::int
ORDER BY outlier, stream_ordering, event_nid
"""

SQL_COLUMNS: Final[LiteralString] = compose(
    """
SELECT t.type, p.name AS sender, k.state_key, e.membership,
    claimed_depth(e.depth, e.topological_ordering) AS depth, e.origin_server_ts, e.redacted_form,
    :prev_nids.call(e) AS prev_events, :auth_nids.call(e) AS auth_events
FROM events e
JOIN event_types t USING (type_nid)
JOIN principals p ON p.principal_nid = e.sender_nid
LEFT JOIN state_keys k USING (state_key_nid)
WHERE e.event_nid = $1::bigint AND (e.state_key_nid IS NULL) = (k.state_key IS NULL)
""",
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_REJECTED: Final[LiteralString] = """
SELECT rejected
FROM events
WHERE event_nid = $1::bigint
"""

SQL_DIGEST: Final[LiteralString] = """
SELECT digest
FROM state_groups
WHERE state_group = $1::bigint
"""

SQL_EVENT_IDS: Final[LiteralString] = """
SELECT event_nid, event_id
FROM events
WHERE event_nid = ANY($1::bigint[])
ORDER BY event_id
"""


class RebuiltRoom(NamedTuple):
    """A room by its nid in the live tables, and by the version of its create event."""

    room_nid: int
    room_id: str
    room_version: str


class TimelineStepRow(NamedTuple):
    """An event that entered the timeline at a position, or was readmitted there."""

    event_nid: int
    position: int
    is_readmission: bool


class ArrivalRow(NamedTuple):
    """An event as it arrived, and the states that the store has for it.

    ``refused``: the verdict of the caller then. Of an event readmitted since, any text.
    """

    event_nid: int
    event_id: str
    stream_ordering: int | None
    outlier: bool
    backfilled: bool
    state_group_before: int | None
    state_group_after: int | None
    json: StoredBytes
    is_out_of_band: bool
    is_censored: bool
    redacted_form: bool
    refused: str | None

    @property
    def origin(self) -> Origin:
        """How it arrived, or how it is stored now."""
        if self.is_out_of_band:
            return "out_of_band"
        return "outlier" if self.outlier else "backfill" if self.backfilled else "live"

    def read(self, room: RebuiltRoom, correct_id: str | None = None) -> Event:
        """Return the event. Raise `StorageCorrupt` if its bytes are not of this id.

        ``correct_id``: the id of the bytes, where the row has another one.
        """
        try:
            raw = decode(self.json, self.event_id, room.room_id)
        except StorageCorrupt:
            if correct_id is None:
                raise
            raw = decode(self.json, correct_id, room.room_id)
        try:
            event = parse(raw, room.room_version)
        except InvalidEvent as error:
            raise StorageCorrupt(
                f"the bytes of an event cannot be read: {error.reason}", event_id=self.event_id
            ) from None
        if (
            event.event_id not in (self.event_id, correct_id)
            and version_of_id(raw, self.event_id) is None
        ):
            raise StorageCorrupt(
                "the bytes of an event are of another one",
                event_id=self.event_id,
                found=event.event_id,
            )
        if self.is_censored or not (event.content_hash_valid or self.redacted_form):
            # Of censored bytes the content hash says nothing. Others are damaged where they do not
            # fit it any more, and a flag would hide that.
            return load(raw, room.room_version, event.event_id, redacted=self.redacted_form)
        return event

    def _decoded(self, room: RebuiltRoom) -> bytes:
        try:
            return decode(self.json, self.event_id, room.room_id)
        except StorageCorrupt:
            own = id_of_bytes(self.json, room.room_id, room.room_version)
            if own is None:
                raise
            return decode(self.json, own, room.room_id)

    def line(
        self, event: Event, origin: Origin | None, state_before: tuple[EventId, ...] | None
    ) -> SlimEvent:
        """Return the event for planning."""
        line = SlimEvent._make(
            slim(
                event,
                self.stream_ordering or 0,
                self.event_nid,
                origin or self.origin,
                state_before,
                refused=None if origin == "outlier" else self.refused,
            )
        )
        return line if event.raw else line._replace(whole=None, content=dict(event.content))


class StoredColumnsRow(NamedTuple):
    """The columns of an event whose bytes cannot be read."""

    type: str
    sender: str
    state_key: str | None
    membership: int | None
    depth: int
    origin_server_ts: int
    redacted_form: bool
    prev_events: list[int]
    auth_events: list[int]


class StoredIdRow(NamedTuple):
    """An event id with its bytes."""

    event_nid: int
    event_id: str
    json: StoredBytes


class NamedRow(NamedTuple):
    """The nid of an id; ``is_held`` False: of a missing event."""

    event_id: str
    event_nid: int
    room_nid: int
    is_held: bool


async def arrivals(conn: Connection, event_nids: Sequence[int]) -> list[ArrivalRow]:
    """Return these events, in this order."""
    return await conn.fetch(SQL_ARRIVALS, list(event_nids), row=ArrivalRow)


async def named(conn: Connection, event_ids: Iterable[str]) -> list[NamedRow]:
    """Return those of these events that are stored or missing."""
    return await conn.fetch(SQL_NAMED, list(event_ids), row=NamedRow)


async def misnamed(
    conn: Connection, room: RebuiltRoom, *, every: bool
) -> AsyncIterator[tuple[int, str]]:
    """Yield the events that have another id than their bytes, each with its correct id.

    Without ``every``, only rejected events: they can have the id of another room version.
    """
    nids: list[int] = await conn.fetchvals(SQL_NAMED_NIDS, room.room_nid, every)
    for start in range(0, len(nids), IDS):
        for row in await conn.fetch(SQL_IDS, nids[start : start + IDS], row=StoredIdRow):
            own = await _correct_id(conn, row, room)
            if own is not None and own != row.event_id:
                yield row.event_nid, own


async def _correct_id(conn: Connection, row: StoredIdRow, room: RebuiltRoom) -> str | None:
    """Return the id of an event by its bytes; None if these are damaged.

    They are, too, if another row has them under their id.
    """
    if (own := _readable_id(row, room)) is not None:
        return own
    own = id_of_bytes(row.json, room.room_id, room.room_version)
    others = [one.event_nid for one in await named(conn, [] if own is None else [own])]
    rows = await conn.fetch(SQL_IDS, others, row=StoredIdRow)
    return None if own in [_readable_id(other, room) for other in rows] else own


def _readable_id(row: StoredIdRow, room: RebuiltRoom) -> str | None:
    """Return the id of an event that is stored under it, or under that of another room version."""
    try:
        raw = decode(row.json, row.event_id, room.room_id)
        own = parse(raw, room.room_version).event_id
    except (InvalidEvent, StorageCorrupt):
        return None
    return own if own == row.event_id or version_of_id(raw, row.event_id) is not None else None


async def doubled(
    conn: Connection, room: RebuiltRoom, correct_ids: Mapping[int, str]
) -> AsyncIterator[int]:
    """Yield the rows of events that are stored several times, without one of each: a readable one.

    Raise `StorageCorrupt` for a row whose bytes have another id, unless ``correct_ids`` has it: it
    is no copy.
    """
    for nids in (await doubled_events(conn, room.room_nid)).values():
        twins: list[int] = await conn.fetchvals(SQL_TWINS, nids, room.room_nid)
        rows = await conn.fetch(
            SQL_IDS, [nid for nid in twins if nid not in correct_ids], row=StoredIdRow
        )
        ids = {row.event_nid: await _correct_id(conn, row, room) for row in rows}
        for row in rows:
            if ids[row.event_nid] not in (None, row.event_id) and not _readable_id(row, room):
                raise StorageCorrupt(
                    "an event is stored under another id than its own", event_id=row.event_id
                )
        for nid in sorted(ids, key=lambda nid: (ids[nid] is None, twins.index(nid)))[1:]:
            yield nid


async def stand_in(
    conn: Connection, room: RebuiltRoom, row: ArrivalRow, error: StorageCorrupt
) -> Event:
    """Return an event by its columns, because its bytes cannot be read.

    Raise ``error`` where the bytes say more than the columns, and others depend on that.
    """
    columns = await conn.fetchrow(SQL_COLUMNS, row.event_nid, row=StoredColumnsRow)
    if columns is None or columns.type in CONTENT_NEEDED:
        raise error
    wanted = [*columns.prev_events, *columns.auth_events]
    ids = dict(await conn.fetch(SQL_IDS_OF, wanted, row=NidRow))
    if not ids.keys() >= set(wanted):
        raise error
    membership = MEMBERSHIP_NAMES.get(columns.membership or 0)
    return make_event(
        EventId(row.event_id),
        RoomId(room.room_id),
        ROOM_VERSIONS[room.room_version],
        columns.type,
        columns.sender,
        columns.state_key,
        {} if membership is None else {"membership": membership},
        columns.depth,
        columns.origin_server_ts,
        tuple(EventId(ids[nid]) for nid in columns.prev_events),
        tuple(EventId(ids[nid]) for nid in columns.auth_events),
        None,
        b"",
        {},
        not columns.redacted_form,
        None,
    )


async def state_given(conn: Connection, states: RoomStates, row: ArrivalRow) -> list[NidRow]:
    """Return the events of the state before an event, which only the tables have.

    Raise `StorageCorrupt` if it is unreadable, or differs from its digest.
    """
    number = row.state_group_before or 0
    group = (await states.load(conn, [number])).get(number)
    if group is None or await conn.fetchval(SQL_DIGEST, number) not in (None, group.digest):
        raise StorageCorrupt(
            "the state before an event that came before its parents cannot be read",
            event_id=row.event_id,
        )
    found = await conn.fetch(SQL_EVENT_IDS, list(group.entries.values()), row=NidRow)
    if len(found) != len(group.entries):
        raise StorageCorrupt(
            "the state before an event has events that are not held", event_id=row.event_id
        )
    return found
