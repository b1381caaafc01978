"""A random sequence of requests and of what happens between them, on a store and on the oracle.

A sequence is a list of steps, each with a seed of its own. So a failing one can be made shorter by
leaving steps out. Every sequence has its own users and rooms; many share a database.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from storage import (
    RoomSubscription,
    SlidingFilter,
    SlidingList,
    SlidingSyncRequest,
    SyncFilter,
)
from storage.errors import UnknownPos
from storage.ids import EventId, RoomId, StateKey
from tests.oracle.facts import differences
from tests.oracle.oracle import Oracle
from tests.oracle.sliding import Personal, SlidingOracle, Snapshot, membership_of
from tests.oracle.sliding_checks import ResponseCheck, next_snapshot
from tests.oracle.sliding_client import ModelClient
from tests.oracle.sliding_rooms import SlidingRooms, personal
from tests.oracle.sliding_subject import OracleSliding, SlidingSubject
from tests.oracle.syncing import OracleSyncRequest, plain_answer, remember, sync
from tests.oracle.unread import unread

STEPS: Final = 30
FILTERED: Final = 0.3
PATTERNS: Final[Sequence[StateKey]] = (
    ("m.room.create", ""),
    ("m.room.name", ""),
    ("m.room.topic", ""),
    ("m.room.topic", "*"),
    ("m.room.member", "$ME"),
    ("m.room.member", "$LAZY"),
    ("m.room.member", "*"),
    ("m.room.power_levels", ""),
    ("*", ""),
    ("*", "$ME"),
    ("*", "*"),
)
EXCLUSIONS: Final[Sequence[StateKey]] = (
    ("m.room.create", ""),
    ("m.room.topic", "*"),
    ("m.room.name", ""),
    ("*", ""),
)
WEIGHTS: Final = {
    "write": 34,
    "request": 40,
    "fork": 3,
    "merge": 4,
    "remove": 5,
    "take out": 6,
    "hold": 3,
    "gap": 2,
    "outlier": 2,
    "backfill": 1,
    "child": 3,
    "account": 3,
    "room": 3,
    "elsewhere": 2,
    "arrive": 2,
    "sync": 12,
    "read": 8,
    "come back": 5,
    "forget": 4,
}


ROOMS_MAX: Final = 6
CHANGES: Final[Mapping[str, Callable[[SlidingRooms, random.Random], None]]] = {
    "write": SlidingRooms.write_some,
    "fork": SlidingRooms.fork,
    "merge": SlidingRooms.merge,
    "remove": SlidingRooms.remove,
    "take out": SlidingRooms.take_out,
    "gap": SlidingRooms.deliver_after_a_gap,
    "outlier": SlidingRooms.deliver_outlier,
    "backfill": SlidingRooms.backfill,
    "child": SlidingRooms.child,
    "arrive": SlidingRooms.arrive,
    "come back": SlidingRooms.come_back,
}


class SlidingStep(NamedTuple):
    kind: str
    seed: int


@dataclass(frozen=True)
class Reply:
    """A response that a client has, and all that it knows by then."""

    pos: str | None
    sent: Snapshot
    client: ModelClient


NOTHING: Final = Reply(None, Snapshot(), ModelClient())


@dataclass
class ClientConnection:
    user_id: str
    device_id: str
    request: SlidingSyncRequest
    replies: list[Reply] = field(default_factory=lambda: [NOTHING])
    base: Reply = NOTHING
    """Where the last request continued from."""


def steps_of(seed: int, count: int = STEPS) -> list[SlidingStep]:
    rng = random.Random(f"steps {seed}")
    kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [SlidingStep(kind, rng.randrange(2**32)) for kind in kinds]


class SlidingSequence:
    """One run. ``number`` makes the names of the users and rooms unique in the database."""

    def __init__(self, number: int, seed: int) -> None:
        self.rng = random.Random(f"world {seed}")
        self.oracle = Oracle()
        self.readers = [f"@a{number}:s2.test", f"@b{number}:s2.test"]
        others = [f"@c{number}:s1.test", f"@d{number}:s3.test"]
        self.rooms = SlidingRooms(self.oracle, [*self.readers, *others], number)
        ignored = [self.rng.sample(others, self.rng.choice((0, 0, 1, 2))) for _ in self.readers]
        self.personal = {
            user: Personal(ignored=few) for user, few in zip(self.readers, ignored, strict=True)
        }
        self.receipts: dict[tuple[str, RoomId], EventId] = {}
        self.tokens: dict[str, list[tuple[int | None, Any]]] = {
            user: [(None, None)] for user in self.readers
        }
        self.holds = self.reached = 0
        self.refused = 0
        one, other = self.readers
        names = [(one, "PHONE", ""), (one, "PHONE", "second"), (other, "DESK", "")]
        self.connections = [
            ClientConnection(user, device, replace(self._request(self.rng), conn_id=conn_id))
            for user, device, conn_id in names
        ]

    async def run(self, subject: SlidingSubject, steps: Sequence[SlidingStep]) -> None:
        """Raise AssertionError at the first difference."""
        self.subject = subject
        for number in range(self.rng.randint(1, 4)):
            self.rooms.begin(self.rng, is_space=number == 3)
        await self._append()
        for step in steps:
            await self.step(step.kind, random.Random(step.seed))
        self.rooms.deliver()
        await self._append()
        for connection in self.connections:
            await self._look(connection, connection.replies[-1])

    async def step(self, kind: str, rng: random.Random) -> None:
        if kind == "request":
            await self._one_request(rng)
        elif kind == "sync":
            await self._sync(rng)
        elif kind == "read":
            await self._read(rng)
        elif kind == "account":
            await self._account(rng)
        elif kind == "forget":
            await self._forget(rng)
        else:
            self._rooms(kind, rng)
            await self._append()

    def _rooms(self, kind: str, rng: random.Random) -> None:
        """Change rooms. Events are delivered at once, except in the next steps after "hold"."""
        rooms = self.rooms
        may_begin = len(rooms.room_ids) < ROOMS_MAX
        if kind == "hold":
            self.holds = rng.randint(1, 4)
        elif kind == "room" and may_begin:
            rooms.begin(rng, is_space=rng.random() < 0.2)
        elif kind == "elsewhere" and may_begin:
            rooms.begin_elsewhere(rng, rng.choice(self.readers))
        elif kind in CHANGES:
            CHANGES[kind](rooms, rng)
        self.holds -= 1
        if self.holds < 0:
            rooms.deliver()

    async def _append(self) -> None:
        """Let the store append what the oracle has."""
        for one in self.rooms.outbox:
            await self.subject.append(one)
        self.rooms.outbox.clear()
        remember(self.oracle, self.reached)
        self.reached = max((held.arrival for held in self.oracle.held.values()), default=0)

    async def _forget(self, rng: random.Random) -> None:
        """Let a user forget a room that they have left, or were removed from."""
        user = rng.choice(self.readers)
        left = [
            room_id
            for room_id in self.oracle.versions
            if (own := membership_of(self.oracle, room_id, user)) is not None
            and own.name in ("leave", "ban")
        ]
        if left:
            room_id = rng.choice(left)
            self.oracle.forgotten.add((room_id, user))
            await self.subject.forget(user, room_id)

    async def _account(self, rng: random.Random) -> None:
        """Let a user have other direct chats and tags."""
        user = rng.choice(self.readers)
        known = [room_id for room_id in self.rooms.room_ids if room_id in self.oracle.versions]
        direct, tags = personal(rng, known)
        await self.subject.account(user, "m.direct", direct, None)
        for room_id in known:
            content = tags.get(room_id, {"tags": {}})
            await self.subject.account(user, "m.tag", content, room_id)
        self.personal[user] = Personal(
            {room_id for rooms in direct.values() for room_id in rooms},
            {room_id: set(content["tags"]) for room_id, content in tags.items()},
            self.personal[user].ignored,
        )

    async def _read(self, rng: random.Random) -> None:
        """Let a user perhaps set a receipt in a room, and compare the unread counts of all."""
        user, oracle = rng.choice(self.readers), self.oracle
        inside = [
            room_id
            for room_id in self.rooms.room_ids
            if room_id in oracle.versions
            and oracle.membership_in(oracle.current_state(room_id), user) == "join"
        ]
        if inside and rng.random() < 0.6:
            await self._receipt(rng, user, rng.choice(inside))
        ignored = self.personal[user].ignored
        expected = {
            room_id: unread(oracle, room_id, user, self._read_by(user, room_id), ignored)
            for room_id in inside
        }
        found = await self.subject.unread(user, self._receipts_of(user))
        assert {one: found[one] for one in found if one in expected} == expected, user

    def _read_by(self, user: str, room_id: RoomId) -> list[EventId]:
        return [one for key, one in self.receipts.items() if key == (user, room_id)]

    def _receipts_of(self, user: str) -> dict[RoomId, EventId]:
        return {room_id: one for (reader, room_id), one in self.receipts.items() if reader == user}

    async def _receipt(self, rng: random.Random, user: str, room_id: RoomId) -> None:
        """Set a receipt of a user; one for an earlier event than the present one is ignored."""
        oracle = self.oracle
        live = [
            event_id
            for event_id, held in oracle.timeline(room_id).items()
            if held.origin == "live" and held.accepted
        ]
        event_id = rng.choice(live)
        await self.subject.receipt(user, room_id, event_id)
        present = self.receipts.get((user, room_id), event_id)
        if oracle.get(event_id).arrival >= oracle.get(present).arrival:
            self.receipts[user, room_id] = event_id

    # ----------------------------------------------------------------------------------------------
    # requests

    async def _sync(self, rng: random.Random) -> None:
        """Let a user sync in the other way, from the last token, an older one, or from nothing."""
        user = rng.choice(self.readers)
        since, token = (
            self.tokens[user][-1] if rng.random() < 0.7 else rng.choice(self.tokens[user])
        )
        wanted = SyncFilter(lazy_load_members=rng.random() < 0.3, include_leave=rng.random() < 0.3)
        ignored = self.personal[user].ignored
        asked = OracleSyncRequest(user, since, rng.choice((1, 3, 100)), wanted, ignored)
        how: dict[str, Any] = {"limit": asked.limit, "wanted": wanted, "ignored": ignored}
        expected = sync(self.oracle, user, since, **how)
        given = asked if isinstance(self.subject, OracleSliding) else replace(asked, since=token)
        found = await self.subject.sync(given)
        lines = differences(plain_answer(expected), plain_answer(found))
        if lines:
            raise AssertionError("\n".join([*lines, f"of a sync of {asked}"]))
        self.tokens[user].append((expected.next_batch, found.next_batch))

    async def _one_request(self, rng: random.Random) -> None:
        connection = rng.choice(self.connections)
        if rng.random() < 0.4:
            changed = self._request(rng)
            connection.request = replace(changed, conn_id=connection.request.conn_id)
        which = rng.random()
        if which < 0.75:
            reply = connection.replies[-1]
        elif which < 0.88:
            reply = connection.base
        elif which < 0.95:
            reply = rng.choice(connection.replies)
        else:
            reply = NOTHING
        await self._look(connection, reply)

    async def _look(self, connection: ClientConnection, reply: Reply) -> None:
        """Continue from a reply: the last one, the one before it (a replay), or a stale one."""
        user, request = connection.user_id, connection.request
        try:
            found = await self.subject.look(user, connection.device_id, request, reply.pos)
        except UnknownPos:
            assert reply not in (connection.base, connection.replies[-1], NOTHING)
            self.refused += 1
            return
        oracle = SlidingOracle(self.oracle, user, self.personal[user])
        positions = await self.subject.positions(self.rooms.room_ids)
        comparison = ResponseCheck(oracle, request, reply.sent, positions)
        patterns = {room_id: one.patterns for room_id, one in comparison.due.wanted.items()}
        client = reply.client.after(found, patterns, user)
        comparison.compare(found, client)
        if comparison.lines:
            told = {one: found.rooms.get(one) for one in comparison.due.wanted}
            about = f"{user} sent {request} after {reply.sent}, and got {told}"
            raise AssertionError("\n".join([*comparison.lines, about]))
        sent = next_snapshot(oracle, comparison.due, found, reply.sent)
        if reply is connection.base:  # the last response was lost
            connection.replies.pop()
        connection.base = reply
        connection.replies.append(Reply(found.pos, sent, client))

    def _request(self, rng: random.Random) -> SlidingSyncRequest:
        """Return a random request, often of a kind that a client sends."""
        lists = {
            name: SlidingList(
                ranges=self._ranges(rng),
                timeline_limit=rng.choice((0, 1, 1, 2, 5, 50)),
                required_state=self._patterns(rng),
                filters=self._filters(rng) if rng.random() < FILTERED else SlidingFilter(),
                excluded_state=self._excluded(rng),
            )
            for name in ("all", "some")[: rng.choice((1, 1, 1, 2, 0))]
        }
        rooms = [*self.rooms.room_ids, RoomId("!unknown:s9.test")]
        subscriptions = {
            room_id: RoomSubscription(
                timeline_limit=rng.choice((1, 3, 20)),
                required_state=self._patterns(rng),
                excluded_state=self._excluded(rng),
            )
            for room_id in rng.sample(rooms, min(len(rooms), rng.choice((0, 0, 1, 2))))
        }
        return SlidingSyncRequest(lists=lists, room_subscriptions=subscriptions)

    def _ranges(self, rng: random.Random) -> list[tuple[int, int]] | None:
        return rng.choice((None, [(0, 0)], [(0, 1)], [(0, 19)], [(1, 2)], [(0, 0), (2, 3)]))

    def _patterns(self, rng: random.Random) -> list[StateKey]:
        return rng.sample(PATTERNS, rng.choice((0, 1, 1, 2, 2, 3, 5)))

    def _excluded(self, rng: random.Random) -> list[StateKey]:
        return rng.sample(EXCLUSIONS, rng.choice((0, 0, 0, 1, 2)))

    def _filters(self, rng: random.Random) -> SlidingFilter:
        """Return one or two conditions."""
        spaces = [*self.rooms.spaces, RoomId("!unknown:s9.test")]
        either: dict[str, Any] = {
            "is_dm": rng.random() < 0.5,
            "is_encrypted": rng.random() < 0.5,
            "is_invited": rng.random() < 0.5,
            "room_types": rng.choice(([None], ["m.space"], ["m.space", None])),
            "not_room_types": rng.choice(([None], ["m.space"])),
            "spaces": rng.sample(spaces, rng.randint(1, len(spaces))),
            "tags": rng.choice((["m.favourite"], ["m.favourite", "u.work"])),
            "not_tags": rng.choice((["m.favourite"], ["u.work"])),
            "room_name_like": rng.choice(("room", "NAME 1", "")),
        }
        chosen = rng.sample(sorted(either), rng.choice((1, 1, 2)))
        return SlidingFilter(**{name: either[name] for name in chosen})


async def run_or_shorten(
    attempt: Callable[[int, Sequence[SlidingStep]], Awaitable[None]], seed: int
) -> None:
    """Run a sequence. If it fails, leave out steps one by one, as long as it fails.

    ``attempt`` runs it with names of its own, made from a number.
    """
    steps = steps_of(seed)
    try:
        await attempt(seed, steps)
    except AssertionError as error:
        number, last = 1_000_000 + 1_000 * seed, error
        for place in reversed(range(len(steps))):
            number, fewer = number + 1, steps[:place] + steps[place + 1 :]
            try:
                await attempt(number, fewer)
            except AssertionError as again:
                steps, last = fewer, again
        raise AssertionError(f"sequence {seed}: {steps}\n{last}") from error
