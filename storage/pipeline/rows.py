"""Events as rows: the columns of the data source, of the export and of what is imported, and the statement that reads them.

Text at the border: ids, types and users are text here, as in the protocol. ``pdu`` has the received bytes. ``state_before`` stands only
where the events alone do not tell it (a parent is missing, or came later), so that what was read can be stored again as it was.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final, LiteralString

import pyarrow as pa

from storage.database.arrow import ArrowConnection

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
        ("topological_ordering", pa.int64()),
        ("depth", pa.int64()),
        ("origin_server_ts", pa.int64()),
        ("received_ts", pa.int64()),
        ("soft_failed", pa.bool_()),
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

_SPARK_TYPES: Final = {"string": "string", "int32": "int", "int64": "bigint", "bool": "boolean", "binary": "binary"}

SQL_EVENT_ROWS: Final[LiteralString] = """
SELECT
    e.event_id,
    r.room_id,
    r.room_version,
    t.type,
    k.state_key,
    p.name AS sender,
    CASE WHEN e.outlier THEN 'outlier' WHEN e.backfilled THEN 'backfill' ELSE 'live' END AS origin,
    e.stream_ordering,
    e.topological_ordering,
    e.depth,
    e.origin_server_ts,
    e.received_ts,
    e.soft_failed,
    e.rejected,
    e.redacted_form,
    CASE WHEN 'redacted_by' = ANY($2::text[]) THEN (SELECT b.event_id FROM events b WHERE b.event_nid = e.redacted_by) END AS redacted_by,
    e.audience,
    CASE WHEN 'prev_events' = ANY($2::text[]) THEN ARRAY(
        SELECT COALESCE(x.event_id, m.event_id)
        FROM unnest(e.prev_events) WITH ORDINALITY AS n (nid, place)
        LEFT JOIN events x ON x.event_nid = n.nid
        LEFT JOIN missing_events m ON m.event_nid = n.nid
        ORDER BY n.place
    ) END AS prev_events,
    CASE WHEN 'auth_events' = ANY($2::text[]) THEN ARRAY(
        SELECT x.event_id
        FROM unnest(e.auth_events) WITH ORDINALITY AS n (nid, place)
        JOIN events x ON x.event_nid = n.nid
        ORDER BY n.place
    ) END AS auth_events,
    CASE WHEN 'state_before' = ANY($2::text[]) AND NOT e.outlier AND EXISTS (
        SELECT
        FROM unnest(e.prev_events) AS n (nid)
        LEFT JOIN events x ON x.event_nid = n.nid
        WHERE x.stream_ordering IS NULL OR x.stream_ordering > e.stream_ordering
    ) THEN ARRAY(
        -- The rows of the group's path, folded: of each key the one that stands last.
        SELECT x.event_id
        FROM (
            SELECT DISTINCT ON (entry.key_nid) entry.event_nid
            FROM state_groups s
            CROSS JOIN unnest(s.back) WITH ORDINALITY AS b (back, place)
            JOIN state_groups g ON g.state_group = s.state_group - b.back
            CROSS JOIN LATERAL (
                SELECT * FROM unnest(g.key_nids, g.event_nids)
                UNION ALL
                SELECT * FROM unnest(g.member_key_nids, g.member_event_nids)
            ) AS entry (key_nid, event_nid)
            WHERE s.state_group = e.state_group_before
            ORDER BY entry.key_nid, b.place DESC
        ) AS folded
        JOIN events x ON x.event_nid = folded.event_nid
        ORDER BY x.event_id
    ) END AS state_before,
    CASE WHEN 'pdu' = ANY($2::text[]) THEN e.json END AS pdu
FROM unnest($1::bigint[]) AS wanted (event_nid)
JOIN events e USING (event_nid)
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
JOIN principals p ON p.principal_nid = e.sender_nid
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
ORDER BY e.stream_ordering NULLS FIRST, e.event_nid
"""

PAGE: Final = 5_000
"""Events read by one statement: some megabytes."""


def ddl(columns: Sequence[str] = COLUMNS) -> str:
    """The schema of these columns as Spark writes it."""
    return spark_ddl(pa.schema([ARROW_SCHEMA.field(name) for name in columns]))


def spark_ddl(schema: pa.Schema) -> str:
    """An Arrow schema as Spark writes it."""
    return ", ".join(f"`{field.name}` {_spark_type(field.type)}" for field in schema)


def _spark_type(kind: pa.DataType) -> str:
    return f"array<{_spark_type(kind.value_type)}>" if pa.types.is_list(kind) else _SPARK_TYPES[str(kind)]


def read_rows(conn: ArrowConnection, event_nids: Sequence[int], columns: Collection[str]) -> Iterator[pa.RecordBatch]:
    """These events in batches, with these columns in this order; what is not asked for is not read from the rows either."""
    wanted = pa.schema([ARROW_SCHEMA.field(name) for name in columns])
    for start in range(0, len(event_nids), PAGE):
        page = list(event_nids[start : start + PAGE])
        table = conn.table(SQL_EVENT_ROWS, page, list(columns)).select(list(columns)).cast(wanted)
        yield from table.combine_chunks().to_batches()
