"""The write: one statement that applies a whole change set, or nothing of it.

A change set of one new state event takes a statement with two thirds of the parts, and one of
messages a third one (messages_only.py). `bound` chooses by what a change set has.

It locks the rooms in a fixed order, compares and sets their write versions, and gives the timeline
events their positions. It inserts and changes rows, and advances this writer's positions.

It raises `DatabaseConflict` and changes nothing if a room was written to since the change set was
planned. The same happens if an event that was assumed to be new is known under another nid.

Each part of the statement stands in the file of its tables, with the input rows that it takes.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import EVENT_TYPES, PRINCIPALS, REORDERED_EVENTS, ROOMS, STATE_KEYS
from storage.database.connection import Connection
from storage.database.placeholders import (
    ColumnValues,
    InputRows,
    NumberedStatement,
    by_column,
    compose,
    fill,
)
from storage.database.prepared import prepare_ahead
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import RoomChanges
from storage.persist.write import messages_only
from storage.persist.write.dependencies import (
    DEPENDENCIES,
    Invalidation,
    dependencies_of,
    invalidations,
)
from storage.persist.write.events import (
    EVENT_INPUTS,
    NEW_EVENT,
    PART_CHANGED_EVENTS,
    PART_DROPPED,
    PART_GAPS,
    PART_NEW_EVENT,
    PART_REDACTIONS,
    REDACTION_INPUTS,
    TARGET,
    event_values,
)
from storage.persist.write.state import (
    NEW_CHAIN_POSITION,
    NEW_DELTA,
    NEW_GROUP,
    NEW_LINK,
    OUT_OF_BAND,
    PART_CHAINS,
    PART_MEMBERSHIPS,
    PART_OUT_OF_BAND,
    PART_PAST_VISIBILITY,
    PART_REMOVED_STATE,
    PART_STATE,
    PART_TIMELINE_MEMBERSHIPS,
    PART_VISIBILITY,
    SET_AUDIENCE,
    SET_MEMBERSHIP,
    SET_STATE,
    SET_VISIBILITY,
    STATE_INPUTS,
    VISIBILITY_INPUTS,
    membership_values,
    state_values,
    visibility_values,
)
from storage.persist.write.streams import (
    AUTHOR_INPUTS,
    NEW_INVALIDATION,
    NEW_TRANSACTION,
    PART_INVALIDATIONS,
    PART_TRANSACTIONS,
    TEMPLATE_POSITIONS,
    author_values,
    invalidation_values,
    learn_dictionary,
    transaction_values,
)
from storage.streams.stream_writer import Author
from storage.visibility import multirange

# --------------------------------------------------------------------------------------------------
# The parts of the write that lock the rooms, give the positions, and write the rows of `rooms`.

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
    SELECT room_nid, pg_advisory_xact_lock({LOCK_ROOM}, room_nid)
    FROM (SELECT unnest(:lock.room_nid) AS room_nid ORDER BY 1) AS ordered
),
"""

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
),
"""

TEMPLATE_COUNTED: Final[LiteralString] = """
counted AS (  -- how the members of the current states change in number
    SELECT i.room_nid,
        (count(*) FILTER (WHERE i.membership = {JOIN})
            - count(*) FILTER (WHERE c.membership = {JOIN}))::int AS joined,
        (count(*) FILTER (WHERE i.membership = {INVITE})
            - count(*) FILTER (WHERE c.membership = {INVITE}))::int AS invited
    FROM (
        SELECT i.room_nid, i.state_key_nid, i.membership
        FROM :set_state.rows(room_nid, state_key_nid, membership) AS i
        {removed_state}
    ) AS i
    LEFT JOIN LATERAL (
        SELECT membership FROM current_state
        WHERE room_nid = i.room_nid AND state_key_nid = i.state_key_nid
        OFFSET 0
    ) AS c ON true
    GROUP BY i.room_nid
),
"""

PART_NEW_ROOM: Final[LiteralString] = """
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
"""

TEMPLATE_OLD_ROOM: Final[LiteralString] = """
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
        moves = {moves}
    FROM :old_room.rows AS i
    JOIN locked USING (room_nid)
    WHERE r.room_nid = i.room_nid AND r.write_version = i.write_version
    RETURNING r.room_nid, r.moves, r.removals <> i.removals AS has_lost
),
"""

PART_REORDERED: Final[LiteralString] = """
reordered_event AS (
    INSERT INTO reordered_events (:reordered.columns, moves)
    SELECT :reordered.values, r.moves
    FROM :reordered.rows AS i
    JOIN old_room r USING (room_nid)
),
"""


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
            ((nid, *where) for nid, where in change_set.events.reordered.items()),
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


# --------------------------------------------------------------------------------------------------
# The part of the write that interns new names.

NEW_TYPE: Final = EVENT_TYPES.rows("new_type")
NEW_STATE_KEY: Final = STATE_KEYS.rows("new_state_key")
NEW_PRINCIPAL: Final = PRINCIPALS.rows("new_principal")
NAME_INPUTS: Final = (NEW_TYPE, NEW_STATE_KEY, NEW_PRINCIPAL)

PART_NEW_TYPES: Final[LiteralString] = """
new_type AS (
    INSERT INTO event_types (:new_type.columns)
    SELECT * FROM :new_type.rows AS i
),
"""

PART_NAMES: Final[LiteralString] = """
new_state_key AS (
    INSERT INTO state_keys (:new_state_key.columns)
    SELECT * FROM :new_state_key.rows AS i
),
new_principal AS (
    INSERT INTO principals (:new_principal.columns)
    SELECT * FROM :new_principal.rows AS i
),
"""


def name_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    return {
        "new_type": by_column(("type", "type_nid"), change_set.names.new_types.items()),
        "new_state_key": by_column(
            ("type_nid", "state_key", "state_key_nid"),
            ((*key, nid) for key, nid in change_set.names.new_state_keys.items()),
        ),
        "new_principal": by_column(
            ("name", "principal_nid"), change_set.names.new_principals.items()
        ),
    }


TEMPLATE_RESULT: Final[LiteralString] = """
SELECT p.event_nid, p.stream_ordering, NULL::bigint AS invalidation_id, NULL::int AS writers,
    NULL::bigint AS stale
