"""Rows of the tables that are read room by room: state changes, memberships, visibility, rooms."""

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.database.arrow_results import ArrowConnection
from storage.database.placeholders import fill
from storage.pipeline.lake.tables import MEMBERSHIPS, ROOMS, STATE_CHANGES, VISIBILITY, MirrorTable
from storage.pipeline.source.token_bounds import Bounds

SQL_STATE_CHANGES: Final[LiteralString] = """
SELECT d.room_nid::bigint AS room_nid, r.room_id, d.stream_ordering, t.type, k.state_key,
    e.event_id, o.event_id AS prev_event_id
FROM unnest($1::int[]) AS i (room_nid)
JOIN rooms r USING (room_nid)
CROSS JOIN LATERAL (
    SELECT *
    FROM state_deltas s
    WHERE s.room_nid = i.room_nid AND s.stream_ordering > $6::bigint
    OFFSET 0
) AS d
JOIN state_keys k USING (state_key_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN events e ON e.event_nid = d.event_nid
LEFT JOIN events o ON o.event_nid = d.prev_event_nid
JOIN unnest($2::bigint[], $3::bool[], $4::bigint[], $5::bigint[]) AS b (writer_nid, backfilled,
    after_id, upto_id)
    ON b.writer_nid = d.writer_nid AND NOT b.backfilled
WHERE d.stream_ordering > b.after_id AND d.stream_ordering <= b.upto_id
"""

SQL_MEMBERSHIPS: Final[LiteralString] = fill("""
SELECT c.room_nid::bigint AS room_nid, r.room_id, k.state_key AS user_id,
    (ARRAY['other', 'ban', 'leave', 'knock', 'invite', 'join'])[c.membership + 1] AS membership,
    e.event_id
FROM current_state c
JOIN rooms r USING (room_nid)
JOIN state_keys k USING (state_key_nid)
LEFT JOIN events e USING (event_nid)
WHERE c.room_nid = ANY($1::int[]) AND c.membership IS NOT NULL
UNION ALL
SELECT m.room_nid, r.room_id, p.name,
    (ARRAY['other', 'ban', 'leave', 'knock', 'invite', 'join'])[m.membership + 1],
    e.event_id
FROM out_of_band_memberships o
JOIN memberships m USING (room_nid, principal_nid, event_nid)
JOIN rooms r USING (room_nid)
JOIN principals p USING (principal_nid)
LEFT JOIN events e USING (event_nid)
WHERE o.room_nid = ANY($1::int[])
    AND NOT EXISTS (
        SELECT
        FROM current_state c
        JOIN state_keys k USING (state_key_nid)
        WHERE c.room_nid = o.room_nid AND k.type_nid = {TYPE_MEMBER} AND k.state_key = p.name
    )
""")

SQL_MIRRORED_VISIBILITY: Final[LiteralString] = """
SELECT v.room_nid::bigint AS room_nid, r.room_id, p.name AS principal,
    lower(a.span) AS first_audience, upper(a.span) AS end_audience, v.last_join_topological
FROM whole_visibility v
JOIN rooms r USING (room_nid)
JOIN principals p USING (principal_nid)
CROSS JOIN LATERAL unnest(v.audiences) AS a (span)
WHERE v.room_nid = ANY($1::int[])
"""

SQL_MIRRORED_ROOMS: Final[LiteralString] = """
SELECT r.room_nid::bigint AS room_nid, r.room_id, r.room_version,
    r.joined_count::bigint AS joined_count, r.invited_count::bigint AS invited_count,
    cardinality(r.forward_extremities)::bigint AS forward_extremities, r.last_stream_ordering,
    r.max_topological_ordering, r.is_partial, r.write_version, r.removals
FROM rooms r
WHERE r.room_nid = ANY($1::int[])
"""

SQL_ROOM_VERSIONS: Final[LiteralString] = """
SELECT r.room_nid::bigint AS room_nid, r.write_version, r.removals
FROM rooms r
WHERE r.room_nid >= $1::int AND r.room_nid < $2::int
"""

SQL_CHANGED_ROOMS: Final[LiteralString] = """
SELECT i.room_nid::bigint AS room_nid, bool_or(i.stateful) AS stateful
FROM (
    SELECT e.room_nid, e.stream_ordering, e.writer_nid, e.backfilled,
        e.state_key_nid IS NOT NULL OR e.audience % 1099511627776 <> 0 AS stateful
    FROM events e
    WHERE e.stream_ordering > $1::bigint AND e.stream_ordering <= $2::bigint
    UNION ALL
    SELECT e.room_nid, o.stream_id, o.writer_nid, false, true
    FROM outlier_memberships o
    JOIN events e USING (event_nid)
    WHERE o.stream_id > $1::bigint AND o.stream_id <= $2::bigint
) AS i
JOIN unnest($3::bigint[], $4::bool[], $5::bigint[], $6::bigint[]) AS b (writer_nid, backfilled,
    after_id, upto_id)
    ON b.writer_nid = i.writer_nid AND b.backfilled = i.backfilled
WHERE i.stream_ordering > b.after_id AND i.stream_ordering <= b.upto_id
GROUP BY i.room_nid
"""

