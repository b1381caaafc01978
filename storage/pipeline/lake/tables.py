"""The tables of a mirror.

Each file of a table has a range of the table's ``key`` in the log, so a pass finds the files that
it has to rewrite. ``key`` is a number: `arrived` for events, which never changes, and the room for
the others. Only these ranges are in the log, no text of an event.
"""

from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

import orjson
import pyarrow as pa

from storage.database.arrow_results import ArrowConnection
from storage.errors import InputError
from storage.pipeline.source.token_bounds import SQL_WRITER_NIDS, position_of
from storage.streams import SyncToken, VectorPosition
from storage.streams.caches import CURRENT_STATE, REMOVED, Removed
from storage.streams.invalidate_caches import INSTANCE_NAME

SCHEMA_VERSION: Final = 1
"""Grows with each change of the columns. A mirror of another version is refused."""


@dataclass(frozen=True, slots=True)
class MirrorTable:
    """A table: the columns in its files, without that of the partition."""

    name: str
    columns: pa.Schema
    key: str
    by_day: bool = False

    @property
    def schema(self) -> pa.Schema:
        return self.columns.append(pa.field("day", pa.date32())) if self.by_day else self.columns


EVENTS: Final = MirrorTable(
    "events",
    pa.schema(
        [
            ("arrived", pa.int64()),
            ("event_nid", pa.int64()),
            ("room_nid", pa.int64()),
            ("digest", pa.int64()),
            ("event_id", pa.string()),
            ("room_id", pa.string()),
            ("room_version", pa.string()),
            ("type", pa.string()),
            ("state_key", pa.string()),
            ("sender", pa.string()),
            ("origin", pa.string()),
            ("stream_ordering", pa.int64()),
            ("topological_ordering", pa.int64()),
            ("depth", pa.int64()),
            ("prev_count", pa.int64()),
            ("origin_server_ts", pa.int64()),
            ("received_ts", pa.int64()),
            ("audience", pa.int64()),
            ("soft_failed", pa.bool_()),
            ("refused", pa.string()),
            ("rejected", pa.string()),
            ("redacted", pa.bool_()),
            ("redacted_by", pa.string()),
            ("erased", pa.bool_()),
            ("pdu", pa.binary()),
        ]
    ),
    key="arrived",
    by_day=True,
)
STATE_CHANGES: Final = MirrorTable(
    "state_changes",
    pa.schema(
        [
            ("room_nid", pa.int64()),
            ("room_id", pa.string()),
            ("stream_ordering", pa.int64()),
            ("type", pa.string()),
            ("state_key", pa.string()),
            ("event_id", pa.string()),
            ("prev_event_id", pa.string()),
        ]
    ),
    key="room_nid",
)
MEMBERSHIPS: Final = MirrorTable(
    "memberships",
    pa.schema(
        [
            ("room_nid", pa.int64()),
            ("room_id", pa.string()),
            ("user_id", pa.string()),
            ("membership", pa.string()),
            ("event_id", pa.string()),
        ]
    ),
    key="room_nid",
)
VISIBILITY: Final = MirrorTable(
    "visibility",
    pa.schema(
        [
            ("room_nid", pa.int64()),
            ("room_id", pa.string()),
            ("principal", pa.string()),
            ("first_audience", pa.int64()),
            ("end_audience", pa.int64()),
            ("last_join_topological", pa.int64()),
        ]
    ),
    key="room_nid",
)
ROOMS: Final = MirrorTable(
    "rooms",
    pa.schema(
        [
            ("room_nid", pa.int64()),
            ("room_id", pa.string()),
            ("room_version", pa.string()),
            ("joined_count", pa.int64()),
            ("invited_count", pa.int64()),
            ("forward_extremities", pa.int64()),
            ("last_stream_ordering", pa.int64()),
            ("max_topological_ordering", pa.int64()),
            ("is_partial", pa.bool_()),
            ("write_version", pa.int64()),
            ("removals", pa.int64()),
        ]
    ),
    key="room_nid",
)
TABLES: Final = {
    table.name: table for table in (EVENTS, STATE_CHANGES, MEMBERSHIPS, VISIBILITY, ROOMS)
}
"""In the order of a round. `rooms` is last: its numbers say which rooms the others have read."""


def chosen_tables(names: tuple[str, ...]) -> tuple[MirrorTable, ...]:
    """Return the tables of these names, or of "all", and `rooms`. Raise `InputError`."""
    unknown = [name for name in names if name not in TABLES and name != "all"]
    if unknown or not names:
        raise InputError(
            f"a mirror has no table {', '.join(unknown) or 'without a name'}:"
            f" give all, or some of {', '.join(TABLES)}"
        )
    chosen = set(TABLES) if "all" in names else {*names, ROOMS.name}
    return tuple(table for name, table in TABLES.items() if name in chosen)


