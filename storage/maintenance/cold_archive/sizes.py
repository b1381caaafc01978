"""Count what the archive holds, and what archiving would take out of the table `events`."""

import time
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

DAYS: Final = 90
DAY_MS: Final = 86_400_000

SQL_SIZES: Final[LiteralString] = """
SELECT
    (SELECT count(*) FROM archive_packs) AS packs,
    (SELECT COALESCE(sum(bytes), 0)::bigint FROM archive_packs) AS pack_bytes,
    (SELECT count(*) FROM archive_garbage) AS garbage,
    count(*) FILTER (WHERE e.length = 12) AS events,
    count(*) FILTER (WHERE e.is_archivable) AS archivable,
    COALESCE(sum(e.length - 12) FILTER (WHERE e.is_archivable), 0)::bigint AS saving
FROM (
    SELECT
        octet_length(e.json) AS length,
        octet_length(e.json) >= 64 AND NOT e.outlier AND e.received_ts < $1::bigint
            AND (e.encoding = 1 OR (e.redacted_by IS NULL AND NOT e.redacted_form))
            AND t.type NOT IN ('m.room.create', 'm.room.name', 'm.room.canonical_alias')
            AND c.event_nid IS NULL AS is_archivable
    FROM events e
    JOIN event_types t USING (type_nid)
    LEFT JOIN current_state c ON c.room_nid = e.room_nid AND c.state_key_nid = e.state_key_nid
        AND c.event_nid = e.event_nid
) AS e
"""
"""The conditions are those of `storage.maintenance.cold_archive.run`."""


class ArchiveSizes(NamedTuple):
    """The files, records that the sweep will remove, and the events whose bytes are archived.

    ``archivable``: so many others that may be archived are older than `DAYS`; ``saving``: the bytes
    that this would take out of the table.
    """

    packs: int
    pack_bytes: int
    garbage: int
    events: int
    archivable: int
    saving: int


async def archive_sizes(conn: Connection, *, now_ms: int | None = None) -> ArchiveSizes:
    """Count. It reads the whole table, as `storage.maintenance.totals.counts`."""
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    row = await conn.fetchrow(SQL_SIZES, now - DAYS * DAY_MS, row=ArchiveSizes)
    assert row is not None, "an aggregate has a row"  # noqa: S101  # for the types
    return row
