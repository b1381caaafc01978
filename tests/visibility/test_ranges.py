"""Multiranges against sets of numbers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from storage.visibility.ranges import EMPTY, Ranges, add, contains, from_text, remove, to_text

NUMBERS = range(-4, 24)
BEYOND = 100  # what a range without an end holds, too
change = st.tuples(st.booleans(), st.integers(-3, 20), st.one_of(st.none(), st.integers(1, 9)))


def held(ranges: Ranges) -> set[int]:
    return {number for number in (*NUMBERS, BEYOND) if contains(ranges, number)}


@given(st.lists(change, max_size=12))
def test_numbers_are_added_and_removed_as_in_a_set(changes: list[tuple[bool, int, int | None]]) -> None:
    ranges, numbers = EMPTY, set[int]()
    for adding, low, length in changes:
        high = None if length is None else low + length
        some = {number for number in (*NUMBERS, BEYOND) if low <= number and (high is None or number < high)}
        ranges = add(ranges, low, high) if adding else remove(ranges, low, high)
        numbers = numbers | some if adding else numbers - some
        assert held(ranges) == numbers
        ends = [end for pair in ranges for end in pair]
        assert None not in ends[:-1], "only the last has no end"
        assert all(end is None or start < end for start, end in ranges)
        assert all(before[1] is not None and before[1] < after[0] for before, after in pairwise(ranges)), "none touch"
        assert from_text(to_text(ranges)) == ranges
