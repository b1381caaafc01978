"""Multiranges against sets of numbers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from storage.visibility.multirange import (
    EMPTY,
    Ranges,
    add,
    coarser,
    contains,
    from_text,
    remove,
    to_text,
    unending,
    union,
)

NUMBERS = range(-4, 24)
BEYOND = 100  # what a range without an end holds, too
change = st.tuples(st.booleans(), st.integers(-3, 20), st.one_of(st.none(), st.integers(1, 9)))


def held(ranges: Ranges) -> set[int]:
    return {number for number in (*NUMBERS, BEYOND) if contains(ranges, number)}


@given(st.lists(change, max_size=12))
def test_numbers_are_added_and_removed_as_in_a_set(
    changes: list[tuple[bool, int, int | None]],
) -> None:
    ranges, numbers = EMPTY, set[int]()
    for adding, low, length in changes:
        high = None if length is None else low + length
        some = {
            number
            for number in (*NUMBERS, BEYOND)
            if low <= number and (high is None or number < high)
        }
        ranges = add(ranges, low, high) if adding else remove(ranges, low, high)
        numbers = numbers | some if adding else numbers - some
        assert held(ranges) == numbers
        ends = [end for pair in ranges for end in pair]
        assert None not in ends[:-1], "only the last has no end"
        assert all(end is None or start < end for start, end in ranges)
        assert all(
            before[1] is not None and before[1] < after[0] for before, after in pairwise(ranges)
        ), "none touch"
        assert from_text(to_text(ranges)) == ranges


def test_one_range_in_words() -> None:
    assert to_text(()) == "{}"
    assert to_text(((-1, 5), (7, None))) == "{[-1,5),[7,)}"
    assert from_text("{[-1,5),[7,)}") == ((-1, 5), (7, None))
    assert from_text("{[-9,-3)}") == ((-9, -3),)
    assert from_text("{}") == ()


def test_the_last_range_may_have_no_end() -> None:
    assert [unending(ranges) for ranges in ((), ((1, 2),), ((1, 2), (3, None)))] == [
        False,
        False,
        True,
    ]


def test_ranges_that_overlap_or_touch_are_one() -> None:
    assert union([(5, 9), (1, 3), (3, 4), (8, None)]) == ((1, 4), (5, None))
    assert union([]) == EMPTY


def test_the_smallest_gaps_are_closed_first() -> None:
    ranges: Ranges = ((0, 1), (11, 12), (14, 15), (20, 21), (40, None))
    assert coarser(ranges, 5) is ranges
    assert coarser(ranges, 4) == ((0, 1), (11, 15), (20, 21), (40, None))
    assert coarser(ranges, 3) == ((0, 1), (11, 21), (40, None))
    assert coarser(ranges, 1) == ((0, None),)
    assert coarser(((0, 1), (3, 4), (6, 7)), 2) == ((0, 4), (6, 7)), "of equal gaps the first"


def test_what_changes_nothing_gives_the_same_ranges() -> None:
    ranges: Ranges = ((1, 3), (5, None))
    assert remove(ranges, 3, 5) is ranges
    assert remove(ranges, 7, 7) is ranges
    assert remove(ranges, 2, 6) == ((1, 2), (6, None))
    assert add(ranges, 3, 5) == ((1, None),)
    assert add(((1, 3), (5, 7)), 8, 9) == ((1, 3), (5, 7), (8, 9))
    assert add(((1, 3), (5, 7)), 7, 9) == ((1, 3), (5, 9))
    assert add(((5, 7),), 1, 5) == ((1, 7),)
    assert add(((5, 7),), 1, 4) == ((1, 4), (5, 7))
