"""`storage/database/schema.sql`, read without a database: tables, columns, indexes, comments."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

SCHEMA: Final = Path(__file__).resolve().parents[2] / "storage/database/schema.sql"

STATEMENT: Final = re.compile(
    r"(?:'(?:[^']|'')*'|\$\$.*?\$\$|--[^\n]*\n|[^;'$-]|[$-])+;", re.DOTALL
)
TITLE: Final = re.compile(r"-- -+\n-- (?P<title>[^\n]+)\n\n")
TABLE: Final = re.compile(
    r"CREATE (?P<kind>UNLOGGED )?TABLE (?P<name>\w+) \((?P<body>.*)\)", re.DOTALL
)
INDEX: Final = re.compile(
    r"CREATE (?P<unique>UNIQUE )?INDEX (?P<name>\w+)\s+ON (?P<table>\w+)\s+(?P<on>.*)", re.DOTALL
)
OTHER: Final = re.compile(r"CREATE (?P<kind>VIEW|SEQUENCE|FUNCTION) (?P<name>\w+)")
COMMENT: Final = re.compile(
    r"COMMENT ON (?P<kind>\w+) (?P<name>[\w.]+)(?:\s*\(.*?\))?(?:\s+ON \w+)?\s+IS\s+(?P<text>'.*')",
    re.DOTALL,
)
COLUMN_END: Final = re.compile(r"\s+(?:COLLATE|NOT NULL|DEFAULT|GENERATED)\b")


class SchemaColumn(NamedTuple):
    """A column: `default` is "" if it has none."""

    name: str
    type: str
    is_nullable: bool
    default: str


class SchemaIndex(NamedTuple):
    """An index, or a constraint that has one."""

    name: str
    definition: str


@dataclass
class SchemaTable:
    """A table with all that belongs to it."""

    section: str
    name: str
    is_unlogged: bool
    columns: list[SchemaColumn] = field(default_factory=list)
    indexes: list[SchemaIndex] = field(default_factory=list)
    checks: list[SchemaIndex] = field(default_factory=list)


class SchemaObject(NamedTuple):
    """A view, a sequence or a function."""

    kind: str
    name: str


@dataclass
class Schema:
    """All of the file. Comments are by kind and name: ("column", "rooms.moves")."""

    tables: list[SchemaTable] = field(default_factory=list)
    others: list[SchemaObject] = field(default_factory=list)
    comments: dict[tuple[str, str], str] = field(default_factory=dict)


def read(sql: str) -> Schema:
    """Return the schema of a file."""
    schema = Schema()
    for section, statement in _statements(sql):
        if found := TABLE.match(statement):
            schema.tables.append(_table(section, found))
        elif found := INDEX.match(statement):
            [of] = [table for table in schema.tables if table.name == found["table"]]
            unique = "UNIQUE " if found["unique"] else ""
            of.indexes.append(SchemaIndex(found["name"], unique + " ".join(found["on"].split())))
        elif found := OTHER.match(statement):
            schema.others.append(SchemaObject(found["kind"].lower(), found["name"]))
        elif found := COMMENT.match(statement):
            schema.comments[found["kind"].lower(), found["name"]] = _literal(found["text"])
    return schema


def _statements(sql: str) -> Iterator[tuple[str, str]]:
    """Yield each statement without its semicolon, with the title of its section."""
    titles = [(found.end(), found["title"]) for found in TITLE.finditer(sql)]
    for found in STATEMENT.finditer(sql):
        text = re.sub(r"^\s*--[^\n]*\n", "", found[0].rstrip(";"), flags=re.MULTILINE).strip()
        begins = found.end() - len(text)
        section = [title for position, title in titles if position <= begins]
        yield (section or [""])[-1], text


def _table(section: str, found: re.Match[str]) -> SchemaTable:
    table = SchemaTable(section, found["name"], bool(found["kind"]))
    for item in _items(found["body"]):
        name, _, rest = item.partition(" ")
        if name != "CONSTRAINT":
            table.columns.append(_column(name, rest))
            continue
        named = SchemaIndex(*rest.split(" ", 1))
        has_index = named.definition.startswith(("PRIMARY KEY", "UNIQUE", "EXCLUDE"))
        (table.indexes if has_index else table.checks).append(named)
    return table


def _items(body: str) -> Iterator[str]:
    """Split the body of a table at the commas outside of parentheses."""
    level, item = 0, ""
    for part in re.split(r"('(?:[^']|'')*'|[(),])", re.sub(r"--[^\n]*", "", body)):
        level += {"(": 1, ")": -1}.get(part, 0)
        if part == "," and level == 0:
            yield " ".join(item.split())
            item = ""
        else:
            item += part
    yield " ".join(item.split())


def _column(name: str, rest: str) -> SchemaColumn:
    default = re.search(r"DEFAULT (.+?)(?= NOT NULL|$)", rest)
    kind = COLUMN_END.split(f"{rest} ", maxsplit=1)[0].strip()
    return SchemaColumn(name, kind, "NOT NULL" not in rest, default[1] if default else "")


def _literal(text: str) -> str:
    """Return the value of adjacent literals."""
    return "".join(re.findall(r"'((?:[^']|'')*)'", text)).replace("''", "'")
