"""Templates are filled completely, or not at all."""

import pytest

from storage.database.placeholders import fill


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
