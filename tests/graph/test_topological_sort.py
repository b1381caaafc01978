"""The topological sort against the plain statement, compared position by position."""

from hypothesis import given
from hypothesis import strategies as st

from storage.graph.topological_ordering import topological_sort


@st.composite
def waiting(draw: st.DrawFn) -> list[set[int]]:
    size = draw(st.integers(0, 9))
    return [draw(st.sets(st.integers(0, size - 1), max_size=3)) - {index} for index in range(size)]


def patiently(waits: list[set[int]]) -> list[int]:
    """Again and again the first that waits for nothing more; in a circle the first that is left."""
    left, turns = list(range(len(waits))), list[int]()
    while left:
        turns.append(next((index for index in left if waits[index] <= set(turns)), left[0]))
        left.remove(turns[-1])
    return turns


@given(waiting())
def test_the_order_is_the_patient_one(waits: list[set[int]]) -> None:
    assert topological_sort(waits) == patiently(waits)


def test_who_waits_in_a_circle_still_comes() -> None:
    assert topological_sort([{1}, {0}, {1}]) == [0, 1, 2]


def test_of_those_that_may_go_the_first_goes() -> None:
    assert topological_sort([]) == []
    assert topological_sort([{2}, set(), set()]) == [1, 2, 0]
    assert topological_sort([{1, 3}, set(), set(), {2}]) == [1, 2, 3, 0]
    assert topological_sort([set(), {0}, set(), {1}]) == [0, 1, 2, 3]


def test_a_circle_is_opened_once() -> None:
    assert topological_sort([{2}, {0}, {1}, {2}]) == [0, 1, 2, 3]
    assert topological_sort([set(), {2}, {1}, set()]) == [0, 3, 1, 2]
    assert topological_sort([{0}, set()]) == [1, 0]
