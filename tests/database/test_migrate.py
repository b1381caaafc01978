"""Migrations arrive at exactly schema.sql, online and as a script, from the source and a wheel."""

import asyncio
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import asyncpg
import pytest
from alembic.config import Config as AlembicConfig
from alembic.script import ScriptDirectory

import storage
from storage.database import Database
from storage.database.migrate import (
    HEAD_REVISION,
    MigrationOptions,
    check_schema,
    current_and_pending,
    current_revision,
    first_digest,
    migrate,
    migration_sql,
    scripts_directory,
)
from storage.database.roles import grants_sql
from storage.errors import InputError, SchemaOutOfDate
from storage.ids import UserId, server_name_of
from storage.testing import RoomBuilder
from tests.database.catalogue import catalogue_of
from tests.maintenance.rooms import findings
from tests.postgres import with_database

ROOT = Path(__file__).resolve().parents[2]
REVISIONS = sorted((ROOT / "migrations/versions").glob("*.py"))
SCHEMA = (ROOT / "storage/database/schema.sql").read_text(encoding="utf-8")


async def run_script(dsn: str, script: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(script)
    finally:
        await connection.close()


@pytest.fixture
async def schema_catalogue(empty_dsn: str) -> dict[str, list[str]]:
    await run_script(empty_dsn, SCHEMA)
    await run_script(empty_dsn, grants_sql())
    return await catalogue_of(empty_dsn)


@pytest.mark.every_postgres
async def test_migrations_arrive_at_the_schema(
    dsn: str, schema_catalogue: dict[str, list[str]]
) -> None:
    migrated = await catalogue_of(dsn)
    assert len(migrated["columns"]) > 50
    assert len(migrated["comments"]) > 20
    for kind, expected in schema_catalogue.items():
        assert migrated[kind] == expected, f"{kind} differ: a migration is missing"


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE events ALTER COLUMN received_ts DROP NOT NULL",
        "ALTER TABLE events ALTER COLUMN depth SET DEFAULT 0",
        "ALTER TABLE events ALTER COLUMN json SET STORAGE EXTENDED",
        "ALTER TABLE rooms SET (fillfactor = 71)",
        "ALTER TABLE rooms DROP CONSTRAINT rooms_extremities_check",
        "DROP INDEX events_room_stream_idx",
        "COMMENT ON TABLE events IS 'other'",
        "COMMENT ON INDEX events_room_stream_idx IS NULL",
        "ALTER SEQUENCE event_nids INCREMENT 7",
        (
            "CREATE OR REPLACE FUNCTION refuse_stale_plan(detail text) RETURNS bigint LANGUAGE sql"
            " AS 'SELECT 1::bigint'"
        ),
        "DELETE FROM event_types WHERE type_nid = 18",
        "GRANT DELETE ON events TO room_storage_reader",
        "GRANT UPDATE (json) ON events TO room_storage_runtime",
    ],
)
async def test_the_comparison_sees_a_difference(dsn: str, change: str) -> None:
    before = await catalogue_of(dsn)
    await run_script(dsn, change)
    assert await catalogue_of(dsn) != before


@pytest.mark.every_postgres
async def test_rows_survive_the_names_of_the_field_and_back(dsn: str) -> None:
    """The newest migration renames tables, columns and functions: a room is the same after it."""
    room = RoomBuilder("11", seed=3)
    user = UserId(room.user(1))
    room.start(user)
    side = room.fork(1)[0]
    for branch in (room, side):
        branch.topic(user, "one of two")
    room.merge(side)
    room.message(user)
    async with storage.open(dsn, server_name=server_name_of(user)) as store:
        await store.append(room.pdus)
        before = await store.current_state(room.room_id), await store.messages(room.room_id, user)
    environment = {**os.environ, "STORAGE_DSN": dsn}
    for step in (["downgrade", "0009"], ["upgrade", "head"]):
        command = [sys.executable, "-m", "alembic", *step]
        await asyncio.to_thread(subprocess.run, command, cwd=ROOT, env=environment, check=True)
        if step[0] == "downgrade":
            with pytest.raises(SchemaOutOfDate):
                async with storage.open(dsn):
                    pass
    async with storage.open(dsn) as store:
        after = await store.current_state(room.room_id), await store.messages(room.room_id, user)
        assert after == before
        assert await findings(store) == []


@pytest.mark.every_postgres
async def test_the_printed_script_arrives_at_the_schema(
    server_dsn: str, schema_catalogue: dict[str, list[str]], worker_id: str
) -> None:
    name = f"storage_test_script_{os.getpid()}_{worker_id}"
    await run_script(
        server_dsn, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'"
    )
    try:
        await run_script(with_database(server_dsn, name), migration_sql())
        assert await catalogue_of(with_database(server_dsn, name)) == schema_catalogue
        async with (
            await Database.open(with_database(server_dsn, name)) as database,
            database.connection() as conn,
        ):
            await check_schema(conn)
    finally:
        await run_script(server_dsn, f"DROP DATABASE {name} WITH (FORCE)")


