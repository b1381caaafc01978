"""A response of sliding sync beside the oracle, and the client after it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from storage import RoomSubscription, SlidingList, SlidingSyncRequest
from storage.ids import EventId, RoomId
from tests.oracle.sliding import (
    EVERYTHING,
    EXCLUDED,
    MEMBER,
    OUTSIDE,
    Listed,
    Membership,
    Patterns,
    Sent,
    SlidingOracle,
    Snapshot,
    TimelineRange,
    Wanted,
    explicit,
    is_lazy,
    matches,
    mentioned,
)
from tests.oracle.sliding_client import FoundRoom, FoundSync, ModelClient, RoomCopy


@dataclass
class DueRooms:
    """The rooms of a response, with their configs, and the counts of the lists.

    ``ended`` are forgotten rooms, which the response has whatever the request wants.
    """

    wanted: dict[RoomId, Wanted] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    ended: list[RoomId] = field(default_factory=list)


def expected(oracle: SlidingOracle, request: SlidingSyncRequest, sent: Snapshot) -> DueRooms:
    """Return the rooms that a request wants, whether they have news or not."""
    found = DueRooms(ended=oracle.ended(sent.rooms))
    listed = oracle.listed(sent.rooms)

    def add(room_id: RoomId, wanted: Wanted) -> None:
        before = found.wanted.get(room_id)
        found.wanted[room_id] = wanted if before is None else before | wanted

    for name, one in request.lists.items():
        rooms = [room for room in listed if oracle.passes(room, one.filters)]
        found.counts[name] = len(rooms)
        for room in window(rooms, one.ranges):
            add(room.room_id, Wanted(one.timeline_limit, patterns_of(one)))
    for room_id, subscription in request.room_subscriptions.items():
        if oracle.may_subscribe(room_id, sent.rooms):
            add(room_id, Wanted(subscription.timeline_limit, patterns_of(subscription)))
    return found


def patterns_of(config: SlidingList | RoomSubscription) -> Patterns:
    excluded = {(EXCLUDED + kind, key) for kind, key in config.excluded_state}
    return frozenset(config.required_state) | excluded


def window(rooms: Sequence[Listed], ranges: Collection[tuple[int, int]] | None) -> Sequence[Listed]:
    if ranges is None:
        return rooms
    places = {place for first, last in ranges for place in range(first, last + 1)}
    return [room for place, room in enumerate(rooms) if place in places]


def next_snapshot(
    oracle: SlidingOracle, due: DueRooms, found: FoundSync, sent: Snapshot
) -> Snapshot:
    """Return what the client was sent, with this response."""
    rooms = dict(sent.rooms)
    for room_id, wanted in due.wanted.items():
        own = oracle.membership(room_id)
        before = rooms.get(room_id)
        if own is None or (before is None and room_id not in found.rooms):
            continue
        limit = _limit(before, wanted, found.rooms.get(room_id), own)
        rooms[room_id] = Sent(
            oracle.now,
            Wanted(limit, wanted.patterns),
            own.name,
            room_id in oracle.personal.direct,
        )
    for room_id in due.ended:
        own = oracle.membership(room_id)
        rooms[room_id] = replace(
            rooms[room_id], upto=oracle.now, membership=own.name if own is not None else "leave"
        )
    return Snapshot(oracle.now, rooms)


def _limit(before: Sent | None, wanted: Wanted, told: FoundRoom | None, own: Membership) -> int:
    """Return how many of the latest events the client has."""
    if told is None:
        return EVERYTHING if before is None else before.wanted.limit
    if own.name in OUTSIDE or not own.was_joined:
        return EVERYTHING
    if told.limited and not told.timeline:
        return 0
    expands = before is None or told.initial or wanted.limit > before.wanted.limit
    if expands or told.limited or before is None:
        return wanted.limit if told.limited else EVERYTHING
    return before.wanted.limit


class ResponseCheck:
    """Compares one response. `lines` has a line for each difference."""

    def __init__(
        self,
        oracle: SlidingOracle,
        request: SlidingSyncRequest,
        sent: Snapshot,
        positions: Mapping[int, int],
    ) -> None:
        """``positions``: the store's stream orderings by arrival."""
        self.oracle, self.sent, self.positions = oracle, sent, positions
        self.due = expected(oracle, request, sent)
        self.lines: list[str] = []

    def differs(self, what: str, wanted: object, found: object) -> None:
        if wanted != found:
            self.lines.append(f"{what}: expected {wanted}, found {found}")

    def compare(self, found: FoundSync, client: ModelClient) -> None:
        """``client``: as it is after the response."""
        self.differs("counts", self.due.counts, dict(found.counts))
        for room_id in found.rooms:
            if room_id not in self.due.wanted and room_id not in self.due.ended:
                self.lines.append(f"{room_id}: not in any window, and not subscribed")
        for room_id in self.due.ended:
            self._ended(room_id, found.rooms.get(room_id))
        for room_id, wanted in self.due.wanted.items():
            own = self.oracle.membership(room_id)
            told = found.rooms.get(room_id)
            if own is None:
                continue
            if self.oracle.hides(own):
                self.differs(f"{room_id} of an invite by an ignored user", None, told)
                continue
            if told is not None:
                self._room(room_id, own, wanted, told)
            elif room_id not in self.sent.rooms:
                self.lines.append(f"{room_id}: never sent, and not returned")
                continue
            elif self._expected_timeline(room_id, own, wanted).events and own.name == "join":
                self.lines.append(f"{room_id}: has new events, and is not returned")
            self._client(room_id, own, wanted, client.rooms[room_id])

    # ----------------------------------------------------------------------------------------------
    # a room of the response

    def _is_initial(self, room_id: RoomId, own: Membership) -> bool | None:
        """None: the user left and came back since then, or is outside."""
        before = self.sent.rooms.get(room_id)
        if before is None:
            return True
        if own.name in OUTSIDE or not own.was_joined:
            return None
        since = self._memberships_since(room_id, before.upto)
        if before.membership != "join":
            return "join" in since
        return None if own.name == "join" and since - {"join"} else False

    def _memberships_since(self, room_id: RoomId, arrival: int) -> set[str | None]:
        oracle = self.oracle.oracle
        return {
            oracle.membership_in(state, self.oracle.user_id)
            for at, room, state in oracle.current_states
            if room == room_id and at > arrival
        }

    def _expected_timeline(
        self, room_id: RoomId, own: Membership, wanted: Wanted, *, initial: bool = False
    ) -> TimelineRange:
        before = self.sent.rooms.get(room_id)
        is_whole = initial or before is None or wanted.limit > before.wanted.limit
        after = 0 if is_whole or before is None else before.upto
        end = self.oracle.end(own)
        return self.oracle.timeline(room_id, after, end, wanted.limit, self.sent.upto)

    def _room(self, room_id: RoomId, own: Membership, wanted: Wanted, told: FoundRoom) -> None:
        where = f"{room_id}"
        self.differs(f"{where} membership", own.name, told.membership)
        if not told.has_news and own.position <= (self.sent.rooms[room_id].upto):
            self.lines.append(f"{where}: returned without news")
        initial = self._is_initial(room_id, own)
        if initial is not None:
            self.differs(f"{where} initial", initial, told.initial)
        if told.bump is not None or told.initial:
            bump = self.positions.get(self.oracle.bump(room_id, own), 0)
            self.differs(f"{where} bump", bump, told.bump)
        if own.name in ("invite", "knock") or not own.was_joined:
            self._outside(where, own, told)
        elif own.name == "join" or own.stay == own.position:
            self._inside(room_id, own, wanted, told)

    def _ended(self, room_id: RoomId, told: FoundRoom | None) -> None:
        """A forgotten room has the end of the membership, and nothing else."""
        own = self.oracle.membership(room_id)
        if told is None or own is None:
            self.lines.append(f"{room_id}: forgotten, and its end is not returned")
            return
        shown = told.membership, told.initial, told.timeline, set(told.facts) - {"is_dm"}
        self.differs(f"{room_id} forgotten", (own.name, True, [], set()), shown)
        state = {} if own.event_id is None else {(MEMBER, self.oracle.user_id): own.event_id}
        if own.was_joined or told.state:
            self.differs(f"{room_id} forgotten state", state, dict(told.state))

    def _outside(self, where: str, own: Membership, told: FoundRoom) -> None:
        if own.name in ("invite", "knock"):
            self.differs(f"{where} has stripped state", True, bool(told.stripped))
        self.differs(f"{where} timeline", [], [one for one in told.timeline if one != own.event_id])
        keys = [key for key in told.state if key != (MEMBER, self.oracle.user_id)]
        self.differs(f"{where} state", [], keys)

    def _inside(self, room_id: RoomId, own: Membership, wanted: Wanted, told: FoundRoom) -> None:
        rows = self._expected_timeline(room_id, own, wanted, initial=told.initial)
        before = self.sent.rooms.get(room_id)
        self.differs(f"{room_id} timeline", rows.events, told.timeline)
        self.differs(f"{room_id} limited", rows.limited, told.limited)
        self.differs(f"{room_id} num_live", rows.live, told.num_live)
        upto = 0 if before is None or told.initial else before.upto
        oracle = self.oracle.oracle
        is_old = any(oracle.get(one).arrival <= upto for one in rows.events)
        self.differs(f"{room_id} expanded", is_old, told.expanded)
        self._state(room_id, own, wanted, told)

    def _state(self, room_id: RoomId, own: Membership, wanted: Wanted, told: FoundRoom) -> None:
        """The state has nothing that is not wanted, and nothing that the client has for certain."""
        state = self.oracle.state(room_id, self.oracle.end(own))
        before = self.sent.rooms.get(room_id)
        user = self.oracle.user_id
        people = mentioned(self.oracle.oracle, told.timeline)
        if is_lazy(wanted.patterns):
            for person in people:
                key = (MEMBER, person)
                self.differs(f"{room_id} lazily {key}", state.get(key), told.state.get(key))
        for key, event_id in told.state.items():
            self.differs(f"{room_id} {key}", state.get(key), event_id)
            is_member = key[0] == MEMBER and is_lazy(wanted.patterns)
            is_wanted = matches(wanted.patterns, key, user)
            if is_member and (key[1] in people or is_wanted):
                continue
            changed = before is not None and self._changed(room_id, key, before.upto)
            if is_member and changed and not told.limited:
                continue
            if not is_wanted:
                self.lines.append(f"{room_id} {key}: not wanted")
            elif (
                before is not None
                and not told.initial
                and not changed
                and before.wanted.excluded <= wanted.excluded
                and not matches(
                    explicit(wanted.patterns) - explicit(before.wanted.patterns), key, user
                )
            ):
                self.lines.append(f"{room_id} {key}: sent before")

    def _changed(self, room_id: RoomId, key: tuple[str, str], since: int) -> bool:
        oracle = self.oracle.oracle
        values = [oracle.current_state_at(room_id, since).get(key)]
        values += [
            state.get(key)
            for arrival, room, state in oracle.current_states
            if room == room_id and arrival > since
        ]
        return len(set(values)) > 1

    # ----------------------------------------------------------------------------------------------
    # the client

    def _client(self, room_id: RoomId, own: Membership, wanted: Wanted, client: RoomCopy) -> None:
        """The client has what it asked for, by its responses alone."""
        self.differs(f"{room_id} client membership", own.name, client.membership)
        if own.name != "join" and own.stay != own.position:
            return
        state = self.oracle.state(room_id, self.oracle.end(own))
        user = self.oracle.user_id
        known = {
            key: one
            for key, one in client.state.items()
            if self._is_kept(wanted, key) and key not in client.outdated
        }
        due = {key: one for key, one in state.items() if matches(wanted.patterns, key, user)}
        lazy = is_lazy(wanted.patterns)
        for key in {*known, *due}:
            if lazy and key not in due and key[0] == MEMBER and key not in known:
                continue
            self.differs(f"{room_id} client {key}", state.get(key), known.get(key))
        self._whole(room_id, own, wanted, client)
        if own.name == "join":
            self._facts(room_id, client.facts)

    def _is_kept(self, wanted: Wanted, key: tuple[str, str]) -> bool:
        """Return whether the client has the key as it is now. It may have others as they were."""
        lazily = key[0] == MEMBER and is_lazy(wanted.patterns) and key[1] != self.oracle.user_id
        return lazily or matches(wanted.patterns, key, self.oracle.user_id)

    def _whole(self, room_id: RoomId, own: Membership, wanted: Wanted, client: RoomCopy) -> None:
        """The timeline of the client has no hole, and ends with the last event."""
        oracle = self.oracle.oracle
        if not client.timeline:
            return
        first = oracle.get(client.timeline[0]).arrival
        rows = self.oracle.timeline(room_id, first - 1, self.oracle.end(own), 10**6, 0)
        held = [one for one in rows.events if oracle.get(one).event.type != "m.room.redaction"]
        have = [one for one in client.timeline if one in set(held)]
        self.differs(f"{room_id} client timeline", held, have)
        del wanted

    def _facts(self, room_id: RoomId, facts: Mapping[str, Any]) -> None:
        for name, value in self.oracle.facts(room_id).items():
            kind = "m.room.avatar" if name == "avatar" else "m.room.name"
            if name in ("name", "heroes", "avatar") and self.oracle.is_redacted(room_id, kind):
                continue  # the client knows of it by the redaction in the timeline
            self.differs(f"{room_id} client {name}", value, facts.get(name))


def ids(events: Sequence[Any]) -> list[EventId]:
    return [event.event_id for event in events]
