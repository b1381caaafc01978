"""A bad PDU never fails its batch: mutants among the good events of other rooms, and of their own.

Some of the good events have an `unsigned` that other servers may have written. No constraint of the
database has to refuse anything.

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
from tests.persist.hostile_pdus import bad_unsigned, hostile
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
        """Return mutants and hostile PDUs, half of each."""
        return [self._bad(f"$mutant{first + number}:s9.test") for number in range(count)]

    def _bad(self, name: str) -> bytes | dict[str, Any]:
        room = self.rng.choice(self.sound if self.rng.random() < 0.3 else self.wild)
        base = self._base(room)
        if self.rng.random() < 0.5:
            return mutant(self.rng, base, name)
        recent = self.rng.choice((room, *self.wild)).events[-20:]
        ids = [name, *(event.event_id for event in recent)]
        return hostile(self.rng, base, name, room.version, ids)

    def _base(self, room: RoomBuilder) -> dict[str, Any]:
        if room in self.sound:
            side = room.at(room.events[-1])
            return dict(side.message(side.user(3), "mallory").json)
        event = self.rng.choice(room.events)
        if self.rng.random() < 0.5:
            side = room.at(room.events[-1])
            kind = self.rng.randrange(3)
            event = (
                side.topic(side.user(1), "x")
                if kind == 0
                else side.message(side.user(1), "x")
                if kind == 1
                else side.join(side.user(4))
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
    assert store.measures.unwritable_events == 0
    assert await findings(store) == []


async def assert_stored(
    store: Store, bad: list[Any], good: list[BuiltEvent], version: str | None
) -> None:
    """Append the good ones among the bad ones, in their order."""
    rng = random.Random(len(bad))
    places = sorted(rng.sample(range(len(bad) + len(good)), len(good)))
    batch, left = list(bad), list(good)
    for place in places:
        event = left.pop(0)
        is_odd = rng.random() < 0.3
        batch.insert(place, bad_unsigned(rng, dict(event.json)) if is_odd else event.pdu)
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


@pytest.mark.parametrize("case", ["authoriser", "levels"])
@pytest.mark.parametrize("version", ["8", "12"])
async def test_a_nul_in_the_reason_of_a_rejection(store: Store, version: str, case: str) -> None:
    """The reason quotes values of the content."""
    room = RoomBuilder(version, seed=1, sign=False, checked=False)
    room.start(room.user(1), join_rule="public", users={room.user(2): 100})
    room.join(room.user(2))
    if case == "authoriser":
        room.join_rules(room.user(1), "restricted")
        content: dict[str, Any] = {
            "membership": "join",
            "join_authorised_via_users_server": "@\0:x",
        }
        bad = room.state_event(room.user(3), "m.room.member", content, room.user(3))
    else:
        levels = {"users": {room.user(2): 100}, "events": {"a\0b": 101}}
        bad = room.state_event(room.user(2), "m.room.power_levels", levels)
    results = await store.append([event.pdu for event in room.events])
    assert [one.outcome for one in results] == ["stored"] * (len(results) - 1) + ["rejected"]
    kept = await store.event(bad.event_id)
    assert kept is not None
    assert "\ufffd" in str(kept.rejected)
    assert await findings(store) == []
