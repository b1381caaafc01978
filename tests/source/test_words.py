"""The prose of the package and its pages: plain sentences, with the words of Matrix and Postgres.

Docstrings, comments, comments of the schema and paragraphs of pages do not begin a sentence with a
free relative clause ("What is stored …") or with a negation ("Nor …"), and use the field's words.
Function docstrings begin with an imperative (ruff, D401); lines have at most 100 columns (ruff,
E501).
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import paragraphs as paragraphs_of_page
from tests.source.test_tidy import ROOT, files_below, name_of

OPENING = re.compile(r"(?:^|(?<=[.!?]) )(Who|What|Whoever|Whose|Nor|Not)\b[^?]*?(?=[.!?]( |$)|$)")
IMAGES = re.compile(r"\b(amid|anew|lest|likewise|in vain|leavings|footing|elders)\b", re.IGNORECASE)
OF_THE_HOUSE = re.compile(
    r"\b(tells?|told|telling|sight|stretch(?:es)?|judged|stands? on|comes? to stand|strays?)\b",
    re.IGNORECASE,
)
WORDS_MAX = 25
LONG_SENTENCES_MAX = 1 / 1000  # of the words of all pages
PYTHON = files_below("storage", suffix=".py")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *files_below("docs", suffix=".md")]


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
    assert found == set()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_is_written_plainly(path: Path) -> None:
    said = list(paragraphs_of_page(path.read_text("utf-8")))
    assert [(line, fault) for line, prose in said for fault in faults(prose)] == []
    assert [(line, word) for line, prose in said for word in OF_THE_HOUSE.findall(prose)] == []


def test_sentences_of_pages_are_short() -> None:
    lengths = {
        (name_of(path), line, sentence): len(re.findall(r"[A-Za-z']+", sentence))
        for path in PAGES
        for line, prose in paragraphs_of_page(path.read_text("utf-8"))
        for sentence in re.split(r"(?<=[.!?;:])\s+", prose)
    }
    long = [place for place, words in lengths.items() if words > WORDS_MAX]
    assert len(long) <= LONG_SENTENCES_MAX * sum(lengths.values()), long


def test_a_fault_of_a_page_is_found() -> None:
    page = "# What it is\n\n- Rows.\n- Not\n  read.\n\n| What |\n\n```text\nWho\n```\n"
    said = list(paragraphs_of_page(page))
    assert said == [(3, "Rows."), (4, "Not read.")]
    assert faults(said[1][1]) == ["Not read"]


def test_a_fault_is_found() -> None:
    assert faults("Rows are read. What is told is kept.") == ["What is told is kept"]
    assert faults("Nor is it read anew.") == ["Nor is it read anew", "anew"]
    assert faults("It names what is stored. Is it read? Notes follow.") == []
