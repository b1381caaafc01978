"""The topological ordering of one event: between its parents and children, whatever its depth."""

import pytest

from storage.graph.topological_ordering import (
    HINT_CEILING,
    HINT_SLACK,
    next_after,
    ordering,
    raised_orderings,
)


def test_the_first_event_is_at_one_and_a_child_one_above_its_highest_parent() -> None:
    assert next_after([]) == 1
    assert next_after([4, 9, 2]) == 10


def test_the_depth_has_no_say_where_all_parents_are_stored() -> None:
    assert ordering([4], complete=True, depth=1_000, children=[], room_max=9) == 5


@pytest.mark.parametrize("depth", [7, 8, 1_000])
def test_an_event_after_a_gap_stays_below_its_lowest_child(depth: int) -> None:
    """A depth at or above the child's ordering gives the last position below the child.

    It never gives the child's own.
    """
    assert ordering([3], complete=False, depth=depth, children=[9, 7], room_max=20) == 6


def test_an_event_after_a_gap_takes_its_depth_where_that_fits() -> None:
    assert ordering([3], complete=False, depth=5, children=[7], room_max=20) == 5


def test_an_event_after_a_gap_stays_above_its_parents() -> None:
    """Also where no room is left below the child, which then moves up."""
    assert ordering([3], complete=False, depth=-8, children=[7], room_max=20) == 4
    assert ordering([6], complete=False, depth=7, children=[7], room_max=20) == 7


def test_a_boldly_claimed_depth_ends_a_slack_above_the_room() -> None:
    assert (
        ordering([], complete=False, depth=1 << 62, children=[], room_max=20) == 20 + HINT_SLACK - 1
    )
    assert ordering([], complete=False, depth=1 << 63, children=[], room_max=0) == HINT_CEILING - 1
    assert (
        ordering([], complete=False, depth=1 << 63, children=[], room_max=HINT_CEILING - 5)
        == HINT_CEILING - 1
    )


def test_only_the_events_that_must_move_do() -> None:
    """1 moves to 5: its child 2 to 6, its grandchild 3 to 7.

    4 is no descendant, and 5 is already high enough.
    """
    rows = [(2, 4, [1]), (4, 4, []), (3, 5, [2, 4]), (5, 9, [3])]
    assert raised_orderings({1: 5}, rows) == ({2: 6, 3: 7}, True)


def test_rows_that_end_too_early_are_reported() -> None:
    assert raised_orderings({1: 5}, [(2, 4, [1])]) == ({2: 6}, False)
    assert raised_orderings({1: 5}, [(2, 4, [1]), (3, 6, [])]) == ({2: 6}, False)
    assert raised_orderings({1: 5}, [(2, 4, [1]), (3, 7, [])]) == ({2: 6}, True)


def test_an_event_whose_ordering_is_decided_does_not_move() -> None:
    assert raised_orderings({1: 5, 2: 4}, [(2, 4, [1]), (3, 6, [2])]) == ({}, True)
