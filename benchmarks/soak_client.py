"""A client of the soak (benchmarks/soak.py): what it knows, and how that differs from what the server tells anew."""

from dataclasses import dataclass, field

import storage
from storage import EventId, RoomId, StateKey, Store, UserId


@dataclass(slots=True)
class Client:
    """What a user's client knows: told by syncs, and by nothing else."""

    user_id: UserId
    since: str | None = None
    states: dict[RoomId, dict[StateKey, EventId]] = field(default_factory=dict)
    timelines: dict[RoomId, list[EventId]] = field(default_factory=dict)
    starts: dict[RoomId, str] = field(default_factory=dict)
    messages: list[int] = field(default_factory=list)
    sent: int = 0
    failed: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)

    def hear(self, answer: storage.Sync) -> None:
        """Apply an answer. RuntimeError if an event is told twice."""
        for room_id, told in answer.join.items():
            state = self.states.setdefault(room_id, {})
            state.update({(event.type, event.state_key or ""): event.event_id for event in told.state_after})
            for key in told.state_removed:
                state.pop(key, None)
            if told.timeline.limited:
                self.timelines[room_id] = []
                self.starts[room_id] = told.timeline.prev_batch
            timeline = self.timelines.setdefault(room_id, [])
            new = [event.event_id for event in told.timeline.events]
            if set(timeline) & set(new):
                raise RuntimeError(f"{self.user_id} was told events of {room_id} twice")
            timeline += new
        for room_id in {*answer.leave, *answer.invite, *answer.knock}:
            self.states.pop(room_id, None)
            self.timelines.pop(room_id, None)
            self.starts.pop(room_id, None)
        self.since = answer.next_batch

    def forget(self) -> None:
        """Begin anew (`ResyncNeeded`)."""
        self.since = None
        self.states.clear()
        self.timelines.clear()
        self.starts.clear()


async def differences(store: Store, client: Client) -> list[str]:
    """What the client has otherwise than the server tells anew."""
    fresh = Client(client.user_id)
    fresh.hear(await store.sync(client.user_id, timeline_limit=5_000))
    told = []
    if fresh.states != client.states:
        rooms = {room for room in {*fresh.states, *client.states} if fresh.states.get(room) != client.states.get(room)}
        told += [f"{client.user_id}: state of {room}" for room in rooms]
    for room_id, timeline in fresh.timelines.items():
        held = await store.events(client.timelines.get(room_id, []))
        kept = [event_id for event_id in client.timelines.get(room_id, []) if event_id in held and not held[event_id].outlier]
        count = min(len(kept), len(timeline))
        if count and kept[-count:] != timeline[-count:]:
            told.append(f"{client.user_id}: timeline of {room_id}{_apart(kept[-count:], timeline[-count:])}")
    if client.messages != sorted(set(client.messages)):
        told.append(f"{client.user_id}: messages to the device out of order or twice")
    return told


def _apart(told: list[EventId], now: list[EventId]) -> str:
    """What two lists of events differ in."""
    only_told, only_now = [one for one in told if one not in set(now)], [one for one in now if one not in set(told)]
    if not only_told and not only_now:
        return ": in another order"
    return f": {len(told)} compared; told, and not told anew: {only_told}; told anew only: {only_now}"
