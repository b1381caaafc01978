"""Each role can do its task and nothing else: sessions log in as members of the roles."""

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
import pytest

import storage
from storage import InputError, PermissionRefused, Store, UserId
from storage.database import Database
from storage.database.deployment import checked_prefix, grant, grants_sql
from storage.database.migrate import MigrationOptions, current_revision, migrate
from storage.maintenance.censor import Censored, censor
from storage.maintenance.purge import purge_history, purge_room
from storage.maintenance.state_group_gc import collect
from storage.rebuild import rebuild, repair_positions
from storage.replication import Client, Server
from storage.testing import RoomBuilder, build_room, deliver_with_gap
from tests.cli.running import ROOT, room_storage, room_storage_beside
from tests.maintenance.rooms import LIVELY, SERVER, deliver, findings
from tests.postgres import with_database

ALICE = UserId("@alice:s1.test")
QUICK = storage.Config(follow_ms=20)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Logins:
    """DSNs of one database, by role."""

    owner: str
    runtime: str
    other_runtime: str
    reader: str
    purger: str


def as_user(dsn: str, user: str) -> str:
    parts = urlsplit(dsn)
    if parts.hostname:
        return urlunsplit(
            (parts.scheme, f"{user}@{parts.netloc.rpartition('@')[2]}", parts.path, parts.query, "")
        )
    others = [one for one in parse_qsl(parts.query) if one[0] != "user"]
    query = urlencode([*others, ("user", user)])
    return urlunsplit((parts.scheme, "@", parts.path, query, ""))


@pytest.fixture
async def logins(dsn: str, worker_id: str) -> AsyncIterator[Logins]:
    names = {
        role: f"storage_test_{os.getpid()}_{worker_id}_{next(_numbers)}_{role}"
        for role in ("runtime", "other_runtime", "reader", "purger")
    }
    connection = await asyncpg.connect(dsn)
    try:
        for role, name in names.items():
            await connection.execute(
                f"CREATE ROLE {name} LOGIN PASSWORD 'x'"
                f" IN ROLE room_storage_{role.removeprefix('other_')}"
            )
        yield Logins(owner=dsn, **{role: as_user(dsn, name) for role, name in names.items()})
    finally:
        for name in names.values():
            await connection.execute(f"DROP ROLE {name}")
        await connection.close()


async def filled(store: Store) -> RoomBuilder:
    room = build_room(LIVELY, 200, seed=4, sign=False)
    delivery = deliver_with_gap(room, 60, 70)
    await deliver(
        store, replace(delivery, events=delivery.events[:-5]), batch=40
    )  # the gap is not filled
    return room


# --------------------------------------------------------------------------------------------------
# runtime


async def test_a_homeserver_runs_as_runtime(logins: Logins) -> None:
    """All kinds of appends, all streams, reads, a second process under another login, workers."""
    async with storage.open(logins.other_runtime, server_name="s1.tset"):
        pass  # the next store corrects the name
    async with (
        storage.open(logins.runtime, server_name=SERVER, config=QUICK) as store,
        storage.open(
            logins.other_runtime, server_name=SERVER, instance_name="second", config=QUICK
        ) as second,
    ):
        room = await filled(store)
        assert room.room_id in await store.rooms_of(UserId("@user1:s1.test"))
        reader = UserId("@user1:s1.test")
        answer = await second.sync(reader)
        page = await second.messages(
            room.room_id, reader, from_=answer.join[room.room_id].timeline.prev_batch, limit=50
        )
        assert len(page.chunk) == 50
        await store.erase_user("@user2:s1.test")
        await store.account_data.set(reader, "m.direct", {"a": 1})
        await store.account_data.set(reader, "m.direct", {"a": 2})
        await store.receipts.set(room.room_id, "m.read", reader, room.events[0].event_id, {})
        await store.receipts.set(room.room_id, "m.read", reader, room.events[1].event_id, {})
        await store.to_device.send({reader: {"device": {"n": 1}}})
        await store.to_device.delete(reader, "device", 1 << 40)
        for first, grown in ((1, 5), (1, 5)):  # a new connection, a new state, one in its place
            pos = None
            for limit in (first, grown):
                listed = storage.SlidingList([(0, 9)], limit)
                request = storage.SlidingSyncRequest(lists={"all": listed})
                found = await second.sliding_sync(reader, request, device_id="device", pos=pos)
                assert set(found.rooms) == {room.room_id}
                pos = found.pos
        presence = store.define_stream("presence", keep_ms=0)
        for key in (reader, reader, "@user2:s1.test"):  # the last one deletes, too
            await presence.publish(key, {"presence": "online"}, wakes=[reader])
        await store.erase_user("@user2:s1.test")
        assert [fact.value for fact in await presence.rows(keys=["@user2:s1.test"])] == [None]
        assert await store.cursors.set("federation", (await store.outbox(0)).upto) > 0
        assert await store.cursors.set("federation", 0, rewind=True) == 0
        gaps = await store.gaps(room.room_id)
        assert gaps
        await store.gap_failed(
            room.room_id, [gap.event_id for gap in gaps], "away", server_names=["s2.test"]
        )
        await store.server_up("s2.test")
        async with (
            await Server(store).serve(port=0) as server,
            Client(second, "127.0.0.1", server.port),
        ):
            more = build_room(LIVELY, 30, seed=5, sign=False)
            await store.append([event.pdu for event in more.events])
            async with asyncio.timeout(30):
                until = store.streams["events"].current().min
                # the loop waits for its end
                while second.streams["events"].current().min < until:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert await findings(second) == []


