"""The bytes of events in Arrow tables: from their stored forms to what was received.

An executor loads a dictionary once, when it first meets rows that name it.
"""

from typing import Any

import pyarrow as pa

from storage.codec import decode, is_plain, unknown_dictionaries
from storage.database.arrow_results import ArrowConnection
from storage.database.dictionaries import SQL_DICTIONARIES, DictionaryRow, register_row


def decoded(conn: ArrowConnection, table: pa.Table, column: str) -> pa.Table:
    """Return the table with this column decoded; it also has ``event_id`` and ``room_id``.

    Raise `StorageCorrupt` for bytes that are damaged.
    """
    stored: list[Any] = table.column(column).to_pylist()
    if all(map(is_plain, stored)):
        return table
    if unknown := unknown_dictionaries(stored):
        for row in conn.rows(SQL_DICTIONARIES, list(unknown)):
            register_row(DictionaryRow(**row))
    event_ids = table.column("event_id").to_pylist()
    room_ids = table.column("room_id").to_pylist()
    raw = pa.array(map(decode, stored, event_ids, room_ids), pa.binary(), size=len(stored))
    return table.set_column(table.schema.get_field_index(column), column, raw)
