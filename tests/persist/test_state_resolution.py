"""State resolution in the writer equals resolution of the whole states.

It takes little work for each further event, and runs in turns.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from random import Random
from types import SimpleNamespace

import pytest

import storage
from storage import Store
from storage.event.versions import version_of
from storage.maintenance.verify import verify
from storage.persist.commit import retry
from storage.persist.commit.group_commit import SlowRooms
from storage.persist.commit.requests import AppendRequest, WriteBatch
from storage.persist.model import change_set as planning_time
from storage.persist.model.change_set import ChangeSet, TimeSlice
from storage.persist.model.resolution_records import ResolutionRecord
from storage.persist.plan import state_resolution
from storage.testing import BuiltEvent, RoomBuilder

SERVER = "s1.test"
ADMIN, MODERATOR = "@admin:s2.test", "@mod:s3.test"
VERSIONS = [str(number) for number in range(1, 13)]
TOGETHER = 20


def begun(version: str, seed: int) -> RoomBuilder:
    room = RoomBuilder(version, seed=seed, sign=False)
    room.start(ADMIN, users={MODERATOR: 50})
    room.join(MODERATOR)
    for number in range(6):
        room.join(f"@m{number}:s2.test")
    return room


def act(branch: RoomBuilder, rng: Random) -> None:
    """An event of any kind that resolution cares for; nothing if the state does not allow it."""
    sender = rng.choice((ADMIN, ADMIN, MODERATOR, "@m1:s2.test"))
    target = f"@m{rng.randrange(8)}:s2.test"
    level = rng.choice((0, 10, 50, 60))
    kind = rng.randrange(9)
    try:
        if kind <= 2:
            branch.power_levels(sender, users={rng.choice((MODERATOR, target)): level})
        elif kind == 3:
            rng.choice((branch.ban, branch.kick))(sender, target)
        elif kind == 4:
            branch.join(target)
        elif kind == 5:
            branch.join_rules(sender, rng.choice(("public", "invite")))
        elif kind == 6:
            branch.unban(sender, target)
        elif kind == 7:
            branch.topic(sender, f"topic {rng.random()}")
        else:
            branch.message(sender)
    except ValueError:
        return


def grown(version: str, seed: int, length: int) -> RoomBuilder:
    """A room with three branches, which are merged and forked again now and then."""
    rng = Random(seed)
    room = begun(version, seed)
    branches = list(room.fork(3))
    for _ in range(length):
        branch = rng.choice(branches)
        if rng.random() < 0.06:
            other = rng.choice(branches)
            branch.merge(other)
        elif rng.random() < 0.04:
            branches[rng.randrange(3)] = branch.fork(1)[0]
        act(branch, rng)
    return room


def batches(events: list[BuiltEvent], rng: Random) -> Iterator[list[BuiltEvent]]:
    """Yield the events a few at a time, parents and auth events first.

    The order is random, and stays on a branch for a while.
    """
    left = {event.event_id: event for event in events}
    while left:
        batch: list[BuiltEvent] = []
        newest = rng.random() < 0.5
        for _ in range(rng.choice((1, 2, 5, 9))):
            ready = [
                one
                for one in left.values()
                if left.keys().isdisjoint((*one.prev_events, *one.auth_events))
            ]
            if ready:
                batch.append(ready[-1] if newest else rng.choice(ready))
                del left[batch[-1].event_id]
        yield batch


@pytest.mark.parametrize(
    "version, aside",
    [*((version, False) for version in VERSIONS), ("2", True), ("11", True), ("12", True)],
)
async def test_comes_to_what_resolution_of_the_whole_states_comes_to(
    dsn: str, monkeypatch: pytest.MonkeyPatch, version: str, *, aside: bool
) -> None:
    """Compare the state before each event, and the current state after each batch.

    Also where each resolution makes its room a heavy one.
    """
    if aside:
        monkeypatch.setattr(retry, "HEAVY_SECONDS", 0.0)
    continued = 0
    async with storage.open(dsn, server_name=SERVER) as store:
        for seed in range(2):
            room, rng = grown(version, seed, 60), Random(seed)
            for batch in batches(room.events, rng):
                for result in await store.append(
                    [event.pdu for event in batch], room_version=version
                ):
                    assert result.outcome in ("stored", "soft_failed"), result
                ends = await store.forward_extremities(room.room_id)
                current = await store.current_state(room.room_id)
                assert dict(current) == dict(room.at(*sorted(ends)).state)
                continued += len(records(store))
            for event in room.events[1:]:
                before = await store.state_before(event.event_id)
                assert dict(before) == dict(room.at(*event.prev_events).state)
    assert (continued > 0) == (version_of(version).state_resolution != "v1")


def records(store: Store) -> list[ResolutionRecord]:
    return [record for known in store.writer.caches.records.values() for record in known]


def chains(length: int, *, first: int) -> tuple[list[bytes], list[bytes]]:
    """Return the beginning of a room, and two chains of power levels.

    Some of the first come first, then both in turn, then the rest of the second.
    """
    room = RoomBuilder("11", seed=1, sign=False, exact=False)
    room.start(ADMIN)
    beginning = len(room.events)
    one, other = room.fork(2)
    made: tuple[list[bytes], list[bytes]] = [], []
    for number in range(length):
        for branch, pdus in zip((one, other), made, strict=True):
            pdus.append(branch.power_levels(ADMIN, users={"@x:s2.test": number % 50}).pdu)
    mixed = [pdu for pair in zip(made[0][first:], made[1], strict=False) for pdu in pair]
    return room.pdus[:beginning], [*made[0][:first], *mixed, *made[1][length - first :]]


async def work(dsn: str, length: int, first: int) -> list[dict[str, int]]:
    """Of each of the last batches: auth checks, statements, and steps of resolutions."""
    beginning, attack = chains(length, first=first)
    found: list[dict[str, int]] = []
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(beginning, room_version="11")
        for at in range(0, len(attack), TOGETHER):
            await store.append(attack[at : at + TOGETHER])
            checks = sum(record.resolution.ledger.checks for record in records(store))
            found.append(
                {"checks": checks, "statements": store.database.measures.writer_statements}
            )
    changes = [
        {name: after[name] - before[name] for name in after} for before, after in pairwise(found)
    ]
    return changes[-3:]


@pytest.mark.parametrize("version", ["1", "2", "12"])
async def test_a_store_that_remembers_nothing_resolves(dsn: str, version: str) -> None:
    """All that a resolution reads has to be loaded."""
    room = begun(version, seed=3)
    one, two = room.fork(2)
    for branch, level in ((one, 10), (two, 60)):
        branch.power_levels(ADMIN, users={MODERATOR: level})
        branch.topic(ADMIN, f"topic {level}")
        branch.ban(ADMIN, f"@m{level // 10}:s2.test")
    *held, last = room.events
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append([event.pdu for event in held], room_version=version)
    one.merge(two)
    merging = one.message(ADMIN)
    async with storage.open(dsn, server_name=SERVER) as store:
        results = await store.append([last.pdu, merging.pdu])
        assert [result.outcome for result in results] == ["stored", "stored"]
        assert [str(finding) async for finding in verify(store.database, server_name=SERVER)] == []


@pytest.mark.parametrize("share", [0, 2])
async def test_the_work_for_an_event_does_not_grow_with_the_chain(
    dsn: str, another_dsn: str, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """Chains that arrive in turn, and of which one is half ahead."""
    monkeypatch.setattr(retry, "HEAVY_SECONDS", 3600.0)
    short = await work(dsn, 60, 60 * share // 4)
    long = await work(another_dsn, 240, 240 * share // 4)
    for name in ("checks", "statements"):
        least, most = max(one[name] for one in short), max(one[name] for one in long)
        assert most <= least + 2, (name, short, long)
    assert max(one["checks"] for one in long) <= 3 * TOGETHER


def bans(length: int) -> tuple[list[bytes], list[bytes]]:
    """The beginning of a room, and so many bans on twenty branches, in turn."""
    room = RoomBuilder("11", seed=1, sign=False, exact=False)
    room.start(ADMIN)
    for number in range(length):
        room.join(f"@m{number}:s2.test")
    branches = room.fork(20)
    beginning = len(room.events)
    for number in range(length):
        branches[number % 20].ban(ADMIN, f"@m{number}:s2.test")
    return room.pdus[:beginning], room.pdus[beginning:]


async def calls(dsn: str, length: int) -> int:
    """Calls of functions, in Python and in C, for the last batch of so many bans."""
    beginning, attack = bans(length)
    seen: Counter[str] = Counter()
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(beginning, room_version="11")
        for at in range(0, length - TOGETHER, TOGETHER):
            await store.append(attack[at : at + TOGETHER])
        sys.setprofile(lambda _, kind, __: seen.update((kind,)))
        try:
            results = await store.append(attack[-TOGETHER:])
        finally:
            sys.setprofile(None)
        assert {result.outcome for result in results} == {"stored"}
    return seen["call"] + seen["c_call"]


async def test_the_work_for_a_ban_does_not_grow_with_the_banned(
    dsn: str, another_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ban is merged with 19 states without it.

    The audiences of its branch are far from the current one.
    """
    monkeypatch.setattr(retry, "HEAVY_SECONDS", 3600.0)
    monkeypatch.setattr(retry, "SLICE_SECONDS", 3600.0)
    few, many = await calls(dsn, 100), await calls(another_dsn, 300)
    assert many <= 1.5 * few, (few, many)