async def test_each_sees_that_the_other_is_alive(logins: Logins) -> None:
    """A writer's positions advance without it only if its sessions are gone.

    So another login must see the sessions.
    """
    async with (
        storage.open(logins.runtime, server_name=SERVER, config=QUICK),
        await Database.open(logins.other_runtime) as other,
        other.connection() as conn,
    ):
        alive = (
            "SELECT EXISTS (SELECT FROM pg_stat_activity a"
            " WHERE a.datname = current_database() AND is_session_of(a.application_name, 'main'))"
        )
        assert await conn.fetchval(alive)


REFUSED_TO_RUNTIME = [
    "DELETE FROM events",
    "TRUNCATE events",
    "UPDATE events SET json = ''",
    "UPDATE events SET event_id = 'x'",
    "UPDATE events SET room_nid = 1",
    "UPDATE events SET sender_nid = 1",
    "UPDATE events SET redacted_form = true",
    "UPDATE rooms SET room_version = '1'",
    "UPDATE state_groups SET digest = 0",
    "DELETE FROM rooms",
    "DELETE FROM state_groups",
    "DELETE FROM state_deltas",
    "DELETE FROM auth_chains",
    "DELETE FROM visibility",
    "DELETE FROM memberships",
    "INSERT INTO purged_streams VALUES ('events', 1)",
    "UPDATE schema_compatibility SET code_revision = '0'",
    "UPDATE alembic_version SET version_num = '0'",
    "INSERT INTO background_jobs (name, revision, registered_ts) VALUES ('x', '1', 1)",
    "CREATE TABLE mine (a int)",
    "DROP TABLE events",
    "ALTER TABLE events DISABLE TRIGGER ALL",
]


@pytest.mark.parametrize("statement", REFUSED_TO_RUNTIME)
async def test_runtime_only_appends(logins: Logins, statement: str) -> None:
    async with await Database.open(logins.runtime) as database, database.connection() as conn:
        with pytest.raises(PermissionRefused):
            await conn.execute(statement)


def role_of(dsn: str) -> str | None:
    return dict(parse_qsl(urlsplit(dsn).query)).get("user") or urlsplit(dsn).username


def test_a_refused_role_is_named_with_the_cure(logins: Logins) -> None:
    done = room_storage("migrate", "--grants", "--dsn", logins.runtime)
    assert (done.returncode, done.stdout) == (2, "")
    refused = f"the role {role_of(logins.runtime)} is not the owner of the tables"
    assert done.stderr.endswith(f"; {refused}: run it as the owner\n")


async def test_a_migration_names_the_role(empty_dsn: str, logins: Logins) -> None:
    database = urlsplit(empty_dsn).path.lstrip("/")
    done = room_storage("migrate", "--dsn", with_database(logins.runtime, database))
    assert (done.returncode, "for schema public" in done.stderr) == (2, True)
    refused = f"the role {role_of(logins.runtime)} may not create tables there"
    assert f"{refused}: migrate as the owner of the database, or ALTER DATABASE" in done.stderr


