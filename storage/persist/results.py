"""What an append answers, one per PDU."""

from typing import Final, Literal, NamedTuple, get_args

from storage.event import Event
from storage.ids import EventId

Origin = Literal["live", "backfill", "outlier", "out_of_band"]
ORIGINS: Final = get_args(Origin)
Outcome = Literal["stored", "duplicate", "rejected", "soft_failed", "redacted", "missing_parents", "invalid"]


class AppendResult(NamedTuple):
    """The outcome for one PDU (api.md, "Writing").

    ``event_id`` is None only for what could not be read. ``reason`` is text where something was refused. The orderings are
    those of an event that is in the timeline, None for outliers and for what was not stored. ``missing`` are the ids of
    prev and auth events (or events of the given state) that are not held.
    """

    event_id: EventId | None
    outcome: Outcome
    reason: str | None = None
    stream_ordering: int | None = None
    topological_ordering: int | None = None
    missing: tuple[EventId, ...] = ()

    @property
    def is_stored(self) -> bool:
        """Whether the store holds the event now."""
        return self.outcome not in ("missing_parents", "invalid")


def stored(event: Event) -> AppendResult:
    """Return the answer for an event that passed all checks. Its orderings are added once it is written: it may move until then."""
    if event.content_hash_valid:
        return AppendResult(event.event_id, "stored")
    return AppendResult(event.event_id, "redacted", "the content hash does not fit: only the redacted form is valid")
