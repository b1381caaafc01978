"""Run the checks."""

from collections.abc import AsyncIterator, Callable, Collection
from typing import Final, LiteralString

from storage.database.connection import Connection, Database
from storage.maintenance.indexes import Lie, lies
from storage.maintenance.totals import event_total
from storage.maintenance.verify.archive import check_archive
from storage.maintenance.verify.audience_numbers import check_audience_numbers
from storage.maintenance.verify.auth_results import check_auth_results
from storage.maintenance.verify.chain_cover import check_cover
from storage.maintenance.verify.connections import check_connections
from storage.maintenance.verify.current import (
    check_current_state,
    check_member_counts,
    check_member_positions,
    check_memberships,
    check_partial,
)
from storage.maintenance.verify.deltas import check_deltas
from storage.maintenance.verify.doubled import check_doubled
from storage.maintenance.verify.event_columns import check_contents
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.graph import (
    check_after_gaps,
    check_extremities,
    check_gaps,
    check_order,
)
from storage.maintenance.verify.groups import broken_paths, check_groups
from storage.maintenance.verify.indexes import finding_of, hide_facts
from storage.maintenance.verify.names import check_names, check_orphans
from storage.maintenance.verify.positions import check_indexes, check_positions, check_sequences
from storage.maintenance.verify.redactions import check_redactions
from storage.maintenance.verify.reorderings import check_reorderings
from storage.maintenance.verify.room import VerifiedRoom
from storage.maintenance.verify.states import check_current_group, check_states
from storage.maintenance.verify.time_order import check_time_order
from storage.maintenance.verify.transactions import check_transactions
from storage.maintenance.verify.verdicts import check_verdicts
from storage.maintenance.verify.version import check_version, read_room
from storage.maintenance.verify.visibility import (
    check_audiences,
    check_visibility,
    check_visibility_counts,
)
from storage.observability.progress import Counted, Report, silent

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
    lying = await lies(database, report=report)
    for lie in lying:
        yield finding_of(lie)
    if hide_facts(lying):
        return
    async with database.connection() as conn:
        total = await event_total(conn, room_ids)
    counted = Counted(report, "verify", total.rows, "events", total.is_estimate)
    async for room_id in _given(room_ids) if room_ids is not None else all_rooms(database):
        async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
            async for finding in verify_room(
                conn, room_id, server_name=server_name, counted=counted
            ):
                yield finding
    if room_ids is None:
        async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
            async for finding in verify_database(conn, lying):
                yield finding


async def verify_room(
    conn: Connection, room_id: str, *, server_name: str, counted: Counted | None = None
) -> AsyncIterator[Finding]:
    """Yield the differences in one room, each once.

    Where the path of a state group cannot be read at all, nothing else of the room is checked. Call
    it within a snapshot. Each check counts as an equal part of the room's events. Raise
    `UnknownRoom`.
    """
    room = await read_room(conn, room_id, server_name)
    size = 0 if counted is None else (await event_total(conn, [room_id])).rows
    found = set[Finding]()
    if broken := await broken_paths(conn, room):
        for finding in broken:
            yield finding
        return
    for check in ROOM_CHECKS:
        async for finding in check(conn, room):
            if finding not in found:
                found.add(finding)
                yield finding
        if counted is not None:
            counted.add(size / len(ROOM_CHECKS))


async def verify_database(conn: Connection, lying: Collection[Lie] = ()) -> AsyncIterator[Finding]:
    """Yield the differences in what all rooms share.

    ``lying``: corrupt indexes. If there are any, only the check that reads no table runs.
    """
    for check in (check_indexes,) if lying else DATABASE_CHECKS:
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


async def _given(room_ids: Collection[str]) -> AsyncIterator[str]:
    for room_id in room_ids:
        yield room_id
