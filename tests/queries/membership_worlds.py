"""Worlds of a few rooms with forks, whose users come and go, and what is true at each token.

Two stores write to the rooms in turns, so that their tokens have several writers. The truth is read
from the current state of each room and from the contents of the builder's events.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from storage import Store
from storage.ids import EventId, RoomId, server_name_of
from storage.queries.sync.changed_rooms import positions
from storage.streams import SyncToken
from storage.testing import BuiltEvent, RoomBuilder

SERVERS = ("s1.test", "s1.test", "s1.test", "s2.test", "s2.test", "s3.test")
ROOMS = 4
VERSIONS = ("1", "2", "6", "10", "11", "12")
DEEDS = ("join", "join", "join", "leave", "invite", "kick", "ban", "unban", "rules", "text")
OF_CREATOR = ("kick", "ban", "unban", "rules")
Memberships = dict[RoomId, dict[str, str]]
"""The members of each room, with their membership."""


@dataclass(slots=True)
class MembershipWorld:
    """Rooms that grow, each with its branches, and what was true at each token."""

    number: int
    rng: random.Random
    users: list[str] = field(default_factory=list)
    rooms: list[list[RoomBuilder]] = field(default_factory=list)
    delivered: set[EventId] = field(default_factory=set)
    tokens: list[str] = field(default_factory=list)
    truths: list[Memberships] = field(default_factory=list)
    lives: list[list[Memberships]] = field(default_factory=list)
    """What was true after each event up to the token, since the one before."""

    @property
    def local(self) -> list[str]:
        """Return the users of the store's server."""
        return [user for user in self.users if server_name_of(user) == "s1.test"]

    def events(self) -> Iterator[BuiltEvent]:
        """Yield the events of all rooms."""
        for branches in self.rooms:
            yield from branches[0].events


def new_world(number: int) -> MembershipWorld:
    """Return a world with its rooms, in each of which are a few users."""
    rng = random.Random(number)
    world = MembershipWorld(number, rng)
    for place in range(ROOMS):
        room = RoomBuilder(rng.choice(VERSIONS), seed=ROOMS * number + place, sign=False)
        world.users = [
            room.user(10 * number + count, server) for count, server in enumerate(SERVERS)
        ]
        room.start(
            rng.choice(world.users),
            history_visibility=rng.choice(("shared", "joined", "invited", "world_readable")),
        )
        for user in rng.sample(world.users, 2):
            _try(room, "join", user, user)
        world.rooms.append([room])
    return world


def advance(world: MembershipWorld) -> None:
    """Write a few events in some rooms: on a branch, at a fork, or after a merge.

    Only one branch of a room grows, so that another branch takes members away later.
    """
    rng = world.rng
    for branches in rng.sample(world.rooms, rng.randint(1, ROOMS)):
        if len(branches) > 1 and rng.random() < 0.4:
            branches[0].merge(*branches[1:])
            del branches[1:]
        elif len(branches) == 1 and rng.random() < 0.5:
            branches.extend(branches[0].fork(1))
        branch, creator = rng.choice(branches), branches[0].events[0].json["sender"]
        for _ in range(rng.randint(1, 5)):
            user, other = rng.choices(world.users, k=2)
            deed = rng.choice(DEEDS)
            _try(branch, deed, creator if deed in OF_CREATOR else user, other)


def _try(room: RoomBuilder, deed: str, user: str, other: str) -> None:
    """Write an event, unless the rules refuse it."""
    deeds = {
        "join": lambda: room.join(user),
        "leave": lambda: room.leave(user),
        "invite": lambda: room.invite(user, other),
        "kick": lambda: room.kick(user, other),
        "ban": lambda: room.ban(user, other),
        "unban": lambda: room.unban(user, other),
        "rules": lambda: room.join_rules(user, "invite" if user < other else "public"),
        "text": lambda: room.message(user),
    }
    try:
        deeds[deed]()
    except ValueError:
        return


async def deliver(world: MembershipWorld, stores: list[Store]) -> None:
    """Append what is new, by one of the stores for each room, and note what is true after each."""
    contents = {event.event_id: event.json["content"] for event in world.events()}
    truth = dict(world.truths[-1]) if world.truths else {}
    life: list[Memberships] = []
    for branches in world.rooms:
        new = [event for event in branches[0].events if event.event_id not in world.delivered]
        if not new:
            continue
        room_id, store = branches[0].room_id, world.rng.choice(stores)
        for event in new:
            result = await store.append([event.pdu], room_version=branches[0].version)
            assert result[0].outcome in {"stored", "soft_failed", "rejected"}, result
            world.delivered.add(event.event_id)
            state = await store.current_state(room_id, types=["m.room.member"])
            truth[room_id] = {
                user: contents[event_id]["membership"] for (_, user), event_id in state.items()
            }
            life.append(dict(truth))
    async with stores[0].database.connection() as conn:
        world.tokens.append(SyncToken.of(await positions(conn)).print(stores[0].deployment_id))
    world.truths.append(truth)
    world.lives.append(life)


def joined(truth: Memberships, room_id: RoomId) -> set[str]:
    """Return the users who are joined to a room."""
    return {user for user, membership in truth[room_id].items() if membership == "join"}


def sharing(truth: Memberships, user: str) -> set[str]:
    """Return the others who share a room with a user."""
    rooms = [members for members in (joined(truth, one) for one in truth) if user in members]
    return set().union(*rooms) - {user}
