"""The form in which new events are written.

A writer encodes with the dictionary that was trained last, or with the shipped one. It looks it up
before its first write. A new one is published in the stream "caches" (`DICTIONARIES`), and the next
write looks it up.
"""

from collections.abc import Sequence

from storage.codec import Dictionary, StoredBytes, encode, remember, shipped_dictionary
from storage.database.connection import Connection
from storage.database.dictionaries import newest_dictionary
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet


async def learn_dictionary(conn: Connection, caches: WriterCaches) -> None:
    """Look up the dictionary, unless it is known."""
    if not caches.knows_dictionary:
        caches.dictionary = await writers_dictionary(conn)
        caches.knows_dictionary = True


async def writers_dictionary(conn: Connection) -> Dictionary:
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
