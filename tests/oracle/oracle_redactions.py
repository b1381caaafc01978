"""What redactions do in the oracle: computed again from all events for each answer."""

from storage.auth import redaction_allowed
from storage.event import Event
from storage.ids import EventId
from tests.oracle.receiver import OracleReceiver
from tests.oracle.room_graph import OracleEvent


class OracleRedactions(OracleReceiver):
    """Which events are redacted, and which redactions have no effect."""

    def redacted_by(self, event_id: EventId) -> EventId | None:
        """Return the first redaction of this accepted event by (origin_server_ts, id).

        Only accepted redactions count whose sender may redact the event.
        """
        if not self.get(event_id).accepted:
            return None
        target = self.get(event_id).event
        found = [
            (held.event.origin_server_ts, redaction_id)
            for redaction_id, held in self.held.items()
            if held.event.type == "m.room.redaction"
            and held.accepted
            and held.event.redacts == event_id != redaction_id
            and held.event.room_id == target.room_id
            and self._may_redact(held, target)
        ]
        return min(found)[1] if found else None

    def is_ineffective(self, event_id: EventId) -> bool:
        """Return whether a redaction redacts nothing.

        It names no event, itself, or none accepted in the room's timeline, or its sender may not
        redact it.
        """
        redaction = self.get(event_id)
        if redaction.event.type != "m.room.redaction":
            return False
        target = (
            None
            if redaction.event.redacts is None
            else self.held.get(EventId(redaction.event.redacts))
        )
        if (
            target is redaction
            or target is None
            or not target.accepted
            or target.event.room_id != redaction.event.room_id
        ):
            return True
        return not self._may_redact(redaction, target.event)

    def _may_redact(self, redaction: OracleEvent, target: Event) -> bool:
        state = {
            key: self.held[event_id].event
            for key, event_id in (redaction.state_before or {}).items()
        }
        return redaction_allowed(
            redaction.event, target.sender, state, redaction.event.room_version
        )
