"""The queue of waiting lines returns them by depth, from memory and disk, while it is filled."""

from hypothesis import given
from hypothesis import strategies as st

from storage.importing.run import RetryLine, RetryQueue

LINES = st.builds(
    RetryLine,
    depth=st.floats(-5, 5, allow_nan=False),
    source=st.integers(0, 2),
    number=st.integers(1, 2**40),
    raw=st.binary(max_size=20),
    note=st.binary(max_size=20),
)


@given(
    lines=st.lists(LINES, max_size=60), in_memory_max=st.integers(1, 10), runs_max=st.integers(1, 5)
)
def test_it_sorts(lines: list[RetryLine], in_memory_max: int, runs_max: int) -> None:
    with RetryQueue(in_memory_max=in_memory_max, runs_max=runs_max) as held:
        for line in lines:
            held.add(line)
        assert len(held) == len(lines)
        assert list(held.drain()) == sorted(lines)
        assert len(held) == 0
        assert list(held.drain()) == []


@given(lines=st.lists(LINES, max_size=40), in_memory_max=st.integers(1, 10))
def test_what_is_put_in_while_it_is_emptied_is_for_the_next_time(
    lines: list[RetryLine], in_memory_max: int
) -> None:
    with RetryQueue(in_memory_max=in_memory_max, runs_max=2) as held:
        for line in lines:
            held.add(line)
        for line in held.drain():
            if line.source:
                held.add(line)
        assert list(held.drain()) == sorted(line for line in lines if line.source)
