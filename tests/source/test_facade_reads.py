"""The calls of the facade read through `Store.reads`, which knows of standbys, and write in it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

FACADE: Final = sorted((Path(__file__).resolve().parents[2] / "storage" / "store").glob("*.py"))
WITHIN_WRITING: Final = {"_sliding_once", "_written", "_note_use", "_refuse_unknown_member"}
"""Functions that calls run while they write: `sliding_sync`, `send`, `template`."""
OPENING: Final = {"open.py"}


def is_writing(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and any(
        ast.unparse(item.context_expr) == "store.reads.writing()" for item in node.items
    )


def uses(node: ast.AST) -> Iterator[str]:
    """The places that take a connection of the primary outside of a block that writes."""
    for child in ast.iter_child_nodes(node):
        if is_writing(child):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name in WITHIN_WRITING:
                continue
            yield from (f"{child.name}: {use}" for use in uses(child))
            continue
        if isinstance(child, ast.Attribute) and child.attr in {"connection", "transaction", "run"}:
            text = ast.unparse(child)
            if text.startswith("store.database."):
                yield text
        yield from uses(child)


@pytest.mark.parametrize("path", [one for one in FACADE if one.name not in OPENING], ids=str)
def test_a_call_reads_where_reads_may_go(path: Path) -> None:
    assert list(uses(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_a_call_on_the_primary_would_be_found() -> None:
    code = (
        "async def call(store):\n    async with store.database.connection() as conn:\n        pass"
    )
    assert list(uses(ast.parse(code))) == ["call: store.database.connection"]
    inside = code.replace("    async", "    with store.reads.writing():\n     async")
    assert list(uses(ast.parse(inside.replace("        pass", "         pass")))) == []
