"""The form in which new events are written: what the migration allows, and the dictionary.

Earlier releases cannot read every form. While one of them may run, before a "post" step of the
migration, the form is the one that they read. A writer looks it up before its first write, and
before each one until all steps are done.

A writer encodes with the dictionary that was trained last, or with the shipped one. A new one is
published in the stream "caches" (`DICTIONARIES`), and the next write looks it up.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.codec import Dictionary, StoredBytes, encode, remember, shipped_dictionary
from storage.database.connection import Connection
from storage.database.dictionaries import newest_dictionary
from storage.database.migrate import DISTANCES_REVISION, ENCODED_REVISION, NARROW_GROUPS_REVISION
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet

SQL_FORM: Final[LiteralString] = """
SELECT code_revision >= $1::text AS has_distances, code_revision >= $2::text AS is_encoded,
    code_revision >= $3::text AS has_narrow_groups
FROM schema_compatibility
"""


class FormRow(NamedTuple):
    """Whether the forms are in use. Once they are, they stay in use."""

    has_distances: bool
    is_encoded: bool
    has_narrow_groups: bool


async def learn_form(conn: Connection, caches: WriterCaches) -> None:
    """Look up what is in use and the dictionary, unless they are known."""
    if caches.knows_form:
        return
    row = await conn.fetchrow(
        SQL_FORM, DISTANCES_REVISION, ENCODED_REVISION, NARROW_GROUPS_REVISION, row=FormRow
    )
    form = row or FormRow(False, False, False)
    caches.has_distances, caches.has_narrow_groups = form.has_distances, form.has_narrow_groups
    caches.knows_form = all(form)
    caches.dictionary = await writers_dictionary(conn) if form.is_encoded else None


async def stored_form(conn: Connection) -> Dictionary | None:
    """Return the dictionary to encode with; None while only the bytes themselves may be stored."""
    row = await conn.fetchrow(
        SQL_FORM, DISTANCES_REVISION, ENCODED_REVISION, NARROW_GROUPS_REVISION, row=FormRow
    )
    return await writers_dictionary(conn) if row is not None and row.is_encoded else None


async def writers_dictionary(conn: Connection) -> Dictionary:
    """Return the dictionary that writers use."""
    return await newest_dictionary(conn) or shipped_dictionary()


def new_bytes(change_set: ChangeSet) -> Sequence[StoredBytes]:
    """Return the column `json` of the new events, which this process need not decode."""
    dictionary, events = change_set.caches.dictionary, change_set.events
    column = []
    for nid, new in events.new_events.items():
        event_id, room_id = new.row.event_id, events.parsed[nid].room_id
        stored = encode(new.raw, event_id, room_id, dictionary)
        remember(stored, event_id, room_id, new.raw)
        column.append(stored)
    return column
