"""The oracle's answering half: visibility, pages, federation reads, sync.

Every answer is found by looking at every event. Where a store may know better which order events
have (gaps: the claimed depth is a hint there), the caller sets `positions`, and the oracle uses
those numbers instead of its own.

Where the rules leave a choice:

* Federation reads pass through rejected events without returning them; soft-failed ones are
  returned.
* A server that was never joined to the room gets the world-readable ones of the events that a read
  finds, and no trace of the others.
* `min_depth` is about the depth that the sender claims; the walk goes on through events that it
  leaves out.
* The walk of `missing_events` is breadth first, parents in the order in which the event names them.
* Indirect relations are found three levels deep, and only behind events that the user gets
  themselves.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from storage import EventFilter
from storage.errors import StateUnknown
from storage.ids import EventId, RoomId, ServerName, UserId, server_name_of
from tests.oracle.filtering import passes
from tests.oracle.inboxes import Inboxes
from tests.oracle.oracle_redactions import OracleRedactions
from tests.oracle.room_graph import OracleEvent, State
from tests.oracle.visibility_rule import Sight, server_sees, user_sees

Position = tuple[int, int]
VISIBILITY = ("m.room.history_visibility", "")
HIGHEST_FIRST = ("join", "invite", "knock", "leave", "ban")
LEVELS = 3  # of indirect relations
ANY_EVENT = EventFilter()


class Oracle(OracleRedactions):
    """A server that has all the time in the world."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: Mapping[
            EventId, Position
        ] = {}  # (topological, stream) as the store has them; empty: the oracle's own
        self.inboxes = Inboxes()
        self.forgotten: set[tuple[RoomId, str]] = set()
        """Rooms that a user has left and forgotten (`syncing.remember` ends it)."""

    def position(self, event_id: EventId) -> Position:
        """(topological, stream) of a timeline event."""
        if event_id in self.positions:
            return self.positions[event_id]
        return self.topological_ordering(event_id), self.get(event_id).arrival

    def _by_position(self, ids: Iterable[EventId]) -> list[EventId]:
        return [
            event_id
            for _, event_id in sorted((self.position(event_id), event_id) for event_id in set(ids))
        ]

    # ----------------------------------------------------------------------------------------------
    # visibility

    def membership_in(self, state: State, user_id: str) -> str | None:
        event_id = state.get(("m.room.member", user_id))
        return None if event_id is None else self.get(event_id).event.content.get("membership")

    def membership(self, room_id: RoomId, user_id: str) -> str | None:
        """In the room's current state."""
        return self.membership_in(self.current_state(room_id), user_id)

    def rooms_of(self, user_id: str, membership: str = "join") -> set[RoomId]:
        return {
            room_id for room_id in self.versions if self.membership(room_id, user_id) == membership
        }

    def users(self, room_id: RoomId) -> set[UserId]:
        """Everybody who was ever a sender or a member, whatever became of the event."""
        timeline = self.timeline(room_id).values()
        members = {
            UserId(held.event.state_key)
            for held in timeline
            if held.event.type == "m.room.member" and held.event.state_key
        }
        return members | {held.event.sender for held in timeline}

    def joined_later(self, event_id: EventId, user_id: str) -> bool:
        """Joined now, or by an accepted join that lies after the event in topological order."""
        event = self.get(event_id).event
        if self.membership(event.room_id, user_id) == "join":
            return True
        joins = [
            join_id
            for join_id, held in self.timeline(event.room_id).items()
            if held.accepted
            and held.event.type == "m.room.member"
            and held.event.state_key == user_id
            and held.event.content.get("membership") == "join"
        ]
        return any(self.position(join_id)[0] > self.position(event_id)[0] for join_id in joins)

    def _visibility_in(self, state: State) -> str | None:
        event_id = state.get(VISIBILITY)
        return (
            None if event_id is None else self.get(event_id).event.content.get("history_visibility")
        )

    def _server_membership(self, state: State, server_name: str) -> str | None:
        """The highest membership of the server's users."""
        users = [
            state_key
            for kind, state_key in state
            if kind == "m.room.member" and server_name_of(state_key) == server_name
        ]
        found = {self.membership_in(state, user) for user in users}
        return next((membership for membership in HIGHEST_FIRST if membership in found), None)

    def visible_to_user(self, user_id: str, ids: Iterable[EventId]) -> set[EventId]:
        return {
            event_id
            for event_id in ids
            if event_id in self.held and self._visible_to_user(user_id, event_id)
        }

    def _visible_to_user(self, user_id: str, event_id: EventId) -> bool:
        if not self.get(event_id).accepted or self.is_ineffective(event_id):
            return False
        before, after = self.state_before(event_id), self.state_after(event_id)
        event = self.get(event_id).event
        if self.has_forgotten(event.room_id, user_id):  # as for a user who was never in it
            changes = event.is_state and event.key == VISIBILITY
            seen = {self._visibility_in(before), self._visibility_in(after) if changes else None}
            return "world_readable" in seen
        sight = Sight(
            changes_visibility=event.is_state and event.key == VISIBILITY,
            changes_membership=event.is_state and event.key == ("m.room.member", user_id),
            visibility=(self._visibility_in(before), self._visibility_in(after)),
            membership=(self.membership_in(before, user_id), self.membership_in(after, user_id)),
        )
        return user_sees(sight, joined_later=self.joined_later(event_id, user_id))

    def has_forgotten(self, room_id: RoomId, user_id: str) -> bool:
        return (room_id, user_id) in self.forgotten

    def visible_to_server(self, server_name: str, ids: Iterable[EventId]) -> set[EventId]:
        known = [event_id for event_id in ids if event_id in self.held]
        joined = {room_id for room_id in self.versions if self.ever_joined(room_id, server_name)}
        return {
            event_id for event_id in known if self._visible_to_server(server_name, event_id, joined)
        }

    def _visible_to_server(
        self, server_name: str, event_id: EventId, joined: Collection[RoomId]
    ) -> bool:
        held = self.get(event_id)
        if held.outlier or held.rejected:
            return False
        before, after = self.state_before(event_id), self.state_after(event_id)
        sight = Sight(
            changes_visibility=held.event.is_state and held.event.key == VISIBILITY,
            changes_membership=_is_member_of(held, ServerName(server_name)),
            visibility=(self._visibility_in(before), self._visibility_in(after)),
            membership=(
                self._server_membership(before, server_name),
                self._server_membership(after, server_name),
            ),
        )
        return server_sees(sight, ever_joined=held.event.room_id in joined)

    def ever_joined(self, room_id: RoomId, server_name: str) -> bool:
        """Return whether a user of the server is joined at some event of the timeline.

        The state before the event counts, and the state after it.
        """
        states = [
            state
            for event_id in self.timeline(room_id)
            for state in (self.state_before(event_id), self.state_after(event_id))
        ]
        return any(self._server_membership(state, server_name) == "join" for state in states)

    def is_resident(self, server_name: str, room_id: RoomId) -> bool:
        """A user of the server is joined in the current state."""
        return self._server_membership(self.current_state(room_id), server_name) == "join"

    def sent(
        self, server_name: str, room_id: RoomId, found: Iterable[EventId]
    ) -> dict[EventId, bool]:
        """Return the found events that the server gets, and whether each is in redacted form."""
        found = list(found)
        visible = self.visible_to_server(server_name, found)
        shown = found if self.ever_joined(room_id, server_name) else visible
        return {event_id: event_id not in visible for event_id in shown}

    # ----------------------------------------------------------------------------------------------
    # pages

    def messages(
        self,
        room_id: RoomId,
        user_id: str,
        *,
        after: Position | None = None,
        upto: Position | None = None,
        direction: str = "b",
        limit: int | None = None,
        wanted: EventFilter = ANY_EVENT,
    ) -> list[EventId]:
        """All that the user may see, and wants, in after < position <= upto; "b": newest first."""
        found = self._by_position(self.visible_to_user(user_id, self.timeline(room_id)))
        found = [event_id for event_id in found if self.passes(event_id, wanted)]
        found = [
            event_id for event_id in found if (after is None or after < self.position(event_id))
        ]
        found = [
            event_id for event_id in found if (upto is None or self.position(event_id) <= upto)
        ]
        return (found[::-1] if direction == "b" else found)[:limit]

    def page_back(
        self, room_id: RoomId, user_id: str, below: EventId | None = None
    ) -> tuple[list[EventId], EventId | None]:
        """Return the events below an event (None: all) that the user may see, newest first.

        Also return the event below which to go on, if history is missing there.
        """
        room = {event_id: self.position(event_id) for event_id in self.timeline(room_id)}
        room = {
            event_id: at
            for event_id, at in room.items()
            if below is None or at < self.position(below)
        }
        found = [event_id for event_id in self.messages(room_id, user_id) if event_id in room]
        at_gaps = [
            event_id
            for event_id in room
            if any(not self.in_timeline(one) for one in self.get(event_id).event.prev_event_ids)
        ]
        if not any(not found or room[event_id] <= room[found[-1]] for event_id in at_gaps):
            return found, None
        return found, found[-1] if found else max(at_gaps, key=lambda event_id: room[event_id])

    def between(
        self,
        room_id: RoomId,
        user_id: str,
        *,
        since: int | None,
        upto: int | None,
        direction: str,
        wanted: EventFilter,
    ) -> list[EventId]:
        """Return the same between two syncs: live events with since < arrival <= upto.

        With no sync before, return all history too.
        """
        found = self.messages(room_id, user_id, direction=direction, wanted=wanted)
        live = [event_id for event_id in found if self.get(event_id).origin == "live"]
        told = {event_id for event_id in live if (since or 0) < self.get(event_id).arrival}
        told -= {
            event_id for event_id in live if upto is not None and self.get(event_id).arrival > upto
        }
        return [
            event_id
            for event_id in found
            if event_id in told or (since is None and event_id not in live)
        ]

    def is_ignored(self, sender: str, ignored: Collection[str]) -> bool:
        """Whether an invite from a user is left out (client-server API, "Ignoring Users")."""
        return sender in ignored

    def passes(self, event_id: EventId, wanted: EventFilter) -> bool:
        event, redacted = self.get(event_id).event, self.redacted_by(event_id) is not None
        return passes(wanted, event.type, event.sender, {} if redacted else event.content)

    def context(
        self, event_id: EventId, user_id: str, limit: int
    ) -> tuple[list[EventId], list[EventId], State] | None:
        """Return (before, newest first; after, oldest first; the state after the last of all).

        Return None if the user may not see the event.
        """
        if not self.visible_to_user(user_id, [event_id]):
            return None
        oldest_first = self.messages(self.get(event_id).event.room_id, user_id, direction="f")
        place = oldest_first.index(event_id)
        before, after = (
            oldest_first[:place][::-1][: limit // 2],
            oldest_first[place + 1 :][: limit - limit // 2],
        )
        return before, after, self.state_after([event_id, *after][-1])

    def event_near(
        self, room_id: RoomId, user_id: str, timestamp_ms: int, direction: str
    ) -> EventId | None:
        """Return the visible event whose claimed time is nearest.

        At one time, return the topologically lowest ("f") or highest ("b").
        """
        seen = self.visible_to_user(user_id, self.timeline(room_id))
        places = sorted(
            (self.get(event_id).event.origin_server_ts, *self.position(event_id), event_id)
            for event_id in seen
        )
        if direction == "f":
            return next((event_id for at, _, _, event_id in places if at >= timestamp_ms), None)
        return next(
            (event_id for at, _, _, event_id in reversed(places) if at <= timestamp_ms), None
        )

    # ----------------------------------------------------------------------------------------------
    # relations

    def relations(
        self, event_id: EventId, user_id: str, *, rel_type: str | None = None, recurse: bool = False
    ) -> list[EventId] | None:
        """Return the relations the user gets, oldest first; None if they may not see the event."""
        if not self.visible_to_user(user_id, [event_id]):
            return None
        found: set[EventId] = set()
        level = {event_id}
        for _ in range(LEVELS if recurse else 1):
            level = (
                {child for parent in level for child in self._related(parent, user_id, rel_type)}
                - found
                - {event_id}
            )
            found |= level
        return self._by_position(found)

    def _related(
        self, parent_id: EventId, user_id: str, rel_type: str | None = None
    ) -> list[EventId]:
        """Events of the room that say so and are seen and not redacted, oldest first."""
        room = self.timeline(self.get(parent_id).event.room_id)
        saying = [
            event_id
            for event_id in room
            if self._relation(event_id) == (parent_id, rel_type or self._relation(event_id)[1])
        ]
        return self._by_position(
            event_id
            for event_id in self.visible_to_user(user_id, saying)
            if not self.redacted_by(event_id)
        )

    def _relation(self, event_id: EventId) -> tuple[Any, Any]:
        """(target, type) as the event has it; (None, None) if it has none."""
        said = self.get(event_id).event.content.get("m.relates_to")
        return (
            (said.get("event_id"), said.get("rel_type"))
            if isinstance(said, dict) and said.get("rel_type")
            else (None, None)
        )

    def aggregations(
        self, event_id: EventId, user_id: str
    ) -> tuple[EventId | None, tuple[EventId, int, bool] | None, list[EventId]]:
        """(latest edit, thread: (last event, how many, whether the user is in it), references)."""
        if not self.visible_to_user(user_id, [event_id]):
            return None, None, []
        event, redacted = self.get(event_id).event, self.redacted_by(event_id) is not None
        own_type = None if redacted else self._relation(event_id)[1]
        edits = [
            (self.get(edit_id).event.origin_server_ts, edit_id)
            for edit_id in self._related(event_id, user_id, "m.replace")
            if (self.get(edit_id).event.sender, self.get(edit_id).event.type)
            == (event.sender, event.type)
            and "m.new_content" in self.get(edit_id).event.content
            and not (
                event.is_state
                or self.get(edit_id).event.is_state
                or redacted
                or own_type == "m.replace"
            )
        ]
        thread = self._related(event_id, user_id, "m.thread") if own_type is None else []
        participated = user_id in {
            event.sender,
            *(self.get(reply_id).event.sender for reply_id in thread),
        }
        summary = (thread[-1], len(thread), participated) if thread else None
        return (
            (max(edits)[1] if edits else None),
            summary,
            self._related(event_id, user_id, "m.reference"),
        )

    # ----------------------------------------------------------------------------------------------
    # federation

    def _ancestors(self, ids: Iterable[EventId]) -> set[EventId]:
        """These timeline events and all that lies before them, as far as it is held."""
        found: set[EventId] = set()
        todo = [event_id for event_id in ids if self.in_timeline(event_id)]
        while todo:
            event_id = todo.pop()
            if event_id not in found:
                found.add(event_id)
                todo.extend(
                    parent
                    for parent in self.get(event_id).event.prev_event_ids
                    if self.in_timeline(parent)
                )
        return found

    def backfill(
        self, room_id: RoomId, ids: Iterable[EventId], limit: int | None = None
    ) -> list[EventId]:
        """The events and their ancestors, newest first by (topological, stream)."""
        timeline = self.timeline(room_id)
        found = self._ancestors(event_id for event_id in ids if event_id in timeline)
        return self._by_position(event_id for event_id in found if not self.get(event_id).rejected)[
            ::-1
        ][:limit]

    def missing_events(
        self,
        room_id: RoomId,
        earliest: Iterable[EventId],
        latest: Iterable[EventId],
        *,
        limit: int = 10,
        min_depth: int = 0,
    ) -> list[EventId]:
        """Walk from `latest` back to `earliest`; return the events between them, oldest first."""
        stop, start = set(earliest), list(latest)
        timeline = self.timeline(room_id)
        seen = stop | set(start)
        queue = [event_id for event_id in start if event_id in timeline and event_id not in stop]
        found: list[EventId] = []
        while queue and len(found) < limit:
            for parent in self.get(queue.pop(0)).event.prev_event_ids:
                if parent not in seen and parent in timeline:
                    seen.add(parent)
                    queue.append(parent)
                    if not self.get(parent).rejected and self.get(parent).event.depth >= min_depth:
                        found.append(parent)
        return self._by_position(found[:limit])

    def auth_chain(self, ids: Iterable[EventId]) -> set[EventId]:
        """Return the auth chain of the events; it has one of them only if another one cites it."""
        found: set[EventId] = set()
        todo = [cited for event_id in ids for cited in self.get(event_id).event.auth_event_ids]
        while todo:
            event_id = todo.pop()
            if event_id not in found:
                found.add(event_id)
                todo.extend(self.get(event_id).event.auth_event_ids)
        return found

    def auth_chain_difference(self, sets: Iterable[Iterable[EventId]]) -> set[EventId]:
        """Return the events in the auth chains of some of the sets, but not of all."""
        chains = [self.auth_chain(ids) for ids in sets]
        return set().union(*chains) - set(chains[0]).intersection(*chains) if chains else set()

    def state_ids(self, event_id: EventId) -> tuple[set[EventId], set[EventId]]:
        """(state before the event, auth chains of that state)."""
        held = self.get(event_id)
        if held.state_before is None:
            raise StateUnknown(event_id)
        state = set(held.state_before.values())
        return state, self.auth_chain(state)


def _is_member_of(held: OracleEvent, server_name: ServerName) -> bool:
    key = held.event.state_key
    return (
        held.event.type == "m.room.member"
        and key is not None
        and server_name_of(key) == server_name
    )
