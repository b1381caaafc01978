"""Verification finds nothing in rooms of any shape, however they were delivered."""

import pytest

import storage
from storage.database import Connection
from storage.maintenance.verify.graph import SQL_EXTREMITIES
from storage.testing import (
    ODD_SOME,
    SHAPES,
    RoomBuilder,
    build_room,
    deliver_late,
    deliver_shuffled,
    deliver_with_gap,
    generate_room,
)
from tests.maintenance.rooms import SERVER, deliver, findings

SMALL = ("small_chat", "direct_chat", "join_leave_storm", "fork_heavy", "busy_federation")


@pytest.mark.parametrize("version", ["1", "2", "6", "11", "12"])
@pytest.mark.parametrize("shape", SMALL)
async def test_nothing_is_found_in_a_room(dsn: str, shape: str, version: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        for seed, odd in enumerate((None, ODD_SOME)):
            chosen = SHAPES[shape] if odd is None else SHAPES[shape].replaced(odd=odd)
            await deliver(store, generate_room(chosen, 200, seed=seed, version=version, sign=False))
        assert await findings(store) == []


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_found_after_gaps_and_backfill(dsn: str, seed: int) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        shape = SHAPES["fork_heavy" if seed % 2 else "small_chat"]
        await deliver(
            store,
            deliver_with_gap(build_room(shape, 160, seed=seed, sign=False), 40 + seed, 90),
            batch=7,
        )
        await deliver(
            store, deliver_late(build_room(shape, 120, seed=10 + seed, sign=False), seed), batch=11
        )
        await deliver(
            store,
            deliver_shuffled(build_room(shape, 80, seed=20 + seed, sign=False), seed),
            batch=100,
        )
        assert await findings(store) == []


async def test_nothing_is_found_in_an_empty_database(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        assert await findings(store) == []


async def test_an_unknown_room(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        with pytest.raises(storage.UnknownRoom):
            await findings(store, "!nowhere:s1.test")


async def test_the_ends_of_a_room_are_found_by_a_join(conn: Connection) -> None:
    """What is left out is no list to go through for each event: that took minutes among 300,000."""
    plan = "\n".join(await conn.fetchvals("EXPLAIN " + SQL_EXTREMITIES.replace("$1::int", "1")))
    assert "Anti Join" in plan
    assert "SubPlan" not in plan


@pytest.mark.parametrize("versions", [("1", "11"), ("12", "11"), ("11", "1"), ("3", "12")])
async def test_an_auth_event_of_a_room_of_another_version(
    dsn: str, versions: tuple[str, str]
) -> None:
    """It is read by the version of its own room."""
    other, room = (
        RoomBuilder(version, seed=seed, sign=False) for seed, version in enumerate(versions, 1)
    )
    for one in (other, room):
        one.start(one.user(1))
    cited = next(event for event in other.events if event.type == "m.room.power_levels")
    member = next(event for event in room.events if event.type == "m.room.member")
    strange = room.message(room.user(1), auth=[member, cited], expected="rejected")
    async with storage.open(dsn, server_name=SERVER) as store:
        results = await store.append([*other.pdus, *room.pdus])
        assert [result.event_id for result in results if result.outcome == "rejected"] == [
            strange.event_id
        ]
        assert await findings(store) == []
