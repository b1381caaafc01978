"""The write: one statement that applies a whole change set, or nothing of it.

It locks the rooms in a fixed order, compares and sets their write versions, and gives the timeline
events their positions. It inserts and changes rows, and advances this writer's positions.

It raises `DatabaseConflict` and changes nothing if a room was written to since the change set was
planned. The same happens if an event that was assumed to be new is known under another nid.

Each part of the statement stands in the file of its tables, with the input rows that it takes.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.placeholders import NumberedStatement, compose
from storage.database.prepared import prepare_ahead
from storage.database.sql_template import fill
from storage.persist.model.change_set import ChangeSet
from storage.persist.write import messages_only
from storage.persist.write.dependencies import DEPENDENCIES, dependencies_of
from storage.persist.write.events import (
    EVENT_INPUTS,
    PART_DROPPED,
    PART_EVENTS,
    PART_REDACTIONS,
    REDACTION_INPUTS,
    event_values,
)
from storage.persist.write.invalidations import Invalidation, invalidations
from storage.persist.write.memberships import (
    MEMBERSHIP_INPUTS,
    PART_MEMBERSHIPS,
    membership_values,
)
from storage.persist.write.names import NAME_INPUTS, PART_NAMES, name_values
from storage.persist.write.rooms import (
    PART_LOCKED,
    PART_POSITIONED,
    PART_ROOMS,
    ROOM_INPUTS,
    room_values,
)
from storage.persist.write.state import PART_CHAINS, PART_STATE, STATE_INPUTS, state_values
from storage.persist.write.stored_form import learn_dictionary
from storage.persist.write.streams import (
    AUTHOR_INPUTS,
    NEW_INVALIDATION,
    PART_STREAMS,
    author_values,
    invalidation_values,
)
from storage.persist.write.transactions import (
    NEW_TRANSACTION,
    PART_TRANSACTIONS,
    transaction_values,
)
from storage.persist.write.visibility import (
    PART_VISIBILITY,
    VISIBILITY_INPUTS,
    visibility_values,
)
from storage.streams.in_flight import Author

PART_RESULT: Final[LiteralString] = """
SELECT p.event_nid, p.stream_ordering, NULL::bigint AS invalidation_id, NULL::int AS writers,
    NULL::bigint AS stale
FROM positioned p
UNION ALL
SELECT o.event_nid, o.stream_id, NULL, NULL, NULL
FROM out_of_band o
UNION ALL
SELECT NULL, NULL, n.stream_id, NULL, NULL
FROM new_invalidation n
UNION ALL
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
            :settled.redaction_nid
        ) THEN refuse_stale_plan('removals')
        WHEN EXISTS (
            SELECT event_nid FROM filled_gap EXCEPT SELECT unnest(:filled_gap.event_nid)
        ) THEN refuse_stale_plan('missing_events')
        WHEN EXISTS (
            SELECT redaction_nid FROM settled EXCEPT SELECT unnest(:settled.redaction_nid)
        ) THEN refuse_stale_plan('waiting_redactions')
        WHEN EXISTS (
            SELECT FROM latest WHERE stream_name NOT IN (SELECT stream_name FROM set_position)
        ) THEN refuse_old_writer(:instance_name)
    END
"""

TEMPLATE_WRITE: Final[LiteralString] = """
WITH
{locked},
{positioned},
{rooms},
{names},
{events},
{state},
{memberships},
{visibility},
{redactions},
{chains},
{dropped},
{transactions},
{streams}
{result}
"""

WRITE: Final[NumberedStatement] = compose(
    fill(
        TEMPLATE_WRITE,
        locked=PART_LOCKED,
        positioned=PART_POSITIONED,
        rooms=PART_ROOMS,
        names=PART_NAMES,
        events=PART_EVENTS,
        state=PART_STATE,
        memberships=PART_MEMBERSHIPS,
        visibility=PART_VISIBILITY,
        redactions=PART_REDACTIONS,
        chains=PART_CHAINS,
        dropped=PART_DROPPED,
        transactions=PART_TRANSACTIONS,
        streams=PART_STREAMS,
        result=PART_RESULT,
    ),
    *AUTHOR_INPUTS,
    *ROOM_INPUTS,
    *NAME_INPUTS,
    *EVENT_INPUTS,
    *STATE_INPUTS,
    *MEMBERSHIP_INPUTS,
    *VISIBILITY_INPUTS,
    *REDACTION_INPUTS,
    NEW_TRANSACTION,
    NEW_INVALIDATION,
    DEPENDENCIES,
)
SQL_WRITE: Final[LiteralString] = WRITE.sql
prepare_ahead(SQL_WRITE, writes=True)


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
    change_set.events.moved.clear()
    try:
        return await _write_all(conn, change_set, author, received_ts)
    finally:
        change_set.events.new_events = new_events


async def _write_all(
    conn: Connection, change_set: ChangeSet, author: Author, received_ts: int
) -> WriteResult:
    invalidated = invalidations(change_set)
    rows = await conn.fetch(
        SQL_WRITE, *arguments(change_set, author, received_ts, invalidated), row=TakenPositionRow
    )
    ids = sorted(row.invalidation_id for row in rows if row.invalidation_id is not None)
    facts = [
        (stream_id, [one.cache_name, list(one.keys), received_ts])
        for stream_id, one in zip(ids, invalidated, strict=True)
    ]
    return WriteResult(_positions(rows), max(row.writers or 0 for row in rows), facts)


def _positions(rows: Sequence[TakenPositionRow]) -> dict[int, int]:
    return {
        row.event_nid: row.stream_ordering
        for row in rows
        if row.event_nid is not None and row.stream_ordering is not None
    }


def arguments(
    change_set: ChangeSet, author: Author, received_ts: int, invalidated: Sequence[Invalidation]
) -> list[object]:
    return WRITE.bind(
        {
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
    )
