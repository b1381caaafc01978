"""States that a caller gives with `state_before`."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

import storage
from storage import Store
from storage.errors import InputError, InvalidIdentifier
from storage.ids import EventId
from storage.persist.plan import audience, event, state
from storage.testing import BuiltEvent, RoomBuilder

pytestmark = pytest.mark.every_postgres


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


def room_with_a_gap() -> tuple[RoomBuilder, BuiltEvent, BuiltEvent]:
    """A room, the message that is missing, and the one after it."""
    room = RoomBuilder("11", seed=1)
    room.start(room.user(1))
    room.topic(room.user(1), "one")
    room.topic(room.user(1), "two")
    missing = room.message(room.user(1), "missing")
    return room, missing, room.message(room.user(1), "after")


async def stored(store: Store, room: RoomBuilder) -> None:
    results = await store.append(room.pdus[:-2])
    assert {result.outcome for result in results} == {"stored"}


async def test_two_events_of_one_key_are_an_input_error(store: Store) -> None:
    room, _, after = room_with_a_gap()
    await stored(store, room)
    old, new = (event.event_id for event in room.events if event.type == "m.room.topic")
    with pytest.raises(InputError, match=r"two events of \('m.room.topic', ''\)"):
        await store.append([after.pdu], state_before={after.event_id: [*room.state.values(), old]})
    assert await store.event(after.event_id) is None
    [result] = await store.append(
        [after.pdu], state_before={after.event_id: [*room.state.values(), new]}
    )
    assert result.outcome == "stored"


async def test_two_events_of_one_key_in_the_batch_itself_are_an_input_error(store: Store) -> None:
    room, missing, after = room_with_a_gap()
    await store.append(room.pdus[:-3])
    [old, new] = [event for event in room.events if event.type == "m.room.topic"]
    assert new.pdu == room.pdus[-3]
    with pytest.raises(InputError, match="two events"):
        await store.append(
            [new.pdu, after.pdu],
            state_before={after.event_id: [*room.state.values(), old.event_id]},
        )
    assert await store.events([new.event_id, missing.event_id, after.event_id]) == {}


async def test_a_rejected_event_is_an_input_error(store: Store) -> None:
    room, _, after = room_with_a_gap()
    await stored(store, room)
    other = RoomBuilder("11", seed=1, checked=False)
    other.start(other.user(1))
    forged = other.topic(other.user(2), "by nobody in the room")
    [result] = await store.append([forged.pdu], origin="outlier")
    assert (result.outcome, forged.room_id) == ("rejected", room.room_id)
    state = [event_id for key, event_id in room.state.items() if key != ("m.room.topic", "")]
    with pytest.raises(InputError, match=f"{forged.event_id[1:]}, which is rejected"):
        await store.append([after.pdu], state_before={after.event_id: [*state, forged.event_id]})
    assert await store.event(after.event_id) is None


async def test_an_id_given_twice_counts_once_and_one_that_is_not_held_is_missing(
    store: Store,
) -> None:
    room, missing, after = room_with_a_gap()
    await stored(store, room)
    state = list(room.state.values())
    [result] = await store.append(
        [after.pdu], state_before={after.event_id: [*state, EventId("$nobody")]}
    )
    assert (result.outcome, result.missing) == ("missing_parents", ("$nobody",))
    [result] = await store.append([after.pdu], state_before={after.event_id: [*state, *state]})
    assert result.outcome == "stored"
    assert await store.backward_extremities(room.room_id) == {missing.event_id}


@pytest.mark.parametrize(
    "given", [["$a"], {"$a": "$b"}, {"$a": 5}, {"$a": ["b"]}, {"$a": ["$b\0"]}, {"$a": ["$\ud800"]}]
)
async def test_a_malformed_argument_is_an_input_error(
    store: Store, given: Mapping[Any, Any]
) -> None:
    with pytest.raises((InputError, InvalidIdentifier)):
        await store.append([], state_before=given)


async def test_a_given_state_is_compared_once_however_often_planning_begins_again(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning begins again for each kind of data that it lacks; a state may be large."""
    counted = Counter[str]()
    for module, name in ((state, "_between"), (audience, "_growth"), (event, "before_event")):
        monkeypatch.setattr(module, name, counting(getattr(module, name), counted))
    room, _, after = room_with_a_gap()
    join = room.join("@dora:s2.test")
    before = list(join.state_before.values())
    async with storage.open(dsn, server_name="s2.test") as fresh:
        await fresh.append(room.pdus[:-3], origin="outlier")
    async with storage.open(dsn, server_name="s2.test") as cold:
        [result] = await cold.append([join.pdu], state_before={join.event_id: before})
        assert result.outcome == "stored"
        assert counted["before_event"] > 3
        assert counted["_between"] == 1
        assert counted["_growth"] <= 4  # one for each pair of states
        assert await cold.state_before(join.event_id) == dict(join.state_before)
    assert after.event_id in join.prev_events


def counting(function: Callable[..., Any], counted: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counted[function.__name__] += 1
        return function(*args, **kwargs)

    return call
