"""The sentences of a replayed resolution: which branch it preferred, and why for each key.

The reason is the check that decided a key: a refusal, or the order of two checks that both passed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from storage.auth.resolution import Replay, ReplayStep
from storage.auth.resolution.mainline import Position
from storage.ids import EventId, StateKey
from storage.queries.inspect.resolution import ReplayedResolution

BY_CHAIN: Final = "The auth events between them decide the order"


@dataclass(frozen=True, slots=True)
class KeyReason:
    """A conflicted key: its value after each tip, the resolved one, and the reason."""

    key: StateKey
    values: Mapping[EventId, EventId | None]
    resolved: EventId | None
    stored: EventId | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer: a sentence, the number of keys that each tip won, and the reason of each key."""

    sentence: str
    won: Mapping[EventId, int]
    keys: Sequence[KeyReason]


def verdict(found: ReplayedResolution) -> Verdict:
    """Return the sentences of a resolution."""
    if found.missing:
        return Verdict(_unknown(found), {}, ())
    if found.replay is None:
        return Verdict(_agreed(found), dict.fromkeys(found.tips, 0), ())
    keys = [_reason(found, found.replay, key) for key in sorted(found.resolved)]
    won = {tip: sum(one.values.get(tip) == one.resolved for one in keys) for tip in found.tips}
    return Verdict(_summary(won, len(keys)), won, keys)


def _unknown(found: ReplayedResolution) -> str:
    return (
        f"The state after {', '.join(found.missing)} is not stored, so the state was given with the"
        " event, and nothing was resolved here."
    )


def _agreed(found: ReplayedResolution) -> str:
    if len(found.tips) < 2:
        return "There is one parent at most, so there was nothing to resolve."
    if found.states:
        return "The branches have the same state by key, so there was no conflict."
    return "All branches have the same state, so there was nothing to resolve."


def _summary(won: Mapping[EventId, int], keys: int) -> str:
    most = max(won.values())
    best = [tip for tip, count in won.items() if count == most]
    total = f"{keys} conflicted {'key' if keys == 1 else 'keys'}"
    if len(best) > 1:
        return f"The merge preferred no branch: {' and '.join(best)} each won {most} of {total}."
    return f"The merge preferred the branch of {best[0]}: it won {most} of {total}."


def _reason(found: ReplayedResolution, replay: Replay, key: StateKey) -> KeyReason:
    values = {tip: found.states[tip].get(key) for tip in found.tips}
    resolved = found.resolved[key]
    return KeyReason(
        key, values, resolved, found.stored.get(key, resolved), _why(replay, key, values, resolved)
    )


def _why(
    replay: Replay, key: StateKey, values: Mapping[EventId, EventId | None], value: EventId | None
) -> str:
    """Return why a key has its value."""
    steps = {step.event.event_id: step for step in replay.steps if step.event.key == key}
    others = [steps[one] for one in dict.fromkeys(values.values()) if one in steps and one != value]
    others += [one for one in steps.values() if one.event.event_id != value and one not in others]
    refusals = [_refusal(step) for step in others if step.refused is not None]
    winner = None if value is None else steps.get(value)
    if value is None:
        return " ".join(refusals) or "No event that sets it was allowed, so the key has no value."
    if winner is None:
        return _unchecked(value, refusals, is_alone=len(replay.conflicted.get(key, ())) < 2)
    passed = [step for step in others if step.refused is None]
    if refusals and not passed:
        return " ".join(refusals)
    if not passed:
        return f"{value} is the only value, and its check allowed it."
    last = passed[-1]
    return " ".join([_order(last, winner), *refusals])


def _refusal(step: ReplayStep) -> str:
    assert step.refused is not None  # noqa: S101  # the caller has picked refusals
    return f"{step.event.event_id} was refused: {step.refused.reason} ({step.refused.rule})."


def _unchecked(value: EventId, refusals: Sequence[str], *, is_alone: bool) -> str:
    """Return why a value stays that was never checked: room version 1."""
    if is_alone:
        return f"Only one branch has it, so {value} stays: room version 1 sees no conflict."
    return " ".join([f"{value} has the lowest depth, and the others were not allowed.", *refusals])


def _order(loser: ReplayStep, winner: ReplayStep) -> str:
    """Return why the winner was checked last, of two checks that both passed."""
    lost, won = loser.event.event_id, winner.event.event_id
    end = f"so {won} was checked after {lost}, and took the key."
    if winner.phase == "depth":
        return f"Both are allowed. {won} is deeper by its claimed depth, {end}"
    if loser.phase != winner.phase:
        return f"Both are allowed. {lost} decides about power, which comes first, {end}"
    if winner.phase == "power":
        return f"Both are allowed. {_power_order(loser, winner)}, {end}"
    return f"Both are allowed. {_mainline_order(loser, winner)}, {end}"


def _power_order(loser: ReplayStep, winner: ReplayStep) -> str:
    if winner.cites(loser.event.event_id):
        return f"{winner.event.event_id} cites {loser.event.event_id} as auth event"
    if loser.level > winner.level:
        levels = f"level {_level(loser.level)} against {_level(winner.level)}"
        return f"{loser.event.sender} has more power ({levels}), and goes first"
    if loser.level < winner.level:
        return BY_CHAIN
    return _by_time(loser, winner, "The senders have the same power")


def _mainline_order(loser: ReplayStep, winner: ReplayStep) -> str:
    old, new = loser.mainline, winner.mainline
    if old is not None and new is not None and old > new:
        return f"{winner.event.event_id} was sent under newer power levels ({_age(new, old)})"
    return _by_time(loser, winner, "They were sent under the same power levels")


def _by_time(loser: ReplayStep, winner: ReplayStep, same: str) -> str:
    if loser.event.origin_server_ts < winner.event.origin_server_ts:
        return f"{same}, and {winner.event.event_id} is later by its claimed time"
    if loser.event.origin_server_ts > winner.event.origin_server_ts:
        return BY_CHAIN
    return f"{same} and have the same time, and {winner.event.event_id} has the larger id"


def _level(level: float) -> str:
    return "of a creator" if level == inf else str(level)


def _age(new: Position, old: Position) -> str:
    return f"{_power_levels_ago(new)} against {_power_levels_ago(old)}"


def _power_levels_ago(position: Position) -> str:
    if position == inf:
        return "none in the chain"
    return "the newest" if position == 0 else f"{position:.0f} before the newest"
