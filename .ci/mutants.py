#!/usr/bin/env python
"""Mutate the pure layers and run the tests of the same folder: `make mutants`.

Arguments are names of mutants or patterns such as "storage.graph*". Without any, the mutants
without a result are run. `--again` runs the survivors, for new tests; `--report` only reports.
mutmut keeps its results in mutants/. The exit code is 1 if more than 3 % survive, or if a survivor
is not explained in tests/mutants.toml. A mutant with a type error is found, too (mutant_types.py).
"""

import ast
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mutmut.stats import status_by_exit_code  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from storage.config import Config  # noqa: E402
from storage.database.embedded import EmbeddedPostgres  # noqa: E402

ALLOWED = 0.03
SURVIVED = ("survived", "no tests")
EXPLAINED = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text("utf-8"))
MUTMUT = Path(sys.executable).with_name("mutmut")
SERVER = Config(embedded_fsync=False, embedded_shared_buffers_mb=128, embedded_connections_max=200)


def environment(dsn: str) -> dict[str, str]:
    """Return the environment of the tests: one server for all of them, and the test vectors."""
    vectors = os.environ.get("STORAGE_VECTORS", str(ROOT.parent / "shared" / "vectors"))
    return {
        "STORAGE_EXAMPLES": "20",
        **({"STORAGE_VECTORS": vectors} if Path(vectors).is_dir() else {}),
        **os.environ,
        "STORAGE_DSN": dsn,
        "PATH": os.pathsep.join((str(MUTMUT.parent), os.environ.get("PATH", ""))),
        "PYTHONPATH": str(ROOT / ".ci"),
    }


def results() -> dict[str, str]:
    """Return the status of every mutant that was run, by its name."""
    kept = [
        json.loads(path.read_text("utf-8"))["exit_code_by_key"]
        for path in sorted((ROOT / "mutants").rglob("*.py.meta"))
    ]
    return {
        name: status_by_exit_code[code]
        for codes in kept
        for name, code in codes.items()
        if code is not None
    }


def sources(module: str) -> dict[str, list[str]]:
    """Return the lines of each mutant and original of a module, by function name."""
    text = (ROOT / "mutants" / Path(*module.split("."))).with_suffix(".py").read_text("utf-8")
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        node.name: text.splitlines()[node.lineno : node.end_lineno]
        for node in functions
        if "__mutmut_" in node.name
    }


def change(name: str, made: dict[str, list[str]]) -> tuple[str, str]:
    """Return the lines that a mutant removes and those that it adds, without indentation."""
    original, mutant = name.rpartition("_")[0].rpartition(".")[2] + "_orig", name.rpartition(".")[2]
    lines = list(difflib.unified_diff(made[original], made[mutant], n=0))[2:]
    before, after = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return "\n".join(before), "\n".join(after)


def function(name: str) -> str:
    """Return the name of the mutant's function.

    For "storage.graph.order.x_above__mutmut_3" it is "storage.graph.order.above".
    """
    module, _, last = name.rpartition("__mutmut_")[0].rpartition(".")
    return f"{module}.{last.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"


def why(name: str, before: str, after: str) -> str | None:
    """Return why tests/mutants.toml calls a change equivalent; None if it does not."""
    for rule in EXPLAINED.get("rule", []):
        if (
            re.fullmatch(rule["function"], function(name))
            and re.search(rule["before"], before)
            and re.search(rule["after"], after)
        ):
            return str(rule["why"])
    for one in EXPLAINED.get("equivalent", []):
        if (one["function"], one["before"].strip(), one["after"].strip()) == (
            function(name),
            before,
            after,
        ):
            return str(one["why"])
    return None


def report(statuses: dict[str, str]) -> int:
    """Print the survivors and a table by module; return the exit code."""
    unexplained, modules, made = 0, defaultdict[str, Counter[str]](Counter), {}
    for name, status in statuses.items():
        module = name.rpartition(".")[0]
        modules[module]["mutants"] += 1
        modules[module][status if status in SURVIVED else "found"] += 1
        if status in SURVIVED:
            made[module] = made.get(module) or sources(module)
            before, after = change(name, made[module])
            if why(name, before, after) is None:
                unexplained += 1
                modules[module]["unexplained"] += 1
                print(f"{name} ({status})\n- {before}\n+ {after}")
    return summary(modules, unexplained)


def summary(modules: dict[str, Counter[str]], unexplained: int) -> int:
    """Print how many mutants of each module were found; return the exit code."""
    columns = ("mutants", "found", *SURVIVED, "unexplained")
    table = Table("module", *columns)
    for module, counts in sorted(modules.items()):
        table.add_row(module, *(str(counts[column]) for column in columns))
    total = sum(modules.values(), Counter[str]())
    table.add_row("all", *(str(total[column]) for column in columns))
    Console(width=140).print(table)
    surviving = sum(total[status] for status in SURVIVED)
    share = surviving / max(total["mutants"], 1)
    print(
        f"{total['mutants']} mutants, {surviving} survive ({share:.2%}),"
        f" {unexplained} of them are not explained"
    )
    return 1 if share > ALLOWED or unexplained else 0


def main(names: list[str]) -> int:
    """Run the named mutants, then report all results."""
    with tempfile.TemporaryDirectory(prefix="room-storage-mutants-") as folder:
        server = EmbeddedPostgres(Path(folder), config=SERVER)
        children = os.environ.get("MUTANTS_CHILDREN", "2")
        try:
            run = [MUTMUT, "run", "--max-children", children, *names]
            subprocess.run(run, cwd=ROOT, check=True, env=environment(server.start()))
        finally:
            server.stop()
    return report(results())


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments == ["--report"]:
        sys.exit(report(results()))
    sys.exit(
        main(
            [name for name, status in results().items() if status in SURVIVED]
            if arguments == ["--again"]
            else arguments
        )
    )
