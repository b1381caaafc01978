"""Archive events: write their stored forms into packs, then change the events to refer to them.

Which events: those of the timeline that were received before a time, by room and topological
position. These stay in the table:

* events of the current state, which writers and readers load again and again;
* outliers, which have no position;
* redacted events that are not censored yet, because their bytes are to be removed soon;
* create events, names and aliases, which are few and describe the room;
* events whose bytes cannot be decoded, and those that are hardly longer than a reference.

A pack is on disk, synced and read again, before an event refers to it. An event is changed only if
it still holds what was packed, so a purge, `censor` or re-encoding in between wins. A record to
which no event refers in the end is noted as garbage.

Killed at any point, nothing is lost: events hold their bytes until they refer to a pack that is
whole. The next run finds the state of the pack in its row (`pack_rows`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, LiteralString, NamedTuple

from storage.codec import Reference, StoredBytes, decode
from storage.codec.pack import PackBuilder
from storage.database.archived_bytes import (
    checked_folder,
    folder_of,
    pack_url,
    read_file,
    write_file,
)
from storage.database.connection import Connection, Database
from storage.database.pace import Pace
from storage.database.placeholders import transposed
from storage.errors import ArchiveUnavailable, InputError, StorageCorrupt, UnknownRoom
from storage.maintenance.cold_archive.pack_rows import (
    SQL_SET_STATE,
    alone,
    drop_empty,
    drop_pack,
    finish_killed,
    folders_in_use,
    note_unused,
    own_folders,
)
from storage.maintenance.cold_archive.sweep import GRACE_S, SNAPSHOT_GRACES, sweep_packs
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.observability.counters import Counted, Report, silent

logger: logging.Logger = logging.getLogger(__name__)

TABLES: Final = ("events", "rooms", "current_state")
PACK_BYTES: Final = 64 << 20
PACK_EVENTS: Final = 100_000
PAGE: Final = 1_000
"""Events looked at by one statement."""
BATCH: Final = 500
"""Events changed by one transaction."""
MIN_BYTES: Final = 64
"""Shorter stored forms stay in the table."""

SQL_ROOMS: Final[LiteralString] = """
SELECT room_nid, room_id
FROM rooms
WHERE $1::text[] IS NULL OR room_id = ANY($1::text[])
ORDER BY room_nid
"""

SQL_PAGE: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, e.topological_ordering, e.stream_ordering,
    CASE WHEN e.received_ts < $4::bigint AND octet_length(e.json) >= $5::int
        AND (e.encoding = 1 OR (e.redacted_by IS NULL AND NOT e.redacted_form))
        AND t.type NOT IN ('m.room.create', 'm.room.name', 'm.room.canonical_alias')
        AND NOT EXISTS (
            SELECT
            FROM current_state c
            WHERE c.room_nid = e.room_nid AND c.state_key_nid = e.state_key_nid
                AND c.event_nid = e.event_nid
        )
        THEN e.json END AS json
FROM (
    SELECT *
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
        AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
    ORDER BY topological_ordering, stream_ordering
    LIMIT $6::int
) AS e
JOIN event_types t USING (type_nid)
ORDER BY e.topological_ordering, e.stream_ordering
"""

SQL_NEW_PACK: Final[LiteralString] = "SELECT nextval('archive_pack_numbers')::int"

SQL_ADD_PACK: Final[LiteralString] = """
INSERT INTO archive_packs (pack, state, url, bytes, events, created_ts)
VALUES ($1::int, 'writing', $2::text, $3::bigint, $4::int, $5::bigint)
"""

SQL_REFER: Final[LiteralString] = """
WITH
packed AS MATERIALIZED (
    SELECT event_nid, digest, reference
    FROM unnest($2::bigint[], $3::bytea[], $4::bytea[]) AS i (event_nid, digest, reference)
    WHERE EXISTS (SELECT FROM archive_packs WHERE pack = $1::int AND state = 'filling'
        FOR KEY SHARE)
),
free AS MATERIALIZED (  -- unchanged, and not locked by a writer
    SELECT e.event_nid, i.reference
    FROM packed i
    JOIN events e USING (event_nid)
    WHERE sha256(e.json) = i.digest
    ORDER BY e.event_nid
    FOR NO KEY UPDATE OF e SKIP LOCKED
)
UPDATE events e
SET json = free.reference
FROM free
WHERE e.event_nid = free.event_nid
RETURNING e.event_nid
"""


