"""Encode stored events again: those of an earlier dictionary.

It is a background job (`storage.database.background`), run by `room-storage jobs`. It goes through
the events in the order of their nids, which is nearly that of the table. A row is written if its
new form is a tenth shorter at least: less is not worth a dead row. Before it is written, the new
form is decoded and compared with the bytes.

A batch locks the rows that it may change, and skips those that a writer or a purge has locked. It
replaces only what it has read under the lock, so it never undoes the work of a writer or of
`censor`. A skipped row keeps its form, which every reader knows. The next run takes it.

An event whose bytes cannot be decoded is left alone; `verify` reports it.
"""

import logging
from typing import Any, Final, LiteralString, NamedTuple

from storage.codec import Dictionary, StoredBytes, decode, encode, headers_of
from storage.database.array_text import transposed
from storage.database.background import BatchRow, Job
from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.persist.write.stored_form import writers_dictionary

logger: logging.Logger = logging.getLogger(__name__)

JOB_NAME: Final = "encode events"
WORTH: Final = 0.9
"""A new form is written if it is shorter than this share of the old one."""

SQL_EXPECTED: Final[LiteralString] = """
SELECT count(*)
FROM events
"""

SQL_PART: Final[LiteralString] = """
SELECT count(*)::int AS rows, max(event_nid)::bigint AS place
FROM (
    SELECT event_nid
    FROM events
    WHERE event_nid > $1::bigint
    ORDER BY event_nid
    LIMIT $2::int
) AS part
"""

SQL_OTHER_FORMS: Final[LiteralString] = r"""
SELECT e.event_nid, e.event_id, r.room_id, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid > $1::bigint AND e.event_nid <= $2::bigint
    AND substring(e.json FOR 4) <> ALL ($3::bytea[])
    AND substring(e.json FOR 1) <> '\xa1'::bytea  -- it stays in the archive
ORDER BY e.event_nid
FOR NO KEY UPDATE OF e SKIP LOCKED
"""

SQL_SET_FORM: Final[LiteralString] = """
UPDATE events e
SET json = i.json
FROM unnest($1::bigint[], $2::bytea[]) AS i (event_nid, json)
WHERE e.event_nid = i.event_nid
"""


class FormedEventRow(NamedTuple):
    """An event in another form than the one that writers use."""

    event_nid: int
    event_id: str
    room_id: str
    json: StoredBytes


Form = tuple[int, StoredBytes]
"""A nid, and the new bytes."""


async def encode_batch(conn: Connection, after: int, rows: int) -> BatchRow:
    """Encode the next events again (`Job.batch`)."""
    part = await conn.fetchrow(SQL_PART, after, rows, row=BatchRow)
    if part is None or part.place is None:
        return part or BatchRow(0, None)
    dictionary = await writers_dictionary(conn)
    found = await conn.fetch(
        SQL_OTHER_FORMS, after, part.place, headers_of(dictionary), row=FormedEventRow
    )
    forms = [form for row in found if (form := _encoded_again(row, dictionary)) is not None]
    if forms:
        await conn.execute(SQL_SET_FORM, *transposed(forms, 2))
    return part


ENCODE_EVENTS: Final = Job(JOB_NAME, batch=encode_batch, expected=SQL_EXPECTED)
"""The job, which `room-storage jobs --re-encode` registers."""


def _encoded_again(row: FormedEventRow, dictionary: Dictionary) -> Form | None:
    """Return the form of an event to write, or None if it stays as it is."""
    try:
        raw = decode(row.json, row.event_id, row.room_id)
    except StorageCorrupt as error:
        logger.warning("%s: its bytes stay as they are, they cannot be decoded", error)
        return None
    new: Any = encode(raw, row.event_id, row.room_id, dictionary)
    old: Any = row.json
    if len(new) > WORTH * len(old):
        return None
    if decode(new, row.event_id, row.room_id) != raw:
        raise StorageCorrupt("an encoded event does not decode to its bytes", event_id=row.event_id)
    return row.event_nid, new
