"""Settings of the server, the role or the database change no answer and lose nothing.

Each session pins the settings that could.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import asyncpg
import pytest

import storage
from storage import InputError, UserId
from storage.config import Config
from storage.database import Connection, Database
from storage.database.deployment import grant
from storage.database.dsn import DsnServer
from storage.database.embedded import EmbeddedPostgres
from storage.database.migrate import HEAD_REVISION, migrate, migration_sql
from storage.database.session import PINNED, PLANNER, migration_settings, open_driver, pinned
from storage.errors import DatabaseError
from storage.testing import RoomBuilder
from tests.database.newer import newer_release
from tests.maintenance.rooms import SERVER, findings
from tests.postgres import chosen_binaries, client_programs, with_database

ALICE = UserId(f"@alice:{SERVER}")
Level = Literal["server", "role", "database"]
LEVELS: Final[tuple[Level, ...]] = ("server", "role", "database")

OTHERWISE: Final = {"on": "off", "off": "on", "4GB": "1MB"}
WRONG: Final[Mapping[str, str]] = {
    "synchronous_commit": "off",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "standard_conforming_strings": "off",
    "backslash_quote": "on",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "quote_all_identifiers": "on",
    "client_min_messages": "error",
    "bytea_output": "escape",
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "extra_float_digits": "-15",
    "lc_monetary": "POSIX",
    "lc_numeric": "POSIX",
    "lc_time": "POSIX",
    "xmlbinary": "hex",
    "xmloption": "document",
    "row_security": "on",
    "gin_fuzzy_search_limit": "1",
    "exit_on_error": "on",
    "idle_session_timeout": "300",
    "jit": "on",
    "plan_cache_mode": "force_custom_plan",
    **{name: OTHERWISE.get(value, "7") for name, value in PLANNER.items()},
    "search_path": "elsewhere",
    "client_encoding": "LATIN1",
    "lock_timeout": "1",
    "statement_timeout": "1",
    "idle_in_transaction_session_timeout": "1",
}
"""Each in a way that it must not have."""

FOR_SUPERUSERS: Final[Mapping[str, str]] = {
    "session_replication_role": "replica",
    "zero_damaged_pages": "on",
    "ignore_checksum_failure": "on",
}
"""Settings that an ordinary role cannot set right."""

SINCE_17: Final[Mapping[str, str]] = {"transaction_timeout": "700"}

HARMLESS: Final[Mapping[str, str]] = {
    # names, or categories, and why no session needs them pinned
    "Query Tuning": "a plan, and no answer; those that choose among the plans of reads are pinned",
    "Resource Usage": "how much memory, or which workers",
    "Reporting and Logging": "the log",
    "Statistics": "what Postgres counts",
    "Vacuuming": "when rows that nobody sees are thrown away",
    "Connections and Authentication": "passwords, and when a dead peer is noticed",
    "Replication": "what a standby is sent",
    "Shared Library Preloading": "the operator's own programs",
    "lc_messages": "the language of messages; errors are told by their SQLSTATE",
    "default_text_search_config": "no text is searched",
    "icu_validation_level": "for whoever makes collations",
    "timezone_abbreviations": "no time is given as text",
    "dynamic_library_path": "no library is loaded",
    "extension_control_path": "no extension is made",
    "gin_pending_list_limit": "when an index is tidied up",
    "check_function_bodies": "for whoever makes functions: it changes none",
    "createrole_self_grant": "what a role may that made another one",
    "default_table_access_method": "the operator's choice, when the schema is made",
    "default_tablespace": "the operator's choice, when the schema is made",
    "default_toast_compression": "how values are kept, not what they are",
    "temp_tablespaces": "where sorts spill to",
    "event_triggers": "the operator's own programs",
    "restrict_nonsystem_relation_kind": "there are no views or foreign tables; else it is an error",
    "transaction_deferrable": "of one transaction: each begins with the default",
    "transaction_isolation": "of one transaction: each begins with the default",
    "transaction_read_only": "of one transaction: each begins with the default",
    "deadlock_timeout": "when a deadlock is looked for",
    "escape_string_warning": (
        "a warning about what standard_conforming_strings changes, which is pinned"
    ),
    "lo_compat_privileges": "there are no large objects",
    "synchronize_seqscans": "the order of rows where no statement asks for one",
    "commit_delay": "how long commits wait for each other",
    "commit_siblings": "how long commits wait for each other",
    "wal_compression": "the size of the log",
    "wal_init_zero": "how files of the log are made",
    "wal_recycle": "how files of the log are made",
    "wal_skip_threshold": "how a new table is made durable",
    "ignore_system_indexes": "slower, and no other answer",
    "post_auth_delay": "for whoever debugs Postgres",
    "allow_in_place_tablespaces": "for whoever debugs Postgres",
    "allow_system_table_mods": "statements that nobody sends",
    "backtrace_functions": "the log",
    "debug_": "for whoever debugs Postgres: the same answers, slower",
    "jit_": "how code is compiled; jit is off",
    "trace_": "the log",
    "wal_consistency_checking": "for whoever debugs Postgres",
    "remove_temp_files_after_crash": "for whoever debugs Postgres",
    "default_with_oids": "gone",
}


SEEN: Final = f'''"""Keeps the settings."""
from alembic import op
revision, down_revision, phase = "9001", "{HEAD_REVISION}", "pre"
def upgrade():
    op.execute("CREATE TABLE seen AS SELECT name, setting FROM pg_settings")
'''

OFTEN: Final = Config(follow_ms=20)

MARK: Final = "vacuum_cost_page_miss"
"""A harmless setting that tells whether a change of the others has arrived."""


class SpoiltServer:
    """A Postgres whose settings may be spoilt."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.numbers = iter(range(1000))

    @asynccontextmanager
    async def admin(self, name: str = "postgres") -> AsyncIterator[Any]:
        sane = migration_settings("public") | {"lock_timeout": "0"}
        opened = await open_driver(DsnServer(with_database(self.dsn, name)), sane)
        try:
            yield opened.driver
        finally:
            await opened.driver.close()

    @asynccontextmanager
    async def database(self, *, superuser: bool, encoding: str = "UTF8") -> AsyncIterator["Spoilt"]:
        number = next(self.numbers)
        name, role = f"rooms_{number}", f"homeserver_{number}"
        async with self.admin() as driver:
            await driver.execute(
                f"CREATE ROLE {role} LOGIN CREATEROLE {'SUPERUSER' if superuser else ''}"
            )
            await driver.execute(
                f"CREATE DATABASE {name} OWNER {role} TEMPLATE template0"
                f" ENCODING '{encoding}' LOCALE 'C'"
            )
            try:
                yield Spoilt(self, name, role)
            finally:
                await driver.execute("ALTER SYSTEM RESET ALL")
                await self.reload()

    async def reload(self) -> None:
        """Wait until a new session has what ALTER SYSTEM says."""
        mark = str(next(self.numbers))
        async with self.admin() as driver:
            await driver.execute(f"ALTER SYSTEM SET {MARK} = {mark}")
            await driver.execute("SELECT pg_reload_conf()")
        found = ""
        while found != mark:
            async with self.admin() as driver:
                found = await driver.fetchval(f"SHOW {MARK}")


