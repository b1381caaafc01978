"""Add a change set to the caches when it is sent, and publish it to the streams once committed."""

import logging
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, LiteralString, TypeVar

from storage.database.connection import Connection
from storage.database.deployment import TOLERANCE_MS, now_ms
from storage.errors import DatabaseConflict
from storage.event.model import Event
from storage.event.reading import for_auth_checks, interned_ids, without_json
from storage.ids import intern
from storage.observability.counters import Measures
from storage.persist.model.cache_view import EventView
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import AnyEvent, IncomingEvent
from storage.persist.model.resolution_records import newest
from storage.persist.model.results import AppendResult
from storage.persist.model.rows import CheckedLike, EventRow, RoomRow
from storage.persist.write.all_tables import WriteResult
from storage.streams.feed import StreamRow
from storage.streams.registry import Streams

K = TypeVar("K", bound=Hashable)


def absorb(caches: WriterCaches, change_set: ChangeSet) -> None:
    """Add a change set to the caches, before or after the commit."""
    placed = change_set.events.placed  # they have no position yet, or take another
    rows = [
        row if row.event_nid in placed else _with_stream_position(caches, row)
        for row in change_set.events.rows.values()
        if row is not None
    ]
    caches.trim()  # trim first: rows of the change set must stay until the commit
    for row in rows:
        caches.add_row(row)
    for nid, event in change_set.events.parsed.items():
        if event.state_key is not None:
            caches.events[nid] = _kept(change_set.events, event)
    caches.groups.keep(change_set.states.groups)
    caches.visibility.keep_all(change_set.visibility.current)
    caches.audiences.keep_all(change_set.visibility.audiences)
    caches.counts.update(change_set.states.counts)
    caches.places.keep_all(change_set.auth_graph.places)
    caches.chains.update(
        (nid, chain.numbers()) for nid, chain in change_set.auth_graph.chains.items()
    )
    caches.closures.update(change_set.auth_graph.closures)
    caches.allowed.update(
        (_interned(like), authorised) for like, authorised in change_set.auth_graph.allowed.items()
    )
    for room_nid, records in change_set.states.records.items():
        caches.records.pop(room_nid, None)  # move to the end, as the newest
        caches.records[room_nid] = newest(records)
    caches.records.trim()
    for event_id, gap in change_set.events.missing.items():
        if gap is None:
            caches.missing.pop(event_id, None)
        else:
            caches.missing[event_id] = gap
    for key, transaction in change_set.transactions.events.items():
        caches.transactions[key] = transaction
        caches.devices[key.sender, key.device_id] = None
    _absorb_names(caches, change_set)
    _absorb_rooms(caches, change_set)


def _kept(events: EventView, event: Event) -> Event:
    """Return a state event as it is cached: an outlier or a refused event may be planned again."""
    row = events.rows.get(event.event_id)
    if row is None or row.outlier or not row.accepted or row.refused is not None:
        return without_json(event)
    return for_auth_checks(event)


def _interned(like: CheckedLike) -> CheckedLike:
    sender, event_type, auth_event_ids, room_id = like
    return intern(sender), intern(event_type), interned_ids(auth_event_ids), intern(room_id)


def _with_stream_position(caches: WriterCaches, row: EventRow) -> EventRow:
    """Return the row, with a stream position that became known after the row was read."""
    if row.stream_ordering is not None or row.outlier:
        return row
    cached = caches.rows.row(row.event_id)
    return (
        row if cached is None or cached.stream_ordering is None else row.at(cached.stream_ordering)
    )


def set_positions(caches: WriterCaches, change_set: ChangeSet, positions: dict[int, int]) -> None:
    """Set the stream positions that the events of a committed change set received."""
    for nid, position in positions.items():
        row = caches.rows.row(change_set.events.row_ids.get(nid, ""))
        if row is not None and not row.outlier:
            caches.rows.keep(row.event_id, row.at(position))


def _absorb_names(caches: WriterCaches, change_set: ChangeSet) -> None:
    """Add the names of a change set to the caches.

    New names are written only together with an event. If nothing is written, they have no rows and
    are skipped.
    """
    is_written = change_set.has_changes
    caches.names.learn(
        types=_written_names(
            change_set.names.types, () if is_written else change_set.names.new_types
        ),
        state_keys=_written_names(
            change_set.names.state_keys, () if is_written else change_set.names.new_state_keys
        ),
        principals=_written_names(
            change_set.names.principals, () if is_written else change_set.names.new_principals
        ),
    )
    unwritten = () if is_written else set(change_set.names.new_state_keys.values())
    for nid, key in change_set.names.state_key_names.items():
        if nid not in unwritten:
            caches.names.state_key_names[nid] = key


def _written_names(
    names: Mapping[K, int | None], unwritten: Collection[K]
) -> Iterator[tuple[K, int]]:
    return ((name, nid) for name, nid in names.items() if nid is not None and name not in unwritten)


