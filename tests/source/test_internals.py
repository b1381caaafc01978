"""The pages about the source: each has its place, and names files and columns that exist.

Where the folder is clear, a page names a file without it. tests/docs/test_names.py checks paths.
"""

import re
from pathlib import Path

import pytest

from tests.source.test_tidy import ROOT

DOCS = ROOT / "docs"
INTERNALS = sorted((DOCS / "internals").glob("*.md"))
DECISIONS = sorted((DOCS / "decisions").glob("0*.md"))
PAGES = [*INTERNALS, *DECISIONS, DOCS / "glossary.md"]

BARE_NAME = re.compile(r"`([\w-]+\.(?:py|sql|toml))`")
FOLDERS = ("storage", "tests", "benchmarks", "migrations")
FILES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")} | {
    "pyproject.toml"
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def missing(text: str) -> list[str]:
    """Return the names of files, without a folder, that no file has."""
    return [name for name in BARE_NAME.findall(text) if name not in FILES]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_names_only_files_that_exist(path: Path) -> None:
    assert missing(path.read_text("utf-8")) == []


def test_a_missing_file_is_found() -> None:
    assert missing("`graph.py` `gone.py` `storage/gone.py`") == ["gone.py"]


@pytest.mark.parametrize("folder", ["internals", "decisions"])
def test_each_page_is_linked_from_its_index(folder: str) -> None:
    index = (DOCS / folder / "index.md").read_text("utf-8")
    pages = {path.name for path in (DOCS / folder).glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


def test_the_order_of_internals_lists_each_page_once() -> None:
    order = re.findall(r"- ([\w-]+\.md)", (DOCS / "internals/.nav.yml").read_text("utf-8"))
    assert sorted(order) == [path.name for path in INTERNALS]


@pytest.mark.parametrize("path", INTERNALS, ids=name_of)
def test_a_page_of_internals_says_where_its_tests_are(path: Path) -> None:
    text = path.read_text("utf-8")
    assert path.name == "index.md" or "\n## Tests\n" in text
    assert 60 <= len(text.splitlines()) <= 160


def test_decisions_are_short_and_numbered() -> None:
    numbers = [int(path.name[:4]) for path in DECISIONS]
    assert numbers == list(range(1, len(DECISIONS) + 1))
    for path, number in zip(DECISIONS, numbers, strict=True):
        lines = path.read_text("utf-8").splitlines()
        assert lines[0].startswith(f"# {number}. ")
        assert len(lines) <= 40


def test_the_glossary_is_alphabetical() -> None:
    text = (DOCS / "glossary.md").read_text("utf-8")
    terms = [
        term.lower().replace("-", " ") for term in re.findall(r"^## (.+)$", text, re.MULTILINE)
    ]
    assert terms == sorted(set(terms))
    assert len(terms) > 50


def test_tables_of_the_schema_that_internals_name_exist() -> None:
    """Check the first column of each table under "Data": one of tables, or of columns."""
    schema = (ROOT / "storage/database/schema.sql").read_text("utf-8")
    for path in INTERNALS:
        data = path.read_text("utf-8").partition("\n## Data\n")[2].partition("\n## ")[0]
        for row in re.findall(r"^\| ([^|]+) \|", data, re.MULTILINE):
            for code in re.findall(r"`([a-z_.]+)`", row):
                assert re.search(rf"\b{code.rpartition('.')[2]}\b", schema), (path.name, code)
