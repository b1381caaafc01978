"""Small rooms with conflicts: nested forks, bans against power level changes, illegal events.

A room is built from random steps. Every step takes a point in the room: an earlier one, or a
mixture of two that no resolution made. It adds one event with the auth events of that point, some
of them wrong on purpose.
"""

from dataclasses import dataclass, field
from hashlib import sha1
from random import Random
from typing import Any

from hypothesis import strategies as st

from storage.auth import auth_event_keys, check
from storage.errors import AuthDenied
from storage.event import Event
from storage.ids import EventId, StateKey
from tests.auth.events import ROOM, make_event

USERS = ("@0:a", "@1:a", "@2:b", "@3:b", "@4:c")
VERSIONS = ("1", "2", "5", "6", "8", "10", "11", "12", "12")
LEVELS = (0, 25, 50, 75, 100)

State = dict[StateKey, EventId]


@dataclass(frozen=True)
class ForkStep:
    kind: int
    who: int
    whom: int
    place: int
    other_place: int
    value: int
    time: int
    quirk: int


@dataclass
class RandomConflict:
    """A conflict to resolve: stored events, states, and the ids that count as rejected."""

    version: str
    events: dict[EventId, Event]
    states: list[State]
    rejected: frozenset[EventId]


@dataclass
class RandomRoom:
    version: str
    salt: int
    events: dict[EventId, Event] = field(default_factory=dict)
    points: list[State] = field(default_factory=list)
    refused: set[EventId] = field(default_factory=set)

    def new_id(self) -> str:
        digest = sha1(f"{self.salt}/{len(self.events)}".encode()).hexdigest()[:12]
        return f"${digest}:a" if self.version in {"1", "2"} else f"${digest}"

    def begin(self) -> None:
        creator = USERS[0]
        content = (
            {"creator": creator}
            if self.version < "3"
            else {"creator": creator, "room_version": self.version}
        )
        if self.version == "12" and self.salt % 2:
            content["additional_creators"] = [USERS[1]]  # type: ignore[assignment]
        create = make_event(
            self.version, self.new_id(), "m.room.create", creator, "", content, prev=(), ts=0
        )
        self.room_id = create.room_id if self.version == "12" else ROOM
        self.events[create.event_id] = create
        self.points.append({create.key: create.event_id})
        self.add(
            "m.room.member",
            creator,
            creator,
            {"membership": "join"},
            self.points[-1],
            prev=create.event_id,
        )
        users = (
            {USERS[1]: 50}
            if self.version == "12" and not self.salt % 2
            else {}
            if self.version == "12"
            else {creator: 100, USERS[1]: 50}
        )
        self.add("m.room.power_levels", creator, "", {"users": users}, self.points[-1])
        self.add("m.room.join_rules", creator, "", {"join_rule": "public"}, self.points[-1])
        for user in USERS[1:3]:
            self.add("m.room.member", user, user, {"membership": "join"}, self.points[-1])

    def add(
        self,
        kind: str,
        sender: str,
        key: str | None,
        content: dict[str, Any],
        state: State,
        *,
        ts: int = 0,
        quirk: int = 0,
        prev: str = "$p:a",
    ) -> None:
        """One event at a state.

        It becomes part of the state after it if it is allowed, or if the quirk says so.
        """
        draft = make_event(
            self.version, self.new_id(), kind, sender, key, content, room_id=self.room_id
        )
        cited = [state[k] for k in sorted(auth_event_keys(draft)) if k in state]
        if quirk == 1 and cited:
            cited.pop(len(self.events) % len(cited))
        elif quirk == 2:
            everything = sorted(self.events)
            cited[len(self.events) % (len(cited) or 1) :][:1] = [
                everything[self.salt % len(everything)]
            ]
        elif quirk == 3:
            cited += [e for e in list(self.events)[-3:] if e not in cited]
        depth = 1 + len(self.events) - (3 if quirk == 4 else 0)
        event = make_event(
            self.version,
            draft.event_id,
            kind,
            sender,
            key,
            content,
            room_id=self.room_id,
            depth=depth,
            ts=ts,
            auth=cited,
            prev=(prev,),
        )
        fits = True
        try:
            check(event, {k: self.events[e] for k, e in state.items()}, self.version)
        except AuthDenied:
            fits = False
            self.refused.add(event.event_id)
        if fits or quirk in {5, 6}:
            self.events[event.event_id] = event
            after = state if key is None else state | {(kind, key): event.event_id}
            self.points.append(after)

    def place(self, step: ForkStep) -> State:
        """An earlier point, near the end more often; sometimes two of them mixed key by key."""
        state = self.points[-1 - min(step.place, len(self.points) - 1)]
        if step.quirk == 7:
            other = self.points[-1 - min(step.other_place, len(self.points) - 1)]
            keys = sorted(state.keys() | other.keys())
            mixed = {}
            for i, key in enumerate(keys):
                first, second = (state, other) if (step.value >> (i % 3)) & 1 else (other, state)
                mixed[key] = first.get(key) or second[key]
            return mixed
        return state

    def take(self, step: ForkStep) -> None:
        state = self.place(step)
        kind, key, content = what(step, self.version)
        sender = self.sender(step, state)
        if kind == "m.room.member" and content["membership"] in {"join", "knock"}:
            sender = USERS[step.whom]
        if kind == "m.room.power_levels" and step.value % 2:
            content = self.changed_power(state, step)
        self.add(
            kind,
            sender,
            key,
            content,
            state,
            ts=len(self.events) // 3 + step.time,
            quirk=step.quirk,
        )

    def sender(self, step: ForkStep, state: State) -> str:
        """Mostly somebody who is joined."""
        if step.quirk != 8:
            for user in USERS[step.who :] + USERS:
                joined = state.get(("m.room.member", user))
                if joined is not None and self.events[joined].content["membership"] == "join":
                    return user
        return USERS[step.who]

    def changed_power(self, state: State, step: ForkStep) -> dict[str, Any]:
        current = state.get(("m.room.power_levels", ""))
        content = dict(self.events[current].content) if current is not None else {}
        content["users"] = dict(content.get("users", {})) | {
            USERS[step.whom]: written(LEVELS[step.value % 5], step, self.version)
        }
        if self.version == "12":
            content["users"].pop(USERS[0], None)
        return content


