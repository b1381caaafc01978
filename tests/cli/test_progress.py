"""Progress of long commands: a line every ten seconds, or a bar; totals and estimates."""

import io
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage
from storage.cli.common import LINE_SECONDS, ProgressDisplay, amounts, time_left
from storage.database import Database
from storage.importing import Import, Rejects
from storage.maintenance.censor import censor
from storage.maintenance.purge import purge_history, purge_retention, purge_room, resume
from storage.maintenance.state_group_gc import collect_all
from storage.maintenance.totals import Total, event_total
from storage.maintenance.verify import verify
from storage.observability.counters import Progress, Report
from storage.rebuild import rebuild
from storage.testing import RoomBuilder, build_room, write_ndjson
from tests.cli.running import ROOT, environment
from tests.maintenance.rooms import LIVELY, SERVER
from tests.postgres import no_autovacuum
from tests.small_limits import AS_COMMAND, SMALL_BATCHES, purge_batches

EVENTS = 300


class SetClock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "progress,left,text",
    [
        (
            Progress("", 1_200, 3_500, "rooms"),
            118.0,
            "34 %, 1,200 of 3,500 rooms, about 2 min left",
        ),
        (Progress("", 1_200.9, 3_500, "rooms"), None, "34 %, 1,200 of 3,500 rooms"),
        (Progress("", 5, 3, "events", is_estimate=True), 4.0, "100 %, 3 of about 3 events"),
        (Progress("", 0, 0, "rooms"), None, "0 of 0 rooms"),
        (Progress("", 12_345, None, "lines"), None, "12,345 lines"),
        (
            Progress("", 1_500_000, 4_000_000, "bytes"),
            20.0,
            "37 %, 1.5 MB of 4.0 MB, less than a minute left",
        ),
    ],
)
def test_amounts_in_words(progress: Progress, left: float | None, text: str) -> None:
    assert amounts(progress, left) == text


def test_remaining_time_has_one_unit() -> None:
    assert [time_left(seconds) for seconds in (5, 50, 90, 3_000, 7_200, 100_000, 200_000)] == [
        "less than a minute left",
        "about 1 min left",
        "about 2 min left",
        "about 50 min left",
        "about 2 h left",
        "about 28 h left",
        "about 2 days left",
    ]


def test_a_line_at_most_every_ten_seconds() -> None:
    clock, file = SetClock(), io.StringIO()
    with ProgressDisplay(file=file, clock=clock) as show:
        for second in range(65):
            clock.now = float(second)
            show(Progress("verify", second * 10, 1_000, "rooms"))
    lines = file.getvalue().splitlines()
    assert len(lines) == 64 // LINE_SECONDS
    assert lines[0].startswith("verify: 10 %, 100 of 1,000 rooms, about ")
    assert lines[-1] == "verify: 60 %, 600 of 1,000 rooms, less than a minute left"


def test_earlier_work_is_no_speed() -> None:
    """A purge that goes on at 90 % has done a tenth of its own work after 10 s."""
    clock, file = SetClock(), io.StringIO()
    with ProgressDisplay(file=file, clock=clock) as show:
        for second in range(0, 101, 5):
            clock.now = float(second)
            show(Progress("purge", 9_000 + second, 10_000, "events"))
    assert file.getvalue().splitlines()[-1] == (
        "purge: 91 %, 9,100 of 10,000 events, about 15 min left"
    )


def test_quiet_is_quiet() -> None:
    clock, file = SetClock(), io.StringIO()
    with ProgressDisplay(quiet=True, file=file, clock=clock) as show:
        clock.now = 100.0
        show(Progress("verify", 1, 2, "rooms"))
    assert file.getvalue() == ""


# --------------------------------------------------------------------------------------------------
# the jobs


async def filled(dsn: str, rooms: int = 2) -> list[RoomBuilder]:
    made = [build_room(LIVELY, EVENTS, seed=seed, sign=False) for seed in range(rooms)]
    async with storage.open(dsn, server_name=SERVER) as store:
        for room in made:
            await store.append(room.pdus, room_version=room.version)
    return made


def phases(reported: list[Progress]) -> Iterator[tuple[str, list[Progress]]]:
    for phase in dict.fromkeys(one.phase for one in reported):
        yield phase, [one for one in reported if one.phase == phase]


def checked(reported: list[Progress], *expected: str) -> None:
    """These phases in this order; each grows from 0, or from what was done, to its total."""
    assert [phase for phase, _ in phases(reported)] == list(expected)
    for phase, steps in phases(reported):
        done = [one.done for one in steps]
        assert done == sorted(done), phase
        assert len(set(done)) > 1 or phase == "purge state", phase  # it may be one batch
        last = steps[-1]
        if not last.is_estimate:
            assert last.done == pytest.approx(last.total), phase
        assert len({(one.total, one.unit) for one in steps}) == 1, phase


