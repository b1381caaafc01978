"""`reference/sql/*.sql`: each statement as it is sent, and `reference/statements.md`, their list.

A statement has a file if it is assembled from parts (`storage.database.placeholders`), so that its
whole text is nowhere in the source. The files are committed: a review shows what a change of a part
does to each statement. `python -m docs.generate.statements` writes them.
"""

import ast
import importlib
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import storage
from docs.generate.markup import code, page, table
from storage.database.placeholders import PARAMETER_NAMES, NumberedStatement

FOLDER: Final = Path(__file__).resolve().parents[1] / "reference/sql"
OTHERS: Final = ("storage.pipeline", "storage.inspector")
"""Packages that need an extra."""

INTRODUCTION: Final = """
# Statements

Each statement that is assembled from parts, as Postgres gets it. Its file begins with the functions
that send it, and with the names and types of its parameters. Any other statement is a constant
`SQL_…` beside the function that sends it. The [schema](schema.md) has the tables and functions.

`PREPARE name AS` before the text makes it a statement of a psql session. From Postgres 16 on,
`EXPLAIN (GENERIC_PLAN)` before it shows the plan without values.
"""


class AssembledStatement(NamedTuple):
    """A statement, the functions that send it, and its parameters in order."""

    name: str
    sql: str
    senders: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def file(self) -> str:
        parameters = f"Parameters: {', '.join(self.parameters)}"
        said = f"{' and '.join(self.senders)}. {parameters if self.parameters else 'No parameters'}"
        header = textwrap.fill(f"Sent by {said}.", 97)
        return f"{textwrap.indent(header, '-- ')}\n\n{self.sql}\n"


def text() -> str:
    """Return the page."""
    rows = ((f"[{one.name}](sql/{one.name}.sql)", code(one.senders[0])) for one in statements())
    return page(INTRODUCTION, table(("Statement", "Sent by"), rows))


def files() -> dict[str, str]:
    """Return the content of each file by its name."""
    return {f"{one.name}.sql": one.file for one in statements()}


def statements() -> list[AssembledStatement]:
    """Return all of them by name."""
    names = (one.name for one in pkgutil.walk_packages(storage.__path__, "storage."))
    chosen = (one for one in names if not one.startswith(OTHERS) and "__main__" not in one)
    modules = [Source(importlib.import_module(name)) for name in chosen]
    return sorted(one for module in modules for one in _statements(module, modules))


class Source:
    """The names that a module imports, and the names that each of its definitions uses."""

    def __init__(self, module: ModuleType) -> None:
        body = ast.parse(Path(module.__file__ or "").read_text("utf-8")).body
        imports = [node for node in body if isinstance(node, ast.ImportFrom)]
        self.module = module
        self.imported = {(node.module, one.name) for node in imports for one in node.names}
        self.constants = {
            node.target.id: node.value
            for node in body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
        }
        defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        functions = {node.name: node for node in body if isinstance(node, defined)}
        self.uses = {
            name: {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            for name, node in (functions | self.constants).items()
        }

    def senders(self, name: str) -> Iterator[str]:
        """Yield the functions that use a statement, also by another constant."""
        value = self.constants.get(name)
        names = {name}
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            names.add(value.value.id)  # SQL_WRITE: Final = WRITE.sql
        for constant in self.constants:
            if self.uses[constant] & names and not constant.startswith("SQL_"):
                names.add(constant)
        for user, used in self.uses.items():
            if used & names and user not in self.constants:
                yield f"{self.module.__name__}.{user}"


def _statements(source: Source, modules: list[Source]) -> Iterator[AssembledStatement]:
    home = source.module.__name__
    for name, value in source.constants.items():
        if not name.startswith("SQL_") or isinstance(value, ast.Constant):
            continue
        users = [one for one in modules if one is source or (home, name) in one.imported]
        for which, sql in _texts(getattr(source.module, name)):
            yield AssembledStatement(
                f"{home.removeprefix('storage.')}.{name.removeprefix('SQL_').lower()}{which}",
                "\n".join(line.rstrip() for line in sql.strip().splitlines()),
                tuple(sender for one in users for sender in one.senders(name)),
                tuple(_parameters(sql, PARAMETER_NAMES.get(sql, ()))),
            )


def _texts(statement: Any) -> Iterator[tuple[str, str]]:
    """Yield the text of a constant; of a statement in both directions, each one with its name."""
    if isinstance(statement, str | NumberedStatement):
        yield "", statement if isinstance(statement, str) else statement.sql
        return
    for field, one in zip(statement._fields, statement, strict=True):
        yield from ((f".{field}{which}", sql) for which, sql in _texts(one))


def _parameters(sql: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield a value by number, name and type, and input rows by their first and last number."""
    kinds = dict(re.findall(r"\$(\d+)::(\w+(?:\[\])*)", sql))
    last = max((int(one) for one in re.findall(r"\$(\d+)", sql)), default=0)
    split = [one.rpartition(".") for one in names or [""] * last]
    for rows, group in groupby(enumerate(split, 1), lambda one: one[1][0]):
        listed = [(at, one[2]) for at, one in group]
        if rows:
            yield f"${listed[0][0]} to ${listed[-1][0]} {rows} ({', '.join(n for _, n in listed)})"
        else:
            values = (f"${at} {name} {kinds.get(str(at), '')}" for at, name in listed)
            yield ", ".join(" ".join(one.split()) for one in values)


def write() -> None:
    """Write the files, and delete those of statements that are no more."""
    content = files()
    for path in FOLDER.iterdir():
        if path.name not in content:
            path.unlink()
    for name, file in content.items():
        (FOLDER / name).write_text(file, "utf-8")


if __name__ == "__main__":
    write()
