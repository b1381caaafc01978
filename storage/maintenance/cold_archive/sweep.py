"""The sweep: remove records from packs to which no event refers any more.

A trigger notes each in `archive_garbage`: after a purge, `censor`, and the return of events. The
sweep puts zeros in place of the record, so references to others stay right. A pack without records
is removed. Where events still refer to a record, only the note goes.

It waits for old snapshots: while one may still read the event as it was, the record stays, for a
later sweep. A reader without a snapshot that is about to read the file has `GRACE_S` to do so.

A pack whose file is missing keeps its notes, because the file may come back from a backup. It is
removed if no event refers to it any more, and its folder has other packs.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.codec import Reference
from storage.codec.pack import PackEntry, record_range
from storage.database.archived_bytes import ByteRange, erase_ranges, folder_of, list_files
from storage.database.connection import Connection, Database
from storage.database.placeholders import transposed
from storage.database.pool import begun
from storage.errors import ArchiveNotOwned, ArchiveRunning, ArchiveUnavailable
from storage.maintenance.cold_archive.pack_rows import (
    alone,
    drop_empty,
    finish_killed,
    old_snapshots_horizon,
)
from storage.observability.counters import Counted, Report, silent

logger: logging.Logger = logging.getLogger(__name__)

BATCH: Final = 10_000
"""Records removed from a pack at once."""

GRACE_S: Final = 0.5
SNAPSHOT_GRACES: Final = 6
"""So much longer it waits for snapshots to end."""

SQL_GARBAGE: Final[LiteralString] = """
SELECT count(*)
FROM archive_garbage
"""

SQL_SWEPT_PACKS: Final[LiteralString] = """
SELECT p.pack, p.url
FROM archive_packs p
WHERE p.state = 'complete' AND EXISTS (SELECT FROM archive_garbage g WHERE g.pack = p.pack)
ORDER BY p.pack
"""

SQL_REMOVABLE: Final[LiteralString] = """
SELECT g.record_offset, g.record_length, g.event_id
FROM archive_garbage g
WHERE g.pack = $1::int AND g.record_offset > $2::bigint AND age(g.xmin) > age($3::text::xid)
ORDER BY g.record_offset
LIMIT $4::int
"""

SQL_REFERRED: Final[LiteralString] = """
SELECT i.record_offset
FROM unnest($1::text[], $2::bigint[], $3::bytea[]) AS i (event_id, record_offset, reference)
WHERE EXISTS (SELECT FROM events e WHERE e.event_id = i.event_id AND e.json = i.reference)
"""

SQL_FORGET: Final[LiteralString] = """
DELETE FROM archive_garbage
WHERE pack = $1::int AND record_offset = ANY($2::bigint[])
"""

SQL_COUNT_OFF: Final[LiteralString] = """
UPDATE archive_packs
SET events = events - $2::int,
    state = CASE WHEN events <= $2::int THEN 'deleting' ELSE state END
WHERE pack = $1::int
"""

SQL_DROP_IF_UNUSED: Final[LiteralString] = r"""
UPDATE archive_packs p
SET events = 0,
    state = 'deleting'
