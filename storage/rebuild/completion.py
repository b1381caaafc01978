"""Complete the state of a partial room: plan it again, on the whole state before its join.

A server may join a room with the members omitted (MSC3706). The mark of such a room is set before
its join is stored (storage/persist/partial_marks.py), and the planner adds the members that events
cite (storage/persist/plan/partial_state.py). Before the completion, the missing members are stored
as outliers, in transactions of their own; a process that is killed leaves outliers, and the mark of
the room stays. The completion is a rebuild of the room without its mark, where the whole state is
the one before the join. So the tables are those of a join with the whole state.

The members are those of the fetched state. All other entries are those of the first answer.

Events keep their positions in the stream, and the state deltas that were written for them stay.
Then a token from before the completion is still right. The difference between the current state
before and after is written as state deltas at one new position. So a sync from before gets all of
it once. An event that is accepted only now has a new position: clients get it like any new event.

An event that the whole state does not allow is rejected now, and clients that have it keep it until
they load the room again. That is an event of a sender whom the whole state has banned, for example:
a partial state cannot know it.
"""

from collections.abc import Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.placeholders import transposed
from storage.ids import EventId, UserId
from storage.rebuild.arrivals import RebuiltRoom
from storage.streams.caches import CURRENT_STATE
from storage.streams.invalidate_caches import INSTANCE_NAME, invalidate_caches

