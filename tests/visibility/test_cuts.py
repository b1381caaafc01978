"""Where the ranges of a principal are cut into a past row and the row in use."""

from storage.visibility.multirange import Ranges
from storage.visibility.rule import RANGES_MAX, beginning, below, boundary


def ranges(count: int, first: int = 1) -> Ranges:
    return tuple((number, number + 1) for number in range(first, first + 2 * count, 2))


def test_rows_are_cut_after_their_oldest_eight_ranges_once_there_are_more_than_sixteen() -> None:
    assert RANGES_MAX == 8
    assert boundary(ranges(16), ranges(16)) is None
    assert boundary(ranges(17), ()) == 17
    assert boundary((), ranges(17, first=100)) == 116


def test_both_kinds_of_ranges_are_cut_at_the_lower_number() -> None:
    assert boundary(ranges(17, first=100), ranges(17)) == 17
    assert boundary(ranges(17), ranges(17, first=100)) == 17


def test_ranges_that_are_few_enough_do_not_say_where_the_other_kind_is_cut() -> None:
    assert boundary(ranges(16), ranges(17, first=100)) == 116
    assert boundary(ranges(17, first=100), ranges(16)) == 116


def test_a_cut_loses_nothing() -> None:
    audiences, invited = ((1, 5), (7, None)), ((2, 3), (8, 9))
    assert below(8, audiences, invited) == (((1, 5), (7, 8)), ((2, 3),))
    assert beginning(8, audiences, invited) == (((8, None),), ((8, 9),))
    assert beginning(0, audiences, invited) == (audiences, invited)
    assert beginning(2, audiences, invited) == (((2, 5), (7, None)), invited)
    assert beginning(3, ((0, 5),), ((0, 9),)) == (((3, 5),), ((3, 9),))
