"""Backups: by pg_dump, and as a base backup with the log up to a moment.

What comes back is whole, and clients are told the truth.
"""

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import pytest

import storage
from storage import EventId, ResyncNeeded, Store, UserId
from storage.config import Config
from storage.database.embedded import Account, EmbeddedPostgres
from storage.database.migrate import migrate
from storage.streams.restore_detection import JUMP
from storage.testing import BuiltEvent, RoomBuilder
from tests.maintenance.rooms import SERVER, findings
from tests.postgres import chosen_binaries, client_programs, with_database

ALICE = UserId("@alice:s1.test")
QUIET = Config(follow_ms=3_600_000)


class Chat:
    """A room, and a client that has synced it: what it knows of the timeline and the topic."""

    def __init__(self) -> None:
        self.room = RoomBuilder("11", seed=3)
        self.room.start(ALICE)
        self.written = 0
        self.since: str | None = None
        self.seen: list[str] = []

    async def write(self, store: Store, count: int) -> None:
        for number in range(count):
            (self.room.topic if number % 5 == 0 else self.room.message)(
                ALICE, f"{self.written} {number}"
            )
        results = await store.append(self.room.pdus[self.written :])
        assert {result.outcome for result in results} == {"stored"}
        self.written = len(self.room.events)

    async def sync(self, store: Store) -> list[str]:
        answer = await store.sync(ALICE, since=self.since, timeline_limit=1000)
        self.since = answer.next_batch
        told: list[str] = [
            event.event_id for joined in answer.join.values() for event in joined.timeline.events
        ]
        self.seen += told
        return told

    def back_to(self, count: int) -> None:
        """The room as its builder had it then: what comes next is another history."""
        kept, self.room = self.room.events[:count], RoomBuilder("11", seed=3)
        self.room.start(ALICE)
        for event in kept[len(self.room.events) :]:
            (self.room.topic if event.type == "m.room.topic" else self.room.message)(
                ALICE, next(iter(event.content.values()))
            )
        self.written = count


