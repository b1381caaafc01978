"""Templates are filled completely, or not at all."""

import pytest

from storage.database.placeholders import fill, fill_all


def test_each_placeholder_gets_its_part() -> None:
    template = "SELECT {columns} FROM t WHERE a = ANY('{}') ORDER BY a {order}, b {order}"
    filled = fill(template, columns="\n    a,\n    b\n", order="DESC")
    assert filled == "SELECT a,\n    b FROM t WHERE a = ANY('{}') ORDER BY a DESC, b DESC"


def test_an_array_of_numbers_is_no_placeholder() -> None:
    assert fill("SELECT '{4,5}'::int[]") == "SELECT '{4,5}'::int[]"


@pytest.mark.parametrize(
    "parts,named",
    [
        ({}, "order"),
        ({"order": "DESC", "limit": "1"}, "limit"),
        ({"order": "{direction}"}, "order"),
    ],
)
def test_what_does_not_fit_is_refused(parts: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fill("SELECT a FROM t ORDER BY a {order}", **parts)


def test_numbers_are_put_in_by_name() -> None:
    filled = fill("SELECT {which} FROM m WHERE membership = {JOIN}", which="{KEY_NAME}")
    assert filled == "SELECT 9 /* KEY_NAME */ FROM m WHERE membership = 5 /* JOIN */"
    with pytest.raises(ValueError, match="no such number"):
        fill("SELECT {PARTED}")


def test_a_part_may_name_other_parts() -> None:
    parts = {"by": "ORDER BY a {order}", "order": "DESC", "unused": "{nothing}"}
    assert fill_all("SELECT a FROM t {by}", parts) == "SELECT a FROM t ORDER BY a DESC"
    with pytest.raises(KeyError, match="order"):
        fill_all("SELECT a FROM t {by}", {"by": parts["by"]})


def test_lines_of_a_part_are_indented_and_an_empty_part_leaves_no_line() -> None:
    filled = fill("SELECT *\n    {source}\n    {rest}\n", source="\nFROM a\nJOIN b\n", rest="")
    assert filled == "SELECT *\n    FROM a\n    JOIN b\n"