WHERE p.pack = $1::int AND p.events <= (
    SELECT count(*)
    FROM archive_garbage g
    WHERE g.pack = p.pack AND NOT EXISTS (
        SELECT
        FROM events e
        WHERE e.event_id = g.event_id
            AND substring(e.json FOR 5) = '\xa1'::bytea || int4send(p.pack)
    )
)
RETURNING p.pack
"""


class SweptPackRow(NamedTuple):
    """A pack with records to remove."""

    pack: int
    url: str


class GarbageRow(NamedTuple):
    """A record to which its event referred."""

    record_offset: int
    record_length: int
    event_id: str


class Swept(NamedTuple):
    """Records that were removed, those that wait for old snapshots, and removed packs."""

    removed: int = 0
    waiting: int = 0
    packs: int = 0


async def sweep(
    database: Database,
    *,
    grace_s: float = GRACE_S,
    take_over: bool = False,
    report: Report = silent,
) -> Swept:
    """Remove what nothing refers to.

    ``take_over``: own folders of packs that belong to another database. Raise `ArchiveRunning`,
    `ArchiveNotOwned` or `ArchiveUnavailable`.
    """
    async with alone(database, take_over=take_over):
        await finish_killed(database)
        swept = await sweep_packs(database, grace_s=grace_s, report=report)
        return swept._replace(packs=await drop_empty(database, SNAPSHOT_GRACES * grace_s))


async def sweep_if_free(database: Database, *, report: Report = silent) -> Swept:
    """Do the same at the end of a purge, unless there is nothing to do.

    A process that works on the archive sweeps at its own end: then leave it to that. If the archive
    cannot be reached, or belongs to another database, log a warning and leave it to the next sweep:
    the purge is done.
    """
    async with database.connection() as conn:
        waiting: int = await conn.fetchval(SQL_GARBAGE)
    if not waiting:
        return Swept()
    try:
        return await sweep(database, report=report)
    except ArchiveRunning:
        return Swept(waiting=waiting)
    except (ArchiveNotOwned, ArchiveUnavailable) as error:
        logger.warning(
            "%s: what was removed from its events stays there until the next sweep", error
        )
        return Swept(waiting=waiting)


async def sweep_packs(
    database: Database, *, grace_s: float = GRACE_S, report: Report = silent
) -> Swept:
    """Sweep all packs. Call it under the lock."""
    async with database.connection() as conn:
        total: int = await conn.fetchval(SQL_GARBAGE)
        rows = await conn.fetch(SQL_SWEPT_PACKS, row=SweptPackRow)
    counted, removed = Counted(report, "sweep the archive", total, "records"), 0
    if not rows:
        return Swept(0, total)
    horizon = await old_snapshots_horizon(database, SNAPSHOT_GRACES * grace_s)
    await asyncio.sleep(grace_s)
    for row in rows:
        try:
            removed += await _sweep_pack(database, row, horizon, counted)
        except FileNotFoundError:
            await _drop_if_unused(database, row)
    async with database.connection() as conn:
        return Swept(removed, await conn.fetchval(SQL_GARBAGE))


async def _sweep_pack(database: Database, row: SweptPackRow, horizon: str, counted: Counted) -> int:
    removed, after = 0, -1
    while True:
        async with database.connection() as conn:
            garbage = await conn.fetch(
                SQL_REMOVABLE, row.pack, after, horizon, BATCH, row=GarbageRow
            )
            if not garbage:
                return removed
            used = await referred_offsets(conn, row.pack, garbage)
        unused = [record for record in garbage if record.record_offset not in used]
        if unused:
            await asyncio.to_thread(erase_ranges, _ranges(row, unused))
        async with database.connection() as conn, begun(conn):
            await conn.execute(SQL_FORGET, row.pack, [record.record_offset for record in garbage])
            await conn.execute(SQL_COUNT_OFF, row.pack, len(unused))
        removed, after = removed + len(unused), garbage[-1].record_offset
        counted.add(len(garbage))


async def _drop_if_unused(database: Database, row: SweptPackRow) -> None:
    """Mark a pack whose file is missing as empty if it is; otherwise its notes wait.

    They also wait if its folder has no pack at all: its file system may not be mounted.
    """
    is_unused = False
    if await asyncio.to_thread(list_files, folder_of(row.url)):
        async with database.connection() as conn:
            is_unused = await conn.fetchval(SQL_DROP_IF_UNUSED, row.pack) is not None
    if not is_unused:
        logger.warning(
            "the pack %s is missing: what was removed from its events waits until it is back",
            row.pack,
            extra={"url": row.url},
        )


async def referred_offsets(
    conn: Connection, pack: int, records: Sequence[GarbageRow | PackEntry]
) -> set[int]:
    """Return the offsets of those records to which their event refers."""
    references = [
        (record.event_id, reference.offset, reference.to_bytes())
        for record in records
        for reference in (_reference(pack, record),)
    ]
    return set(await conn.fetchvals(SQL_REFERRED, *transposed(references, 3)))


def _ranges(row: SweptPackRow, garbage: Sequence[GarbageRow]) -> list[ByteRange]:
    return [ByteRange(row.url, *record_range(_reference(row.pack, record))) for record in garbage]


def _reference(pack: int, record: GarbageRow | PackEntry) -> Reference:
    if isinstance(record, PackEntry):
        return record.reference(pack)
    return Reference(pack, record.record_offset, record.record_length)


# --------------------------------------------------------------------------------------------------
# Count what the archive holds, and what archiving would take out of the table `events`.

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
