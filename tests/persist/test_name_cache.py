"""A full name cache drops all names at once, also between the plan of a batch and its write."""

import asyncio

import pytest

import storage
from storage import Store
from storage.testing import RoomBuilder
from tests.small_limits import cached_entries

SERVER = "s1.test"
NAMES = 300


def crowd(seed: int) -> RoomBuilder:
    """A room of sixty users, two of them local, with a fork whose branches are merged."""
    room = RoomBuilder("11", seed=seed, sign=False)
    admin = f"@admin{seed}:{SERVER}"
    room.start(admin, join_rule="public")
    members = [
        f"@user{seed}x{number}:{SERVER if number == 1 else f's{number}.test'}"
        for number in range(60)
    ]
    for member in members[:40]:
        room.join(member)
    left, right = room.fork(2)
    for number in range(20):
        left.topic(admin, f"left {number}")
        right.join(members[40 + number])
    room.merge(left, right)
    for member in members[:20]:
        room.leave(member)
    return room


async def _deliver(store: Store, room: RoomBuilder, size: int) -> None:
    for at in range(0, len(room.pdus), size):
        results = await store.append(room.pdus[at : at + size])
        assert {result.outcome for result in results} == {"stored"}


async def test_concurrent_appends_while_the_names_do_not_fit(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = [crowd(seed) for seed in range(1, 9)]
    cached_entries(monkeypatch, names=NAMES)
    async with storage.open(dsn, server_name=SERVER) as store:
        await asyncio.gather(
            *(_deliver(store, room, 3 + number) for number, room in enumerate(rooms))
        )
        assert len(store.writer.caches.names.state_key_names) < 2_000
        for room in rooms:
            assert await store.current_state(room.room_id) == dict(room.state)
