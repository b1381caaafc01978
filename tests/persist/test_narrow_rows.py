"""State groups and chain positions have two forms. Every read knows both."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Final

import pytest

import storage
from storage import Store
from storage.database.background import run_jobs
from storage.database.migrate import (
    INLINE_LINKS_REVISION,
    NARROW_GROUPS_REVISION,
    script_directory,
)
from storage.database.migration_steps import jobs_of
from storage.errors import ConstraintViolated
from storage.pipeline.rebuilding import Rebuilder
from storage.testing import SHAPES, build_room, generate_room
from tests.cli.running import ROOT
from tests.maintenance.rooms import LIVELY, SERVER, deliver, findings
from tests.persist.tables import logical_tables

BEFORE: Final = "0034"  # the narrow forms are of later steps
SQL_REVISION: Final = "UPDATE schema_compatibility SET code_revision = $1::text"
SQL_REGISTER: Final = """
INSERT INTO background_jobs (name, revision, registered_ts, batch_rows)
VALUES ($1::text, $2::text, 0, $3::int)
ON CONFLICT (name) DO UPDATE SET batch_rows = EXCLUDED.batch_rows
"""
SQL_FORMS: Final = """
SELECT
    (SELECT count(path) FROM state_groups) AS paths,
    (SELECT count(back) FROM state_groups) AS arrays,
    (SELECT count(*) FROM state_groups WHERE digest IS NULL) AS without_digest,
    (SELECT count(*) FROM state_groups WHERE event_nid IS NOT NULL) AS single,
    (SELECT count(*) FROM auth_chains WHERE chain_nid > 0) AS numbered,
    (SELECT count(*) FROM auth_chains WHERE chain_nid IS NULL) AS first_events,
    (SELECT count(link_1) FROM auth_chains) AS inline_links,
    (SELECT count(*) FROM auth_chain_links) AS links
"""
NARROW: Final = ("paths", "without_digest", "single", "first_events", "inline_links")


async def execute(store: Store, sql: str, *args: object) -> None:
    async with store.database.connection() as conn:
        await conn.execute(sql, *args)


async def forms(store: Store) -> dict[str, int]:
    async with store.database.connection() as conn:
        return dict(await conn._driver.fetchrow(SQL_FORMS))


async def run_the_job(store: Store, *, batches: int | None = None, rows: int = 50) -> None:
    """Run some batches, or all, each of at most so many rows at first."""
    known = {one.name: one for one in jobs_of(script_directory())}
    [job] = [one for name, one in known.items() if "state groups" in name]
    await execute(store, SQL_REGISTER, job.name, NARROW_GROUPS_REVISION, rows)
    done = 0
    async for _ in run_jobs(store.database, known, pause=0, clock=lambda: 0.0):
        done += 1
        if done == batches:
            break


def alembic(dsn: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=ROOT,
        env={**os.environ, "STORAGE_DSN": dsn},
        check=True,
        timeout=120,
    )


async def test_an_old_database_becomes_narrow_step_by_step(dsn: str, another_dsn: str) -> None:
    """Before each post step the old form is written, then the new one; the job is run twice.

    At each step the room is the one of a database that has always had the narrow forms.
    """
    room = generate_room(SHAPES["fork_heavy"], 200, seed=2, sign=False)
    quarter = len(room.events) // 4
    parts = [
        replace(room, events=room.events[start : start + quarter])
        for start in range(0, len(room.events), quarter)
    ]
    async with (
        storage.open(dsn, server_name=SERVER) as store,
        storage.open(another_dsn, server_name=SERVER) as other,
    ):
        await execute(store, SQL_REVISION, BEFORE)
        await deliver(store, parts[0])
        old = await forms(store)
        assert not any(old[name] for name in NARROW)
        assert min(old["arrays"], old["numbered"], old["links"]) > 0
        revisions = (NARROW_GROUPS_REVISION, INLINE_LINKS_REVISION)
        for revision, part in zip(revisions, parts[1:], strict=False):
            await execute(store, SQL_REVISION, revision)
            await deliver(store, part)
        for part in parts[:3]:
            await deliver(other, part)
        half = await forms(store)
        assert half["inline_links"] == 0  # links to chains that were begun before stay rows
        assert all(half[name] > 0 for name in (*NARROW[:-1], "arrays", "numbered"))
        assert await logical_tables(store.database) == await logical_tables(other.database)
        assert await findings(store) == []
        async with Rebuilder.opened(dsn, SERVER) as rebuilder:
            assert (await rebuilder.rebuild(room.room_id)).events == 0
        assert await forms(store) == half
        await run_the_job(store, batches=1, rows=10)
        assert half["arrays"] > (await forms(store))["arrays"] > 0
        assert await findings(store) == []
        await run_the_job(store)
        assert (await forms(store))["arrays"] == (await forms(other))["arrays"] == 0
        await deliver(store, parts[3])
        await deliver(other, parts[3])
        assert await logical_tables(store.database) == await logical_tables(other.database)
        assert await findings(store) == []


async def test_the_forms_of_earlier_releases_are_written_back(dsn: str) -> None:
    """Verification compares each digest, path and link with its own."""
    room = generate_room(SHAPES["fork_heavy"], 120, seed=3, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, room)
        tables = await logical_tables(store.database)
        narrow = await forms(store)
    assert all(narrow[name] > 0 for name in NARROW)
    assert narrow["arrays"] == narrow["numbered"] == 0
    alembic(dsn, "downgrade", "0023")
    alembic(dsn, "upgrade", "head")
    async with storage.open(dsn, server_name=SERVER) as store:
        old = await forms(store)
        assert not any(old[name] for name in NARROW)
        assert await logical_tables(store.database) == tables
        assert await findings(store) == []
        await run_the_job(store)
        assert (await forms(store))["single"] == narrow["single"]
        assert await findings(store) == []


@pytest.mark.parametrize(
    "change, constraint",
    [
        ("back = '{0}'", "state_groups_path_check"),
        ("path = NULL", "state_groups_path_check"),
        ("key_nids = '{1}', event_nids = '{1}'", "state_groups_entry_check"),
        ("key_nid = NULL, member_key_nid = NULL", "state_groups_entry_check"),
        ("key_nid = 1, member_key_nid = 1", "state_groups_entry_check"),
    ],
)
async def test_both_forms_of_a_state_group_at_once_are_refused(
    dsn: str, change: str, constraint: str
) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(build_room(LIVELY, 10, seed=1).pdus)
        with pytest.raises(ConstraintViolated, match=constraint):
            await execute(store, f"UPDATE state_groups SET {change} WHERE event_nid IS NOT NULL")