FROM positioned p
UNION ALL
{taken}
SELECT NULL, NULL, NULL,
    (SELECT count(*)::int FROM stream_positions WHERE stream_name = 'events'),
    CASE
        WHEN (SELECT count(*) FROM old_room) <> cardinality(:old_room.room_nid)
            THEN refuse_stale_plan('rooms')
        WHEN EXISTS (  -- stored before this statement, as its snapshot shows
            SELECT FROM (SELECT unnest(:new_event.event_id) AS id) AS one
            CROSS JOIN LATERAL (SELECT FROM events WHERE event_id = one.id OFFSET 0) AS e
        ) THEN refuse_stale_plan('events')
        WHEN EXISTS (SELECT FROM old_room WHERE has_lost) AND dependencies_purged(
            :dependencies.*,
            :placed.event_id || :new_event.event_id,
            :placed.event_nid || :new_event.event_nid,
            {settled}
        ) THEN refuse_stale_plan('removals')
        WHEN EXISTS ({other_gaps}) THEN refuse_stale_plan('missing_events')
        WHEN EXISTS ({other_waiting}) THEN refuse_stale_plan('waiting_redactions')
        WHEN EXISTS (
            SELECT FROM latest WHERE stream_name NOT IN (SELECT stream_name FROM set_position)
        ) THEN refuse_old_writer(:instance_name)
    END
"""

TEMPLATE_WRITE: Final[LiteralString] = """
WITH
{header}
{locked}
{positioned}
{counted}
{new_rooms}
{old_rooms}
{reordered}
{new_types}
{names}
{new_events}
{changed_events}
{gaps}
{state}
{removed_state}
{out_of_band}
{memberships}
{visibility}
{past_visibility}
{redactions}
{chains}
{dropped}
{transactions}
{invalidations}
{positions}
{result}
"""

PART_REMOVED_MEMBERS: Final[LiteralString] = """
UNION ALL
SELECT i.*, NULL FROM :removed_state.rows AS i
"""

PART_OTHER_POSITIONS: Final[LiteralString] = """
UNION ALL
SELECT 'events', max(stream_id) FROM out_of_band HAVING count(*) > 0
UNION ALL
SELECT 'caches', max(stream_id) FROM new_invalidation HAVING count(*) > 0
"""

PART_OTHER_RESULTS: Final[LiteralString] = """
SELECT o.event_nid, o.stream_id, NULL, NULL, NULL
FROM out_of_band o
UNION ALL
SELECT NULL, NULL, n.stream_id, NULL, NULL
FROM new_invalidation n
UNION ALL
"""

PART_OTHER_GAPS: Final[LiteralString] = """
SELECT event_nid FROM filled_gap EXCEPT SELECT unnest(:filled_gap.event_nid)
"""

PART_OTHER_WAITING: Final[LiteralString] = """
SELECT redaction_nid FROM settled EXCEPT SELECT unnest(:settled.redaction_nid)
"""

PART_GAP_OF_EVENT: Final[LiteralString] = """
SELECT FROM missing_events WHERE event_id = ANY(:placed.event_id)
"""

PART_WAITING_FOR_EVENT: Final[LiteralString] = """
SELECT FROM waiting_redactions w
WHERE w.target_event_id = ANY(:target.event_id)
    AND EXISTS (SELECT FROM :target.rows AS t WHERE t.room_nid = w.room_nid)
