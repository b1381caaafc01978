"""Look up transactions of local users, by the names that a request has."""

from collections.abc import Collection
from typing import Final, LiteralString, NamedTuple

from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.ids import EventId, RoomId, UserId
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.local_event import TransactionKey
from storage.persist.model.results import AppendResult

SQL_TRANSACTIONS: Final[LiteralString] = """
SELECT r.room_id, p.name AS sender, t.device_id, t.transaction_id, t.event_id,
    e.stream_ordering, e.topological_ordering
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
    AS i (room_id, sender, device_id, transaction_id)
CROSS JOIN LATERAL (SELECT x.room_nid, x.room_id FROM rooms x
    WHERE x.room_id = i.room_id OFFSET 0) AS r
CROSS JOIN LATERAL (SELECT x.principal_nid, x.name FROM principals x
    WHERE x.name = i.sender OFFSET 0) AS p
CROSS JOIN LATERAL (
    SELECT x.device_id, x.transaction_id, x.event_nid, x.event_id
    FROM local_transactions x
    WHERE x.room_nid = r.room_nid AND x.sender_nid = p.principal_nid
        AND x.device_id = i.device_id AND x.transaction_id = i.transaction_id
    OFFSET 0
) AS t
-- a purge may have deleted the event
LEFT JOIN LATERAL (SELECT x.stream_ordering, x.topological_ordering FROM events x
    WHERE x.event_nid = t.event_nid OFFSET 0) AS e ON true
"""


class StoredTransactionRow(NamedTuple):
    """A transaction, and the position of its event if that is still stored."""

    room_id: str
    sender: str
    device_id: str
    transaction_id: str
    event_id: str
    stream_ordering: int | None
    topological_ordering: int | None


async def stored_transactions(
    conn: Connection, keys: Collection[TransactionKey]
) -> dict[TransactionKey, AppendResult]:
    """Return the results for those of these requests that are stored."""
    rows = await conn.fetch(SQL_TRANSACTIONS, *transposed(keys, 4), row=StoredTransactionRow)
    return {
        TransactionKey(
            RoomId(row.room_id), UserId(row.sender), row.device_id, row.transaction_id
        ): AppendResult(
            EventId(row.event_id), "duplicate", None, row.stream_ordering, row.topological_ordering
        )
        for row in rows
    }


async def load_transactions(
    conn: Connection, change_set: ChangeSet, keys: Collection[TransactionKey]
) -> None:
    """Add the stored ones to the change set."""
    for key, first in (await stored_transactions(conn, keys)).items():
        if first.event_id is not None:
            change_set.transactions.known[key] = first.event_id