def written(level: int, step: ForkStep, version: str) -> Any:
    """The level in a form that the version reads."""
    return f" +0{level}" if step.time == 2 and int(version) < 10 else level


def what(step: ForkStep, version: str) -> tuple[str, str | None, dict[str, Any]]:
    """Type, state key and content of the event of a step."""
    whom, kind = USERS[step.whom], step.kind
    if kind <= 2:
        return "m.room.power_levels", "", new_power(step, version)
    if kind == 3:
        return (
            "m.room.join_rules",
            "",
            {"join_rule": ("public", "invite", "knock", "restricted", "private")[step.value % 5]},
        )
    if kind <= 10:
        content = {
            "membership": ("ban", "ban", "leave", "invite", "join", "join", "knock")[kind - 4]
        }
        if content["membership"] == "join" and step.value == 4:
            content["join_authorised_via_users_server"] = USERS[step.who]
        return "m.room.member", whom, content
    if kind == 11:
        return "m.room.message", None, {}
    return ("m.room.topic", "m.room.name")[step.value % 2], "", {"n": step.time}


def new_power(step: ForkStep, version: str) -> dict[str, Any]:
    """Power levels that are made up, not changed from those in force."""
    level = LEVELS[step.value % 5]
    users = {USERS[step.whom]: level, USERS[step.other_place % 5]: LEVELS[step.time]}
    if version != "12":
        users[USERS[0]] = 100
    return {"users": users, "ban": level, "users_default": 25 if step.time == 1 else 0}


def random_step(random: Random) -> ForkStep:
    return ForkStep(
        kind=random.randrange(14),
        who=random.choice((0, 0, 0, 1, 1, 2, 3, 4)),
        whom=random.choice((0, 1, 1, 2, 2, 3, 4)),
        place=random.choice((0, 0, 1, 2, 3, 5, 8, 13)),
        other_place=random.randrange(10),
        value=random.randrange(8),
        time=random.randrange(3),
        quirk=random.randrange(13),
    )


def build_conflict(versions: tuple[str, ...], number: int, length: int) -> RandomConflict:
    """States of one random room to resolve. In some, events are missing, or count as rejected."""
    random = Random(number)
    room = RandomRoom(random.choice(versions), random.randrange(64))
    room.begin()
    for _ in range(length):
        room.take(random_step(random))
    states = [
        dict(room.points[-1 - min(random.randrange(length + 1), len(room.points) - 1)])
        for _ in range(random.choice((2, 2, 2, 3, 4)))
    ]
    ids = sorted(room.events)
    missing = set(random.sample(ids, 2)) if random.randrange(4) == 0 else set()
    rejected = set(random.sample(ids, 2)) if random.randrange(3) == 0 else set()
    if random.randrange(4) == 0:
        rejected |= room.refused
    events = {event_id: event for event_id, event in room.events.items() if event_id not in missing}
    return RandomConflict(room.version, events, states, frozenset(rejected))


def conflicts(versions: tuple[str, ...] = VERSIONS) -> st.SearchStrategy[RandomConflict]:
    """Random rooms by number: shrinking finds a shorter room."""
    return st.builds(build_conflict, st.just(versions), st.integers(0, 2**40), st.integers(5, 50))