def test_runtime_forgets_a_user(logins: Logins) -> None:
    done = room_storage("forget-user", "@alice:s1.test", "--dsn", logins.runtime)
    assert (done.returncode, done.stderr) == (0, "")
    for dsn in (logins.reader, logins.purger):
        assert room_storage("forget-user", "@alice:s1.test", "--dsn", dsn).returncode == 2
    assert room_storage("forget-user", "--remove", "@alice:s1.test", "--dsn", dsn).returncode == 0
    page = (ROOT / "docs/how-to/roles.md").read_text("utf-8").splitlines()
    assert any("| `room_storage_runtime" in one and "`forget-user`" in one for one in page)


@pytest.mark.parametrize("auth_events", ["{}", "{1}"])
async def test_runtime_changes_no_auth_events(logins: Logins, auth_events: str) -> None:
    """It may give them to what came out of band; an event that has its own keeps them."""
    async with storage.open(logins.runtime, server_name=SERVER) as store:
        await filled(store)
    async with await Database.open(logins.runtime) as database, database.connection() as conn:
        with pytest.raises(PermissionRefused, match="auth events"):
            await conn.execute(
                "UPDATE events SET auth_events = $1::bigint[] WHERE auth_distance_2 > 0",
                [] if auth_events == "{}" else [1],
            )


async def test_runtime_authorises_what_came_out_of_band(logins: Logins) -> None:
    room = RoomBuilder("11", servers=("elsewhere.test",), seed=7)
    room.start(room.user(1))
    invite = room.invite(room.user(1), f"@alice:{SERVER}")
    async with storage.open(logins.runtime, server_name=SERVER) as store:
        [result] = await store.append([invite.pdu], origin="out_of_band", room_version="11")
        assert result.outcome == "stored"
        results = await store.append(room.pdus, origin="outlier")
        assert {result.outcome for result in results} == {"stored"}
        assert await findings(store) == []


# --------------------------------------------------------------------------------------------------
# reader


async def test_a_reader_verifies_counts_and_explains(logins: Logins) -> None:
    async with storage.open(logins.owner, server_name=SERVER) as store:
        room = await filled(store)
    for command in (
        ["verify"],
        ["stats"],
        ["explain", "sync", "--user", "@user1:s1.test"],
        ["explain-visibility", room.events[0].event_id, "@user1:s1.test"],
        ["export", os.devnull],
        ["jobs", "--list"],
        ["migrate", "--list"],
    ):
        done = room_storage(*command, "--dsn", logins.reader)
        assert done.returncode == 0, (command, done.stderr)
    done = room_storage("verify", "--repair", "--dsn", logins.reader)
    assert done.returncode == 0, "there is nothing to repair"


async def test_a_reader_writes_nothing(logins: Logins) -> None:
    async with await Database.open(logins.owner) as owner, owner.connection() as conn:
        tables = await conn.fetchvals(
            "SELECT relname FROM pg_class"
            " WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
        )
        sequences = await conn.fetchvals(
            "SELECT relname FROM pg_class"
            " WHERE relnamespace = 'public'::regnamespace AND relkind = 'S'"
        )
    assert len(tables) > 25
    async with await Database.open(logins.reader) as database, database.connection() as conn:
        for table in tables:
            await conn.fetchval(f"SELECT count(*) FROM {table}")
            for statement in (
                f"DELETE FROM {table}",
                f"INSERT INTO {table} DEFAULT VALUES",
                f"TRUNCATE {table}",
            ):
                with pytest.raises(PermissionRefused):
                    await conn.execute(statement)
            rights = "SELECT has_any_column_privilege($1::text, 'INSERT, UPDATE')"
            assert not await conn.fetchval(rights, table), table
        for sequence in sequences:
            with pytest.raises(PermissionRefused):
                await conn.fetchval("SELECT nextval($1::text::regclass)", sequence)
    with pytest.raises(PermissionRefused):
        await storage.open(logins.reader, server_name=SERVER).__aenter__()


# --------------------------------------------------------------------------------------------------
# purger


