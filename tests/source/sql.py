"""Finds the SQL of the package and the row types it is read into. No registry: the source is read.

The convention: a statement is a module-level constant whose name starts with `SQL_`:

    SQL_ROOM: Final = "SELECT room_nid, room_version FROM rooms WHERE room_id = $1::text"

and it is associated with a row type by its use: `conn.fetch(SQL_ROOM, room_id, row=RoomRow)`,
`conn.fetchrow(…)` or `conn.records(…)` anywhere in the package, both names as the calling module
knows them. `SQL_PAGE.fetchrow(…)` and `fetch_page(conn, SQL_PAGE, …)` do it for a statement in both
directions (`storage.queries.pagination.statements`).
"""

import ast
import importlib
import importlib.util
import pkgutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import storage
from storage.codec import StoredBytes
from storage.database.placeholders import NumberedStatement
from storage.database.row_types import columns_of

OPTIONAL = {"storage.pipeline": "pyspark", "storage.inspector": "starlette"}
"""Packages that need an extra: left out where it is not installed."""

OF_ANOTHER_SCHEMA = {
    "storage.pipeline.synapse.source",
    "storage.rebuild.shadow_tables",
    "storage.rebuild.swap",
}
"""Modules whose statements are not for our tables: a test of their own runs them."""


class Statement(NamedTuple):
    """One constant."""

    module: str
    name: str
    sql: str


CALLS = {"fetch", "fetchrow", "records", "fetch_page"}


class StatementUse(NamedTuple):
    """One place where a statement's rows get their type."""

    place: str
    sql: str
    row: Any


def modules() -> list[types.ModuleType]:
    """All modules of the package."""
    names = [found.name for found in pkgutil.walk_packages(storage.__path__, "storage.")]
    missing = [
        package for package, needs in OPTIONAL.items() if importlib.util.find_spec(needs) is None
    ]
    wanted = [
        name
        for name in names
        if not name.endswith("__main__")
        and not any(name.startswith(package) for package in missing)
    ]
    return [importlib.import_module(name) for name in wanted]


def statements() -> list[Statement]:
    """All constants, each under the module that defines it."""
    return [
        Statement(module.__name__, f"{name}{which}", sql)
        for module in modules()
        if module.__name__ not in OF_ANOTHER_SCHEMA
        for name in assigned_names(tree_of(module))
        if name.startswith("SQL_")
        for which, sql in texts_of(getattr(module, name))
    ]


def texts_of(statement: Any) -> Iterator[tuple[str, str]]:
    """The text of a constant; of a statement in both directions each text, and which one it is."""
    if isinstance(statement, str | NumberedStatement):
        yield "", statement if isinstance(statement, str) else statement.sql
        return
    for field, one in zip(statement._fields, statement, strict=True):
        yield from ((f".{field}{which}", sql) for which, sql in texts_of(one))


def uses() -> list[StatementUse]:
    """All calls of fetch, fetchrow, fetch_page and records with a constant and a row type."""
    return [use for module in modules() for use in _uses_in(module)]


def _uses_in(module: types.ModuleType) -> Iterator[StatementUse]:
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.Call) or called(node) not in CALLS:
            continue
        row = next((keyword.value for keyword in node.keywords if keyword.arg == "row"), None)
        if not isinstance(row, ast.Name):
            continue
        # `SQL_NEAREST.fetchrow(…)`, or one of the first arguments, which may be a choice
        sent = [one for given in (node.func, *node.args[:2]) for one in ast.walk(given)]
        for name in sorted({one.id for one in sent if isinstance(one, ast.Name)}):
            if name.startswith("SQL_"):
                for which, sql in texts_of(getattr(module, name)):
                    place = f"{module.__name__}:{node.lineno} {name}{which}"
                    yield StatementUse(place, sql, getattr(module, row.id))


def called(node: ast.Call) -> str:
    """The name of the function or method."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def tree_of(module: types.ModuleType) -> ast.Module:
    """The source of a module, parsed."""
    assert module.__file__ is not None
    return ast.parse(Path(module.__file__).read_text(encoding="utf-8"))


def assigned_names(tree: ast.Module) -> Iterator[str]:
    """Names assigned at module level, annotated or not."""
    for node in tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        yield from (target.id for target in targets if isinstance(target, ast.Name))


PYTHON_TYPES = {
    "bool": bool,
    "bytea": bytes,
    "int2": int,
    "int4": int,
    "int8": int,
    "oid": int,
    "float4": float,
    "float8": float,
    "name": str,
    "text": str,
    "varchar": str,
    "regclass": str,
}
"""What the driver makes of a column; other types are not compared."""


def fields_of(row: Any) -> list[tuple[str, type | None]]:
    """The name of each column, and its plain annotated type, without NewTypes and None.

    None for any other type.
    """
    return [(name, _plain(hint)) for name, hint in columns_of(row)]


def _plain(hint: Any) -> type | None:
    members = (
        [member for member in get_args(hint) if member is not type(None)]
        if type(None) in get_args(hint)
        else [hint]
    )
    if len(members) != 1:
        return None
    plain = members[0]
    if plain is StoredBytes:
        return bytes
    while hasattr(plain, "__supertype__"):
        plain = plain.__supertype__
    return plain if isinstance(plain, type) and plain in set(PYTHON_TYPES.values()) else None
