"""Compare the packs of the archive with the tables, for `verify`.

That each event has its bytes, in a pack or not, is checked with the events
(`storage.maintenance.verify.event_columns`). This checks the rest: each pack is there and whole,
with all records that its index names; and each file in a folder has a row.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, LiteralString

from storage.codec.pack import START, damaged_entries
from storage.database.connection import Connection
from storage.database.pack_store import folder_of, list_files, read_file
from storage.maintenance.cold_archive.pack_rows import PackRow, packs, read_index
from storage.maintenance.verify.finding import Finding

CHECK: Final = "archive"

SQL_IS_RUNNING: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM pg_locks l
    JOIN pg_database d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.granted
        AND l.classid = 0 AND l.objid = 1919905650 AND l.objsubid = 1
)
"""


async def check_archive(conn: Connection) -> AsyncIterator[Finding]:
    """Yield packs that are missing or damaged, and files without a row."""
    rows = await packs(conn)
    for row in rows:
        if row.state in {"filling", "complete"} and (wrong := await asyncio.to_thread(_wrong, row)):
            yield Finding(CHECK, None, (f"pack {row.pack}", row.url), wrong, "a whole pack")
    if await conn.fetchval(SQL_IS_RUNNING):
        return  # it writes files that this snapshot does not know
    known = {row.url for row in rows}
    for folder in sorted({folder_of(url) for url in known}):
        for url in await asyncio.to_thread(list_files, folder):
            if url not in known:
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
