"""The form in which new events are written: what the migration allows, and the dictionary.

Earlier releases cannot read every form. While one of them may run, before a "post" step of the
migration, the form is the one that they read. A writer looks it up before its first write, and
before each one until all steps are done.

A writer encodes with the dictionary that was trained last, or with the shipped one. A new one is
published in the stream "caches" (`DICTIONARIES`), and the next write looks it up.
"""

from collections.abc import Sequence

from storage.codec import Dictionary, StoredBytes, encode, remember, shipped_dictionary
from storage.database.connection import Connection
from storage.database.dictionaries import newest_dictionary
from storage.database.row_forms import row_forms
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet


async def learn_form(conn: Connection, caches: WriterCaches) -> None:
    """Look up which forms are in use and the dictionary, unless they are known."""
    if caches.knows_form:
        return
    caches.forms = await row_forms(conn, caches.forms)
    caches.knows_form = all(caches.forms)
    caches.dictionary = await writers_dictionary(conn) if caches.forms.encoded else None


async def stored_form(conn: Connection) -> Dictionary | None:
    """Return the dictionary to encode with; None while only the bytes themselves may be stored."""
    return await writers_dictionary(conn) if (await row_forms(conn)).encoded else None


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
