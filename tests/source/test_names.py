"""The identifiers of `storage/`: terms of Matrix, Postgres and Python, no words of the house.

Checked are the names that the source defines: functions, classes, parameters, assigned names and
attributes, imported names that get another one. Prose is checked by `tests/source/test_words.py`.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.source.test_tidy import files_below, name_of, trees

OF_THE_HOUSE = frozenset(
    [
        *("told", "said", "asked", "aside", "lane", "lanes", "mend", "mended", "landed", "news"),
        *("quiet", "brief", "situation", "departed", "glance", "glanced", "judged", "lie", "lies"),
        *("lying", "leavings", "footing", "deal", "dealt", "incarnation", "era"),
    ]
)
"""Words that do not say what a value is: a name has the term (rows, queue, stored, deleted)."""

ORDINARY = {
    ("storage/cli/", "quiet"): "the option --quiet of commands",
    ("storage/maintenance/purge/job.py", "aside"): "the column set_aside_count of purge_jobs",
}
"""Where a word is the term itself, by the beginning of the file's name, with the reason."""

PYTHON = files_below("storage", suffix=".py")
CAPITALISED = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def definitions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each name that a module defines, with its line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield line, node.name
            case ast.arg():
                yield line, node.arg
            case ast.Name(ctx=ast.Store()):
                yield line, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield line, node.attr
            case ast.alias(asname=str(name)):
                yield line, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield line, name
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield line, name


def words(name: str) -> set[str]:
    """Return the words of a name: split at "_", and at capitals in the name of a class."""
    return {
        word.lower() for part in name.split("_") for word in CAPITALISED.findall(part) or [part]
    }


def house_words(name: str, tree: ast.Module) -> list[tuple[str, str]]:
    """Return where a module defines a name with a word of the house, and the word."""
    return [
        (f"{name}:{line} {identifier}", word)
        for line, identifier in definitions(tree)
        for word in sorted(words(identifier) & OF_THE_HOUSE)
    ]


def is_allowed(place: str, word: str) -> bool:
    return any(place.startswith(start) and word == term for start, term in ORDINARY)


@pytest.fixture(scope="module")
def of_storage() -> list[tuple[str, str]]:
    return [fault for name, tree in trees(PYTHON) for fault in house_words(name, tree)]


def test_names_are_terms_of_the_field(of_storage: list[tuple[str, str]]) -> None:
    assert [place for place, word in of_storage if not is_allowed(place, word)] == []


def test_each_ordinary_word_is_in_use(of_storage: list[tuple[str, str]]) -> None:
    used = {
        (start, word)
        for place, word in of_storage
        for start, _ in ORDINARY
        if place.startswith(start)
    }
    assert ORDINARY.keys() <= used


def test_modules_are_named_by_terms_of_the_field() -> None:
    faults = [
        name
        for name in map(name_of, PYTHON)
        for word in words(name.rpartition("/")[2].removesuffix(".py")) & OF_THE_HOUSE
        if not is_allowed(name, word)
    ]
    assert faults == []


@pytest.mark.parametrize(
    "source,word",
    [
        ("def is_told(): ...", "told"),
        ("class LineBundle:\n    lying: int = 0", "lying"),
        ("class WantedNews: ...", "news"),
        ("def put(aside): ...", "aside"),
        ("self._lanes = {}", "lanes"),
        ("SQL_LEAVINGS = 1", "leavings"),
        ("for lie in rows: ...", "lie"),
        ("[dealt for dealt in rows]", "dealt"),
        ("import x as news", "news"),
        ("with work() as asked: ...", "asked"),
        ("if (said := name): ...", "said"),
        ("match row:\n    case [judged, *era]: ...", "judged"),
    ],
)
def test_a_word_of_the_house_is_found(source: str, word: str) -> None:
    assert word in [found for _, found in house_words("example.py", ast.parse(source))]


def test_other_names_pass() -> None:
    source = "def believed(dealer, camera): applied = unquieted = 'told'; row.said; earlier = 1"
    assert house_words("example.py", ast.parse(source)) == []
