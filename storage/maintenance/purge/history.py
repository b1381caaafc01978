"""Purge the history of a room in batches, from the cut downwards.

Each batch is a transaction that locks the room.

  deleted      messages, and rejected events that are no state
  set aside    state events and redactions: outliers until the end of the purge, and for as long
               as anything needs them (sweep.py); events of local users, unless the job takes them
  staying      forward extremities; events that the job does not take (references.py); until the
               end of the purge also rejected state events, redactions of an event that stays, and
               events that a rejected event cites

A batch is read before the room is locked. Its events do not change while the job runs, except that
events may be reordered upwards; then everything is looked up again. Its rows are deleted before the
room is locked, too, as that is most of the work. The lock is held only to check that no relevant
event has arrived and to write what refers to the rows. If one has arrived, or a writer wants one of
the rows, the batch is done again with the room locked first. In the second case each would wait for
the other, so the purge gives way. Writers keep their plans under this lock, except for plans that
depend on removed events.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, LiteralString

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection, Database
from storage.database.names import TYPE_REDACTION
from storage.database.placeholders import compose
from storage.errors import DatabaseConflict, DatabaseUnavailable
from storage.maintenance.purge.cut_point import CutPoint, PurgedRoomRow
from storage.maintenance.purge.job import PurgeJob, PurgeThrottle, count
from storage.maintenance.purge.references import (
    References,
    ReorderedMeanwhile,
    RoomOrderVersion,
    keeping,
    stand_of,
)
from storage.maintenance.purge.removal import PurgedEventRow, Removal, follow, take
from storage.persist.room_lock import lock_room_keeping_plans
from storage.streams.invalidate_caches import publish_removed

SQL_BELOW: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.event_id, e.topological_ordering, e.stream_ordering, e.type_nid,
    e.state_key_nid IS NOT NULL AS is_state,
    e.rejected IS NOT NULL AS is_rejected, e.soft_failed, e.ineffective, e.backfilled, s.local,
        :prev_nids.call(e) AS prev_events
FROM (
    SELECT *
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
        AND (topological_ordering, stream_ordering) < ($2::bigint, $3::bigint)
    ORDER BY topological_ordering DESC, stream_ordering DESC
    LIMIT $4::bigint
) AS e
CROSS JOIN LATERAL (
    SELECT substr(p.name, strpos(p.name, ':') + 1) = $5::text AS local
    FROM principals p
    WHERE p.principal_nid = e.sender_nid
    OFFSET 0
) AS s
ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
""",
    PREV_NIDS,
).sql

SQL_TAKEN: Final[LiteralString] = """
SELECT count(*) FILTER (WHERE e.taken) AS taken, count(*) AS examined,
    (array_agg(e.topological_ordering
        ORDER BY e.topological_ordering, e.stream_ordering))[1] AS topological_ordering,
    (array_agg(e.stream_ordering
        ORDER BY e.topological_ordering, e.stream_ordering))[1] AS stream_ordering
FROM (
    SELECT e.topological_ordering, e.stream_ordering,
        e.stream_ordering <= CASE WHEN e.backfilled THEN $4::bigint ELSE $5::bigint END
            AND e.event_nid <> ALL ((SELECT r.forward_extremities FROM rooms r
                WHERE r.room_nid = $1::int)::bigint[]) AS taken
    FROM events e
    WHERE e.room_nid = $1::int AND NOT e.outlier
        AND (e.topological_ordering, e.stream_ordering) < ($2::bigint, $3::bigint)
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $6::bigint
) AS e
"""

SQL_WAIT_SHORTLY: Final[LiteralString] = "SET LOCAL lock_timeout = '200ms'"


class Overtaken(Exception):  # noqa: N818  # control flow, not an error
    """A relevant event has arrived since the batch was read."""


@dataclass(frozen=True, slots=True)
class PurgeContext:
    """A purge under way: its database and room, the local server, and its throttle."""

    database: Database
    room: PurgedRoomRow
    server_name: str
    pace: PurgeThrottle


async def purge_below(
    context: PurgeContext, job: PurgeJob, cut: CutPoint
) -> tuple[PurgeJob, References]:
    """Remove the events below the cut from the timeline.

    Return the job as it is then, and the references by which events stayed.
    """
    while True:
        kept = await keeping(
            context.database, job.room_id, context.room.room_version, cut, job.arrived_upto
        )
        try:
            return await _walk(context, job, kept), kept
        except ReorderedMeanwhile:
            continue


