"""/sync as the oracle would answer it, and a client that believes nothing but what it was sent.

Positions are arrivals (the oracle's stream ordering); `since=0` with `initial=True` is a first sync. Only what rules.md section 8
and the specification leave no choice in is modelled; where a room has nothing new, it is left out.
"""

from dataclasses import dataclass, field
from typing import Any

from storage.ids import EventId, RoomId, server_name_of
from tests.oracle.oracle import Oracle
from tests.oracle.receiver import Held, State


@dataclass(frozen=True)
class RoomAnswer:
    """One joined or left room. `state` leads from `since` to the start of the timeline, `state_after` (with `removed`) to its end."""

    timeline: list[EventId]
    limited: bool
    state: State
    state_after: State
    removed: set[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    next_batch: Any  # of the oracle: an arrival
    join: dict[RoomId, RoomAnswer] = field(default_factory=dict)
    leave: dict[RoomId, RoomAnswer] = field(default_factory=dict)
    invite: set[RoomId] = field(default_factory=set)
    knock: set[RoomId] = field(default_factory=set)


def sync(oracle: Oracle, user_id: str, since: int | None, *, limit: int = 10) -> Answer:
    """What this user is told who has heard everything up to `since` (None: nothing).

    News of the own membership is that another event (or none) says it than at `since`: an old one may, by resolution.
    """
    answer = Answer(max((held.arrival for held in oracle.held.values()), default=0))
    for room_id in oracle.versions:
        then = None if since is None else own_member_event(oracle, room_id, user_id, since)
        now = own_member_event(oracle, room_id, user_id, answer.next_batch)
        membership = None if now is None else now.event.content.get("membership")
        if membership == "join":
            _joined(oracle, answer, room_id, user_id, since, limit)
        elif now is then:
            continue
        elif membership == "invite":
            answer.invite.add(room_id)
        elif membership == "knock":
            answer.knock.add(room_id)
        elif since is not None:
            upto = now.arrival if now is not None and not now.outlier and now.arrival > since else answer.next_batch
            told = _room(oracle, room_id, user_id, since, upto, limit)
            answer.leave[room_id] = told if _was_in(oracle, room_id, user_id, since) else _only(told, ("m.room.member", user_id))
    return answer


def _was_in(oracle: Oracle, room_id: RoomId, user_id: str, since: int) -> bool:
    """At `since` or at any time after it."""
    later = [state for arrival, room, state in oracle.current_states if room == room_id and arrival > since]
    return any(oracle.membership_in(state, user_id) == "join" for state in (oracle.current_state_at(room_id, since), *later))


def _only(told: RoomAnswer, key: tuple[str, str]) -> RoomAnswer:
    """Who was invited and declined, or was refused, never was in the room: its state is none of their business."""
    state, state_after = ({one: event_id for one, event_id in state.items() if one == key} for state in (told.state, told.state_after))
    return RoomAnswer(told.timeline, told.limited, state, state_after, told.removed & {key})


def own_member_event(oracle: Oracle, room_id: RoomId, user_id: str, at: int) -> Held | None:
    """In the current state then; or what came later as an outlier while the server was not in the room: an invite or knock, or its end."""
    key = ("m.room.member", user_id)
    own = [
        held
        for held in oracle.held.values()
        if held.event.room_id == room_id and held.event.is_state and held.event.key == key and not held.rejected
        if held.outlier and held.event.content.get("membership") != "join"  # nobody is in a room of which there is history only
        if held.arrival <= at and not _server_is_in(oracle, room_id, server_name_of(user_id), held.arrival)
    ]
    changed, value = 0, None
    for arrival, room, state in oracle.current_states:
        if room == room_id and arrival <= at and state.get(key) != value:
            changed, value = arrival, state.get(key)
    if own and own[-1].arrival > changed:
        return own[-1]
    return None if value is None else oracle.get(value)


def _server_is_in(oracle: Oracle, room_id: RoomId, server_name: str, at: int) -> bool:
    state = oracle.current_state_at(room_id, at)
    members = [user for type_, user in state if type_ == "m.room.member" and server_name_of(user) == server_name]
    return any(oracle.membership_in(state, user) == "join" for user in members)


def _joined(oracle: Oracle, answer: Answer, room_id: RoomId, user_id: str, since: int | None, limit: int) -> None:
    """A room that was not joined at `since` is told from its beginning."""
    then = {} if since is None else oracle.current_state_at(room_id, since)
    start = since if since is not None and oracle.membership_in(then, user_id) == "join" else 0
    told = _room(oracle, room_id, user_id, start, answer.next_batch, limit)
    if since is None or told.timeline or told.state_after or told.removed:
        answer.join[room_id] = told


def _room(oracle: Oracle, room_id: RoomId, user_id: str, since: int, upto: int, limit: int) -> RoomAnswer:
    live = [event_id for event_id, held in oracle.timeline(room_id).items() if held.origin == "live" and since < held.arrival <= upto]
    visible = oracle.visible_to_user(user_id, live)
    gaps = [place for place, event_id in enumerate(live) if _after_gap(oracle, event_id)]
    timeline = [event_id for event_id in live[gaps[-1] if gaps else 0 :] if event_id in visible]
    told = timeline[len(timeline) - limit :] if len(timeline) > limit else timeline
    then, now = oracle.current_state_at(room_id, since), oracle.current_state_at(room_id, upto)
    at_start = oracle.current_state_at(room_id, oracle.get(told[0]).arrival - 1) if told else now
    return RoomAnswer(
        timeline=told,
        limited=bool(gaps) or len(timeline) > limit,
        state={key: event_id for key, event_id in at_start.items() if then.get(key) != event_id},
        state_after={key: event_id for key, event_id in now.items() if then.get(key) != event_id},
        removed=set(then) - set(now),
    )


def _after_gap(oracle: Oracle, event_id: EventId) -> bool:
    """Whether a parent was not there when the event arrived."""
    own = oracle.get(event_id)
    held = (oracle.timeline(own.event.room_id).get(parent) for parent in own.event.prev_event_ids)
    return any(parent is None or parent.arrival > own.arrival for parent in held)


class Client:
    """Keeps the state and the timeline of the joined rooms by what sync says, and nothing else."""

    def __init__(self, user_id: str) -> None:
        self.user_id = user_id
        self.since: Any | None = None
        self.states: dict[RoomId, State] = {}
        self.timelines: dict[RoomId, list[EventId]] = {}

    def hear(self, answer: Answer) -> None:
        """Apply one answer. AssertionError if an event is told twice."""
        for room_id, told in answer.join.items():
            state = self.states.setdefault(room_id, {})
            state.update(told.state_after)
            for key in told.removed:
                state.pop(key, None)
            timeline = self.timelines.setdefault(room_id, [])
            assert not set(timeline) & set(told.timeline), "told twice"
            timeline.extend(told.timeline)
        for room_id in {*answer.leave, *answer.invite, *answer.knock}:
            self.states.pop(room_id, None)
            self.timelines.pop(room_id, None)
        self.since = answer.next_batch
