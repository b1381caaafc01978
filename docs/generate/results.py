"""`benchmarks/results/*.md`: the figures of each committed run, from its JSON."""

from itertools import groupby
from typing import Any, Final

from benchmarks.figures import Figure, cells, figures, read, written
from benchmarks.harness import RESULTS
from benchmarks.report import about, where
from docs.generate.markup import code, page, table

INTRODUCTION: Final = """
# All figures

One page for each benchmark, made from the JSON that its last full run has written. A spread goes
from the slowest to the fastest round. Without one, there is one value.
"""


def pages() -> dict[str, str]:
    """Return a page for each results file of a full run, and an index."""
    documents = {path.stem: read(path) for path in sorted(RESULTS.glob("*.json"))}
    full = {name: document for name, document in documents.items() if not document["quick"]}
    return {"index": _index(full)} | {name: _page(name, one) for name, one in full.items()}


def _index(documents: dict[str, dict[str, Any]]) -> str:
    rows = [
        (f"[{name}]({name}.md)", about(name), document["when"][:10], code(document["on"]["commit"]))
        for name, document in documents.items()
    ]
    return page(INTRODUCTION, table(("Benchmark", "What it measures", "Date", "Commit"), rows))


def _page(name: str, document: dict[str, Any]) -> str:
    found = list(figures(document).values())
    sections = [
        f"## {title.capitalize()}\n\n{_table(list(group))}"
        for title, group in groupby(found, key=lambda one: written(one.path[:1]))
    ]
    command = f"Command: `python -m benchmarks {name}`. {about(name)}."
    return page(f"# {name}", command, where(document) + ".", *sections)


def _table(found: list[Figure]) -> str:
    rows = [(written(one.path[1:]) or written(one.path), *cells(one)) for one in found]
    return table(("Figure", "Value", "Spread"), rows)
