"""Random rooms for joins with the members omitted, and what happens in them afterwards.

A `PartialWorld` has a built room, and two stores of the same server: one has joined with the whole
answer of send_join, the other with the members omitted. Both receive the same transactions.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from storage import AuthDenied, EventId, PartialState, ServerName, Store, UserId
from storage.federation import Receiver
from storage.persist.partial_marks import begin
from storage.testing import BuiltEvent, RoomBuilder
from tests.federation.built_remote import BuiltRemote, adopt
from tests.federation.partial import omitted
from tests.federation.peers import QUICK

Json = dict[str, Any]
SERVER: Final = "here.test"
USER: Final = UserId(f"@dora:{SERVER}")
OTHERS: Final = ("s1.test", "s2.test", "s3.test")
READERS: Final = (USER, UserId(f"@finn:{SERVER}"), UserId(f"@early:{SERVER}"))
VERSIONS: Final = ("12", "11", "10", "8", "6", "4", "3", "2", "1")


@dataclass
class Replica:
    """A store of the server, with its receiver."""

    store: Store
    receiver: Receiver

    @classmethod
    def of(cls, store: Store, remote: BuiltRemote) -> "Replica":
        return cls(store, Receiver(store, remote, limits=QUICK))


@dataclass
class PartialWorld:
    """The room, and the events that no store has received yet."""

    seed: int
    server: str = SERVER
    others: tuple[str, ...] = OTHERS
    room: RoomBuilder = field(init=False)
    remote: BuiltRemote = field(init=False)
    branches: list[RoomBuilder] = field(init=False)
    waiting: list[BuiltEvent] = field(default_factory=list)
    hostile: set[EventId] = field(default_factory=set)
    sent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        version = VERSIONS[self.seed % len(VERSIONS)]
        self.room = RoomBuilder(version, servers=self.others, seed=self.seed)
        self.remote = BuiltRemote(self.room)
        self.admin = self.room.user(1, self.others[0])
        self.room.start(
            self.admin,
            history_visibility=self.random.choice(
                ["shared", "joined", "invited", "world_readable"]
            ),
        )
        self.users = [self.room.user(number) for number in range(2, self.random.randint(5, 12))]
        self.branches = [self.room]
        for user in self.users:
            self.room.join(user)
        for _ in range(self.random.randint(0, 25)):
            self.act()
        self.heal()
        self.before_join = list(self.room.events)
        self.waiting.clear()

    @property
    def user(self) -> UserId:
        """The local user of a script."""
        return UserId(f"@dora:{self.server}")

    # ---------------------------------------------------------------------------------------------
    # the room

    def act(self) -> None:
        """Let a user of another server do something on a branch, if the rules allow it."""
        actions: list[tuple[Callable[[RoomBuilder], BuiltEvent | None], int]] = [
            (self.speak, 8),
            (self.come_or_go, 4),
            (self.moderate, 3),
            (self.configure, 2),
            (self.redact, 1),
            (self.lie, 1),
        ]
        branch = self.random.choice(self.branches)
        action = self.random.choices([one for one, _ in actions], [one for _, one in actions])[0]
        try:
            event = action(branch)
        except ValueError:  # the builder's check: the rules do not allow it
            return
        if event is not None:
            self.waiting.append(event)
        if self.random.random() < 0.12 and len(self.branches) < 3:
            self.fork()
        elif self.random.random() < 0.1:
            self.heal()

    def fork(self) -> None:
        """Begin a branch at the heads, or at an event of the past."""
        if self.random.random() < 0.6:
            self.branches.append(self.random.choice(self.branches).fork(1)[0])
        else:
            past = [one for one in self.room.events[-25:] if one.expected is None]
            self.branches.append(self.room.at(self.random.choice(past)))

    def heal(self) -> None:
        """Let the next event have the heads of all branches as parents."""
        self.room.merge(*self.branches[1:])
        self.branches = [self.room]

    def speak(self, branch: RoomBuilder) -> BuiltEvent:
        who = self.random.choice([self.admin, *self.users])
        return branch.message(who, str(self.random.random()))

    def come_or_go(self, branch: RoomBuilder) -> BuiltEvent:
        who = self.random.choice(self.users)
        if branch.membership(who) == "join" and self.random.random() < 0.5:
            return branch.leave(who)
        return branch.join(who, displayname=f"{who[1:3]}{self.random.randint(0, 99)}")

    def moderate(self, branch: RoomBuilder) -> BuiltEvent:
        who, target = self.admin, self.random.choice(self.users)
        if self.random.random() < 0.3:
            who = self.random.choice(self.users)
        act = self.random.choice([branch.kick, branch.ban, branch.unban, branch.invite])
        return act(who, target)

    def configure(self, branch: RoomBuilder) -> BuiltEvent:
        kind = self.random.randrange(4)
        if kind == 0:
            user = self.random.choice(self.users)
            level = self.random.choice([0, 50, 60])
            return branch.power_levels(self.admin, users={user: level})
        if kind == 1:
            values = ["shared", "joined", "invited", "world_readable"]
            return branch.history_visibility(self.admin, self.random.choice(values))
        if kind == 2:
            rule = self.random.choice(["public", "public", "invite"])
            return branch.join_rules(self.admin, rule)
        return branch.name(self.admin, str(self.random.random()))

    def redact(self, branch: RoomBuilder) -> BuiltEvent | None:
        texts = [one for one in self.room.events if one.type == "m.room.message"]
        if not texts:
            return None
        return branch.redact(self.admin, self.random.choice(texts))

    def lie(self, branch: RoomBuilder) -> BuiltEvent | None:
        """Send a message of a user who is out, citing the membership from when they were in."""
        joins = [
            one
            for one in self.room.events
            if one.type == "m.room.member"
            and one.content["membership"] == "join"
            and one.sender in self.users
            and branch.membership(one.sender) in ("leave", "ban")
        ]
        if not joins:
            return None
        join = self.random.choice(joins)
        auth = [one for one in (branch.state.get(("m.room.power_levels", "")),) if one]
        if branch.version != "12":
            auth.append(branch.state["m.room.create", ""])
        event = branch.message(join.sender, "I am out", auth=[*auth, join], expected="rejected")
        self.hostile.add(event.event_id)
        return event

    # ---------------------------------------------------------------------------------------------
    # the stores

    def joins(self, user: str) -> BuiltEvent:
        """Let a local user join at the heads of all branches."""
        self.heal()
        try:
            return self.room.join(user)
        except ValueError:  # the room is for invited users now
            self.waiting.append(self.room.invite(self.admin, user))
            return self.room.join(user)

    async def stayed(self, *replicas: Replica) -> None:
        """Let a local user join with the whole answer, and leave; the next join is killed."""
        early = READERS[2]
        join = self.joins(early)
        for replica in replicas:
            await self.join(replica, join, is_partial=False)
        for _ in range(self.random.randint(0, 6)):
            self.act()
        while chain := self.batch():
            for replica in replicas:
                await self.deliver(replica, chain)
        self.heal()
        leave = self.room.leave(early)
        for replica in replicas:
            await self.deliver(replica, [leave])
            await self.killed_join(replica)

    async def killed_join(self, replica: Replica) -> None:
        """Mark the room as a process does that is killed before it stores its join."""
        origin, join = ServerName(self.others[0]), EventId("$killed")
        async with replica.store.database.transaction() as conn:
            assert await begin(conn, self.room.room_id, join, origin, [])

    async def join(self, replica: Replica, join: BuiltEvent, *, is_partial: bool) -> None:
        answer = self.remote.send_join(join)
        if is_partial:
            servers = self.remote.servers(join.state_before)
            answer = omitted(answer, self.room.version, servers)
        result = await replica.receiver.joined(self.others[0], join.json, answer, self.room.version)
        # a second local user may join while this store knows of stricter join rules
        fine = result.outcome != "refused" or (join.sender != self.user and result.result)
        assert fine, result

    def batch(self) -> list[BuiltEvent]:
        """Take a chain of the waiting events: perhaps only its end, so that there is a gap."""
        if not self.waiting:
            return []
        self.random.shuffle(self.waiting)
        chain = [self.waiting.pop()]
        by_id = {one.event_id: one for one in self.waiting}
        while self.random.random() < 0.8:
            parents = [by_id[one] for one in chain[0].prev_events if one in by_id]
            if len(parents) != 1:
                break
            chain.insert(0, parents[0])
            self.waiting.remove(parents[0])
        if self.random.random() < 0.15:
            self.waiting = [one for one in self.waiting if self.random.random() < 0.5]
        return chain

    async def deliver(self, replica: Replica, chain: Sequence[BuiltEvent]) -> None:
        pdus = [one.json for one in chain]
        results = await replica.receiver.transaction(self.others[0], pdus)
        assert results.keys() == {one.event_id for one in chain}

    async def send(self, first: Replica, second: Replica) -> None:
        """Let the local user send with the first store; the second gets the event."""
        kind, content = self.random.choice(
            [("m.room.message", {"body": "here"}), ("m.room.topic", {"topic": "here"})]
        )
        state_key = "" if kind == "m.room.topic" else None
        transaction = "D", str(len(self.sent))
        try:
            result = await first.store.send(
                self.room.room_id, USER, kind, content, state_key=state_key, transaction=transaction
            )
        except (AuthDenied, PartialState):
            return
        assert result.event_id is not None
        event = await first.store.event(result.event_id)
        assert event is not None
        self.sent.append(result.event_id)
        adopt(self.room, event.raw)
        [other] = await second.store.append([event.raw])
        assert other.is_stored, other

    async def seen(self, replica: Replica) -> set[tuple[EventId, str]]:
        """All pairs of an event and a reader who may see it: local users, and servers."""
        ids = [one.event_id for one in self.room.events]
        found = set[tuple[EventId, str]]()
        for user in READERS:
            shown = await replica.store.visible_to_user(user, ids)
            page = await replica.store.messages(self.room.room_id, user, limit=1_000)
            found |= {(one, user) for one in {*shown, *(event.event_id for event in page.chunk)}}
        for server in OTHERS:
            shown = await replica.store.visible_to_server(server, ids)
            found |= {(one, server) for one in shown}
        return found

    def has_lost(self, event_id: EventId, reader: str) -> bool:
        """Whether an event follows the join of a reader, and its true state has another one.

        In a resolution with an old fork, an old rule may refuse the join. A partial state keeps it.
        """
        event = self.room.event(event_id)
        before = self.before(event)
        own = [one for one in before if one.key == ("m.room.member", reader) and not one.expected]
        held = event.state_before.get(("m.room.member", reader))
        return bool(own) and own[-1].content["membership"] == "join" and held != own[-1].event_id

    def before(self, event: BuiltEvent) -> list[BuiltEvent]:
        """The ancestors of an event, in the order in which they were built."""
        known = {event.event_id}
        for one in reversed(self.room.events):
            if one.event_id in known:
                known.update(one.prev_events)
        return [one for one in self.room.events if one.event_id in known - {event.event_id}]

    async def refused(self, replica: Replica) -> set[EventId]:
        """The events that the store has rejected or soft-failed, and redactions of them.

        A redaction without an effect is not shown.
        """
        events = self.room.events
        known = await replica.store.events([one.event_id for one in events])
        found = {one for one, event in known.items() if event.rejected or event.soft_failed}
        redactions = [one for one in events if one.type == "m.room.redaction"]
        return found | {one.event_id for one in redactions if redacted(one) in found}


def redacted(event: BuiltEvent) -> str:
    """The target of a redaction."""
    target: str = event.json.get("redacts") or event.content["redacts"]
    return target


@dataclass
class Script:
    """A join and the transactions after it, fixed by a seed: the same in every process.

    The events of the local user are part of the built room.
    """

    world: PartialWorld
    join: BuiltEvent = field(init=False)
    chains: list[list[BuiltEvent]] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.world
        self.join = world.joins(world.user)
        for _ in range(world.random.randint(2, 8)):
            for _ in range(world.random.randint(1, 4)):
                world.act()
            self.chains.append(world.batch())
            if world.random.random() < 0.4 and world.room.membership(world.user) == "join":
                self.chains.append([world.room.message(world.user, "here")])
        self.complete_at = world.random.randint(0, len(self.chains))

    async def play(self, replica: Replica, *, is_partial: bool) -> None:
        """Play it; what a killed process has done already may be done again."""
        world = self.world
        await world.join(replica, self.join, is_partial=is_partial)
        for number, chain in enumerate(self.chains):
            if is_partial and number == self.complete_at:
                await replica.receiver.complete_partial_rooms()
            await world.deliver(replica, chain)
        if is_partial:
            await replica.receiver.complete_partial_rooms()
