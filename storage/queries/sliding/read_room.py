"""A room that was read for a response, and how it compares with what the client has."""

from dataclasses import dataclass

from storage.queries.events import StoredEvent
from storage.queries.sliding.choice import Reason, WantedRoom
from storage.queries.sliding.connection import ClientRoom
from storage.queries.sliding.timelines import SlidingTimeline
from storage.queries.sync.state import SyncedRoom


@dataclass(slots=True)
class ReadRoom:
    """A chosen room, with what was read of it."""

    wanted: WantedRoom
    reason: Reason
    known: ClientRoom | None
    timeline: SlidingTimeline

    @property
    def room(self) -> SyncedRoom:
        """Return the columns that all events of the room share."""
        row = self.timeline.row
        return SyncedRoom(row.room_nid, row.room_id, row.room_version)

    @property
    def is_inside(self) -> bool:
        return self.wanted.is_inside

    @property
    def is_new(self) -> bool:
        """Return whether the client does not have the room."""
        return self.timeline.row.whole if self.is_inside else self.reason.is_new

    @property
    def events(self) -> list[StoredEvent]:
        """Return the timeline, oldest first."""
        limit = self.wanted.timeline_limit
        return self.timeline.events[-limit:] if limit else []

    @property
    def limited(self) -> bool:
        """Return whether there may be more events before the timeline."""
        return self.timeline.cut or len(self.timeline.events) > self.wanted.timeline_limit

    @property
    def has_gap(self) -> bool:
        """Return whether there may be events that the client does not have before these."""
        events = self.events
        if not self.reason.expands or self.is_new:
            return self.limited
        return self.limited and (
            not events or (events[0].stream_ordering or 0) > self.timeline.row.lower
        )

    @property
    def is_reset(self) -> bool:
        """Return whether state resolution removed the membership that the client has."""
        return self.timeline.row.membership == 0 and self.is_member_changed

    @property
    def has_own_state(self) -> bool:
        """Return whether the user's own membership is new, beyond the rest of the state."""
        row = self.timeline.row
        return row.own_upper > row.state_upper and self.is_member_changed

    @property
    def is_shown_outside(self) -> bool:
        """Return whether a room that the user is not in has anything new."""
        return self.is_new or self.is_member_changed or self.reason.is_direct_changed

    @property
    def is_member_changed(self) -> bool:
        """Return whether the membership of the user is new to the client."""
        row = self.timeline.row
        upto = self.known.sent_upto if self.known is not None else 0
        return row.member_ordering > (row.reached if upto is None else upto)
