"""The random rooms of one sequence of sliding syncs: they grow on branches, and are delivered."""

import random
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from storage.ids import EventId, RoomId
from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.oracle import Oracle
from tests.oracle.room_graph import Origin, Outcome
from tests.oracle.worlds import WRITES, Write

VERSIONS: Final = ("2", "6", "10", "11", "12")
MORE: Final[Mapping[str, Write]] = {
    "avatar": lambda room, one, _, how: room.state_event(
        one, "m.room.avatar", {"url": f"mxc://s1.test/{len(room.events)}"}, **how
    ),
    "encrypt": lambda room, one, _, how: room.state_event(
        one, "m.room.encryption", {"algorithm": "m.megolm.v1.aes-sha2"}, **how
    ),
    "encrypted": lambda room, one, _, how: room.send(
        one, "m.room.encrypted", {"ciphertext": "x"}, **how
    ),
    "profile": lambda room, one, _, how: room.join(
        one, displayname=f"name {len(room.events)}", **how
    ),
    "reaction": lambda room, one, _, how: room.send(one, "m.reaction", {}, **how),
    "redact": lambda room, one, _, how: room.redact(one, room.events[-1], **how),
}
REMOVABLE: Final = (("m.room.topic", "other"), ("org.x", ""), ("org.x", "one"), ("org.x", "two"))
OFTEN: Final = (
    *("message", "encrypted", "reaction", "topic", "name", "avatar", "profile"),
    *("join", "leave", "invite", "kick", "ban", "unban", "knock", "promote"),
)
ALL: Final[Mapping[str, Write]] = {**WRITES, **MORE}
Given = Mapping[EventId, list[EventId]]


class Delivery(NamedTuple):
    """An append that the oracle has done already, with its results."""

    pdus: list[bytes]
    origin: Origin
    given: Given | None
    expected: list[tuple[EventId | None, Outcome]]


