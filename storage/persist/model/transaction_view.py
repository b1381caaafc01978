"""Transactions of local users: the event that a request of a client has made.

A client repeats a request under the same transaction id if it lost the answer. The repeated one
returns the first event.
"""

from typing import NamedTuple

from storage.ids import EventId
from storage.persist.model.caches import WriterCaches
from storage.persist.model.local_event import TransactionKey
from storage.persist.model.rows import EventRow


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
        self.known: dict[TransactionKey, EventId] = {}
        """The events of the batch, and those of rows that were looked up."""
        self.new: list[TransactionRow] = []

    def first_event(self, key: TransactionKey) -> EventId | None:
        """Return the event of a repeated request, or None for a new one."""
        return self.known.get(key) or self.caches.transactions.get(key)

    def add(self, key: TransactionKey, row: EventRow) -> None:
        """Add the transaction of a new event."""
        event_id = self.known[key] = EventId(row.event_id)
        ids = key.device_id, key.transaction_id, event_id
        self.new.append(TransactionRow(row.event_nid, row.room_nid, row.sender_nid, *ids))
