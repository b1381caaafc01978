"""Check what all rooms share: stream positions, sequences, invalid indexes."""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.finding import Finding
from storage.streams.published_facts import sequences

SQL_BEHIND: Final[LiteralString] = """
SELECT f.stream_name, f.instance_name, f.latest, p.stream_id AS position
FROM (
    SELECT CASE WHEN e.backfilled THEN 'backfill' ELSE 'events' END AS stream_name, w.instance_name,
        max(e.stream_ordering) AS latest
    FROM events e
    LEFT JOIN writers w USING (writer_nid)
    WHERE NOT e.outlier
    GROUP BY 1, 2
    UNION ALL
    SELECT s.stream_name, w.instance_name, max(s.stream_id)
    FROM (
        SELECT 'account_data' AS stream_name, writer_nid, stream_id FROM account_data
        UNION ALL SELECT 'to_device', writer_nid, stream_id FROM to_device
        UNION ALL SELECT 'receipts', writer_nid, stream_id FROM receipts
        UNION ALL SELECT 'caches', writer_nid, stream_id FROM cache_invalidations
        UNION ALL SELECT stream_name, writer_nid, stream_id FROM published_facts
    ) AS s
    LEFT JOIN writers w USING (writer_nid)
    GROUP BY 1, 2
) AS f
LEFT JOIN stream_positions p USING (stream_name, instance_name)
WHERE p.stream_id IS NULL OR p.stream_id < f.latest
ORDER BY 1, 2
"""

SQL_SEQUENCES: Final[LiteralString] = """
SELECT s.name, max(s.largest) AS largest,
    max(CASE WHEN q.last_value IS NULL THEN 0 ELSE q.last_value + q.increment_by END) AS next
FROM (
    SELECT 'event_nids' AS name,
        GREATEST((SELECT max(event_nid) FROM events),
            (SELECT max(event_nid) FROM missing_events)) AS largest
    UNION ALL SELECT 'events_stream',
        GREATEST((SELECT max(stream_ordering) FROM events),
            (SELECT max(stream_id) FROM outlier_memberships))
    UNION ALL SELECT 'account_data_stream', (SELECT max(stream_id) FROM account_data)
    UNION ALL SELECT 'to_device_stream', (SELECT max(stream_id) FROM to_device)
    UNION ALL SELECT 'receipts_stream', (SELECT max(stream_id) FROM receipts)
    UNION ALL SELECT 'caches_stream', (SELECT max(stream_id) FROM cache_invalidations)
    UNION ALL SELECT 'published_facts_stream', (SELECT max(stream_id) FROM published_facts)
    UNION ALL SELECT 'writer_nids', (SELECT max(writer_nid) FROM writers)
    UNION ALL SELECT 'sliding_connection_nids',
        (SELECT max(connection_nid) FROM sliding_connections)
    UNION ALL
    SELECT d.sequence_name, max(p.stream_id)  -- readers have passed these
    FROM unnest($1::text[], $2::text[]) AS d (stream_name, sequence_name)
    JOIN stream_positions p USING (stream_name)
    WHERE p.stream_id > 1
    GROUP BY d.sequence_name
    UNION ALL SELECT 'state_group_nids', (SELECT max(state_group) FROM state_groups)
    UNION ALL SELECT 'room_nids', (SELECT max(room_nid) FROM rooms)
    UNION ALL SELECT 'principal_nids',
        (SELECT max(principal_nid) FROM principals WHERE principal_nid >= 1000)
    UNION ALL SELECT 'type_nids', (SELECT max(type_nid) FROM event_types WHERE type_nid >= 1000)
    UNION ALL SELECT 'state_key_nids',
        (SELECT max(state_key_nid) FROM state_keys WHERE state_key_nid >= 1000)
) AS s
LEFT JOIN pg_sequences q ON q.schemaname = current_schema() AND q.sequencename = s.name
WHERE s.largest IS NOT NULL
    AND s.largest >= CASE WHEN q.last_value IS NULL THEN 0 ELSE q.last_value + q.increment_by END
GROUP BY s.name
ORDER BY 1
"""


SQL_INVALID_INDEXES: Final[LiteralString] = """
SELECT c.relname
FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid
WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND NOT i.indisvalid
ORDER BY 1
"""


class LaggingWriterRow(NamedTuple):
    """A writer whose position is behind its facts."""

    stream_name: str
    instance_name: str | None
    latest: int
    position: int | None


class LaggingIdSequenceRow(NamedTuple):
    """A sequence that would return a used number again."""

    name: str
    largest: int
    next: int


async def check_positions(conn: Connection) -> AsyncIterator[Finding]:
    """Check that no writer's position is behind one of its facts ("stream_positions")."""
    for row in await conn.fetch(SQL_BEHIND, row=LaggingWriterRow):
        subject = (row.stream_name, row.instance_name or "unknown writer")
        yield Finding(
            "stream_positions", None, subject, str(row.position), f"at least {row.latest}"
        )


async def check_sequences(conn: Connection) -> AsyncIterator[Finding]:
    """Check that no sequence returns a number that is in use ("sequences")."""
    declared = await sequences(conn)
    for row in await conn.fetch(
        SQL_SEQUENCES, list(declared), list(declared.values()), row=LaggingIdSequenceRow
    ):
        yield Finding(
            "sequences", None, (row.name,), f"next {row.next}", f"more than {row.largest}"
        )


async def check_indexes(conn: Connection) -> AsyncIterator[Finding]:
    """Check that no interrupted build left an invalid index ("indexes").

    Such an index slows down writes and serves no query. To remove it, migrate again.
    """
    for name in await conn.fetchvals(SQL_INVALID_INDEXES):
        yield Finding(
            "indexes", None, (name,), "invalid", "valid: run the migration again, or drop it"
        )
