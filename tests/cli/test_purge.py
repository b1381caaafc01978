"""`room-storage purge` as a process: its output, its refusals, and how it resumes after a kill."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys

import pytest

import storage
from storage.database import Database
from storage.maintenance.purge import purge_history
from storage.testing import RoomBuilder, build_room
from tests.cli.running import ROOT, room_storage
from tests.maintenance.rooms import LIVELY, SERVER
from tests.small_limits import AS_COMMAND, SMALL_BATCHES, purge_batches


async def filled(dsn: str, events: int = 120) -> RoomBuilder:
    room = build_room(LIVELY, events, seed=4, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus, room_version=room.version)
    return room


async def test_purge_and_its_jobs(dsn: str) -> None:
    room = await filled(dsn)
    point = room.events[80].event_id
    would = room_storage(
        "purge", room.room_id, "--before", point, "--dry-run", "--json", "--dsn", dsn
    )
    assert would.returncode == 0
    [told] = json.loads(would.stdout)["rooms"]
    assert told["job"] is None
    done = room_storage("purge", room.room_id, "--before", point, "--dsn", dsn)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{room.room_id}: {told['events']} events purged (")
    [job] = json.loads(room_storage("purge", "--jobs", "--json", "--dsn", dsn).stdout)
    assert job["phase"] == "done"
    assert job["deleted_count"] + job["set_aside_count"] == told["events"]
    assert room_storage("purge", room.room_id, "--all", "--dsn", dsn).returncode == 2
    assert room_storage("purge", room.room_id, "--all", "--force", "--dsn", dsn).returncode == 0
    assert room_storage("verify", "--dsn", dsn).returncode == 0


async def test_nothing_to_do(dsn: str) -> None:
    assert room_storage("purge", "--retention", "--dsn", dsn).stdout == "nothing to purge\n"
    assert room_storage("purge", "--resume", "--dsn", dsn).stdout == "nothing to purge\n"
    assert room_storage("purge", "--jobs", "--dsn", dsn).stdout == "no purges\n"


async def test_the_list_names_the_state(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room = await filled(dsn, 300)

    def listed() -> tuple[str, str]:
        """The state for programs, and the end of the line for people."""
        [job] = json.loads(room_storage("purge", "--jobs", "--json", "--dsn", dsn).stdout)
        line = room_storage("purge", "--jobs", "--dsn", dsn).stdout.splitlines()[-2]
        return job["state"], line.split("│")[-2].strip()

    class StoppedError(Exception):
        pass

    async def stop(_: object) -> None:
        assert await asyncio.to_thread(listed) == ("running", "running: delete events")
        raise StoppedError

    purge_batches(monkeypatch, 10)
    async with await Database.open(dsn) as database:
        before = room.events[250].event_id
        with pytest.raises(StoppedError):
            await purge_history(
                database, room.room_id, server_name=SERVER, before_event_id=before, watcher=stop
            )
        assert listed() == ("interrupted", "interrupted: delete events")
        async with database.connection() as conn:
            await conn.execute("UPDATE purge_jobs SET error = 'the disk is full'")
    assert listed() == ("failed", "failed: delete events: the disk is full")
    assert room_storage("purge", "--resume", "--dsn", dsn).returncode == 0
    state, line = listed()
    assert (state, line[:7]) == ("done", "done 20")
    page = (ROOT / "docs/how-to/purge.md").read_text("utf-8")
    states = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert {"running", "interrupted", "failed", "done"} <= set(states)


async def test_what_is_refused(dsn: str) -> None:
    room = await filled(dsn, 20)
    for arguments, said in (
        ((), "give a room"),
        ((room.room_id,), "give one of --before"),
        ((room.room_id, "--all", "--before", "$x"), "give one of --before"),
        ((room.room_id, "--before", "$unknown"), "unknown event $unknown"),
        ((room.room_id, "--before-date", "soon"), "is no date"),
        ((room.room_id, "--before-date", "2999-01-01"), "in the future"),
        (("!nowhere:s1.test", "--all"), "unknown room"),
        (("--retention", "--before-date", "2026-01-31"), "need a room"),
        (("--resume", "--local"), "need a room"),
        ((room.room_id, "--before", "$x", "--force"), "--force needs --all"),
        (("--resume", "--dry-run"), "--dry-run needs a room"),
    ):
        done = room_storage("purge", *arguments, "--dsn", dsn)
        assert done.returncode == 2, arguments
        assert said in done.stderr, arguments
        assert done.stdout == ""


async def test_one_that_is_killed_goes_on(dsn: str) -> None:
    room = await filled(dsn, 300)
    command = [
        sys.executable,
        "-c",
        SMALL_BATCHES.format(10) + AS_COMMAND,
        "purge",
        room.room_id,
        "--before",
        room.events[250].event_id,
        "--dsn",
        dsn,
    ]
    # The pauses of those that are killed are long: a late kill still comes before the end.
    environ = dict(os.environ)
    killed = 0
    async with await Database.open(dsn) as database, database.connection() as conn:
        while True:
            # Killed soon.
            environ["STORAGE_PURGE_PAUSE_MS"] = "1000" if killed < 3 else "0"
            process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
            deleted = await conn.fetchval("SELECT COALESCE(sum(deleted_count), 0) FROM purge_jobs")
            while process.poll() is None and killed < 3:
                if (
                    await conn.fetchval("SELECT COALESCE(sum(deleted_count), 0) FROM purge_jobs")
                    > deleted
                ):
                    process.send_signal(signal.SIGKILL)
                    killed += 1
                    break
            if process.wait() == 0:
                break
        assert killed == 3
        assert await conn.fetchval("SELECT string_agg(phase, ',') FROM purge_jobs") == "done"
    assert room_storage("verify", "--dsn", dsn).returncode == 0
