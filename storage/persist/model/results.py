"""Results of an append, one per PDU."""

from hashlib import sha256
from typing import Final, Literal, NamedTuple, get_args

import orjson

from storage.errors import InvalidEvent, InvalidKind
from storage.event import Event
from storage.ids import EventId, RoomId, UserId

Origin = Literal["live", "backfill", "outlier", "out_of_band"]
ORIGINS: Final = get_args(Origin)
Outcome = Literal[
    "stored", "duplicate", "rejected", "soft_failed", "redacted", "missing_parents", "invalid"
]


class AppendResult(NamedTuple):
    """The outcome for one PDU.

    ``outcome`` is one of:

    - ``stored``
    - ``duplicate``: it was stored before, and nothing changed
    - ``rejected``: it is stored and flagged, because the auth rules refuse it
    - ``soft_failed``: it is stored and flagged, because the current state or the caller refuses it
    - ``redacted``: it is stored, but its content hash is wrong: only the redacted form counts
    - ``missing_parents``: it is not stored; fetch ``missing``, or give ``state_before``
    - ``invalid``: it is not stored, because it is malformed, too large, or has a bad signature; or
      because a constraint of the database refuses it, which is logged as an error

    ``event_id`` is None only if the PDU could not be read. ``reason`` is set if something was
    refused. Both orderings are None for outliers and for events that were not stored. ``missing``
    has the ids of prev_events, auth events and events of the given state that are not stored.
    ``kind`` and ``key`` are those of `InvalidEvent`, where the event is malformed or too large.
    """

    event_id: EventId | None
    outcome: Outcome
    reason: str | None = None
    stream_ordering: int | None = None
    topological_ordering: int | None = None
    missing: tuple[EventId, ...] = ()
    kind: InvalidKind | None = None
    key: str | None = None

    @property
    def is_stored(self) -> bool:
        """Return whether the event is stored now."""
        return self.outcome not in ("missing_parents", "invalid")


class SendResult(AppendResult):
    """The result for an event of a local user, which is stored: ``event_id`` is never None.

    ``outcome`` is "stored", or "duplicate" for a repeated request.
    """

    __slots__ = ()

    event_id: EventId
    outcome: Literal["stored", "duplicate"]


def invalid(error: InvalidEvent, event_id: EventId | None) -> AppendResult:
    """Return the result for an event that cannot be stored."""
    return AppendResult(event_id, "invalid", error.reason, kind=error.kind, key=error.key)


def stored(event: Event) -> AppendResult:
    """Return the result for an event that passed all checks.

    Its orderings are filled in after the write, because they may change until then.
    """
    if event.content_hash_valid:
        return AppendResult(event.event_id, "stored")
    return AppendResult(
        event.event_id, "redacted", "the content hash does not fit: only the redacted form is valid"
    )


# --------------------------------------------------------------------------------------------------
# Requests of clients that make events, and the keys under which they are stored.
#
# The key of `local_transactions` has no column for the path of the request. So a row has the
# transaction id as the client chose it, if no other row has. Otherwise the id follows a mark and a
# digest of the path. A redaction always has the digest, because no column has its target. For
# example, the rows of three requests with the id "m1":
#
#     /send/m.room.message/m1    m1
#     /send/m.reaction/m1        mark 09ab… m1
#     /redact/$target/m1         mark 8e21… m1

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
