"""One difference between the tables and what follows from the received bytes and the flags."""

from dataclasses import dataclass
from typing import Final

from storage.ids import RoomId

REPAIRABLE: Final = frozenset(
    {
        "room_version",
        "doubled_events",
        "columns",
        "topological_ordering",
        "after_gap",
        "time_order",
        "rejected",
        "state_groups",
        "state_before",
        "state_after",
        "event_ids",
        "missing_events",
        "forward_extremities",
        "dropped_extremities",
        "reordered_events",
        "current_state_group",
        "current_state",
        "member_counts",
        "memberships",
        "state_deltas",
        "local_transactions",
        "auth_chains",
        "redacted_by",
        "ineffective",
        "waiting_redactions",
        "superseded",
        "relations",
        "audiences",
        "visibility",
        "visibility_counts",
        "rooms",
        "stream_positions",
        "sequences",
        "sliding_rooms",
    }
)
"""The checks whose findings `storage.maintenance.repair` mends: they check derived data."""

REMEDIES: Final = {
    "bytes": "restore a backup",
    "create_event": "none: the room keeps its version",
    "archive": "restore the files of the archive, or the database, from a backup",
    "state_paths": "restore a backup; nothing else of the room was checked",
    "orphans": "restore a backup",
    "names": "restore a backup",
}
"""Remedies for findings that no repair mends; each finding of indexes names its `REINDEX`."""


ACCEPTED: Final = "accepted"
"""The auth result of an event that is not rejected."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference.

    ``subject`` are the ids it is about; ``found`` is the stored value, ``expected`` the correct
    one.
    """

    check: str
    room_id: RoomId | None
    subject: tuple[str, ...]
    found: str
    expected: str

    @property
    def repairable(self) -> bool:
        """Return whether `repair` mends it, or `repair_positions` if it has no room."""
        return self.check in REPAIRABLE

    @property
    def remedy(self) -> str:
        """Return the command that mends it, or what to do where there is none."""
        if not self.repairable:
            return REMEDIES.get(self.check, self.expected)
        room = "" if self.room_id is None else f" --room '{self.room_id}'"
        return f"room-storage verify --repair{room}"

    @property
    def is_wrongly_rejected(self) -> bool:
        """Return whether it is a rejected event that the auth rules accept."""
        return self.check == "rejected" and self.expected == ACCEPTED and self.found != ACCEPTED

    def __str__(self) -> str:
        where = f"{self.check} of {', '.join(self.subject)} in {self.room_id}"
        return f"{where}: found {self.found}, expected {self.expected}"