ROOMS_PER_STATEMENT: Final = 200

STATEMENTS: Final = {
    MEMBERSHIPS.name: SQL_MEMBERSHIPS,
    VISIBILITY.name: SQL_MIRRORED_VISIBILITY,
    ROOMS.name: SQL_MIRRORED_ROOMS,
}

CHANGED: Final = pa.schema([("room_nid", pa.int64()), ("stateful", pa.bool_())])
VERSIONS: Final = pa.schema(
    [("room_nid", pa.int64()), ("write_version", pa.int64()), ("removals", pa.int64())]
)


def room_rows(
    conn: ArrowConnection, table: MirrorTable, room_nids: Sequence[int], within: Bounds
) -> pa.Table:
    """Return the rows of these rooms; of state changes those within the bounds."""
    parts = []
    for start in range(0, len(room_nids), ROOMS_PER_STATEMENT):
        some = list(room_nids[start : start + ROOMS_PER_STATEMENT])
        rows = (
            conn.table(SQL_STATE_CHANGES, some, *within.columns(), within.after)
            if table is STATE_CHANGES
            else conn.table(STATEMENTS[table.name], some)
        )
        parts.append(rows.select(table.schema.names).cast(table.schema))
    return pa.concat_tables(parts) if parts else table.schema.empty_table()


def changed_rooms(conn: ArrowConnection, bounds: Bounds) -> pa.Table:
    """Return room_nid of the rooms with new events, or memberships out of band, in the bounds.

    ``stateful`` is whether their members or audiences may have changed: by a state event, or by a
    new audience aside from the main line, whose numbers are multiples of 2^40.
    """
    if not bounds.parts:
        return CHANGED.empty_table()
    return conn.table(SQL_CHANGED_ROOMS, bounds.after, bounds.upto, *bounds.columns()).cast(CHANGED)


def room_versions(conn: ArrowConnection, numbers: range) -> pa.Table:
    """Return room_nid, write_version and removals of the rooms with these numbers."""
    return conn.table(SQL_ROOM_VERSIONS, numbers.start, numbers.stop).cast(VERSIONS)


# --------------------------------------------------------------------------------------------------
# A number for the rows of each room, by which many rooms are compared in one pass over the files.
#
# The number is the sum of 64-bit hashes of the rows, so their order and their files do not matter.
# Sums are compared in the process that made them: Python's hash of a text differs between
# processes.

KEY: Final = "room_nid"


class RoomSums:
    """The sums of the rooms from ``first`` to ``last``: eight bytes for each."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._sums = np.zeros(max(last - first + 1, 0), np.uint64)

    @classmethod
    def of(cls, first: int, last: int, parts: Iterable[pa.Table]) -> Self:
        """Return the sums of these rows. Rows of other rooms are left out."""
        sums = cls(first, last)
        for part in parts:
            sums._add(part)
        return sums

    def differing(self, room_nids: list[int], rows: pa.Table) -> set[int]:
        if not room_nids:
            return set()
        others = RoomSums.of(min(room_nids), max(room_nids), [rows])
        nids = np.asarray(room_nids, np.int64)
        differ = self.at(nids) != others.at(nids)
        return set(nids[differ].tolist())

    def at(self, room_nids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return self._sums[room_nids - self._first]

    def _add(self, rows: pa.Table) -> None:
        numbers = rows.column(KEY).to_numpy() - self._first
        is_inside = (numbers >= 0) & (numbers < len(self._sums))
        np.add.at(self._sums, numbers[is_inside], _hashes(rows)[is_inside])


def _hashes(rows: pa.Table) -> npt.NDArray[np.uint64]:
    """Return a hash of each row: of a text that only equal rows have, as no value has a NUL."""
    columns = [
        pc.binary_join_element_wise("=", column.cast(pa.string()), "") for column in rows.columns
    ]
    texts = pc.binary_join_element_wise(
        *columns, "\0", null_handling="replace", null_replacement="-"
    )
    return np.fromiter(map(hash, texts.to_pylist()), np.int64, rows.num_rows).view(np.uint64)
