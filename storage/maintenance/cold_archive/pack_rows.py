"""The rows of `archive_packs`, what killed runs leave, and one process at a time.

    writing ──> filling ──> complete ──> deleting ──> (no row)
       │                                     ▲
       └── the run was killed ───────────────┘

The process holds an advisory lock of its session. So a row in the first two states, found under the
lock, is of a process that was killed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, LiteralString, NamedTuple

from storage.codec.pack import TRAILER_BYTES, PackEntry, index_length, parse_index
from storage.database.archived_bytes import (
    OWNER_FILE,
    ByteRange,
    LostRange,
    file_size,
    folder_of,
    list_files,
    local_path,
    read_file,
    read_ranges,
    remove_file,
    write_file,
)
from storage.database.connection import Connection, Database
from storage.database.placeholders import fill, transposed
from storage.errors import ArchiveNotOwned, ArchiveRunning, ArchiveUnavailable, StorageCorrupt

# --------------------------------------------------------------------------------------------------
# The owner of a folder of packs: the one database that may change its files.
#
# A copy of a database refers to the same packs. A purge there, or the return of events, would
# remove bytes that the original needs. So a file in each folder names the database by the system
# identifier of its cluster and its oid. A standby that takes over has both, so it stays the owner.
# A restored dump is another database.

SQL_DATABASE: Final[LiteralString] = """
SELECT format('%s.%s', (SELECT system_identifier FROM pg_control_system()), oid) AS identity,
    datname::text AS name
FROM pg_database
WHERE datname = current_database()
"""


class ArchiveOwnerRow(NamedTuple):
    """A database; the name is for people only."""

    identity: str
    name: str


async def own_folders(
    conn: Connection,
    folders: Iterable[str],
    *,
    take_over: bool = False,
    for_packs: bool = False,
    claim: bool = True,
) -> None:
    """Own these folders. Call it under the lock, unless it is not to ``claim`` any.

    Claim those that have packs and no owner; ``for_packs``: also those that have no packs yet;
    ``take_over``: those of another owner. Raise `ArchiveNotOwned` or `ArchiveUnavailable`, before
    any claim if a folder has another owner.
    """
    row = await conn.fetchrow(SQL_DATABASE, row=ArchiveOwnerRow)
    assert row is not None  # noqa: S101  # for the types
    claims = await asyncio.to_thread(_claims, row, sorted(set(folders)), take_over, for_packs)
    if claim:
        await asyncio.to_thread(_own, row, claims)


def _claims(
    database: ArchiveOwnerRow, folders: Iterable[str], take_over: bool, for_packs: bool
) -> list[str]:
    """Return the folders to claim. Raise `ArchiveNotOwned`."""
    claims = list[str]()
    for folder in folders:
        path = local_path(folder)
        if path is not None and not path.is_dir() and not take_over:
            continue  # it has nothing to change
        owner = _owner(folder)
        if owner is None:
            # a folder without packs may be a file system that is not mounted
            if for_packs or list_files(folder):
                claims.append(folder)
        elif owner.identity != database.identity:
            if not take_over:
                raise _refusal(folder, owner, database)
            claims.append(folder)
    return claims


def _own(database: ArchiveOwnerRow, claims: Iterable[str]) -> None:
    for folder in claims:
        write_file(f"{folder}/{OWNER_FILE}", f"{database.identity} {database.name}\n".encode())
        owner = _owner(folder)
        if owner is None or owner.identity != database.identity:  # another one claims it, too
            raise _refusal(folder, owner, database)


def _owner(folder: str) -> ArchiveOwnerRow | None:
    try:
        text = read_file(f"{folder}/{OWNER_FILE}").decode(errors="replace")
    except FileNotFoundError:
        return None
    identity, _, name = text.strip().partition(" ")
    return ArchiveOwnerRow(identity, name)


def _refusal(
    folder: str, owner: ArchiveOwnerRow | None, database: ArchiveOwnerRow
) -> ArchiveNotOwned:
    owned = " ".join(owner or ()).strip() or "unknown"
    return ArchiveNotOwned(folder, owner=owned, database=" ".join(database))


logger: logging.Logger = logging.getLogger(__name__)

ENTRIES: Final = 1_000
"""Entries of an index that one statement compares with events."""

SQL_LOCK: Final[LiteralString] = fill("SELECT pg_try_advisory_lock({LOCK_ARCHIVE})")
SQL_UNLOCK: Final[LiteralString] = fill("SELECT pg_advisory_unlock({LOCK_ARCHIVE})")

SQL_PACKS: Final[LiteralString] = """
SELECT pack, state, url, bytes, events
FROM archive_packs
ORDER BY pack
"""

SQL_SET_STATE: Final[LiteralString] = """
UPDATE archive_packs
SET state = $2::text
WHERE pack = $1::int
"""

SQL_DELETE_PACK: Final[LiteralString] = """
WITH garbage AS (
    DELETE FROM archive_garbage
    WHERE pack = $1::int
)
DELETE FROM archive_packs
WHERE pack = $1::int
"""

SQL_NOTE_UNUSED: Final[LiteralString] = """
INSERT INTO archive_garbage (pack, record_offset, record_length, event_id)
SELECT $1::int, i.record_offset, i.record_length, i.event_id
FROM unnest($2::text[], $3::bigint[], $4::int[], $5::bytea[])
    AS i (event_id, record_offset, record_length, reference)
