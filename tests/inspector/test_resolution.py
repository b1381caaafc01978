"""Replayed resolutions: equal to what the store has stored, with the right reason in words."""

import pytest

import storage
from storage import Store
from storage.ids import EventId, RoomId
from storage.queries.inspect.resolution import (
    ReplayedResolution,
    Verdict,
    current_values,
    resolution_at,
    resolution_now,
    verdict,
)
from storage.testing import Odd, RoomBuilder, Shape, build_room
from storage.testing.world import ALL_ACTIONS
from tests.maintenance.rooms import SERVER, deliver

ADMIN, MOD, OTHER = (f"@{name}:{SERVER}" for name in ("admin", "mod", "other"))
FORKED = Shape(
    "forked",
    servers=3,
    members=8,
    mix={**ALL_ACTIONS, "topic": 8, "power": 3, "ban": 3, "leave": 2},
    fork_rate=0.3,
    odd=Odd(rejected=0.05, soft_failed=0.05),
)


async def at(store: Store, event_id: str) -> ReplayedResolution:
    return await store.reads.run(lambda conn: resolution_at(conn, EventId(event_id)), snapshot=True)


async def now(store: Store, room_id: str) -> ReplayedResolution:
    return await store.reads.run(lambda conn: resolution_now(conn, RoomId(room_id)), snapshot=True)


@pytest.mark.parametrize("version", ["1", "9", "12"])
async def test_a_replay_comes_to_the_stored_state(store: Store, version: str) -> None:
    room = build_room(FORKED, 150, version=version, seed=3, sign=False)
    await deliver(store, room.generated())
    merges = [event for event in room.events if len(event.prev_events) > 1]
    conflicts = 0
    for event in merges:
        found = await at(store, event.event_id)
        assert found.is_confirmed, verdict(found)
        assert set(found.tips) == set(event.prev_events)
        before = await store.state_before(event.event_id)
        assert all(before.get(key) == value for key, value in found.resolved.items())
        said = verdict(found)
        assert [one.key for one in said.keys] == sorted(found.resolved)
        conflicts += bool(said.keys)
    assert len(merges) > 5
    assert conflicts > 1
    current = await now(store, room.room_id)
    assert current.is_confirmed
    assert set(current.tips) == await store.forward_extremities(room.room_id)


class Fork:
    """A room of two branches, and the event that merges them."""

    def __init__(self, version: str = "11", seed: int = 1) -> None:
        self.room = RoomBuilder(version, seed=seed, checked=False)
        self.room.start(ADMIN, users={MOD: 50} if version == "12" else {ADMIN: 100, MOD: 50})
        self.room.join(MOD)
        self.room.join(OTHER)
        self.left, self.right = self.room.fork(2)

    async def merged(self, store: Store) -> tuple[ReplayedResolution, Verdict]:
        self.room.merge(self.left, self.right)
        merge = self.room.message(ADMIN, "both")
        for event in self.room.events:
            await store.append([event.pdu])
        found = await at(store, merge.event_id)
        assert found.is_confirmed
        return found, verdict(found)


async def test_the_later_topic_wins(store: Store) -> None:
    fork = Fork()
    first = fork.left.topic(ADMIN, "first", ts=1_000)
    second = fork.right.topic(MOD, "second", ts=2_000)
    _, said = await fork.merged(store)
    a, b = first.event_id, second.event_id
    assert said.sentence == (
        "The merge preferred branch 2: it won 1 of 1 conflicted key. "
        f"{MOD}'s m.room.topic won over {ADMIN}'s: same power levels event, later claimed time."
    )
    assert said.won == {a: 0, b: 1}
    [key] = said.keys
    assert key.key == ("m.room.topic", "")
    assert key.values == {a: a, b: b}
    assert (key.resolved, key.stored) == (b, b)
    assert key.sentence == (
        "Both are allowed. Both were sent under the same power levels event, "
        f"and {MOD}'s event has the later claimed time, "
        f"so {MOD}'s event was checked after {ADMIN}'s event, and took the key."
    )


async def test_claimed_times_that_are_far_apart(store: Store) -> None:
    fork = Fork()
    first = fork.left.topic(ADMIN, "first", ts=1_000)
    second = fork.right.topic(ADMIN, "second", ts=20 * 86_400_000)
    _, said = await fork.merged(store)
    [key] = said.keys
    assert key.headline == (
        f"Of two m.room.topic events of {ADMIN}, {second.event_id} won: "
        "same power levels event, later claimed time by 19 days."
    )
    assert "(by 19 days: a sender sets it, so a clock may be wrong)" in key.sentence
    assert key.sentence.endswith(f"was checked after {first.event_id}, and took the key.")


async def test_a_topic_that_the_power_levels_refuse(store: Store) -> None:
    fork = Fork()
    kept = fork.left.topic(ADMIN, "kept", ts=1_000)
    lowered = fork.left.power_levels(ADMIN, users={MOD: 0}, ts=1_500)
    refused = fork.right.topic(MOD, "refused", ts=2_000)
    found, said = await fork.merged(store)
    assert found.resolved[("m.room.topic", "")] == kept.event_id
    topic = next(one for one in said.keys if one.key[0] == "m.room.topic")
    assert topic.sentence.startswith(f"{refused.event_id} of {MOD} was refused: {MOD} has level 0")
    assert f"{MOD}'s m.room.topic was refused: {MOD} has level 0" in said.sentence
    assert topic.sentence.endswith("(event.level).")
    power = next(one for one in said.keys if one.key[0] == "m.room.power_levels")
    assert power.resolved == lowered.event_id
    assert said.won == {lowered.event_id: 2, refused.event_id: 0}