class Spoilt:
    """A database of such a server, and a role that uses it."""

    def __init__(self, server: SpoiltServer, name: str, role: str) -> None:
        self.server = server
        self.name = name
        self.role = role
        self.dsn = with_database(server.dsn, name).replace("postgres@", f"{role}@", 1)

    async def spoil(self, level: Level, settings: Mapping[str, str]) -> None:
        """Set all of them on this level."""
        change = {
            "server": "ALTER SYSTEM",
            "role": f"ALTER ROLE {self.role}",
            "database": f"ALTER DATABASE {self.name}",
        }[level]
        async with self.server.admin() as driver:
            for name, value in settings.items():
                await driver.execute(
                    f"{change} SET {name} = {value if name == 'DateStyle' else repr(value)}"
                )
        await self.server.reload()


@pytest.fixture(scope="module")
def server() -> Iterator[SpoiltServer]:
    folder = Path(tempfile.mkdtemp(prefix="settings-"))
    folder.chmod(0o755)
    config = Config(
        embedded_connections_max=40, embedded_shared_buffers_mb=32, embedded_fsync=False
    )
    postgres = EmbeddedPostgres(folder / "data", config=config, binaries=chosen_binaries())
    yield SpoiltServer(postgres.start())
    postgres.stop()
    shutil.rmtree(folder)


async def settings_of(conn: Connection) -> dict[str, str]:
    rows = await conn._driver.fetch(
        "SELECT name, setting FROM pg_settings WHERE context IN ('user', 'superuser')"
    )
    return {row[0].lower(): row[1] for row in rows if row[0] not in {"application_name", MARK}}


async def wrong_for(conn: Any) -> dict[str, str]:
    """Return the settings that can be spoilt in this version of Postgres."""
    return {
        **WRONG,
        **(SINCE_17 if int(await conn.fetchval("SHOW server_version_num")) >= 170_000 else {}),
    }


