"""Most events are left out of the index of times; the search for a time finds them all the same."""

import random
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import storage
from storage import Store
from storage.ids import EventId
from storage.importing import Import, Rejects
from storage.maintenance.archive import archive, rooms_to_archive
from storage.maintenance.purge import purge_history
from storage.persist.model.rows import NO_TIME
from storage.queries.pagination.page import Direction
from storage.rebuild import Rebuilder
from storage.streams.position_poller import follow_once
from storage.testing import (
    BuiltEvent,
    GeneratedEvent,
    GeneratedRoom,
    RoomBuilder,
    deliver_late,
    deliver_with_gap,
)
from tests.maintenance.rooms import SERVER, findings
from tests.postgres import others_ended

FIRST: Final = 1_700_000_000_000
ADMIN, LOCAL, REMOTE = "@user1:s1.test", "@user4:s1.test", "@user2:s2.test"
SQL_REACHED: Final = """
SELECT event_id, in_order_ts FROM events WHERE NOT outlier ORDER BY stream_ordering
"""
SQL_TIMELINE: Final = """
SELECT e.event_id, e.origin_server_ts, e.topological_ordering, e.stream_ordering,
    e.rejected IS NULL AND NOT e.soft_failed AS is_accepted
FROM events e
JOIN rooms r USING (room_nid)
WHERE r.room_id = $1::text AND NOT e.outlier
"""


class TimedRow(NamedTuple):
    event_id: EventId
    origin_server_ts: int
    topological_ordering: int
    stream_ordering: int
    is_accepted: bool


class TimeReachedRow(NamedTuple):
    event_id: EventId
    in_order_ts: int | None


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def reached(store: Store, *events: BuiltEvent) -> list[int | None]:
    """Return the time reached of these events, or of all; None for one in time order."""
    async with store.database.connection() as conn:
        rows = dict(await conn.fetch(SQL_REACHED, row=TimeReachedRow))
    return [rows[one.event_id] for one in events] if events else list(rows.values())


async def append(store: Store, *events: BuiltEvent, **how: Any) -> None:
    results = await store.append([one.pdu for one in events], room_version="11", **how)
    assert all(one.is_stored for one in results)


async def check(store: Store, room: RoomBuilder, tries: int = 60) -> None:
    """Compare searches for the times of events, and those next to them, with all events sorted."""
    async with store.database.connection() as conn:
        rows = await conn.fetch(SQL_TIMELINE, room.room_id, row=TimedRow)
    seen = await store.visible_to_user(LOCAL, [row.event_id for row in rows])
    rows.sort(key=lambda row: row[1:4])
    times = sorted({row.origin_server_ts + step for row in rows for step in (-1, 0, 1)})
    for at in [NO_TIME, -NO_TIME - 1, *random.Random(tries).sample(times, tries)]:
        for direction in DIRECTIONS:
            order = rows if direction == "f" else rows[::-1]
            sign = 1 if direction == "f" else -1
            due = [row for row in order if sign * (row.origin_server_ts - at) >= 0]
            expected = [
                next((row.event_id for row in due if row.event_id in seen), None),
                next((row.event_id for row in due if row.is_accepted), None),
            ]
            found = [
                await store.event_near(room.room_id, LOCAL, at, direction),
                await store.timestamp_to_event(room.room_id, at, direction, server_name=None),
            ]
            ids = [None if one is None else one.event_id for one in found]
            assert ids == expected, (at - FIRST, direction)
    assert await findings(store) == []


DIRECTIONS: Final[tuple[Direction, ...]] = ("f", "b")


async def test_the_example_of_the_plan(store: Store) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN)
    said = [room.message(ADMIN, str(at), ts=FIRST + 60_000 + at) for at in (60, 70, 65, 70, 90)]
    await append(store, *room.events)
    late = FIRST + 60_070
    assert await reached(store, *said) == [None, None, late, late, None]


