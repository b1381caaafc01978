"""The list of long tests: each line is a test that exists, and some parameters run every day."""

import ast
from pathlib import Path

import pytest

from tests import long_run

ROOT = Path(__file__).resolve().parents[2]


def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_each_line_is_a_test() -> None:
    assert len(long_run.listed()) > 50
    for name in long_run.listed():
        path, _, function = name.partition("::")
        assert function.partition("[")[0] in functions_of(path), name


def test_they_are_in_order() -> None:
    names = list(long_run.listed())
    assert names == sorted(names)


def test_some_parameters_run_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"a.py::test_a": 2, "a.py::test_b": 0, "a.py::test_c[x 1]": 0, "a.py::test_d": 3}
    monkeypatch.setattr(long_run, "listed", lambda: listed)
    node_ids = [*(f"a.py::test_a[{number}]@group" for number in range(5)), "a.py::test_b"]
    node_ids += ["a.py::test_c[x 1]", "a.py::test_c[y]", "a.py::test_d[0]", "a.py::test_e"]
    assert list(long_run.long_ones(node_ids)) == [
        *(f"a.py::test_a[{number}]@group" for number in (1, 3, 4)),
        "a.py::test_b",
        "a.py::test_c[x 1]",
    ]
