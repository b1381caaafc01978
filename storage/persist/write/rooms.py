"""The parts of the write that lock the rooms, give the positions, and write the rows of `rooms`."""

from typing import Final, LiteralString

from storage.database.columns import REORDERED_EVENTS, ROOMS
from storage.database.placeholders import ColumnValues, InputRows, by_column
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.row_changes import RoomChanges
from storage.visibility import multirange

LOCKED: Final = InputRows.own("lock", room_nid="int")
PLACED: Final = InputRows.own(
    "placed", event_nid="bigint", room_nid="int", backfilled="boolean", event_id="text"
)
NEW_ROOM: Final = ROOMS.rows(
    "new_room",
    ROOMS.but(
        "write_version",
        "last_stream_ordering",
        "moves",
        "removals",
        "joined_count",
        "invited_count",
        "is_partial",
        "completed_at",
    ),
)
OLD_ROOM: Final = ROOMS.rows(
    "old_room",
    ROOMS.but(
        "last_stream_ordering",
        "moves",
        "joined_count",
        "invited_count",
        "room_id",
        "room_version",
        "is_partial",
        "completed_at",
    ),
)
REORDERED: Final = REORDERED_EVENTS.rows("reordered", REORDERED_EVENTS.but("moves"))
ROOM_INPUTS: Final = (LOCKED, PLACED, NEW_ROOM, OLD_ROOM, REORDERED)

PART_LOCKED: Final[LiteralString] = """
locked AS MATERIALIZED (  -- in a fixed order, so that two writers never wait for each other
    SELECT room_nid, pg_advisory_xact_lock(1919905645, room_nid)
    FROM (SELECT unnest(:lock.room_nid) AS room_nid ORDER BY 1) AS ordered
)"""

PART_POSITIONED: Final[LiteralString] = """
positioned AS MATERIALIZED (  -- after the locks, as late as can be
    SELECT input.event_nid, input.room_nid, input.backfilled,
        nextval('events_stream') AS stream_ordering
    FROM (
        SELECT event_nid, room_nid, backfilled
        FROM :placed.ordered(event_nid, room_nid, backfilled) AS i
        WHERE (SELECT count(*) FROM locked) >= 0
        ORDER BY ordinal
    ) AS input
)"""

PART_ROOMS: Final[LiteralString] = """
counted AS (  -- how the members of the current states change in number
    SELECT i.room_nid,
        (count(*) FILTER (WHERE i.membership = 5)
            - count(*) FILTER (WHERE c.membership = 5))::int AS joined,
        (count(*) FILTER (WHERE i.membership = 4)
            - count(*) FILTER (WHERE c.membership = 4))::int AS invited
    FROM (
        SELECT i.room_nid, i.state_key_nid, i.membership
        FROM :set_state.rows(room_nid, state_key_nid, membership) AS i
        UNION ALL
        SELECT i.*, NULL FROM :removed_state.rows AS i
    ) AS i
    LEFT JOIN LATERAL (
        SELECT membership FROM current_state
        WHERE room_nid = i.room_nid AND state_key_nid = i.state_key_nid
        OFFSET 0
    ) AS c ON true
    GROUP BY i.room_nid
),
new_room AS (
    INSERT INTO rooms (:new_room.columns, write_version, last_stream_ordering, joined_count,
        invited_count)
    SELECT :new_room.values, 1,
        (SELECT max(p.stream_ordering) FROM positioned p
            WHERE p.room_nid = i.room_nid AND NOT p.backfilled),
        COALESCE((SELECT c.joined FROM counted c WHERE c.room_nid = i.room_nid), 0),
        COALESCE((SELECT c.invited FROM counted c WHERE c.room_nid = i.room_nid), 0)
    FROM :new_room.rows AS i
    RETURNING room_nid
),
old_room AS (  -- the compare-and-set
    UPDATE rooms r
    SET write_version = r.write_version + 1,
        next_audience = i.next_audience,
        current_state_group = i.current_state_group,
        last_stream_ordering = COALESCE(
            (SELECT max(p.stream_ordering) FROM positioned p
                WHERE p.room_nid = i.room_nid AND NOT p.backfilled),
            r.last_stream_ordering
        ),
        max_topological_ordering = i.max_topological_ordering,
        forward_extremities = i.forward_extremities::bigint[],
        current_audience = i.current_audience,
        out_of_range = i.out_of_range::int8multirange,
        in_order_ts = i.in_order_ts,
        joined_count = r.joined_count
            + COALESCE((SELECT c.joined FROM counted c WHERE c.room_nid = i.room_nid), 0),
        invited_count = r.invited_count
            + COALESCE((SELECT c.invited FROM counted c WHERE c.room_nid = i.room_nid), 0),
        moves = r.moves + (i.room_nid = ANY(:reordered.room_nid))::int
    FROM :old_room.rows AS i
    JOIN locked USING (room_nid)
    WHERE r.room_nid = i.room_nid AND r.write_version = i.write_version
    RETURNING r.room_nid, r.moves, r.removals <> i.removals AS has_lost
),
reordered_event AS (
    INSERT INTO reordered_events (:reordered.columns, moves)
    SELECT :reordered.values, r.moves
    FROM :reordered.rows AS i
    JOIN old_room r USING (room_nid)
)"""


def room_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    """Return the rooms, the events that take positions, and those that a new order moved."""
    changed = [room for room in change_set.rooms.room_changes.values() if room.changed]
    placed = map(change_set.events.row_of, change_set.events.placed)
    return {
        "lock": {"room_nid": [room.row.room_nid for room in changed]},
        "placed": by_column(
            ("event_nid", "event_id", "room_nid", "backfilled"),
            ((row.event_nid, row.event_id, row.room_nid, row.backfilled) for row in placed),
        ),
        "new_room": _new_rooms([room for room in changed if not room.row.write_version]),
        "old_room": _old_rooms([room for room in changed if room.row.write_version]),
        "reordered": by_column(
            ("event_nid", "room_nid", "topological_before"),
            ((nid, *where) for nid, where in change_set.events.moved.items()),
        ),
    }


def _new_rooms(rooms: list[RoomChanges]) -> ColumnValues:
    if not rooms:
        return {}
    return _planned(rooms) | {
        "room_id": [room.row.room_id for room in rooms],
        "room_version": [room.row.room_version for room in rooms],
    }


def _old_rooms(rooms: list[RoomChanges]) -> ColumnValues:
    if not rooms:
        return {}
    return _planned(rooms) | {
        "write_version": [room.row.write_version for room in rooms],
        "removals": [room.row.removals for room in rooms],
    }


def _planned(rooms: list[RoomChanges]) -> dict[str, list[object]]:
    return {
        "room_nid": [room.row.room_nid for room in rooms],
        "next_audience": [room.next_audience for room in rooms],
        "current_state_group": [room.current for room in rooms],
        "max_topological_ordering": [room.max_order for room in rooms],
        "current_audience": [room.audience for room in rooms],
        "forward_extremities": [list(room.extremities) for room in rooms],
        "out_of_range": [multirange.to_text(room.out_of_range) for room in rooms],
        "in_order_ts": [room.in_order_ts for room in rooms],
    }
