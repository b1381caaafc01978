"""The path of a group in bytes, here and in Postgres."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.database.connection import Connection
from storage.persistent_map import Map
from storage.state.groups import GROUP_COLUMNS, Group, derive, root_group, row_of
from storage.state.paths import FARTHEST, PathColumns, has_base, path_columns, path_of


class StoredPathRow(NamedTuple):
    """A row of a query below."""

    state_group: int
    path: list[int]


def test_the_bytes_of_a_path_by_hand() -> None:
    c, f = path_columns([1, 30], 0), path_columns([1, 30, 31, 35, 36], 3)
    assert c == PathColumns(None, b"\x01\x1d")
    assert f == PathColumns(None, b"\x09\x06\x05\x01")
    assert path_of(30, c, {}) == [1, 30]
    assert path_of(36, f, {30: c}) == [1, 30, 31, 35, 36]
    assert path_of(36, f, {}) == [30, 31, 35, 36], "the rows before a lost one are unknown"
    assert path_columns([7], 0) == PathColumns(None, b"\x01")


@pytest.mark.parametrize("distance,width", [(255, 1), (256, 2), (65_536, 3), (FARTHEST, 4)])
def test_all_distances_have_the_width_of_the_largest(distance: int, width: int) -> None:
    columns = path_columns([1, distance, distance + 1], 0)
    assert columns.path is not None
    assert len(columns.path) == 1 + 2 * width
    assert path_of(distance + 1, columns, {}) == [1, distance, distance + 1]


@pytest.mark.parametrize("path", [[5, 3], [1, FARTHEST + 2], [4, 9, 8]])
def test_an_odd_path_is_stored_as_a_whole(path: list[int]) -> None:
    columns = path_columns(path, 1)
    assert columns == PathColumns([path[-1] - part for part in path], None)
    assert path_of(path[-1], columns, {}) == path


@given(st.lists(st.integers(1, 1 << 40), min_size=2, max_size=40, unique=True), st.integers(0, 7))
def test_a_path_is_what_its_columns_are_read_as(numbers: list[int], low_run: int) -> None:
    path = sorted(numbers)
    low_run = min(low_run, len(path) - 1)
    base = path[: len(path) - low_run]
    columns, of_base = path_columns(path, low_run), path_columns(base, 0)
    assert path_of(path[-1], columns, {base[-1]: of_base}) == path
    if columns.path is not None:
        assert has_base(columns.path) == (low_run > 0)


def grown(rng: random.Random, *, odd: bool) -> list[Group]:
    """Groups of a line with forks, whose numbers are far apart; some ``odd`` ones go down."""
    made = [root_group(1, 7, Map({key: key for key in range(1, 40)}), 0)]
    number = 1
    for _ in range(150):
        number += rng.choice([1, 2, 300, 70_000, 20_000_000])
        parent = made[-1 - min(rng.choice([0, 0, 0, 0, 2, 9]), len(made) - 1)]
        taken = number - 40_000_000 - rng.randrange(1_000) if odd and rng.random() < 0.1 else number
        made.append(derive(parent, {rng.randrange(1, 40): number}, taken, 0))
    return made


@pytest.mark.parametrize("odd", [False, True])
async def test_postgres_reads_the_same_path(conn: Connection, odd: bool) -> None:
    rng = random.Random(f"{odd}")
    made = grown(rng, odd=odd)
    rows = [row_of(group, bool) for group in made]
    assert any(row.path is not None for row in rows)
    assert any(row.back is not None for row in rows) == odd
    await conn.copy_in("state_groups", GROUP_COLUMNS, rows)
    read = await conn.fetch(
        "SELECT state_group, path_of(state_group) AS path FROM state_groups", row=StoredPathRow
    )
    assert dict(read) == {
        group.state_group: [step.state_group for step in group.steps] for group in made
    }
    known = {row.state_group: row for row in rows}
    assert dict(read) == {row.state_group: row.path_in(known) for row in rows}
