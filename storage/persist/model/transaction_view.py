"""Transactions of local users: the event that a request of a client has made.

A client repeats a request under the same transaction id and path if it lost the answer. The
repeated one returns the first event. A request with the same id and another path is a new one.
"""

from typing import NamedTuple

from storage.ids import EventId
from storage.persist.model.caches import WriterCaches
from storage.persist.model.rows import EventRow
from storage.persist.model.transaction import KnownTransaction, Transaction, TransactionKey


class TransactionRow(NamedTuple):
    """A row to insert into `local_transactions`."""

    event_nid: int
    room_nid: int
    sender_nid: int
    device_id: str
    transaction_id: str
    event_id: str


class TransactionView:
    """Transactions that are stored, and those of the batch.

    A repeated request is found in the batch, in the caches, or among the rows that were looked up.
    A request that another process stores meanwhile is in none of them: the primary key refuses the
    write. The next attempt then looks it up.
    """

    def __init__(self, caches: WriterCaches) -> None:
        self.caches = caches
        self.known: dict[TransactionKey, KnownTransaction] = {}
        """The events of the batch, and those of rows that were looked up."""
        self.taken: set[TransactionKey] = set()
        """Keys of all rows that were looked up, also of those of requests with other paths."""
        self.new: list[TransactionRow] = []

    def first_event(self, transaction: Transaction) -> EventId | None:
        """Return the event of a repeated request, or None for a new one."""
        for key in transaction.stored_as():
            known = self._known(key)
            if known is not None and known.path == transaction.path:
                return known.event_id
        return None

    def add(self, transaction: Transaction, row: EventRow) -> None:
        key, with_path = transaction.stored_as()
        if transaction.needs_path or key in self.taken or self._known(key) is not None:
            key = with_path
        event_id = EventId(row.event_id)
        self.known[key] = KnownTransaction(event_id, transaction.path)
        ids = key.device_id, key.transaction_id, event_id
        self.new.append(TransactionRow(row.event_nid, row.room_nid, row.sender_nid, *ids))

    def _known(self, key: TransactionKey) -> KnownTransaction | None:
        return self.known.get(key) or self.caches.transactions.get(key)