# --------------------------------------------------------------------------------------------------
# pinned


async def story(dsn: str, config: Config = OFTEN) -> list[bytes]:
    """A room is made, talked in, and read: what comes back.

    Every text that a setting could spoil is in it.
    """
    room = RoomBuilder("11", seed=7)
    room.start(ALICE)
    for body in (
        "NULL",
        "\\x00ff",
        "\\\\n 'quoted' \"twice\" {NULL,null}",
        "Zürich 😀",
        "E'\\047'",
        "",
    ):
        room.message(ALICE, body)
        room.topic(ALICE, body)
    async with storage.open(dsn, server_name=SERVER, migrate=True, config=config) as store:
        results = [result for event in room.events for result in await store.append([event.pdu])]
        assert {result.outcome for result in results} == {"stored"}
        await store.to_device.send({ALICE: {"DEVICE": {"body": "NULL"}}})
        answer = await store.sync(ALICE, timeline_limit=100)
        [joined] = answer.join.values()
        assert [event.event_id for event in joined.timeline.events] == [
            event.event_id for event in room.events
        ]
        assert await findings(store) == []
        state = await store.current_state(room.room_id)
        read = [event.raw for event in (await store.events(state.values())).values()]
    return [event.raw for event in joined.timeline.events] + sorted(read)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("superuser", [False, True], ids=["ordinary", "superuser"])
async def test_a_wrong_setting_changes_nothing(
    server: SpoiltServer, level: Level, superuser: bool, tmp_path: Path
) -> None:
    async with (
        server.database(superuser=superuser) as right,
        server.database(superuser=superuser) as spoilt,
    ):
        expected = await story(right.dsn)
        async with server.admin() as driver:
            wrong = await wrong_for(driver)
        if superuser:
            wrong |= FOR_SUPERUSERS
        async with await Database.open(right.dsn) as database, database.connection() as conn:
            settings = await settings_of(conn)
        await spoilt.spoil(level, wrong)
        async with await Database.open(spoilt.dsn) as database, database.connection() as conn:
            assert await settings_of(conn) == settings
        assert await story(spoilt.dsn) == expected
        assert await grant(spoilt.dsn) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", LEVELS)