def run(program: str, *arguments: object) -> str:
    command = [str(client_programs() / program), *map(str, arguments)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


# --------------------------------------------------------------------------------------------------
# dump


async def test_a_dump_is_restored_whole_and_goes_on(
    dsn: str, empty_dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat, late = Chat(), None
    async with storage.open(dsn, server_name=SERVER, config=QUIET) as store:
        await chat.write(store, 40)
        await chat.sync(store)
        await store.to_device.send({ALICE: {"device": {"n": 1}}})
        await chat.write(store, 10)
        run("pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", dsn)
        before, known = chat.written, list(chat.seen)
        old = chat.since
        await chat.write(store, 30)
        await chat.sync(store)
        late = chat.since
    run("pg_restore", "--exit-on-error", f"--dbname={empty_dsn}", tmp_path / "dump")
    with caplog.at_level(logging.WARNING):
        async with storage.open(empty_dsn, server_name=SERVER, config=QUIET) as store:
            assert "the database was restored" in caplog.text
            assert await findings(store) == []
            assert [
                message.content for message in await store.to_device.inbox(ALICE, "device")
            ] == [b'{"n":1}']
            chat.since, chat.seen = old, known
            assert await chat.sync(store) == [
                event.event_id for event in chat.room.events[before - 10 : before]
            ]
            with pytest.raises(ResyncNeeded, match="restored from"):
                await store.sync(ALICE, since=late)
            await store.append(chat.room.pdus[before:])  # from other servers, which still have them
            assert await chat.sync(store) == [event.event_id for event in chat.room.events[before:]]
            assert chat.seen == [event.event_id for event in chat.room.events]
            assert await findings(store) == []
    caplog.clear()
    async with storage.open(empty_dsn, server_name=SERVER, config=QUIET) as store:
        assert "restored" not in caplog.text, "it is the same database when it is opened again"
        assert await chat.sync(store) == []


async def test_sequences_that_a_restore_left_out_are_set_forward(
    dsn: str, empty_dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chat = Chat()
    async with storage.open(dsn, server_name=SERVER, config=QUIET) as store:
        await chat.write(store, 40)
        await chat.sync(store)
    run("pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", dsn)
    contents = [
        line
        for line in run("pg_restore", "--list", tmp_path / "dump").splitlines()
        if " SEQUENCE SET " not in line
    ]
    (tmp_path / "contents").write_text("\n".join(contents))
    run(
        "pg_restore",
        "--exit-on-error",
        f"--use-list={tmp_path / 'contents'}",
        f"--dbname={empty_dsn}",
        tmp_path / "dump",
    )
    with caplog.at_level(logging.WARNING):
        async with storage.open(empty_dsn, server_name=SERVER, config=QUIET) as store:
            for name in (
                "events_stream",
                "event_nids",
                "state_group_nids",
                "principal_nids",
                "room_nids",
                "writer_nids",
            ):
                assert f"the sequence {name} was at" in caplog.text
            await chat.write(store, 20)
            assert len(await chat.sync(store)) == 20
            assert await findings(store) == []


# --------------------------------------------------------------------------------------------------
# point in time


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that the account of the server reaches."""
    path = Path(tempfile.mkdtemp(prefix="storage-backup-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def own(account: Account, path: Path) -> None:
    if account.switch:
        for one in (path, *path.rglob("*")):
            os.chown(one, account.uid, account.gid)
    path.chmod(0o700)


async def ask(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def ready(dsn: str) -> None:
    """Wait for the end of recovery."""
    connection = await asyncpg.connect(dsn)
    try:
        while await connection.fetchval("SELECT pg_is_in_recovery()"):
            await connection.execute("SELECT pg_sleep(0.05)")
    finally:
        with suppress(asyncpg.PostgresError, OSError):
            await connection.close()


class Archive:
    """Servers whose log is archived: one that is backed up, one that is restored from it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.account = Account.for_server()
        self.folder = self.account.make_directory(place / "archive")
        self.first = self._server(self.account.make_directory(place / "first"))
        self.backup = self.account.make_directory(place / "second") / "postgresql"

    def _server(self, directory: Path) -> EmbeddedPostgres:
        config = Config(embedded_shared_buffers_mb=64, embedded_connections_max=30)
        return EmbeddedPostgres(directory, config=config, binaries=chosen_binaries())

    @asynccontextmanager
    async def archived(self) -> AsyncIterator[str]:
        """The DSN of an empty database whose log is archived."""
        self.first.start()
        try:
            await ask(
                self.first.dsn,
                "ALTER SYSTEM SET archive_mode = on",
                f"ALTER SYSTEM SET archive_command = 'cp %p {self.folder}/%f'",
            )
        finally:
            self.first.stop()
        self.first.start()
        try:
            await ask(self.first.dsn, "CREATE DATABASE rooms")
            yield with_database(self.first.dsn, "rooms")
            await ask(self.first.dsn, "SELECT pg_switch_wal()")
        finally:
            self.first.stop()

    def copy(self) -> None:
        """Take a base backup without the log."""
        words = f"-h {self.first.directory / 'run'} -p 5432 -U postgres -X none -c fast --no-sync"
        run("pg_basebackup", "-D", self.backup, *words.split())

    @asynccontextmanager
    async def restored(self) -> AsyncIterator[str]:
        """The DSN of the backup, brought to the restore point "then"."""
        with (self.backup / "postgresql.auto.conf").open("a") as settings:
            settings.write(
                f"restore_command = 'cp {self.folder}/%f %p'\nrecovery_target_name = 'then'\n"
                "recovery_target_action = 'promote'\narchive_mode = off\n"
            )
        (self.backup / "recovery.signal").touch()
        own(self.account, self.backup)
        second = self._server(self.place / "second")
        second.start()
        try:
            dsn = with_database(second.dsn, "rooms")
            await ready(dsn)
            yield dsn
        finally:
            second.stop()


@pytest.mark.timeout(300)
@pytest.mark.every_postgres
async def test_a_base_backup_goes_to_a_moment_and_on_from_there(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive, chat = Archive(place), Chat()
    async with archive.archived() as dsn:
        await migrate(dsn)
        async with storage.open(dsn, server_name=SERVER, config=QUIET) as store:
            await chat.write(store, 40)
            await chat.sync(store)
            archive.copy()
            await chat.write(store, 20)
            before, old, known = chat.written, chat.since, list(chat.seen)
            await ask(archive.first.dsn, "SELECT pg_create_restore_point('then')")
            await chat.write(store, 30)
            await chat.sync(store)
            late, lost = chat.since, ids(chat.room.events[before:])
            place_of_late = (await store.messages(chat.room.room_id, ALICE, limit=5)).end
    caplog.set_level(logging.WARNING)
    async with (
        archive.restored() as dsn,
        storage.open(dsn, server_name=SERVER, config=QUIET) as store,
    ):
        assert "the database was restored" in caplog.text
        assert await findings(store) == []
        assert await store.events(lost) == {}
        chat.since, chat.seen = old, known
        assert await chat.sync(store) == ids(chat.room.events[before - 20 : before])
        with pytest.raises(ResyncNeeded, match="restored from"):
            await store.sync(ALICE, since=late)
        chat.back_to(before)
        await chat.write(store, 60)  # another history, longer than what was lost
        assert ids(chat.room.events[before:]) != lost
        with pytest.raises(ResyncNeeded):
            await store.sync(ALICE, since=late)
        assert await chat.sync(store) == ids(chat.room.events[before:])
        assert chat.seen == ids(chat.room.events)
        page = await store.messages(chat.room.room_id, ALICE, from_=place_of_late, limit=5)
        assert page.chunk
        assert store.streams["events"].current().min > JUMP
        assert await findings(store) == []


def ids(events: Iterable[BuiltEvent]) -> list[EventId]:
    return [event.event_id for event in events]
