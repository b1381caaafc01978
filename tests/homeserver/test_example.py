"""What the example may use of this library."""

import ast
import re
from pathlib import Path
from typing import Final

from tests.cli.running import ROOT

FILES: Final = sorted((ROOT / "examples" / "homeserver").glob("*.py"))
LINES_MAX: Final = 700
PUBLIC: Final = {"storage", "storage.federation"}


def imported(path: Path) -> set[str]:
    """The modules of the library that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    return {one for one in found if one.partition(".")[0] == "storage"}


def test_it_is_short() -> None:
    assert sum(len(path.read_text("utf-8").splitlines()) for path in FILES) <= LINES_MAX


def test_it_imports_the_public_names() -> None:
    assert len(FILES) > 5
    assert set().union(*map(imported, FILES)) <= PUBLIC


def test_it_has_no_sql_and_no_inside_of_the_store() -> None:
    inside = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE)\b|store\.(_|database|writer|caches)")
    assert [path.name for path in FILES if inside.search(path.read_text("utf-8"))] == []
