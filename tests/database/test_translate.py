"""The error table: complete against the catalogue, and right against what Postgres really sends."""

import pickle

import pytest

from storage.database import Connection
from storage.database.translate import CONFLICTS, INVARIANTS, SQLSTATES
from storage.errors import ConstraintViolated, DatabaseConflict, DatabaseError, DatabaseUnavailable

CONSTRAINTS = """
SELECT conname FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND contype <> 'n'
        AND conname <> 'alembic_version_pkc'
UNION
SELECT relname FROM pg_class JOIN pg_index ON indexrelid = oid
 WHERE relnamespace = 'public'::regnamespace AND indisunique AND relname <> 'alembic_version_pkc'
"""


async def raise_in_postgres(conn: Connection, sqlstate: str, constraint: str = "") -> None:
    await conn.execute(
        f"DO $$ BEGIN RAISE EXCEPTION 'made up'"
        f" USING ERRCODE = '{sqlstate}', CONSTRAINT = '{constraint}'; END $$"
    )


@pytest.mark.every_postgres
async def test_each_constraint_of_the_catalogue_is_in_the_table_and_none_else(
    conn: Connection,
) -> None:
    catalogue = set(await conn.fetchvals(CONSTRAINTS))
    assert len(catalogue) > 20
    assert catalogue - set(CONFLICTS) - set(INVARIANTS) == set(), (
        "constraints that translate.py does not know"
    )
    assert (set(CONFLICTS) | set(INVARIANTS)) - catalogue == set(), (
        "names in translate.py that the schema does not have"
    )
    assert not set(CONFLICTS) & set(INVARIANTS)


@pytest.mark.parametrize("constraint", CONFLICTS)
async def test_where_two_writers_meet_is_a_conflict(conn: Connection, constraint: str) -> None:
    with pytest.raises(
        DatabaseConflict, match=f"23505.*{CONFLICTS[constraint]}|{CONFLICTS[constraint]}.*23505"
    ):
        await raise_in_postgres(conn, "23505", constraint)


async def test_a_real_unique_violation_is_a_conflict(conn: Connection) -> None:
    with pytest.raises(DatabaseConflict, match="same event type"):
        await conn.execute(
            "INSERT INTO event_types (type_nid, type) VALUES (5000, 'm.room.create')"
        )


@pytest.mark.parametrize("constraint", INVARIANTS)
async def test_a_broken_invariant_names_its_constraint(conn: Connection, constraint: str) -> None:
    with pytest.raises(ConstraintViolated) as caught:
        await raise_in_postgres(conn, "23514", constraint)
    assert caught.value.constraint == constraint
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.constraint) == (
        ConstraintViolated,
        str(caught.value),
        constraint,
    )


@pytest.mark.parametrize("sqlstate", SQLSTATES)
async def test_each_sqlstate_becomes_what_the_table_says(conn: Connection, sqlstate: str) -> None:
    with pytest.raises(SQLSTATES[sqlstate]) as caught:
        await raise_in_postgres(conn, sqlstate if len(sqlstate) == 5 else f"{sqlstate}099")
    assert type(caught.value) is SQLSTATES[sqlstate]


async def test_what_is_not_in_the_table_is_a_database_error(conn: Connection) -> None:
    with pytest.raises(DatabaseError, match=r"division by zero \(SQLSTATE 22012\)") as caught:
        await conn.execute("SELECT 1 / 0")
    assert type(caught.value) is DatabaseError


async def test_a_value_that_does_not_fit_its_parameter_is_a_database_error(
    conn: Connection,
) -> None:
    with pytest.raises(DatabaseError) as caught:
        await conn.fetchval("SELECT $1::int", "text")
    assert not isinstance(caught.value, DatabaseUnavailable)


async def test_a_text_with_nul_is_a_database_error(conn: Connection) -> None:
    with pytest.raises(DatabaseError, match="22021"):
        await conn.fetchval("SELECT $1::text", "a\0b")
