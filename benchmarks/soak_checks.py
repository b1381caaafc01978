"""What the soak (benchmarks/soak.py) checks: its clients, the answers of its stores, its operator.

A client has the data of its syncs alone. It is compared with a new initial sync.

The store that was open all the time answers from warm caches. A new one on the same database has
none. A third one has imported an export. All give the same answers about each room.

The operator does one thing to one room or user at a time, as a command does. Rooms are purged,
collected, verified and archived. Users are forgotten, and redacted events are censored.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import storage
from benchmarks.soak_processes import SERVER
from storage import EventId, RoomId, StateKey, Store, StoredEvent, UserId
from storage.config import Config
from storage.database import Database
from storage.database.migrate import migrate
from storage.event import content_hash
from storage.maintenance.censor import censor, remove_content
from storage.maintenance.cold_archive import archive_events
from storage.maintenance.purge import purge_history
from storage.maintenance.state_group_gc import collect
from storage.maintenance.verify import verify
from tests.failover import ask
from tests.postgres import with_database


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


# ------------------------------------------------------------------------------------------------
# answers of stores

Answers = dict[str, Any]
IMPORTED: Final = "imported"
SAMPLE: Final = 10
"""Events of a room of which the states and the servers are compared."""
PAGE: Final = 500
ANSWERS_CONFIG: Final = Config(pool_size_max=4, instance_name="answers")


async def answers(
    store: Store, room_id: RoomId, users: Sequence[UserId], sample: Sequence[EventId]
) -> Answers:
    """Return what a store answers about a room, without positions and ages."""
    found: Answers = {
        "current state": await store.current_state(room_id),
        "forward extremities": sorted(await store.forward_extremities(room_id)),
        "backward extremities": sorted(await store.backward_extremities(room_id)),
        "servers": sorted(await store.joined_servers(room_id)),
        "members": sorted(await store.member_ids(room_id)),
    }
    for event_id in sample:
        found[f"state before {event_id}"] = await store.state_before(event_id)
        found[f"chain of {event_id}"] = sorted(await store.auth_chain_ids([event_id]))
    for server in (SERVER, "s2.test"):
        found[f"visible to {server}"] = sorted(await store.visible_to_server(server, sample))
    for user in users:
        found[f"pages of {user}"] = [event async for event in _walk(store, room_id, user)]
    return found


async def _walk(
    store: Store, room_id: RoomId, user: UserId
) -> AsyncIterator[tuple[EventId, dict[str, Any]]]:
    """Yield a user's history of a room, newest first: each event as a client gets it."""
    place: str | None = None
    while True:
        page = await store.messages(room_id, user, from_=place, limit=PAGE)
        for served in await store.client_events(user, page.chunk):
            yield EventId(served["event_id"]), _ageless(served)
        place = page.end
        if place is None:
            return


def _ageless(value: Any) -> Any:
    """Return a served event without the ages in it, which depend on the time of the request."""
    if isinstance(value, dict):
        return {key: _ageless(one) for key, one in value.items() if key != "age"}
    return [_ageless(one) for one in value] if isinstance(value, list) else value


def answer_differences(name: str, room_id: RoomId, first: Answers, second: Answers) -> list[str]:
    """Return the answers that differ, in one line each."""
    return [
        f"{name}: {room_id}: {what}: {_answers_apart(answer, second[what])}"
        for what, answer in first.items()
        if answer != second[what]
    ]


def _answers_apart(first: Any, second: Any) -> str:
    if isinstance(first, dict):
        first, second = list(first.items()), list(second.items())
    only = [one for one in first if one not in second], [one for one in second if one not in first]
    if not any(only):
        return "another order"
    return f"only warm {only[0][:2]}, only there {only[1][:2]}"


@asynccontextmanager
async def imported(dsn: str, folder: Path, forgotten: Sequence[UserId]) -> AsyncIterator[Store]:
    """Open a store on a new database that has imported an export; it forgets the same users."""
    archive, target = folder / "export.ndjson", with_database(dsn, IMPORTED)
    await ask(dsn, f"CREATE DATABASE {IMPORTED} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'")
    await migrate(target)
    await _command("export", str(archive), "--dsn", dsn)
    await _command("import", str(archive), "--dsn", target, "--server-name", SERVER)
    async with storage.open(target, server_name=SERVER, config=ANSWERS_CONFIG) as store:
        for user in forgotten:
            await store.erase_user(user)
        yield store


