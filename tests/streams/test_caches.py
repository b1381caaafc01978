"""Caches: bounded, never stale after the news, filled with current values only; and stream rows."""

import random
from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.streams.caches import Cache, LastChange, RoomsOf, Ticket
from storage.streams.feed import Advance, StreamRow
from storage.streams.invalidate_caches import invalidate_caches, register_writer
from storage.streams.position_poller import follow_once
from storage.testing import RoomBuilder

CACHED = storage.Config(follow_ms=3_600_000, cache_reads=True)


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", config=CACHED) as opened:
        yield opened


def fill(cache: Cache[int], key: str, value: int) -> None:
    ticket = cache.get(key)
    assert isinstance(ticket, Ticket)
    cache.fill(ticket, value)


def test_a_cache_forgets_what_was_used_longest_ago() -> None:
    cache: Cache[int] = Cache("n", 2)
    fill(cache, "a", 1)
    fill(cache, "b", 2)
    assert cache.get("a") == 1
    fill(cache, "c", 3)
    assert cache.get("a") == 1
    assert isinstance(cache.get("b"), Ticket)
    assert (cache.hits, cache.misses) == (2, 4)


def test_what_became_stale_while_it_was_looked_up_is_not_put_in() -> None:
    cache: Cache[int] = Cache("n", 10)
    one, other = cache.get("a"), cache.get("b")
    assert isinstance(one, Ticket)
    assert isinstance(other, Ticket)
    cache.forget(("a",))
    cache.fill(one, 1)
    cache.fill(other, 2)
    assert isinstance(cache.get("a"), Ticket)
    assert cache.get("b") == 2
    late = cache.get("c")
    assert isinstance(late, Ticket)
    cache.forget(None)
    cache.fill(late, 3)
    assert len(cache) == 0


@pytest.mark.parametrize("seed", range(20))
def test_last_changes_never_deny_a_change(seed: int) -> None:
    rng = random.Random(seed)
    changes, truth = LastChange(3, 10), dict[str, int]()
    for position in range(11, 60):
        key = rng.choice("abcdef")
        changes.note(key, position)
        truth[key] = position
        for one in "abcdefg":
            since = rng.randrange(0, 60)
            assert changes.may_have_changed(one, since) or truth.get(one, 10) <= since
            assert (
                since < changes.floor or one in changes.since(since) or truth.get(one, 10) <= since
            )
    assert len(changes) <= 3


def test_what_has_changed_is_told_from_the_end() -> None:
    """A writer that lags brings smaller positions later.

    What it changed counts as changed at the largest position so far.
    """
    changes = LastChange(10, 10)
    for key, position in zip("abca", (20, 30, 25, 31), strict=True):
        changes.note(key, position)
    assert [list(changes.since(since)) for since in (10, 24, 29, 30, 31)] == [
        ["a", "c", "b"],
        ["a", "c", "b"],
        ["a", "c", "b"],
        ["a"],
        [],
    ]
    assert [changes.last(key) for key in "abcd"] == [31, 30, 30, 0]


def test_entries_have_a_weight() -> None:
    cache: Cache[int] = Cache("n", 10, lambda value: value)
    fill(cache, "a", 4)
    fill(cache, "b", 6)
    assert len(cache) == 2
    fill(cache, "c", 1)
    assert (cache.peek("a"), cache.peek("b"), cache.peek("c")) == (None, 6, 1)
    cache.forget(("b",))
    fill(cache, "d", 9)
    assert len(cache) == 2
    fill(cache, "e", 11)
    assert len(cache) == 0, "what does not fit is not kept"


async def test_each_cache_forgets_by_name_key_or_whole(store: Store) -> None:
    """Rows of the stream: a key, null for the whole cache, or cs_cache_fake.

    The last is for all that depends on a room's current state.
    """
    caches = store.caches

    def filled(*rows: tuple[str, list[str] | None]) -> list[tuple[bool, bool, bool]]:
        """What is left of two entries in each cache after these rows."""
        for cache in (caches.events, caches.current_state, caches.rooms_of):
            for key in ("a", "b"):
                cache.forget((key,))
                ticket = cache.get(key)
                assert isinstance(ticket, Ticket)
                # The value does not matter.
                cache.fill(ticket, RoomsOf({}, 0))  # type: ignore[arg-type]
        facts = [
            StreamRow(number, "far", [name, key, 0]) for number, (name, key) in enumerate(rows, 1)
        ]
        caches.on_advance(Advance("caches", "far", 0, len(rows), facts, local=False))
        kinds = (caches.events, caches.current_state, caches.rooms_of)
        return [
            tuple(not isinstance(cache.get(key), Ticket) for cache in kinds)  # type: ignore[misc]
            for key in ("a", "b")
        ]

    assert filled() == [(True, True, True), (True, True, True)]
    assert filled(("events", ["a"])) == [(False, True, True), (True, True, True)]
    assert filled(("current_state", ["a"]), ("rooms_of", ["b"])) == [
        (True, False, True),
        (True, True, False),
    ]
    assert filled(("events", None)) == [(False, True, True), (False, True, True)]
    assert filled(("cs_cache_fake", ["a"])) == [(True, False, True), (True, True, True)]
    assert filled(("cs_cache_fake", ["a", "b"])) == [(True, False, True), (True, True, False)]
    assert filled(("cs_cache_fake", None)) == [(True, False, False), (True, False, False)]
    assert filled(("get_user_by_id", ["a"]), ("get_user_by_id", None)) == [
        (True, True, True),
        (True, True, True),
    ]