class ArchivableRoomRow(NamedTuple):
    """A room."""

    room_nid: int
    room_id: str


class ArchivableEventRow(NamedTuple):
    """An event of the timeline, with its stored form if it is to be archived."""

    event_nid: int
    event_id: str
    topological_ordering: int
    stream_ordering: int
    json: StoredBytes | None


class PackedEvent(NamedTuple):
    """An event in a pack: the digest of what it holds, and the reference to replace that."""

    event_nid: int
    digest: bytes
    reference: Reference


class Candidate(NamedTuple):
    """An event to archive."""

    room_id: str
    event_nid: int
    event_id: str
    stored: bytes


@dataclass(frozen=True, slots=True)
class Archived:
    """The result: events archived (with ``dry_run``: to be archived), and their bytes.

    ``packs``: files written. ``left``: events that changed or were locked meanwhile; the next run
    takes them. ``removed``: records that the sweep removed at the end.
    """

    events: int = 0
    bytes: int = 0
    packs: int = 0
    left: int = 0
    removed: int = 0


async def archive_events(
    database: Database,
    *,
    older_than_ms: int,
    url: str,
    room_ids: Sequence[str] | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    pack_bytes: int = PACK_BYTES,
    grace_s: float = GRACE_S,
    now_ms: int | None = None,
    take_over: bool = False,
    report: Report = silent,
) -> Archived:
    """Archive events that were received longer ago, at most ``limit``, in these rooms or in all.

    Writers and readers may go on. ``url``: a local folder that exists, or a URL that fsspec knows.
    ``take_over``: own folders of packs that belong to another database.
    Raise `InputError`, `UnknownRoom`, `ArchiveRunning`, `ArchiveNotOwned`, or `ArchiveUnavailable`;
    packs that are complete stay.
    """
    if limit is not None and limit < 0:
        raise InputError(f"the limit is {limit}: it must be at least 0")
    folder = checked_folder(url).rstrip("/")
    now = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    async with database.connection() as conn:
        rooms = await chosen_rooms(conn, room_ids)
        if dry_run:
            await own_folders(conn, await folders_in_use(conn, folder), claim=False)
    candidates = _candidates(database, rooms, now - older_than_ms, limit, report)
    if dry_run:
        sizes = [len(candidate.stored) async for candidate in candidates]
        return Archived(events=len(sizes), bytes=sum(sizes))
    async with alone(database, target=folder, take_over=take_over):
        await refuse_corrupt_indexes(database, "archiving", TABLES, report=report)
        await finish_killed(database)
        done = await _archive(database, candidates, folder, pack_bytes)
        swept = await sweep_packs(database, grace_s=grace_s, report=report)
        await drop_empty(database, SNAPSHOT_GRACES * grace_s)
    logger.info("archived %s events", done.events, extra={"packs": done.packs})
    return Archived(done.events, done.bytes, done.packs, done.left, swept.removed)


async def _archive(
    database: Database, candidates: AsyncIterator[Candidate], folder: str, pack_bytes: int
) -> Archived:
    done = Archived()
    builder: PackBuilder | None = None
    packed = list[PackedEvent]()
    async for candidate in candidates:
        if builder is None:
            async with database.connection() as conn:
                builder = PackBuilder(await conn.fetchval(SQL_NEW_PACK))
        reference = builder.add(candidate.room_id, candidate.event_id, candidate.stored)
        packed.append(
            PackedEvent(candidate.event_nid, sha256(candidate.stored).digest(), reference)
        )
        if builder.size >= pack_bytes or len(packed) >= PACK_EVENTS:
            done = _sum(done, await _store(database, builder, packed, folder))
            builder, packed = None, []
    if builder is not None:
        done = _sum(done, await _store(database, builder, packed, folder))
    return done


