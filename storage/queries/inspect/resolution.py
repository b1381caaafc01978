"""A resolution of the room's states, replayed: which states met, each check, and the result.

The states are those after the parents of an event, or after the forward extremities of a room. They
are read whole, once for each distinct state, and split, as the specification says. The writer
resolves incrementally over the chain cover; this replay uses neither. So it also shows whether the
stored state is right.

An event may have been rejected only after the resolution (`storage.maintenance.verify`). If the
stored state differs, the events that were rejected later count as accepted in a second replay.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, LiteralString, NamedTuple

from storage.auth import Replay, ReplayStep, needed_events, replay_conflicts, split_conflicts
from storage.auth.resolution.v2 import Position
from storage.codec import StoredBytes, decode
from storage.database.columns import OWN_ENTRIES, PREV_NIDS
from storage.database.connection import Connection, require_room
from storage.database.placeholders import compose
from storage.errors import InputError, InvalidEvent, UnknownEvent
from storage.event import Event, load
from storage.ids import EventId, RoomId, StateKey
from storage.queries.auth_chain import auth_chain_difference, auth_chain_ids
from storage.queries.state_at import StateMap, states_at
from storage.state.paths import unpack

EVENTS_MAX: Final = 20_000
"""Events that a replay loads: auth chains of the conflicted ones, and what the checks need."""

ROUNDS_MAX: Final = 100

SQL_PARENTS: Final[LiteralString] = compose(
    """
SELECT r.room_id, r.room_version, e.stream_ordering AS before,
    COALESCE(p.event_id, m.event_id) AS event_id,
    COALESCE(p.state_group_after, p.state_group_before) AS state_group,
    p.event_nid IS NOT NULL AS is_stored
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN LATERAL unnest(:prev_nids.call(e)) WITH ORDINALITY AS parent (event_nid, place) ON true
LEFT JOIN events p ON p.event_nid = parent.event_nid
LEFT JOIN missing_events m ON m.event_nid = parent.event_nid
WHERE e.event_id = $1::text
ORDER BY parent.place
""",
    PREV_NIDS,
).sql

SQL_EXTREMITIES: Final[LiteralString] = """
SELECT r.room_id, r.room_version, NULL::bigint AS before, p.event_id,
    COALESCE(p.state_group_after, p.state_group_before) AS state_group, true AS is_stored
