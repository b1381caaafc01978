"""alembic's own command, as operators call it, in the source tree.

tests/cli/test_plain_install.py runs it with the installed wheel.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import storage
from storage.database import Database
from storage.database.background import jobs, run_jobs
from storage.database.migrate import (
    HEAD_REVISION,
    SQL_NEEDED,
    MigrationOptions,
    migration_sql,
    script_directory,
    scripts_directory,
)
from storage.database.migration_steps import jobs_of
from storage.testing import SHAPES, generate_room
from tests.cli.running import NOBODY, ROOT, environment, room_storage
from tests.database.catalogue import catalogue_of
from tests.database.newer import COLUMN, example_release, newer_release
from tests.long_run import long_run

POST = COLUMN.replace("9001", "9002").replace(f'"{HEAD_REVISION}", "pre"', '"9001", "post"')
POST = POST.replace("json_bytes", "json_more")


def alembic(
    *arguments: str,
    dsn: str | None,
    status: int = 0,
    cwd: Path = ROOT,
    environ: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run the command; a failure is one line, without a traceback."""
    variables = environment(**environ or {}, **({} if dsn is None else {"STORAGE_DSN": dsn}))
    done = subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=cwd,
        env=variables,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr
    if status:
        assert done.stdout.startswith("FAILED: ") != done.stderr.startswith("FAILED: ")
        assert len((done.stdout + done.stderr).splitlines()) == 1
    return done


async def executed(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


def examples(folder: Path) -> dict[str, str]:
    """The environment of a release with the two example migrations."""
    return {"ALEMBIC_CONFIG": str(example_release(folder / "examples") / "alembic.ini")}


@pytest.mark.slow
async def test_the_commands_of_an_operator(empty_dsn: str, dsn: str, tmp_path: Path) -> None:
    where: Any = {"cwd": tmp_path, "environ": examples(tmp_path)}
    assert alembic("current", dsn=empty_dsn).stdout == ""
    alembic("upgrade", "head", dsn=empty_dsn)
    assert alembic("current", dsn=empty_dsn).stdout == f"{HEAD_REVISION} (head)\n"
    assert alembic("check", dsn=empty_dsn).stdout == "No new upgrade operations detected.\n"
    today = await catalogue_of(dsn)
    assert await catalogue_of(empty_dsn) == today
    assert alembic("current", dsn=empty_dsn, **where).stdout == f"{HEAD_REVISION}\n"
    assert "not up to date" in said(alembic("check", dsn=empty_dsn, status=255, **where))
    alembic("upgrade", "+1", dsn=empty_dsn, **where)
    assert alembic("current", dsn=empty_dsn, **where).stdout == "9001\n"
    alembic("upgrade", "heads", dsn=empty_dsn, **where)
    assert alembic("current", dsn=empty_dsn, **where).stdout == "9002 (head)\n"
    assert (
        alembic("check", dsn=empty_dsn, **where).stdout == "No new upgrade operations detected.\n"
    )
    after = await catalogue_of(empty_dsn)
    assert after != today
    alembic("downgrade", "-1", dsn=empty_dsn, **where)
    assert alembic("current", dsn=empty_dsn, **where).stdout == "9001\n"
    alembic("upgrade", "head", dsn=empty_dsn, **where)
    assert await catalogue_of(empty_dsn) == after
    alembic("downgrade", HEAD_REVISION, dsn=empty_dsn, **where)
    assert await catalogue_of(empty_dsn) == today


def said(done: "subprocess.CompletedProcess[str]") -> str:
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments", [("downgrade", "9999"), pytest.param(("upgrade", "9999"), marks=long_run)]
)
async def test_an_unknown_revision_is_a_sentence(dsn: str, arguments: tuple[str, ...]) -> None:
    failure = said(alembic(*arguments, dsn=dsn, status=255))
    assert "9999" in failure
    assert "`alembic history` lists the revisions" in failure


async def test_a_downgrade_past_a_step_that_cannot_be_undone_changes_nothing(
    dsn: str, tmp_path: Path
) -> None:
    failure = said(alembic("downgrade", "base", dsn=dsn, status=255))
    assert "nothing before the first step, and nothing has changed" in failure
    await later(dsn, tmp_path / "newer", **{"9001_column": COLUMN})
    environ = {"ALEMBIC_CONFIG": str(tmp_path / "newer" / "alembic.ini")}
    arguments = ("downgrade", HEAD_REVISION)
    failure = said(alembic(*arguments, dsn=dsn, status=255, cwd=tmp_path, environ=environ))
    assert "the step 9001 cannot be undone: nothing has changed" in failure
    current = alembic("current", dsn=dsn, cwd=tmp_path, environ=environ).stdout
    assert current == "9001 (head)\n"


