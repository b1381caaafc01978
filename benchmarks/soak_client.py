"""A client of the soak (benchmarks/soak.py): its data, and its differences from a new sync."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import storage
from benchmarks.soak_rooms import SERVER
from storage import EventId, RoomId, StateKey, Store, StoredEvent, UserId
from storage.event import content_hash


@dataclass(slots=True)
class SoakClient:
    """The data of a user's client, which come from syncs alone."""

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
        """Apply a sync. Raise RuntimeError if an event comes twice."""
        for room_id, told in answer.join.items():
            state = self.states.setdefault(room_id, {})
            state.update(
                {(event.type, event.state_key or ""): event.event_id for event in told.state_after}
            )
            for key in told.state_removed:
                state.pop(key, None)
            if told.timeline.limited:
                self.timelines[room_id] = []
                self.starts[room_id] = told.timeline.prev_batch
            timeline = self.timelines.setdefault(room_id, [])
            new = [event.event_id for event in told.timeline.events]
            if set(timeline) & set(new):
                raise RuntimeError(f"{self.user_id} received events of {room_id} twice")
            timeline += new
        for room_id in {*answer.leave, *answer.invite, *answer.knock}:
            self.states.pop(room_id, None)
            self.timelines.pop(room_id, None)
            self.starts.pop(room_id, None)
        self.since = answer.next_batch

    def forget(self) -> None:
        """Start again without data (`ResyncNeeded`)."""
        self.since = None
        self.states.clear()
        self.timelines.clear()
        self.starts.clear()


async def differences(store: Store, client: SoakClient) -> list[str]:
    """Return the differences between the client and a new initial sync."""
    fresh = SoakClient(client.user_id)
    fresh.hear(await store.sync(client.user_id, timeline_limit=5_000))
    told = [
        f"{client.user_id}: state of {room_id}: {apart}"
        for room_id in {*fresh.states, *client.states}
        if (apart := _states_apart(client.states.get(room_id, {}), fresh.states.get(room_id, {})))
    ]
    for room_id, timeline in fresh.timelines.items():
        late = await _late_redactions(store, timeline)
        now = [event_id for event_id in timeline if event_id not in late]
        held = await store.events(client.timelines.get(room_id, []))
        kept = [
            one
            for one in client.timelines.get(room_id, [])
            if one in held and not held[one].outlier and one not in late
        ]
        count = min(len(kept), len(now))
        if count and kept[-count:] != now[-count:]:
            told.append(
                f"{client.user_id}: timeline of {room_id}{_apart(kept[-count:], now[-count:])}"
            )
    if client.messages != sorted(set(client.messages)):
        told.append(f"{client.user_id}: messages to the device out of order or twice")
    return told


async def say(store: Store, room_id: RoomId, user_id: UserId) -> bool:
    """Append a message to a room; return whether it was stored.

    Clients receive state changes by backfilled history with the next event.
    """
    state = await store.current_state(room_id)
    tips = await store.events(await store.forward_extremities(room_id))
    version = next(iter(tips.values())).room_version
    keys = [("m.room.power_levels", ""), ("m.room.member", user_id)]
    if version != "12":  # in version 12 the room id stands for the create event
        keys.append(("m.room.create", ""))
    pdu: dict[str, Any] = {
        "type": "m.room.message",
        "room_id": room_id,
        "sender": user_id,
        "content": {"body": "the end", "msgtype": "m.text"},
        "origin_server_ts": time.time_ns() // 1_000_000,
        "depth": max(tip.depth for tip in tips.values()) + 1,
        "prev_events": _references(version, tips),
        "auth_events": _references(version, [state[key] for key in keys if key in state]),
        **({"event_id": f"$end-{time.time_ns()}:{SERVER}"} if version in {"1", "2"} else {}),
    }
    pdu["hashes"] = {"sha256": content_hash(pdu)}
    [result] = await store.append([pdu | {"signatures": {}}])
    return result.outcome == "stored"


def _references(version: str, event_ids: Iterable[str]) -> list[Any]:
    return [[event_id, {}] for event_id in event_ids] if version in {"1", "2"} else list(event_ids)


async def _late_redactions(store: Store, event_ids: list[EventId]) -> set[EventId]:
    """Return the redactions whose target came after them.

    They took effect then: the client received the target redacted.
    """
    events = await store.events(event_ids)
    targets = {
        one.event_id: target_of(one) for one in events.values() if one.type == "m.room.redaction"
    }
    held = await store.events([target for target in targets.values() if target is not None])
    return {
        one
        for one, target in targets.items()
        if target in held and _position(held[target]) > _position(events[one])
    }


def target_of(redaction: StoredEvent) -> EventId | None:
    """Return the event that a redaction names. Room version 11 moved its id into the content."""
    named = redaction.json.get("redacts", redaction.content.get("redacts"))
    return EventId(named) if isinstance(named, str) else None


def _position(event: StoredEvent) -> int:
    return event.stream_ordering or 0


def _states_apart(told: dict[StateKey, EventId], now: dict[StateKey, EventId]) -> str:
    keys = sorted(key for key in {*told, *now} if told.get(key) != now.get(key))
    return "; ".join(f"{key} {told.get(key)} told, {now.get(key)} now" for key in keys[:3])


def _apart(told: list[EventId], now: list[EventId]) -> str:
    """Describe the difference of two lists of events."""
    only_told, only_now = (
        [one for one in told if one not in set(now)],
        [one for one in now if one not in set(told)],
    )
    if not only_told and not only_now:
        return ": in another order"
    return f": {len(told)} compared; only by syncs: {only_told}; only by a new sync: {only_now}"