async def test_a_purger_censors_and_nobody_else_may(logins: Logins) -> None:
    async with storage.open(logins.owner, server_name=SERVER) as store:
        room = RoomBuilder("11", sign=False)
        room.start(ALICE)
        room.redact(ALICE, room.message(ALICE, "the key hangs behind the door"))
        await store.append(room.pdus)
        for dsn in (logins.runtime, logins.reader):
            async with await Database.open(dsn) as database:
                with pytest.raises(PermissionRefused):
                    await censor(database, older_than_ms=0)
        async with await Database.open(logins.purger) as database:
            assert await censor(database, older_than_ms=0) == Censored(censored=1)
        assert await findings(store) == []


async def test_a_purger_collects_and_mends(logins: Logins) -> None:
    async with (
        storage.open(logins.owner, server_name=SERVER) as store,
        await Database.open(logins.purger) as database,
    ):
        room = await filled(store)
        await collect(database, room.room_id)
        async with database.connection() as conn:
            for table in (
                "visibility",
                "memberships",
                "current_state",
                "missing_events",
                "audiences",
            ):
                assert (await conn.execute(f"DELETE FROM {table}")) != "DELETE 0", table
            assert await conn.execute("UPDATE auth_chains SET link_1 = NULL") != "UPDATE 0"
        await rebuild(database, room.room_id, server_name=SERVER)
        await rebuild(database, room.room_id, server_name=SERVER)
        async with store.database.connection() as conn:
            for sql in (
                "UPDATE event_types SET type = 'm.x' WHERE type_nid = 16",
                "UPDATE state_keys SET state_key = 'x' WHERE state_key_nid = 16",
                "UPDATE principals SET name = 'x' WHERE principal_nid = 1",
                "INSERT INTO dropped_extremities VALUES (1, 999)",
                "INSERT INTO partial_rooms VALUES (0, 999, '', '', '{}')",
            ):
                await conn.execute(sql)
        assert await findings(store) != []
        await repair_positions(database)
        assert await findings(store) == []
        async with database.transaction() as conn:
            await conn.execute(
                "UPDATE events SET json = json"
                " WHERE event_nid = (SELECT min(event_nid) FROM events)"
            )
            await conn.execute(
                "DELETE FROM events WHERE event_nid = (SELECT max(event_nid) FROM events)"
            )
        for statement in (
            "INSERT INTO events SELECT * FROM events",
            "UPDATE alembic_version SET version_num = '0'",
            "DELETE FROM deployment",
        ):
            async with database.connection() as conn:
                with pytest.raises(PermissionRefused):
                    await conn.execute(statement)


async def test_a_purger_purges_and_censors(logins: Logins) -> None:
    async with storage.open(logins.runtime, server_name=SERVER) as store:
        room = await filled(store)
        purge = ["purge", room.room_id, "--before", room.events[150].event_id]
        for command in (purge, ["censor", "--older-than", "0"]):
            done = await room_storage_beside(*command, "--json", "--dsn", logins.purger)
            assert done.returncode == 0, done.stderr
        async with store.database.connection() as conn:
            assert await conn.fetchval("SELECT sum(deleted_count) FROM purge_jobs") > 10
            assert await conn.fetchval("SELECT count(*) FROM events WHERE encoding = 1") > 0
        assert await findings(store) == []
    done = room_storage(
        "purge", room.room_id, "--before", room.events[170].event_id, "--dsn", logins.runtime
    )
    assert (done.returncode, "permission denied" in done.stderr) == (2, True), done.stderr


# --------------------------------------------------------------------------------------------------
# making the roles


async def test_a_purger_purges(logins: Logins) -> None:
    room = build_room(LIVELY, 100, seed=6, sign=False)
    async with (
        storage.open(logins.owner, server_name=SERVER) as store,
        await Database.open(logins.purger) as database,
    ):
        await store.append(room.pdus, room_version=room.version)
        purged = await purge_history(
            database, room.room_id, server_name=SERVER, before_event_id=room.events[60].event_id
        )
        assert purged.events > 10
        assert await findings(store) == []
        await purge_room(database, room.room_id, server_name=SERVER, force=True)
        assert await findings(store) == []