async def _walk(context: PurgeContext, job: PurgeJob, kept: References) -> PurgeJob:
    at = (kept.cut.topological, -1)
    while True:
        async with context.database.connection() as conn:
            rows = await conn.fetch(
                SQL_BELOW,
                job.room_nid,
                *at,
                context.pace.batch,
                context.server_name,
                row=PurgedEventRow,
            )
        if not rows:
            return job
        job = await _take(context, job, kept, rows)
        at = (rows[-1].topological_ordering, rows[-1].stream_ordering)
        await context.pace.rest(job)


async def _take(
    context: PurgeContext, job: PurgeJob, kept: References, rows: Sequence[PurgedEventRow]
) -> PurgeJob:
    with context.pace.measured():
        try:
            async with context.database.transaction() as conn:
                job, kept.position = await _delete_then_lock(conn, context, job, kept, rows)
        except (Overtaken, DatabaseConflict, DatabaseUnavailable):
            job, kept.position = await context.database.run(
                lambda conn: _lock_then_delete(conn, context, job, kept, rows)
            )
    return job


async def _delete_then_lock(
    conn: Connection,
    context: PurgeContext,
    job: PurgeJob,
    kept: References,
    rows: Sequence[PurgedEventRow],
) -> tuple[PurgeJob, int]:
    """Delete the rows first, then lock the room. Raise `Overtaken`."""
    await conn.execute(SQL_WAIT_SHORTLY)
    expected = _sorted(await stand_of(conn, job.room_nid), job, kept, rows)
    await take(conn, job.room_nid, expected)
    counted = await count(conn, job, deleted=len(expected.deleted), outliers=len(expected.outliers))
    await lock_room_keeping_plans(conn, job.room_id)
    context.pace.locked()
    stand = await kept.since(conn)
    removal = _sorted(stand, job, kept, rows)
    if removal != expected:
        raise Overtaken
    await _follow(conn, job, kept, removal)
    return counted, stand.position


async def _lock_then_delete(
    conn: Connection,
    context: PurgeContext,
    job: PurgeJob,
    kept: References,
    rows: Sequence[PurgedEventRow],
) -> tuple[PurgeJob, int]:
    """Lock the room first, so that no event can arrive in between."""
    await lock_room_keeping_plans(conn, job.room_id)
    context.pace.locked()
    stand = await kept.since(conn)
    removal = _sorted(stand, job, kept, rows)
    await take(conn, job.room_nid, removal)
    counted = await count(conn, job, deleted=len(removal.deleted), outliers=len(removal.outliers))
    await _follow(conn, job, kept, removal)
    return counted, stand.position


async def _follow(conn: Connection, job: PurgeJob, kept: References, removal: Removal) -> None:
    if removed_ids := await follow(conn, kept, removal):
        await publish_removed(conn, job.room_id, "timeline", removed_ids)


def _sorted(
    stand: RoomOrderVersion, job: PurgeJob, kept: References, rows: Sequence[PurgedEventRow]
) -> Removal:
    """Return which of these events are deleted, set aside, or stay."""
    removal = Removal()
    for row in rows:
        if (
            kept.stays(row.topological_ordering, row.stream_ordering, backfilled=row.backfilled)
            or row.event_nid in stand.forward_extremities
        ):
            _stay(removal, row, is_extremity=row.event_nid not in stand.forward_extremities)
        elif row.stream_ordering == stand.last_stream_ordering:
            _stay(removal, row, is_extremity=True)
        elif (row.is_rejected and row.is_state) or (
            row.event_nid in kept.referred and (not row.is_state or row.type_nid == TYPE_REDACTION)
        ):
            _stay(removal, row, is_extremity=True)
            removal.retained[row.event_nid] = row.local
        elif row.is_rejected:
            removal.deleted.append(row)
        elif row.is_state or _takes_effect(row) or (row.local and not job.local):
            removal.outliers.append(row)
            removal.retained[row.event_nid] = row.local
        else:
            removal.deleted.append(row)
    return removal


def _stay(removal: Removal, row: PurgedEventRow, *, is_extremity: bool) -> None:
    removal.staying.append(row)
    if is_extremity and not (row.is_rejected or row.soft_failed or row.backfilled):
        removal.extremities.append(row.event_nid)


def _takes_effect(row: PurgedEventRow) -> bool:
    """Return whether an event may have redacted something."""
    return row.type_nid == TYPE_REDACTION and not (row.ineffective or row.soft_failed)
