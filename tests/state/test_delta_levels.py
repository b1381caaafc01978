"""Which rows a new state group keeps of its parent's path: the worked counters, by hand."""

import pytest

from storage.state import paths
from storage.state.paths import (
    RADIX,
    DeltaPlacement,
    affordable,
    candidates,
    level_count,
    pack,
    root,
    unpack,
)


@pytest.mark.parametrize(
    "size,count",
    [(0, 1), (1, 1), (8, 1), (9, 2), (64, 2), (65, 3), (8**10, 10), (8**10 + 1, 10), (1 << 60, 10)],
)
def test_a_state_has_as_many_levels_as_its_size_needs(size: int, count: int) -> None:
    assert RADIX == 8
    assert level_count(size) == count
    assert root(size) == DeltaPlacement(0, (0,) * count)


def test_a_group_goes_to_the_lowest_level_that_has_room() -> None:
    assert candidates((0, 0), 64) == [DeltaPlacement(1, (0, 1)), DeltaPlacement(0, (0, 0))]
    assert candidates((0, 6), 64) == [DeltaPlacement(7, (0, 7)), DeltaPlacement(0, (0, 0))]
    assert candidates((2, 6), 64) == [DeltaPlacement(9, (2, 7)), DeltaPlacement(0, (0, 0))]


def test_a_group_takes_over_a_full_level() -> None:
    assert candidates((0, 7), 64) == [DeltaPlacement(1, (1, 0)), DeltaPlacement(0, (0, 0))]
    assert candidates((3, 7), 64) == [DeltaPlacement(4, (4, 0)), DeltaPlacement(0, (0, 0))]
    assert candidates((5, 7, 7), 512) == [
        DeltaPlacement(6, (6, 0, 0)),
        DeltaPlacement(0, (0, 0, 0)),
    ]
    assert candidates((0, 3, 7), 512) == [
        DeltaPlacement(4, (0, 4, 0)),
        DeltaPlacement(0, (0, 0, 0)),
    ]


def test_a_group_is_a_root_where_every_level_is_full() -> None:
    assert candidates((7, 7), 64) == [DeltaPlacement(0, (0, 0))]


def test_a_state_that_grew_has_more_levels() -> None:
    assert candidates((7,), 9) == [DeltaPlacement(1, (1, 0)), DeltaPlacement(0, (0, 0))]
    assert candidates((2,), 65) == [DeltaPlacement(3, (0, 0, 3)), DeltaPlacement(0, (0, 0, 0))]


def test_a_delta_pays_while_a_reader_folds_less_than_the_state_itself() -> None:
    assert paths.FACTOR == 1.0
    assert affordable(5, 4, 10)
    assert not affordable(5, 5, 10)
    assert not affordable(0, 0, 0)


def test_runs_are_digits_after_a_one() -> None:
    assert pack(()) == 1
    assert pack((0, 0)) == 64
    assert pack((2, 7)) == 64 + 2 * 8 + 7
    assert unpack(64 + 2 * 8 + 7) == (2, 7)
    assert unpack(1) == ()
