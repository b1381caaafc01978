"""The rows and values that a batch adds or changes, one class each."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from storage.persist.model.rows import (
    RoomRow,
)
from storage.visibility.multirange import Ranges

if TYPE_CHECKING:
    from storage.persist.model.change_set import ChangeSet


class StateDelta(NamedTuple):
    """A change of a room's current state, at the position of the event that caused it."""

    room_nid: int
    cause_nid: int
    state_key_nid: int
    event_nid: int | None
    prev_event_nid: int | None


class MembershipChange(NamedTuple):
    """A new membership of a local user in a room.

    ``cause_nid`` is None for an outlier, which has no position of its own. ``entered``: this write
    has let them in, or invited them, even if they are out again.
    """

    principal_nid: int
    room_nid: int
    membership: int
    event_nid: int
    cause_nid: int | None
    entered: bool = False


class Reordering(NamedTuple):
    """A row of `reordered_events`: the topological position of an event before this write."""

    room_nid: int
    topological_before: int


class PendingResolution(Protocol):
    """A state resolution, finished or not (`storage.persist.plan.state_resolution`).

    ``seconds`` is the processor time that it took so far.
    """

    seconds: float

    def run(self, change_set: "ChangeSet") -> dict[int, int]:
        """Continue until the resolution is finished.

        Raise `MissingData` if data has to be loaded first, and `TimeSliceOver` if the time slice is
        over.
        """


@dataclass(slots=True)
class RoomChanges:
    """The state of a room while a batch is planned."""

    row: RoomRow
    extremities: dict[int, None]
    current: int | None
    next_audience: int
    max_order: int
    audience: int
    out_of_range: Ranges
    in_order_ts: int
    changed: bool = False
    live_nids: list[int] = field(default_factory=list)
    group_digests: dict[int, list[int]] = field(default_factory=dict)
    merged: dict[frozenset[int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, row: RoomRow) -> "RoomChanges":
        extremities = dict.fromkeys(row.forward_extremities)
        return cls(
            row,
            extremities,
            row.current_state_group,
            row.next_audience,
            row.max_topological_ordering,
            row.current_audience,
            row.out_of_range,
            row.in_order_ts,
        )