async def test_the_future_does_not_count_and_neither_do_refused_events(store: Store) -> None:
    now = time.time_ns() // 1_000_000
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN)
    room.join(REMOTE)
    side = room.fork(1)[0]
    ban = room.ban(ADMIN, REMOTE)
    await append(store, *room.events)
    begun = ban.json["origin_server_ts"]
    soft = side.message(REMOTE, "after the ban", ts=now)
    spam = room.message(ADMIN, "spam", ts=now - 50_000)
    await append(store, soft, spam, refused={spam.event_id: "spam"})
    future = room.message(ADMIN, "tomorrow", ts=now + 86_400_000)
    ahead = room.message(ADMIN, "a fast clock", ts=now + 5_000)
    after = room.message(ADMIN, "a right clock", ts=now)
    await append(store, future, ahead, after)
    expected: list[int | None] = [begun, begun, begun, None, now + 5_000]
    assert await reached(store, soft, spam, future, ahead, after) == expected
    await store.readmit(spam.event_id)
    assert await reached(store, spam) == [now + 5_000]
    assert await findings(store) == []


def disorder(seed: int, count: int = 80) -> tuple[RoomBuilder, GeneratedRoom]:
    """Return a room whose clocks differ, delivered with a gap, or in any causal order.

    Some events are hidden from a user who comes and goes.
    """
    chosen = random.Random(seed)
    room = RoomBuilder("11", seed=seed, sign=False)
    room.start(ADMIN, history_visibility=chosen.choice(["joined", "shared"]))
    room.join(LOCAL)
    while len(room.events) < count:
        branches = room.fork(2)
        for _ in range(chosen.randint(1, 12)):
            branch = chosen.choice(branches)
            if chosen.random() < 0.15:
                is_joined = branch.membership(LOCAL) == "join"
                (branch.leave if is_joined else branch.join)(LOCAL)
            else:
                branch.message(ADMIN, "", ts=_time(chosen, len(room.events)))
        room.merge(*branches)
    middle = chosen.randrange(count // 2, count - 20)
    if seed % 2:
        return room, deliver_late(room, seed)
    return room, deliver_with_gap(room, middle, middle + 12)


def _time(chosen: random.Random, number: int) -> int:
    """Return a time: mostly that of an honest clock, with a few equal ones."""
    if chosen.random() < 0.05:
        return time.time_ns() // 1_000_000 + 10**9
    return FIRST + 1_000 * number + chosen.choice([0] * 6 + [-20_000, -3_000, 2_000, 4_000])


async def deliver(store: Store, events: Iterable[GeneratedEvent], chosen: random.Random) -> None:
    """Deliver one by one; a few messages are refused, and some of them readmitted later."""
    refused = []
    for event in events:
        given = event.state_before
        is_spam = event.origin == "live" and chosen.random() < 0.1
        await store.append(
            [event.pdu],
            room_version="11",
            origin=event.origin,
            state_before={} if given is None else {event.event_id: given},
            refused={event.event_id: "spam"} if is_spam else {},
        )
        refused += [event.event_id] if is_spam else []
        if refused and chosen.random() < 0.05:
            await store.readmit(refused.pop(0))


@pytest.mark.parametrize("seed", range(3))
async def test_random_clocks(
    seed: int, store: Store, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """Compare after each kind of change, and with an archive that another store has imported."""
    room, delivery = disorder(seed)
    await deliver(store, delivery.events, random.Random(seed))
    await check(store, room)
    kinds = [one is None for one in await reached(store)]
    assert min(kinds.count(True), kinds.count(False)) > len(kinds) // 5
    async with storage.open(another_dsn, server_name=SERVER) as other:
        await copied(store, other, tmp_path / "room.ndjson")
        await check(other, room)
    async with Rebuilder.opened(dsn, SERVER) as rebuilder:
        assert (await rebuilder.rebuild(room.room_id)).events == 0
    await purge(store, room, len(room.events) // 2)
    await check(store, room)
    await append(store, *(room.message(ADMIN, "", ts=FIRST + 70_000 * at) for at in range(4)))
    await check(store, room)


async def copied(store: Store, other: Store, path: Path) -> None:
    """Export to a file, and import it."""
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        [room] = await rooms_to_archive(conn)
        lines = [line async for page in archive(conn, room) for line in page]
    path.write_bytes(b"\n".join(lines))
    summary = await Import(other, Rejects(None)).run([str(path)])
    assert not summary.outcomes.keys() & {"bad_line", "invalid", "missing_parents"}


async def purge(store: Store, room: RoomBuilder, at: int) -> None:
    """Purge below an event."""
    await others_ended(store.database)
    point = room.events[at].event_id
    done = await purge_history(
        store.database, room.room_id, server_name=SERVER, before_event_id=point
    )
    assert done.events
    await follow_once(store.database, store.streams)
