"""Return archived events to the table: of all packs, of one, or of some rooms.

The index of a pack says which events it has. An event is changed only if it still refers to the
record. The record is garbage then, and the sweep at the end removes it; a pack without records
goes, too. Killed anywhere, run it again. A pack without an index, as one that is missing, stops no
other: it is reported at the end.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString

from storage.codec import LostBytes
from storage.codec.pack import PackEntry
from storage.database.archived_bytes import stored_forms
from storage.database.connection import Database
from storage.database.pace import Pace
from storage.database.placeholders import transposed
from storage.errors import InputError, StorageCorrupt
from storage.maintenance.cold_archive.pack_rows import (
    PackRow,
    alone,
    drop_empty,
    finish_killed,
    index_of,
    packs,
)
from storage.maintenance.cold_archive.run import chosen_rooms
from storage.maintenance.cold_archive.sweep import (
    GRACE_S,
    SNAPSHOT_GRACES,
    referred_offsets,
    sweep_packs,
)
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.observability.counters import Counted, Report, silent

logger: logging.Logger = logging.getLogger(__name__)

TABLES: Final = ("events",)
BATCH: Final = 500

SQL_RETURN: Final[LiteralString] = """
WITH free AS MATERIALIZED (
    SELECT e.event_nid, i.json
    FROM unnest($1::text[], $2::bytea[], $3::bytea[]) AS i (event_id, reference, json)
    JOIN events e ON e.event_id = i.event_id AND e.json = i.reference
    ORDER BY e.event_nid
    FOR NO KEY UPDATE OF e SKIP LOCKED
)
UPDATE events e
SET json = free.json
FROM free
WHERE e.event_nid = free.event_nid
RETURNING e.event_id
"""


@dataclass(frozen=True, slots=True)
class Returned:
    """Events that returned; records that are lost or damaged; packs that were removed."""

    events: int = 0
    lost: int = 0
    packs: int = 0


async def return_events(
    database: Database,
    *,
    pack: int | None = None,
    room_ids: Collection[str] | None = None,
    grace_s: float = GRACE_S,
    take_over: bool = False,
    report: Report = silent,
) -> Returned:
    """Return events to the table. Writers and readers may go on.

    Packs that old snapshots may still read are removed by the next sweep. ``take_over``: own
    folders of packs that belong to another database. Raise `InputError` for an unknown pack,
    `UnknownRoom`, `ArchiveRunning`, `ArchiveNotOwned`, `ArchiveUnavailable`, or, once all others
    have returned, `StorageCorrupt` for a pack without index.
    """
    async with alone(database, take_over=take_over):
        await refuse_corrupt_indexes(database, "returning archived events", TABLES, report=report)
        await finish_killed(database)
        async with database.connection() as conn:
            await chosen_rooms(conn, room_ids)
            rows = [row for row in await packs(conn) if pack in {None, row.pack}]
        if pack is not None and not rows:
            raise InputError(f"there is no pack {pack}")
        counted = Counted(report, "return events", sum(row.events for row in rows), "events")
        events = lost = 0
        without_index = list[StorageCorrupt]()
        for row in rows:
            try:
                returned, damaged = await _return(database, row, room_ids, counted)
            except StorageCorrupt as error:
                logger.warning("%s: its events do not return", error)
                without_index.append(error)
                continue
            events, lost = events + returned, lost + damaged
        await sweep_packs(database, grace_s=grace_s, report=report)
        empty = await drop_empty(database, SNAPSHOT_GRACES * grace_s)
        if without_index:
            raise without_index[0]
        return Returned(events, lost, empty)


async def _return(
    database: Database, row: PackRow, room_ids: Collection[str] | None, counted: Counted
) -> tuple[int, int]:
    if row.state in {"writing", "deleting"}:  # nothing refers to it
        return 0, 0
    entries = [
        entry
        for entry in await index_of(row.pack, row.url)
        if room_ids is None or entry.room_id in room_ids
    ]
    events = lost = 0
    pace = Pace()
    for start in range(0, len(entries), BATCH):
        part = entries[start : start + BATCH]
        with pace.batch():
            returned, damaged = await _return_part(database, row, part)
        events, lost = events + returned, lost + damaged
        counted.add(len(part))
        await pace.rest()
    return events, lost


async def _return_part(
    database: Database, row: PackRow, entries: Sequence[PackEntry]
) -> tuple[int, int]:
    async with database.connection() as conn:
        forms = await stored_forms(conn, {entry.reference(row.pack) for entry in entries})
        lost = {reference for reference, form in forms.items() if isinstance(form, LostBytes)}
        rows = [
            (entry.event_id, reference.to_bytes(), forms[reference])
            for entry in entries
            if (reference := entry.reference(row.pack)) not in lost
        ]
        changed = await conn.fetchvals(SQL_RETURN, *transposed(rows, 3))
        left = [entry for entry in entries if entry.reference(row.pack) in lost]
        # a record that was removed is lost to nobody
        return len(changed), len(await referred_offsets(conn, row.pack, left)) if left else 0