async def _store(
    database: Database, builder: PackBuilder, packed: Sequence[PackedEvent], folder: str
) -> Archived:
    pack, data = builder.pack, builder.finished()
    url, now = pack_url(folder, pack), time.time_ns() // 1_000_000
    async with database.connection() as conn:
        await own_folders(conn, [folder_of(url)], for_packs=True)
        await conn.execute(SQL_ADD_PACK, pack, url, len(data), len(packed), now)
    try:
        await asyncio.to_thread(_write, url, data)
    except ArchiveUnavailable:
        await drop_pack(database, pack, url)
        raise
    async with database.connection() as conn:
        await conn.execute(SQL_SET_STATE, pack, "filling")
    changed = set[int]()
    for start in range(0, len(packed), BATCH):
        changed |= await _refer(database, pack, packed[start : start + BATCH])
    unused = [
        entry
        for event, entry in zip(packed, builder.entries, strict=True)
        if event.event_nid not in changed
    ]
    await note_unused(database, pack, unused)
    async with database.connection() as conn:
        await conn.execute(SQL_SET_STATE, pack, "complete")
    size = sum(event.reference.length for event in packed if event.event_nid in changed)
    return Archived(len(changed), size, 1, len(unused))


def _write(url: str, data: bytes) -> None:
    write_file(url, data)
    if read_file(url) != data:
        raise ArchiveUnavailable("a pack differs from what was written", url=url)


async def _refer(database: Database, pack: int, packed: Sequence[PackedEvent]) -> set[int]:
    """Change these events to refer to the pack; return those that still held what it has."""
    pace, rows = Pace(), [(one.event_nid, one.digest, one.reference.to_bytes()) for one in packed]
    with pace.batch():
        async with database.connection() as conn:
            changed = await conn.fetchvals(SQL_REFER, pack, *transposed(rows, 3))
    await pace.rest()
    return set(changed)


async def chosen_rooms(
    conn: Connection, room_ids: Collection[str] | None
) -> list[ArchivableRoomRow]:
    """Return these rooms, or all. Raise `UnknownRoom`."""
    ids = None if room_ids is None else list(room_ids)
    rooms = await conn.fetch(SQL_ROOMS, ids, row=ArchivableRoomRow)
    if unknown := set(room_ids or ()) - {room.room_id for room in rooms}:
        raise UnknownRoom(min(unknown))
    return rooms


async def _candidates(
    database: Database,
    rooms: Sequence[ArchivableRoomRow],
    before_ms: int,
    limit: int | None,
    report: Report,
) -> AsyncIterator[Candidate]:
    """Yield events to archive, by room and topological position."""
    counted, left = Counted(report, "archive", len(rooms), "rooms"), limit
    for room in rooms:
        at = (-(1 << 63), -(1 << 63))
        while left != 0:
            async with database.connection() as conn:
                arguments = (room.room_nid, *at, before_ms, MIN_BYTES, PAGE)
                rows = await conn.fetch(SQL_PAGE, *arguments, row=ArchivableEventRow)
            for row in rows[:]:
                if row.json is not None and left != 0 and _can_be_decoded(row, room.room_id):
                    left = None if left is None else left - 1
                    stored: object = row.json
                    assert isinstance(stored, bytes)  # noqa: S101  # for the types
                    yield Candidate(room.room_id, row.event_nid, row.event_id, stored)
            if len(rows) < PAGE:
                break
            at = (rows[-1].topological_ordering, rows[-1].stream_ordering)
        counted.add()


def _can_be_decoded(row: ArchivableEventRow, room_id: str) -> bool:
    assert row.json is not None  # noqa: S101  # for the types
    try:
        decode(row.json, row.event_id, room_id)
    except StorageCorrupt as error:
        logger.warning("%s: it is not archived, its bytes cannot be decoded", error)
        return False
    return True


def _sum(one: Archived, other: Archived) -> Archived:
    return Archived(
        one.events + other.events,
        one.bytes + other.bytes,
        one.packs + other.packs,
        one.left + other.left,
    )
