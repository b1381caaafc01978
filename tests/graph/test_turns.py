"""Which comes when, where some wait for others: against the plain statement, tried out position by position."""

from hypothesis import given
from hypothesis import strategies as st

from storage.graph.turns import in_turn


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
    assert in_turn(waits) == patiently(waits)


def test_who_waits_in_a_circle_still_comes() -> None:
    assert in_turn([{1}, {0}, {1}]) == [0, 1, 2]
