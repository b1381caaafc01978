"""The bytes of events in Arrow tables: from their stored forms to what was received.

An executor loads a dictionary once, when it first meets rows that name it. It reads archived events
from their packs itself.
"""

from typing import Any

import pyarrow as pa

from storage.codec import (
    Reference,
    decode,
    dictionaries_of,
    has_references,
    is_plain,
    unknown_headers,
)
from storage.database.archived_bytes import SQL_PACK_URLS, read_forms
from storage.database.arrow_results import ArrowConnection
from storage.database.dictionaries import SQL_DICTIONARIES, DictionaryRow, register_row


def decoded(conn: ArrowConnection, table: pa.Table, column: str) -> pa.Table:
    """Return the table with this column decoded; it also has ``event_id`` and ``room_id``.

    Raise `StorageCorrupt` for bytes that are damaged.
    """
    stored: list[Any] = table.column(column).to_pylist()
    if all(map(is_plain, stored)):
        return table
    headers = unknown_headers(stored)
    if has_references(headers):
        stored = _resolved(conn, stored)
        headers = unknown_headers(stored)
    if unknown := dictionaries_of(headers):
        for row in conn.rows(SQL_DICTIONARIES, list(unknown)):
            register_row(DictionaryRow(**row))
    event_ids = table.column("event_id").to_pylist()
    room_ids = table.column("room_id").to_pylist()
    raw = pa.array(map(decode, stored, event_ids, room_ids), pa.binary(), size=len(stored))
    return table.set_column(table.schema.get_field_index(column), column, raw)


def _resolved(conn: ArrowConnection, stored: list[Any]) -> list[Any]:
    """Return the column with stored forms in place of references to the archive."""
    places = {
        at: reference
        for at, one in enumerate(stored)
        if (reference := Reference.parse(one)) is not None
    }
    packs = sorted({one.pack for one in places.values()})
    urls = {row["pack"]: row["url"] for row in conn.rows(SQL_PACK_URLS, packs)}
    forms = read_forms(sorted(set(places.values())), urls)
    return [forms[places[at]] if at in places else one for at, one in enumerate(stored)]
