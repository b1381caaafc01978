"""`reference/schema.md`: the tables, their columns and indexes, from the file of the schema."""

from collections.abc import Iterator
from typing import Final

from docs.generate.markup import code, page, table
from docs.generate.schema_file import SCHEMA, Schema, SchemaTable, read

INTRODUCTION: Final = """
# Schema

The tables of today, as `storage/database/schema.sql` creates them. Migrations lead to the same
schema. Postgres has these comments, too: `\\d+ events` in psql shows them.

Rooms, types, state keys, users and servers are numbers inside, called nids. A nid never changes and
is never reused. Times are milliseconds since 1970, UTC. Each index names the reads that it serves.
Do not write to the tables: the engine caches rows, and its roles may only append to most of them.
"""


def text() -> str:
    """Return the page."""
    schema = read(SCHEMA.read_text("utf-8"))
    sections = list(dict.fromkeys(one.section for one in schema.tables))
    tables = [
        part
        for section in sections
        for part in (
            f"## {section.capitalize()}",
            *(
                text
                for one in schema.tables
                if one.section == section
                for text in _described(schema, one)
            ),
        )
    ]
    kinds = ("view", "function", "sequence")
    return page(INTRODUCTION, *tables, *(_others(schema, kind) for kind in kinds))


def _described(schema: Schema, one: SchemaTable) -> Iterator[str]:
    yield f"### {one.name}"
    unlogged = "Unlogged. " if one.is_unlogged else ""
    yield unlogged + schema.comments.get(("table", one.name), "")
    yield table(
        ["Column", "Type", "Meaning"],
        [
            [
                code(column.name),
                column.type
                + (", nullable" if column.is_nullable else "")
                + _default(column.default),
                schema.comments.get(("column", f"{one.name}.{column.name}"), ""),
            ]
            for column in one.columns
        ],
    )
    indexes = [
        [code(index.name), code(index.definition), _purpose(schema, index.name)]
        for index in one.indexes
    ]
    yield table(["Index", "Definition", "Serves"], indexes)
    checks = [[code(check.name), code(check.definition)] for check in one.checks]
    yield table(["Constraint", "Definition"], checks)


def _default(default: str) -> str:
    return f", default {code(default)}" if default else ""


def _purpose(schema: Schema, name: str) -> str:
    said = schema.comments.get(("index", name)) or schema.comments.get(("constraint", name), "")
    return said.removeprefix("Serves: ")


def _others(schema: Schema, kind: str) -> str:
    rows = [
        [code(one.name), schema.comments.get((kind, one.name), "")]
        for one in schema.others
        if one.kind == kind
    ]
    listed = table([kind.capitalize(), "Meaning"], rows)
    return f"## {kind.capitalize()}s\n\n{listed}" if listed else ""