async def test_the_session_of_a_migration_is_pinned(
    server: SpoiltServer, level: Level, tmp_path: Path
) -> None:
    how = newer_release(tmp_path / "migrations", **{"9001_seen": SEEN})
    seen = []
    async with (
        server.database(superuser=False) as right,
        server.database(superuser=False) as spoilt,
    ):
        await migrate(right.dsn, how=how)
        async with server.admin() as driver:
            await spoilt.spoil(level, await wrong_for(driver))
        await migrate(spoilt.dsn, how=how)
        for one in (right, spoilt):
            async with server.admin(one.name) as driver:
                names = [name.lower() for name in (*WRONG, *SINCE_17)]
                seen.append(
                    await driver.fetch(
                        "SELECT name, setting FROM seen"
                        " WHERE lower(name) = ANY($1::text[]) ORDER BY name",
                        names,
                    )
                )
    assert len(seen[0]) >= len(WRONG)
    assert seen[0] == seen[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", LEVELS)
async def test_the_session_of_spark_is_pinned(server: SpoiltServer, level: Level) -> None:
    arrow = pytest.importorskip("storage.database.arrow_results", exc_type=ImportError)

    def seen(dsn: str) -> list[list[dict[str, Any]]]:
        names = json.dumps({name.lower(): "" for name in (*WRONG, *SINCE_17)})
        found = []
        for connected in (arrow.arrow_session, arrow.arrow_snapshot):
            with connected(dsn) as conn:
                rows = conn.rows(
                    "SELECT name, setting FROM pg_settings"
                    " WHERE lower(name) IN (SELECT json_object_keys($1::text::json))",
                    names,
                )
                found.append(sorted(rows, key=lambda row: str(row["name"])))
        return found

    async with (
        server.database(superuser=False) as right,
        server.database(superuser=False) as spoilt,
    ):
        expected = await asyncio.to_thread(seen, right.dsn)
        assert len(expected[0]) >= len(WRONG)
        async with server.admin() as driver:
            await spoilt.spoil(level, await wrong_for(driver))
        assert await asyncio.to_thread(seen, spoilt.dsn) == expected


@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", LEVELS)
async def test_the_settings_are_wrong_where_nobody_pins_them(
    server: SpoiltServer, level: Level
) -> None:
    """Without pinning, the settings are wrong: otherwise the tests above would show nothing."""
    async with server.database(superuser=True) as spoilt, server.admin() as driver:
        wrong = {**await wrong_for(driver), **FOR_SUPERUSERS}
        outranked = (
            {"TimeZone", "jit", "random_page_cost", "max_parallel_workers_per_gather"}
            if level == "server"
            else set()
        )  # on the command line of the embedded server
        harmless = {
            name: value
            for name, value in wrong.items()
            if not name.endswith("_timeout") and name not in outranked
        }
        await spoilt.spoil(level, harmless)
        bare = await asyncpg.connect(spoilt.dsn)
        try:
            found = {
                name: await bare.fetchval("SELECT current_setting($1)", name)
                for name in harmless
                if name != "client_encoding"
            }
        finally:
            await bare.close()
    assert found == {name: value for name, value in harmless.items() if name != "client_encoding"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FOR_SUPERUSERS)
async def test_what_an_ordinary_role_cannot_set_right_is_refused(
    server: SpoiltServer, level: Level, name: str
) -> None:
    async with server.database(superuser=False) as spoilt:
        await spoilt.spoil(level, {name: FOR_SUPERUSERS[name]})
        with pytest.raises(DatabaseError, match=f"{name} = .*reset it as a superuser"):
            await Database.open(spoilt.dsn)
        with pytest.raises(DatabaseError, match=name):
            await migrate(spoilt.dsn)


async def test_config_says_what_a_commit_waits_for_and_where_the_tables_are(
    server: SpoiltServer,
) -> None:
    async with server.database(superuser=False) as spoilt:
        async with server.admin(spoilt.name) as driver:
            await driver.execute(f'CREATE SCHEMA "Rooms of S1" AUTHORIZATION {spoilt.role}')
        config = Config(synchronous_commit="off", database_schema="Rooms of S1", follow_ms=20)
        await story(spoilt.dsn, config)
        async with server.admin(spoilt.name) as driver:
            rows = await driver.fetch(
                "SELECT DISTINCT schemaname FROM pg_tables"
                " WHERE tablename IN ('events', 'alembic_version')"
            )
            assert [row[0] for row in rows] == ["Rooms of S1"]
        async with (
            await Database.open(spoilt.dsn, config=config) as database,
            database.connection() as conn,
        ):
            assert await conn.fetchval("SHOW synchronous_commit") == "off"


def test_a_value_that_no_commit_knows_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"synchronous_commit \(STORAGE_SYNCHRONOUS_COMMIT\) is 'perhaps':"
        r" it must be one of remote_apply, on, ",
    ):
        Config(synchronous_commit="perhaps")


async def test_each_setting_of_a_session_is_pinned_or_harmless(database: Database) -> None:
    """A new version of Postgres brings new ones: look at each, then pin it, or say here why not."""
    async with database.connection() as conn:
        rows = await conn._driver.fetch(
            "SELECT name, category FROM pg_settings"
            " WHERE context IN ('user', 'superuser', 'backend', 'superuser-backend')"
            " AND name NOT LIKE '%.%'"
        )
    known = {name.lower() for name in (*WRONG, *FOR_SUPERUSERS, *SINCE_17)}
    unknown = [
        (row["name"], row["category"])
        for row in rows
        if row["name"].lower() not in known
        and not any(row["name"].startswith(one) or one in row["category"] for one in HARMLESS)
    ]
    assert unknown == []


def test_what_is_pinned_is_spoilt_by_these_tests() -> None:
    assert set(pinned(Config())) <= set(WRONG)
    assert all(WRONG[name] != value for name, value in PINNED.items())


# --------------------------------------------------------------------------------------------------
# encoding


@pytest.mark.timeout(300)
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "EUC_JP"])
async def test_a_database_of_another_encoding_is_refused(
    server: SpoiltServer, encoding: str
) -> None:
    sentence = f"has the encoding {encoding}, and events need UTF8: create one with CREATE DATABASE"
    async with server.database(superuser=False, encoding=encoding) as other:
        with pytest.raises(InputError, match=sentence):
            await migrate(other.dsn)
        for asked in (False, True):
            with pytest.raises(InputError, match=sentence):
                async with storage.open(other.dsn, server_name=SERVER, migrate=asked):
                    pytest.fail("it was opened")
        process = await asyncio.create_subprocess_exec(
            client_programs() / "psql", "-X", "-v", "ON_ERROR_STOP=1", other.dsn,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate(migration_sql().encode())
        assert process.returncode != 0
        assert f"the database has the encoding {encoding}" in said.decode()
        bare = await asyncpg.connect(other.dsn)
        try:
            assert (
                await bare.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
                == 0
            )
        finally:
            await bare.close()