async def test_newer_power_levels_win_over_time(store: Store) -> None:
    fork = Fork()
    fork.left.topic(ADMIN, "old levels, late", ts=9_000)
    fork.right.power_levels(ADMIN, users={OTHER: 1}, ts=1_000)
    new = fork.right.topic(MOD, "new levels, early", ts=2_000)
    _, said = await fork.merged(store)
    topic = next(one for one in said.keys if one.key[0] == "m.room.topic")
    assert topic.resolved == new.event_id
    assert topic.sentence == (
        f"Both are allowed. {MOD}'s event was sent under a newer power levels event "
        f"(the newest against 1 before the newest), so {MOD}'s event was checked after "
        f"{ADMIN}'s event, and took the key."
    )


async def test_more_power_goes_first(store: Store) -> None:
    """So the change of the weaker one, which is allowed after it, stays."""
    fork = Fork()
    fork.left.join_rules(ADMIN, "invite", ts=5_000)
    weak = fork.right.join_rules(MOD, "knock", ts=1_000)
    _, said = await fork.merged(store)
    [rules] = said.keys
    assert rules.resolved == weak.event_id
    assert rules.sentence == (
        f"Both are allowed. {ADMIN} has more power (level 100 against 50), and goes first, "
        f"so {MOD}'s event was checked after {ADMIN}'s event, and took the key."
    )


async def test_a_ban_against_a_change_of_the_banned(store: Store) -> None:
    fork = Fork("12")
    ban = fork.left.ban(ADMIN, MOD, ts=2_000)
    topic = fork.right.topic(MOD, "by the banned", ts=1_000)
    _, said = await fork.merged(store)
    by_key = {one.key: one for one in said.keys}
    lost = by_key["m.room.topic", ""]
    assert lost.resolved is None
    assert lost.sentence.startswith(f"{topic.event_id} of {MOD} was refused: ")
    assert "(sender.not_joined)" in lost.sentence
    assert by_key["m.room.member", MOD].resolved == ban.event_id


async def test_branches_that_agree(store: Store) -> None:
    fork = Fork()
    fork.left.message(ADMIN, "one")
    fork.right.message(MOD, "two")
    found, said = await fork.merged(store)
    assert found.replay is None
    assert said.sentence == "All branches have the same state, so there was nothing to resolve."
    single = verdict(await at(store, fork.room.events[3].event_id))
    assert single.sentence == "There is one parent at most, so there was nothing to resolve."


async def test_a_parent_that_is_missing(store: Store) -> None:
    fork = Fork()
    hidden = fork.left.message(ADMIN, "not delivered")
    fork.right.topic(ADMIN, "delivered")
    fork.room.merge(fork.left, fork.right)
    merge = fork.room.message(ADMIN, "both")
    pdus = [one.pdu for one in fork.room.events if one not in (hidden, merge)]
    await store.append(pdus)
    state = list((await store.current_state(fork.room.room_id)).values())
    [result] = await store.append([merge.pdu], state_before={merge.event_id: state})
    assert result.outcome == "stored"
    said = verdict(await at(store, merge.event_id))
    assert said.sentence.startswith(f"The state after {hidden.event_id} is not stored, ")
    assert said.keys == ()


async def test_a_current_state_of_two_extremities(store: Store) -> None:
    fork = Fork()
    first = fork.left.topic(ADMIN, "first", ts=1_000)
    second = fork.right.topic(MOD, "second", ts=2_000)
    await store.append(fork.room.pdus)
    found = await now(store, fork.room.room_id)
    assert set(found.tips) == {first.event_id, second.event_id}
    assert found.is_confirmed
    key = ("m.room.topic", "")
    values = await store.reads.run(
        lambda conn: current_values(conn, fork.room.room_id, [key, ("m.room.name", "")])
    )
    assert values == {key: second.event_id}


async def test_a_stored_state_that_differs_is_shown(store: Store) -> None:
    fork = Fork()
    first = fork.left.topic(ADMIN, "first", ts=1_000)
    fork.right.topic(MOD, "second", ts=2_000)
    await store.append(fork.room.pdus)
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE current_state SET event_nid = (SELECT event_nid FROM events"
            " WHERE event_id = $1) WHERE state_key_nid = 10",
            first.event_id,
        )
    found = await now(store, fork.room.room_id)
    assert not found.is_confirmed
    [key] = verdict(found).keys
    assert (key.stored, key.resolved == key.stored) == (first.event_id, False)


async def test_unknown_events_and_rooms(store: Store) -> None:
    with pytest.raises(storage.UnknownEvent):
        await at(store, "$nothing")
    with pytest.raises(storage.UnknownRoom):
        await now(store, "!nothing:s1.test")
    fork = Fork()
    await store.append(fork.room.pdus, origin="outlier")
    with pytest.raises(storage.InputError, match="no forward extremity"):
        await now(store, fork.room.room_id)