async def test_no_table_is_forgotten(dsn: str) -> None:
    """Every table and sequence of the schema is in grants.sql: a reader may read it."""
    async with await Database.open(dsn) as database, database.connection() as conn:
        forgotten = await conn.fetchvals(
            "SELECT relname FROM pg_class"
            " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v', 'S')"
            " AND NOT CASE relkind"
            " WHEN 'S' THEN has_sequence_privilege('room_storage_reader', oid, 'SELECT')"
            " ELSE has_table_privilege('room_storage_reader', oid, 'SELECT') END"
        )
        assert forgotten == []


async def test_who_may_not_make_roles_is_told_how(
    empty_dsn: str, caplog: pytest.LogCaptureFixture, worker_id: str
) -> None:
    owner = f"storage_test_{os.getpid()}_{worker_id}_{next(_numbers)}_owner"
    prefix = f"other_{os.getpid()}_{worker_id}".lower()
    admin = await asyncpg.connect(empty_dsn)
    try:
        await admin.execute(
            f"CREATE ROLE {owner} LOGIN PASSWORD 'x'; GRANT ALL ON SCHEMA public TO {owner}"
        )
        with caplog.at_level(logging.WARNING):
            await migrate(as_user(empty_dsn, owner), how=MigrationOptions(role_prefix=prefix))
        assert (
            f"the roles {prefix}_runtime, {prefix}_reader, {prefix}_purger do not exist"
            f" and {owner} may not make them" in caplog.text
        )
        assert (
            f"CREATE ROLE {prefix}_runtime NOLOGIN; CREATE ROLE {prefix}_reader NOLOGIN;"
            in caplog.text
        )
        again = f"then run `room-storage migrate --grants --role-prefix {prefix}` as {owner}"
        assert again in caplog.text
        async with storage.open(as_user(empty_dsn, owner), server_name=SERVER) as store:
            room = RoomBuilder("11")
            room.start(ALICE)
            assert [result.outcome for result in await store.append(room.pdus)] == ["stored"] * len(
                room.pdus
            )
        [warning] = await grant(as_user(empty_dsn, owner), prefix=prefix)
        assert again in warning
        for role in ("runtime", "reader", "purger"):
            await admin.execute(f"CREATE ROLE {prefix}_{role} NOLOGIN")
        assert await grant(as_user(empty_dsn, owner), prefix=prefix) == []
        assert await admin.fetchval(
            f"SELECT has_table_privilege('{prefix}_reader', 'events', 'SELECT')"
        )
        assert not await admin.fetchval(
            f"SELECT has_table_privilege('{prefix}_runtime', 'events', 'DELETE')"
        )
    finally:
        for role in (f"{prefix}_runtime", f"{prefix}_reader", f"{prefix}_purger", owner):
            if await admin.fetchval(
                "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", role
            ):
                await admin.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")
        await admin.close()


async def test_grants_are_exactly_these_whatever_was_before(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            "GRANT ALL ON events TO room_storage_reader;"
            " GRANT UPDATE (json) ON events TO room_storage_runtime"
        )
        done = room_storage("migrate", "--grants", "--json", "--dsn", dsn)
        assert (done.returncode, done.stdout) == (0, '{"warnings": "none"}\n')
        assert not await connection.fetchval(
            "SELECT has_table_privilege('room_storage_reader', 'events', 'DELETE')"
        )
        assert not await connection.fetchval(
            "SELECT has_column_privilege('room_storage_runtime', 'events', 'json', 'UPDATE')"
        )
    finally:
        await connection.close()


async def test_a_database_without_roles(empty_dsn: str) -> None:
    await migrate(empty_dsn, how=MigrationOptions(role_prefix="none"))
    async with await Database.open(empty_dsn) as database, database.connection() as conn:
        assert await current_revision(conn) is not None
        assert (
            await conn.fetchval(
                "SELECT count(*) FROM pg_class WHERE relname = 'events' AND relacl IS NOT NULL"
            )
            == 0
        )


def test_a_prefix_is_part_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked_prefix(None) == "room_storage"
    monkeypatch.setenv("STORAGE_ROLE_PREFIX", "matrix")
    assert checked_prefix(None) == "matrix"
    assert grants_sql("mine").startswith("SET room_storage.role_prefix = 'mine';")
    for wrong in ("Mine", "a'b", "a-b", "x" * 42, "1a"):
        with pytest.raises(InputError, match="cannot begin the name of a role"):
            checked_prefix(wrong)
