"""The data of one batch: a view over the caches for each subject, with its changes.

Planning is synchronous and touches no database. Where it lacks something, a view raises
`MissingData` with the keys. The driver loads them (`storage.persist.load`) and plans the event
again. Nothing is changed before everything that a decision needs is there, so planning again is
harmless.

Nothing in a change set reaches the caches before the commit. Cached rows are immutable, or guarded
by `rooms.write_version`: a plan that was made from a stale cache is refused when it is written, and
its rooms are forgotten. Rows that another process removed are published in the stream "caches"
(`Removed`). Until that arrives, `rooms.removals` makes a write check that all its dependencies are
still there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from storage.event import Event
from storage.persist.model.cache_view import (
    AuthGraphView,
    EventView,
    NameView,
    RoomView,
    StateView,
    TransactionView,
    VisibilityView,
)
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.missing_data import Answers
from storage.persist.model.rows import EventRow, MembershipChange, RoomChanges

# --------------------------------------------------------------------------------------------------
# Time slices of planning: how long it may block the event loop.

SLICE_SECONDS: Final = 0.01
"""Time after which planning yields the event loop.

The clock is read between events and between steps of a resolution.
"""


HEAVY_SECONDS: Final = 0.01
"""Processor time for resolutions that makes a room heavy.

A room whose resolutions take longer in one plan moves to `storage.persist.commit.group_commit`.
Processor time does not grow while a small resolution waits on a busy machine.
"""


SLOW_ROOM_EVENTS_MIN: Final = 16
"""Minimum events of a heavy room per write. Batches grow while they stay below `HEAVY_SECONDS`."""


class TimeSlice:
    """A restartable time slice. Without a length it never ends."""

    __slots__ = ("_clock", "_seconds", "_until", "rest")

    def __init__(
        self,
        seconds: float | None = None,
        *,
        rest: float = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start a slice. ``rest`` is the minimum number of seconds to wait after it."""
        self._seconds = seconds
        self.rest: float = rest
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Start the slice again."""
        self._until = float("inf") if self._seconds is None else self._clock() + self._seconds

    @property
    def is_used_up(self) -> bool:
        return self._clock() >= self._until

    def is_long(self, seconds: float) -> bool:
        """Return whether a part took as long as the whole slice should."""
        return self._seconds is not None and seconds >= self._seconds


FUTURE_MS_MAX: Final = 10_000
"""An event is from the future if the clock of its sender is further ahead.

In time order, it would put the events of all others out of order until that time comes.
"""


@dataclass
class Members:
    """Memberships of local users, and what came out of band."""

    memberships: dict[tuple[int, int], MembershipChange] = field(default_factory=dict)
    overruled: list[tuple[int, int, str]] = field(default_factory=list)
    """Room, state key and user of what came out of band, and ends with a join of this server."""
    stripped: dict[tuple[int, int], str] = field(default_factory=dict)
    """Stripped state as JSON, by principal and room."""


class ChangeSet:
    """The views of one batch.

    `storage.persist.write` sends what they collect in one statement.
    """

    is_live = True
    """Events come from a server or a client. False: they are read from the tables again."""

    def __init__(
        self,
        caches: WriterCaches,
        blocks: NidBlocks,
        server_name: str,
        *,
        extremities_max: int | None = None,
        answers: Answers | None = None,
    ) -> None:
        """``extremities_max``: limit of a room (`plan.extremity_limit`), or None."""
        self.caches = caches
        self.blocks = blocks
        self.server_name = server_name
        self.extremities_max = extremities_max
        self.in_order_ts_max: int = time.time_ns() // 1_000_000 + FUTURE_MS_MAX
        self.time_slice: TimeSlice = TimeSlice()
        self.answers: Answers = answers or Answers()
        self.names: NameView = NameView(caches, blocks)
        self.rooms: RoomView = RoomView(caches, blocks)
        self.events: EventView = EventView(caches, blocks, self.names)
        self.states: StateView = StateView(caches, blocks)
        self.auth_graph: AuthGraphView = AuthGraphView(caches, self.events)
        self.visibility: VisibilityView = VisibilityView(
            caches, self.names, self.rooms, self.answers
        )
        self.members: Members = Members()
        self.transactions: TransactionView = TransactionView(caches)

    @property
    def has_changes(self) -> bool:
        """Return whether there is anything to write."""
        return any(room.changed for room in self.rooms.room_changes.values())

    def add_outlier_to_timeline(self, row: EventRow, event: Event) -> None:
        """Add an outlier to the timeline: it keeps its nid and takes a stream position."""
        self.events.parsed[row.event_nid] = event
        self.events.change_event(row)
        self.events.placed[row.event_nid] = None
        self.auth_graph.allowed.clear()  # it may be rejected now, and be an auth event of others
        self.caches.allowed.clear()
        self.states.records.clear()
        self.caches.records.clear()

    def readmit(self, row: EventRow, event: Event) -> None:
        """Accept a refused event: it keeps its topological position and takes a stream position."""
        self.events.parsed[row.event_nid] = event
        self.events.change_event(row)
        self.events.placed[row.event_nid] = None
        self.events.readmitted[row.event_nid] = None

    def authorise(self, row: EventRow, event: Event) -> None:
        """Store an out-of-band event again, now with its auth events.

        From now on other events may name it as an auth event.
        """
        self.events.parsed[row.event_nid] = event
        self.events.change_event(row)
        self.events.authorised[row.event_nid] = None
        self.auth_graph.loose.discard(row.event_nid)
        self.auth_graph.allowed.clear()
        self.caches.allowed.clear()


def room_of(change_set: ChangeSet, event: Event) -> RoomChanges:
    """Return the room of an event. Add the room if it is new.

    While nothing of a room is stored, its version is that of the event.
    """
    changes = change_set.rooms.room_changes.get(event.room_id)
    version = event.room_version.identifier
    if changes is None or not (
        changes.changed or changes.row.write_version or changes.row.room_version == version
    ):
        row = change_set.rooms.room(event.room_id)
        if row is None or (row.write_version == 0 and row.room_version != version):
            row = change_set.rooms.new_room(event.room_id, version)
        changes = change_set.rooms.room_changes[event.room_id] = RoomChanges.of(row)
    return changes
