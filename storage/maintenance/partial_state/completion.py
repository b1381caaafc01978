"""Complete a partial state: store the join and everything after it again, on the whole state.

All of it is one transaction under the lock of the room. The events are taken out of the room, its
derived data is rebuilt without them, and they are appended again by the planner of the live path
(`storage.maintenance.repair.reauthorise`). So the tables are those of a join with the whole state.
Before that, the missing members are stored as outliers, in transactions of their own; a process
that is killed leaves outliers, and the mark of the room stays.

The members are those of the fetched state. All other entries are those of the first answer.

An event that the whole state does not allow is rejected now, and clients that have it keep it until
they load the room again. That is an event of a sender whom the whole state has banned, for example:
a partial state cannot know it.
"""

from collections.abc import Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection, Database
from storage.database.placeholders import compose
from storage.ids import EventId, RoomId
from storage.maintenance.partial_state.positions import (
    EventsToReplay,
    known_to_readers,
    publish,
    put_back,
    replayed,
)
from storage.maintenance.purge.removal import SQL_MAKE_OUTLIERS, delete
from storage.maintenance.repair.current import repair_current, repair_entries, repair_state_tables
from storage.maintenance.repair.graph import repair_extremities, repair_gaps, repair_redactions
from storage.maintenance.repair.reauthorise import append_again, drop_groups
from storage.maintenance.repair.replay import RepairPlanner, replay
from storage.maintenance.repair.run import repair_superseded
from storage.maintenance.room_states import RoomStates
from storage.maintenance.verify.event_loader import VerifiedRoom, read_room
from storage.persist.room_lock import lock_room
from storage.streams.caches import CURRENT_STATE
from storage.streams.invalidate_caches import invalidate_caches, register_writer

SQL_MARK: Final[LiteralString] = """
SELECT e.event_nid, e.state_group_before
FROM partial_rooms p
JOIN events e ON e.event_id = p.join_event_id AND NOT e.outlier
WHERE p.room_nid = $1::int
"""

SQL_WHOLE_STATE: Final[LiteralString] = """
WITH
fetched AS MATERIALIZED (
    SELECT e.state_key_nid, e.event_id
    FROM unnest($3::text[]) AS wanted (id)
    CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.id OFFSET 0) AS e
    WHERE e.room_nid = $1::int AND e.membership IS NOT NULL
        AND e.rejected IS NULL AND NOT is_out_of_band(e)
)
SELECT event_id
FROM fetched
UNION ALL
SELECT e.event_id
FROM state_entries($2::bigint) AS known
JOIN events e USING (event_nid)
WHERE known.state_key_nid NOT IN (SELECT state_key_nid FROM fetched)
"""

SQL_IN_STATES: Final[LiteralString] = compose(
    """
WITH
used AS (
    SELECT state_group_before AS state_group
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND event_nid <> ALL($2::bigint[])
    UNION
    SELECT state_group_after
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND event_nid <> ALL($2::bigint[])
),
path AS (
    SELECT DISTINCT step.part AS state_group
    FROM used
    CROSS JOIN LATERAL state_path(used.state_group) AS step
)
SELECT DISTINCT e.event_id
FROM path
JOIN state_groups g USING (state_group)
CROSS JOIN LATERAL :own_entries.call(g) AS i
JOIN events e ON e.event_nid = i.event_nid
WHERE i.event_nid = ANY($2::bigint[])
""",
    OWN_ENTRIES,
).sql

SQL_TAKE_OUT: Final[LiteralString] = """
WITH
dropped AS (
    DELETE FROM dropped_extremities
    WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])
),
waiting AS (DELETE FROM waiting_redactions WHERE redaction_nid = ANY($2::bigint[])),
mark AS (DELETE FROM partial_rooms WHERE room_nid = $1::int)
UPDATE rooms
SET is_partial = false,
    max_topological_ordering = 0
WHERE room_nid = $1::int
"""


class MarkedJoinRow(NamedTuple):
    """The join of a partial room, and the state before it."""

    event_nid: int
    state_group_before: int


async def complete(
    database: Database, room_id: RoomId, state: Iterable[EventId], *, server_name: str
) -> bool:
    """Complete the state of a room; return False if it is not partial.

    ``state``: the ids of the whole state before the join, of stored events; ids of events that are
    not stored, or rejected, are left out. ``server_name``: its users are local. Raise
    `UnknownRoom`, or `StorageCorrupt` if an event cannot be stored again: nothing has changed then.
    """
    wanted = list(state)

    async def work(conn: Connection) -> bool:
        room_nid = await lock_room(conn, room_id)
        join = await conn.fetchrow(SQL_MARK, room_nid, row=MarkedJoinRow)
        if join is None:
            return False
        room = await read_room(conn, room_id, server_name)
        await _complete(conn, room, join, wanted, database.config.forward_extremities_max)
        return True

    await register_writer(database)
    return await database.run(work)


async def _complete(
    conn: Connection,
    room: VerifiedRoom,
    join: MarkedJoinRow,
    wanted: list[EventId],
    extremities_max: int,
) -> None:
    state = await conn.fetchvals(SQL_WHOLE_STATE, room.nid, join.state_group_before, wanted)
    again = await replayed(
        conn, room.nid, room.row.room_version, join.event_nid, list(map(EventId, state))
    )
    known = await known_to_readers(conn, room.nid, [row.event_nid for row in again.rows])
    await _take_out(conn, room, again)
    await append_again(conn, again.removed, room.server_name, extremities_max=extremities_max)
    await repair_superseded(conn, room.nid)
    await repair_state_tables(conn, room.nid, room.server_name)
    await put_back(conn, room.nid, known)
    users = await publish(conn, room.nid, join.event_nid, known)
    await invalidate_caches(conn, "events")
    await invalidate_caches(conn, CURRENT_STATE, [room.row.room_id, *users])


async def _take_out(conn: Connection, room: VerifiedRoom, again: EventsToReplay) -> None:
    """Take the events out of the room, and rebuild what is derived of the others.

    An event of an earlier stay may have one of them in its state: that one becomes an outlier.
    """
    nids = [row.event_nid for row in again.rows]
    kept = again.with_auth_events(await conn.fetchvals(SQL_IN_STATES, room.nid, nids))
    gone = [nid for nid in nids if nid not in kept]
    await delete(conn, room.nid, gone, gone)
    await conn.execute(SQL_MAKE_OUTLIERS, room.nid, list(kept))
    await conn.execute(SQL_TAKE_OUT, room.nid, nids)
    await repair_gaps(conn, room)
    await repair_redactions(conn, room)
    ends = await repair_extremities(conn, room.nid)
    planner = await RepairPlanner.of(conn, room.row.room_id, room.server_name, room.states)
    await repair_current(conn, planner, room.states, ends)
    await repair_entries(conn, room.nid)
    await drop_groups(conn, room.nid)
    await replay(conn, room.row.room_id, room.server_name, RoomStates())
