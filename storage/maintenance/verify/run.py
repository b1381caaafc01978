"""Run the checks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Final, LiteralString

from storage.codec.pack import START, damaged_entries
from storage.database.archived_bytes import folder_of, list_files, read_file
from storage.database.connection import Connection, Database
from storage.database.placeholders import fill
from storage.maintenance.cold_archive.pack_rows import PackRow, packs, read_index
from storage.maintenance.indexes import IndexMismatch, index_mismatches
from storage.maintenance.totals import event_total
from storage.maintenance.verify.auth_graph import check_cover
from storage.maintenance.verify.auth_results import check_auth_results, check_verdicts
from storage.maintenance.verify.current import (
    check_current_state,
    check_deltas,
    check_member_counts,
    check_member_positions,
    check_memberships,
    check_partial,
)
from storage.maintenance.verify.event_columns import check_contents, check_redactions
from storage.maintenance.verify.event_loader import Finding, VerifiedRoom, check_version, read_room
from storage.maintenance.verify.graph import (
    check_after_gaps,
    check_connections,
    check_doubled,
    check_extremities,
    check_gaps,
    check_indexes,
    check_order,
    check_positions,
    check_reorderings,
    check_sequences,
    check_time_order,
    check_transactions,
    finding_of,
    hide_facts,
)
from storage.maintenance.verify.row_rules import check_row_rules
from storage.maintenance.verify.states import (
    broken_paths,
    check_current_group,
    check_groups,
    check_states,
)
from storage.maintenance.verify.visibility import (
    check_audience_numbers,
    check_audiences,
    check_names,
    check_orphans,
    check_visibility,
    check_visibility_counts,
)
from storage.observability.counters import Counted, Report, silent

# --------------------------------------------------------------------------------------------------
# Compare the packs of the archive with the tables, for `verify`.
#
# That each event has its bytes, in a pack or not, is checked with the events
# (`storage.maintenance.verify.event_columns`). This checks the rest: each pack is there and whole,
# with all records that its index names; and each file in a folder has a row.

CHECK: Final = "archive"

SQL_IS_RUNNING: Final[LiteralString] = fill("""
SELECT EXISTS (
    SELECT
    FROM pg_locks l
    JOIN pg_database d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.granted
        AND l.classid = 0 AND l.objid = {LOCK_ARCHIVE} AND l.objsubid = 1
)
""")


async def check_archive(conn: Connection) -> AsyncIterator[Finding]:
    """Yield packs that are missing or damaged, and files without a row."""
    rows = await packs(conn)
    for row in rows:
        if row.state in {"filling", "complete"} and (wrong := await asyncio.to_thread(_wrong, row)):
            yield Finding(CHECK, None, (f"pack {row.pack}", row.url), wrong, "a whole pack")
    if await conn.fetchval(SQL_IS_RUNNING):
        return  # it writes files that this snapshot does not know
    urls = {row.url for row in rows}
    for folder in sorted({folder_of(url) for url in urls}):
        for url in await asyncio.to_thread(list_files, folder):
            if url not in urls:
                yield Finding(CHECK, None, (url,), "a file that no pack has", "no file")


def _wrong(row: PackRow) -> str | None:
    """Return what is wrong with a pack; None: nothing."""
    try:
        entries, data = read_index(row.url), read_file(row.url)
    except ValueError as error:
        return str(error)
    if len(data) != row.bytes or not data.startswith(START):
        return f"{len(data)} bytes of another file, not {row.bytes}"
    damaged = damaged_entries(row.pack, data, entries)
    if damaged:
        return f"{len(damaged)} damaged records, of {damaged[0].event_id} first"
    return None


ROOM_CHECKS: Final[tuple[Callable[[Connection, VerifiedRoom], AsyncIterator[Finding]], ...]] = (
    check_version,
    check_doubled,
    check_contents,
    check_order,
    check_reorderings,
    check_gaps,
    check_after_gaps,
    check_time_order,
    check_extremities,
    check_groups,
    check_states,
    check_auth_results,
    check_current_group,
    check_current_state,
    check_member_counts,
    check_memberships,
    check_member_positions,
    check_partial,
    check_deltas,
    check_transactions,
    check_cover,
    check_redactions,
    check_verdicts,
    check_audiences,
    check_audience_numbers,
    check_visibility,
    check_visibility_counts,
)
DATABASE_CHECKS: Final[tuple[Callable[[Connection], AsyncIterator[Finding]], ...]] = (
    check_names,
    check_orphans,
    check_positions,
    check_sequences,
    check_connections,
    check_archive,
    check_indexes,
)

SQL_ROOM_IDS: Final[LiteralString] = """
SELECT room_id
FROM rooms
WHERE room_id > $1::text
ORDER BY room_id
LIMIT 1000
"""


async def verify(
    database: Database,
    *,
    server_name: str,
    room_ids: Collection[str] | None = None,
    report: Report = silent,
) -> AsyncIterator[Finding]:
    """Yield every difference, of these rooms, or of all rooms and the data that they share.

    ``server_name``: its users are local. All indexes are compared with their tables first. Checks
    that would read through a corrupt index are skipped, because they would report correct rows.
    Each room is read in a snapshot of its own, so writers may go on. Raise `UnknownRoom`.
    """
    mismatches = await index_mismatches(database, report=report)
    for mismatch in mismatches:
        yield finding_of(mismatch)
    if hide_facts(mismatches):
        return
    async with database.connection() as conn:
        total = await event_total(conn, room_ids)
    counted = Counted(report, "verify", total.rows, "events", total.is_estimate)
    async for room_id in _each(room_ids) if room_ids is not None else all_rooms(database):
        async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
            async for finding in verify_room(
                conn, room_id, server_name=server_name, counted=counted
            ):
                yield finding
    if room_ids is None:
        async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
            async for finding in verify_database(conn, mismatches):
                yield finding


async def verify_room(
    conn: Connection, room_id: str, *, server_name: str, counted: Counted | None = None
) -> AsyncIterator[Finding]:
    """Yield the differences in one room, each once.

    Where the path of a state group cannot be read at all, or a row breaks a rule, nothing else of
    the room is checked. Call
    it within a snapshot. Each check counts as an equal part of the room's events. Raise
    `UnknownRoom`.
    """
    room = await read_room(conn, room_id, server_name)
    size = 0 if counted is None else (await event_total(conn, [room_id])).rows
    reported = set[Finding]()
    if broken := [
        *await broken_paths(conn, room),
        *[finding async for finding in check_row_rules(conn, room)],
    ]:
        for finding in broken:
            yield finding
        return
    for check in ROOM_CHECKS:
        async for finding in check(conn, room):
            if finding not in reported:
                reported.add(finding)
                yield finding
        if counted is not None:
            counted.add(size / len(ROOM_CHECKS))


async def verify_database(
    conn: Connection, mismatches: Collection[IndexMismatch] = ()
) -> AsyncIterator[Finding]:
    """Yield the differences in what all rooms share.

    ``mismatches``: corrupt indexes. If there are any, only the check that reads no table runs.
    """
    for check in (check_indexes,) if mismatches else DATABASE_CHECKS:
        async for finding in check(conn):
            yield finding


async def all_rooms(database: Database) -> AsyncIterator[str]:
    after = ""
    while True:
        async with database.connection() as conn:
            page: list[str] = await conn.fetchvals(SQL_ROOM_IDS, after)
        if not page:
            return
        for room_id in page:
            yield room_id
        after = page[-1]


async def _each(room_ids: Collection[str]) -> AsyncIterator[str]:
    for room_id in room_ids:
        yield room_id
