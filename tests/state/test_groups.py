"""State groups as levelled deltas, against plain dicts and through the table.

The changes, forks and merges come in any order.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.persistent_map import Map
from storage.state import paths
from storage.state.groups import (
    FARTHEST,
    GROUP_COLUMNS,
    REMOVED,
    DeltaRow,
    Group,
    applied,
    changed_keys,
    derive,
    difference,
    digest_of,
    fold,
    read_groups,
    root_group,
    row_of,
)

KEYS = st.integers(1, 30)
CHANGE = st.dictionaries(
    KEYS, st.one_of(st.just(REMOVED), st.integers(1, 10_000)), min_size=1, max_size=12
)
CHANGES = st.lists(st.tuples(st.integers(0, 10), CHANGE), min_size=1, max_size=80)
FIRST_MEMBER = 10


def grown(changes: list[tuple[int, dict[int, int]]]) -> list[tuple[Group, dict[int, int]]]:
    """Groups, each derived from one a few before, and the states that they must have."""
    made: list[tuple[Group, dict[int, int]]] = [(root_group(1, 7, Map(), 0), {})]
    for back, change in changes:
        parent, state = made[-1 - min(back, len(made) - 1)]
        expected = {key: event for key, event in {**state, **change}.items() if event != REMOVED}
        made.append((derive(parent, change, len(made) + 1, 0), expected))
    return made


def checked(group: Group, expected: Mapping[int, int]) -> None:
    assert dict(group.entries) == expected
    assert group.digest == digest_of(expected)
    folded = fold(group.steps)
    assert {key: event for key, event in folded.items() if event != REMOVED} == expected
    assert dict(group.steps[0].delta) == {
        key: event for key, event in group.steps[0].delta.items() if event != REMOVED
    }
    assert group.steps[-1].state_group == group.state_group
    assert len(group.steps) == 1 + sum(group.runs)
    assert max(group.runs) < paths.RADIX
    assert len({step.state_group for step in group.steps}) == len(group.steps)
    assert (
        sum(len(step.delta) for step in group.steps[1:]) < max(len(expected), 1) * paths.FACTOR
        or len(group.steps) == 1
    )


@given(CHANGES)
def test_a_group_is_the_state_that_its_changes_make(
    changes: list[tuple[int, dict[int, int]]],
) -> None:
    for group, expected in grown(changes):
        checked(group, expected)


@given(CHANGES, st.data())
def test_what_differs_between_two_groups(
    changes: list[tuple[int, dict[int, int]]], data: st.DataObject
) -> None:
    made = grown(changes)
    for _ in range(8):
        (one, left), (other, right) = (
            data.draw(st.sampled_from(made)),
            data.draw(st.sampled_from(made)),
        )
        assert changed_keys(one, other) == {
            key for key in left.keys() | right.keys() if left.get(key) != right.get(key)
        }
        assert dict(applied(one.entries, difference(one, other))) == right


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 3))
def test_a_long_line_has_a_short_path(length: int, seed: int) -> None:
    rng = random.Random(seed)
    group = root_group(1, 7, Map(dict.fromkeys(range(1, 600), 1)), 0)
    for number in range(2, length + 2):
        before = group
        group = derive(group, {rng.randrange(1, 600): number}, number, 0)
        kept = group.steps[:-1]
        assert (
            kept == before.steps[: len(kept)]
        )  # a row of the path is immutable, and stands where it stood
    assert len(group.steps) <= paths.level_count(600) * (paths.RADIX - 1) + 1


class WatchedState(Mapping[int, int]):
    """A state that knows whether it was gone through."""

    def __init__(self, entries: Mapping[int, int]) -> None:
        self.entries = entries
        self.gone_through = False

    def __getitem__(self, key: int) -> int:
        return self.entries[key]

    def __iter__(self) -> Iterator[int]:
        self.gone_through = True
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def test_states_on_two_sides_of_a_new_root_are_compared_by_what_lies_between() -> None:
    base = root_group(1, 7, Map(dict.fromkeys(range(1, 500), 1)), 0)
    side = derive(base, {1: 2}, 2, 0)
    group, number = base, 3
    while len(group.steps) > 1 or group is base:
        group = derive(group, {number % 400 + 1: number}, number, 0)
        number += 1
    after = derive(group, {499: 5}, number, 0)
    expected = {key for key in range(1, 500) if side.entries.get(key) != after.entries.get(key)}
    for one, other in ((side, after), (after, side)):
        watched: list[Any] = [WatchedState(one.entries), WatchedState(other.entries)]
        assert (
            changed_keys(one._replace(entries=watched[0]), other._replace(entries=watched[1]))
            == expected
        )
        assert not watched[0].gone_through
        assert not watched[1].gone_through
    forgetful = after._replace(
        steps=(DeltaRow(group.state_group, group.entries), *after.steps[1:])
    )  # as read from the table
    watched = [WatchedState(side.entries), WatchedState(after.entries)]
    assert (
        changed_keys(side._replace(entries=watched[0]), forgetful._replace(entries=watched[1]))
        == expected
    )
    assert watched[0].gone_through
    assert changed_keys(group, base) == {
        key for key in range(1, 500) if group.entries.get(key) != 1
    }


def loaded(row: DeltaRow) -> DeltaRow:
    """The row as another group reads it from the table."""
    return DeltaRow(row.state_group, row.delta)


def test_a_damaged_path_hides_no_difference() -> None:
    """Its last row but one is that of the other state, and the rows before are of another line."""
    root, key = root_group(1, 7, Map(dict.fromkeys(range(1, 100), 1)), 0), 3
    line = derive(root, {key: 2}, 2, 0)
    base = derive(line, {4: 2}, 3, 0)
    made = derive(base, {5: 2}, 4, 0)
    other = derive(root, {key: 9, 6: 9}, 5, 0)
    assert changed_keys(base, made) == {5}
    steps = (root.steps[0], other.steps[-1], *map(loaded, made.steps[-2:]))
    assert [step.state_group for step in made.steps] == [1, 2, 3, 4], "one row is exchanged"
    entries = Map({key: event for key, event in fold(steps).items() if event != REMOVED})
    damaged = made._replace(steps=steps, entries=entries)
    assert changed_keys(base, damaged) == changed_keys(damaged, base) == {key, 5, 6}


def test_a_row_too_far_back_is_no_part_of_a_path() -> None:
    base = root_group(1, 7, Map(dict.fromkeys(range(1, 50), 1)), 0)
    near, far = derive(base, {1: 2}, FARTHEST + 1, 0), derive(base, {1: 2}, FARTHEST + 2, 0)
    assert (len(near.steps), len(far.steps)) == (2, 1)
    checked(far, {**dict(base.entries), 1: 2})


@given(st.lists(st.integers(0, paths.RADIX - 1), min_size=1, max_size=paths.LEVELS_MAX))
def test_runs_are_packed_into_four_bytes(runs: list[int]) -> None:
    packed = paths.pack(tuple(runs))
    assert 0 < packed < 1 << 31
    assert paths.unpack(packed) == tuple(runs)


def test_levels_have_an_end() -> None:
    assert paths.level_count(1) == 1
    assert paths.level_count(paths.RADIX**3 + 1) == 4
    assert paths.level_count(1 << 60) == paths.LEVELS_MAX


@pytest.mark.parametrize("seed", range(5))
async def test_what_is_read_from_the_table_is_what_was_written(conn: Connection, seed: int) -> None:
    rng = random.Random(seed)
    changes = [
        (
            rng.choice([0, 0, 0, 1, 5]),
            {
                rng.randrange(1, 40): rng.choice([REMOVED, *range(1, 20)])
                for _ in range(rng.randrange(1, 5))
            },
        )
        for _ in range(200)
    ]
    made = grown(changes)
    rows = [row_of(group, lambda key: key >= FIRST_MEMBER) for group, _ in made]
    assert {[] in row for row in rows} == {False}  # NULL instead
    await conn.copy_in("state_groups", GROUP_COLUMNS, rows)
    read = await read_groups(conn, [group.state_group for group, _ in made])
    for group, expected in made:
        found = read[group.state_group]
        checked(found, expected)
        assert (found.runs, found.digest, found.audience, found.room_nid) == (
            group.runs,
            group.digest,
            0,
            7,
        )
        assert [(step.state_group, dict(step.delta)) for step in found.steps] == [
            (step.state_group, dict(step.delta)) for step in group.steps
        ]
    for group, _ in rng.sample(made, 20):
        assert await conn.fetchval(
            "SELECT path_of(state_group) FROM state_groups WHERE state_group = $1",
            group.state_group,
        ) == [step.state_group for step in group.steps]
        entries = await conn._driver.fetch("SELECT * FROM state_entries($1)", group.state_group)
        # records are no pairs
        assert {key: event for key, event in entries} == dict(group.entries)  # noqa: C416


async def test_a_lost_row_is_corruption(conn: Connection) -> None:
    made = grown([(0, {key: 1}) for key in range(1, 30)])
    long = max((group for group, _ in made), key=lambda group: len(group.steps))
    await conn.copy_in(
        "state_groups",
        GROUP_COLUMNS,
        [row_of(group, bool) for group, _ in made if group is not made[0][0]],
    )
    with pytest.raises(StorageCorrupt):
        await read_groups(conn, [1])
    await conn.execute("DELETE FROM state_groups WHERE state_group = $1", long.steps[0].state_group)
    with pytest.raises(StorageCorrupt):
        await read_groups(conn, [long.state_group])