async def test_the_revision_is_checked(empty_dsn: str) -> None:
    async with await Database.open(empty_dsn) as database, database.connection() as conn:
        with pytest.raises(SchemaOutOfDate) as caught:
            await check_schema(conn)
        assert caught.value.found is None
        assert re.fullmatch(
            r"the database storage_test_\w+ \(schema public\) has no tables of room-storage, wanted"
            r" is the revision \d{4}: run `room-storage migrate` on it, or use .*",
            str(caught.value),
        )
        assert await migrate(empty_dsn) == HEAD_REVISION
        await check_schema(conn)
        await conn.execute("UPDATE alembic_version SET version_num = '0000'")
        with pytest.raises(SchemaOutOfDate) as caught:
            await check_schema(conn)
        assert (caught.value.found, caught.value.wanted) == ("0000", HEAD_REVISION)


async def test_a_schema_that_is_not_there_is_named(empty_dsn: str) -> None:
    """A migration does not create it: the name may be mistyped."""
    how = MigrationOptions(database_schema='no "such')
    for call in (migrate(empty_dsn, how=how), current_and_pending(empty_dsn, how=how)):
        with pytest.raises(InputError) as caught:
            await call
        assert str(caught.value) == (
            "the database has no schema 'no \"such': create it with CREATE SCHEMA "
            '"no ""such", or correct database_schema (STORAGE_DATABASE_SCHEMA)'
        )
    await run_script(empty_dsn, 'CREATE SCHEMA "no ""such"')
    assert await migrate(empty_dsn, how=how) == HEAD_REVISION


@pytest.mark.parametrize("left", ["'first schema 0123'", "NULL"])
async def test_a_database_of_another_first_migration_is_refused(dsn: str, left: str) -> None:
    """The revision does not matter.

    Until the first release the first migration is rewritten, and each form of it is called 0001.
    """
    await run_script(dsn, f"COMMENT ON TABLE alembic_version IS {left}")
    assert await migrate(dsn) == HEAD_REVISION, "there is nothing to do"
    with pytest.raises(
        SchemaOutOfDate, match=r"export.*migrate.*on a new database.*import"
    ) as caught:
        async with storage.open(dsn, server_name="s1.test"):
            pass
    assert caught.value.found == HEAD_REVISION


def test_the_first_schema_is_told_by_its_text(tmp_path: Path) -> None:
    script = tmp_path / "versions" / "0001_initial.sql"
    script.parent.mkdir()
    script.write_bytes((scripts_directory() / "versions" / script.name).read_bytes())
    assert first_digest(tmp_path) == first_digest(scripts_directory())
    script.write_bytes(script.read_bytes().replace(b"bigint", b"integer", 1))
    assert first_digest(tmp_path) != first_digest(scripts_directory())


def test_the_head_is_the_one_the_package_wants() -> None:
    scripts = ScriptDirectory.from_config(
        AlembicConfig(config_args={"script_location": str(scripts_directory())})
    )
    assert scripts.get_heads() == [HEAD_REVISION]


async def test_many_may_migrate_at_once(empty_dsn: str) -> None:
    assert await asyncio.gather(*(migrate(empty_dsn) for _ in range(2))) == [HEAD_REVISION] * 2
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "alembic", "-x", f"dsn={empty_dsn}", "upgrade", "head", cwd=ROOT
        )
        for _ in range(2)
    ]
    assert [await process.wait() for process in processes] == [0, 0]


async def test_processes_that_migrate_an_empty_database_at_once(empty_dsn: str) -> None:
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "alembic",
            "upgrade",
            "head",
            cwd=ROOT,
            env={**os.environ, "STORAGE_DSN": empty_dsn},
        )
        for _ in range(3)
    ]
    assert [await process.wait() for process in processes] == [0, 0, 0]
    async with await Database.open(empty_dsn) as database, database.connection() as conn:
        assert await current_revision(conn) == HEAD_REVISION


async def test_a_migration_that_fails_leaves_nothing(empty_dsn: str) -> None:
    await run_script(
        empty_dsn,
        "CREATE FUNCTION refuse_stale_plan(detail text) RETURNS int LANGUAGE sql AS 'SELECT 1'",
    )
    before = await catalogue_of(empty_dsn)
    with pytest.raises(Exception, match="refuse_stale_plan"):
        await migrate(empty_dsn)
    assert await catalogue_of(empty_dsn) == before


def test_alembic_prints_the_script_without_a_database() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "STORAGE_DSN"}
    command = [sys.executable, "-m", "alembic", "upgrade", "head", "--sql"]
    printed = subprocess.run(
        command, cwd=ROOT, env=environ, check=True, capture_output=True, text=True
    ).stdout
    assert printed.strip() == migration_sql().strip()
    assert printed.startswith("SET lock_timeout = '2000';")
    assert printed.count("BEGIN;") == printed.count("COMMIT;") == len(REVISIONS)


def test_a_wheel_holds_the_migrations(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    here = {
        f"storage/migrations/{path.relative_to(ROOT / 'migrations')}"
        for path in (ROOT / "migrations").rglob("*")
        if path.is_file()
    }
    wanted = {name for name in here if "__pycache__" not in name}
    assert wanted <= names
    assert {"storage/database/schema.sql", "storage/py.typed"} <= names
