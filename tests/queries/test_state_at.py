"""The state at events: many at once, whole or filtered.

It is compared with the builder's states and with a filter applied afterwards.
"""

import random

import pytest

import storage
from storage import Store
from storage.errors import InputError, StateUnknown, UnknownEvent
from storage.ids import EventId, StateKey
from storage.queries import state_at
from storage.testing import SHAPES, RoomBuilder, build_room
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, append, deliver, new_room
from tests.small_limits import cached_entries

TYPES = ["m.room.member", "m.room.name", "m.room.power_levels", "m.room.create", "m.nobody.sent"]


async def forked(store: Store, seed: int) -> RoomBuilder:
    """A room of many forks, with topics and joins, stored."""
    room = build_room(SHAPES["small_chat"].replaced(fork_rate=0.15, members=25), 160, seed=seed)
    results = await store.append(room.pdus, room_version=room.version)
    assert {result.outcome for result in results} <= {"stored", "soft_failed"}
    return room


@pytest.mark.parametrize("seed", range(3))
async def test_many_at_once_are_what_the_room_was(
    store: Store, statements: StatementLog, seed: int
) -> None:
    room = await forked(store, seed)
    ids = [event.event_id for event in room.events]
    statements.take()
    before = await store.states_before(ids)
    assert len(statements.take()) == 2
    after = await store.states_after(ids)
    assert len(statements.take()) <= 2
    assert before == {event.event_id: dict(event.state_before) for event in room.events}
    assert after == {event.event_id: dict(event.state_after) for event in room.events}
    one = room.events[-1]
    assert await store.state_before(one.event_id) == before[one.event_id]
    assert await store.state_after(one.event_id) == after[one.event_id]


@pytest.mark.parametrize("seed", range(3))
async def test_a_filter_is_filtering_afterwards(
    store: Store, statements: StatementLog, seed: int
) -> None:
    room = await forked(store, seed)
    rng = random.Random(seed)
    ids = [event.event_id for event in room.events]
    states = await store.states_after(ids)
    known = sorted({key for state in states.values() for key in state})
    for _ in range(12):
        types = rng.sample(TYPES, rng.randrange(4))
        keys = {
            *rng.sample(known, rng.randrange(min(len(known), 40))),
            ("m.room.member", "@nobody:s1.test"),
            ("m.nobody.sent", ""),
        }
        asked = rng.sample(ids, rng.randrange(1, 30))
        statements.take()
        by_type = await store.states_after(asked, types=types)
        by_key = await store.states_after(asked, keys=keys)
        assert len(statements.take()) <= 4
        assert by_type == {
            one: {key: event for key, event in states[one].items() if key[0] in types}
            for one in asked
        }
        assert by_key == {
            one: {key: event for key, event in states[one].items() if key in keys} for one in asked
        }


async def test_a_few_keys_or_types_without_members_take_one_statement(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    ids = [event.event_id for event in room.events]
    statements.take()
    await store.states_before(ids, keys=[("m.room.member", LOCAL), ("m.room.create", "")])
    await store.states_before(ids, types=["m.room.create"])
    assert statements.take() == [state_at.SQL_STATE_OF_KEYS, state_at.SQL_STATE_OF_TYPES]
    members: list[StateKey] = [
        ("m.room.member", f"@{number}:s1.test") for number in range(state_at.PICKED_MEMBERS_MAX)
    ]
    await store.states_before(ids, keys=[*members, ("m.room.member", LOCAL)])
    assert statements.take() == [state_at.SQL_PATHS, state_at.SQL_TEXTS]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"types": ["m.room.create"]},
        {"types": ["m.room.member"]},
        {"keys": [("m.room.create", "")]},
    ],
)
async def test_what_is_not_known(store: Store, how: dict[str, list[str]]) -> None:
    room = new_room(members=[LOCAL])
    outlier = room.message(ADMIN)
    await append(store, *room.events[:-1])
    await append(store, outlier, origin="outlier")
    held = room.events[0].event_id
    assert await store.states_before([], **how) == {}  # type: ignore[arg-type]
    assert await store.state_before(held, **how) == {}  # type: ignore[arg-type]
    with pytest.raises(UnknownEvent) as unknown:
        await store.states_before([held, EventId("$none")], **how)  # type: ignore[arg-type]
    assert unknown.value.event_id == "$none"
    with pytest.raises(StateUnknown) as caught:
        await store.states_before([held, outlier.event_id], **how)  # type: ignore[arg-type]
    assert caught.value.event_id == outlier.event_id