async def _command(*arguments: str) -> None:
    """Run `room-storage`; raise RuntimeError with its output unless it ends with 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "storage", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"room-storage {arguments[0]}: {output.decode()[-2_000:]}")


# ------------------------------------------------------------------------------------------------
# the operator

GRACE_S: Final = 1.0
"""The time for which a replaced pack stays readable, in seconds."""

UPKEEP_CONFIG: Final = Config(instance_name="upkeep", statement_timeout_ms=600_000)

SQL_ROOMS: Final = "SELECT room_id FROM rooms ORDER BY room_nid"
SQL_ANY_EVENT: Final = """
SELECT event_id
FROM events
JOIN rooms USING (room_nid)
WHERE room_id = $1 AND NOT outlier AND NOT backfilled
ORDER BY random()
LIMIT 1
"""
SQL_ANY_SENDER: Final = """
SELECT p.name
FROM (SELECT DISTINCT sender_nid FROM events JOIN rooms USING (room_nid) WHERE room_id = $1) AS s
JOIN principals p ON p.principal_nid = s.sender_nid
WHERE p.name <> ALL($2::text[])
ORDER BY random()
LIMIT 1
"""


@dataclass(slots=True)
class Upkeep:
    """The operator. ``kept`` are users who are never forgotten; ``forgotten`` are those who are."""

    dsn: str
    chance: random.Random
    counts: Counter[str]
    folder: Path
    kept: list[str]
    forgotten: set[UserId] = field(default_factory=set)

    async def __call__(self) -> None:
        """Do one thing to a room, as a command does: with connections of its own."""
        async with await Database.open(self.dsn, config=UPKEEP_CONFIG) as database:
            async with database.connection() as conn:
                rooms = await conn.fetchvals(SQL_ROOMS)
            work = (
                *(self.purge, self.collect, self.verify),
                *(self.archive, self.forget_user, self.censor),
            )
            if rooms:
                await self.chance.choice(work)(database, RoomId(self.chance.choice(rooms)))

    async def purge(self, database: Database, room_id: RoomId) -> None:
        """Purge the history before an event."""
        async with database.connection() as conn:
            event_id = await conn.fetchval(SQL_ANY_EVENT, room_id)
        try:
            done = await purge_history(
                database, room_id, server_name=SERVER, before_event_id=event_id
            )
        except storage.InputError as error:
            self.counts[f"purges refused: {type(error).__name__}"] += 1
            return
        self.counts["purges"] += 1
        self.counts["events purged"] += done.events

    async def collect(self, database: Database, room_id: RoomId) -> None:
        """Delete unused state groups."""
        freed = await collect(database, room_id)
        self.counts["state groups freed"] += freed.state_groups

    async def verify(self, database: Database, room_id: RoomId) -> None:
        found = [
            finding async for finding in verify(database, server_name=SERVER, room_ids=[room_id])
        ]
        self.counts["rooms verified meanwhile"] += 1
        self.counts["findings meanwhile"] += len(found)
        for finding in found:
            print("finding:", finding)

    async def archive(self, database: Database, room_id: RoomId) -> None:
        """Archive the events of the room, however new."""
        done = await archive_events(
            database,
            older_than_ms=0,
            url=str(self.folder),
            room_ids=[room_id],
            grace_s=GRACE_S,
        )
        self.counts["events archived"] += done.events

    async def forget_user(self, database: Database, room_id: RoomId) -> None:
        """Erase a user of the room, and sometimes remove their content."""
        async with database.connection() as conn:
            user = await conn.fetchval(SQL_ANY_SENDER, room_id, self.kept)
        if user is None:
            return
        self.forgotten.add(UserId(user))
        done = await remove_content(database, UserId(user))
        self.counts["users forgotten"] += 1
        self.counts["events without content"] += done.removed

    async def censor(self, database: Database, _: RoomId) -> None:
        """Censor all redacted events."""
        done = await censor(database, older_than_ms=0)
        self.counts["events censored"] += done.censored
