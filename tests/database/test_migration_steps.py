"""Migrations as operators meet them: beside running servers, interrupted, blocked, printed.

Also old code on a newer schema.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from alembic.util import CommandError

import storage
from storage import (
    DatabaseConflict,
    DatabaseUnavailable,
    MigrationBlocked,
    SchemaOutOfDate,
    SchemaTooNew,
)
from storage.database import Database
from storage.database import migrate as migrating
from storage.database.background import BATCH_ROWS_MAX, BATCH_SECONDS, Job, jobs, run_jobs
from storage.database.migrate import (
    HEAD_REVISION,
    MigrationOptions,
    check_schema,
    current_revision,
    migrate,
    migrate_before,
    migration_sql,
    pending,
    script_directory,
)
from storage.database.migration_steps import jobs_of
from storage.database.pace import fitting
from storage.ids import UserId
from storage.testing import RoomBuilder
from tests.database.catalogue import catalogue_of
from tests.database.newer import COLUMN, HEAD, INDEX, JOB, LAST_PRE, newer_release
from tests.maintenance.rooms import findings
from tests.postgres import client_programs

ROOT = Path(__file__).resolve().parents[2]
ALICE = UserId("@alice:s1.test")
IS_VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('events_depth_idx')"
BUILDER = """
SELECT a.pid FROM pg_stat_activity a JOIN pg_stat_progress_create_index p USING (pid)
 WHERE a.datname = current_database() AND p.phase LIKE 'waiting%'
