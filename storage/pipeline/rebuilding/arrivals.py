"""The input of a rebuild: the received bytes of a room's events in the order of arrival.

The bytes do not say which events are history or outliers, nor their nids and positions. They also
lack the state before an event that came before its parents, which a caller gave. That is read from
the stored states, if they are readable.
"""

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.connection import Connection
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import parse
from storage.maintenance.room_states import RoomStates
from storage.persist.model.results import Origin
from storage.pipeline.imports.validate import SlimEvent, slim

SQL_LIVE_ROOM: Final[LiteralString] = """
SELECT room_nid, room_id, room_version
FROM rooms
WHERE room_id = $1::text
"""

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

SQL_FIRST_CREATE: Final[LiteralString] = """
SELECT event_nid
FROM events
WHERE room_nid = $1::int AND type_nid = 1 AND state_key_nid = 1 AND rejected IS NULL
    AND EXISTS (SELECT FROM events WHERE room_nid = $1::int AND outlier
        AND starts_with(rejected, 'create.second'))
"""
"""The create event of a room that has others: these were rejected because they came after it."""

SQL_ARRIVALS: Final[LiteralString] = """
SELECT e.*
FROM unnest($1::bigint[]) WITH ORDINALITY AS wanted (event_nid, ordinal)
CROSS JOIN LATERAL (
    SELECT x.event_nid, x.event_id, x.stream_ordering, x.outlier, x.backfilled,
        x.state_group_before, x.state_group_after, x.json,
        is_out_of_band(x),
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

SQL_DIGEST: Final[LiteralString] = """
SELECT digest
FROM state_groups
WHERE state_group = $1::bigint
"""

SQL_EVENT_IDS: Final[LiteralString] = """
SELECT event_id
FROM events
WHERE event_nid = ANY($1::bigint[])
ORDER BY event_id
"""


class LiveRoomRow(NamedTuple):
    """A room as the live tables name it."""

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
    refused: str | None

    @property
    def origin(self) -> Origin:
        """How it arrived, or how it is stored now."""
        if self.is_out_of_band:
            return "out_of_band"
        return "outlier" if self.outlier else "backfill" if self.backfilled else "live"

    def line(self, room: LiveRoomRow, origin: Origin | None = None) -> SlimEvent:
        """Return the event for planning. Raise `StorageCorrupt` if its bytes are not of this id."""
        try:
            event = parse(decode(self.json, self.event_id, room.room_id), room.room_version)
        except InvalidEvent as error:
            raise StorageCorrupt(
                f"the bytes of an event cannot be read: {error.reason}", event_id=self.event_id
            ) from None
        if event.event_id != self.event_id:
            raise StorageCorrupt(
                "the bytes of an event are of another one",
                event_id=self.event_id,
                found=event.event_id,
            )
        return SlimEvent._make(
            slim(
                event,
                self.stream_ordering or 0,
                self.event_nid,
                origin or self.origin,
                None,
                refused=None if origin == "outlier" else self.refused,
            )
        )


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


async def state_given(conn: Connection, states: RoomStates, row: ArrivalRow) -> tuple[str, ...]:
    """Return the ids of the state before an event, which only the tables have.

    Raise `StorageCorrupt` if it is unreadable, or differs from its digest.
    """
    number = row.state_group_before or 0
    group = (await states.load(conn, [number])).get(number)
    if group is None or await conn.fetchval(SQL_DIGEST, number) not in (None, group.digest):
        raise StorageCorrupt(
            "the state before an event that came before its parents cannot be read",
            event_id=row.event_id,
        )
    ids: list[str] = await conn.fetchvals(SQL_EVENT_IDS, list(group.entries.values()))
    if len(ids) != len(group.entries):
        raise StorageCorrupt(
            "the state before an event has events that are not held", event_id=row.event_id
        )
    return tuple(ids)
