"""The page about what others may send names a test for each input, and each of them exists."""

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs/reference/hostile-input.md"
NAMED: Final = re.compile(r"^`(tests/[\w/]+\.py)::(test_\w+)`$")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "Input"]


def test_each_row_is_whole() -> None:
    assert len(rows()) > 20
    for row in rows():
        assert len(row) == 4
        assert all(row), row


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_each_test_exists(row: list[str]) -> None:
    named = NAMED.match(row[3])
    assert named is not None, row
    text = (ROOT / named[1]).read_text("utf-8")
    assert re.search(rf"^(async )?def {named[2]}\(", text, re.MULTILINE), row