FROM rooms r
CROSS JOIN unnest(r.forward_extremities) WITH ORDINALITY AS tip (event_nid, place)
JOIN events p ON p.event_nid = tip.event_nid
WHERE r.room_id = $1::text
ORDER BY tip.place
"""

SQL_LOADED: Final[LiteralString] = """
SELECT e.event_id, r.room_id, r.room_version, e.stream_ordering,
    e.rejected IS NOT NULL AS is_rejected, e.redacted_form, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
))
"""


class MeetingRow(NamedTuple):
    """A parent of an event, or a forward extremity, and the group of the state after it.

    ``before`` is the position of the event: None for an outlier, and for extremities.
    """

    room_id: RoomId
    room_version: str
    before: int | None
    event_id: EventId | None
    state_group: int | None
    is_stored: bool


class ResolutionEventRow(NamedTuple):
    """An event with its bytes, for the checks."""

    event_id: EventId
    room_id: RoomId
    room_version: str
    stream_ordering: int | None
    is_rejected: bool
    redacted_form: bool
    json: StoredBytes


@dataclass(frozen=True, slots=True)
class ReplayedResolution:
    """A resolution of the states after some events.

    ``tips`` are these events, ``missing`` those that are not stored, or whose state is not: then
    the state was given by the caller of `append`, and nothing can be replayed. ``states`` has the
    state after each tip, and is empty where all tips have one state: then nothing was resolved.
    ``replay`` is None where there was no conflict.

    ``resolved`` has the values of the conflicted keys, None for a key without one. ``stored`` has
    the same keys as they are stored.
    """

    room_id: RoomId
    room_version: str
    tips: tuple[EventId, ...]
    missing: tuple[EventId, ...]
    states: Mapping[EventId, StateMap]
    replay: Replay | None
    resolved: Mapping[StateKey, EventId | None]
    stored: Mapping[StateKey, EventId | None]
    events: Mapping[EventId, Event]

    @property
    def is_confirmed(self) -> bool:
        """Return whether the stored state has the resolved values."""
        return self.resolved == self.stored


async def resolution_at(conn: Connection, event_id: EventId) -> ReplayedResolution:
    """Replay the resolution that made the state before an event.

    `UnknownEvent`; `InputError` for one that needs too many events.
    """
    rows = await conn.fetch(SQL_PARENTS, event_id, row=MeetingRow)
    if not rows:
        raise UnknownEvent(event_id)
    tips = [row for row in rows if row.event_id is not None]
    return await _replayed(conn, rows[0], tips, at=event_id)


async def resolution_now(conn: Connection, room_id: RoomId) -> ReplayedResolution:
    """Replay the resolution that makes the current state of a room.

    `UnknownRoom`; `InputError` as `resolution_at`, and for a room without extremities.
    """
    rows = await conn.fetch(SQL_EXTREMITIES, room_id, row=MeetingRow)
    if not rows:
        await require_room(conn, room_id)
        raise InputError(f"{room_id} has no forward extremity, so it has no state to resolve")
    return await _replayed(conn, rows[0], rows, at=None)


async def _replayed(
    conn: Connection, room: MeetingRow, tips: Sequence[MeetingRow], *, at: EventId | None
) -> ReplayedResolution:
    missing = [row.event_id for row in tips if row.state_group is None]
    by_group = {row.state_group: row.event_id for row in tips}
    states: dict[EventId, StateMap] = {}
    if not missing and len(by_group) > 1:
        of_groups = await states_at(conn, _ids(by_group.values()), after=True)
        states = {
            row.event_id: of_groups[by_group[row.state_group] or row.event_id]
            for row in tips
            if row.event_id is not None
        }
    distinct = [states[event_id] for event_id in _ids(by_group.values()) if event_id in states]
    conflict = Conflict(room, at, distinct, *split_conflicts(distinct))
    outcome = await _resolved(conn, conflict) if conflict.conflicted else NOTHING
    return ReplayedResolution(
        room.room_id,
        room.room_version,
        tuple(_ids(row.event_id for row in tips)),
        tuple(_ids(missing)),
        states,
        *outcome,
    )


class Conflict(NamedTuple):
    """The states that meet, split. ``at`` is the event that merges them, None for extremities."""

    room: MeetingRow
    at: EventId | None
    states: Sequence[StateMap]
    unconflicted: StateMap
    conflicted: Mapping[StateKey, set[EventId]]


class Outcome(NamedTuple):
    """The last fields of `ReplayedResolution`."""

    replay: Replay | None
    resolved: Mapping[StateKey, EventId | None]
    stored: Mapping[StateKey, EventId | None]
    events: Mapping[EventId, Event]


NOTHING: Final = Outcome(None, {}, {}, {})


async def _resolved(conn: Connection, conflict: Conflict) -> Outcome:
    """Resolve with the events that are rejected now; if that differs, with those of back then."""
    difference = await auth_chain_difference(conn, [state.values() for state in conflict.states])
    loader = ReplayLoader()
    values = set[EventId]().union(*conflict.conflicted.values())
    await loader.load(conn, values | difference | await auth_chain_ids(conn, values))
    first = None
    for before in (None, conflict.room.before):
        if first is not None and loader.rejected(before) == loader.rejected(None):
            break
        replay = await _replay(conn, conflict, difference, loader, before)
        keys = [*dict.fromkeys([*conflict.conflicted, *replay.decided])]
        stored = await _stored(conn, conflict, keys)
        resolved = {key: replay.decided.get(key) for key in keys}
        outcome = Outcome(replay, resolved, stored, loader.events)
        if resolved == stored:
            return outcome
        first = first or outcome
    return first or NOTHING


async def _replay(
    conn: Connection,
    conflict: Conflict,
    difference: set[EventId],
    loader: "ReplayLoader",
    before: int | None,
) -> Replay:
    """Load what the checks need, and replay. ``before``: see `ReplayLoader.rejected`."""
    for _ in range(ROUNDS_MAX):
        arguments = (
            conflict.room.room_version,
            conflict.unconflicted,
            conflict.conflicted,
            difference,
            loader.events,
        )
        rejected = loader.rejected(before)
        needed = needed_events(*arguments, rejected=rejected, absent=loader.absent)
        if not needed:
            return replay_conflicts(*arguments, rejected=rejected)
        await loader.load(conn, needed)
    raise InputError(f"the chain of power levels is too long to replay: {ROUNDS_MAX} rounds")


async def _stored(
    conn: Connection, conflict: Conflict, keys: Sequence[StateKey]
) -> dict[StateKey, EventId | None]:
    """Return the stored values of these keys: in the state before the event, or now."""
    if conflict.at is None:
        state = await current_values(conn, conflict.room.room_id, keys)
    else:
        state = (await states_at(conn, [conflict.at], after=False, keys=keys))[conflict.at]
    return {key: state.get(key) for key in keys}


SQL_CURRENT_VALUES: Final[LiteralString] = """
SELECT t.type, k.state_key, e.event_id
FROM unnest($2::text[], $3::text[]) AS w (type, state_key)
JOIN event_types t ON t.type = w.type
JOIN state_keys k ON k.type_nid = t.type_nid AND k.state_key = w.state_key
JOIN current_state c ON c.state_key_nid = k.state_key_nid
    AND c.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
