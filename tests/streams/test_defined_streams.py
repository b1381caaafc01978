"""Streams that the homeserver defines: published, read, followed, bounded, emptied and lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

import storage
from storage import Store
from storage.errors import InputError, InvalidIdentifier, ResyncNeeded, UnknownStream
from storage.ids import UserId
from storage.maintenance.purge import purge_room
from storage.maintenance.verify import verify
from storage.observability.prometheus import streams as metrics_of_streams
from storage.streams import VectorPosition
from storage.streams.defined_streams import STREAMS_MAX, SUPERSEDED_KEEP_MS
from storage.streams.feed import Advance, StreamRow
from storage.streams.position_poller import follow_once
from storage.streams.published_facts import PublishedFact
from storage.streams.registry import STREAMS
from tests.queries.rooms import LOCAL, deliver, new_room

QUIET = storage.Config(follow_ms=3_600_000)
ALICE, BOB = "@alice:s1.test", "@bob:s1.test"
ROOM, ELSEWHERE = "!room:s1.test", "!elsewhere:s1.test"
LONG_MS = 60_000


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as opened:
        yield opened


@pytest.fixture
async def second(dsn: str, store: Store) -> AsyncIterator[Store]:
    async with storage.open(
        dsn, server_name="s1.test", instance_name="second", config=QUIET
    ) as opened:
        yield opened


def listen(store: Store) -> list[StreamRow]:
    told: list[StreamRow] = []

    def hear(advance: Advance) -> None:
        told.extend(advance.rows)

    store.streams.feed.subscribe(hear)
    return told


async def poll(store: Store) -> None:
    await follow_once(store.database, store.streams)


async def age(store: Store, ms: int) -> None:
    """Make all facts older."""
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE published_facts SET published_ts = published_ts - $1::bigint", ms
        )


def pairs(facts: list[PublishedFact]) -> list[tuple[str, Any]]:
    return [(fact.key, fact.value) for fact in facts]


# --------------------------------------------------------------------------------------------------
# publish and rows


async def test_facts_are_read_in_stream_order(store: Store) -> None:
    typing = store.define_stream("typing")
    first = await typing.publish(ROOM, {"user_ids": [ALICE]}, wakes=[BOB, ROOM])
    second = await store.stream("typing").publish(ELSEWHERE, {"user_ids": []})
    third = await typing.publish(ROOM, {"user_ids": []})
    assert first < second < third
    facts = await typing.rows()
    assert facts == [
        StreamRow(first, "main", [ROOM, {"user_ids": [ALICE]}, [BOB, ROOM]]),
        StreamRow(second, "main", [ELSEWHERE, {"user_ids": []}, []]),
        StreamRow(third, "main", [ROOM, {"user_ids": []}, []]),
    ]
    assert (facts[0].key, facts[0].value, facts[0].wakes) == (
        ROOM,
        {"user_ids": [ALICE]},
        [BOB, ROOM],
    )
    assert await typing.rows(first, second) == facts[1:2]
    assert await typing.rows(first) == facts[1:]
    assert await typing.rows(limit=1) == facts[:1]
    assert await typing.rows(keys=[ROOM]) == [facts[0], facts[2]]
    assert await typing.rows(first, keys=[ROOM]) == facts[2:]
    assert await typing.rows(keys=[]) == []
    assert await store.streams["typing"].rows(0, third, 10) == facts


async def test_streams_are_apart_though_they_share_ids(store: Store) -> None:
    typing, presence = store.define_stream("typing"), store.define_stream("presence")
    ids = [
        await stream.publish(ALICE, stream.name) for stream in (typing, presence, typing, presence)
    ]
    assert ids == sorted(set(ids))
    assert pairs(await typing.rows()) == [(ALICE, "typing")] * 2
    assert pairs(await presence.rows()) == [(ALICE, "presence")] * 2
    for stream in (typing, presence):
        assert await store.streams[stream.name].rows(0, ids[-1], 10) == await stream.rows()


async def test_a_value_is_any_json(store: Store) -> None:
    stream = store.define_stream("presence")
    values: list[Any] = [None, True, 0, "text", [1, {"a": None}], {"": {}}, "nul\0"]
    for value in values:
        await stream.publish(ALICE, value)
    assert [fact.value for fact in await stream.rows()] == values


async def test_concurrent_facts_of_a_key_are_all_there_and_ordered(
    store: Store, second: Store
) -> None:
    """The last one is the same for every reader."""
    mine, theirs = store.define_stream("presence"), second.define_stream("presence")
    ids = await asyncio.gather(
        *(stream.publish(ALICE, number) for number in range(20) for stream in (mine, theirs))
    )
    assert [fact.stream_id for fact in await mine.rows()] == sorted(ids)
    assert await mine.rows() == await theirs.rows()


async def test_a_vector_position_is_exact_for_each_writer(store: Store, second: Store) -> None:
    mine, theirs = store.define_stream("presence"), second.define_stream("presence")
    a = await mine.publish(ALICE, 1)
    b = await theirs.publish(BOB, 2)
    c = await mine.publish(ALICE, 3)
    seen = VectorPosition(1, (("main", c),))
    assert [fact.stream_id for fact in await mine.rows(seen)] == [b]
    assert [fact.stream_id for fact in await mine.rows(0, seen)] == [a, c]


# --------------------------------------------------------------------------------------------------
# arguments


def test_a_malformed_or_reserved_name_is_refused(store: Store) -> None:
    names: list[Any] = [
        *("", "Typing", "1typing", "two words", "x" * 41, "a~b", "é", "nul\0", "\ud800", 7, None)
    ]
    for name in names:
        with pytest.raises(InputError):
            store.define_stream(name)
    for name in STREAMS:
        with pytest.raises(InputError, match="choose another name"):
            store.define_stream(name)
    assert not store.defined_streams


async def test_an_undefined_stream_is_an_error(store: Store) -> None:
    with pytest.raises(UnknownStream, match="define_stream"):
        store.stream("typing")
    with pytest.raises(UnknownStream):
        store.stream("events")


async def test_a_second_definition_is_the_same_stream(store: Store, dsn: str) -> None:
    first = store.define_stream("typing", keep_ms=5)
    assert store.define_stream("typing") is first
    assert first.keep_ms is None
    assert await store.define_stream("typing") is first
    await first.publish(ROOM, 1)
    async with storage.open(dsn, server_name="s1.test", instance_name="third") as third:
        assert pairs(await third.define_stream("typing").rows()) == [(ROOM, 1)]


def test_too_many_streams_are_refused(store: Store) -> None:
    for number in range(STREAMS_MAX):
        store.define_stream(f"s{number}")
    with pytest.raises(InputError, match="use keys"):
        store.define_stream("one.more")


BAD_FACTS: dict[str, tuple[Any, Any, Any]] = {
    "an empty key": ("", 1, ()),
    "a long key": ("é" * 257, 1, ()),
    "a NUL in the key": ("a\0", 1, ()),
    "a surrogate in the key": ("\ud800", 1, ()),
    "no text as key": (7, 1, ()),
    "a surrogate in the value": ("key", {"a": "\ud800"}, ()),
    "no JSON": ("key", object(), ()),
    "NaN": ("key", [float("nan")], ()),
    "a large value": ("key", "x" * 65_536, ()),
    "a user who is no user": ("key", 1, ["alice"]),
    "one text": ("key", 1, ALICE),
    "a NUL in wakes": ("key", 1, ["@a\0:s1.test"]),
    "too many": ("key", 1, [f"@user{number}:s1.test" for number in range(10_001)]),
}


async def test_a_bad_fact_is_refused_before_anything_is_written(store: Store) -> None:
    stream = await store.define_stream("presence")
    for case, (key, value, wakes) in BAD_FACTS.items():
        with pytest.raises(InputError):
            await stream.publish(key, value, wakes=wakes)
            pytest.fail(f"{case} was taken")
    assert await stream.rows() == []
    await stream.publish("é" * 256, "x" * 65_534)


async def test_keys_to_read_are_checked(store: Store) -> None:
    stream = store.define_stream("presence")
    with pytest.raises(InvalidIdentifier):
        await stream.rows(keys=["\0"])
    with pytest.raises(InputError, match="a list is wanted"):
        await stream.rows(keys="key")


# --------------------------------------------------------------------------------------------------
# bounds


async def test_a_superseded_fact_is_deleted_after_a_minute(store: Store) -> None:
    stream = store.define_stream("presence")
    await stream.publish(ALICE, 1)
    await stream.publish(BOB, "stays: the latest of its key")
    await stream.publish(ALICE, 2)
    assert [fact.value for fact in await stream.rows(keys=[ALICE])] == [1, 2]
    await age(store, SUPERSEDED_KEEP_MS + 1)
    await stream.publish(ALICE, 3)
    assert pairs(await stream.rows()) == [(BOB, "stays: the latest of its key"), (ALICE, 3)]


async def test_facts_of_a_key_do_not_grow_without_bound(store: Store) -> None:
    stream = store.define_stream("presence")
    for number in range(60):
        await stream.publish(ALICE, number)
        await age(store, SUPERSEDED_KEEP_MS // 10)
    assert len(await stream.rows()) <= 12


async def test_expired_facts_are_deleted_bit_by_bit(store: Store) -> None:
    typing = store.define_stream("typing", keep_ms=10_000)
    kept = store.define_stream("presence")
    await kept.publish(ALICE, "kept")
    for number in range(40):
        await typing.publish(f"!room{number}:s1.test", number)
    await age(store, 10_001)
    for number in range(15):
        await typing.publish(f"!new{number}:s1.test", number)
    assert len(await typing.rows()) == 15
    assert pairs(await kept.rows()) == [(ALICE, "kept")]


async def test_a_fact_is_not_expired_by_itself(store: Store) -> None:
    typing = store.define_stream("typing", keep_ms=0)
    await typing.publish(ROOM, 1)
    await typing.publish(ROOM, 2)
    assert pairs(await typing.rows()) == [(ROOM, 1), (ROOM, 2)]


# --------------------------------------------------------------------------------------------------
# several processes


async def test_another_process_follows_and_gets_each_fact_once(store: Store, second: Store) -> None:
    mine, theirs = store.define_stream("typing"), second.define_stream("typing")
    await theirs
    elsewhere = listen(second)
    ids = [await mine.publish(ROOM, number) for number in range(5)]
    await poll(second)
    await poll(second)
    assert [fact.stream_id for fact in elsewhere] == ids
    ids.append(await theirs.publish(ROOM, "theirs"))
    assert ids == sorted(ids)
    await poll(store)
    await poll(second)
    await poll(store)
    assert store.streams["typing"].linear() == ids[-1]


async def test_a_process_follows_streams_that_only_others_define(
    store: Store, second: Store
) -> None:
    """So that it can relay them; it cannot publish."""
    mine = store.define_stream("typing")
    await mine.publish(ROOM, "before")
    assert "typing" not in second.streams
    await poll(second)
    elsewhere = listen(second)
    last = await mine.publish(ROOM, "after")
    await poll(second)
    assert [fact.row for fact in elsewhere] == [[ROOM, "after", []]]
    assert second.streams["typing"].positions()["main"] == last
    with pytest.raises(UnknownStream):
        second.stream("typing")


async def test_positions_survive_a_restart_and_go_on(dsn: str) -> None:
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as before:
        last = await before.define_stream("typing").publish(ROOM, 1)
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as after:
        assert after.streams["typing"].positions()["main"] >= last
        assert await after.define_stream("typing").publish(ROOM, 2) > last


async def test_a_sequence_behind_is_set_forward(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as before:
        last = await before.define_stream("typing").publish(ROOM, 1)
        async with before.database.connection() as conn:
            await conn.execute("ALTER SEQUENCE published_facts_stream RESTART")
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as after:
        assert await after.define_stream("typing").publish(ROOM, 2) > last
    assert "the sequence published_facts_stream" in caplog.text


# --------------------------------------------------------------------------------------------------
# metrics, purge, erasure, loss


async def test_metrics_have_its_position(store: Store) -> None:
    last = await store.define_stream("typing").publish(ROOM, 1)
    positions = {
        (sample.labels["stream"], sample.labels["writer"]): sample.value
        for metric in metrics_of_streams(store)
        for sample in metric.samples
        if sample.name.endswith("stream_position")
    }
    assert positions["typing", "main"] == last


async def test_an_erased_user_loses_the_values_under_their_id(store: Store) -> None:
    stream = store.define_stream("presence")
    position = await stream.publish(ALICE, {"status_msg": "secret"})
    await stream.publish(BOB, {"status_msg": "stays"})
    await store.erase_user(UserId(ALICE))
    facts = await stream.rows()
    assert pairs(facts) == [(ALICE, None), (BOB, {"status_msg": "stays"})]
    assert facts[0].stream_id == position


async def test_a_purged_room_loses_its_facts(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    typing, kept = store.define_stream("typing"), store.define_stream("presence")
    for stream in (typing, kept):
        await stream.publish(room.room_id, 1)
        await stream.publish(LOCAL, 2)
    await purge_room(store.database, room.room_id, server_name="s1.test", force=True)
    assert pairs(await typing.rows()) == pairs(await kept.rows()) == [(LOCAL, 2)]
    assert [one async for one in verify(store.database, server_name="s1.test")] == []


async def test_a_token_of_lost_facts_is_refused(dsn: str) -> None:
    """As for the built-in streams: the positions between are never used again."""
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as store:
        await deliver(store, new_room(members=[LOCAL]))
        typing = store.define_stream("typing")
        kept = await typing.publish(ROOM, "kept")
        before = (await store.sync(LOCAL)).next_batch
        await typing.publish(ROOM, "lost")
        after = (await store.sync(LOCAL)).next_batch
        async with store.database.transaction() as conn:
            await conn.execute("DELETE FROM published_facts WHERE stream_id > $1::bigint", kept)
            await conn.execute(
                "UPDATE stream_positions SET stream_id = $1::bigint WHERE stream_name = 'typing'",
                kept,
            )
            await conn.execute("UPDATE deployment SET incarnation = 'another'")
    config = replace(QUIET, instance_name="second")
    async with storage.open(
        dsn, server_name="s1.test", instance_name="second", config=config
    ) as store:
        typing = store.define_stream("typing")
        with pytest.raises(ResyncNeeded):
            await store.sync(LOCAL, since=after)
        assert "typing" in store.positions_of((await store.sync(LOCAL, since=before)).next_batch)
        assert await typing.publish(ROOM, "new") > kept + (1 << 29)