# --------------------------------------------------------------------------------------------------
# The position of a table: how far it has followed the streams, as the text of a token.
#
# The streams "events" and "backfill" have the new events. "caches" says which stored rows changed
# since: an event that a redaction or a reordering changed, rows that a purge deleted, or that
# something changed everywhere, as a repair does.

STREAMS: Final = ("backfill", "caches", "events")

SQL_MIRROR_POSITIONS: Final[LiteralString] = """
SELECT s.stream_name, s.instance_name, s.stream_id
FROM stream_positions s
WHERE s.stream_name IN ('events', 'backfill', 'caches')
"""


def current_position(conn: ArrowConnection) -> SyncToken:
    """Return the position of the three streams in this snapshot."""
    writers: dict[str, dict[str, int]] = {name: {} for name in STREAMS}
    for row in conn.rows(SQL_MIRROR_POSITIONS):
        writers[row["stream_name"]][row["instance_name"]] = row["stream_id"]
    return SyncToken.of(
        {
            name: VectorPosition.of(min(positions.values(), default=0), positions)
            for name, positions in writers.items()
        }
    )


class CacheBounds(NamedTuple):
    """The requested facts of the stream "caches": of each writer, after and up to an id."""

    writer_nids: list[int]
    after: list[int]
    upto: list[int]


def cache_bounds(conn: ArrowConnection, start: SyncToken, end: SyncToken) -> CacheBounds:
    """Return the facts of "caches" that ``end`` covers and ``start`` does not."""
    bounds = CacheBounds([], [], [])
    for row in conn.rows(SQL_WRITER_NIDS):
        after, upto = (
            position_of(token, "caches").position(row["instance_name"]) for token in (start, end)
        )
        if upto > after:
            for column, value in zip(bounds, (row["writer_nid"], after, upto), strict=True):
                column.append(value)
    return bounds


# --------------------------------------------------------------------------------------------------
# Facts of the stream "caches" about rows that changed after they were stored.
#
#   events         an event whose row changed: redacted, reordered, no longer ineffective
#   removed        what a purge has deleted from a room
#   cs_cache_fake  a room whose current state changed by more than its new events say
#
# A fact without a key means any room: the end of a purge, of a repair or a rebuild, or censoring.
# Each of these raises `rooms.write_version` in its transaction, but for censoring, which changes no
# column of a mirror. So the rooms to read again are those whose version is another one.

SQL_CHANGE_FACTS: Final[LiteralString] = """
SELECT i.cache_name, array_to_json(i.keys)::text AS keys, w.instance_name
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS b (writer_nid, after_id, upto_id)
JOIN writers w ON w.writer_nid = b.writer_nid
JOIN cache_invalidations i ON i.writer_nid = b.writer_nid
    AND i.stream_id > b.after_id AND i.stream_id <= b.upto_id
WHERE i.stream_id > $4::bigint AND i.stream_id <= $5::bigint
    AND i.cache_name IN ('events', 'removed', 'cs_cache_fake')
"""

SQL_ROOM_NIDS: Final[LiteralString] = """
SELECT r.room_nid::bigint AS room_nid
FROM unnest($1::text[]) AS i (room_id)
JOIN rooms r ON r.room_id = i.room_id
"""


@dataclass(slots=True)
class ChangeFacts:
    """The changes between two positions.

    ``event_ids``: events whose rows changed. ``replaced``: rooms with rows that were deleted or
    derived again. ``states``: rooms whose current state changed. ``everywhere``: other rooms have
    changed as well.
    """

    event_ids: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    everywhere: bool = False

    def take(self, cache_name: str, keys: list[str] | None, writer: str) -> None:
        if not keys:
            self.everywhere = True
        elif cache_name == REMOVED:
            self.replaced.add(Removed.of(keys).room_id)
        elif cache_name == CURRENT_STATE:
            (self.replaced if writer == INSTANCE_NAME else self.states).add(keys[0])
        else:
            self.event_ids.add(keys[0])


def change_facts(conn: ArrowConnection, bounds: CacheBounds) -> ChangeFacts:
    facts = ChangeFacts()
    if not bounds.writer_nids:
        return facts
    for row in conn.rows(SQL_CHANGE_FACTS, *bounds, min(bounds.after), max(bounds.upto)):
        keys = None if row["keys"] is None else orjson.loads(row["keys"])
        facts.take(row["cache_name"], keys, row["instance_name"])
    return facts


def room_nids(conn: ArrowConnection, room_ids: set[str]) -> set[int]:
    """Return the nids of these rooms, as far as they are stored."""
    if not room_ids:
        return set()
    return {row["room_nid"] for row in conn.rows(SQL_ROOM_NIDS, sorted(room_ids))}