JOIN events e ON e.event_nid = c.event_nid
"""


class CurrentValueRow(NamedTuple):
    """A key of a current state, and its value."""

    type: str
    state_key: str
    event_id: EventId


async def current_values(
    conn: Connection, room_id: RoomId, keys: Sequence[StateKey]
) -> dict[StateKey, EventId]:
    types, state_keys = [key[0] for key in keys], [key[1] for key in keys]
    rows = await conn.fetch(SQL_CURRENT_VALUES, room_id, types, state_keys, row=CurrentValueRow)
    return {(row.type, row.state_key): row.event_id for row in rows}


class ReplayLoader:
    """The loaded events, and the ids that are not stored, or cannot be read."""

    def __init__(self) -> None:
        self.events: dict[EventId, Event] = {}
        self.absent: set[EventId] = set()
        self._rejected: dict[EventId, int | None] = {}

    async def load(self, conn: Connection, event_ids: Collection[EventId]) -> None:
        """Load these events. `InputError` for too many."""
        lacking = [
            event_id
            for event_id in event_ids
            if event_id not in self.events and event_id not in self.absent
        ]
        if len(self.events) + len(lacking) > EVENTS_MAX:
            raise InputError(f"the resolution needs more than {EVENTS_MAX} events to replay")
        for row in await conn.fetch(SQL_LOADED, lacking, row=ResolutionEventRow):
            raw = decode(row.json, row.event_id, row.room_id)
            try:
                event = load(raw, row.room_version, row.event_id, redacted=row.redacted_form)
            except InvalidEvent:  # `verify` reports it
                continue
            self.events[row.event_id] = event
            if row.is_rejected:
                self._rejected[row.event_id] = row.stream_ordering
        self.absent.update(event_id for event_id in lacking if event_id not in self.events)

    def rejected(self, before: int | None) -> set[EventId]:
        """Return the rejected events: all, or without those of a position from ``before`` on."""
        return {
            event_id
            for event_id, position in self._rejected.items()
            if before is None or position is None or position < before
        }


def _ids(event_ids: Iterable[EventId | None]) -> list[EventId]:
    return [event_id for event_id in event_ids if event_id is not None]


# --------------------------------------------------------------------------------------------------
# The sentences of a replayed resolution: which branch it preferred, and why for each key.
#
# The reason is the check that decided a key: a refusal, or the order of two checks that both
# passed.

BY_CHAIN: Final = "the auth events between them decide the order"
HEADLINES_MAX: Final = 3
DAY_MS: Final = 86_400_000
"""Claimed times that differ by more are remarked on."""


@dataclass(frozen=True, slots=True)
class KeyReason:
    """A conflicted key: its value after each tip, the resolved one, and the reason.

    ``headline`` is the reason in one clause, ``sentence`` the whole.
    """

    key: StateKey
    values: Mapping[EventId, EventId | None]
    resolved: EventId | None
    stored: EventId | None
    headline: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer: a sentence, the number of keys that each tip won, and the reason of each key.

    The sentence numbers the tips from 1, in their order.
    """

    sentence: str
    won: Mapping[EventId, int]
    keys: Sequence[KeyReason]


