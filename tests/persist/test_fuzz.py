"""A bad PDU never fails its batch: mutants among the good events of other rooms, and of their own.

`STORAGE_FUZZ` says how many mutants; the default is for every day.
"""

import os
import random
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

import storage
from storage import Store
from storage.event import content_hash
from storage.persist import Origin
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.rooms import findings
from tests.persist.mutated_pdus import mutant

MUTANTS = int(os.environ.get("STORAGE_FUZZ", "1500"))
MUTANTS_EACH = 30  # of a batch
BATCHES_EACH = 10  # of a set of rooms
SERVER = "s1.test"
ORIGINS: Final[tuple[Origin, ...]] = ("live", "live", "live", "backfill", "outlier")


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


class FuzzedRooms:
    """Rooms of which all events are good, and rooms whose admin sends mutants too.

    In the first only a user without power does.
    """

    def __init__(self, rng: random.Random, number: int) -> None:
        self.rng = rng
        self.number = number
        self.sound = [self._room(place) for place in range(3)]
        self.wild = [self._room(place) for place in range(3, 6)]

    def _room(self, place: int) -> RoomBuilder:
        room = RoomBuilder(str(self.rng.randint(1, 12)), seed=10 * self.number + place, sign=False)
        room.start(room.user(1), join_rule="public")
        for user in (2, 3):
            room.join(room.user(user))
        return room

    def good(self) -> list[BuiltEvent]:
        """Write the next events of the sound rooms."""
        return [self._write(room) for room in self.sound for _ in range(3)]

    def _write(self, room: RoomBuilder) -> BuiltEvent:
        one, other = room.user(1), room.user(2)
        if self.rng.random() < 0.2:
            return room.topic(one, f"topic {len(room.events)}")
        return room.message(self.rng.choice((one, other)), "hello")

    def mutants(self, count: int, first: int) -> list[bytes | dict[str, Any]]:
        return [
            mutant(self.rng, self._base(), f"$mutant{first + number}:s9.test")
            for number in range(count)
        ]

    def _base(self) -> dict[str, Any]:
        if self.rng.random() < 0.3:
            room = self.rng.choice(self.sound)
            side = room.at(room.events[-1])
            return dict(side.message(side.user(3), "mallory").json)
        room = self.rng.choice(self.wild)
        event = self.rng.choice(room.events)
        if self.rng.random() < 0.5:
            side = room.at(room.events[-1])
            event = self.rng.choice(
                (
                    side.topic(side.user(1), "x"),
                    side.message(side.user(1), "x"),
                    side.join(side.user(4)),
                )
            )
        return dict(event.json)


@pytest.mark.timeout(0)
async def test_each_good_event_is_stored_whatever_else_is_in_its_batch(store: Store) -> None:
    rng = random.Random(MUTANTS)
    for number in range(max(1, MUTANTS // (MUTANTS_EACH * BATCHES_EACH))):
        world = FuzzedRooms(rng, number)
        for room in (*world.sound, *world.wild):
            await assert_stored(store, [], room.events, room.version)
        for batch in range(BATCHES_EACH):
            await assert_stored(
                store, world.mutants(MUTANTS_EACH, batch * MUTANTS_EACH), world.good(), None
            )
            await store.append(
                world.mutants(MUTANTS_EACH // 3, 0),
                origin=rng.choice(ORIGINS),
                room_version=str(rng.randint(1, 12)),
            )
        for room in world.sound:
            expected = {
                key: event_id for key, event_id in room.state.items() if key[1] != room.user(3)
            }
            state = await store.current_state(room.room_id)
            assert {key: state.get(key) for key in expected} == expected
    assert await findings(store) == []


async def assert_stored(
    store: Store, bad: list[Any], good: list[BuiltEvent], version: str | None
) -> None:
    """Append the good ones among the bad ones, in their order."""
    places = sorted(random.Random(len(bad)).sample(range(len(bad) + len(good)), len(good)))
    batch, left = list(bad), list(good)
    for place in places:
        batch.insert(place, left.pop(0).pdu)
    results = await store.append(batch, room_version=version)
    assert [(results[place].outcome, results[place].event_id) for place in places] == [
        ("stored", event.event_id) for event in good
    ]


@pytest.mark.parametrize(
    "content",
    [
        {
            "membership": "invite",
            "third_party_invite": {
                "signed": {"mxid": "@a:s1.test", "token": "\0", "signatures": {}}
            },
        },
        {"membership": "join", "join_authorised_via_users_server": "@\0:s1.test"},
        {
            "membership": "\0",
            "displayname": "\0",
            "m.relates_to": {"rel_type": "\0", "event_id": "$\0"},
        },
    ],
)
@pytest.mark.parametrize("version", ["1", "8", "12"])
async def test_a_nul_inside_of_the_content(
    store: Store, version: str, content: dict[str, Any]
) -> None:
    """The auth rules look for state keys that the content names."""
    room = RoomBuilder(version, seed=1, sign=False)
    room.start(room.user(1), join_rule="invite")
    member = room.at(room.events[-1]).join(room.user(1))
    bad = {**member.json, "sender": room.user(2), "state_key": room.user(2), "content": content}
    if "event_id" in bad:
        bad["event_id"] = "$bad:s1.test"
    bad["hashes"] = {"sha256": content_hash(bad)}
    results = await store.append([*room.pdus, bad, {**bad, "room_id": "!\0:s1.test"}])
    assert [result.outcome for result in results] == [
        *["stored"] * len(room.pdus),
        "rejected",
        "invalid",
    ]
    assert await findings(store) == []
