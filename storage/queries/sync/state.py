"""The state of rooms at the start and at the end of their timelines, in one statement for all rooms.

`state_deltas` tells what each position changed, with removals. A room that the client knows is told what changed between two
positions: for each key the value before the first delta and after the last one. A room that is told whole is the current
state with the deltas since then taken back, which costs what has happened since and not the history of the room.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import StateKey
from storage.queries.events import StoredEvent, stored_of

SQL_STATE: Final[LiteralString] = """
WITH
room AS (
    SELECT *
    FROM unnest($1::int[], $2::boolean[], $3::int[], $4::bigint[], $5::bigint[], $6::bigint[])
        AS i (room_nid, whole, only_key_nid, lower, start, upper)
),
changed AS (  -- rooms that the client knows: each key that changed since, before, at the start and at the end of the timeline
    SELECT r.room_nid, r.whole, d.state_key_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS before_nid,
        (array_agg(
            CASE WHEN d.stream_ordering <= r.start THEN d.event_nid ELSE d.prev_event_nid END
            ORDER BY d.stream_ordering > r.start, CASE WHEN d.stream_ordering <= r.start THEN -d.stream_ordering ELSE d.stream_ordering END
        ))[1] AS start_nid,
        (array_agg(d.event_nid ORDER BY d.stream_ordering DESC))[1] AS end_nid
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.lower AND d.stream_ordering <= r.upper
    WHERE (NOT r.whole OR r.lower > 0) AND (r.only_key_nid IS NULL OR d.state_key_nid = r.only_key_nid)
    GROUP BY r.room_nid, r.whole, d.state_key_nid
),
undone AS (  -- rooms that are told whole: each key that changed after the start of the timeline
    SELECT r.room_nid, d.state_key_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering))[1] AS start_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering) FILTER (WHERE d.stream_ordering > r.upper))[1] AS end_nid,
        bool_or(d.stream_ordering > r.upper) AS end_differs
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > r.start
    WHERE r.whole
    GROUP BY r.room_nid, d.state_key_nid
),
value AS (  -- each key to tell: what the client knows, the value at the start, the value at the end
    SELECT room_nid, state_key_nid, before_nid, start_nid, end_nid
    FROM changed
    WHERE NOT whole
    UNION ALL
    SELECT room_nid, state_key_nid, NULL,
        CASE WHEN u.end_differs IS NULL THEN c.event_nid ELSE u.start_nid END,
        CASE WHEN u.end_differs THEN u.end_nid ELSE c.event_nid END
    FROM (SELECT c.* FROM room r JOIN current_state c USING (room_nid) WHERE r.whole) AS c
    FULL JOIN undone u USING (room_nid, state_key_nid)
),
entry AS (
    SELECT room_nid, state_key_nid, start_nid AS event_nid, true AS at_start, COALESCE(start_nid = end_nid, false) AS at_end
    FROM value
    WHERE start_nid IS NOT NULL AND start_nid IS DISTINCT FROM before_nid
    UNION ALL
    SELECT room_nid, state_key_nid, end_nid, false, true
    FROM value
    WHERE end_nid IS NOT NULL AND end_nid IS DISTINCT FROM before_nid AND end_nid IS DISTINCT FROM start_nid
    UNION ALL
    SELECT room_nid, state_key_nid, NULL, false, false
    FROM changed
    WHERE before_nid IS NOT NULL AND end_nid IS NULL
)
SELECT n.room_nid, n.at_start, n.at_end, gone.type AS removed_type, gone.state_key AS removed_key, s.*
FROM entry n
LEFT JOIN LATERAL (  -- for the few keys that were removed; not all keys of the database, hashed
    SELECT t.type, k.state_key
    FROM state_keys k
    JOIN event_types t USING (type_nid)
    WHERE k.state_key_nid = n.state_key_nid AND n.event_nid IS NULL
    OFFSET 0
) AS gone ON true
LEFT JOIN stored_events s ON s.event_nid = n.event_nid
"""


class StateRow(NamedTuple):
    """One state event of a room, or (``event_nid`` None) a key that was removed."""

    room_nid: int
    at_start: bool
    at_end: bool
    removed_type: str | None
    removed_key: str | None
    event_nid: int | None
    event_id: str | None
    room_id: str | None
    room_version: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int | None
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool | None
    outlier: bool | None
    redacted_form: bool | None
    encoding: int | None
    json: bytes | None


EVENT: Final = StateRow._fields.index("event_nid")
"""Where the columns of the event begin."""


class Wanted(NamedTuple):
    """The state of one room that is asked for: after `lower` (or whole), at `start` and at `upper`; of one key only, or of all."""

    room_nid: int
    whole: bool
    only_key_nid: int | None
    lower: int
    start: int
    upper: int


class RoomState(NamedTuple):
    """The answer for one room."""

    at_start: list[StoredEvent]
    at_end: list[StoredEvent]
    removed: list[StateKey]


async def states(conn: Connection, wanted: Sequence[Wanted]) -> dict[int, RoomState]:
    """The state of each of these rooms, by room nid."""
    found = {one.room_nid: RoomState([], [], []) for one in wanted}
    if not wanted:
        return found
    for row in await conn.fetch(SQL_STATE, *map(list, zip(*wanted, strict=True)), row=StateRow):
        room = found[row.room_nid]
        if row.event_nid is None:
            room.removed.append((row.removed_type or "", row.removed_key or ""))
            continue
        event = stored_of(row[EVENT:])
        if row.at_start:
            room.at_start.append(event)
        if row.at_end:
            room.at_end.append(event)
    return found