async def test_last_changes_of_rooms(store: Store) -> None:
    room, other = RoomBuilder("11", seed=1), RoomBuilder("11", seed=2)
    admin, guest = room.user(1), room.user(4)
    room.start(admin)
    other.start(admin)
    await store.append([*room.pdus, *other.pdus])
    before = store.streams["events"].linear()
    await store.append([room.join(guest).pdu])
    after = store.streams["events"].linear()
    caches = store.caches
    assert [caches.room_changes.may_have_changed(one.room_id, before) for one in (room, other)] == [
        True,
        False,
    ]
    assert not caches.room_changes.may_have_changed(room.room_id, after)
    assert caches.room_changes.may_have_changed(other.room_id, 0), (
        "before this process began to listen"
    )
    rates = caches.hit_rates()
    assert set(rates) == {
        "events",
        "current_state",
        "rooms_of",
        "states",
        "members",
        "auth_chain_ids",
        "room_changes",
    }
    assert rates["room_changes"] == 0.5
    assert await _rows(store) == [], "the events say it all"


async def _rows(store: Store) -> list[list[object]]:
    return [fact.row[:2] for fact in await store.streams["caches"].rows(0, 1_000_000, 100)]


async def test_reads_come_from_memory_until_something_happens(store: Store) -> None:
    room = RoomBuilder("11", seed=1)
    admin = room.user(1)
    room.start(admin)
    await store.append(room.pdus)
    for _ in range(3):
        assert await store.current_state(room.room_id) == dict(room.state)
        assert await store.rooms_of(storage.UserId(admin)) == [room.room_id]
        assert await store.event(room.events[0].event_id) is not None
    assert (
        store.caches.current_state.hits,
        store.caches.rooms_of.hits,
        store.caches.events.hits,
    ) == (2, 2, 2)
    message = room.message(admin, "x")
    await store.append(room.pdus[-1:])
    assert await store.event(message.event_id) is not None
    room.redact(admin, message)
    await store.append(room.pdus[-1:])
    held = await store.event(message.event_id)
    assert held is not None
    assert held.redacted_by == room.events[-1].event_id
    room.leave(admin)
    await store.append(room.pdus[-1:])
    assert await store.rooms_of(storage.UserId(admin)) == []
    assert await store.current_state(room.room_id) == dict(room.state)
    assert store.caches.hit_rates()["rooms_of"] > 0
    assert await _rows(store) == [["events", [message.event_id]]]


async def test_a_state_that_resolution_changed_is_told(store: Store, dsn: str) -> None:
    """A ban removes what the banned user set on another branch.

    No event of the stream says so, a row of the caches does.
    """
    room = RoomBuilder("11", seed=2)
    admin, other = room.user(1), room.user(4)
    room.start(admin)
    room.join(other)
    room.power_levels(admin, users={other: 50})
    left, right = room.fork(2)
    banned = left.ban(admin, other)
    topic = right.topic(other, "mine")
    await store.append([event.pdu for event in room.events if event.event_id != banned.event_id])
    async with storage.open(
        dsn, server_name="s1.test", instance_name="second", config=CACHED
    ) as second:
        assert (await second.current_state(room.room_id))["m.room.topic", ""] == topic.event_id
        assert await _rows(store) == []
        await store.append([banned.pdu])
        assert await _rows(store) == [["cs_cache_fake", [room.room_id]]]
        await follow_once(second.database, second.streams)
        assert ("m.room.topic", "") not in await second.current_state(room.room_id)


async def test_a_purge_is_one_row(store: Store, dsn: str) -> None:
    """A purge writes one row: every process drops the purged events, and keeps its states."""
    room = RoomBuilder("11", seed=3)
    admin = room.user(1)
    room.start(admin)
    said = [room.message(admin, str(number)).event_id for number in range(50)]
    await store.append(room.pdus)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="second", config=CACHED
    ) as second:
        for one in (store, second):
            assert len(await one.events(said)) == 50
            await one.current_state(room.room_id)
        await register_writer(store.database)
        async with store.database.transaction() as conn:
            await conn.execute("DELETE FROM events WHERE event_id = ANY($1::text[])", said[:40])
            await invalidate_caches(conn, "events")
        assert await _rows(store) == [["events", None]]
        for one in (store, second):
            assert len(await one.events(said)) == 50, "nobody has heard yet"
            await follow_once(one.database, one.streams)
            assert list(await one.events(said)) == said[40:]
            assert one.caches.current_state.peek(room.room_id) is not None
