"""The outbox: events of local users in order, the servers of each, and no event skipped."""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

import storage
from storage import EventId, Outgoing, Store
from storage.event import event_id, sign
from storage.ids import server_name_of
from storage.streams.position_poller import follow_once
from storage.testing import SHAPES, BuiltEvent, RoomBuilder, build_room, signing_key
from tests.postgres import SQL_WAITING
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, ids, new_room

QUIET = storage.Config(follow_ms=3_600_000)
EVERYTHING = 10_000
THIRD = "@user3:s3.test"

HOLD = """
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.event_id = '{held}' THEN
        PERFORM pg_advisory_xact_lock(7);
    END IF;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON events DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION hold();
"""


def servers_of(events: Iterable[Outgoing]) -> dict[str, set[str]]:
    return {one.event_id: set(one.servers) for one in events}


def joined(room: RoomBuilder, event: BuiltEvent) -> set[str]:
    """Return the servers that are joined before or after an event, by its two states."""
    return {
        server_name_of(key)
        for state in (event.state_before, event.state_after)
        for (type_, key), event_id in state.items()
        if type_ == "m.room.member" and room.event(event_id).content.get("membership") == "join"
    }


def expected(room: RoomBuilder, event: BuiltEvent) -> set[str]:
    target = {server_name_of(event.state_key or "")} if event.type == "m.room.member" else set()
    return (joined(room, event) | target) - {"s1.test"}


async def test_local_events_come_in_order_with_the_joined_servers(store: Store) -> None:
    room = new_room(members=[LOCAL])
    alone = room.message(ADMIN, "alone")
    invite = room.invite(ADMIN, REMOTE)
    invited = room.message(LOCAL, "not for the invited")
    join = room.join(REMOTE)
    said = room.message(LOCAL, "hello")
    room.message(REMOTE, "theirs")
    kick = room.kick(ADMIN, REMOTE)
    after = room.message(ADMIN, "after")
    ban = room.ban(ADMIN, THIRD)
    await deliver(store, room)
    found = await store.outbox(0, EVERYTHING)
    local = [one for one in room.events if one.sender in (ADMIN, LOCAL)]
    assert ids(found) == ids(local)  # type: ignore[arg-type]  # both have an event_id
    servers = servers_of(found)
    assert servers[alone.event_id] == servers[invited.event_id] == servers[after.event_id] == set()
    assert servers[invite.event_id] == servers[said.event_id] == {"s2.test"}
    assert (servers[kick.event_id], servers[ban.event_id]) == ({"s2.test"}, {"s3.test"})
    assert join.event_id not in servers
    assert {one.room_id for one in found} == {room.room_id}
    stored = await store.events(ids(local))
    assert [one.position for one in found] == [
        stored[one.event_id].stream_ordering for one in local
    ]
    assert found.upto == store.streams["events"].linear()


async def test_a_server_that_has_signed_an_invite_is_left_out_unless_it_is_in_the_room(
    store: Store,
) -> None:
    """It got the invite by a request of its own. Damaged bytes tell nothing, and block nothing."""
    room = new_room(members=[LOCAL])

    def invited(user: str, *servers: str) -> EventId:
        pdu = room.invite(ADMIN, user).json
        for server in servers:
            pdu = sign(pdu, room.version, server, signing_key(server))
        signed[pdu_id := EventId(event_id(pdu, room.version))] = pdu
        return pdu_id

    signed: dict[EventId, dict[str, Any]] = {}
    by_us = invited(REMOTE, "s1.test")
    by_another = invited("@user4:s4.test", "s1.test", "s2.test")
    by_both = invited(THIRD, "s1.test", "s3.test")
    room.join(THIRD)
    inside = invited("@second:s3.test", "s1.test", "s3.test")
    damaged = invited("@user5:s5.test", "s1.test", "s5.test")
    pdus = [signed.get(one.event_id, one.json) for one in room.events]
    await store.append(pdus, room_version=room.version)
    servers = servers_of(await store.outbox(0, EVERYTHING))
    assert servers[by_us] == {"s2.test"}
    assert servers[by_another] == {"s4.test"}
    assert servers[by_both] == set()
    assert servers[inside] == {"s3.test"}
    assert servers[damaged] == {"s3.test"}
    async with store.database.connection() as conn:
        await conn.execute("UPDATE events SET json = '\\x00' WHERE event_id = $1::text", damaged)
    assert servers_of(await store.outbox(0, EVERYTHING))[damaged] == {"s3.test", "s5.test"}


