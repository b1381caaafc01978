"""Events as rows: the columns of the data source and of the export, and how they are read.

Ids, types and users are text here, as in the protocol. ``pdu`` has the received bytes.
``state_before`` is set only where the events alone do not determine it (a parent is missing, or
came later). ``arrival_ordering`` is set only for a readmitted event: it arrived there, refused. So
rows that were read can be stored again as they were.

Rows come as Arrow batches, never as Python rows. Edges come as nids. Most of their ids are in the
same batch; the others are queried once for each nid. They are joined column by column.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, LiteralString

import pyarrow as pa
import pyarrow.compute as pc

from storage.codec import (
    Reference,
    decode,
    dictionaries_of,
    has_references,
    is_plain,
    unknown_headers,
)
from storage.database.archived_bytes import SQL_PACK_URLS, read_forms
from storage.database.arrow_results import ArrowConnection
from storage.database.columns import AUTH_NIDS, OWN_ENTRIES, PREV_NIDS
from storage.database.dictionaries import SQL_DICTIONARIES, DictionaryRow, register_row
from storage.database.placeholders import compose

# --------------------------------------------------------------------------------------------------
# The bytes of events in Arrow tables: from their stored forms to what was received.
#
# An executor loads a dictionary once, when it first meets rows that name it. It reads archived
# events from their packs itself.


def decoded(conn: ArrowConnection, table: pa.Table, column: str) -> pa.Table:
    """Return the table with this column decoded; it also has ``event_id`` and ``room_id``.

    Raise `StorageCorrupt` for bytes that are damaged.
    """
    stored: list[Any] = table.column(column).to_pylist()
    if all(map(is_plain, stored)):
        return table
    headers = unknown_headers(stored)
    if has_references(headers):
        stored = _resolved(conn, stored)
        headers = unknown_headers(stored)
    if unknown := dictionaries_of(headers):
        for row in conn.rows(SQL_DICTIONARIES, list(unknown)):
            register_row(DictionaryRow(**row))
    event_ids = table.column("event_id").to_pylist()
    room_ids = table.column("room_id").to_pylist()
    raw = pa.array(map(decode, stored, event_ids, room_ids), pa.binary(), size=len(stored))
    return table.set_column(table.schema.get_field_index(column), column, raw)


def _resolved(conn: ArrowConnection, stored: list[Any]) -> list[Any]:
    """Return the column with stored forms in place of references to the archive."""
    references = {
        at: reference
        for at, one in enumerate(stored)
        if (reference := Reference.parse(one)) is not None
    }
    packs = sorted({reference.pack for reference in references.values()})
    urls = {row["pack"]: row["url"] for row in conn.rows(SQL_PACK_URLS, packs)}
    forms = read_forms(sorted(set(references.values())), urls)
    return [forms[references[at]] if at in references else data for at, data in enumerate(stored)]


IDS: Final = pa.list_(pa.string())
ARROW_SCHEMA: Final = pa.schema(
    [
        ("event_id", pa.string()),
        ("room_id", pa.string()),
        ("room_version", pa.string()),
        ("type", pa.string()),
        ("state_key", pa.string()),
        ("sender", pa.string()),
        ("origin", pa.string()),
        ("stream_ordering", pa.int64()),
        ("arrival_ordering", pa.int64()),
        ("topological_ordering", pa.int64()),
        ("depth", pa.int64()),
        ("origin_server_ts", pa.int64()),
        ("received_ts", pa.int64()),
        ("soft_failed", pa.bool_()),
        ("refused", pa.string()),
        ("rejected", pa.string()),
        ("redacted_form", pa.bool_()),
        ("redacted_by", pa.string()),
        ("audience", pa.int64()),
        ("prev_events", IDS),
        ("auth_events", IDS),
        ("state_before", IDS),
        ("pdu", pa.binary()),
    ]
)
COLUMNS: Final = tuple(ARROW_SCHEMA.names)
OF_EDGES: Final = frozenset({"prev_events", "auth_events", "redacted_by", "state_before"})

_SPARK_TYPES: Final = {
    "string": "string",
    "int32": "int",
    "int64": "bigint",
    "bool": "boolean",
    "binary": "binary",
}

SQL_EVENT_ROWS: Final[LiteralString] = compose(
    """
