"""Print the type errors of mutants in mypy's JSON: mutmut counts a mutant with one as found.

mutmut runs this in its folder mutants/, where every mutant is a separate function in the module
that it changes. An error counts only if the original code, `…__mutmut_orig`, has none. Style
findings of mypy, such as unreachable code, do not count.
"""

import ast
import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

ERRORS = frozenset(
    (
        "arg-type",
        "assignment",
        "attr-defined",
        "call-arg",
        "call-overload",
        "dict-item",
        "func-returns-value",
        "index",
        "list-item",
    ),
) | frozenset(("name-defined", "operator", "return", "return-value", "type-var", "union-attr"))
CONFIG = Path("..") / "pyproject.toml"
MYPY = [sys.executable, "-m", "mypy", "--config-file", str(CONFIG), "--output", "json"]


def modules() -> list[str]:
    """Return the paths of the modules that mutmut changes."""
    patterns = tomllib.loads(CONFIG.read_text("utf-8"))["tool"]["mutmut"]["only_mutate"]
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def mutants(path: str) -> dict[int, str]:
    """Return the mutant's name for each line of a module."""
    tree = ast.parse(Path(path).read_text("utf-8"))
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "__mutmut_" in node.name
    ]
    return {
        line: node.name
        for node in functions
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def counted(path: str, errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the errors of mutants whose original has none."""
    names = mutants(path)
    named = [
        (error, names[error["line"]])
        for error in errors
        if error["line"] in names and error["code"] in ERRORS
    ]
    broken = {name.removesuffix("orig") for _, name in named if name.endswith("__mutmut_orig")}
    return [error for error, name in named if name.rpartition("_")[0] + "_" not in broken]


def main() -> None:
    """Check the types of all mutants."""
    printed = subprocess.run(
        [*MYPY, *modules()], check=False, capture_output=True, text=True
    ).stdout
    by_path = defaultdict(list)
    for error in map(json.loads, filter(str.strip, printed.splitlines())):
        by_path[error["file"]].append(error)
    for path, errors in by_path.items():
        for error in counted(path, errors):
            print(json.dumps(error))


if __name__ == "__main__":
    main()