SQL_MARK: Final[LiteralString] = """
SELECT e.event_nid, p.join_event_id, e.state_group_before
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

SQL_CURRENT: Final[LiteralString] = """
SELECT state_key_nid, event_nid
FROM current_state
WHERE room_nid = $1::int
"""

SQL_MEMBERSHIPS: Final[LiteralString] = """
SELECT principal_nid, stream_ordering, event_nid, writer_nid, membership, forgotten
FROM memberships
WHERE room_nid = $1::int
"""

SQL_UNMARK: Final[LiteralString] = """
WITH mark AS (DELETE FROM partial_rooms WHERE room_nid = $1::int)
UPDATE rooms
SET is_partial = false
WHERE room_nid = $1::int
"""

SQL_PUBLISH: Final[LiteralString] = """
WITH
fact AS MATERIALIZED (
    SELECT nextval('events_stream') AS stream_id, w.writer_nid
    FROM writers w
    WHERE w.instance_name = $2::text
),
delta AS (
    INSERT INTO state_deltas (stream_ordering, event_nid, prev_event_nid, room_nid, state_key_nid,
        writer_nid)
    SELECT f.stream_id, c.event_nid, o.event_nid, $1::int, state_key_nid, f.writer_nid
    FROM fact f
    CROSS JOIN (
        (SELECT state_key_nid, event_nid FROM current_state WHERE room_nid = $1::int) AS c
        FULL JOIN unnest($4::int[], $5::bigint[]) AS o (state_key_nid, event_nid)
            USING (state_key_nid)
    )
    WHERE c.event_nid IS DISTINCT FROM o.event_nid
),
published AS (  -- the fact of the stream: it wakes the syncs of the room
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT stream_id, $3::bigint, writer_nid
    FROM fact
),
room AS (
    UPDATE rooms
    SET last_stream_ordering = fact.stream_id,
        completed_at = fact.stream_id
    FROM fact
    WHERE room_nid = $1::int
),
set_position AS (
    UPDATE stream_positions p
    SET stream_id = GREATEST(p.stream_id, fact.stream_id)
    FROM fact
    WHERE p.stream_name = 'events' AND p.instance_name = $2::text
)
SELECT stream_id
FROM fact
"""

SQL_SET_MEMBERSHIPS: Final[LiteralString] = """
WITH
old AS MATERIALIZED (
    SELECT *
    FROM unnest($4::int[], $5::bigint[], $6::bigint[], $7::smallint[], $8::smallint[],
        $9::boolean[])
        AS i (principal_nid, stream_ordering, event_nid, writer_nid, membership, forgotten)
),
writer AS (
    SELECT writer_nid FROM writers WHERE instance_name = $3::text
),
kept AS (
    UPDATE memberships m
    SET stream_ordering = o.stream_ordering,
        writer_nid = o.writer_nid,
        forgotten = o.forgotten
    FROM old o
    WHERE m.room_nid = $1::int AND m.principal_nid = o.principal_nid
        AND (m.event_nid, m.membership) = (o.event_nid, o.membership)
    RETURNING m.principal_nid
),
changed AS (
    UPDATE memberships m
    SET stream_ordering = $2::bigint,
        writer_nid = writer.writer_nid
    FROM writer
    WHERE m.room_nid = $1::int AND NOT EXISTS (SELECT FROM old o
        WHERE o.principal_nid = m.principal_nid
            AND (m.event_nid, m.membership) = (o.event_nid, o.membership))
    RETURNING m.principal_nid
),
ended AS (
    INSERT INTO memberships (stream_ordering, event_nid, principal_nid, room_nid, writer_nid,
        membership, forgotten)
    SELECT CASE WHEN o.event_nid = 0 THEN o.stream_ordering ELSE $2::bigint END, 0,
        o.principal_nid, $1::int, writer.writer_nid, 0, false
    FROM old o
    CROSS JOIN writer
    WHERE NOT EXISTS (SELECT FROM memberships m
        WHERE m.room_nid = $1::int AND m.principal_nid = o.principal_nid)
    RETURNING principal_nid
)
SELECT p.name
FROM (SELECT principal_nid FROM changed UNION SELECT principal_nid FROM ended) AS c
JOIN principals p USING (principal_nid)
"""


class EntryBeforeRow(NamedTuple):
    """An entry of the current state."""

    state_key_nid: int
    event_nid: int


class MembershipBeforeRow(NamedTuple):
    """The membership of a local user."""

    principal_nid: int
    stream_ordering: int
    event_nid: int
    writer_nid: int
    membership: int
    forgotten: bool


class KnownToReaders(NamedTuple):
    """The state of a room before a completion, as readers know it."""

    current: Mapping[int, int]
    memberships: Sequence[MembershipBeforeRow]


class PartialMarkRow(NamedTuple):
    """The join by which a room is partial, and the state before it."""

    event_nid: int
    join_event_id: str
    state_group_before: int


class Completion(NamedTuple):
    """The whole state before the join of a partial room."""

    join_nid: int
    given: Mapping[str, tuple[EventId, ...]]


async def completion_of(
    conn: Connection, room_nid: int, join: PartialMarkRow, state: Sequence[EventId]
) -> Completion:
    """Return the input of the rebuild; ``state`` has the members before the join."""
    ids = await conn.fetchvals(SQL_WHOLE_STATE, room_nid, join.state_group_before, list(state))
    return Completion(join.event_nid, {join.join_event_id: tuple(map(EventId, ids))})


async def known_to_readers(conn: Connection, room_nid: int) -> KnownToReaders:
    """Return what `end_of_completion` compares with; the room is locked and unchanged."""
    return KnownToReaders(
        dict(await conn.fetch(SQL_CURRENT, room_nid, row=EntryBeforeRow)),
        await conn.fetch(SQL_MEMBERSHIPS, room_nid, row=MembershipBeforeRow),
    )


async def end_of_completion(
    conn: Connection, room: RebuiltRoom, completion: Completion, known: KnownToReaders
) -> None:
    """Remove the mark of a room that was planned again, and publish its changes."""
    await conn.execute(SQL_UNMARK, room.room_nid)
    users = await publish(conn, room.room_nid, completion.join_nid, known)
    await invalidate_caches(conn, "events")
    await invalidate_caches(conn, CURRENT_STATE, [room.room_id, *users])


async def publish(
    conn: Connection, room_nid: int, join_nid: int, known: KnownToReaders
) -> list[UserId]:
    """Write the difference of the current state at a new position.

    Return the local users whose membership changed.
    """
    position = await conn.fetchval(
        SQL_PUBLISH,
        room_nid,
        INSTANCE_NAME,
        join_nid,
        list(known.current),
        list(known.current.values()),
    )
    names = await conn.fetchvals(
        SQL_SET_MEMBERSHIPS,
        room_nid,
        position,
        INSTANCE_NAME,
        *transposed(known.memberships, 6),
    )
    return [UserId(name) for name in names]
