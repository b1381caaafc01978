"""A sync looks at the rooms that can have changed, and asks no more than it must.

That its answers stay right: tests/oracle/test_memory.py.
"""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import EventFilter, Store, SyncFilter
from storage.ids import UserId
from storage.queries.sync import SyncRequest, changed_rooms
from storage.store import syncing
from storage.streams import SyncToken, VectorPosition
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, deliver, new_room
from tests.small_limits import cached_entries

ALONE = storage.Config(follow_ms=3_600_000)


@pytest.fixture
async def store(dsn: str, statements: StatementLog) -> AsyncIterator[Store]:
    async with storage.open(
        dsn, server_name="s1.test", observer=statements, config=ALONE
    ) as opened:
        yield opened


def round_trips(statements: StatementLog) -> list[str]:
    """The first words of what was sent, BEGIN and COMMIT included."""
    sent, statements.sent = statements.sent, []
    return [statement.split()[0] for _, statement in sent]


def position(store: Store, token: str) -> VectorPosition:
    return SyncToken.parse(token, store.deployment_id).position("events") or VectorPosition()


async def news(store: Store) -> changed_rooms.ChangeSnapshot:
    async with store.database.connection() as conn:
        return await store.memory.snapshot(conn, UserId(LOCAL))


async def test_nothing_new_takes_one_round_trip(store: Store, statements: StatementLog) -> None:
    room, others = new_room(members=[LOCAL]), new_room(seed=1, members=[OTHER])
    await deliver(store, room)
    await deliver(store, others)
    since = (await store.sync(LOCAL)).next_batch
    round_trips(statements)
    assert (await store.sync(LOCAL, since=since)).is_empty
    assert round_trips(statements) == ["BEGIN", "WITH", "COMMIT"], (
        "the user's rooms are read with the positions"
    )
    assert (await store.sync(LOCAL, since=since)).is_empty
    assert round_trips(statements) == ["SELECT"]
    await append(store, others.message(ADMIN))
    round_trips(statements)
    answer = await store.sync(LOCAL, since=since)
    assert answer.is_empty
    assert answer.next_batch != since
    assert round_trips(statements) == ["SELECT"], "only others' rooms have changed"
    await append(store, room.message(ADMIN))
    round_trips(statements)
    assert set((await store.sync(LOCAL, since=since)).join) == {room.room_id}
    assert round_trips(statements) == ["WITH"], "no state has changed, so none is asked for"
    await append(store, room.topic(ADMIN, "news"))
    round_trips(statements)
    assert (await store.sync(LOCAL, since=since)).join[room.room_id].state_after
    assert round_trips(statements) == ["BEGIN", "WITH", "WITH", "WITH", "COMMIT"]


async def test_timelines_alone_take_one_round_trip(store: Store, statements: StatementLog) -> None:
    """Of several rooms, and for whoever waits; with nothing that the user sees, too."""
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(3)]
    for room in rooms:
        await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    await store.sync(LOCAL, since=since)
    for room in rooms[:2]:
        await append(store, room.message(ADMIN))
    round_trips(statements)
    answer = await store.sync(LOCAL, since=since, timeout_ms=60_000)
    assert round_trips(statements) == ["WITH"]
    assert set(answer.join) == {room.room_id for room in rooms[:2]}
    nothing = SyncFilter(timeline=EventFilter(types=[]))
    assert (await store.sync(LOCAL, since=since, filter=nothing)).next_batch == answer.next_batch
    assert round_trips(statements) == ["WITH"]
    lazy = SyncFilter(lazy_load_members=True)
    assert [
        event.state_key
        for event in (await store.sync(LOCAL, since=since, filter=lazy))
        .join[rooms[0].room_id]
        .state
    ]
    assert round_trips(statements) == ["BEGIN", "WITH", "WITH", "WITH", "COMMIT"], (
        "members are state"
    )


async def test_timelines_and_more_than_was_heard_of_take_one_snapshot(
    dsn: str, store: Store, statements: StatementLog
) -> None:
    room, unheard = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    await deliver(store, room)
    await deliver(store, unheard)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="other", config=ALONE
    ) as other:
        since = (await store.sync(LOCAL)).next_batch
        await store.sync(LOCAL, since=since)
        await append(store, room.message(ADMIN))
        await append(other, unheard.message(ADMIN))
        round_trips(statements)
        assert set((await store.sync(LOCAL, since=since)).join) == {room.room_id, unheard.room_id}
        assert round_trips(statements) == ["WITH", "BEGIN", "WITH", "WITH", "COMMIT"]


