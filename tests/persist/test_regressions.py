"""Rooms in which something was wrong once."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.event import sign
from storage.event.hashes import canonical
from storage.maintenance.verify import verify
from storage.testing import BuiltEvent, RoomBuilder, signing_key
from tests.small_limits import cached_entries


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


async def test_an_event_without_parents_is_judged_by_the_empty_state(store: Store) -> None:
    """Its auth events may allow it, the state before it (none) does not."""
    room = RoomBuilder("11", seed=2, checked=False)
    admin = room.user(1)
    room.start(admin)
    await store.append(room.pdus)
    cited = [
        room.state[key]
        for key in (("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.member", admin))
    ]
    alone = room.at().topic(admin, "out of nowhere", prev=[], auth=cited)
    [result] = await store.append([alone.pdu])
    assert (result.outcome, (result.reason or "").partition(":")[0]) == (
        "rejected",
        "room.no_create",
    )
    assert await store.forward_extremities(room.room_id) == {room.events[-2].event_id}


async def test_the_first_membership_of_a_user_beyond_the_last_branch_of_audiences(
    store: Store,
) -> None:
    """Where the numbers near a branch are used up, a state gets an audience number of its own.

    This includes states that are new to the store.
    """
    room = RoomBuilder("11", seed=3)
    admin = room.user(1)
    room.start(admin, history_visibility="invited")
    room.fork(1)[0].message(admin, "the other side")
    invites = [room.invite(admin, "@guest0:s1.test")]
    for number in range(1, 5):  # each time the second of two that go on from the same state
        before = room.fork(1)[0]
        invites += [
            before.invite(admin, f"@guest{number}a:s1.test"),
            room.invite(admin, f"@guest{number}b:s1.test"),
        ]
    for event in room.events:
        await store.append([event.pdu])
    for event in invites:
        assert event.state_key is not None
        assert await store.visible_to_user(event.state_key, [event.event_id]) == {event.event_id}
    assert [finding async for finding in verify(store.database, server_name="s1.test")] == []


async def test_a_room_whose_row_was_forgotten_takes_nothing_stale_with_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rooms than the cache holds, and two writers.

    A version that a writer reads later does not guard what it cached of a room before.
    """
    cached_entries(monkeypatch, rooms=2)
    async with (
        storage.open(dsn, server_name="s1.test", instance_name="one") as one,
        storage.open(dsn, server_name="s1.test", instance_name="two") as two,
    ):
        room = RoomBuilder("11", seed=2)
        admin, other = "@admin:s1.test", "@other:s1.test"
        room.start(admin)
        room.join(other)
        await one.append(room.pdus)
        for seed in range(5, 9):
            another = RoomBuilder("11", seed=seed)
            another.start(admin)
            await one.append(another.pdus)
        await two.append([room.leave(other).pdu])
        await two.append([room.join("@third:s1.test").pdu])
        await one.append([room.join(other).pdu])
        await one.append([room.join("@fourth:s1.test").pdu])
        assert [finding async for finding in verify(one.database, server_name="s1.test")] == []


async def test_a_circle_of_parents_is_invalid(dsn: str) -> None:
    """Version 1 names its own event ids, so two events can name each other as parents."""
    room = RoomBuilder("1", seed=1)
    admin = room.user(1)
    room.start(admin)
    end = room.heads[0]
    state = list(room.state.values())
    first, second = room.message(admin, "a"), room.message(admin, "b")
    one = resigned(room, first, prev=[second.event_id, end])
    other = resigned(room, second, prev=[first.event_id])
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(room.pdus[:-2], room_version="1")
        [stored] = await store.append([one], state_before={first.event_id: state})
        assert stored.outcome == "stored"
        [refused] = await store.append([other])
        assert (refused.outcome, refused.event_id) == ("invalid", second.event_id)
        assert "cycle" in (refused.reason or "")
        assert await store.forward_extremities(room.room_id) == {first.event_id}
        assert await store.backward_extremities(room.room_id) == {second.event_id}


def resigned(room: RoomBuilder, event: BuiltEvent, *, prev: list[str]) -> bytes:
    """The event with other parents, under its own id."""
    pdu = {**event.json, "prev_events": [[parent, {"sha256": "x"}] for parent in prev]}
    return canonical(
        sign({**pdu, "signatures": {}, "hashes": {}}, "1", "s1.test", signing_key("s1.test"))
    )
