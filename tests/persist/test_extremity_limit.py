"""Rooms above the limit of forward extremities: which are dropped, and that nothing is lost by it.

The limit is in storage/persist/plan/topology.py.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

import storage
from storage import EventId, Store
from storage.maintenance.verify import verify
from storage.rebuild import rebuild
from storage.testing import BuiltEvent, RoomBuilder

SERVER = "s1.test"
LIMIT = 4

Opened = Callable[[int], Awaitable[Store]]


@pytest.fixture
async def opened(dsn: str) -> AsyncIterator[Opened]:
    """A store with a limit of extremities; each opening closes the one before."""
    async with AsyncExitStack() as stack:

        async def of(limit: int) -> Store:
            await stack.aclose()
            config = storage.Config(forward_extremities_max=limit)
            return await stack.enter_async_context(
                storage.open(dsn, server_name=SERVER, config=config)
            )

        yield of


def begun(*, users: int = 3) -> RoomBuilder:
    room = RoomBuilder("11", seed=1, sign=False)
    room.start(room.user(1), join_rule="public")
    for number in range(2, users + 1):
        room.join(room.user(number))
    return room


def forked(
    room: RoomBuilder, count: int, write: Callable[[RoomBuilder, int], BuiltEvent]
) -> list[BuiltEvent]:
    """As many events with the same parents."""
    return [write(branch, number) for number, branch in enumerate(room.fork(count))]


def message(room: RoomBuilder, number: int) -> BuiltEvent:
    return room.message(room.user(2), f"fork {number}")


def invite(room: RoomBuilder, number: int) -> BuiltEvent:
    return room.invite(room.user(2), f"@guest{number}:s9.test")


async def append(store: Store, events: Sequence[BuiltEvent]) -> None:
    """One at a time."""
    for event in events:
        [result] = await store.append([event.pdu])
        assert result.outcome == "stored", result


async def is_sound(store: Store, room: RoomBuilder, events: Sequence[BuiltEvent]) -> None:
    """All is held and seen, with its states, and nothing contradicts anything."""
    held = await store.events([event.event_id for event in events])
    assert set(held) == {event.event_id for event in events}
    assert {event.rejected for event in held.values()} == {None}
    assert await store.visible_to_user(room.user(1), held) == set(held)
    for event in events:
        assert await store.state_after(event.event_id) == dict(event.state_after)
    assert [finding async for finding in verify(store.database, server_name=SERVER)] == []


async def test_below_the_limit_all_stay(opened: Opened) -> None:
    store, room = await opened(LIMIT), begun()
    await append(store, room.events)
    forks = forked(room, LIMIT, message)
    await append(store, forks)
    assert await store.forward_extremities(room.room_id) == {event.event_id for event in forks}


async def test_of_equal_states_the_furthest_on_stays(opened: Opened) -> None:
    """Not the latest to come, but the one with the longest history behind it."""
    store, room = await opened(LIMIT), begun()
    await append(store, room.events)
    [main, *sides] = room.fork(10)
    longest = [message(main, number) for number in range(5)]
    forks = [message(side, number) for number, side in enumerate(sides)]
    await append(store, longest + forks)
    ends = await store.forward_extremities(room.room_id)
    assert len(ends) == LIMIT
    assert longest[-1].event_id in ends
    await is_sound(store, room, room.events)


async def test_old_states_are_covered(opened: Opened) -> None:
    """Messages on top of every state that the room had: each state differs, none adds anything."""
    store, room = await opened(LIMIT), begun()
    topics = [room.topic(room.user(1), f"topic {number}") for number in range(8)]
    await append(store, room.events)
    state = await store.current_state(room.room_id)
    forks = [message(room.at(topic), number) for number, topic in enumerate(topics[:-1])]
    await append(store, forks)
    ends = await store.forward_extremities(room.room_id)
    assert topics[-1].event_id in ends
    assert len(ends) == LIMIT
    assert await store.current_state(room.room_id) == state
    await is_sound(store, room, room.events)


async def test_without_a_covered_one_the_newest_stays_outside(opened: Opened) -> None:
    """Each invites somebody else.

    What the current state has it keeps; what has no room comes in by the next event on top of it.
    """
    store, room = await opened(LIMIT), begun()
    await append(store, room.events)
    forks = forked(room, LIMIT + 3, invite)
    await append(store, forks)
    inside, outside = forks[:LIMIT], forks[LIMIT:]
    assert await store.forward_extremities(room.room_id) == {event.event_id for event in inside}
    state = await store.current_state(room.room_id)
    assert {event.event_id for event in forks} & set(state.values()) == {
        event.event_id for event in inside
    }

    joined = room.at(*inside).message(room.user(1), "all together")
    await append(store, [joined])
    assert await store.forward_extremities(room.room_id) == {joined.event_id}
    children = [room.at(event).message(room.user(2), "on top") for event in outside]
    await append(store, children)
    assert await store.forward_extremities(room.room_id) == {
        event.event_id for event in (joined, *children)
    }
    state = await store.current_state(room.room_id)
    assert {event.event_id for event in forks} <= set(state.values())
    await is_sound(store, room, room.events)


async def test_a_dropped_event_is_a_parent_like_any_other(opened: Opened) -> None:
    """Named together with an extremity, with the state that both resolve to."""
    store, room = await opened(1), begun()
    await append(store, room.events)
    first, second = room.fork(2)
    topic = first.topic(room.user(1), "topic")
    renamed = second.name(room.user(1), "name")
    await append(store, [topic, renamed])
    [end] = await store.forward_extremities(room.room_id)
    assert end == topic.event_id
    both = first.merge(second).message(room.user(1), "both")
    await append(store, [both])
    assert await store.state_before(both.event_id) == dict(both.state_before)
    assert await store.forward_extremities(room.room_id) == {both.event_id}
    assert await store.current_state(room.room_id) == dict(both.state_after)
    await is_sound(store, room, room.events)


async def test_a_smaller_limit_drops_what_is_covered_and_lets_nothing_grow(opened: Opened) -> None:
    room = begun()
    store = await opened(100)
    await append(store, room.events)
    invites = forked(room, 6, invite)
    messages = forked(room, 6, message)
    await append(store, [*invites, *messages])
    assert len(await store.forward_extremities(room.room_id)) == 12
    store = await opened(2)
    [extra] = forked(room, 1, message)
    await append(store, [extra])
    ends = await store.forward_extremities(room.room_id)
    assert {event.event_id for event in invites} <= ends
    assert len(ends) <= 7
    await append(store, forked(room, 3, invite))
    assert await store.forward_extremities(room.room_id) == ends
    await is_sound(store, room, room.events)


async def test_repair_leaves_the_dropped_out(opened: Opened) -> None:
    store, room = await opened(LIMIT), begun()
    await append(store, room.events)
    await append(store, forked(room, 9, message))
    ends = await store.forward_extremities(room.room_id)
    async with store.database.connection() as conn:
        await conn.execute("UPDATE rooms SET forward_extremities = forward_extremities[2:]")
    await rebuild(store.database, room.room_id, server_name=SERVER)
    assert await store.forward_extremities(room.room_id) == ends
    assert [finding async for finding in verify(store.database, server_name=SERVER)] == []


async def test_two_writers_keep_to_the_limit(dsn: str) -> None:
    """Each plans on what it knows; what is out of date by then is planned again."""
    config = storage.Config(forward_extremities_max=LIMIT)
    async with (
        storage.open(dsn, server_name=SERVER, instance_name="one", config=config) as one,
        storage.open(dsn, server_name=SERVER, instance_name="two", config=config) as two,
    ):
        room = begun()
        await append(one, room.events)
        forks = [*forked(room, 15, message), *forked(room, 15, invite)]
        await asyncio.gather(
            *((one, two)[number % 2].append([event.pdu]) for number, event in enumerate(forks))
        )
        ends: set[EventId] = await one.forward_extremities(room.room_id)
        assert len(ends) == LIMIT
        await is_sound(two, room, room.events)