class Why(NamedTuple):
    """A reason, short for a headline, and whole."""

    short: str
    whole: str


def verdict(resolution: ReplayedResolution) -> Verdict:
    if resolution.missing:
        return Verdict(_unknown(resolution), {}, ())
    if resolution.replay is None:
        return Verdict(_agreed(resolution), dict.fromkeys(resolution.tips, 0), ())
    keys = [_reason(resolution, resolution.replay, key) for key in sorted(resolution.resolved)]
    won = {
        tip: sum(key_reason.values.get(tip) == key_reason.resolved for key_reason in keys)
        for tip in resolution.tips
    }
    headlines = [key_reason.headline for key_reason in keys] if len(keys) <= HEADLINES_MAX else []
    return Verdict(" ".join([_summary(won, len(keys)), *headlines]), won, keys)


def _unknown(resolution: ReplayedResolution) -> str:
    return (
        f"The state after {', '.join(resolution.missing)} is not stored, so the state was given"
        " with the event, and nothing was resolved here."
    )


def _agreed(resolution: ReplayedResolution) -> str:
    if len(resolution.tips) < 2:
        return "There is one parent at most, so there was nothing to resolve."
    if resolution.states:
        return "The branches have the same state by key, so there was no conflict."
    return "All branches have the same state, so there was nothing to resolve."


def _summary(won: Mapping[EventId, int], keys: int) -> str:
    most = max(won.values())
    best = [str(number) for number, count in enumerate(won.values(), 1) if count == most]
    total = f"{keys} conflicted {'key' if keys == 1 else 'keys'}"
    if len(best) > 1:
        return f"The merge preferred no branch: {' and '.join(best)} each won {most} of {total}."
    return f"The merge preferred branch {best[0]}: it won {most} of {total}."


def _reason(resolution: ReplayedResolution, replay: Replay, key: StateKey) -> KeyReason:
    values = {tip: resolution.states[tip].get(key) for tip in resolution.tips}
    resolved = resolution.resolved[key]
    why = _why(replay, key, values, resolved)
    return KeyReason(key, values, resolved, resolution.stored.get(key, resolved), *why)


def _why(
    replay: Replay, key: StateKey, values: Mapping[EventId, EventId | None], value: EventId | None
) -> Why:
    steps = {step.event.event_id: step for step in replay.steps if step.event.key == key}
    others = [
        steps[event_id]
        for event_id in dict.fromkeys(values.values())
        if event_id in steps and event_id != value
    ]
    others += [
        step for step in steps.values() if step.event.event_id != value and step not in others
    ]
    refusals = [_refusal(step) for step in others if step.refused is not None]
    winner = None if value is None else steps.get(value)
    if value is None:
        return _alone(refusals, "No event that sets it was allowed, so the key has no value.")
    if winner is None:
        return _unchecked(value, refusals, is_alone=len(replay.conflicted.get(key, ())) < 2)
    passed = [step for step in others if step.refused is None]
    if passed:
        why = _order(passed[-1], winner)
        return Why(why.short, " ".join([why.whole, *(refusal.whole for refusal in refusals)]))
    return _alone(refusals, f"{value} is the only value, and its check allowed it.")