def _absorb_rooms(caches: WriterCaches, change_set: ChangeSet) -> None:
    for room_id, row in change_set.rooms.rows.items():
        if row is not None and row.write_version:
            caches.rooms[room_id] = row
    for room in change_set.rooms.room_changes.values():
        caches.merged.update(room.merged)
        if room.changed:
            caches.rooms[room.row.room_id] = RoomRow(
                room_nid=room.row.room_nid,
                room_id=room.row.room_id,
                room_version=room.row.room_version,
                write_version=room.row.write_version + 1,
                next_audience=room.next_audience,
                current_state_group=room.current,
                max_topological_ordering=room.max_order,
                forward_extremities=tuple(room.extremities),
                current_audience=room.audience,
                out_of_range=room.out_of_range,
                removals=room.row.removals,
                is_partial=room.row.is_partial,
                in_order_ts=room.in_order_ts,
            )


def publish(streams: Streams, change_set: ChangeSet, written: WriteResult) -> None:
    """Advance the streams to the committed positions."""
    stream_rows: dict[str, list[StreamRow]] = {
        "caches": [StreamRow(at, streams.instance_name, row) for at, row in written.invalidations],
        "backfill": [],
        "events": [],
    }
    for nid, position in written.positions.items():
        event = change_set.events.parsed[nid]
        backfilled = change_set.events.row_of(nid).backfilled
        row = [event.event_id, event.room_id, event.type, event.state_key, event.redacts]
        stream_rows["backfill" if backfilled else "events"].append(
            StreamRow(position, streams.instance_name, row)
        )
    for name, new_rows in stream_rows.items():
        if new_rows:
            new_rows.sort(key=lambda stream_row: stream_row.stream_id)
            streams.advance(name, streams.instance_name, new_rows[-1].stream_id, new_rows)


# --------------------------------------------------------------------------------------------------
# Answers from memory: check that nothing was deleted in the room since it was remembered.
#
# A "duplicate" of a cached row writes nothing, so the database has no write to refuse. Deletions
# are published in the stream "caches", but a process may hear of one a second later. So each room
# of such an answer is compared first: by its nid, which a purge of the whole room ends, and by the
# number of its deletions (`rooms.removals`). The whole batch takes one statement for it.
#
# A repeated request of a client is answered without: its event was sent, even if it is purged.

SQL_IS_CHANGED: Final[LiteralString] = """
SELECT i.room_id
FROM unnest($1::text[], $2::int[], $3::bigint[]) AS i (room_id, room_nid, removals)
LEFT JOIN LATERAL (SELECT x.room_nid, x.removals FROM rooms x
    WHERE x.room_id = i.room_id OFFSET 0) AS r ON true
WHERE r.room_nid IS DISTINCT FROM i.room_nid OR r.removals <> i.removals
LIMIT 1
"""


def remembered_rooms(
    change_set: ChangeSet, answered: Iterable[tuple[AnyEvent, AppendResult]]
) -> dict[str, RoomRow]:
    """Return the cached rooms of duplicates that nothing in this batch was loaded for."""
    return {
        event.room_id: room
        for event, answer in answered
        if answer.outcome == "duplicate"
        and isinstance(event, IncomingEvent)
        and answer.event_id not in change_set.events.rows
        and event.room_id not in change_set.rooms.rows
        and (room := change_set.caches.rooms.get(event.room_id)) is not None
    }


async def check_remembered(conn: Connection, rooms: Iterable[RoomRow]) -> None:
    """Raise `DatabaseConflict` if rows of one of these rooms were deleted since it was cached."""
    columns = [(room.room_id, room.room_nid, room.removals) for room in rooms]
    if not columns:
        return
    changed = await conn.fetchval(
        SQL_IS_CHANGED, *(list(column) for column in zip(*columns, strict=True))
    )
    if changed is not None:
        raise DatabaseConflict(f"rows of {changed} were deleted meanwhile")


# --------------------------------------------------------------------------------------------------
# The time at which events are received, and a watch on the clock that says it.
#
# A clock that goes back is noticed at the next write: one line in the log, and a count. The time is
# stored as the clock says it. A purge recognises such events by those around them
# (`storage.maintenance.purge.cut_point`).

logger: logging.Logger = logging.getLogger(__name__)

SQL_LAST_RECEIVED: Final[LiteralString] = """
SELECT received_ts
FROM events
WHERE stream_ordering IS NOT NULL
ORDER BY stream_ordering DESC
LIMIT 1
"""


def arrival_ms(measures: Measures) -> int:
    """Return the time for a write; log a warning if the clock went back since the last one."""
    before, now = measures.last_received_ms, now_ms()
    measures.last_received_ms = now
    if before - now > TOLERANCE_MS:
        measures.clock_steps_back += 1
        logger.warning(
            "the clock went back by %d s, to %s: it is wrong now, or was wrong before; "
            "events keep the time at which they were received, and purges by time allow for it",
            (before - now) // 1000,
            datetime.fromtimestamp(now / 1000, UTC).isoformat(timespec="seconds"),
        )
    return now


async def last_received_ms(conn: Connection) -> int:
    """Return when the last event was received, by any process; 0 if there is none."""
    return int(await conn.fetchval(SQL_LAST_RECEIVED) or 0)