WHERE NOT EXISTS (SELECT FROM events e WHERE e.event_id = i.event_id AND e.json = i.reference)
ON CONFLICT DO NOTHING
"""

SQL_HORIZON: Final[LiteralString] = """
SELECT oldest.xmin::text
FROM (
    SELECT backend_xmin AS xmin
    FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND backend_type IN ('client backend', 'parallel worker')
    UNION ALL
    SELECT backend_xid
    FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
    UNION ALL
    SELECT backend_xmin FROM pg_stat_replication
    UNION ALL
    SELECT xmin FROM pg_replication_slots
    UNION ALL
    SELECT pg_snapshot_xmax(pg_current_snapshot())::xid
) AS oldest
WHERE oldest.xmin IS NOT NULL
ORDER BY age(oldest.xmin) DESC
LIMIT 1
"""

SQL_HIDDEN: Final[LiteralString] = """
SELECT l.virtualtransaction
FROM pg_locks l
JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'virtualxid' AND l.virtualxid = l.virtualtransaction
    AND a.datname = current_database()
    AND NOT pg_has_role('pg_read_all_stats', 'USAGE') AND NOT pg_has_role(a.usesysid, 'USAGE')
"""

SQL_OLDEST_XID: Final[LiteralString] = """
SELECT datfrozenxid::text
FROM pg_database
WHERE datname = current_database()
"""

SQL_NEXT_XID: Final[LiteralString] = "SELECT pg_snapshot_xmax(pg_current_snapshot())::xid::text"

SQL_HAS_PASSED: Final[LiteralString] = "SELECT age($1::text::xid) <= age($2::text::xid)"

SQL_DELETABLE: Final[LiteralString] = """
SELECT pack, state, url, bytes, events
FROM archive_packs
WHERE state = 'deleting' AND age(xmin) > age($1::text::xid)
ORDER BY pack
"""


class PackRow(NamedTuple):
    """A pack."""

    pack: int
    state: str
    url: str
    bytes: int
    events: int


@asynccontextmanager
async def alone(
    database: Database, *, target: str | None = None, take_over: bool = False
) -> AsyncIterator[None]:
    """Be the only process that changes the archive, and own its folders.

    ``target``: the folder of new packs. Raise `ArchiveRunning`, `ArchiveNotOwned` or
    `ArchiveUnavailable` (`own_folders`).

    The lock is on a connection outside of the pool: its end releases the lock also if this is
    cancelled before the answer.
    """
    async with database.apart() as conn:
        if not await conn.fetchval(SQL_LOCK):
            raise ArchiveRunning
        try:
            await own_folders(conn, await folders_in_use(conn, target), take_over=take_over)
            yield
        finally:
            await conn.fetchval(SQL_UNLOCK)


async def folders_in_use(conn: Connection, target: str | None = None) -> set[str]:
    folders = {folder_of(row.url) for row in await packs(conn)}
    return folders | (set() if target is None else {target})


async def packs(conn: Connection) -> list[PackRow]:
    return await conn.fetch(SQL_PACKS, row=PackRow)


async def old_snapshots_horizon(database: Database, wait_s: float) -> str:
    """Return an xid: the writes of all transactions before it are visible to every snapshot.

    Wait so long for the snapshots of now to end. Snapshots of standbys count if they report them
    (`hot_standby_feedback`) and this role may see them. Of another role's session it may only see
    whether its transaction ended: while one goes on, no write counts as visible to all.
    """
    began = time.monotonic()
    async with database.connection() as conn:
        next_xid = str(await conn.fetchval(SQL_NEXT_XID))
        hidden = set(await conn.fetchvals(SQL_HIDDEN))
        while True:
            horizon = str(await conn.fetchval(SQL_HORIZON))
            if hidden:
                hidden.intersection_update(await conn.fetchvals(SQL_HIDDEN))
            has_passed = not hidden and await conn.fetchval(SQL_HAS_PASSED, horizon, next_xid)
            if has_passed or time.monotonic() - began >= wait_s:
                return str(await conn.fetchval(SQL_OLDEST_XID)) if hidden else horizon
            await asyncio.sleep(wait_s / 50)


async def finish_killed(database: Database) -> None:
    """Bring the packs of killed runs to an end, if they can be read. Call it under the lock."""
    async with database.connection() as conn:
        rows = await packs(conn)
    for row in rows:
        if row.state in {"writing", "filling"}:
            try:
                await _finish(database, row)
            except (ArchiveUnavailable, StorageCorrupt) as error:
                logger.warning("%s: its pack %s is finished later", error, row.pack)


async def _finish(database: Database, row: PackRow) -> None:
    if row.state == "writing":
        await drop_pack(database, row.pack, row.url)
        return
    await note_unused(database, row.pack, await index_of(row.pack, row.url))
    async with database.connection() as conn:
        await conn.execute(SQL_SET_STATE, row.pack, "complete")


async def drop_pack(database: Database, pack: int, url: str) -> None:
    """Remove a file to which nothing refers, then its row."""
    await asyncio.to_thread(remove_file, url)
    async with database.connection() as conn:
        await conn.execute(SQL_DELETE_PACK, pack)


async def drop_empty(database: Database, wait_s: float) -> int:
    """Remove the packs that are empty, unless a snapshot may need them; return their number."""
    async with database.connection() as conn:
        if "deleting" not in {row.state for row in await packs(conn)}:
            return 0
    horizon = await old_snapshots_horizon(database, wait_s)
    async with database.connection() as conn:
        rows = await conn.fetch(SQL_DELETABLE, horizon, row=PackRow)
    for row in rows:
        await drop_pack(database, row.pack, row.url)
    return len(rows)


async def note_unused(database: Database, pack: int, entries: Sequence[PackEntry]) -> None:
    """Note the records to which their event does not refer; the sweep removes them."""
    for start in range(0, len(entries), ENTRIES):
        part = entries[start : start + ENTRIES]
        async with database.connection() as conn:
            await conn.execute(SQL_NOTE_UNUSED, pack, *_columns(pack, part))


async def index_of(pack: int, url: str) -> list[PackEntry]:
    """Return the index of a pack. Raise `StorageCorrupt` or `ArchiveUnavailable`."""
    try:
        return await asyncio.to_thread(read_index, url)
    except ValueError as error:
        raise StorageCorrupt(f"the index of a pack: {error}", pack=pack, url=url) from error


def read_index(url: str) -> list[PackEntry]:
    """Return the index of a pack; raise ValueError if it has none, or `ArchiveUnavailable`."""
    try:
        size = file_size(url)
    except FileNotFoundError:
        raise ValueError("the pack is missing") from None
    tail = _read(ByteRange(url, max(size - TRAILER_BYTES, 0), size))
    start = size - TRAILER_BYTES - index_length(tail)
    if start < 0:
        raise ValueError("the length of the index is wrong")
    return parse_index(_read(ByteRange(url, start, size)))


def _columns(pack: int, entries: Iterable[PackEntry]) -> list[list[object]]:
    rows = [
        (entry.event_id, entry.offset, entry.length, entry.reference(pack).to_bytes())
        for entry in entries
    ]
    return transposed(rows, 4)


def _read(span: ByteRange) -> bytes:
    [part] = read_ranges([span])
    if isinstance(part, LostRange):
        raise ValueError(part.reason)  # noqa: TRY004  # not a mistake of the caller
    return part
