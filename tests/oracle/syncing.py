"""/sync as the oracle answers it, and a client that believes only the answers.

Positions are arrivals (the oracle's stream ordering); `since=0` with `initial=True` is a first
sync. Only behaviour that the specification leaves no choice in is modelled. A room without news is
left out.

Filters: limits count only the events that the filter leaves. Removed keys are returned under any
filter. Lazily loaded members: of the users who matter to a timeline or a summary, the client is
taken to know nothing, and itself once it has the room. Of the others, a client that knows nothing
gets nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from storage import SyncFilter
from storage.ids import EventId, RoomId
from tests.oracle.memberships import is_out, last_change, own_member_event, peeked
from tests.oracle.oracle import Oracle
from tests.oracle.room_graph import OracleEvent, State

Summary = tuple[
    int, int, tuple[str, ...] | None
]  # joined, invited, heroes; None: the room has a name
NAMES = {("m.room.name", ""): "name", ("m.room.canonical_alias", ""): "alias"}
HEROES = 5
ANY_ROOM = SyncFilter()
ACTIVE = ("join", "invite", "knock")


@dataclass(frozen=True)
class RoomAnswer:
    """One joined or left room.

    `state` leads from `since` to the start of the timeline, `state_after` (with `removed`) to its
    end.
    """

    timeline: list[EventId]
    limited: bool
    state: State
    state_after: State
    removed: set[tuple[str, str]]
    summary: Summary | None = None


@dataclass(frozen=True)
class Answer:
    next_batch: Any  # of the oracle: an arrival
    join: dict[RoomId, RoomAnswer] = field(default_factory=dict)
    leave: dict[RoomId, RoomAnswer] = field(default_factory=dict)
    invite: set[RoomId] = field(default_factory=set)
    knock: set[RoomId] = field(default_factory=set)


@dataclass(frozen=True)
class OracleSyncRequest:
    user_id: str
    since: int | None
    limit: int
    wanted: SyncFilter
    ignored: Collection[str] = ()


def sync(
    oracle: Oracle,
    user_id: str,
    since: int | None,
    *,
    limit: int = 10,
    wanted: SyncFilter = ANY_ROOM,
    ignored: Collection[str] = (),
) -> Answer:
    """Return the sync of a user who has everything up to `since` (None: nothing).

    The own membership is new if another event (or none) sets it than at `since`. By resolution
    this may be an old event. Invites and timeline events of an `ignored` user are left out, except
    state.
    """
    asked = OracleSyncRequest(user_id, since, limit, wanted, ignored)
    answer = Answer(max((held.arrival for held in oracle.held.values()), default=0))
    for room_id in oracle.versions:
        if room_id in wanted.not_rooms or (
            wanted.rooms is not None and room_id not in wanted.rooms
        ):
            continue
        then = None if since is None else own_member_event(oracle, room_id, user_id, since)
        now = own_member_event(oracle, room_id, user_id, answer.next_batch)
        membership = None if now is None else now.event.content.get("membership")
        if membership == "join":
            _joined(oracle, answer, room_id, asked)
        elif now is then:
            continue
        elif membership == "invite":
            if now is not None and not oracle.is_ignored(now.event.sender, ignored):
                answer.invite.add(room_id)
        elif membership == "knock":
            answer.knock.add(room_id)
        else:
            _add_left(oracle, answer, room_id, asked, now)
    return answer


def _add_left(
    oracle: Oracle,
    answer: Answer,
    room_id: RoomId,
    asked: OracleSyncRequest,
    now: OracleEvent | None,
) -> None:
    """Add a room that the user is not in, nor invited to."""
    since, upto = asked.since, answer.next_batch
    if oracle.has_forgotten(room_id, asked.user_id):
        if since is not None and _had(oracle, room_id, asked.user_id, since):
            answer.leave[room_id] = _forgotten(oracle, room_id, asked, since, upto)
    elif since is not None:
        if now is not None and not now.outlier and now.arrival > since:
            upto = now.arrival
        answer.leave[room_id] = _left(oracle, room_id, asked, since, upto)
    elif asked.wanted.include_leave and now is not None and is_out(now):
        answer.leave[room_id] = _left_before(oracle, room_id, asked, upto)


def _had(oracle: Oracle, room_id: RoomId, user_id: str, since: int) -> bool:
    """Whether a client has the room: before it changed, the user was in it, or invited.

    An invite that ended outside the state counts.
    """
    before = oracle.current_state_at(room_id, since).get(("m.room.member", user_id))
    states = [
        state
        for arrival, room, state in oracle.current_states
        if room == room_id and arrival > since
    ]
    if all(state.get(("m.room.member", user_id)) == before for state in states):
        return True
    then = oracle.current_state_at(room_id, since)
    return oracle.membership_in(then, user_id) in ACTIVE


def _forgotten(
    oracle: Oracle, room_id: RoomId, asked: OracleSyncRequest, since: int, upto: int
) -> RoomAnswer:
    """Return the leave of a room that was forgotten since then, and no other state."""
    told = _room(oracle, room_id, asked, since, upto, is_new=False, lacks_own=True)
    return _only(told, ("m.room.member", asked.user_id))


def remember(oracle: Oracle, before: int) -> None:
    """End what was forgotten, where a user was in the room or invited after this arrival."""
    now = max((held.arrival for held in oracle.held.values()), default=0)
    for room_id, user_id in list(oracle.forgotten):
        found = [
            own_member_event(oracle, room_id, user_id, at) for at in range(before + 1, now + 1)
        ]
        if any(one is not None and one.event.content.get("membership") in ACTIVE for one in found):
            oracle.forgotten.discard((room_id, user_id))


def _left_before(
    oracle: Oracle, room_id: RoomId, asked: OracleSyncRequest, upto: int
) -> RoomAnswer:
    """Return a room that was left before a first sync: as of the end of the last stay."""
    stays = [
        (arrival, oracle.membership_in(state, asked.user_id) == "join")
        for arrival, room, state in oracle.current_states
        if room == room_id
    ]
    ends = [arrival for (_, was_in), (arrival, is_in) in pairwise(stays) if was_in and not is_in]
    if ends:
        return _room(oracle, room_id, asked, 0, ends[-1], is_new=True)
    if (end := last_change(oracle, room_id, asked.user_id, upto)) is not None:
        upto = end
    told = _room(oracle, room_id, asked, 0, upto, is_new=True)
    if peeked(oracle, room_id, asked.user_id, upto):
        return told
    return _only(told, ("m.room.member", asked.user_id))


def _left(
    oracle: Oracle, room_id: RoomId, asked: OracleSyncRequest, since: int, upto: int
) -> RoomAnswer:
    """Return a room that was joined since then from its beginning.

    It is limited, because the client may have the timeline of an earlier stay.
    """
    if oracle.membership_in(oracle.current_state_at(room_id, since), asked.user_id) == "join":
        return _room(oracle, room_id, asked, since, upto, is_new=False)
    later = [
        state
        for arrival, room, state in oracle.current_states
        if room == room_id and arrival > since
    ]
    if any(oracle.membership_in(state, asked.user_id) == "join" for state in later) or peeked(
        oracle, room_id, asked.user_id, upto
    ):
        return replace(_room(oracle, room_id, asked, 0, upto, is_new=True), limited=True)
    told = _room(oracle, room_id, asked, since, upto, is_new=False, lacks_own=True)
    return _only(told, ("m.room.member", asked.user_id))


def _only(told: RoomAnswer, key: tuple[str, str]) -> RoomAnswer:
    """Return only the own member event: the user never was in the room.

    They declined an invitation, or the room refused them. They get no other state.
    """
    state, state_after = (
        {one: event_id for one, event_id in state.items() if one == key}
        for state in (told.state, told.state_after)
    )
    return RoomAnswer(told.timeline, told.limited, state, state_after, told.removed & {key})


def _joined(oracle: Oracle, answer: Answer, room_id: RoomId, asked: OracleSyncRequest) -> None:
    """Return a room that was not joined at `since` from its beginning, and in any case."""
    then = {} if asked.since is None else oracle.current_state_at(room_id, asked.since)
    is_new = asked.since is None or oracle.membership_in(then, asked.user_id) != "join"
    start = 0 if is_new else asked.since or 0
    if not is_new and not _happened(oracle, room_id, start):
        return  # what backfilled history changed is told with the next live event
    summary = None
    if is_new or _summary_changed(oracle, room_id, start):
        summary = _summary(oracle, room_id, asked.user_id)
    heroes = () if summary is None else summary[2] or ()
    told = _room(oracle, room_id, asked, start, answer.next_batch, is_new=is_new, heroes=heroes)
    told = replace(told, summary=summary)
    parts = (told.timeline, told.limited, told.state, told.state_after, told.removed, told.summary)
    if is_new or any(parts):
        answer.join[room_id] = told


def _happened(oracle: Oracle, room_id: RoomId, since: int) -> bool:
    """Whether anything came in the timeline since then."""
    return any(
        held.origin == "live" and held.arrival > since for held in oracle.timeline(room_id).values()
    )


def _room(
    oracle: Oracle,
    room_id: RoomId,
    asked: OracleSyncRequest,
    since: int,
    upto: int,
    *,
    is_new: bool,
    lacks_own: bool = False,
    heroes: Collection[str] = (),
) -> RoomAnswer:
    live = [
        event_id
        for event_id, held in oracle.timeline(room_id).items()
        if held.origin == "live" and since < held.arrival <= upto
    ]
    visible = oracle.visible_to_user(asked.user_id, live)
    gaps = [place for place, event_id in enumerate(live) if _after_gap(oracle, event_id)]
    timeline = [event_id for event_id in live[gaps[-1] if gaps else 0 :] if event_id in visible]
    timeline = [event_id for event_id in timeline if oracle.passes(event_id, asked.wanted.timeline)]
    timeline = [
        event_id
        for event_id in timeline
        if oracle.get(event_id).event.is_state
        or oracle.get(event_id).event.sender not in asked.ignored
    ]
    told = timeline[len(timeline) - asked.limit :] if len(timeline) > asked.limit else timeline
    then, now = oracle.current_state_at(room_id, since), oracle.current_state_at(room_id, upto)
    at_start = _state_before(oracle, told[0]) if told else now
    outdated = [
        place for place, event_id in enumerate(told) if is_outdated(oracle, told, event_id, now)
    ]
    # members of what is cut off come too: they are read with the state that says where to cut
    mattering = _who_matters(oracle, told) - {asked.user_id} | set(heroes)
    told = told[outdated[-1] + 1 if outdated else 0 :]
    shown = {held.event.key for held in map(oracle.get, told) if held.event.is_state}
    at_start = {
        **{key: one for key, one in at_start.items() if key in shown},
        **{key: one for key, one in now.items() if key not in shown},
    }
    if is_new or lacks_own or asked.wanted.include_redundant_members:
        mattering.add(asked.user_id)
    client = _Knowing(oracle, then, asked.wanted, mattering, is_new=is_new)
    return RoomAnswer(
        timeline=told,
        limited=bool(gaps) or len(timeline) > len(told),
        state=client.new_in(at_start),
        state_after=client.new_in(now),
        removed=set(then) - set(now),
    )


def is_outdated(oracle: Oracle, told: list[EventId], event_id: EventId, now: State) -> bool:
    """Whether its key has a later value that the timeline does not have."""
    held = oracle.get(event_id)
    last = now.get(held.event.key) if held.event.is_state else None
    return last is not None and last not in told and oracle.get(last).arrival > held.arrival


@dataclass(frozen=True)
class _Knowing:
    """A client that knows the state `then`, and the users that its timeline mentions.

    Of a room that is new to it the client knows no state.
    """

    oracle: Oracle
    then: State
    wanted: SyncFilter
    mattering: set[str]
    is_new: bool

    def new_in(self, state: State) -> State:
        return {key: event_id for key, event_id in state.items() if self._is_told(key, event_id)}

    def _is_told(self, key: tuple[str, str], event_id: EventId) -> bool:
        if not self.oracle.passes(event_id, self.wanted.state):
            return False
        if self.wanted.lazy_load_members and key[0] == "m.room.member":
            if key[1] in self.mattering:
                return True
            if self.is_new:
                return False
        return self.then.get(key) != event_id


def _who_matters(oracle: Oracle, timeline: list[EventId]) -> set[str]:
    """Return the senders of a timeline, and the targets of its memberships."""
    events = [oracle.get(event_id).event for event_id in timeline]
    members = {
        event.state_key
        for event in events
        if event.type == "m.room.member" and event.state_key is not None
    }
    return {*(event.sender for event in events), *members}


def _summary_changed(oracle: Oracle, room_id: RoomId, since: int) -> bool:
    """Whether a member, the name or the alias ever changed since then, back again or not."""
    states = [oracle.current_state_at(room_id, since)]
    states += [
        state
        for arrival, room, state in oracle.current_states
        if room == room_id and arrival > since
    ]
    told = [
        {
            key: event_id
            for key, event_id in state.items()
            if key[0] == "m.room.member" or key in NAMES
        }
        for state in states
    ]
    return any(one != other for one, other in pairwise(told))


def _summary(oracle: Oracle, room_id: RoomId, user_id: str) -> Summary:
    """As of now.

    Client-server API, "Room summary": the first members besides the user, in the order in which
    their events came.
    """
    state = oracle.current_state(room_id)
    members = {
        user: oracle.membership_in(state, user) for kind, user in state if kind == "m.room.member"
    }
    counts = [
        sum(membership == wanted for membership in members.values())
        for wanted in ("join", "invite")
    ]
    if any(_says(oracle, state.get(key), word) for key, word in NAMES.items()):
        return counts[0], counts[1], None
    for wanted in (("join", "invite"), ("leave", "ban")):
        users = [
            user for user, membership in members.items() if membership in wanted and user != user_id
        ]
        if users:
            return (
                counts[0],
                counts[1],
                tuple(
                    sorted(users, key=lambda user: _came(oracle, state["m.room.member", user]))[
                        :HEROES
                    ]
                ),
            )
    return counts[0], counts[1], ()


def _came(oracle: Oracle, event_id: EventId) -> tuple[int, str]:
    """When it came in the timeline; what never did comes first, by user."""
    held = oracle.get(event_id)
    return (0, held.event.state_key or "") if held.outlier else (held.arrival, "")


def _says(oracle: Oracle, event_id: EventId | None, word: str) -> bool:
    """Whether the event, as it is served, says something under this word."""
    if event_id is None or oracle.redacted_by(event_id) is not None:
        return False
    said = oracle.get(event_id).event.content.get(word)
    return isinstance(said, str) and said != ""


def _state_before(oracle: Oracle, event_id: EventId) -> State:
    """Return the room's state without the changes that an event makes itself.

    Other changes on its arrival are older, as after a gap.
    """
    event = oracle.get(event_id)
    room_id, key = event.event.room_id, event.event.key if event.event.is_state else None
    then, now = (
        oracle.current_state_at(room_id, event.arrival - 1),
        oracle.current_state_at(room_id, event.arrival),
    )
    if key is None or now.get(key) != event_id or then.get(key) == event_id:
        return now
    replaced = (oracle.state_before(event_id) if _after_gap(oracle, event_id) else then).get(key)
    return {
        **{one: value for one, value in now.items() if one != key},
        **({} if replaced is None else {key: replaced}),
    }


def _after_gap(oracle: Oracle, event_id: EventId) -> bool:
    """Whether a parent was not there when the event came."""
    own = oracle.get(event_id)
    held = (oracle.timeline(own.event.room_id).get(parent) for parent in own.event.prev_event_ids)
    return any(parent is None or parent.came > own.came for parent in held)


class OracleClient:
    """Keeps the state and the timeline of the joined rooms by what sync says, and nothing else."""

    def __init__(self, user_id: str) -> None:
        self.user_id = user_id
        self.since: Any | None = None
        self.states: dict[RoomId, State] = {}
        self.timelines: dict[RoomId, list[EventId]] = {}

    def hear(self, answer: Answer) -> None:
        """Apply one answer. Raise AssertionError if an event is returned twice."""
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


def plain_answer(answer: Answer) -> dict[str, Any]:
    """Return a response as dicts, to be compared."""
    rooms = [*answer.join.items(), *answer.leave.items()]
    return {
        "rooms": {room_id: vars(told) for room_id, told in rooms},
        "joined": set(answer.join),
        "left": set(answer.leave),
        "invited": answer.invite,
        "knocked": answer.knock,
    }
