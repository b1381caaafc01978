"""The recipes in docs/how-to name every place of a change.

Each page is compared with an example that is there: the files that name it must be the files that
the page lists. A place that is added, and that a page lacks, fails its test.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from storage.database.columns import EVENTS
from storage.database.migrate import HEAD_REVISION
from tests.source.test_tidy import ROOT

PAGES = ROOT / "docs" / "how-to"
PLACE = re.compile(r"^- `([^`]+)`: \S", re.MULTILINE)


def places(page: str) -> set[str]:
    """Return the files that a recipe lists."""
    text = (PAGES / f"{page}.md").read_text("utf-8")
    return set(PLACE.findall(text.partition("\n## Places\n")[2]))


def naming(pattern: str, *folders: str, suffixes: Iterable[str] = (".py",)) -> set[str]:
    """Return the files below some folders whose text matches."""
    wanted = re.compile(pattern)
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")))
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix in suffixes and wanted.search(path.read_text("utf-8"))
    }


def stream_places() -> set[str]:
    named = naming(r"""["']to_device["']""", "storage", suffixes=(".py", ".sql"))
    return named | naming(r"CREATE TABLE to_device ", "storage", suffixes=(".sql",))


def query_places() -> set[str]:
    return naming(r"\bevent_near\b", "storage") | {
        path
        for path in naming(r"\bevent_near\b", "tests/oracle")
        if not Path(path).name.startswith("test_")
    }


def version_places() -> set[str]:
    return naming(r'"12"', "storage")


EDGES = r"\.(?:prev|auth)_event_ids\b"
ANSWER = re.compile(r"^\| [^|]+\? \| `(\w+)` \| `([^`]+)` \| (`[^|]+`) \|$", re.MULTILINE)


def edge_places() -> set[str]:
    """Return the files that read the edges of an event, outside the pure layers."""
    return {
        path
        for path in naming(EDGES, "storage")
        if not path.startswith(("storage/event/", "storage/auth/"))
    }


def callers_of(function: str, home: str) -> set[str]:
    """Return the files below storage/ that call a function of the file ``home``."""
    module = home.removesuffix(".py").replace("/", ".")
    found = set()
    for name in naming(rf"\b{function}\b", "storage"):
        tree = ast.parse((ROOT / name).read_text("utf-8"))
        imported = name == home or any(
            isinstance(node, ast.ImportFrom)
            and node.module == module
            and function in {alias.name for alias in node.names}
            for node in ast.walk(tree)
        )
        if imported and any(
            isinstance(node, ast.Call) and getattr(node.func, "id", None) == function
            for node in ast.walk(tree)
        ):
            found.add(name)
    return found


def edge_section(name: str = "Edges of another kind") -> str:
    text = (PAGES / "add-a-room-version.md").read_text("utf-8")
    return text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_each_question_about_edges_is_answered_by_one_function() -> None:
    answers = ANSWER.findall(edge_section())
    assert len(answers) == edge_section().count("? |") == 9
    for function, home, callers in answers:
        assert callers_of(function, home) == set(callers.strip("`").split("`, `")), function


def test_few_files_read_the_edges_of_an_event_themselves() -> None:
    listed = PLACE.findall(edge_section())
    assert edge_places() == set(listed)
    assert len(listed) == len(set(listed))


PLANNING = tuple(
    f"storage/{name}"
    for name in (
        "database",
        "federation",
        "maintenance",
        "persist",
        "pipeline/imports",
        "queries",
        "rebuild",
    )
)


def test_the_places_of_a_table_of_edges_and_of_a_second_kind_of_extremities() -> None:
    """Those of `auth_chains` and of `forward_extremities`, which such ones would follow."""
    table, _, column = edge_section("Tables of such edges").partition("\n**A second kind")
    suffixes = (".py", ".sql")
    assert set(PLACE.findall(table)) == naming(r"\bauth_chains\b", "storage", suffixes=suffixes)
    named = naming(r"\bforward_extremities|\.extremities\b", *PLANNING, suffixes=suffixes)
    assert set(PLACE.findall(column)) == named


def migration_places() -> set[str]:
    """A page cannot name a revision that is not written yet.

    The schema of a new database names the newest "post" step, or the first step of all.
    """
    revisions = {
        path.name[:4]: path.read_text("utf-8")
        for path in (ROOT / "migrations/versions").glob("*.py")
    }
    posts = [revision for revision, text in revisions.items() if '[Phase] = "post"' in text]
    post = max(posts, default=min(revisions))
    suffixes = (".py", ".sql")
    named = naming(rf"['\"]{HEAD_REVISION}['\"]", "storage", "migrations", suffixes=suffixes)
    named |= naming(rf"\('{post}'\)", "storage", suffixes=suffixes)
    return {
        "migrations/versions/<revision>.py" if Path(path).name.startswith(HEAD_REVISION) else path
        for path in named
    }


def column_lists(*folders: str) -> set[str]:
    """Return the files with a statement, a function or a class that names ten columns of events."""
    distinctive = set(EVENTS.columns) - {"depth", "event_id", "event_nid", "json", "room_nid"}
    found = set()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                named = distinctive.intersection(re.findall(r"\w+", ast.unparse(node)))
                if len(named) >= 10:
                    found.add(path.relative_to(ROOT).as_posix())
    return found


WRITING = (
    "storage/database",
    "storage/persist",
    "storage/pipeline/imports",
    "storage/rebuild",
)


def column_sections() -> tuple[set[str], set[str]]:
    """Return the files for a column that is only stored, and for one that planning reads."""
    text = (PAGES / "add-a-column.md").read_text("utf-8").partition("\n## Places\n")[2]
    stored, _, read = text.partition("\n### A column that planning reads\n")
    return set(PLACE.findall(stored)), set(PLACE.findall(read))


def test_a_stored_column_has_few_places() -> None:
    stored, _ = column_sections()
    assert naming(r"\bhas_url\b", "storage") == stored
    assert len(stored) <= 4


def test_a_column_that_planning_reads_has_few_places() -> None:
    _, read = column_sections()
    made = naming(r"(?<!class )\bEventRow\(", *WRITING)
    assert naming(r"\bineffective\b", *WRITING) | made | column_lists(*WRITING) == read
    assert len(read) <= 7


@pytest.mark.parametrize(
    "page, found",
    [
        ("add-a-stream", stream_places()),
        ("add-a-query", query_places()),
        ("add-a-room-version", version_places()),
        ("add-a-migration", migration_places()),
    ],
)
def test_a_recipe_names_each_place(page: str, found: set[str]) -> None:
    assert found == places(page)


def test_the_files_of_all_recipes_are_there() -> None:
    named = {place for page in PAGES.glob("add-*.md") for place in places(page.stem)}
    assert named
    assert [place for place in named if "<" not in place and not (ROOT / place).is_file()] == []
