"""A writer's caches of states are bounded by their entries, not by their number.

The state of a large room is a thousand times that of a small one. Of an event a writer caches what
authorises later events, and not the objects that it read.
"""

import storage
from storage.database.names import InternedNames
from storage.event import parse
from storage.persist.model.caches import StateGroupCache
from storage.persistent_map import Map
from storage.state.groups import Group, derive, groups_of, root_group, row_of
from storage.testing import SHAPES, RoomBuilder, build_room


def room(number: int, members: int) -> Group:
    return root_group(
        number * 1000, number, Map({key: key + 1 for key in range(1, members + 1)}), 0
    )


def line(parent: Group, length: int) -> list[Group]:
    groups = [parent]
    for changes in range(1, length + 1):
        groups.append(derive(groups[-1], {1: 10_000 + changes}, parent.state_group + changes, 0))
    return groups


def test_states_that_share_their_rows_count_them_once() -> None:
    states = StateGroupCache(limit=100, entries_max=1_000)
    states.keep({group.state_group: group for group in line(room(1, 500), 20)})
    assert 500 < states.entries < 600
    states.trim()
    assert len(states) == 21


def test_large_states_go_though_they_are_few_the_oldest_first() -> None:
    states = StateGroupCache(limit=100, entries_max=1_000)
    for number in range(1, 9):
        states.keep({number: room(number, 200)})
    states.trim()
    assert list(states) == [7, 8]
    assert states.entries == 400
    states.trim()
    assert list(states) == [7, 8]


def test_many_states_go_though_they_are_small() -> None:
    states = StateGroupCache(limit=4, entries_max=1_000)
    states.keep({number: room(number, 1) for number in range(1, 6)})
    states.trim()
    assert (list(states), states.entries) == ([4, 5], 2)


def test_a_state_that_is_too_large_by_itself_is_kept_as_long_as_it_is_the_last() -> None:
    states = StateGroupCache(limit=4, entries_max=10)
    states.keep({1: room(1, 5), 2: room(2, 100)})
    states.trim()
    assert list(states) == [2]
    states.keep({3: room(3, 5)})
    states.trim()
    assert list(states) == [3]
    states.clear()
    assert (len(states), states.entries) == (0, 0)


def test_states_that_are_read_together_share_their_root() -> None:
    groups = line(room(1, 500), 20)
    rows = {group.state_group: row_of(group, lambda key: key > 100) for group in groups}
    read = groups_of(rows, rows)
    states = StateGroupCache(limit=100, entries_max=1_000)
    states.keep(read)
    assert 500 < states.entries < 600
    assert {state_group: dict(group.entries) for state_group, group in read.items()} == {
        group.state_group: dict(group.entries) for group in groups
    }


def test_names_are_bounded_whatever_they_name() -> None:
    names = InternedNames(100)
    for number in range(1_000):
        names.learn(types=[(f"type {number}", 2_000 + number)])
    assert len(names.types) < 150
    for number in range(1_000):
        names.learn()
        # By its nid alone, as a reader queries it.
        names.state_key_names[2_000 + number] = (
            2_000,
            "key",
        )
    assert len(names.state_key_names) < 150


def test_a_batch_of_a_thousand_joins_adds_little_to_a_large_room() -> None:
    """States are trimmed between batches only.

    Within a batch, each change adds a handful of entries, however many members there are.
    """
    groups = [room(1, 50_000)]
    for join in range(1, 1_001):
        groups.append(
            derive(groups[-1], {50_000 + join: 100_000 + join}, groups[0].state_group + join, 0)
        )
    states = StateGroupCache(limit=2_000, entries_max=2_000_000)
    states.keep({group.state_group: group for group in groups})
    assert 51_000 <= states.entries <= 50_000 + 5 * 1_000


async def test_of_state_events_only_what_authorises_later_events_is_kept(dsn: str) -> None:
    room = build_room(SHAPES["direct_chat"], 12, seed=3)
    async with storage.open(dsn, server_name="s1.test") as store:
        assert {result.outcome for result in await store.append(room.pdus)} == {"stored"}
        kept = list(store.writer.caches.events.values())
    assert {event.type for event in kept if event.json} == {"m.room.create"}
    assert {event.raw for event in kept} == {b""}
    whole = {event.event_id: event for event in (parse(pdu, "11") for pdu in room.pdus)}
    assert len(kept) > 4
    for event in kept:
        given = whole[event.event_id]
        assert (event.key, event.sender) == (given.key, given.sender)
        assert event.auth_event_ids == given.auth_event_ids
        assert event.content.items() <= given.content.items()


async def test_an_outlier_and_a_refused_event_are_kept_whole(dsn: str) -> None:
    """They may be planned again: once they come in the timeline, or are readmitted."""
    room = RoomBuilder("11", seed=5, servers=["s1.test"])
    room.start(room.user(1))
    start = room.pdus
    refused, outlier = room.topic(room.user(1), "refused"), room.topic(room.user(1), "outlier")
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(start)
        await store.append([refused.pdu], refused={refused.event_id: "spam"})
        await store.append([outlier.pdu], origin="outlier")
        kept = {event.event_id: event for event in store.writer.caches.events.values()}
    for event in (refused, outlier):
        assert kept[event.event_id].raw == event.pdu
        assert kept[event.event_id].content == event.content