async def test_each_job_reports_its_phases(dsn: str, database: Database) -> None:
    first, second = await filled(dsn)
    async with database.connection() as conn:
        await conn.execute("ANALYZE")

    async def drained(iterator: object) -> None:
        async for _ in iterator:  # type: ignore[attr-defined]
            pass

    async def run(job: object, *expected: str) -> None:
        reported: list[Progress] = []
        report: Report = reported.append
        await job(report)  # type: ignore[operator]
        checked(reported, *expected)

    await run(
        lambda report: drained(verify(database, report=report, server_name=SERVER)),
        "compare indexes",
        "verify",
    )
    await run(
        lambda report: drained(
            verify(database, room_ids=[first.room_id], report=report, server_name=SERVER)
        ),
        "compare indexes",
        "verify",
    )
    await run(
        lambda report: drained(collect_all(database, batch=5, report=report)),
        "compare indexes",
        "collect",
    )
    await run(
        lambda report: censor(database, older_than_ms=0, batch=5, report=report),
        "compare indexes",
        "censor",
    )
    await run(
        lambda report: rebuild(database, first.room_id, report=report, server_name=SERVER),
        "compare indexes",
        "rebuild",
    )
    await run(
        lambda report: rebuild(database, first.room_id, report=report, server_name=SERVER),
        "compare indexes",
        "rebuild",
    )
    await run(
        lambda report: purge_history(
            database,
            first.room_id,
            before_event_id=first.events[250].event_id,
            report=report,
            server_name=SERVER,
        ),
        "compare indexes",
        "purge",
        "purge state",
    )
    await run(
        lambda report: purge_room(
            database, second.room_id, force=True, report=report, server_name=SERVER
        ),
        "compare indexes",
        "purge",
    )


async def test_a_retention_run_counts_rooms_and_a_resumed_purge_what_was_done(
    dsn: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = await filled(dsn)
    purge_batches(monkeypatch, 10)
    database._config = storage.Config(retention_lifetime_ms_default=1, retention_lifetime_ms_min=0)
    reported: list[Progress] = []

    class StoppedError(Exception):
        pass

    async def stop(job: object) -> None:
        if job.deleted_count > 20:  # type: ignore[attr-defined]
            raise StoppedError

    with pytest.raises(StoppedError):
        await purge_history(
            database,
            first.room_id,
            server_name=SERVER,
            before_event_id=first.events[250].event_id,
            watcher=stop,
            report=reported.append,
        )
    total = reported[-1].total
    again: list[Progress] = []
    async for _ in resume(database, server_name=SERVER, report=again.append):
        pass
    checked(again, "compare indexes", "purge", "purge state")
    assert total is not None
    purged = [one for one in again if one.phase == "purge"]
    assert {(one.unit, one.total) for one in purged} == {("events", total)}
    assert purged[0].done > 20, "what the first attempt did counts"
    retained: list[Progress] = []
    async for _ in purge_retention(database, server_name=SERVER, report=retained.append):
        pass
    checked(retained, "compare indexes", "purge")
    assert (retained[-1].unit, retained[-1].total, retained[-1].done) == ("rooms", 2, 2)


async def test_an_import_reports_bytes_or_lines(dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "room.ndjson"
    room = build_room(LIVELY, EVENTS, seed=1, sign=False).generated()
    with file.open("wb") as target:
        write_ndjson(room, target)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[150:], *lines[:150]]))
    size = file.stat().st_size
    for total in (size, None):
        reported: list[Progress] = []
        async with storage.open(dsn, server_name=SERVER) as store:
            job = Import(
                store, Rejects(None), report=reported.append, total_bytes=total, batch_max=50
            )
            await job.run([str(file)])
        first = [one for one in reported if one.phase == "import"]
        assert first[-1].done == (size if total else len(lines))
        if total:  # the second time all are stored already
            checked(reported, "import", "import again")


async def test_the_estimate_follows_the_size_of_the_table(dsn: str, database: Database) -> None:
    await no_autovacuum(database)  # it would make an estimate of the first total
    first, _ = await filled(dsn)
    async with database.connection() as conn:
        exact = await event_total(conn)
        assert exact == Total(await conn.fetchval("SELECT count(*) FROM events"), False)
        await conn.execute("ANALYZE events")
        assert await event_total(conn) == Total(exact.rows, True)
        of_one = await event_total(conn, [first.room_id])
        assert (0 < of_one.rows < exact.rows, of_one.is_estimate) == (True, False)
    more = build_room(LIVELY, EVENTS, seed=7, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(more.pdus, room_version=more.version)
    async with database.connection() as conn:
        now = await conn.fetchval("SELECT count(*) FROM events")
        assert (await event_total(conn)).rows == pytest.approx(now, rel=0.2)


# --------------------------------------------------------------------------------------------------
# as processes


async def test_a_terminal_gets_a_bar_and_standard_output_the_result(dsn: str) -> None:
    [room] = await filled(dsn, rooms=1)
    main, terminal = pty.openpty()
    environ = environment(
        STORAGE_DSN=dsn,
        STORAGE_PURGE_PAUSE_MS="60",
        TERM="xterm-256color",
        COLUMNS="80",
    )
    command = ["purge", room.room_id, "--before", room.events[250].event_id, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", SMALL_BATCHES.format(20) + AS_COMMAND, *command],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    while select.select([main], [], [], 60)[0]:
        try:
            shown += os.read(main, 65_536)
        except OSError:  # the other side is closed
            break
    os.close(main)
    output, _ = process.communicate()
    assert process.returncode == 0
    [purged] = json.loads(output)["rooms"]
    assert f" of {purged['events']} events".encode() in shown
    assert b" %, " in shown
    assert "━".encode() in shown
