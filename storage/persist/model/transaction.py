"""Requests of clients that make events, and the keys under which they are stored.

The key of `local_transactions` has no column for the path of the request. So a row has the
transaction id as the client chose it, if no other row has. Otherwise the id follows a mark and a
digest of the path. A redaction always has the digest, because no column has its target. For
example, the rows of three requests with the id "m1":

    /send/m.room.message/m1    m1
    /send/m.reaction/m1        mark 09ab… m1
    /redact/$target/m1         mark 8e21… m1
"""

from hashlib import sha256
from typing import Final, NamedTuple

import orjson

from storage.ids import EventId, RoomId, UserId

MARK: Final = "\x1f"
"""Begins a transaction id that is stored with the digest of its path."""

DIGEST_DIGITS: Final = 16


class TransactionKey(NamedTuple):
    """The key of a row of `local_transactions`."""

    room_id: RoomId
    sender: UserId
    device_id: str
    transaction_id: str


class RequestPath(NamedTuple):
    """The parts of a request's path besides the room and the transaction id.

    Source: client-server API, "Transaction identifiers": a repeated request has the same path, such
    as /send/{eventType}/{txnId} or /redact/{eventId}/{txnId}.
    """

    type: str
    state_key: str | None = None
    redacts: str | None = None


class Transaction(NamedTuple):
    """A request of a client, the same each time that it is repeated.

    The transaction id of ``key`` is as the client chose it.
    """

    key: TransactionKey
    path: RequestPath

    @property
    def needs_path(self) -> bool:
        """Whether its row must have the path, also if no other request has the same id."""
        return self.path.redacts is not None or self.key.transaction_id.startswith(MARK)

    def stored_as(self) -> tuple[TransactionKey, TransactionKey]:
        """Return the two keys under which it may be stored: without the path, and with it."""
        digest = sha256(orjson.dumps([*self.path])).hexdigest()[:DIGEST_DIGITS]
        with_path = f"{MARK}{digest}{self.key.transaction_id}"
        return self.key, self.key._replace(transaction_id=with_path)


class KnownTransaction(NamedTuple):
    """The event of a stored transaction, and the path of its request."""

    event_id: EventId
    path: RequestPath


def transaction_id_of(stored: str) -> str:
    """Return the transaction id that the client chose, from a row of `local_transactions`."""
    return stored[len(MARK) + DIGEST_DIGITS :] if stored.startswith(MARK) else stored
