"""The history of one room, read aloud: its state, and the events that a user may see.

Its events are in one line: each has the one before it as its parent. So the state at an event is
that of all events before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.oracle.visibility_rule import Sight, user_sees

VISIBILITY: Final = ("m.room.history_visibility", "")
State = dict[tuple[str, str], Any]


@dataclass(frozen=True)
class RoomStory:
    """The events of a room, oldest first, by label, and the users who have forgotten it.

    ``forgotten`` has for each such user how many events there were then.
    """

    events: Sequence[Any]
    forgotten: dict[str, int]

    def state(self, end: int | None = None) -> State:
        """Return the state after the first events, or after all."""
        return {
            (event["type"], event["state_key"]): event
            for event in self.events[:end]
            if "state_key" in event
        }

    def place(self, event_id: str) -> int:
        """Return the number of events before an event."""
        [place] = [n for n, event in enumerate(self.events) if event["event_id"] == event_id]
        return place

    def memberships(self, user: str) -> list[tuple[int, str]]:
        """Return the places and values of the memberships that a user has had."""
        return [
            (place, event["content"]["membership"])
            for place, event in enumerate(self.events)
            if (event["type"], event.get("state_key")) == ("m.room.member", user)
        ]

    def was_joined(self, user: str) -> bool:
        return any(membership == "join" for _, membership in self.memberships(user))

    def has_forgotten(self, user: str) -> bool:
        """A later join or invite brings the room back."""
        known = self.forgotten.get(user)
        return known is not None and not any(
            place >= known and membership in ("join", "invite")
            for place, membership in self.memberships(user)
        )

    def sees(self, user: str, event_id: str) -> bool:
        """Client-server API, "Room history visibility"."""
        place = self.place(event_id)
        event = self.events[place]
        before, after = (self.state(end) for end in (place, place + 1))
        key = event["type"], event.get("state_key")
        sight = Sight(
            changes_visibility=key == VISIBILITY,
            changes_membership=key == ("m.room.member", user),
            visibility=(_visibility(before), _visibility(after)),
            membership=(_membership(before, user), _membership(after, user)),
        )
        if self.has_forgotten(user):
            return "world_readable" in [visibility for visibility, _ in sight.cases()]
        later = [one for at, one in self.memberships(user) if at > place]
        return user_sees(sight, joined_later="join" in later)

    def visible(self, user: str) -> list[str]:
        """Return the events that a user may see, oldest first."""
        listed = [event["event_id"] for event in self.events]
        return [event_id for event_id in listed if self.sees(user, event_id)]

    def readable_state(self, user: str) -> State | None:
        """Return the state that a user may read, or None.

        It is the current state, or that at the end of the user's last stay.
        """
        state = self.state()
        if _membership(state, user) == "join":
            return state
        if not self.has_forgotten(user) and self.was_joined(user):
            return self.state(self._end_of_stay(user))
        visibility, is_invited = _visibility(state), _membership(state, user) == "invite"
        is_open = visibility == "world_readable" or (visibility == "invited" and is_invited)
        return state if is_open else None

    def _end_of_stay(self, user: str) -> int:
        """Return the number of events up to the end of the last stay."""
        memberships = self.memberships(user)
        last = max(n for n, (_, membership) in enumerate(memberships) if membership == "join")
        return memberships[last + 1][0] + 1

    def unread_by(self, user: str) -> int:
        """Return how many messages of others come after the last own event of their thread.

        It takes no account of receipts.
        """
        threads: dict[str, str] = {}
        count: dict[str, int] = {}
        redacted = {event.get("content", {}).get("redacts") for event in self.events}
        for place, event in enumerate(self.events):
            relation = event.get("content", {}).get("m.relates_to", {})
            kind, target = relation.get("rel_type"), relation.get("event_id", "")
            thread = target if kind == "m.thread" else threads.get(target, "main")
            threads[event["event_id"]] = thread
            is_inside = _membership(self.state(place), user) == "join"
            if "state_key" in event or kind in ("m.replace", "m.annotation"):
                continue
            if event["sender"] == user:
                count[thread] = 0
            elif event["type"] == "m.room.message" and is_inside:
                count[thread] = count.get(thread, 0) + (event["event_id"] not in redacted)
        return sum(count.values())


def _visibility(state: State) -> Any:
    event = state.get(VISIBILITY, {})
    return event.get("content", {}).get("history_visibility")


def _membership(state: State, user: str) -> Any:
    event = state.get(("m.room.member", user), {})
    return event.get("content", {}).get("membership")
