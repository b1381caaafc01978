"""The oracle's receiving half: PDUs come in, and everything that follows from the graph alone.

A room is a dict of stored events in order of arrival. Every answer is computed from it again, as
the specification defines it: no index, no cache, no database. It is slow on purpose, and written
without a look at the store. It shares with the store storage.event (what an event is) and the
authorisation rules of storage.auth; state resolution is the literal twin.

Where the rules leave a choice, the oracle takes the first of these:

* A batch is received in the order of its input, but an event waits for its own parents and auth
  events in the batch.
* An event that is stored as an outlier keeps its first bytes when it comes again.
* From room version 12 on, the create event that the room id names is missed like an auth event.
* An id in `state_before` that is no state event of the room is missed like one that is not stored.
* `state_before` is read only if a parent is not stored (or stored as an outlier).
* A live event that comes after its own live child is no forward extremity: the child already names
  it.
* An extremity ceases to be one also behind a backfilled parent of a live event, as behind a
  rejected or soft-failed one.
* A redaction waits for its target to arrive in the timeline: an outlier is not redacted yet.
* A rejected or soft-failed event is not redacted at all.
* A backfilled event never becomes an extremity, so a room of backfill alone has none, and its
  current state is empty.
* A refused event is a soft-failed one, until it is readmitted. Then it arrives again, at its old
  place in the graph.
* With a limit of extremities, those beyond it are dropped as
  storage/persist/plan/topology.py says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from storage.auth import check, check_auth_events, keys_needed
from storage.errors import (
    AuthDenied,
    InvalidEvent,
    StateUnknown,
    UnknownEvent,
    UnknownRoom,
    UnknownRoomVersion,
)
from storage.event import Event, parse
from storage.ids import EventId, RoomId
from tests.auth.literal_resolution import LiteralRoom, resolve_literally
from tests.oracle.room_graph import (
    CREATE,
    OracleEvent,
    Origin,
    Outcome,
    Pdu,
    State,
    cited,
    in_causal_order,
    read_pdu,
    said_version,
    version_of,
)

TRIED = 4
UNREADABLE = (UnknownRoomVersion, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class OracleReceiver:
    """`append`, and the state, order and edges of what is held.

    ``extremities_max``: of a room; None: any number.
    """

    extremities_max: int | None = None
    local_server = "s2.test"

    def __init__(self) -> None:
        self.dropped: dict[EventId, Literal["double", "covered", "newest"]] = {}
        self.held: dict[EventId, OracleEvent] = {}  # in order of arrival
        self.versions: dict[RoomId, str] = {}
        self.missing: dict[
            EventId, set[EventId]
        ] = {}  # of the events that the last append called "missing_parents"
        self.current_states: list[
            tuple[int, RoomId, State]
        ] = []  # every change: (arrival, room, state from then on)
        self._arrivals = 0

    # ----------------------------------------------------------------------------------------------
    # receiving

    def append(
        self,
        pdus: Iterable[Pdu],
        *,
        room_version: str | None = None,
        origin: Origin = "live",
        state_before: Mapping[EventId, Iterable[EventId]] | None = None,
        refused: Mapping[EventId, str] | None = None,
    ) -> list[tuple[EventId | None, Outcome]]:
        """(event id, outcome) of each PDU, in order of the input."""
        self.missing = {}
        batch = list(pdus)
        versions = {**self._versions_in(batch), **self.versions}
        outcomes: dict[int, tuple[EventId | None, Outcome]] = {}
        events: dict[int, Event] = {}
        for place, pdu in enumerate(batch):
            try:
                events[place] = parse(pdu, version_of(pdu, versions, room_version))
            except InvalidEvent as error:
                outcomes[place] = (EventId(error.event_id) if error.event_id else None, "invalid")
            except UNREADABLE:
                outcomes[place] = (None, "invalid")
        for place in in_causal_order(events):
            event = events[place]
            given = (state_before or {}).get(event.event_id)
            outcomes[place] = (
                event.event_id,
                self._receive(
                    event,
                    origin,
                    None if given is None else list(given),
                    (refused or {}).get(event.event_id),
                ),
            )
        return [outcomes[place] for place in range(len(batch))]

    def _versions_in(self, batch: Sequence[Pdu]) -> dict[RoomId, str]:
        """Return the versions that the create events of a batch give their rooms."""
        versions: dict[RoomId, str] = {}
        for pdu in batch:
            try:
                version = said_version(read_pdu(pdu))
                if version is not None:
                    versions[parse(pdu, version).room_id] = version
            except (InvalidEvent, *UNREADABLE):
                continue
        return versions

    def readmit(self, event_id: EventId) -> Outcome:
        """Accept an event that the caller has refused: it arrives in the timeline now.

        The outcome is "duplicate" for an accepted event, and "invalid" for any other.
        """
        held = self.get(event_id)
        if held.refused is None:
            return "duplicate" if held.accepted else "invalid"
        current = self._current(held.event.room_id)
        del self.held[event_id]
        self._arrivals += 1
        self.held[event_id] = replace(
            held,
            arrival=self._arrivals,
            soft_failed=False,
            refused=None,
            first_arrival=held.arrival,
        )
        self._note_state(held.event, current)
        return "stored" if held.event.content_hash_valid else "redacted"

    def _receive(
        self,
        event: Event,
        origin: Origin,
        given: Sequence[EventId] | None,
        refused: str | None,
    ) -> Outcome:
        known = self.held.get(event.event_id)
        if known is not None:
            if origin == "outlier" or not known.outlier:
                return "duplicate"
            event = known.event
        missing = {auth for auth in cited(event) if auth not in self.held}
        gaps = {parent for parent in event.prev_event_ids if not self.in_timeline(parent)}
        if origin != "outlier" and gaps:
            missing |= (
                gaps
                if given is None
                else {
                    of_state
                    for of_state in given
                    if not self._can_be_state_of(event.room_id, of_state)
                }
            )
        if missing:
            self.missing[event.event_id] = missing
            return "missing_parents"
        if origin == "outlier":
            state = None
        elif gaps:
            state = {self.held[of_state].event.key: of_state for of_state in given or ()}
        else:
            state = self._resolve(
                event.room_version.identifier,
                [self._after(parent) for parent in event.prev_event_ids],
            )
        return self._hold(event, origin, state, refused)

    def _can_be_state_of(self, room_id: RoomId, event_id: EventId) -> bool:
        if event_id not in self.held:
            return False
        event = self.held[event_id].event
        return event.is_state and event.room_id == room_id

    def _brings_back(self, event: Event, current: State) -> bool:
        """Return whether a local user joins with a given state while no local user is joined.

        The current state dates from when this server left.
        """
        if (
            event.type != "m.room.member"
            or event.content.get("membership") != "join"
            or not self._is_local(event.state_key or "")
        ):
            return False
        if all(self.in_timeline(parent) for parent in event.prev_event_ids):
            return False
        local = (
            one
            for (kind, user), one in current.items()
            if kind == "m.room.member" and self._is_local(user)
        )
        return all(self.held[one].event.content.get("membership") != "join" for one in local)

    def _is_local(self, user: str) -> bool:
        return user.endswith(f":{self.local_server}")

    def _hold(
        self, event: Event, origin: Origin, state: State | None, refused: str | None = None
    ) -> Outcome:
        rejected = (
            self._is_second_create(event)
            or not self._allowed_by_auth_events(event)
            or (state is not None and not self._allowed_by_state(event, state))
        )
        current = self._current(event.room_id)
        is_live = origin == "live" and not self._brings_back(event, current)
        soft_failed = (
            not rejected
            and is_live
            and bool(current)
            and not self._allowed_by_state(event, current)
        )
        if rejected or soft_failed:
            refused = None  # the rules come first
        soft_failed |= refused is not None
        self.held.pop(event.event_id, None)
        self._arrivals += 1
        self.held[event.event_id] = OracleEvent(
            event, origin, self._arrivals, rejected, soft_failed, state, refused
        )
        self.versions.setdefault(event.room_id, event.room_version.identifier)
        self._note_state(event, current)
        if rejected:
            return "rejected"
        if soft_failed:
            return "soft_failed"
        return "stored" if event.content_hash_valid else "redacted"

    def _note_state(self, event: Event, before: State) -> None:
        """Drop extremities beyond the limit after an event, and note a new current state."""
        self._drop_extremities(event.room_id, event.event_id)
        now = self._current(event.room_id)
        if now != before:
            self.current_states.append((self._arrivals, event.room_id, now))

    def _is_second_create(self, event: Event) -> bool:
        """Return whether the room has another create event. No auth rule refuses a second one."""
        return event.type == CREATE[0] and any(
            held.event.room_id == event.room_id
            and held.event.type == CREATE[0]
            and not held.rejected
            and held.event.event_id != event.event_id
            for held in self.held.values()
        )

    def _allowed_by_auth_events(self, event: Event) -> bool:
        everything = {event_id: held.event for event_id, held in self.held.items()}
        try:
            check_auth_events(event, everything, self._rejected())
        except AuthDenied:
            return False
        return True

    def _allowed_by_state(self, event: Event, state: State) -> bool:
        auth_state = {
            key: self.held[state[key]].event
            for key in {*keys_needed(event), CREATE}
            if key in state
        }
        try:
            check(event, auth_state, event.room_version)
        except AuthDenied:
            return False
        return True

    # ----------------------------------------------------------------------------------------------
    # state

    def _rejected(self) -> frozenset[EventId]:
        return frozenset(event_id for event_id, held in self.held.items() if held.rejected)

    def _resolve(self, version: str, states: Sequence[State]) -> State:
        if not states:
            return {}
        if all(state == states[0] for state in states):
            return states[0]
        everything = {event_id: held.event for event_id, held in self.held.items()}
        return resolve_literally(LiteralRoom(version, everything, self._rejected()), states)

    def _after(self, event_id: EventId) -> State:
        """A soft-failed event changes the state after it, a rejected one does not."""
        held = self.held[event_id]
        if held.state_before is None:
            raise StateUnknown(event_id)
        if held.rejected or not held.event.is_state:
            return held.state_before
        return {**held.state_before, held.event.key: event_id}

    def _current(self, room_id: RoomId) -> State:
        extremities = self._extremities(room_id)
        if not extremities:
            return {}
        return self._resolve(
            self.versions[room_id], [self._after(extremity) for extremity in sorted(extremities)]
        )

    def state_before(self, event_id: EventId) -> State:
        held = self.get(event_id)
        if held.state_before is None:
            raise StateUnknown(event_id)
        return dict(held.state_before)

    def state_after(self, event_id: EventId) -> State:
        self.get(event_id)
        return dict(self._after(event_id))

    def current_state(self, room_id: RoomId) -> State:
        """The resolution of the states after all forward extremities."""
        self._known_room(room_id)
        return dict(self._current(room_id))

    def current_state_at(self, room_id: RoomId, arrival: int) -> State:
        """The current state as it was once the event of that arrival had come."""
        states = [
            state for at, room, state in self.current_states if room == room_id and at <= arrival
        ]
        return dict(states[-1]) if states else {}

    # ----------------------------------------------------------------------------------------------
    # edges and order

    def get(self, event_id: EventId) -> OracleEvent:
        if event_id not in self.held:
            raise UnknownEvent(event_id)
        return self.held[event_id]

    def _known_room(self, room_id: RoomId) -> None:
        if room_id not in self.versions:
            raise UnknownRoom(room_id)

    def in_timeline(self, event_id: EventId) -> bool:
        return event_id in self.held and not self.held[event_id].outlier

    def timeline(self, room_id: RoomId) -> dict[EventId, OracleEvent]:
        """Return the events of a room but its outliers, in order of arrival.

        Rejected and soft-failed events are among them.
        """
        return {
            event_id: held
            for event_id, held in self.held.items()
            if held.event.room_id == room_id and not held.outlier
        }

    def forward_extremities(self, room_id: RoomId) -> set[EventId]:
        """Return the accepted live events that no accepted live event has as an ancestor.

        The path to the ancestor may go through events that can be no extremity.
        """
        self._known_room(room_id)
        return self._extremities(room_id)

    def _extremities(self, room_id: RoomId) -> set[EventId]:
        live = {
            event_id: held
            for event_id, held in self.timeline(room_id).items()
            if held.accepted and held.origin == "live"
        }
        return (
            set(live)
            - {reached for held in live.values() for reached in self._reached(held.event)}
            - self.dropped.keys()
        )

    def _drop_extremities(self, room_id: RoomId, newest: EventId) -> None:
        """Drop extremities: first equal states, then those without effect on the resolution.

        The newest is dropped last. Within each group the topologically lowest goes first.
        """
        if self.extremities_max is None or len(self._extremities(room_id)) <= self.extremities_max:
            return
        orders = self.topological_orderings(room_id)
        left = sorted(
            self._extremities(room_id), key=lambda one: (orders[one], self.held[one].arrival)
        )
        doubles = [
            one
            for at, one in enumerate(left)
            if any(self._after(one) == self._after(other) for other in left[at + 1 :])
        ]
        differing = [one for one in left if one not in doubles]
        tried = [one for one in differing if not self._has_for_itself(one, differing)][:TRIED]
        for one in [*doubles, *tried]:
            if len(left) > self.extremities_max and (
                one in doubles or self._resolved(left) == self._resolved(left, one)
            ):
                left.remove(one)
        if len(left) > self.extremities_max:
            left, doubles, tried = (
                [one for one in self._extremities(room_id) if one != newest],
                [],
                [],
            )
        for one in self._extremities(room_id) - set(left):
            self.dropped[one] = (
                "double" if one in doubles else "covered" if one in tried else "newest"
            )

    def _has_for_itself(self, extremity: EventId, extremities: Sequence[EventId]) -> bool:
        """Something of the resolution that no other has."""
        resolved, states = (
            self._resolved(extremities),
            {one: self._after(one) for one in extremities},
        )
        return any(
            [one for one in extremities if states[one].get(key) == resolved.get(key)] == [extremity]
            for key in {key for state in states.values() for key in state}
        )

    def _resolved(self, extremities: Sequence[EventId], without: EventId | None = None) -> State:
        version = self.held[extremities[0]].event.room_version.identifier
        return self._resolve(
            version, [self._after(one) for one in sorted(extremities) if one != without]
        )

    def _reached(self, event: Event) -> set[EventId]:
        reached: set[EventId] = set()
        todo = [parent for parent in event.prev_event_ids if self.in_timeline(parent)]
        while todo:
            parent = todo.pop()
            if parent not in reached and not (
                self.held[parent].accepted and self.held[parent].origin == "live"
            ):
                todo.extend(
                    above
                    for above in self.held[parent].event.prev_event_ids
                    if self.in_timeline(above)
                )
            reached.add(parent)
        return reached

    def backward_extremities(self, room_id: RoomId) -> set[EventId]:
        """Return the prev_events of timeline events that are missing or outliers."""
        self._known_room(room_id)
        return {
            parent
            for held in self.timeline(room_id).values()
            for parent in held.event.prev_event_ids
            if not self.in_timeline(parent)
        }

    def topological_orderings(self, room_id: RoomId) -> dict[EventId, int]:
        """1 + the largest of the parents', 1 where there is none.

        As a store must have it only in a room without gaps.
        """
        self._known_room(room_id)
        orderings = dict.fromkeys(self.timeline(room_id), 1)
        changed = True
        while changed:
            changed = False
            for event_id in orderings:
                parents = [
                    orderings[parent]
                    for parent in self.held[event_id].event.prev_event_ids
                    if parent in orderings
                ]
                if parents and orderings[event_id] != 1 + max(parents):
                    orderings[event_id] = 1 + max(parents)
                    changed = True
        return orderings

    def topological_ordering(self, event_id: EventId) -> int:
        return self.topological_orderings(self.get(event_id).event.room_id)[event_id]
