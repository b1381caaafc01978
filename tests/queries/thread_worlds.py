"""Random rooms with threads, forks, redactions and hidden history, and what is true of them.

The truth is computed from the contents of the builder's events, and from three single reads: the
row of an event, who may see it, and the current state. It uses no index and no aggregation.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from storage import Store, StoredEvent
from storage.ids import EventId
from storage.testing import BuiltEvent, RoomBuilder

USERS = ("@user1:s1.test", "@user2:s1.test", "@user3:s1.test", "@user4:s2.test")
LOCALS = USERS[:3]
ADMIN = USERS[0]
DEEDS = (
    *("thread",) * 8,
    *("message",) * 5,
    *("react", "edit", "redact", "redact", "nested", "sticker", "reply to a reply"),
    *("refer",) * 3,
    *("leave", "join", "join", "profile", "fork"),
)


@dataclass(slots=True)
class ThreadWorld:
    """A room that grows, with its branches."""

    rng: random.Random
    branches: list[RoomBuilder]
    messages: list[BuiltEvent] = field(default_factory=list)
    replies: list[BuiltEvent] = field(default_factory=list)
    references: list[BuiltEvent] = field(default_factory=list)

    @property
    def room(self) -> RoomBuilder:
        """Return the first branch, which has the events of all."""
        return self.branches[0]


def new_world(number: int) -> ThreadWorld:
    """Return a room in which a few users are."""
    rng = random.Random(number)
    room = RoomBuilder(rng.choice(("6", "10", "11", "12")), seed=number, sign=False)
    visibility = rng.choice(("shared", "joined", "invited", "world_readable"))
    room.start(ADMIN, history_visibility=visibility)
    for user in USERS[1:]:
        if rng.random() < 0.8:
            room.join(user)
    return ThreadWorld(rng, [room], [room.message(ADMIN)])


def grow(world: ThreadWorld, deeds: int = 8) -> None:
    """Do some deeds, each by a random user on a random branch."""
    for _ in range(deeds):
        branch = world.rng.choice(world.branches)
        user = world.rng.choice(USERS)
        deed = world.rng.choice(DEEDS)
        if deed == "join" or branch.membership(user) == "join":
            _do(world, branch, user, deed)


def _do(world: ThreadWorld, branch: RoomBuilder, user: str, deed: str) -> None:
    if deed in ("leave", "join", "profile"):
        _move(world, branch, user, deed)
    elif deed in ("message", "thread", "sticker"):
        _say(world, branch, user, deed)
    elif deed == "fork":
        forked = len(world.branches) > 1
        world.branches = (
            [world.branches[0].merge(*world.branches[1:])] if forked else list(branch.fork(2))
        )
    else:
        _relate(world, branch, user, deed)


def _say(world: ThreadWorld, branch: RoomBuilder, user: str, deed: str) -> None:
    target = world.rng.choice((*world.messages[-6:], world.messages[0]))
    if deed == "message":
        world.messages.append(branch.message(user, "hello"))
    elif deed == "thread":
        world.replies.append(branch.threaded(user, target, "in the thread"))
    else:
        content = {"m.relates_to": {"rel_type": "m.thread", "event_id": target.event_id}}
        world.replies.append(branch.send(user, "m.sticker", content))


def _relate(world: ThreadWorld, branch: RoomBuilder, user: str, deed: str) -> None:
    target = world.rng.choice((*world.messages[-6:], *world.replies[-6:]))
    own = [one for one in (*world.messages, *world.replies) if one.sender == user]
    if deed == "refer":
        target = world.rng.choice((target, *world.references[-3:], *world.replies[-3:]))
        relation = {"rel_type": "m.reference", "event_id": target.event_id}
        content = {"msgtype": "m.text", "body": "see there", "m.relates_to": relation}
        world.references.append(branch.send(user, "m.room.message", content))
    elif deed == "react":
        branch.react(user, target)
    elif deed == "edit":
        branch.edit(user, target, "better")
    elif deed == "reply to a reply":
        branch.reply(user, target, "rich")
    elif deed == "nested" and world.replies:
        branch.threaded(user, world.rng.choice(world.replies), "in no thread")
    elif deed == "redact" and own:
        branch.redact(user, world.rng.choice(own))


def _move(world: ThreadWorld, branch: RoomBuilder, user: str, deed: str) -> None:
    if deed == "profile":
        branch.join(user, displayname=str(world.rng.random()))
    elif deed == "leave" and user != ADMIN:
        branch.leave(user)
    elif deed == "join" and branch.membership(user) in (None, "leave"):
        branch.join(user)


async def deliver(store: Store, world: ThreadWorld) -> None:
    """Append what is new. Some events of forks are soft-failed."""
    results = await store.append(world.room.pdus, room_version=world.room.version)
    assert {result.outcome for result in results} <= {"stored", "duplicate", "soft_failed"}, results


class SeenRoom(NamedTuple):
    """What a user sees of a room: all rows, the ids that are visible, and the ignored senders."""

    rows: dict[EventId, StoredEvent]
    visible: set[EventId]
    ignored: Collection[str]

    def counts(self, event: BuiltEvent) -> bool:
        """Return whether an event counts: visible, whole, and not by an ignored user."""
        row = self.rows[event.event_id]
        return (
            event.event_id in self.visible
            and row.redacted_by is None
            and (event.sender not in self.ignored or event.state_key is not None)
        )

    def place(self, event: BuiltEvent) -> tuple[int, int]:
        """Return the position of an event in the topological order."""
        row = self.rows[event.event_id]
        return row.topological_ordering or 0, row.stream_ordering or 0


async def seen_by(
    store: Store, world: ThreadWorld, user: str, ignored: Collection[str] = ()
) -> SeenRoom:
    """Return what a user sees."""
    event_ids = [event.event_id for event in world.room.events]
    return SeenRoom(
        await store.events(event_ids), await store.visible_to_user(user, event_ids), ignored
    )


def thread_of(event: BuiltEvent) -> str | None:
    """Return the root that an event names as its thread."""
    relation = event.content.get("m.relates_to") or {}
    return relation.get("event_id") if relation.get("rel_type") == "m.thread" else None


def thread_around(
    world: ThreadWorld, rows: dict[EventId, StoredEvent], event: BuiltEvent
) -> str | None:
    """Return the root of the thread that an event is in: its own, or that of what it relates to.

    Three relations are followed. A redacted event relates to nothing.
    """
    for hops in range(4):
        relation = event.content.get("m.relates_to") or {}
        is_redacted = rows[event.event_id].redacted_by is not None
        if "rel_type" not in relation or (hops > 0 and is_redacted):
            return None
        if relation["rel_type"] == "m.thread":
            return str(relation["event_id"])
        event = world.room.event(relation["event_id"])
    return None


def is_edit(event: BuiltEvent) -> bool:
    """Return whether an event replaces another."""
    return (event.content.get("m.relates_to") or {}).get("rel_type") == "m.replace"


def threads(world: ThreadWorld, seen: SeenRoom, user: str, *, participated: bool) -> list[EventId]:
    """Return the roots of the threads, latest reply first."""
    built = {event.event_id: event for event in world.room.events}
    latest: dict[EventId, tuple[int, int]] = {}
    mine = set[str]()
    for event in built.values():
        root_id = thread_of(event)
        if root_id is None or not seen.counts(event):
            continue
        root = built[EventId(root_id)]
        relates = "rel_type" in (root.content.get("m.relates_to") or {})
        if root_id not in seen.visible or (relates and not seen.rows[root.event_id].redacted_by):
            continue
        latest[root.event_id] = max(latest.get(root.event_id, (0, 0)), seen.place(event))
        if user in (event.sender, root.sender):
            mine.add(root_id)
    wanted = [one for one in latest if not participated or one in mine]
    return sorted(wanted, key=latest.__getitem__, reverse=True)