@pytest.mark.parametrize("turn, least, most", [(0.0, 120, 10_000), (3600.0, 0, 0)])
async def test_a_resolution_lets_others_have_the_event_loop(
    dsn: str, monkeypatch: pytest.MonkeyPatch, turn: float, least: int, most: int
) -> None:
    """The first event of the second chain must resolve the whole first one.

    With turns of no length, other appends run after each step.
    """
    seen: list[ChangeSet] = []

    async def counted(change_set: ChangeSet) -> None:
        seen.append(change_set)
        await others(change_set)

    others = retry._others
    monkeypatch.setattr(retry, "_others", counted)
    monkeypatch.setattr(retry, "HEAVY_SECONDS", 3600.0)
    monkeypatch.setattr(retry, "SLICE_SECONDS", turn)
    beginning, attack = chains(60, first=60)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(beginning, room_version="11")
        await store.append(attack[:60])
        seen.clear()
        [result] = await store.append(attack[60:61])
        assert result.outcome == "stored"
    assert least <= len(seen) <= most


async def test_other_rooms_go_on_while_one_is_heavy(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append to another room returns while the heavy room has many events left.

    The heavy room's events keep their order.
    """
    monkeypatch.setattr(retry, "HEAVY_SECONDS", 0.0)
    beginning, attack = chains(80, first=40)
    other = RoomBuilder("11", seed=2, sign=False)
    other.start("@a:s1.test")
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append([*beginning, *other.pdus], room_version="11")
        attacking = [
            asyncio.create_task(store.append(attack[at : at + TOGETHER]))
            for at in range(0, len(attack), TOGETHER)
        ]
        while len(store.writer._slow_rooms) < 2:  # noqa: ASYNC110  # the writer tells nobody
            await asyncio.sleep(0)
        for number in range(5):
            [result] = await store.append([other.message("@a:s1.test", str(number)).pdu])
            assert result.outcome == "stored"
        assert not any(task.done() for task in attacking[-2:])
        results = [result for task in attacking for result in await task]
        assert {result.outcome for result in results} == {"stored"}
        positions = [result.stream_ordering or 0 for result in results]
        assert positions == sorted(positions)
        assert store.writer.queued == 0


async def test_names_of_an_event_that_is_left_for_the_lane_are_stored(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event's user got a nid before resolution of the current state began.

    Without the event that plan has nothing to write.
    """
    monkeypatch.setattr(retry, "HEAVY_SECONDS", 0.0)
    monkeypatch.setattr(TimeSlice, "is_used_up", True)
    monkeypatch.setattr(TimeSlice, "is_long", lambda *_: True)
    room = begun("11", seed=5)
    one, two = room.fork(2)
    one.power_levels(ADMIN, users={MODERATOR: 10})
    two.power_levels(ADMIN, users={MODERATOR: 60})
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append([event.pdu for event in room.events], room_version="11")
        for number in range(5):
            for user_id in (f"@new{number}:s4.test", f"@new{number + 1}:s4.test"):
                [result] = await store.append([one.join(user_id).pdu])
                assert result.outcome == "stored"
                assert ("m.room.member", user_id) in await store.current_state(room.room_id)
        assert [str(finding) async for finding in verify(store.database, server_name=SERVER)] == []


async def test_a_busy_machine_makes_no_room_heavy(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small resolution that waits long for a processor leaves its room where it is."""
    added: list[AppendRequest] = []

    def noted(self: SlowRooms, job: AppendRequest) -> None:
        added.append(job)
        add(self, job)

    add = SlowRooms.add
    seconds = count()
    monkeypatch.setattr(
        state_resolution,
        "time",
        SimpleNamespace(perf_counter=lambda: next(seconds), thread_time=time.thread_time),
    )
    monkeypatch.setattr(retry, "HEAVY_SECONDS", 0.5)
    monkeypatch.setattr(SlowRooms, "add", noted)
    beginning, attack = chains(8, first=4)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(beginning, room_version="11")
        results = await store.append(attack)
        assert {result.outcome for result in results} == {"stored"}
        assert len(store.writer.caches.resolutions) > 0
    assert added == []


async def test_an_append_behind_a_heavy_one_is_written_at_once(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what takes long to resolve is written in small parts."""
    monkeypatch.setattr(retry, "HEAVY_SECONDS", 0.0)
    sizes: list[int] = []

    async def counted(self: retry.WriteAttempts, plan: WriteBatch) -> None:
        sizes.append(plan.size)
        await send(self, plan)

    send = retry.WriteAttempts.send
    room = begun("11", 1)
    beginning = len(room.events)
    one, other = room.fork(2)
    for number in range(20):
        for branch in (one, other):
            branch.power_levels(ADMIN, users={MODERATOR: number})
    one.merge(other)
    heavy = len(room.events)
    for number in range(60):
        one.message(ADMIN, str(number))
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus[:beginning], room_version="11")
        monkeypatch.setattr(retry.WriteAttempts, "send", counted)
        answers = await asyncio.gather(
            store.append(room.pdus[beginning:heavy]), store.append(room.pdus[heavy:])
        )
        assert {result.outcome for results in answers for result in results} == {"stored"}
    assert sizes[-1] == 60
    assert max(sizes[:-1]) <= planning_time.SLOW_ROOM_EVENTS_MIN


async def test_a_heavy_room_of_two_stores_is_stored_whole(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of the lane are refused as others are, and made again.

    Both rooms have new users at once.
    """
    monkeypatch.setattr(retry, "HEAVY_SECONDS", 0.0)
    rooms = [begun("11", seed) for seed in (1, 2)]
    branches = [room.fork(2) for room in rooms]
    for number in range(12):
        for one, other in branches:
            one.power_levels(ADMIN, users={MODERATOR: number})
            other.ban(ADMIN, f"@banned{number}:s2.test")
            other.join(f"@new{number}:s2.test")
    async with (
        storage.open(dsn, server_name=SERVER, instance_name="one") as first,
        storage.open(dsn, server_name=SERVER, instance_name="two") as second,
    ):
        for room in rooms:
            await first.append(room.pdus[:13], room_version="11")
        parts = [
            (store, room.pdus[at : at + 9])
            for room in rooms
            for at in range(0, len(room.pdus), 9)
            for store in (first, second)
        ]
        answers = await asyncio.gather(
            *(store.append(pdus, room_version="11") for store, pdus in parts)
        )
        assert {result.outcome for results in answers for result in results} <= {
            "stored",
            "duplicate",
            "missing_parents",
            "soft_failed",
        }
        for room in rooms:
            results = await first.append(room.pdus)
            assert {result.outcome for result in results} <= {"stored", "duplicate", "soft_failed"}
            ends = await first.forward_extremities(room.room_id)
            assert dict(await first.current_state(room.room_id)) == dict(
                room.at(*sorted(ends)).state
            )
        assert [finding async for finding in verify(first.database, server_name=SERVER)] == []
