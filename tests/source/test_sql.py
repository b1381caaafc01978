"""Every statement is valid against the migrated schema and fits its row type.

tests/source/sql.py describes the convention.
"""

from types import ModuleType
from typing import NamedTuple

import asyncpg
import pytest

from storage.database.placeholders import PLACEHOLDER
from storage.database.row_types import columns_of, stored_fields
from storage.persist.write import messages_only
from storage.persist.write.messages_only import MessagePositionRow
from tests.source import sql

pytestmark = pytest.mark.every_postgres


@pytest.fixture
async def driver(shared_dsn: str) -> "asyncpg.Connection":
    connection = await asyncpg.connect(shared_dsn)
    yield connection
    await connection.close()


LINES_PER_STATEMENT = 150
LONG_STATEMENTS = {
    "storage.persist.write.all_tables.SQL_WRITE",
    "storage.persist.write.all_tables.SQL_WRITE_STATE_EVENT",
    "storage.queries.sliding.room_state.SQL_SLIDING_STATE",
    "storage.queries.sliding.timelines.SQL_TIMELINES",
    "storage.queries.sync.rooms.SQL_ROOMS",
    "storage.queries.sync.rooms.SQL_ROOMS_AND_WRITERS",
    "storage.queries.sync.state.SQL_STATE",
    "storage.queries.unread.SQL_UNREAD",
}
"""Each begins with a comment that says why. They are of six templates, and no more may be added."""


def test_an_assembled_statement_can_be_read() -> None:
    long = {
        f"{one.module}.{one.name}": one.sql.strip().splitlines()
        for one in sql.statements()
        if one.sql.strip().count("\n") >= LINES_PER_STATEMENT
    }
    assert long.keys() == LONG_STATEMENTS
    for name, lines in long.items():
        assert lines[1].startswith("-- More than 150 lines: "), name


async def test_each_statement_can_be_prepared(driver: "asyncpg.Connection") -> None:
    found = sql.statements()
    assert ("storage.database.migrate", "SQL_REVISION") in {statement[:2] for statement in found}
    wrong = {}
    for module, name, text in found:
        try:
            await driver.prepare(text)
        except asyncpg.PostgresError as error:
            wrong[f"{module}.{name}"] = str(error)
    assert wrong == {}


async def test_each_statement_has_the_columns_of_its_row_type(driver: "asyncpg.Connection") -> None:
    wrong = {}
    for place, text, row in sql.uses():
        attributes = (await driver.prepare(text)).get_attributes()
        problem = mismatch([(attribute.name, attribute.type.name) for attribute in attributes], row)
        if problem:
            wrong[place] = problem
    assert wrong == {}


def test_each_row_with_the_bytes_of_an_event_says_that_they_are_stored() -> None:
    """Only such fields have their dictionaries loaded, and cannot be taken for plain bytes."""
    names = {use.row: [name for name, _ in columns_of(use.row)] for use in sql.uses()}
    rows = [row for row, columns in names.items() if "json" in columns]
    assert len(rows) > 20
    wrong = [row for row in rows if names[row].index("json") not in stored_fields(row)]
    assert wrong == []


@pytest.mark.parametrize(
    "module,row,least",
    [(messages_only, MessagePositionRow, 2)],
)
async def test_each_chosen_statement_has_the_columns_of_its_row_type(
    driver: "asyncpg.Connection", module: ModuleType, row: type, least: int
) -> None:
    """A function chooses one of these, such as by direction, so its call does not name it."""
    chosen = [
        name
        for name in sql.assigned_names(sql.tree_of(module))
        if name.startswith("SQL_") and name != "SQL_AGGREGATIONS"  # its call names it
    ]
    assert len(chosen) >= least
    for name in chosen:
        attributes = (await driver.prepare(getattr(module, name))).get_attributes()
        columns = [(attribute.name, attribute.type.name) for attribute in attributes]
        assert (name, mismatch(columns, row)) == (name, "")


def mismatch(columns: list[tuple[str, str]], row: type) -> str:
    """How the columns differ from the fields; empty if they do not."""
    fields = sql.fields_of(row)
    names, expected = [name for name, _ in columns], [name for name, _ in fields]
    if names != expected:
        return f"columns {names}, fields {expected}"
    differ = [
        f"{name} is {column}, annotated {annotated.__name__}"
        for (name, column), (_, annotated) in zip(columns, fields, strict=True)
        if annotated is not None and sql.PYTHON_TYPES.get(column, annotated) is not annotated
    ]
    return "; ".join(differ)


class ExampleRow(NamedTuple):
    number: int
    text: str | None


def test_each_part_by_name_has_its_place() -> None:
    """`fill` refuses a part that its template does not name, `fill_all` leaves it out."""
    named: set[str] = set()
    parts: set[str] = set()
    for module in sql.modules():
        for name in sql.assigned_names(sql.tree_of(module)):
            if name.startswith(("TEMPLATE_", "PARTS_")):
                value = getattr(module, name)
                parts |= value.keys() if isinstance(value, dict) else set()
                texts = value.values() if isinstance(value, dict) else [value]
                named |= {found for text in texts for found in PLACEHOLDER.findall(text)}
    assert parts - named == set()
    assert {"order", "is_ahead"} <= parts


FIRST, LAST = ("first", "bool"), ("last", "int8")


class NestingRow(NamedTuple):
    first: bool
    example: ExampleRow | None
    last: int


@pytest.mark.parametrize(
    "columns,told",
    [
        ([("number", "int8"), ("text", "text")], ""),
        ([("text", "text"), ("number", "int8")], "columns"),
        ([("number", "int8")], "columns"),
        ([("number", "text"), ("text", "text")], "number is text"),
        ([("number", "int8"), ("text", "bytea")], "text is bytea"),
    ],
)
def test_the_comparison_sees_a_difference(columns: list[tuple[str, str]], told: str) -> None:
    for row, around in ((ExampleRow, columns), (NestingRow, [FIRST, *columns, LAST])):
        problem = mismatch(around, row)
        assert told in problem
        assert bool(told) == bool(problem)