async def test_a_downgrade_lets_in_the_code_of_the_steps_that_are_left(
    dsn: str, tmp_path: Path
) -> None:
    """Code is refused by the last post step that is applied, not by those that were undone."""
    where: Any = {"cwd": tmp_path, "environ": examples(tmp_path)}
    for step, revision, needed in (
        ("upgrade", "9001", HEAD_REVISION),
        ("upgrade", "9002", "9002"),
        ("downgrade", "9001", HEAD_REVISION),
        ("upgrade", "9002", "9002"),
        ("downgrade", HEAD_REVISION, HEAD_REVISION),
    ):
        alembic(step, revision, dsn=dsn, **where)
        connection = await asyncpg.connect(dsn)
        try:
            assert await connection.fetchval(SQL_NEEDED) == needed
        finally:
            await connection.close()


async def test_jobs_are_registered_again_after_a_downgrade(dsn: str, tmp_path: Path) -> None:
    """A step down forgets its job; a row that an earlier release has left does no harm."""
    where: Any = {"cwd": tmp_path, "environ": examples(tmp_path)}
    scripts = script_directory(tmp_path / "examples")
    known = {job.name: job for job in jobs_of(scripts)}

    async def work() -> list[tuple[str, str]]:
        async with await Database.open(dsn) as database:
            async for _ in run_jobs(database, known, pause=0):
                pass
            async with database.connection() as conn:
                return [(row.revision, row.state) for row in await jobs(conn)]

    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(generate_room(SHAPES["small_chat"], 30, seed=1).pdus)
    for _ in range(2):
        alembic("upgrade", "9001", dsn=dsn, **where)
        failure = said(alembic("upgrade", "head", dsn=dsn, status=255, **where))
        assert 'the background job "fill example_sizes" is not done' in failure
        assert await work() == [("9001", "done")]
        alembic("upgrade", "head", dsn=dsn, **where)
        alembic("downgrade", HEAD_REVISION, dsn=dsn, **where)
        assert await work() == []
    await executed(
        dsn,
        "INSERT INTO background_jobs (name, revision, registered_ts, finished_ts)"
        " VALUES ('fill example_sizes', '9001', 0, 1)",
    )
    alembic("upgrade", "9001", dsn=dsn, **where)
    connection = await asyncpg.connect(dsn)
    try:
        assert await connection.fetchval("SELECT finished_ts FROM background_jobs") is None
    finally:
        await connection.close()
    assert await work() == [("9001", "done")]
    alembic("upgrade", "head", dsn=dsn, **where)


def test_a_part_can_be_printed_both_ways(tmp_path: Path) -> None:
    where: Any = {"cwd": tmp_path, "environ": examples(tmp_path)}
    up = alembic("upgrade", "9001:9002", "--sql", dsn=None, **where).stdout
    down = alembic("downgrade", "9002:9001", "--sql", dsn=None, **where).stdout
    assert "SET version_num='9002'" in up
    assert "SET version_num='9001'" in down
    how = MigrationOptions(scripts=tmp_path / "examples")
    assert up.strip() == migration_sql("9001:9002", how=how).strip()


def test_the_settings_beside_the_revisions_do_the_same(tmp_path: Path) -> None:
    printed = room_storage("migrate", "--alembic-config").stdout.strip()
    assert printed == str(scripts_directory() / "alembic.ini")
    config = {"ALEMBIC_CONFIG": printed}
    here = alembic("upgrade", "head", "--sql", dsn=None).stdout
    assert (
        alembic("upgrade", "head", "--sql", dsn=None, cwd=tmp_path, environ=config).stdout == here
    )
    assert alembic("heads", dsn=None, cwd=tmp_path, environ=config).stdout == (
        f"{HEAD_REVISION} (head)\n"
    )


