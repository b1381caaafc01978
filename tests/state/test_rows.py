"""A state group and the row that it is stored as, by hand."""

import pytest

from storage.errors import StorageCorrupt
from storage.persistent_map import Map
from storage.state.groups import (
    DeltaRow,
    GroupRow,
    changed_keys,
    derive,
    difference,
    digest_of,
    entries_of,
    entry_digest,
    group_of,
    groups_of,
    root_group,
    row_of,
    signed,
)
from storage.state.paths import pack

ROOT = root_group(10, 7, Map({1: 101, 2: 102, 3: 103, 50: 150}), 9)


def members(key: int) -> bool:
    return key >= 50


def test_a_digest_is_the_sum_of_what_splitmix64_makes_of_each_entry() -> None:
    assert entry_digest(1, 101) == 10_719_450_800_651_921_388
    assert entry_digest(101, 1) == 14_458_340_816_893_288_281
    assert digest_of({}) == 0
    assert digest_of({1: 101, 101: 1}) == signed(entry_digest(1, 101) + entry_digest(101, 1))


@pytest.mark.parametrize(
    "number,as_int8",
    [
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        (2**63, -(2**63)),
        (2**64 - 1, -1),
        (2**64, 0),
        (2**64 + 5, 5),
        (-1, -1),
    ],
)
def test_a_digest_fits_an_int8(number: int, as_int8: int) -> None:
    assert signed(number) == as_int8


def test_a_group_is_shown_without_its_entries() -> None:
    assert repr(ROOT) == "Group(10, 4 entries, 1 steps)"


def test_the_row_of_a_root_holds_the_whole_state() -> None:
    row = row_of(ROOT, members)
    assert row == GroupRow(
        *(10, ROOT.digest, 9, 7, 4, pack((0,)), None, [1, 2, 3], [101, 102, 103]),
        *(None, None, None, None, None, b"\x01"),
    )._replace(member_key_nids=[50], member_event_nids=[150])
    assert row.path_in({}) == [10]
    assert entries_of(row) == dict(ROOT.entries)


def test_the_row_of_a_child_holds_what_changed() -> None:
    child = derive(ROOT, {2: 202}, 15, 8)
    row = row_of(child, members)
    nothing = (None, None, None, None, None)
    assert row == GroupRow(*(15, None, 8, 7, 4, pack((1,))), *nothing, *(2, None, 202, b"\x09\x05"))
    assert row.path_in({10: row_of(ROOT, members)}) == [10, 15]
    assert entries_of(row) == {2: 202}
    without = row_of(derive(ROOT, {50: 0}, 16, 8), members)
    assert without == GroupRow(
        *(16, None, 8, 7, 3, pack((1,))), *nothing, *(None, 50, 0, b"\x09\x06")
    )
    assert entries_of(without) == {50: 0}


def test_only_a_state_that_a_merge_may_look_for_has_a_digest() -> None:
    child = derive(ROOT, {2: 202}, 15, 8)
    assert row_of(child, members).digest is None
    assert row_of(child._replace(is_sought=True), members).digest == child.digest
    for number in range(16, 40):
        child = derive(child, {2: number}, number, 8)
        assert (row_of(child, members).digest is None) == (child.runs[-1] > 0)


def test_a_digest_follows_from_the_last_row_that_has_one() -> None:
    made = [ROOT]
    for number, change in enumerate([{2: 202}, {50: 0}, {2: 203}, {60: 5}, {60: 0}], 11):
        made.append(derive(made[-1], change, number, 8))
    rows = {group.state_group: row_of(group, members) for group in made}
    assert [row.digest is None for row in rows.values()] != [False] * len(rows)
    read = groups_of(rows, rows)
    assert [read[group.state_group].digest for group in made] == [group.digest for group in made]


def test_a_change_of_most_of_a_state_is_a_new_root() -> None:
    change = {1: 201, 2: 202, 3: 203, 50: 250}
    child = derive(ROOT, change, 15, 8)
    assert (child.steps, child.runs, child.audience) == ((DeltaRow(15, Map(change)),), (0,), 8)
    assert child.steps[0].origin == (*ROOT.steps, DeltaRow(15, change))
    assert (child.room_nid, child.entries, child.digest) == (7, Map(change), digest_of(change))


def test_what_changed_and_how_to_undo_it() -> None:
    child = derive(ROOT, {2: 202, 50: 0, 4: 104}, 15, 8)
    assert changed_keys(ROOT, child) == changed_keys(child, ROOT) == {2, 4, 50}
    assert difference(ROOT, child) == {2: 202, 50: 0, 4: 104}
    assert difference(child, ROOT) == {2: 102, 50: 150, 4: 0}
    assert changed_keys(ROOT, ROOT) == set()


def test_groups_share_the_beginnings_of_their_paths() -> None:
    one, other = derive(ROOT, {2: 202}, 15, 8), derive(ROOT, {3: 203}, 16, 8)
    rows = {group.state_group: row_of(group, members) for group in (ROOT, one, other)}
    read = groups_of([15, 16], rows)
    for group in (one, other):
        found = read[group.state_group]
        assert [(step.state_group, dict(step.delta)) for step in found.steps] == [
            (step.state_group, dict(step.delta)) for step in group.steps
        ]
        assert found._replace(steps=()) == group._replace(steps=())
    assert read[15].steps[0] is read[16].steps[0]


def test_a_path_with_a_lost_row_is_corruption() -> None:
    child = derive(ROOT, {2: 202}, 15, 8)
    with pytest.raises(StorageCorrupt) as caught:
        group_of(15, {15: row_of(child, members)})
    assert caught.value.reason == "a state group misses rows of its path"
    assert caught.value.ids == {"state_group": 15, "lost": [10]}
