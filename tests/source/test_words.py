"""The prose of the package: plain sentences, as readers of Matrix and Postgres expect them.

Docstrings, comments and comments of the schema do not begin a sentence with a free relative clause
("What is stored …") or with a negation ("Nor …"), and use the field's words. Function docstrings
begin with an imperative (ruff, D401); lines have at most 100 columns (ruff, E501).
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source.test_tidy import ROOT, files_below, name_of

OPENING = re.compile(r"(?:^|(?<=[.!?]) )(Who|What|Whoever|Whose|Nor|Not)\b[^?]*?(?=[.!?]( |$)|$)")
IMAGES = re.compile(r"\b(amid|anew|lest|likewise|in vain|leavings|footing|elders)\b", re.IGNORECASE)
PYTHON = files_below("storage", suffix=".py")
MIGRATED = {"Not shown to users; decided again when the target"}  # needs a migration to change


def prose_of(path: Path) -> Iterator[str]:
    """Yield the paragraphs of the docstrings, and the comments, of a module."""
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from paragraphs(str(node.value.value))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and "noqa" not in token.string:
            yield token.string.lstrip("# ")


def paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def faults(prose: str) -> list[str]:
    """Return the sentences that begin badly, and the words that are images."""
    return [match.group().strip() for match in OPENING.finditer(prose)] + IMAGES.findall(prose)


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_a_module_is_written_plainly(path: Path) -> None:
    assert [fault for prose in prose_of(path) for fault in faults(prose)] == []


def test_the_schema_is_written_plainly() -> None:
    text = (ROOT / "storage/database/schema.sql").read_text("utf-8")
    said = re.findall(r"--+ ?(.*)|'((?:[^']|'')*)'", text)
    found = {fault for comment, literal in said for fault in faults(comment or literal)}
    assert found == MIGRATED


def test_a_fault_is_found() -> None:
    assert faults("Rows are read. What is told is kept.") == ["What is told is kept"]
    assert faults("Nor is it read anew.") == ["Nor is it read anew", "anew"]
    assert faults("It names what is stored. Is it read? Notes follow.") == []
