"""Auth chains and their difference, compared with a walk over the auth events.

The rooms have any order of arrival, outliers, rejected events and messages.
"""

import random
from collections.abc import Iterable
from itertools import groupby

import pytest

from storage import Store
from storage.ids import EventId
from storage.queries import auth_chain
from storage.testing import SHAPES, Odd, RoomBuilder, build_room, deliver_late, deliver_with_gap
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, deliver, new_room

ODD = Odd(rejected=0.1, soft_failed=0.03)


class Walk:
    """The auth events of the events that a store holds."""

    def __init__(self, room: RoomBuilder, held: Iterable[EventId]) -> None:
        self.auth = {event_id: room.event(event_id).auth_events for event_id in held}

    def chain(self, ids: Iterable[EventId]) -> set[EventId]:
        """All that these reach."""
        found: set[EventId] = set()
        front = [one for event_id in ids for one in self.auth[event_id]]
        while front:
            event_id = front.pop()
            if event_id not in found:
                found.add(event_id)
                front.extend(self.auth[event_id])
        return found

    def difference(self, sets: list[set[EventId]]) -> set[EventId]:
        """Return the events that are in some chains but not in all."""
        chains = [self.chain(one) for one in sets]
        return set[EventId]().union(*chains) - chains[0].intersection(*chains[1:])


async def stored(store: Store, seed: int, version: str) -> tuple[RoomBuilder, Walk]:
    """A room of forks and oddities that arrives in batches: late, or with a gap and outliers."""
    rng = random.Random(seed)
    shape = SHAPES["small_chat"].replaced(
        fork_rate=0.1, members=15, odd=ODD, mix={**SHAPES["small_chat"].mix, "power_levels": 0.05}
    )
    room = build_room(shape, 150, seed=seed, version=version)
    start = rng.randrange(20, 60)
    delivery = deliver_late(room, seed) if seed % 2 else deliver_with_gap(room, start, start + 30)
    for origin, events in groupby(delivery.events, key=lambda event: event.origin):
        rest = list(events)
        while rest:
            size = rng.choice([1, 5, 20])
            batch, rest = rest[:size], rest[size:]
            given = {
                event.event_id: event.state_before
                for event in batch
                if event.state_before is not None
            }
            await store.append(
                [event.pdu for event in batch],
                room_version=room.version,
                origin=origin,
                state_before=given,
            )
    held = await store.events([event.event_id for event in room.events])
    assert len(held) > 100
    return room, Walk(room, held)


@pytest.mark.parametrize(
    "seed,version", [(0, "11"), (1, "11"), (2, "12"), (3, "6"), (4, "1"), (5, "12")]
)
async def test_chains_and_differences_are_those_of_a_walk(
    store: Store, seed: int, version: str
) -> None:
    _, walk = await stored(store, seed, version)
    rng = random.Random(seed)
    held = sorted(walk.auth)
    for event_id in held:
        assert await store.auth_chain_ids([event_id]) == walk.chain([event_id])
    for _ in range(60):
        sets = [
            set(rng.sample(held, rng.choice([1, 2, 10, 40])))
            for _ in range(rng.choice([2, 2, 3, 5]))
        ]
        common = rng.sample(held, rng.choice([0, 0, 1, 30]))
        sets = [one | {*common} for one in sets]
        for _ in ("read", "remembered, if all have a position"):
            assert await store.auth_chain_ids(sets[0]) == walk.chain(sets[0])
            assert await store.auth_chain_difference(sets) == walk.difference(sets)


@pytest.mark.parametrize("seed", range(4))
async def test_differences_of_states(
    store: Store, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The range that a read looks at is so small that several reads are needed."""
    monkeypatch.setattr(auth_chain, "LATER_MAX", 1 + seed % 2)
    _, walk = await stored(store, seed, "11")
    rng = random.Random(seed)
    timeline = [
        event.event_id for event in (await store.events(walk.auth)).values() if not event.outlier
    ]
    states = [set(state.values()) for state in (await store.states_after(timeline)).values()]
    for _ in range(60):
        sets = rng.sample(states, rng.choice([2, 2, 3]))
        assert await store.auth_chain_difference(sets) == walk.difference(sets)


async def test_state_ids_of_many_events(store: Store) -> None:
    _, walk = await stored(store, 2, "11")
    timeline = [
        event.event_id for event in (await store.events(walk.auth)).values() if not event.outlier
    ]
    states = await store.states_before(timeline)
    for event_id, state in states.items():
        found = await store.state_ids(event_id)
        assert found.state_ids == set(state.values())
        assert found.auth_chain_ids == walk.chain(state.values())


async def test_a_message_among_the_auth_events_of_a_rejected_event(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    message = room.message(LOCAL)
    first = room.topic(REMOTE, "no", expected="rejected")
    second = room.topic(
        REMOTE, "neither", auth=[*room.events[:2], message, first], expected="rejected"
    )
    results = await store.append(room.pdus)
    assert [result.outcome for result in results[-2:]] == ["rejected", "rejected"]
    walk = Walk(room, [event.event_id for event in room.events])
    for ids in ([second], [second, first], [second, message], [message]):
        asked = {event.event_id for event in ids}
        assert await store.auth_chain_ids(asked) == walk.chain(asked)
        sets = [asked, {first.event_id}, {room.events[1].event_id}]
        assert await store.auth_chain_difference(sets) == walk.difference(sets)


@pytest.mark.parametrize("size", [3, 1_100])
async def test_events_without_a_place_in_a_large_common_part(store: Store, size: int) -> None:
    """An event that a rejected event or a message of every set reaches is in no difference.

    A rejected event or a message in a single set counts like any other event.
    """
    room = new_room(members=[LOCAL, REMOTE])
    rejected = room.topic(LOCAL, "no", expected="rejected")
    message = room.message(REMOTE)
    renamed = [room.join(user, displayname="new") for user in (LOCAL, REMOTE)]
    common = [room.topic(ADMIN, str(number)) for number in range(size)]
    await store.append(room.pdus)
    walk = Walk(room, [event.event_id for event in room.events])
    names = {event.event_id for event in common}
    one, other = ({*names, event.event_id} for event in renamed)
    plain = walk.difference([one, other])
    assert await store.auth_chain_difference([one, other]) == plain
    for odd in ([rejected.event_id], [message.event_id], [rejected.event_id, message.event_id]):
        sets = [{*one, *odd}, {*other, *odd}]
        assert await store.auth_chain_difference(sets) == walk.difference(sets) < plain
        sets = [{*one, *odd}, other]
        assert await store.auth_chain_difference(sets) == walk.difference(sets)


async def test_statements_do_not_grow(store: Store, statements: StatementLog) -> None:
    counts = []
    for members in (3, 60):
        room = new_room(
            seed=members, members=[f"@user{number}:s1.test" for number in range(10, 10 + members)]
        )
        states = [set(room.state.values())]
        for member in range(10, 10 + members, 2):
            room.join(f"@user{member}:s1.test", displayname="new")
        room.power_levels(ADMIN, users={LOCAL: 50})
        states.append(set(room.state.values()))
        await deliver(store, room)
        statements.take()
        await store.auth_chain_ids(states[1])
        await store.auth_chain_difference(states)
        await store.state_ids(room.events[-1].event_id)
        counts.append(len(statements.take()))
    assert counts[0] == counts[1] <= 6