"""


@pytest.fixture
def newer(tmp_path: Path) -> MigrationOptions:
    return newer_release(tmp_path / "newer")


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator["asyncpg.Connection"]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


def known_jobs(how: MigrationOptions) -> dict[str, Job]:
    return {job.name: job for job in jobs_of(script_directory(how.scripts))}


async def revision_of(dsn: str) -> str | None:
    async with await Database.open(dsn) as database, database.connection() as conn:
        return await current_revision(conn)


def chat(messages: int, seed: int = 1) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed)
    room.start(ALICE)
    for number in range(messages):
        (room.topic if number % 7 == 0 else room.message)(ALICE, str(number))
    return room


# --------------------------------------------------------------------------------------------------
# a release


async def test_a_release_from_pre_to_post_beside_running_servers(
    dsn: str, newer: MigrationOptions, conn: "asyncpg.Connection"
) -> None:
    room = chat(60)
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(room.pdus[:40])
        since = (await store.sync(ALICE)).next_batch
        assert [step.phase for step in await pending(dsn, how=newer)] == [
            "pre",
            "pre",
            "pre",
            "post",
        ]
        with pytest.raises(MigrationBlocked, match=r"older release run \(main\).*migrate --pre"):
            await migrate(dsn, how=newer)
        assert await revision_of(dsn) == migrating.HEAD_REVISION, (
            "nothing is done where not all can be"
        )
        assert await migrate_before(dsn, how=newer) == LAST_PRE
        assert await migrate_before(dsn, how=newer) == LAST_PRE, "there is nothing more to do yet"

        await store.append(room.pdus[40:])  # the old code, opened before
        async with storage.open(
            dsn, server_name="s1.test", instance_name="later"
        ) as second:  # and opened since
            answer = await second.sync(ALICE, since=since, timeline_limit=100)
            assert len(answer.join[room.room_id].timeline.events) == len(room.events) - 40
            assert (await second.current_state(room.room_id)).keys() == (
                await store.current_state(room.room_id)
            ).keys()
        assert await findings(store) == []
        with pytest.raises(MigrationBlocked, match="main"):
            await migrate(dsn, how=newer)
    with pytest.raises(
        MigrationBlocked, match=r'job "fill json_bytes" is not done.*room-storage jobs'
    ):
        await migrate(dsn, how=newer)
    async with await Database.open(dsn) as database:
        assert [row.state async for row in run_jobs(database, known_jobs(newer), pause=0)][
            -1
        ] == "done"
    assert (
        await conn.fetchval(
            "SELECT count(*) FROM events WHERE json_bytes IS DISTINCT FROM octet_length(json)"
        )
        == 0
    )
    assert await migrate(dsn, how=newer) == HEAD
    assert await pending(dsn, how=newer) == []
    with pytest.raises(
        SchemaTooNew, match=f"the schema is {HEAD}, and needs code that knows {HEAD}"
    ):
        await storage.open(dsn, server_name="s1.test").__aenter__()


async def test_code_that_needs_a_later_schema_says_so(
    dsn: str, newer: MigrationOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "OLDEST_REVISION", "9001")
    monkeypatch.setattr(migrating, "HEAD_REVISION", HEAD)
    async with await Database.open(dsn) as database, database.connection() as conn:
        with pytest.raises(SchemaOutOfDate, match="run `room-storage migrate`"):
            await check_schema(conn)
        await migrate_before(dsn, how=newer)
        await check_schema(conn)
        await conn.execute("DELETE FROM background_jobs")
        await migrate(dsn, how=newer)
        await check_schema(conn)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tests_of_this_release_pass_on_the_schema_of_the_next(newer: MigrationOptions) -> None:
    """Those of what a homeserver does; all others can be run so as well (tests/conftest.py)."""
    chosen = [
        "tests/persist/test_append.py",
        "tests/queries/test_messages.py",
        "tests/streams/test_store_streams.py",
    ]
    environ = {**os.environ, "STORAGE_TEST_MIGRATIONS": str(newer.scripts)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


# --------------------------------------------------------------------------------------------------
# obstacles


async def test_a_lock_that_is_not_given_ends_the_step_with_advice(
    dsn: str, tmp_path: Path, conn: "asyncpg.Connection"
) -> None:
    how = newer_release(tmp_path / "newer", **{"9001_column": COLUMN})
    async with conn.transaction():
        await conn.execute("LOCK TABLE events IN ACCESS SHARE MODE")  # as a long read
        quick = MigrationOptions(scripts=how.scripts, lock_timeout_ms=100)
        with pytest.raises(
            DatabaseConflict,
            match=rf"lock timeout; the schema is {HEAD_REVISION} now,"
            " run the migration again .*--lock-timeout-ms",
        ):
            await migrate(dsn, how=quick)
        async with asyncio.timeout(60):  # nobody waits behind it any more
            assert await conn.fetchval("SELECT count(*) FROM events") == 0
    assert await migrate(dsn, how=how) == "9001"


async def test_the_session_that_holds_the_lock_is_named(dsn: str, tmp_path: Path) -> None:
    how = newer_release(tmp_path / "newer", **{"9001_column": COLUMN})
    reader = await asyncpg.connect(dsn, server_settings={"application_name": "nightly report"})
    try:
        async with reader.transaction():
            await reader.execute("LOCK TABLE events IN ACCESS SHARE MODE")
            patient = MigrationOptions(scripts=how.scripts, lock_timeout_ms=5_000)
            pid = reader.get_server_pid()
            with pytest.raises(
                DatabaseConflict,
                match=rf"\(now session {pid} \('nightly report' of role \w+, idle in",
            ):
                await migrate(dsn, how=patient)
    finally:
        await reader.close()


async def test_an_index_build_that_was_killed_is_found_and_built_again(
    dsn: str, tmp_path: Path, conn: "asyncpg.Connection", caplog: pytest.LogCaptureFixture
) -> None:
    how = newer_release(tmp_path / "newer", **{"9001_column": COLUMN, "9002_index": INDEX})
    await migrate(dsn, revision="9001", how=how)
    other = await asyncpg.connect(dsn)
    try:
        transaction = other.transaction()
        await transaction.start()
        await other.execute(
            "LOCK TABLE events IN ROW EXCLUSIVE MODE"
        )  # as a write: the build waits for it
        building = asyncio.create_task(migrate(dsn, how=how))
        while (pid := await conn.fetchval(BUILDER)) is None:
            assert not building.done(), building
            await asyncio.sleep(0.01)
        await conn.execute("SELECT pg_terminate_backend($1)", pid)
        with pytest.raises(
            DatabaseUnavailable,
            match="the schema is 9001 now, run the migration again to go on from there",
        ):
            await building
        await transaction.rollback()
    finally:
        await other.close()
    assert await conn.fetchval(IS_VALID) is False
    async with storage.open(dsn, server_name="s1.test") as store:
        assert [(finding.check, finding.subject) for finding in await findings(store)] == [
            ("indexes", ("events_depth_idx",))
        ]
    with caplog.at_level(logging.WARNING):
        assert await migrate(dsn, how=how) == "9002"
    assert (
        "events_depth_idx was left invalid by a build that was interrupted:"
        " it is dropped and built again" in caplog.text
    )
    assert await conn.fetchval(IS_VALID) is True


async def test_two_that_migrate_at_once_do_not_wait_for_each_other_in_a_circle(
    dsn: str, newer: MigrationOptions
) -> None:
    async with asyncio.timeout(60):
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "alembic",
                "-x",
                f"dsn={dsn}",
                "upgrade",
                LAST_PRE,
                cwd=newer.scripts,
                env=alembic_environ(newer),
            )
            for _ in range(3)
        ]
        assert [await process.wait() for process in processes] == [0, 0, 0]
    assert await revision_of(dsn) == LAST_PRE


def alembic_environ(how: MigrationOptions) -> dict[str, str]:
    assert how.scripts is not None
    settings = f'[tool.alembic]\nscript_location = "{how.scripts}"\n'
    (how.scripts / "pyproject.toml").write_text(settings)
    return {**os.environ, "PYTHONPATH": str(ROOT)}


async def test_a_revision_says_its_phase_and_builds_an_index_alone(
    dsn: str, tmp_path: Path
) -> None:
    silent = newer_release(
        tmp_path / "silent",
        **{
            "9001_column": COLUMN.replace(
                f', phase = "9001", "{HEAD_REVISION}", "pre"', f' = "9001", "{HEAD_REVISION}"'
            )
        },
    )
    with pytest.raises(CommandError, match="the revision 9001 does not define its phase"):
        await migrate(dsn, how=silent)
    both = COLUMN + INDEX.split("def upgrade():\n")[1].replace(
        "    index",
        "    from storage.database.migration_steps import index_concurrently\n    index",
    )
    mixed = newer_release(tmp_path / "mixed", **{"9001_both": both})
    with pytest.raises(CommandError, match="give it a step of its own"):
        await migrate(dsn, how=mixed)
    assert await revision_of(dsn) == migrating.HEAD_REVISION


async def test_the_printed_script_does_the_same(
    dsn: str, another_dsn: str, newer: MigrationOptions
) -> None:
    script = migration_sql(f"{migrating.HEAD_REVISION}:{HEAD}", how=newer)
    psql = [str(client_programs() / "psql"), "--no-psqlrc", "-q", "-v", "ON_ERROR_STOP=1", dsn]
    done = subprocess.run(psql, input=script, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert 'the background job "fill json_bytes" is not done' in done.stderr
    assert await revision_of(dsn) == LAST_PRE
    for url in (dsn, another_dsn):
        await migrate_before(url, how=newer)
        async with await Database.open(url) as database:
            assert [row async for row in run_jobs(database, known_jobs(newer), pause=0)]
    await migrate(another_dsn, how=newer)
    done = subprocess.run(
        psql,
        input=migration_sql(f"{LAST_PRE}:{HEAD}", how=newer),
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = [await catalogue_of(url) for url in (dsn, another_dsn)]
    for catalogue in told:
        catalogue["rows"] = [
            row for row in catalogue["rows"] if not row.startswith("background_jobs")
        ]  # they hold times
    assert told[0] == told[1]


# --------------------------------------------------------------------------------------------------
# background jobs


async def test_a_job_goes_on_where_it_was_interrupted(
    dsn: str, newer: MigrationOptions, conn: "asyncpg.Connection"
) -> None:
    room = chat(300)
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(room.pdus)
    await migrate_before(dsn, how=newer)
    await conn.execute("UPDATE background_jobs SET batch_rows = 20")
    async with await Database.open(dsn) as database:
        progress = run_jobs(database, known_jobs(newer), pause=0)
        first = await anext(progress)
        second = await anext(progress)
        await progress.aclose()
        assert (first.rows_done, first.rows_expected, first.state) == (
            20,
            len(room.events),
            "running",
        )
        assert second.rows_done > first.rows_done
        filled = await conn.fetchval("SELECT count(*) FROM events WHERE json_bytes IS NOT NULL")
        assert filled == second.rows_done < len(room.events)
        await conn.execute(
            "ALTER TABLE events ADD CONSTRAINT in_the_way CHECK (json_bytes IS NULL) NOT VALID"
        )
        with pytest.raises(storage.ConstraintViolated, match="in_the_way"):
            await anext(run_jobs(database, known_jobs(newer), pause=0))
        async with database.connection() as connection:
            [row] = await jobs(connection)
        assert (row.state, row.rows_done) == ("failed", second.rows_done)
        assert "in_the_way" in str(row.error)
        await conn.execute("ALTER TABLE events DROP CONSTRAINT in_the_way")

        async def run() -> None:
            async for _ in run_jobs(database, known_jobs(newer), pause=0):
                pass

        await asyncio.gather(run(), run())
        async with database.connection() as connection:
            [row] = await jobs(connection)
    assert (row.name, row.state, row.error, row.rows_done) == (JOB, "done", None, len(room.events))
    assert (
        await conn.fetchval(
            "SELECT count(*) FROM events WHERE json_bytes IS DISTINCT FROM octet_length(json)"
        )
        == 0
    )


async def test_a_job_that_nobody_knows_is_told(dsn: str, newer: MigrationOptions) -> None:
    await migrate_before(dsn, how=newer)
    async with await Database.open(dsn) as database:
        with pytest.raises(storage.StorageCorrupt, match=JOB):
            await anext(run_jobs(database, {}))


def test_batches_grow_and_shrink_within_bounds() -> None:
    def following(rows: int, seconds: float) -> int:
        return fitting(rows, seconds, goal_s=BATCH_SECONDS, most=BATCH_ROWS_MAX)

    assert [following(100, seconds) for seconds in (0.01, 0.15, 0.3)] == [200, 100, 50]
    assert following(1, 60) == 1
    assert following(BATCH_ROWS_MAX, 0.001) == BATCH_ROWS_MAX
    assert fitting(30, 60, goal_s=BATCH_SECONDS, least=20, most=500) == 20