async def test_it_goes_on_from_a_position(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    for number in range(5):
        room.message(REMOTE, f"theirs {number}")
        room.message(LOCAL, f"ours {number}")
    await deliver(store, room)
    whole = await store.outbox(0, EVERYTHING)
    position = 0
    paged: list[Outgoing] = []
    while page := await store.outbox(position, 3):
        assert (len(page) == 3) == (page.upto == page[-1].position < whole.upto)
        paged += page
        position = page.upto
    assert paged == whole
    assert position == whole.upto
    assert (await store.outbox(position, 3)).upto == position
    assert (await store.outbox(position + 1_000, 3)).upto == position + 1_000
    assert await store.outbox(0, 0) == []


async def test_a_long_range_of_others_is_passed_in_steps(dsn: str) -> None:
    async with storage.open(
        dsn, server_name="s1.test", config=replace(QUIET, traversal_rows_max=4)
    ) as store:
        room = new_room(members=[REMOTE])
        for number in range(20):
            room.message(REMOTE, f"theirs {number}")
        last = room.message(ADMIN, "ours")
        await deliver(store, room)
        position, steps = 0, 0
        found: list[Outgoing] = []
        while position < store.streams["events"].linear():
            page = await store.outbox(position, 100)
            assert page.upto > position
            found += page
            position, steps = page.upto, steps + 1
        assert found[-1].event_id == last.event_id
        assert 6 <= steps <= 10


async def test_what_is_not_sent(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    before = room.message(LOCAL, "history")
    start = room.message(LOCAL, "start")
    await deliver(store, room)
    branch, main = room.at(start), room.at(start)
    kick = main.kick(ADMIN, LOCAL)
    soft_failed = branch.message(LOCAL, "on a branch without the kick")
    rejected = main.message(LOCAL, "no member", expected="rejected")
    outcomes = await append(store, kick, soft_failed, rejected)
    assert outcomes == ["stored", "soft_failed", "rejected"]
    found = servers_of(await store.outbox(0, EVERYTHING))
    assert before.event_id in found
    assert found.keys().isdisjoint({soft_failed.event_id, rejected.event_id})


async def test_history_is_not_sent_again(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    history = room.message(LOCAL, "sent long ago")
    recent = room.message(LOCAL, "recent")
    lost = {history.event_id, recent.event_id}
    await store.append(
        [one.pdu for one in room.events if one.event_id not in lost], room_version=room.version
    )
    assert await append(store, recent, state_before={
        recent.event_id: list(recent.state_before.values())
    }) == ["stored"]  # fmt: skip
    assert await append(store, history, origin="backfill") == ["stored"]
    assert await append(store, room.message(LOCAL, "live, after it")) == ["stored"]
    found = servers_of(await store.outbox(0, EVERYTHING))
    assert recent.event_id in found
    assert history.event_id not in found


@pytest.mark.parametrize("visibility", ["joined", "invited", "shared", "world_readable"])
async def test_the_servers_do_not_depend_on_history_visibility(
    store: Store, visibility: str
) -> None:
    room = new_room(visibility=visibility, members=[REMOTE, THIRD])
    both = room.message(ADMIN, "both")
    room.leave(THIRD)
    room.invite(ADMIN, THIRD)
    one = room.message(ADMIN, "one")
    opened = room.history_visibility(ADMIN, "world_readable")
    room.join(THIRD)
    room.invite(ADMIN, "@user4:s4.test")
    again = room.message(ADMIN, "again")
    await deliver(store, room)
    found = servers_of(await store.outbox(0, EVERYTHING))
    assert found[both.event_id] == found[again.event_id] == {"s2.test", "s3.test"}
    assert found[one.event_id] == found[opened.event_id] == {"s2.test"}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", ["busy_federation", "fork_heavy", "join_leave_storm"])
async def test_random_rooms_equal_the_states(store: Store, shape: str, seed: int) -> None:
    room = build_room(SHAPES[shape], 150, seed=seed, sign=False)
    results = await store.append(room.pdus, room_version=room.version)
    stored = {one.event_id for one in results if one.outcome in ("stored", "redacted")}
    found = servers_of(await store.outbox(0, EVERYTHING))
    local = [
        one
        for one in room.events
        if one.event_id in stored and server_name_of(one.sender) == "s1.test"
    ]
    assert found.keys() == {one.event_id for one in local}
    assert len(found) > 5
    for event in local:
        assert found[event.event_id] == expected(room, event), event


async def test_a_server_that_came_and_went_often(store: Store) -> None:
    """Its old ranges are in past_visibility."""
    room = new_room(members=[])
    wanted: dict[str, set[str]] = {}
    for number in range(40):
        room.join(REMOTE)
        inside = room.message(ADMIN, f"inside {number}")
        room.leave(REMOTE)
        outside = room.message(ADMIN, f"outside {number}")
        wanted |= {inside.event_id: {"s2.test"}, outside.event_id: set()}
    await deliver(store, room)
    async with store.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM past_visibility") > 0
    assert servers_of(await store.outbox(0, EVERYTHING)).items() >= wanted.items()


async def test_a_constant_number_of_statements(store: Store, statements: StatementLog) -> None:
    for seed in range(5):
        room = new_room(members=[LOCAL, REMOTE], seed=seed)
        for number in range(10):
            room.message(ADMIN, f"{number}")
        await deliver(store, room)
    statements.take()
    assert len(await store.outbox(0, EVERYTHING)) > 50
    assert len(statements.take()) == 1


async def test_an_event_that_another_writer_holds_open_is_never_skipped(dsn: str) -> None:
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET) as main,
        storage.open(dsn, server_name="s1.test", instance_name="slow", config=QUIET) as slow,
    ):
        rooms = [new_room(members=[LOCAL], seed=seed) for seed in (1, 2)]
        for room in rooms:
            await deliver(main, room)
        await follow_once(slow.database, slow.streams)
        connection = await asyncpg.connect(dsn)
        try:
            held = rooms[0].message(ADMIN, "held")
            await connection.execute(HOLD.format(held=held.event_id))
            before = await main.outbox(0, EVERYTHING)
            await connection.execute("SELECT pg_advisory_lock(7)")
            writing = asyncio.create_task(slow.append([held.pdu]))
            while not await connection.fetchval(SQL_WAITING):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            quick = rooms[1].message(ADMIN, "quick")
            assert await append(main, quick) == ["stored"]
            await follow_once(main.database, main.streams)
            between = await main.outbox(before.upto, EVERYTHING)
            assert list(between) == []
            assert [one.event_id for one in await main.outbox(0, EVERYTHING)] == [
                one.event_id for one in before
            ]
            await connection.execute("SELECT pg_advisory_unlock(7)")
            await writing
        finally:
            await connection.close()
        await follow_once(slow.database, slow.streams)
        after = await main.outbox(between.upto, EVERYTHING)
        assert [one.event_id for one in after] == [held.event_id, quick.event_id]


async def test_a_closed_writer_does_not_hold_it_back(dsn: str) -> None:
    """No process polls meanwhile: the call moves the position of the closed one."""
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as main:
        async with storage.open(
            dsn, server_name="s1.test", instance_name="closed", config=QUIET
        ) as closed:
            await deliver(closed, new_room(seed=1))
        room = new_room(members=[LOCAL])
        for number in range(3):
            said = room.message(LOCAL, f"{number}")
            await deliver(main, room)
            async with asyncio.timeout(60):  # until Postgres has ended the sessions
                while said.event_id not in servers_of(await main.outbox(0, EVERYTHING)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_the_own_idle_position_does_not_hold_it_back(
    dsn: str, statements: StatementLog
) -> None:
    async with (
        storage.open(dsn, server_name="s1.test", config=QUIET, observer=statements) as sender,
        storage.open(dsn, server_name="s1.test", instance_name="other", config=QUIET) as other,
    ):
        room = new_room(members=[LOCAL])
        await deliver(other, room)
        statements.take()
        assert list(servers_of(await sender.outbox(0, EVERYTHING))) == ids(room.events)
        assert len(statements.take()) == 2, "besides those of the poller"
        assert len(await sender.outbox(0, EVERYTHING)) == len(room.events)
        assert len(statements.take()) == 1


async def test_two_writers_and_a_reader_that_runs_all_the_time(dsn: str) -> None:
    config = replace(QUIET, follow_ms=5)
    async with (
        storage.open(dsn, server_name="s1.test", config=config) as main,
        storage.open(dsn, server_name="s1.test", instance_name="second", config=config) as second,
    ):
        rooms = {store: new_room(seed=seed) for seed, store in enumerate((main, second))}
        for store, room in rooms.items():
            await deliver(store, room)
        rng = random.Random(5)

        async def write(store: Store) -> None:
            for number in range(40):
                assert await append(store, rooms[store].message(ADMIN, f"{number}")) == ["stored"]
                await asyncio.sleep(rng.random() * 0.01)

        writing = asyncio.gather(write(main), write(second))
        position = 0
        found: list[Outgoing] = []
        wanted = sum(len(room.events) for room in rooms.values()) + 80
        async with asyncio.timeout(60):
            while len(found) < wanted:
                page = await main.outbox(position, 7)
                found += page
                position = page.upto
                await asyncio.sleep(0)
        await writing
        positions = [one.position for one in found]
        assert positions == sorted(set(positions))
        assert {one.event_id for one in found} == {
            one.event_id for room in rooms.values() for one in room.events
        }


async def test_the_sender_goes_on_where_it_was(dsn: str) -> None:
    """Read, send, set the cursor: after a restart nothing is sent twice or left out."""
    sent: list[str] = []

    async def send_some(store: Store, limit: int) -> None:
        page = await store.outbox(await store.cursors.get("federation"), limit)
        sent.extend(one.event_id for one in page)
        await store.cursors.set("federation", page.upto)

    room = new_room(members=[LOCAL, OTHER])
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
        await deliver(store, room)
        await send_some(store, 3)
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
        await send_some(store, 100)
        await send_some(store, 100)
    assert sent == ids(room.events)
