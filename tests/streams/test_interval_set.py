"""`IntervalSet` against a plain set."""

from hypothesis import given
from hypothesis import strategies as st

from storage.streams.positions import IntervalSet

numbers = st.integers(0, 30)


@given(st.lists(numbers), st.none() | numbers, numbers)
def test_runs_answer_as_a_set_does(added: list[int], forgotten: int | None, probe: int) -> None:
    runs = IntervalSet()
    plain: set[int] = set()
    for number in added:
        runs.add(number)
        plain.add(number)
    if forgotten is not None:  # whole runs only: a member of a run that reaches the bound stays
        runs.discard_below(forgotten)
        plain = {number for number in plain if plain.issuperset(range(number, forgotten + 1))}
    assert runs.floor(probe) == max((number for number in plain if number <= probe), default=None)
    end = probe - 1
    while end + 1 in plain:
        end += 1
    assert runs.run_end(probe) == end
    assert len(runs) == sum(number - 1 not in plain for number in plain)
