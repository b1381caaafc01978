"""The sentences of a replayed resolution: which branch it preferred, and why for each key.

The reason is the check that decided a key: a refusal, or the order of two checks that both passed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from storage.auth.resolution import Replay, ReplayStep
from storage.auth.resolution.mainline import Position
from storage.ids import EventId, StateKey
from storage.queries.inspect.resolution import ReplayedResolution

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


def verdict(found: ReplayedResolution) -> Verdict:
    if found.missing:
        return Verdict(_unknown(found), {}, ())
    if found.replay is None:
        return Verdict(_agreed(found), dict.fromkeys(found.tips, 0), ())
    keys = [_reason(found, found.replay, key) for key in sorted(found.resolved)]
    won = {tip: sum(one.values.get(tip) == one.resolved for one in keys) for tip in found.tips}
    headlines = [one.headline for one in keys] if len(keys) <= HEADLINES_MAX else []
    return Verdict(" ".join([_summary(won, len(keys)), *headlines]), won, keys)


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
    best = [str(number) for number, count in enumerate(won.values(), 1) if count == most]
    total = f"{keys} conflicted {'key' if keys == 1 else 'keys'}"
    if len(best) > 1:
        return f"The merge preferred no branch: {' and '.join(best)} each won {most} of {total}."
    return f"The merge preferred branch {best[0]}: it won {most} of {total}."


def _reason(found: ReplayedResolution, replay: Replay, key: StateKey) -> KeyReason:
    values = {tip: found.states[tip].get(key) for tip in found.tips}
    resolved = found.resolved[key]
    why = _why(replay, key, values, resolved)
    return KeyReason(key, values, resolved, found.stored.get(key, resolved), *why)


def _why(
    replay: Replay, key: StateKey, values: Mapping[EventId, EventId | None], value: EventId | None
) -> Why:
    steps = {step.event.event_id: step for step in replay.steps if step.event.key == key}
    others = [steps[one] for one in dict.fromkeys(values.values()) if one in steps and one != value]
    others += [one for one in steps.values() if one.event.event_id != value and one not in others]
    refusals = [_refusal(step) for step in others if step.refused is not None]
    winner = None if value is None else steps.get(value)
    if value is None:
        return _alone(refusals, "No event that sets it was allowed, so the key has no value.")
    if winner is None:
        return _unchecked(value, refusals, is_alone=len(replay.conflicted.get(key, ())) < 2)
    passed = [step for step in others if step.refused is None]
    if passed:
        why = _order(passed[-1], winner)
        return Why(why.short, " ".join([why.whole, *(one.whole for one in refusals)]))
    return _alone(refusals, f"{value} is the only value, and its check allowed it.")


def _alone(refusals: Sequence[Why], otherwise: str) -> Why:
    """Return the refusals that left a key to its value, or the reason where there are none."""
    if not refusals:
        return Why(otherwise, otherwise)
    return Why(refusals[0].short, " ".join(one.whole for one in refusals))


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
        said = f"Only one branch has it, so {value} stays: room version 1 sees no conflict."
    else:
        said = f"{value} has the lowest depth, and the others were not allowed."
    return Why(said, " ".join([said, *(one.whole for one in refusals)]))


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
    said = f"{same}, and {won} has the later claimed time"
    if apart <= DAY_MS:
        return Why(f"{short}, later claimed time", said)
    days = f"{apart // DAY_MS} {'day' if apart < 2 * DAY_MS else 'days'}"
    return Why(
        f"{short}, later claimed time by {days}",
        f"{said} (by {days}: a sender sets it, so a clock may be wrong)",
    )


def _level(level: float) -> str:
    return "of a creator" if level == inf else str(level)


def _age(new: Position, old: Position) -> str:
    return f"{_power_levels_ago(new)} against {_power_levels_ago(old)}"


def _power_levels_ago(position: Position) -> str:
    if position == inf:
        return "none in the chain"
    return "the newest" if position == 0 else f"{position:.0f} before the newest"