SELECT
    e.event_nid,
    e.event_id,
    r.room_id,
    r.room_version,
    t.type,
    k.state_key,
    p.name AS sender,
    CASE WHEN is_out_of_band(e) THEN 'out_of_band' WHEN e.outlier THEN 'outlier'
        WHEN e.backfilled THEN 'backfill' ELSE 'live' END AS origin,
    e.stream_ordering,
    e.arrival_ordering,
    COALESCE(e.arrival_ordering, e.stream_ordering) AS arrived,
    e.topological_ordering,
    claimed_depth(e.depth, e.topological_ordering) AS depth,
    e.origin_server_ts,
    e.received_ts,
    e.soft_failed,
    e.refused,
    e.rejected,
    e.redacted_form,
    e.audience,
    e.redacted_by AS redacted_by_nid,
    CASE WHEN $2::boolean THEN :prev_nids.call(e) ELSE '{}' END AS prev_nids,
    CASE WHEN $2::boolean THEN :auth_nids.call(e) ELSE '{}' END AS auth_nids,
    CASE WHEN $3::boolean THEN e.json END AS pdu
FROM unnest($1::bigint[]) AS wanted (event_nid)
JOIN events e USING (event_nid)
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
JOIN principals p ON p.principal_nid = e.sender_nid
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
""",
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_EDGE_IDS: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, COALESCE(e.arrival_ordering, e.stream_ordering) AS arrived
FROM events e
WHERE e.event_nid = ANY($1::bigint[])
UNION ALL
SELECT m.event_nid, m.event_id, NULL
FROM missing_events m
WHERE m.event_nid = ANY($1::bigint[])
    AND NOT EXISTS (SELECT FROM events e WHERE e.event_nid = m.event_nid)
"""

SQL_STATES_BEFORE: Final[LiteralString] = compose(
    """
SELECT wanted.event_nid, ARRAY(
    -- The rows of the group's path, folded: the last entry of each key.
    SELECT x.event_id
    FROM (
        SELECT DISTINCT ON (entry.state_key_nid) entry.event_nid
        FROM state_path(e.state_group_before) AS step
        JOIN state_groups g ON g.state_group = step.part
        CROSS JOIN LATERAL :own_entries.call(g) AS entry
        ORDER BY entry.state_key_nid, step.place DESC
    ) AS folded
    JOIN events x ON x.event_nid = folded.event_nid
    ORDER BY x.event_id
) AS state_before
FROM unnest($1::bigint[]) AS wanted (event_nid)
JOIN events e USING (event_nid)
""",
    OWN_ENTRIES,
).sql

PAGE: Final = 5_000
"""Events read by one statement: some megabytes."""
OUTLIER: Final = -(2**63)
"""The sort position of an event without a stream ordering."""


def ddl(columns: Sequence[str] = COLUMNS) -> str:
    """Return the schema of these columns as Spark writes it."""
    return spark_ddl(pa.schema([ARROW_SCHEMA.field(name) for name in columns]))


def spark_ddl(schema: pa.Schema) -> str:
    """Return an Arrow schema as Spark writes it."""
    return ", ".join(f"`{field.name}` {_spark_type(field.type)}" for field in schema)


def _spark_type(kind: pa.DataType) -> str:
    return (
        f"array<{_spark_type(kind.value_type)}>"
        if pa.types.is_list(kind)
        else _SPARK_TYPES[str(kind)]
    )


def read_rows(
    conn: ArrowConnection, event_nids: Sequence[int], columns: Collection[str]
) -> Iterator[pa.RecordBatch]:
    """Yield these events in batches, with these columns in this order; other columns are not read.

    Each batch is sorted by position, outliers first. It is sorted here because Postgres would write
    the bytes of a page to disk for it.
    """
    schema = pa.schema([ARROW_SCHEMA.field(name) for name in columns])
    edges = not OF_EDGES.isdisjoint(columns)
    for start in range(0, len(event_nids), PAGE):
        table = _ordered(
            conn.table(
                SQL_EVENT_ROWS, list(event_nids[start : start + PAGE]), edges, "pdu" in columns
            ).combine_chunks()
        )
        if "pdu" in columns:
            table = decoded(conn, table, "pdu")
        if edges:
            table = _with_edges(conn, table, states="state_before" in columns)
        yield from table.select(list(columns)).cast(schema).combine_chunks().to_batches()