async def test_two_filters_at_once_are_refused(store: Store) -> None:
    with pytest.raises(InputError):
        await store.states_before([], types=[], keys=[])


async def test_keys_with_odd_characters(store: Store) -> None:
    room = new_room(members=[LOCAL])
    odd = ["", " ", "line\nbreak", 'quote"d', "back\\slash", "\u2028", "{brace,}", "🦑", "\x01"]
    made = {
        ("org.test", state_key): room.state_event(ADMIN, "org.test", {}, state_key)
        for state_key in odd
    }
    last = room.message(ADMIN)
    await deliver(store, room)
    whole = await store.state_before(last.event_id)
    assert {key: event for key, event in whole.items() if key[0] == "org.test"} == {
        key: event.event_id for key, event in made.items()
    }
    assert await store.state_before(last.event_id, keys=made) == {
        key: event.event_id for key, event in made.items()
    }
    assert await store.state_before(last.event_id, types=["org.test"]) == {
        key: event.event_id for key, event in made.items()
    }


async def test_states_given_out_are_the_callers_own(store: Store) -> None:
    room = new_room(members=[LOCAL])
    two = [room.message(ADMIN).event_id, room.message(ADMIN).event_id]
    await deliver(store, room)
    states = await store.states_before(two)
    states[two[0]].clear()
    assert states[two[1]] == dict(room.state)


async def test_a_state_asked_for_again_is_remembered(
    store: Store, statements: StatementLog
) -> None:
    """The cache key is the state group: the state before another event of the group is cached too.

    The returned dict belongs to the caller, who may change it.
    """
    room = new_room(members=[LOCAL])
    one, other = room.message(ADMIN).event_id, room.message(ADMIN).event_id
    topic = room.topic(ADMIN, "next")
    await deliver(store, room)
    state = dict(topic.state_before)
    statements.take()
    (await store.state_before(one)).clear()
    assert statements.take() == [state_at.SQL_PATHS, state_at.SQL_TEXTS]
    assert await store.states_before([one, other]) == {one: state, other: state}
    (await store.state_before(one)).clear()
    assert await store.state_before(topic.event_id) == state
    assert statements.take() == [state_at.SQL_PATHS] * 3
    assert await store.states_after([one, topic.event_id]) == {
        one: state,
        topic.event_id: dict(room.state),
    }
    assert statements.take() == [state_at.SQL_PATHS, state_at.SQL_TEXTS], (
        "one is known, the other stands on it"
    )
    assert (store.caches.states.hits, store.caches.states.misses) == (4, 2)


async def test_only_so_many_entries_of_states_are_remembered(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (
        new_room(members=[LOCAL]),
        new_room(seed=1, members=[LOCAL, *(f"@{number}:s1.test" for number in range(30))]),
    )
    cached_entries(monkeypatch, whole_states=30)
    async with storage.open(dsn, server_name="s1.test") as store:
        await deliver(store, small)
        await deliver(store, large)
        for room in (small, large):
            for _ in range(2):
                assert await store.state_after(room.events[-1].event_id) == dict(room.state)
        assert (len(store.caches.states), store.caches.states.hits) == (1, 1), (
            "the large one is not kept, and takes no other's place"
        )
        for event in small.events:
            await store.state_after(event.event_id)
        assert sum(map(len, store.caches.states.entries().values())) <= 30


async def test_a_given_state_that_holds_a_rejected_event(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier releases took it: it is read as it was given.

    A rejected event has no place in the auth chains, where texts are read otherwise.
    """

    async def taken(*_: object) -> None:
        return None

    monkeypatch.setattr("storage.persist.receive.check", taken)
    room = new_room(members=[LOCAL, REMOTE])
    refused = room.topic(REMOTE, "no", expected="rejected")
    await store.append(room.pdus)
    missing = room.message(ADMIN)
    after = room.message(ADMIN)
    given = {**room.state, ("m.room.topic", ""): refused.event_id}
    results = await store.append([after.pdu], state_before={after.event_id: list(given.values())})
    assert [result.outcome for result in results] == ["stored"]
    assert missing.event_id in await store.backward_extremities(room.room_id)
    assert await store.state_before(after.event_id) == given
    assert await store.states_before([after.event_id, room.events[3].event_id]) == {
        after.event_id: given,
        room.events[3].event_id: dict(room.events[3].state_before),
    }
    assert (await store.state_ids(after.event_id)).state_ids == set(given.values())
