"""Results of an append, one per PDU."""

from typing import Final, Literal, NamedTuple, get_args

from storage.errors import InvalidEvent, InvalidKind
from storage.event import Event
from storage.ids import EventId

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
