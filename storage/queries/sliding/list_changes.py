"""The rooms and users that changed, as this process learns of it, on a clock of the process.

Room lists and facts of rooms are cached. A request notes the time before its snapshot. Everything
that was published before that time is in the snapshot. A cached value from an earlier time is right
but for the keys that have changed since, and for the commits that were not published yet. The
positions of the snapshot show those (storage/queries/sync/changed_rooms.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from storage.streams.caches import CURRENT_STATE, FORGOTTEN, LastChange
from storage.streams.feed import Advance

DIRECT: Final = "m.direct"
IGNORED: Final = "m.ignored_user_list"
TAG: Final = "m.tag"
MEMBER: Final = "m.room.member"
FACT_TYPES: Final = frozenset(
    {"m.room.create", "m.room.encryption", "m.room.name", "m.space.child"}
)
"""The state events that filters look at."""


class RoomChange(NamedTuple):
    """A room, the time of its last change, and the position of its latest event.

    ``activity`` None: unknown. The event is a membership, which may be out of band, or state
    resolution changed the room.
    """

    room_id: str
    time: int
    activity: int | None


class RecentRooms:
    """The rooms that changed last. All changes after ``floor`` are known."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.floor: int = 0
        self._last: OrderedDict[str, RoomChange] = OrderedDict()
        self._furthest: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._last)

    def restart(self, floor: int) -> None:
        self.floor = floor
        self._last.clear()
        self._furthest.clear()

    def note(self, room_id: str, time: int, position: int = 0, *, is_event: bool = False) -> None:
        """Record a change: an event at a position of the timeline, or anything else."""
        known = self._last.pop(room_id, None)
        furthest = self._furthest.get(room_id, 0)
        activity = None if known is None else known.activity
        if position >= furthest:
            activity = position if is_event else None
            self._furthest[room_id] = position
        self._last[room_id] = RoomChange(room_id, time, activity)
        if len(self._last) > self.limit:
            dropped, change = self._last.popitem(last=False)
            self._furthest.pop(dropped)
            self.floor = max(self.floor, change.time)

    def last(self, room_id: str) -> int:
        """Return the time of its last change; 0 if there was none since ``floor``."""
        change = self._last.get(room_id)
        return 0 if change is None else change.time

    def since(self, time: int) -> Iterator[RoomChange]:
        """Yield the changes after a time that is not below ``floor``, the latest first."""
        for change in reversed(self._last.values()):
            if change.time <= time:
                return
            yield change

    def among(self, room_ids: Iterable[str], time: int) -> Iterator[RoomChange]:
        for room_id in room_ids:
            change = self._last.get(room_id)
            if change is not None and change.time > time:
                yield change


class ListChanges:
    """The changes that room lists depend on, by a feed.

    ``rooms``: any event, or a change by state resolution. ``facts``: state that filters look at.
    ``account_data``: users whose m.direct, tags or ignored users changed. ``clock`` counts changes.

    ``on_member`` is called for a user whose membership in a room may have changed. ``on_state`` is
    called for a room whose facts may have changed; None: all lists and facts may be wrong.
    """

    def __init__(
        self,
        limit: int,
        on_member: Callable[[str, str], None],
        on_state: Callable[[str | None], None],
    ) -> None:
        self.clock: int = 1
        self.rooms: RecentRooms = RecentRooms(limit)
        self.facts: LastChange = LastChange(limit, 0)
        self.account_data: LastChange = LastChange(limit, 0)
        self._on_member = on_member
        self._on_state = on_state

    def restart(self) -> None:
        """Forget everything, including reads in progress."""
        self.clock += 1
        self.rooms.restart(self.clock)
        for changes in (self.facts, self.account_data):
            changes.restart(self.clock)
        self._on_state(None)

    def told(self, advance: Advance) -> None:
        """Record the facts of an advance."""
        if advance.stream_name == "events":
            for fact in advance.facts:
                self._event(fact.stream_id, fact.row)
        elif advance.stream_name == "caches":
            for fact in advance.facts:
                if fact.row[0] == CURRENT_STATE:
                    self._resolved(fact.row[1])
                elif fact.row[0] == FORGOTTEN:
                    self._forgotten(*fact.row[1])
        elif advance.stream_name == "account_data":
            for fact in advance.facts:
                self._account_data(*fact.row)

    def _event(self, position: int, row: Sequence[str | None]) -> None:
        _, room_id, event_type, state_key, redacts = row
        if room_id is None:
            return
        self.clock += 1
        self.rooms.note(room_id, self.clock, position, is_event=event_type != MEMBER)
        if redacts is not None or (state_key is not None and event_type in FACT_TYPES):
            self.facts.note(room_id, self.clock)
            self._on_state(room_id)
        if event_type == MEMBER and state_key is not None:
            self._on_member(state_key, room_id)

    def _resolved(self, key: Sequence[str] | None) -> None:
        if key is None:
            self.restart()
            return
        room_id, *users = key
        self.clock += 1
        self.rooms.note(room_id, self.clock)
        self.facts.note(room_id, self.clock)
        self._on_state(room_id)
        for user in users:
            self._on_member(user, room_id)

    def _forgotten(self, room_id: str, user_id: str) -> None:
        self.clock += 1
        self._on_member(user_id, room_id)

    def _account_data(self, user_id: str, _: str | None, kind: str, *__: object) -> None:
        if kind in (DIRECT, TAG, IGNORED):
            self.clock += 1
            self.account_data.note(user_id, self.clock)