def _ordered(table: pa.Table) -> pa.Table:
    """Sort by position (null first), then by nid: mostly the rows already come in this order."""
    positions = pc.fill_null(_column(table, "stream_ordering", pa.int64()), OUTLIER)
    keys = pa.table({"position": positions, "event_nid": _column(table, "event_nid", pa.int64())})
    indices = pc.sort_indices(
        keys, sort_keys=[("position", "ascending"), ("event_nid", "ascending")]
    )
    return (
        table
        if indices.equals(pa.array(range(len(indices)), indices.type))
        else table.take(indices)
    )


# ------------------------------------------------------------------------------------------------
# edges


def _with_edges(conn: ArrowConnection, table: pa.Table, *, states: bool) -> pa.Table:
    """Add the columns of ids, from those of nids."""
    prev, auth = (_column(table, name, pa.list_(pa.int64())) for name in ("prev_nids", "auth_nids"))
    redacted = _column(table, "redacted_by_nid", pa.int64())
    events = EdgeEvents.of(
        conn, table, pa.concat_arrays([prev.flatten(), auth.flatten(), redacted.drop_null()])
    )
    table = table.append_column("prev_events", events.lists(prev))
    table = table.append_column("auth_events", events.lists(auth))
    table = table.append_column("redacted_by", events.ids_of(redacted))
    return table.append_column(
        "state_before",
        _states(conn, table, prev, events) if states else pa.nulls(table.num_rows, IDS),
    )


class EdgeEvents:
    """Nids of events, their ids, and where they arrived (null: not in the timeline)."""

    def __init__(self, nids: pa.Array, ids: pa.Array, positions: pa.Array) -> None:
        self._nids = nids
        self._ids = ids
        self._positions = positions

    @classmethod
    def of(cls, conn: ArrowConnection, table: pa.Table, nids: pa.Array) -> "EdgeEvents":
        columns = [_column(table, name, kind) for name, kind in EDGE_COLUMNS.items()]
        distinct = nids.unique()
        others = distinct.filter(pc.invert(pc.is_in(distinct, value_set=columns[0])))
        if len(others):
            edge_ids = conn.table(SQL_EDGE_IDS, others.to_pylist()).combine_chunks()
            columns = [
                pa.concat_arrays([own, _column(edge_ids, name, kind)])
                for own, (name, kind) in zip(columns, EDGE_COLUMNS.items(), strict=True)
            ]
        return cls(*columns)

    def ids_of(self, nids: pa.Array) -> pa.Array:
        """Return their ids; null for null."""
        return self._ids.take(pc.index_in(nids, value_set=self._nids))

    def positions_of(self, nids: pa.Array) -> pa.Array:
        return self._positions.take(pc.index_in(nids, value_set=self._nids))

    def lists(self, lists: pa.Array) -> pa.Array:
        """Return lists of ids for lists of nids."""
        return pa.ListArray.from_arrays(_offsets(lists), self.ids_of(lists.flatten()))


EDGE_COLUMNS: Final = {"event_nid": pa.int64(), "event_id": pa.string(), "arrived": pa.int64()}
"""``arrived``: the position at which an event entered the timeline, before a readmission."""


def _offsets(lists: pa.Array) -> pa.Array:
    """Return where each list begins among all elements."""
    sums = pc.cumulative_sum(pc.list_value_length(lists))
    return pa.concat_arrays([pa.array([0], pa.int32()), sums.cast(pa.int32())])


def _column(table: pa.Table, name: str, kind: pa.DataType) -> Any:
    column = table.column(name).cast(kind)
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays([pa.array([], kind), *column.chunks])
    )


def _states(conn: ArrowConnection, table: pa.Table, prev: pa.Array, events: EdgeEvents) -> pa.Array:
    """Return the state before events of the timeline with a missing or later parent."""
    own = _column(table, "arrived", pa.int64()).take(pc.list_parent_indices(prev))
    parents = events.positions_of(prev.flatten())
    undetermined = pc.or_kleene(pc.is_null(parents), pc.fill_null(pc.greater(parents, own), False))
    indices = pc.list_parent_indices(prev).filter(pc.and_(undetermined, pc.is_valid(own))).unique()
    if not len(indices):
        return pa.nulls(table.num_rows, IDS)
    nids = _column(table, "event_nid", pa.int64())
    states_before = conn.table(SQL_STATES_BEFORE, nids.take(indices).to_pylist()).combine_chunks()
    states = _column(states_before, "state_before", IDS)
    return states.take(pc.index_in(nids, value_set=_column(states_before, "event_nid", pa.int64())))
