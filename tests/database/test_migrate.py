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
from storage.database import Database, migration_steps
from storage.database.background import run_jobs
from storage.database.deployment import grants_sql
from storage.database.migrate import (
    HEAD_REVISION,
    MigrationOptions,
    check_schema,
    current_and_pending,
    current_revision,
    had_writer,
    migrate,
    migrate_before,
    migration_sql,
    pending,
    script_directory,
    scripts_directory,
)
from storage.database.migration_steps import jobs_of
from storage.errors import InputError, SchemaOutOfDate, SchemaTooNew
from storage.ids import UserId, server_name_of
from storage.testing import RoomBuilder, build_room
from tests.cli.running import environment, room_storage
from tests.database.catalogue import catalogue_of
from tests.database.newer import COLUMN, example_release, newer_release
from tests.maintenance.rooms import LIVELY, SERVER, findings
from tests.postgres import with_database

ROOT = Path(__file__).resolve().parents[2]
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
        "ALTER TABLE cursors DROP CONSTRAINT cursors_position_check",
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
async def test_rows_survive_the_example_migrations_and_back(dsn: str, tmp_path: Path) -> None:
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
    scripts = example_release(tmp_path / "examples")
    how = MigrationOptions(scripts=scripts)
    assert await migrate(dsn, revision="9001", how=how) == "9001"
    async with await Database.open(dsn) as database:
        known = {job.name: job for job in jobs_of(script_directory(scripts))}
        assert [row.state async for row in run_jobs(database, known, pause=0)][-1] == "done"
    assert await migrate(dsn, how=how) == "9002"
    with pytest.raises(SchemaTooNew):
        async with storage.open(dsn):
            pass
    await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "alembic", "downgrade", HEAD_REVISION],
        cwd=tmp_path,
        env={**os.environ, "STORAGE_DSN": dsn, "ALEMBIC_CONFIG": str(scripts / "alembic.ini")},
        check=True,
    )
    async with storage.open(dsn) as store:
        after = await store.current_state(room.room_id), await store.messages(room.room_id, user)
        assert after == before
        assert await findings(store) == []


async def test_a_new_database_gets_the_newest_schema_in_one_step(
    empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """schema.sql has the steps up to HEAD_REVISION behind it; those after it run."""
    failing = COLUMN.replace("op.execute(", "raise AssertionError(")
    table = COLUMN.replace(f'"9001", "{HEAD_REVISION}"', '"9002", "9001"')
    how = newer_release(tmp_path / "newer", **{"9001_failing": failing, "9002_column": table})
    monkeypatch.setattr(migration_steps, "HEAD_REVISION", "9001")
    assert [step.revision for step in await pending(empty_dsn, how=how)] == ["0001", "9002"]
    script = migration_sql(how=how)
    assert await migrate(empty_dsn, revision="0001", how=how) == "9001"
    assert await migrate(empty_dsn, how=how) == "9002"
    assert script.count("BEGIN;") == 2
    assert "VALUES ('9001')" in script


@pytest.mark.every_postgres
async def test_rows_survive_a_downgrade_to_the_first_step(
    dsn: str, schema_catalogue: dict[str, list[str]]
) -> None:
    room = build_room(LIVELY, 60, seed=2)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        before = await store.current_state(room.room_id)
    for arguments in (("downgrade", "0001"), ("upgrade", "head")):
        await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "alembic", *arguments],
            cwd=ROOT,
            env={**os.environ, "STORAGE_DSN": dsn},
            check=True,
        )
    migrated = await catalogue_of(dsn)
    assert [kind for kind in migrated if migrated[kind] != schema_catalogue[kind]] == ["rows"]
    async with storage.open(dsn, server_name=SERVER) as store:
        assert await store.current_state(room.room_id) == before
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
@pytest.mark.parametrize("revision", ["0001", "0029", "0044"])
async def test_a_database_of_0_2_0_is_refused(dsn: str, left: str, revision: str) -> None:
    """Its revisions had the same numbers. The comment that the first step has set is another."""
    await run_script(dsn, f"COMMENT ON TABLE alembic_version IS {left}")
    await run_script(dsn, f"UPDATE alembic_version SET version_num = '{revision}'")
    await run_script(dsn, "UPDATE schema_compatibility SET code_revision = '0040'")
    sentence = (
        rf"the database storage_test_\w+ \(schema public\) has the revision {revision} of release"
        r" 0\.2\.0 or earlier \(or was restored without its comments\), from which no migration"
        r" continues: run `room-storage export` with the release that wrote it, then"
        r" `room-storage migrate` and `room-storage import` on a new database"
    )
    before = await catalogue_of(dsn)
    for call in (migrate, migrate_before, had_writer, pending):
        with pytest.raises(SchemaOutOfDate) as caught:
            await call(dsn)
        assert re.fullmatch(sentence, str(caught.value))
        assert (caught.value.found, caught.value.rewritten) == (revision, True)
    for migrates in (False, True):
        with pytest.raises(SchemaOutOfDate, match=sentence):
            async with storage.open(dsn, server_name="s1.test", migrate=migrates):
                pass
    assert await catalogue_of(dsn) == before


async def test_the_commands_refuse_a_database_of_0_2_0(dsn: str) -> None:
    await run_script(dsn, "COMMENT ON TABLE alembic_version IS 'first schema 0123'")
    await run_script(dsn, "UPDATE alembic_version SET version_num = '0044'")
    for arguments in (("migrate",), ("migrate", "--pre"), ("migrate", "--list"), ("stats",)):
        done = room_storage(*arguments, "--dsn", dsn)
        assert done.returncode == 2, done
        assert done.stderr.startswith("error: the database storage_test_")
        assert "run `room-storage export` with the release that wrote it" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    for arguments in (("upgrade", "head"), ("current",), ("check",), ("downgrade", "0029")):
        command = [sys.executable, "-m", "alembic", *arguments]
        environ = environment(STORAGE_DSN=dsn)
        one = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, env=environ, capture_output=True, text=True
        )
        assert one.returncode == 255, one
        assert "run `room-storage export` with the release" in one.stdout + one.stderr
        assert "Traceback" not in one.stderr


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
    assert printed.count("BEGIN;") == printed.count("COMMIT;") == 1, "the schema is one step"


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
