"""Random questions to two stores: the one on the primary, and one that reads from its standby."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from storage import JoinedRoom, RoomId, StorageError, Store, StoredEvent, SyncFilter
from storage.queries.sync import Sync
from storage.testing import BuiltEvent, RoomBuilder

Room = TypeVar("Room", bound=JoinedRoom)
Question = Callable[[Store], Awaitable[Any]]


class PrimaryMoment(NamedTuple):
    """A moment of a room on the primary: its events so far, and tokens of the primary."""

    room: RoomBuilder
    events: Sequence[BuiltEvent]
    users: Sequence[str]
    token: str
    """Covers all events."""
    earlier: Sequence[str]
    pages: Sequence[str]

    @property
    def room_id(self) -> RoomId:
        return self.room.room_id


def with_the_token(rng: random.Random, at: PrimaryMoment) -> Question:
    """A question whose token covers all that was written."""
    user, other = rng.choice(at.users), rng.choice(at.users)
    old, limit, direction = rng.choice(at.earlier), rng.randint(1, 12), rng.choice("bf")
    return rng.choice(
        [
            lambda store: store.sync(user, since=at.token),
            lambda store: store.messages(
                at.room_id, user, from_=at.token, limit=limit, aggregations=True
            ),
            lambda store: store.messages(
                at.room_id, user, from_=old, to=at.token, direction="f", limit=limit
            ),
            lambda store: store.messages(
                at.room_id, user, from_=at.pages[-1], direction=direction, limit=limit
            ),
            lambda store: by_id(store.members(at.room_id, at=at.token)),
            lambda store: store.membership(at.room_id, other, at=at.token),
            lambda store: store.sharing_changes(user, old, at.token),
        ]
    )


def of_anything(rng: random.Random, at: PrimaryMoment) -> Question:
    """A question that comes after one with the token."""
    user, event_id = rng.choice(at.users), rng.choice(at.events).event_id
    some = [one.event_id for one in rng.sample(at.events, min(5, len(at.events)))]
    old, page, server = rng.choice(at.earlier), rng.choice(at.pages), rng.choice(SERVERS)
    limit = rng.randint(1, 12)
    everything = SyncFilter(include_leave=True)
    return rng.choice(
        [
            lambda store: store.sync(user, since=old, timeline_limit=limit),
            lambda store: store.sync(user, timeline_limit=limit, filter=everything),
            lambda store: store.sync(user, device_id="D", full_state=True),
            lambda store: store.messages(at.room_id, user, from_=page, limit=limit),
            lambda store: store.context(event_id, user, limit=limit),
            lambda store: store.relations(event_id, user, limit=limit, recurse=True),
            lambda store: store.threads(at.room_id, user, limit=limit),
            lambda store: store.events(some),
            lambda store: store.visible_to_user(user, some),
            lambda store: store.visible_to_server(server, some),
            lambda store: store.explain_visibility(event_id, user),
            lambda store: store.state_before(event_id),
            lambda store: store.states_after(some),
            lambda store: store.current_state(at.room_id),
            lambda store: store.forward_extremities(at.room_id),
            lambda store: store.rooms([at.room_id]),
            lambda store: store.rooms_of(user),
            lambda store: store.unread(user),
            lambda store: store.memberships_of(user, ("join", "leave", "invite")),
            lambda store: sorted_ids(store.member_ids(at.room_id)),
            lambda store: store.joined_servers(at.room_id, at_event=event_id),
            lambda store: store.is_resident(server, at.room_id),
            lambda store: store.users_sharing(user),
            lambda store: store.backfill(at.room_id, some, limit, server_name=server),
            lambda store: store.missing_events(at.room_id, some[:1], some[1:], limit=limit),
            lambda store: store.state_ids(event_id),
            lambda store: store.event_auth(event_id),
            lambda store: store.auth_chain_difference([some[:2], some[2:]]),
        ]
    )


SERVERS = ("s1.test", "s2.test", "s3.test")


async def by_id(found: Awaitable[list[StoredEvent]]) -> list[StoredEvent]:
    return ordered(await found)


def ordered(state: list[StoredEvent]) -> list[StoredEvent]:
    """Events of a state, which have the order of the plan: one standby has another than its
    primary.
    """
    return sorted(state, key=attrgetter("event_id"))


def room_in_order(room: Room) -> Room:
    return replace(
        room,
        state=ordered(room.state),
        state_after=ordered(room.state_after),
        state_removed=sorted(room.state_removed),
    )


async def sorted_ids(found: Awaitable[Sequence[str]]) -> list[str]:
    return sorted(await found)


async def answer(store: Store, question: Question) -> Any:
    """The answer of a store, in a form that can be compared."""
    try:
        found = await question(store)
    except StorageError as error:
        return type(error), str(error)
    if isinstance(found, Sync):
        # the positions of idle writers move between two answers
        return replace(
            found,
            next_batch="",
            join={room_id: room_in_order(room) for room_id, room in found.join.items()},
            leave={room_id: room_in_order(room) for room_id, room in found.leave.items()},
        )
    return found


async def moment(
    store: Store, room: RoomBuilder, stored: int, earlier: Sequence[str]
) -> PrimaryMoment:
    """Take tokens of the primary after so many events of the room are stored."""
    events = room.events[:stored]
    users = sorted({one.sender for one in events if one.sender.endswith(":s1.test")})
    end = (await store.messages(room.room_id, users[0], limit=3)).start
    pages = [(await store.messages(room.room_id, one, limit=3)).end for one in users]
    token = (await store.sync(users[0])).next_batch
    return PrimaryMoment(
        room, events, users, token, [*earlier, token], [*(one for one in pages if one), end]
    )