def _alone(refusals: Sequence[Why], otherwise: str) -> Why:
    """Return the refusals that left a key to its value, or the reason where there are none."""
    if not refusals:
        return Why(otherwise, otherwise)
    return Why(refusals[0].short, " ".join(refusal.whole for refusal in refusals))


def _refusal(step: ReplayStep) -> Why:
    assert step.refused is not None  # noqa: S101  # the caller has picked refusals
    event, reason = step.event, step.refused.reason
    return Why(
        f"{event.sender}'s {_key(step)} was refused: {reason}.",
        f"{event.event_id} of {event.sender} was refused: {reason} ({step.refused.rule}).",
    )


def _unchecked(value: EventId, refusals: Sequence[Why], *, is_alone: bool) -> Why:
    """Return why a value stays that was never checked: room version 1."""
    if is_alone:
        sentence = f"Only one branch has it, so {value} stays: room version 1 sees no conflict."
    else:
        sentence = f"{value} has the lowest depth, and the others were not allowed."
    return Why(sentence, " ".join([sentence, *(refusal.whole for refusal in refusals)]))


def _order(loser: ReplayStep, winner: ReplayStep) -> Why:
    """Return why the winner was checked last, of two checks that both passed."""
    lost, won = _names(loser, winner)
    short, whole = _order_of_checks(loser, winner, lost, won)
    end = f"so {won} was checked after {lost}, and took the key."
    return Why(_headline(loser, winner, short), f"Both are allowed. {_capital(whole)}, {end}")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _headline(loser: ReplayStep, winner: ReplayStep, short: str) -> str:
    old, new = loser.event, winner.event
    if old.sender == new.sender:
        return f"Of two {_key(winner)} events of {new.sender}, {new.event_id} won: {short}."
    return f"{new.sender}'s {_key(winner)} won over {old.sender}'s: {short}."


def _key(step: ReplayStep) -> str:
    type_, state_key = step.event.key
    return f"{type_} {state_key}" if state_key else type_


def _names(loser: ReplayStep, winner: ReplayStep) -> tuple[str, str]:
    """Return what to call two events: by their senders, or by their ids if one sent both."""
    old, new = loser.event, winner.event
    if old.sender == new.sender:
        return old.event_id, new.event_id
    return f"{old.sender}'s event", f"{new.sender}'s event"


def _order_of_checks(loser: ReplayStep, winner: ReplayStep, lost: str, won: str) -> Why:
    if winner.phase == "depth":
        return Why("larger claimed depth", f"{won} has the larger claimed depth")
    if loser.phase != winner.phase:
        return Why(
            "the other is a power event, which is checked first",
            f"{lost} decides about power, which is checked first",
        )
    if winner.phase == "power":
        return _power_order(loser, winner, lost, won)
    return _mainline_order(loser, winner, won)


def _power_order(loser: ReplayStep, winner: ReplayStep, lost: str, won: str) -> Why:
    if winner.cites(loser.event.event_id):
        return Why("it cites the other as auth event", f"{won} cites {lost} as auth event")
    if loser.level > winner.level:
        levels = f"level {_level(loser.level)} against {_level(winner.level)}"
        return Why(
            "less power, so it was checked later",
            f"{loser.event.sender} has more power ({levels}), and goes first",
        )
    if loser.level < winner.level:
        return Why(BY_CHAIN, BY_CHAIN)
    return _by_time(loser, winner, won, "same power", "the senders have the same power")