"""

WRITE: Final[NumberedStatement] = compose(
    fill(
        TEMPLATE_WRITE,
        header="""
        -- More than 150 lines: all tables of an append in one round trip. Its checks for a stale
        -- plan need the snapshot from before the write.
        """,
        locked=PART_LOCKED,
        positioned=PART_POSITIONED,
        counted=fill(
            TEMPLATE_COUNTED,
            removed_state=PART_REMOVED_MEMBERS,
        ),
        new_rooms=PART_NEW_ROOM,
        old_rooms=fill(
            TEMPLATE_OLD_ROOM,
            moves="r.moves + (i.room_nid = ANY(:reordered.room_nid))::int",
        ),
        reordered=PART_REORDERED,
        new_types=PART_NEW_TYPES,
        names=PART_NAMES,
        new_events=PART_NEW_EVENT,
        changed_events=PART_CHANGED_EVENTS,
        gaps=PART_GAPS,
        state=PART_STATE,
        removed_state=PART_REMOVED_STATE,
        out_of_band=PART_OUT_OF_BAND,
        memberships=PART_MEMBERSHIPS,
        visibility=PART_VISIBILITY,
        past_visibility=PART_PAST_VISIBILITY,
        redactions=PART_REDACTIONS,
        chains=PART_CHAINS,
        dropped=PART_DROPPED,
        transactions=PART_TRANSACTIONS,
        invalidations=PART_INVALIDATIONS,
        positions=fill(
            TEMPLATE_POSITIONS,
            others=PART_OTHER_POSITIONS,
        ),
        result=fill(
            TEMPLATE_RESULT,
            taken=PART_OTHER_RESULTS,
            settled=":settled.redaction_nid",
            other_gaps=PART_OTHER_GAPS,
            other_waiting=PART_OTHER_WAITING,
        ),
    ),
    *AUTHOR_INPUTS,
    *ROOM_INPUTS,
    *NAME_INPUTS,
    *EVENT_INPUTS,
    *STATE_INPUTS,
    SET_MEMBERSHIP,
    OUT_OF_BAND,
    *VISIBILITY_INPUTS,
    *REDACTION_INPUTS,
    NEW_TRANSACTION,
    NEW_INVALIDATION,
    DEPENDENCIES,
)

WRITE_STATE_EVENT: Final[NumberedStatement] = compose(
    fill(
        TEMPLATE_WRITE,
        header="""
        -- More than 150 lines: the parts of the write that one new state event needs.
        """,
        locked=PART_LOCKED,
        positioned=PART_POSITIONED,
        counted=fill(TEMPLATE_COUNTED, removed_state=""),
        new_rooms="",
        old_rooms=fill(TEMPLATE_OLD_ROOM, moves="r.moves"),
        reordered="",
        new_types="",
        names=PART_NAMES,
        new_events=PART_NEW_EVENT,
        changed_events="",
        gaps="",
        state=PART_STATE,
        removed_state="",
        out_of_band="",
        memberships=PART_TIMELINE_MEMBERSHIPS,
        visibility=PART_VISIBILITY,
        past_visibility="",
        redactions="",
        chains=PART_CHAINS,
        dropped="",
        transactions=PART_TRANSACTIONS,
        invalidations="",
        positions=fill(TEMPLATE_POSITIONS, others=""),
        result=fill(
            TEMPLATE_RESULT,
            taken="",
            settled="'{}'",
            other_gaps=PART_GAP_OF_EVENT,
            other_waiting=PART_WAITING_FOR_EVENT,
        ),
    ),
    *AUTHOR_INPUTS,
    *(
        rows.one_row()
        for rows in (
            LOCKED,
            PLACED,
            OLD_ROOM,
            NEW_EVENT,
            NEW_GROUP,
            SET_STATE,
            NEW_DELTA,
            NEW_CHAIN_POSITION,
            TARGET,
        )
    ),
    NEW_STATE_KEY,
    NEW_PRINCIPAL,
    NEW_LINK,
    SET_MEMBERSHIP,
    SET_VISIBILITY,
    SET_AUDIENCE,
    NEW_TRANSACTION,
    DEPENDENCIES,
)
"""The same for one new state event, such as a join: most values are parameters of their own."""
SQL_WRITE: Final[LiteralString] = WRITE.sql
SQL_WRITE_STATE_EVENT: Final[LiteralString] = WRITE_STATE_EVENT.sql
prepare_ahead(SQL_WRITE, SQL_WRITE_STATE_EVENT, writes=True)


class TakenPositionRow(NamedTuple):
    """The position that an event or an invalidation took, or the last row.

    The last row has only ``writers``, the number of writers of the stream "events".
    """

    event_nid: int | None
    stream_ordering: int | None
    invalidation_id: int | None
    writers: int | None
    stale: int | None


class WriteResult(NamedTuple):
    """The position of each event that took one, by nid (that of an outlier is of its membership).

    ``writers``: the number of writers of the stream "events"; ``invalidations``: the facts of the
    stream "caches", with their positions.
    """

    positions: dict[int, int]
    writers: int
    invalidations: Sequence[tuple[int, list[object]]] = ()


async def write(
    conn: Connection, change_set: ChangeSet, author: Author, received_ts: int
) -> WriteResult:
    await learn_dictionary(conn, change_set.caches)
    if messages_only.has_messages_only(change_set):
        statement = messages_only.statement_for(change_set)
        rows = await conn.fetch(
            statement.sql,
            *messages_only.arguments(statement, change_set, author, received_ts),
            row=messages_only.MessagePositionRow,
        )
        return WriteResult({row.event_nid: row.stream_ordering for row in rows}, rows[0].writers)
    return await _write_all(conn, change_set, author, received_ts)


async def write_around(
    conn: Connection, change_set: ChangeSet, author: Author, received_ts: int
) -> WriteResult:
    """Apply the change set without the rows of its new events.

    The caller inserts these in the same transaction, at the positions returned here. This is for
    rooms that begin in this transaction: nobody has seen an event that is reordered in it, so no
    reordering is stored.
    """
    await learn_dictionary(conn, change_set.caches)
    new_events, change_set.events.new_events = change_set.events.new_events, {}
    change_set.events.reordered.clear()
    try:
        return await _write_all(conn, change_set, author, received_ts)
    finally:
        change_set.events.new_events = new_events


async def _write_all(
    conn: Connection, change_set: ChangeSet, author: Author, received_ts: int
) -> WriteResult:
    invalidated = invalidations(change_set)
    statement, arguments = bound(change_set, author, received_ts, invalidated)
    rows = await conn.fetch(statement, *arguments, row=TakenPositionRow)
    ids = sorted(row.invalidation_id for row in rows if row.invalidation_id is not None)
    stream_rows = [
        (stream_id, [invalidation.cache_name, list(invalidation.keys), received_ts])
        for stream_id, invalidation in zip(ids, invalidated, strict=True)
    ]
    return WriteResult(_positions(rows), max(row.writers or 0 for row in rows), stream_rows)


def _positions(rows: Sequence[TakenPositionRow]) -> dict[int, int]:
    return {
        row.event_nid: row.stream_ordering
        for row in rows
        if row.event_nid is not None and row.stream_ordering is not None
    }


def bound(
    change_set: ChangeSet, author: Author, received_ts: int, invalidated: Sequence[Invalidation]
) -> tuple[LiteralString, list[object]]:
    """Return the smallest statement that takes this change set, with its arguments."""
    values: dict[str, object] = {
        **author_values(author, received_ts),
        **room_values(change_set),
        **name_values(change_set),
        **event_values(change_set),
        **state_values(change_set),
        **membership_values(change_set),
        **visibility_values(change_set),
        **transaction_values(change_set),
        **invalidation_values(invalidated),
        "dependencies": dependencies_of(change_set)._asdict(),
    }
    if WRITE_STATE_EVENT.takes(values):
        part = {name: values[name] for name in WRITE_STATE_EVENT.binders}
        return SQL_WRITE_STATE_EVENT, WRITE_STATE_EVENT.bind(part)
    return SQL_WRITE, WRITE.bind(values)
