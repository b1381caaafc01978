"""State resolution as the specification says it, sentence by sentence, with no thought of speed.

Every definition is a function of its own that computes its sets from scratch. Nothing is shared
with storage.auth.resolution; the authorisation rules themselves are storage.auth.check, which has a
second statement of its own in rule_table.py. Each deviation from an algorithm is a flag of
`Variant`, so that a test can show that the random rooms would notice it.

Where the text is silent:
* An event that is not stored is never allowed.
* An event may need a key that neither the state nor its stored auth events give. If it also cites
  events that are not stored, it cannot be authorised and is not allowed.
* Version 1: under one key where nothing passes, the event with the lowest depth stays; each key of
  a phase is resolved against what the phases before came to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from math import inf

from storage.auth import check
from storage.errors import AuthDenied
from storage.event import Event
from storage.ids import EventId, StateKey

State = dict[StateKey, EventId]
CREATE = ("m.room.create", "")
POWER = ("m.room.power_levels", "")
RULES = ("m.room.join_rules", "")


@dataclass(frozen=True)
class Variant:
    """A mistake that a wrong implementation would make."""

    without_auth_difference: bool = False
    without_subgraph: bool = False
    start_from_unconflicted: bool = False  # in 2.1
    start_from_nothing: bool = False  # in 2
    use_rejected: bool = False
    no_chains_of_power_events: bool = False
    power_order_by_time: bool = False
    mainline_ignored: bool = False
    mainline_backwards: bool = False
    conflict_wins: bool = False  # over the unconflicted state, at the end
    missing_key_is_no_conflict: bool = False
    v1_lowest_depth: bool = False


CORRECT = Variant()


@dataclass(frozen=True)
class LiteralRoom:
    version: str
    events: Mapping[EventId, Event]
    rejected: frozenset[EventId]
    variant: Variant = CORRECT

    @property
    def number(self) -> int:
        return int(self.version)


def resolve_literally(room: LiteralRoom, states: Sequence[Mapping[StateKey, EventId]]) -> State:
    if room.number == 1:
        return resolve_version_1(room, states)
    return resolve_version_2(room, states)


# --------------------------------------------------------------------------------------------- what
# events need to be allowed


def needed_keys(event: Event) -> set[StateKey]:
    """Auth events selection, with the create event in all versions."""
    if event.type == "m.room.create":
        return set()
    keys = {CREATE, POWER, ("m.room.member", event.sender)}
    if event.type == "m.room.member":
        assert event.state_key is not None
        keys.add(("m.room.member", event.state_key))
        membership = event.content.get("membership")
        if membership in {"join", "invite", "knock"}:
            keys.add(RULES)
        authoriser = event.content.get("join_authorised_via_users_server")
        if (
            membership == "join"
            and authoriser is not None
            and int(event.room_version.identifier) >= 8
        ):
            keys.add(("m.room.member", authoriser))
    return keys


def allowed(room: LiteralRoom, event: Event, state: Mapping[StateKey, Event]) -> bool:
    try:
        check(event, state, room.version)
    except AuthDenied:
        return False
    return True


def create_by_room_id(room: LiteralRoom, event: Event) -> EventId | None:
    return EventId("$" + event.room_id[1:]) if room.number >= 12 else None


# --------------------------------------------------------------------------------------------------
# version 1


def resolve_version_1(room: LiteralRoom, states: Sequence[Mapping[StateKey, EventId]]) -> State:
    values: dict[StateKey, set[EventId]] = {}
    for state in states:
        for key, value in state.items():
            values.setdefault(key, set()).add(value)
    result = {key: next(iter(ids)) for key, ids in values.items() if len(ids) == 1}
    conflicts = {key: ids for key, ids in values.items() if len(ids) > 1}
    for event_type in ("m.room.power_levels", "m.room.join_rules", "m.room.member", None):
        phase: State = {}
        for key, ids in conflicts.items():
            if key[0] == event_type or (
                event_type is None and key[0] not in {POWER[0], RULES[0], "m.room.member"}
            ):
                winner = (
                    pick_normal(room, ids, result)
                    if event_type is None
                    else pick_auth(room, key, ids, result)
                )
                if winner is not None:
                    phase[key] = winner
        result |= phase
    return result


def version_1_order(room: LiteralRoom, ids: set[EventId]) -> list[Event]:
    """Ascending depth, then descending sha1 of the event id."""
    held = [room.events[i] for i in ids if i in room.events]
    if room.variant.v1_lowest_depth:
        return sorted(
            held, key=lambda e: (-e.depth, int(sha1(e.event_id.encode()).hexdigest(), 16))
        )
    return sorted(held, key=lambda e: (e.depth, -int(sha1(e.event_id.encode()).hexdigest(), 16)))


def allowed_in(room: LiteralRoom, event: Event, state: State) -> bool:
    auth_state = {}
    for key in needed_keys(event):
        if key in state:
            if state[key] not in room.events:
                return False
            auth_state[key] = room.events[state[key]]
    return allowed(room, event, auth_state)


def pick_auth(room: LiteralRoom, key: StateKey, ids: set[EventId], result: State) -> EventId | None:
    ordered = version_1_order(room, ids)
    if not ordered:
        return None
    current = result | {key: ordered[0].event_id}
    for event in ordered[1:]:
        if not allowed_in(room, event, current):
            break
        current[key] = event.event_id
    return current[key]


def pick_normal(room: LiteralRoom, ids: set[EventId], result: State) -> EventId | None:
    ordered = version_1_order(room, ids)
    passing = [event.event_id for event in ordered if allowed_in(room, event, result)]
    if passing:
        return passing[-1]
    return ordered[0].event_id if ordered else None


# --------------------------------------------------------------------------------------------------
# version 2 and 2.1


def resolve_version_2(room: LiteralRoom, states: Sequence[Mapping[StateKey, EventId]]) -> State:
    version_2_1 = room.number >= 12
    unconflicted, conflicted = split(room, states)
    full = set(conflicted)
    if not room.variant.without_auth_difference:
        full |= auth_difference(room, states)
    if version_2_1 and not room.variant.without_subgraph:
        full |= subgraph(room, conflicted)
    full = {event_id for event_id in full if event_id in room.events}

    chosen = {event_id for event_id in full if is_power_event(room.events[event_id])}
    if not room.variant.no_chains_of_power_events:
        for event_id in list(chosen):
            chosen |= chain(room, event_id) & full
    from_nothing = (
        version_2_1 and not room.variant.start_from_unconflicted
    ) or room.variant.start_from_nothing
    state: State = {} if from_nothing else dict(unconflicted)
    state = iterative_auth_checks(room, power_ordering(room, chosen), state)
    state = iterative_auth_checks(
        room, mainline_ordering(room, full - chosen, state.get(POWER)), state
    )
    return unconflicted | state if room.variant.conflict_wins else state | unconflicted


def split(
    room: LiteralRoom, states: Sequence[Mapping[StateKey, EventId]]
) -> tuple[State, set[EventId]]:
    unconflicted: State = {}
    conflicted: set[EventId] = set()
    for key in {key for state in states for key in state}:
        values = {state.get(key) for state in states}
        if room.variant.missing_key_is_no_conflict:
            values -= {None}
        if len(values) == 1:
            (value,) = values
            assert value is not None
            unconflicted[key] = value
        else:
            conflicted |= {value for value in values if value is not None}
    return unconflicted, conflicted


def chain(room: LiteralRoom, event_id: EventId) -> set[EventId]:
    """All auth events, all of theirs, and so on: added until nothing new comes."""
    found: set[EventId] = set()
    new = {event_id}
    while new:
        cited = {a for e in new if e in room.events for a in room.events[e].auth_event_ids}
        new = cited - found
        found |= new
    return found


def auth_difference(
    room: LiteralRoom, states: Sequence[Mapping[StateKey, EventId]]
) -> set[EventId]:
    chains = [set().union(*(chain(room, value) for value in state.values())) for state in states]
    return set().union(*chains) - chains[0].intersection(*chains)


def subgraph(room: LiteralRoom, conflicted: set[EventId]) -> set[EventId]:
    """On a path from conflicted A to conflicted B: A or its ancestor, and B or its descendant."""
    found: set[EventId] = set()
    for a in conflicted:
        reached = chain(room, a)
        for b in conflicted & reached:
            found |= {a, b} | {x for x in reached if b in chain(room, x)}
    return found


def is_power_event(event: Event) -> bool:
    if event.state_key is None:
        return False
    if event.type in {"m.room.power_levels", "m.room.join_rules"}:
        return True
    membership = event.content.get("membership")
    return (
        event.type == "m.room.member"
        and membership in {"leave", "ban"}
        and event.sender != event.state_key
    )


def auth_event_under(room: LiteralRoom, event: Event, key: StateKey) -> Event | None:
    held = [room.events[a] for a in event.auth_event_ids if a in room.events]
    matching = [a for a in held if (a.type, a.state_key) == key]
    return matching[0] if matching else None


def sender_power(room: LiteralRoom, event: Event) -> float:
    by_id = create_by_room_id(room, event)
    create = room.events.get(by_id) if by_id is not None else auth_event_under(room, event, CREATE)
    if (
        room.number >= 12
        and create is not None
        and event.sender in {create.sender, *create.content.get("additional_creators", [])}
    ):
        return inf
    power = auth_event_under(room, event, POWER)
    if power is None:
        if create is None:
            return 0
        creator = create.sender if room.number >= 11 else create.content.get("creator")
        return 100 if event.sender == creator else 0
    users = power.content.get("users", {})
    return int(users.get(event.sender, power.content.get("users_default", 0)))


def power_ordering(room: LiteralRoom, ids: set[EventId]) -> list[EventId]:
    """Order by Kahn: among events whose cited events are all placed, take the smallest.

    Only cited events in `ids` count. Compare by power, time and id.
    """

    def order(event_id: EventId) -> tuple[float, int, str]:
        event = room.events[event_id]
        return (
            0 if room.variant.power_order_by_time else -sender_power(room, event),
            event.origin_server_ts,
            event_id,
        )

    placed: list[EventId] = []
    left = set(ids)
    while left:
        free = {e for e in left if not any(a in left for a in room.events[e].auth_event_ids)}
        first = min(free or left, key=order)
        placed.append(first)
        left.remove(first)
    return placed


def power_line(room: LiteralRoom, event: Event) -> list[EventId]:
    """Return the power levels event in the auth events, the one in its auth events, and so on.

    The event itself is left out.
    """
    line: list[EventId] = []
    found = auth_event_under(room, event, POWER)
    while found is not None and found.event_id not in line:
        line.append(found.event_id)
        found = auth_event_under(room, found, POWER)
    return line


def mainline_ordering(
    room: LiteralRoom, ids: set[EventId], newest: EventId | None
) -> list[EventId]:
    mainline: list[EventId] = []
    if newest is not None:
        mainline = [
            newest,
            *(power_line(room, room.events[newest]) if newest in room.events else []),
        ]

    def position(event_id: EventId) -> float:
        if room.variant.mainline_ignored:
            return 0
        for cited in power_line(room, room.events[event_id]):
            if cited in mainline:
                return mainline.index(cited)
        return inf

    sign = 1 if room.variant.mainline_backwards else -1
    return sorted(ids, key=lambda e: (sign * position(e), room.events[e].origin_server_ts, e))


def iterative_auth_checks(room: LiteralRoom, ordered: list[EventId], start: State) -> State:
    state = dict(start)
    for event_id in ordered:
        event = room.events[event_id]
        if event.state_key is None:
            continue
        auth_state = auth_state_of(room, event, state)
        if auth_state is not None and allowed(room, event, auth_state):
            state[event.type, event.state_key] = event_id
    return state


def auth_state_of(room: LiteralRoom, event: Event, state: State) -> dict[StateKey, Event] | None:
    by_id = create_by_room_id(room, event)
    cited = [*([by_id] if by_id is not None else []), *event.auth_event_ids]
    auth_state: dict[StateKey, Event] = {}
    for key in needed_keys(event):
        if key in state:
            if state[key] not in room.events:
                return None
            auth_state[key] = room.events[state[key]]
            continue
        usable = [
            a
            for a in cited
            if a in room.events and (room.variant.use_rejected or a not in room.rejected)
        ]
        matching = [
            room.events[a] for a in usable if (room.events[a].type, room.events[a].state_key) == key
        ]
        if matching:
            auth_state[key] = matching[0]
        elif any(a not in room.events for a in cited):
            return None
    return auth_state
