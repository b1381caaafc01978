"""Export rooms as NDJSON lines.

Each line holds the received bytes of one event and the fields that `import` needs to restore it.
Events come in the order in which they were stored: outliers first, then the timeline by stream
ordering. A line includes the state before its event only where the earlier lines do not determine
it: where a parent is missing or was stored later.

An outlier that is a second create event of its room follows the first one, by which it was
rejected. Otherwise an import would take it for the create event of the room.

A refused event has its reason. An event that was readmitted has two lines: one where it arrived,
refused, and one where it was readmitted.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes, decode
from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill, transposed
from storage.errors import PartialState, UnknownRoom
from storage.event.ndjson import envelope
from storage.ids import EventId, RoomId
from storage.queries.state_at import states_at

PAGE: Final = 1_000
"""Events read by one statement: some megabytes."""

SQL_ROOMS: Final[LiteralString] = """
SELECT room_nid, room_id, room_version, is_partial
FROM rooms
WHERE $1::text[] IS NULL OR room_id = ANY($1::text[])
ORDER BY room_nid
"""

SQL_STEPS: Final[LiteralString] = fill("""
SELECT event_nid, is_readmission
FROM (
    SELECT o.event_nid, c.position, false AS is_readmission, o.is_second
    FROM (
        SELECT event_nid, COALESCE(starts_with(rejected, 'create.second'), false) AS is_second
        FROM events
        WHERE room_nid = $1::bigint AND outlier
    ) AS o
    LEFT JOIN (
        SELECT max(COALESCE(arrival_ordering, stream_ordering)) AS position
        FROM events
        WHERE room_nid = $1::bigint AND type_nid = {TYPE_CREATE}
            AND state_key_nid = {KEY_CREATE} AND rejected IS NULL
    ) AS c ON o.is_second
    UNION ALL
    SELECT event_nid, COALESCE(arrival_ordering, stream_ordering), false, false FROM events
        WHERE room_nid = $1::bigint AND NOT outlier
    UNION ALL
    SELECT event_nid, stream_ordering, true, false FROM events
        WHERE room_nid = $1::bigint AND NOT outlier AND arrival_ordering IS NOT NULL
) AS e
ORDER BY position NULLS FIRST, is_second, event_nid
""")

SQL_EVENTS: Final[LiteralString] = compose(
    """
SELECT
    e.event_id,
    e.json,
    CASE WHEN is_out_of_band(e) THEN 'out_of_band' WHEN e.outlier THEN 'outlier'
        WHEN e.backfilled THEN 'backfill' ELSE 'live' END AS origin,
    NOT e.outlier AND NOT wanted.is_readmission AND EXISTS (
        SELECT
        FROM unnest(:prev_nids.call(e)) AS named (event_nid)
        LEFT JOIN events p USING (event_nid)
        WHERE p.stream_ordering IS NULL OR COALESCE(p.arrival_ordering, p.stream_ordering)
            > COALESCE(e.arrival_ordering, e.stream_ordering)
    ) AS is_undetermined,
    CASE WHEN is_out_of_band(e) THEN (
        SELECT o.stripped_state FROM out_of_band_memberships o
            WHERE o.room_nid = e.room_nid AND o.event_nid = e.event_nid
    ) END AS stripped_state,
    CASE WHEN e.arrival_ordering IS NULL THEN e.refused
        WHEN NOT wanted.is_readmission THEN 'readmitted later' END AS refused,
    wanted.is_readmission
FROM unnest($1::bigint[], $2::boolean[]) WITH ORDINALITY
    AS wanted (event_nid, is_readmission, place)
JOIN events e USING (event_nid)
ORDER BY wanted.place
""",
    PREV_NIDS,
).sql


class ArchivedRoom(NamedTuple):
    """A room to be archived."""

    room_nid: int
    room_id: RoomId
    room_version: str
    is_partial: bool


class _Event(NamedTuple):
    event_id: EventId
    json: StoredBytes
    origin: str
    is_undetermined: bool
    stripped_state: str | None
    refused: str | None
    is_readmission: bool


class ArchiveStepRow(NamedTuple):
    """An event that is written, or written again because it was readmitted then."""

    event_nid: int
    is_readmission: bool


async def rooms_to_archive(
    conn: Connection, room_ids: Sequence[RoomId] | None = None
) -> list[ArchivedRoom]:
    """Return these rooms, or all, in the order in which the store first saw them.

    Raise `UnknownRoom`, or `PartialState` for one of ``room_ids`` whose members are not all known:
    an import would reject the events of the others. Of all rooms, the caller skips such rooms.
    """
    found = await conn.fetch(
        SQL_ROOMS, None if room_ids is None else list(room_ids), row=ArchivedRoom
    )
    if unknown := set(room_ids or ()) - {room.room_id for room in found}:
        raise UnknownRoom(min(unknown))
    if room_ids is not None and (partial := [room.room_id for room in found if room.is_partial]):
        raise PartialState(min(partial))
    return found


async def archive(conn: Connection, room: ArchivedRoom) -> AsyncIterator[list[bytes]]:
    """Yield the lines of a room, without line breaks, in pages.

    `storage.event.ndjson` describes the fields. Call it within a snapshot.
    """
    steps = await conn.fetch(SQL_STEPS, room.room_nid, row=ArchiveStepRow)
    for start in range(0, len(steps), PAGE):
        page = transposed(steps[start : start + PAGE], 2)
        events = await conn.fetch(SQL_EVENTS, *page, row=_Event)
        states = await states_at(
            conn, [event.event_id for event in events if event.is_undetermined], after=False
        )
        yield [
            envelope(
                decode(event.json, event.event_id, room.room_id),
                room.room_version,
                event.origin,
                sorted(states[event.event_id].values()) if event.is_undetermined else None,
                None if event.stripped_state is None else orjson.loads(event.stripped_state),
                refused=event.refused,
                readmit=event.is_readmission,
            )
            for event in events
        ]