def _mainline_order(loser: ReplayStep, winner: ReplayStep, won: str) -> Why:
    old, new = loser.mainline, winner.mainline
    if old is not None and new is not None and old > new:
        return Why(
            "newer power levels event",
            f"{won} was sent under a newer power levels event ({_age(new, old)})",
        )
    if new == inf:
        short, same = "no power levels event", "neither was sent under a power levels event"
    else:
        short = "same power levels event"
        same = "both were sent under the same power levels event"
    return _by_time(loser, winner, won, short, same)


def _by_time(loser: ReplayStep, winner: ReplayStep, won: str, short: str, same: str) -> Why:
    apart = winner.event.origin_server_ts - loser.event.origin_server_ts
    if apart < 0:
        return Why(BY_CHAIN, BY_CHAIN)
    if apart == 0:
        return Why(
            f"{short} and claimed time, larger id",
            f"{same}, both have the same claimed time, and {won} has the larger id",
        )
    sentence = f"{same}, and {won} has the later claimed time"
    if apart <= DAY_MS:
        return Why(f"{short}, later claimed time", sentence)
    days = f"{apart // DAY_MS} {'day' if apart < 2 * DAY_MS else 'days'}"
    return Why(
        f"{short}, later claimed time by {days}",
        f"{sentence} (by {days}: a sender sets it, so a clock may be wrong)",
    )


def _level(level: float) -> str:
    return "of a creator" if level == inf else str(level)


def _age(new: Position, old: Position) -> str:
    return f"{_power_levels_ago(new)} against {_power_levels_ago(old)}"


def _power_levels_ago(position: Position) -> str:
    if position == inf:
        return "none in the chain"
    return "the newest" if position == 0 else f"{position:.0f} before the newest"


# --------------------------------------------------------------------------------------------------
# The path of a state group: the rows that a read folds, each with its level and its entries.
#
# `storage.state.paths` explains levels. A group stores how many rows of its path are on each
# level, the highest first. So the level of each row follows from the last row alone.

SQL_PATH: Final[LiteralString] = compose(
    """
SELECT g.state_group, g.entry_count, g.runs, g.audience,
    (SELECT count(*) FROM :own_entries.call(g) AS own) AS entries
FROM state_path($1::bigint) AS step
JOIN state_groups g ON g.state_group = step.part
ORDER BY step.place
""",
    OWN_ENTRIES,
).sql

SQL_GROUPS_OF: Final[LiteralString] = """
SELECT state_group_before, COALESCE(state_group_after, state_group_before) AS state_group_after,
    audience
FROM events
WHERE event_id = $1::text
"""


class PathRow(NamedTuple):
    """A row of a path. ``entry_count`` is the size of its state, ``entries`` what it stores."""

    state_group: int
    entry_count: int
    runs: int
    audience: int
    entries: int


class EventGroupsRow(NamedTuple):
    """The state groups of an event, and its audience. None: an outlier."""

    state_group_before: int | None
    state_group_after: int | None
    audience: int | None


class PathStep(NamedTuple):
    """A row of a path, and its level: None for the root, else 0 for the lowest."""

    state_group: int
    level: int | None
    entry_count: int
    entries: int


async def groups_of(conn: Connection, event_id: str) -> EventGroupsRow | None:
    """Return the state groups of an event, None if it is not stored."""
    return await conn.fetchrow(SQL_GROUPS_OF, event_id, row=EventGroupsRow)


async def state_path(conn: Connection, state_group: int) -> list[PathStep]:
    """Return the path of a state group, root first; empty if it is not stored."""
    rows = await conn.fetch(SQL_PATH, state_group, row=PathRow)
    if not rows:
        return []
    levels = _levels(unpack(rows[-1].runs))
    return [
        PathStep(row.state_group, level, row.entry_count, row.entries)
        for row, level in zip(rows, levels, strict=False)
    ]


def _levels(runs: Sequence[int]) -> Iterator[int | None]:
    """Yield the level of each row of a path: the root, then the levels from high to low."""
    yield None
    for level, count in zip(reversed(range(len(runs))), runs, strict=True):
        for _ in range(count):
            yield level