class SlidingRooms:
    """Rooms and their branches. The store appends what is in the `outbox`, after the oracle."""

    def __init__(self, oracle: Oracle, users: list[str], number: int) -> None:
        self.oracle, self.users, self.number = oracle, users, number
        self.branches: list[RoomBuilder] = []
        self.undelivered: list[BuiltEvent] = []
        self.away: list[BuiltEvent] = []
        """Events of rooms that this server is not in yet."""
        self.against: list[BuiltEvent] = []
        """Events on another branch that take a user out of a room."""
        self.spaces: list[RoomId] = []
        self.outbox: list[Delivery] = []

    @property
    def room_ids(self) -> list[RoomId]:
        return sorted({branch.room_id for branch in self.branches})

    def _seed(self) -> int:
        return self.number * 100 + len(self.room_ids)

    def begin(self, rng: random.Random, *, is_space: bool = False) -> None:
        """Start a room with some of the users."""
        version, seed = rng.choice(VERSIONS), self._seed()
        room = RoomBuilder(version, seed=seed, sign=False)
        rule = rng.choice(("public", "public", "knock")) if int(version) > 6 else "public"
        creator, *others = rng.sample(self.users, len(self.users))
        room.start(
            creator,
            join_rule=rule,
            history_visibility=rng.choice(("shared", "shared", "joined", "invited")),
            users={others[0]: 50},
            name=f"room {seed}" if rng.random() < 0.5 else None,
            content={"type": "m.space"} if is_space else None,
        )
        for user in others[: rng.randint(0, len(others))]:
            with suppress(ValueError):
                room.join(user)
        if is_space:
            for child in self.room_ids:
                if rng.random() < 0.5:
                    room.state_event(creator, "m.space.child", {"via": ["s1.test"]}, child)
            self.spaces.append(room.room_id)
        self.branches.append(room)
        self.undelivered += room.events
        self.deliver()

    def begin_elsewhere(self, rng: random.Random, user: str) -> None:
        """Start a room on another server, and deliver only the invite of a user."""
        room = RoomBuilder(rng.choice(VERSIONS), seed=self._seed(), sign=False)
        host = self.users[-1]
        room.start(host, join_rule="public")
        invite = room.invite(host, user)
        self.branches.append(room)
        self.away += room.events
        chain = [one for one in room.events if one.event_id in {*invite.auth_events}]
        self._give([*chain, invite], "outlier", None)

    def arrive(self, _: random.Random) -> None:
        """Let this server get the events of rooms that it was not in."""
        self.undelivered, self.away = [*self.undelivered, *self.away], []

    def write_some(self, rng: random.Random) -> None:
        for _ in range(rng.randint(1, 3)):
            self.write(rng)

    def write(self, rng: random.Random) -> None:
        """Write an event on a branch, if its state allows that."""
        branch = rng.choice(self.branches)
        name = rng.choice(OFTEN) if rng.random() < 0.8 else rng.choice(sorted(ALL))
        one, other = rng.choice(self.users), rng.choice(self.users)
        with suppress(ValueError):
            event = ALL[name](branch, one, other, {})
            is_away = any(event.room_id == known.room_id for known in self.away)
            (self.away if is_away else self.undelivered).append(event)

    def child(self, rng: random.Random) -> None:
        """Add a room to a space, or remove it."""
        if not self.spaces:
            return
        chosen = rng.choice(self.spaces)
        space = next(one for one in self.branches if one.room_id == chosen)
        content = {"via": ["s1.test"]} if rng.random() < 0.7 else {}
        with suppress(ValueError):
            self.undelivered.append(
                space.state_event(
                    space.events[0].sender, "m.space.child", content, rng.choice(self.room_ids)
                )
            )

    def fork(self, rng: random.Random) -> None:
        """Start a branch where another one is."""
        if len(self.branches) < 8:
            self.branches.append(rng.choice(self.branches).fork(1)[0])

    def merge(self, rng: random.Random) -> None:
        """Let an event have the heads of two branches as parents."""
        one = rng.choice(self.branches)
        other = next((b for b in self.branches if b is not one and b.graph is one.graph), None)
        if other is None:
            return
        self.branches = [branch for branch in self.branches if branch is not other]
        one.merge(other)
        speaker = next((user for user in self.users if one.membership(user) == "join"), None)
        if speaker is not None:
            with suppress(ValueError):
                self.undelivered.append(one.message(speaker))

    def remove(self, rng: random.Random) -> None:
        """Let state resolution remove keys: their sender was banned on another branch.

        Deliver the keys first, and the ban later.
        """
        branch = rng.choice(self.branches)
        host, *others = [branch.events[0].sender, *rng.sample(self.users, len(self.users))]
        for sender in (user for user in others if user != host):
            other = branch.fork(1)[0]
            with suppress(ValueError):
                for kind, key in rng.sample(REMOVABLE, 2):
                    event = branch.state_event(sender, kind, {"body": "x"}, key)
                    self.undelivered.append(event)
                self.deliver()
                self.undelivered.append(other.ban(host, sender))
                return

    def take_out(self, rng: random.Random) -> None:
        """Let state resolution remove a membership: another branch has rules against the join.

        Deliver the join first, perhaps with how it ended. A later call delivers the rules, and the
        one after that perhaps a ban.
        """
        if self.against:
            self.undelivered.append(self.against.pop(0))
            return
        away = {known.room_id for known in self.away}
        places = [
            (branch, user)
            for branch in self.branches
            for user in self.users
            if branch.room_id not in away and branch.membership(user) is None
        ]
        if not places:
            return
        branch, user = rng.choice(places)
        host = branch.events[0].sender
        other = branch.fork(1)[0]
        with suppress(ValueError):
            self.undelivered.append(branch.join(user))
            if rng.random() < 0.3:
                self.undelivered.append(branch.leave(user))
            self.against.append(other.join_rules(host, "invite"))
            if rng.random() < 0.3:
                self.against.append(other.ban(host, user))

    def come_back(self, rng: random.Random) -> None:
        """Let a user leave a room or be removed from it, and come back at once or much later."""
        branch, user = rng.choice(self.branches), rng.choice(self.users)
        host = branch.events[0].sender
        if user == host or branch.membership(user) != "join" or self._is_away(branch.room_id):
            return
        with suppress(ValueError):
            end = rng.choice(("leave", "kick", "ban"))
            self.undelivered.append(ALL[end](branch, user if end == "leave" else host, user, {}))
            for _ in range(rng.randint(0, 3)):
                self.undelivered.append(ALL[rng.choice(("message", "topic"))](branch, host, "", {}))
            if rng.random() < 0.3:
                return
            if end == "ban":
                self.undelivered.append(branch.unban(host, user))
            if rng.random() < 0.5:
                self.undelivered.append(branch.invite(host, user))
            self.undelivered.append(branch.join(user))

    def _is_away(self, room_id: RoomId) -> bool:
        return any(event.room_id == room_id for event in self.away)

    # ----------------------------------------------------------------------------------------------
    # delivering

    def deliver(self, count: int | None = None) -> None:
        self._give(self.undelivered[:count], "live", None)

    def deliver_outlier(self, rng: random.Random) -> None:
        """Deliver a membership with its auth chain, as when an invite comes over federation."""
        members = [one for one in self.undelivered if one.type == "m.room.member"]
        if members:
            event = rng.choice(members)
            self._give([*self._chains([event.event_id], event), event], "outlier", None)

    def deliver_after_a_gap(self, rng: random.Random) -> None:
        """Deliver an event whose parents are not stored, with the state before it."""
        if not self.undelivered:
            return
        event = rng.choice(self.undelivered)
        state = list(event.state_before.values())
        builder = self._builder(event)
        wanted = {one.event_id for one in self._chains([event.event_id, *state], event)} | {*state}
        self._give([one for one in builder.events if one.event_id in wanted], "outlier", None)
        self._give([event], "live", {event.event_id: state})

    def backfill(self, _: random.Random) -> None:
        self._give(self.undelivered[:2], "backfill", None)

    def _give(
        self,
        events: Collection[BuiltEvent],
        origin: Origin,
        given: Given | None,
    ) -> None:
        if not events:
            return
        pdus = [event.pdu for event in events]
        expected = self.oracle.append(pdus, origin=origin, state_before=given)
        self.outbox.append(Delivery(pdus, origin, given, expected))
        self.undelivered = [
            event for event in self.undelivered if not self.oracle.in_timeline(event.event_id)
        ]

    def _builder(self, event: BuiltEvent) -> RoomBuilder:
        return next(branch for branch in self.branches if branch.room_id == event.room_id)

    def _chains(self, ids: Iterable[EventId], event: BuiltEvent) -> list[BuiltEvent]:
        builder = self._builder(event)
        chain = builder.graph.auth_chain(list(ids))
        return [one for one in builder.events if one.event_id in chain]


def personal(
    rng: random.Random, room_ids: list[RoomId]
) -> tuple[dict[str, list[RoomId]], dict[RoomId, dict[str, Any]]]:
    """Return the content of m.direct, and the tags of some rooms."""
    direct = {"@somebody:s1.test": [one for one in room_ids if rng.random() < 0.4]}
    tags: dict[RoomId, dict[str, Any]] = {
        one: {"tags": {name: {} for name in ("m.favourite", "u.work") if rng.random() < 0.5}}
        for one in room_ids
        if rng.random() < 0.4
    }
    return direct, tags