async def test_check_names_the_difference(dsn: str) -> None:
    """A further index, table or function is the operator's own; the rest is not."""
    await executed(
        dsn,
        "CREATE INDEX mine ON events (depth)",
        "CREATE TABLE mine_too (n int NOT NULL)",
        "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    )
    alembic("check", dsn=dsn)
    await executed(
        dsn,
        "DROP INDEX events_room_stream_idx",
        "ALTER TABLE events ALTER COLUMN depth SET DEFAULT 0",
        "ALTER TABLE events ADD COLUMN theirs int",
        "ALTER TABLE rooms ADD CONSTRAINT small CHECK (room_nid < 1000000)",
        "ALTER TABLE cursors DROP CONSTRAINT cursors_position_check",
        "ALTER TABLE events DISABLE TRIGGER events_auth_events_once",
        "ALTER TABLE rooms SET (fillfactor = 71)",
        "CREATE OR REPLACE FUNCTION order_slack() RETURNS bigint LANGUAGE sql"
        " AS 'SELECT 7::bigint'",
        "ALTER SEQUENCE event_nids INCREMENT 7",
    )
    failure = said(alembic("check", dsn=dsn, status=255)).strip()
    assert failure == (
        "FAILED: the database differs from schema.sql: column events.depth differs; "
        "column events.theirs is not of this release; "
        "constraint cursors.cursors_position_check is missing; "
        "constraint rooms.small is not of this release; function order_slack() differs; "
        "index events_room_stream_idx is missing; sequence event_nids differs; "
        "table rooms differs; trigger events.events_auth_events_once differs"
    )
    connection = await asyncpg.connect(dsn)
    assert (
        await connection.fetchval("SELECT count(*) FROM pg_namespace WHERE nspname ~ 'check'") == 0
    )
    await connection.close()


async def test_check_finds_the_tables_in_another_schema(empty_dsn: str) -> None:
    await executed(empty_dsn, 'CREATE SCHEMA "the rooms"')
    variables = {"STORAGE_DATABASE_SCHEMA": "the rooms"}
    alembic("upgrade", "head", dsn=empty_dsn, environ=variables)
    alembic("check", dsn=empty_dsn, environ=variables)
    await executed(empty_dsn, 'DROP VIEW "the rooms".whole_visibility')
    failure = said(alembic("check", dsn=empty_dsn, status=255, environ=variables))
    assert "table whole_visibility is missing; view whole_visibility is missing" in failure


def test_failures_are_one_sentence(server_dsn: str) -> None:
    assert "no database: set STORAGE_DSN" in alembic_without_dsn()
    assert "127.0.0.1:1: connection refused" in said(alembic("current", dsn=NOBODY, status=255))
    assert "cannot begin the name of a role" in said(
        alembic("-x", "role_prefix=No!", "current", dsn=server_dsn, status=255)
    )


def alembic_without_dsn() -> str:
    command = [sys.executable, "-m", "alembic", "current"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), check=False, capture_output=True, text=True
    )
    assert done.returncode == 255
    return done.stdout


async def test_a_new_revision_is_made_from_the_template(tmp_path: Path) -> None:
    how = newer_release(tmp_path / "newer", **{"9001_column": COLUMN})
    assert how.scripts is not None
    done = subprocess.run(
        [sys.executable, "-m", "alembic", "revision", "--rev-id", "9002", "-m", "a step"],
        cwd=tmp_path,
        env={**os.environ, "ALEMBIC_CONFIG": str(how.scripts / "alembic.ini")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "9002_a_step.py" in done.stdout
    made = how.scripts / "versions" / "9002_a_step.py"
    subprocess.run([sys.executable, made], cwd=ROOT, check=True)


# --------------------------------------------------------------------------------------------------
# a schema of a later release


async def later(dsn: str, folder: Path, **steps: str) -> None:
    """Migrate with the revisions of a later release, in a folder of its own."""
    scripts = newer_release(folder, **steps).scripts
    assert scripts is not None
    alembic(
        "upgrade",
        "head",
        dsn=dsn,
        cwd=folder,
        environ={"ALEMBIC_CONFIG": str(scripts / "alembic.ini")},
    )


@pytest.mark.parametrize("arguments", [(), pytest.param(("--pre",), marks=long_run)])
async def test_migrate_of_the_old_release_leaves_a_later_schema_alone(
    dsn: str, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """A process that restarts during a rollout runs `migrate` of the old release again."""
    await later(dsn, tmp_path / "newer", **{"9001_column": COLUMN})
    done = room_storage("migrate", "--dsn", dsn, *arguments)
    assert done.returncode == 0, done
    assert done.stdout == (
        "nothing to do: the schema is 9001, of a later release; "
        f"this release has the revisions to {HEAD_REVISION}, and can serve it\n"
    )
    assert done.stderr == ""
    assert room_storage("migrate", "--dsn", dsn, "--json", *arguments).stdout == (
        f'{{"revision": "9001", "wanted": "{HEAD_REVISION}"}}\n'
    )


async def test_other_commands_of_the_old_release_work_on_a_later_schema(
    dsn: str, tmp_path: Path
) -> None:
    await later(dsn, tmp_path / "newer", **{"9001_column": COLUMN})
    sentence = room_storage("migrate", "--dsn", dsn).stdout
    assert alembic("upgrade", "head", dsn=dsn).stdout == sentence
    assert alembic("current", dsn=dsn).stdout == sentence
    assert (
        "nothing to do: the schema is 9001"
        in room_storage("migrate", "--list", "--dsn", dsn).stdout
    )
    assert room_storage("stats", "--dsn", dsn, "--json").returncode == 0


async def test_the_old_release_is_refused_after_the_post_step(dsn: str, tmp_path: Path) -> None:
    await later(dsn, tmp_path / "newer", **{"9001_column": COLUMN, "9002_post": POST})
    for arguments in (("migrate",), ("migrate", "--pre"), ("migrate", "--list"), ("stats",)):
        done = room_storage(*arguments, "--dsn", dsn)
        assert done.returncode == 2, done
        assert done.stderr.startswith("error: the schema is 9002, and needs code that knows 9002")
        assert len(done.stderr.splitlines()) == 1
    assert "needs code that knows 9002" in said(alembic("upgrade", "head", dsn=dsn, status=255))
