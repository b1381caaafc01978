"""Look up transactions of local users, by the names that a request has."""

from collections.abc import Collection, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.ids import EventId, RoomId, UserId
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.results import AppendResult
from storage.persist.model.transaction import (
    KnownTransaction,
    Transaction,
    TransactionKey,
)

SQL_TRANSACTIONS: Final[LiteralString] = """
SELECT r.room_id, p.name AS sender, t.device_id, t.transaction_id, t.event_id,
    e.stream_ordering, e.topological_ordering, e.type, e.state_key
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
LEFT JOIN LATERAL (
    SELECT x.stream_ordering, x.topological_ordering, y.type, k.state_key
    FROM events x
    JOIN event_types y USING (type_nid)
    LEFT JOIN state_keys k USING (state_key_nid)
    WHERE x.event_nid = t.event_nid
    OFFSET 0
) AS e ON true
"""


class StoredTransactionRow(NamedTuple):
    """A transaction, with the position, type and state key of its event if that is still stored."""

    room_id: str
    sender: str
    device_id: str
    transaction_id: str
    event_id: str
    stream_ordering: int | None
    topological_ordering: int | None
    type: str | None
    state_key: str | None

    @property
    def key(self) -> TransactionKey:
        room_id, sender = RoomId(self.room_id), UserId(self.sender)
        return TransactionKey(room_id, sender, self.device_id, self.transaction_id)

    def is_of(self, transaction: Transaction) -> bool:
        """Return whether the row under one of the keys of a request is of this request.

        If the key is without the path, the type and the state key of the event are compared. Only
        earlier releases stored redactions so: their targets are not compared. The event may be
        purged. Then the row is of any request that is stored so.
        """
        path = transaction.path
        if self.transaction_id != transaction.key.transaction_id:
            return True
        if self.type is None:
            return not transaction.needs_path
        return (self.type, self.state_key) == (path.type, path.state_key)

    @property
    def result(self) -> AppendResult:
        """Return the result of a repeated request."""
        return AppendResult(
            EventId(self.event_id),
            "duplicate",
            None,
            self.stream_ordering,
            self.topological_ordering,
        )


async def first_result(conn: Connection, transaction: Transaction) -> AppendResult | None:
    """Return the result of the first request, or None if none is stored."""
    row = _first(transaction, await _rows(conn, transaction.stored_as()))
    return None if row is None else row.result


async def load_transactions(
    conn: Connection, change_set: ChangeSet, transactions: Collection[Transaction]
) -> None:
    """Add the stored ones to the change set, and the keys that other requests have."""
    rows = await _rows(conn, [key for one in transactions for key in one.stored_as()])
    view = change_set.transactions
    for one in transactions:
        row = _first(one, rows)
        if row is not None:
            view.known[row.key] = KnownTransaction(EventId(row.event_id), one.path)
    view.taken |= rows.keys()


def _first(
    transaction: Transaction, rows: Mapping[TransactionKey, StoredTransactionRow]
) -> StoredTransactionRow | None:
    """Return the row of a request. One with the path is certain, so it comes first."""
    for key in reversed(transaction.stored_as()):
        if key in rows and rows[key].is_of(transaction):
            return rows[key]
    return None


async def _rows(
    conn: Connection, keys: Collection[TransactionKey]
) -> dict[TransactionKey, StoredTransactionRow]:
    rows = await conn.fetch(SQL_TRANSACTIONS, *transposed(keys, 4), row=StoredTransactionRow)
    return {row.key: row for row in rows}
