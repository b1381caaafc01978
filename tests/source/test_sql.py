"""Every statement is valid against the migrated schema, and fits the row type it is read into (convention: tests/source/sql.py)."""

from typing import NamedTuple

import asyncpg
import pytest

from tests.source import sql

pytestmark = pytest.mark.every_postgres


@pytest.fixture
async def driver(shared_dsn: str) -> "asyncpg.Connection":
    connection = await asyncpg.connect(shared_dsn)
    yield connection
    await connection.close()


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


def mismatch(columns: list[tuple[str, str]], row: type) -> str:
    """How the columns differ from the fields; empty if they do not."""
    fields = sql.fields_of(row)
    if [name for name, _ in columns] != list(fields):
        return f"columns {[name for name, _ in columns]}, fields {list(fields)}"
    differ = [
        f"{name} is {column}, annotated {annotated.__name__}"
        for (name, column), annotated in zip(columns, fields.values(), strict=True)
        if annotated is not None and sql.PYTHON_TYPES.get(column, annotated) is not annotated
    ]
    return "; ".join(differ)


class ExampleRow(NamedTuple):
    number: int
    text: str | None


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
    problem = mismatch(columns, ExampleRow)
    assert told in problem
    assert bool(told) == bool(problem)