async def test_state_that_was_not_heard_of_as_such_takes_one_snapshot(
    store: Store, statements: StatementLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, state that resolution changes.

    No second statement outside a transaction returns it.
    """
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    await store.sync(LOCAL, since=since)
    await append(store, room.topic(ADMIN, "news"))
    monkeypatch.setattr(store.memory, "has_state", lambda *_: False)
    round_trips(statements)
    assert (await store.sync(LOCAL, since=since)).join[room.room_id].state_after
    assert round_trips(statements) == ["WITH", "BEGIN", "WITH", "WITH", "WITH", "COMMIT"]


async def test_whoever_waits_is_told_the_rooms_by_memory(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    await store.sync(LOCAL, since=since)
    round_trips(statements)
    assert (await store.sync(LOCAL, since=since, timeout_ms=1)).is_empty
    assert round_trips(statements) == ["SELECT"]


async def test_only_changed_rooms_of_the_user_are_candidates(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(4)]
    others = [new_room(seed=seed, members=[OTHER]) for seed in range(4, 12)]
    for room in (*rooms, *others):
        await deliver(store, room)
    since = position(store, (await store.sync(LOCAL)).next_batch)
    assert (await news(store)).candidates(since) == []
    for room in (rooms[1], *others):
        await append(store, room.message(ADMIN))
    held = await news(store)
    assert held.rooms_of is not None
    assert held.candidates(since) == [held.rooms_of.joined[rooms[1].room_id]], (
        "many others have changed: by the user's rooms"
    )
    assert held.candidates(held.positions["events"]) == []
    await append(store, rooms[2].message(ADMIN))
    assert (await news(store)).candidates(held.positions["events"]) == [
        held.rooms_of.joined[rooms[2].room_id]
    ]


async def test_a_change_of_membership_makes_all_rooms_candidates_once(store: Store) -> None:
    room, joined = new_room(members=[LOCAL]), new_room(seed=1)
    await deliver(store, room)
    await deliver(store, joined)
    since = position(store, (await store.sync(LOCAL)).next_batch)
    await append(store, joined.join(LOCAL))
    held = await news(store)
    assert held.candidates(since) is None
    assert held.candidates(held.positions["events"]) == []


async def test_what_another_store_commits_is_a_candidate_before_it_is_heard_of(
    dsn: str, store: Store
) -> None:
    room, invited = new_room(members=[LOCAL]), new_room(seed=1)
    await deliver(store, room)
    await deliver(store, invited)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="other", config=ALONE
    ) as other:
        since = (await store.sync(LOCAL)).next_batch
        await store.sync(LOCAL, since=since)
        await append(other, room.message(ADMIN))
        held = await news(store)
        assert held.rooms_of is not None
        assert held.unseen == frozenset({held.rooms_of.joined[room.room_id]})
        assert held.room_ids is None, "who waits asks for them"
        answer = await store.sync(LOCAL, since=since)
        assert set(answer.join) == {room.room_id}
        await append(other, invited.invite(ADMIN, LOCAL))
        assert set((await store.sync(LOCAL, since=answer.next_batch)).invite) == {invited.room_id}


async def test_news_that_comes_in_that_very_moment_takes_a_statement_more_and_no_fifth(
    dsn: str, store: Store, statements: StatementLog
) -> None:
    """Another store has written a timeline, an invite, a knock, a leave, without notification."""
    rooms = [new_room(seed=seed, members=[LOCAL] if seed < 2 else []) for seed in range(3)]
    knocked = new_room(seed=3, join_rule="knock")
    for room in (*rooms, knocked):
        await deliver(store, room)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="other", config=ALONE
    ) as other:
        since = (await store.sync(LOCAL)).next_batch
        await store.sync(LOCAL, since=since)
        said = (
            rooms[0].message(ADMIN),
            rooms[1].leave(LOCAL),
            rooms[2].invite(ADMIN, LOCAL),
            knocked.knock(LOCAL),
        )
        for event in said:
            await append(other, event)
        round_trips(statements)
        answer = await store.sync(LOCAL, since=since)
        assert round_trips(statements) == ["SELECT", "BEGIN", "WITH", "WITH", "WITH", "COMMIT"]
        told = (answer.join, answer.leave, answer.invite, answer.knock)
        assert [list(one) for one in told] == [[event.room_id] for event in said]


async def test_whoever_waits_in_that_moment_asks_no_fifth_either(
    dsn: str, store: Store, statements: StatementLog
) -> None:
    """No new event is to be returned, so the wait goes on.

    It also covers rooms that this process has no notification of.
    """
    room, joined = new_room(members=[LOCAL]), new_room(seed=1)
    await deliver(store, room)
    await deliver(store, joined)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="other", config=ALONE
    ) as other:
        since = (await store.sync(LOCAL)).next_batch
        await store.sync(LOCAL, since=since)
        await append(other, joined.join(LOCAL))
        since = (await other.sync(LOCAL, since=since)).next_batch
        await append(other, room.topic(ADMIN, "news"))
        round_trips(statements)
        wanted = SyncFilter(timeline=EventFilter(types=[]), state=EventFilter(types=[]))
        asked = SyncRequest.of(
            LOCAL,
            since,
            timeline_limit=10,
            rooms_limit=None,
            full_state=False,
            filter=wanted,
            server_name="s1.test",
            deployment=store.deployment_id,
            config=ALONE,
        )
        look = await syncing.poll(store, asked, waits=True)  # the keys do not show otherwise
        assert look.answer.is_empty
        assert set(look.keys) == {LOCAL, room.room_id, joined.room_id}
        assert round_trips(statements) == ["SELECT", "BEGIN", "WITH", "WITH", "WITH", "COMMIT"]


async def test_who_is_far_behind_looks_at_all_rooms(
    dsn: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    monkeypatch.setattr(changed_rooms, "FAR", 1)
    async with storage.open(
        dsn, server_name="s1.test", instance_name="other", config=ALONE
    ) as other:
        since = (await store.sync(LOCAL)).next_batch
        await append(other, room.message(ADMIN), room.message(ADMIN), room.message(ADMIN))
        assert (await news(store)).unseen is None
        assert len((await store.sync(LOCAL, since=since)).join[room.room_id].timeline.events) == 3


async def test_a_bounded_memory_knows_less_and_answers_the_same(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(3)]
    cached_entries(monkeypatch, rooms=1, memberships=2)
    async with storage.open(dsn, server_name="s1.test", config=ALONE) as store:
        for room in rooms:
            await deliver(store, room)
        since = (await store.sync(LOCAL)).next_batch
        assert (await news(store)).candidates(position(store, since)) == []
        assert len(store.caches.rooms_of) == 0, "three rooms do not fit"
        for room in rooms:
            await append(store, room.message(ADMIN))
        assert (await news(store)).candidates(position(store, since)) is None
        assert set((await store.sync(LOCAL, since=since)).join) == {room.room_id for room in rooms}
