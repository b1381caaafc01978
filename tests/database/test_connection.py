"""Connections, transactions, retries: what a caller of Database can rely on."""

import asyncio
from collections import deque
from typing import Any, Literal, NamedTuple

import asyncpg
import pytest

from storage.config import Config
from storage.database import Connection, Database
from storage.database.connection import ATTEMPTS_MAX
from storage.errors import (
    CommitUnknown,
    ConstraintViolated,
    DatabaseConflict,
    DatabaseError,
    DatabaseUnavailable,
    InputError,
    StorageClosed,
)
from tests.proxy import CommitEater

INSERT = "INSERT INTO event_types (type_nid, type) VALUES ($1::int, $2::text)"
COUNT = "SELECT count(*) FROM event_types WHERE type_nid >= 1000"


class TypeRow(NamedTuple):
    type_nid: int
    type: str


class RecordingObserver:
    """Record the statements, and raise `error` before the one that starts with `at`."""

    def __init__(self, at: str = "", error: BaseException | None = None) -> None:
        self.statements: list[str] = []
        self.done: list[str] = []
        self._at = at
        self._error = error

    def before(self, statement: str) -> None:
        self.statements.append(statement)
        if self._error is not None and statement.startswith(self._at):
            raise self._error

    def after(self, statement: str, seconds: float) -> None:
        assert seconds > 0
        self.done.append(statement)


async def backend_of(conn: Connection) -> int:
    return int(await conn.fetchval("SELECT pg_backend_pid()"))


async def kill(database: Database, pid: int) -> None:
    """End a session and wait until it is gone."""
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT pg_terminate_backend($1::int, 10000)", pid)


# --------------------------------------------------------------------------------------------------
# rows


@pytest.mark.every_postgres
async def test_rows_are_named_tuples(conn: Connection) -> None:
    rows = await conn.fetch(
        "SELECT type_nid, type FROM event_types WHERE type_nid <= $1::int ORDER BY 1",
        2,
        row=TypeRow,
    )
    assert rows == [TypeRow(1, "m.room.create"), TypeRow(2, "m.room.member")]
    assert type(rows[0]) is TypeRow
    assert (
        await conn.fetchrow(
            "SELECT type_nid, type FROM event_types WHERE type_nid = 1", row=TypeRow
        )
        == rows[0]
    )
    assert (
        await conn.fetchrow(
            "SELECT type_nid, type FROM event_types WHERE type_nid = -1", row=TypeRow
        )
        is None
    )
    assert await conn.fetchvals(
        "SELECT type_nid FROM event_types WHERE type_nid <= 2 ORDER BY 1"
    ) == [1, 2]


async def test_records_have_the_columns_by_place(conn: Connection) -> None:
    records = await conn.records(
        "SELECT type_nid, type FROM event_types WHERE type_nid <= $1::int ORDER BY 1",
        2,
        row=TypeRow,
    )
    assert [record[:2] for record in records] == [(1, "m.room.create"), (2, "m.room.member")]


async def test_rows_with_other_columns_are_refused(conn: Connection) -> None:
    with pytest.raises(TypeError, match="Expected 2 arguments"):
        await conn.fetch("SELECT type_nid FROM event_types", row=TypeRow)


async def test_execute_answers_the_tag_and_copy_the_number_of_rows(conn: Connection) -> None:
    assert await conn.execute(INSERT, 5000, "a") == "INSERT 0 1"
    assert await conn.copy_in("event_types", ["type_nid", "type"], [(5001, "b"), (5002, "c")]) == 2
    assert await conn.fetchval(COUNT) == 3


# --------------------------------------------------------------------------------------------------
# transactions


async def test_a_transaction_commits(database: Database) -> None:
    async with database.transaction() as conn:
        await conn.execute(INSERT, 5000, "a")
    async with database.connection() as conn:
        assert await conn.fetchval(COUNT) == 1


async def test_an_exception_rolls_back_and_the_connection_is_clean(dsn: str) -> None:
    async with await Database.open(dsn, config=Config(pool_size_max=1)) as database:
        with pytest.raises(ZeroDivisionError):
            async with database.transaction() as conn:
                await conn.execute(INSERT, 5000, "a")
                raise ZeroDivisionError
        async with database.connection() as conn:
            assert not conn.in_transaction
            assert await conn.fetchval(COUNT) == 0


async def test_a_cancelled_transaction_rolls_back_and_the_connection_is_clean(dsn: str) -> None:
    async with await Database.open(dsn, config=Config(pool_size_max=1)) as database:
        inside = asyncio.Event()

        async def write() -> None:
            async with database.transaction() as conn:
                await conn.execute(INSERT, 5000, "a")
                inside.set()
                await conn.fetchval("SELECT pg_sleep(60)")

        task = asyncio.create_task(write())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with database.connection() as conn:
            assert not conn.in_transaction
            assert await conn.fetchval(COUNT) == 0


async def test_an_error_that_was_swallowed_inside_is_not_taken_for_a_commit(
    database: Database,
) -> None:
    with pytest.raises(DatabaseError, match="rolled back"):
        async with database.transaction() as conn:
            await conn.execute(INSERT, 5000, "a")
            with pytest.raises(ConstraintViolated):
                await conn.execute(INSERT, 5000, "b")
    async with database.connection() as conn:
        assert await conn.fetchval(COUNT) == 0


async def test_isolation_and_readonly_are_what_was_asked_for(database: Database) -> None:
    async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
        assert (
            await conn.fetchval("SELECT current_setting('transaction_isolation')")
            == "repeatable read"
        )
        assert await conn.fetchval("SELECT current_setting('transaction_read_only')") == "on"
    async with database.transaction() as conn:
        assert (
            await conn.fetchval("SELECT current_setting('transaction_isolation')")
            == "read committed"
        )


async def test_the_observer_sees_begin_and_commit_and_may_take_the_place_of_any_statement(
    dsn: str,
) -> None:
    recorder = RecordingObserver()
    async with await Database.open(dsn, observer=recorder) as database:
        async with database.transaction() as conn:
            await conn.execute(INSERT, 5000, "a")
        assert recorder.statements == recorder.done == ["BEGIN", INSERT, "COMMIT"]
    for at in ("BEGIN", "INSERT", "COMMIT"):
        async with await Database.open(
            dsn, observer=RecordingObserver(at, ZeroDivisionError())
        ) as database:
            with pytest.raises(ZeroDivisionError):
                async with database.transaction() as conn:
                    await conn.execute(INSERT, 6000, "b")
    async with await Database.open(dsn) as database, database.connection() as conn:
        assert await conn.fetchval(COUNT) == 1


async def test_a_commit_whose_answer_is_lost_is_of_unknown_outcome(dsn: str) -> None:
    lost = RecordingObserver("COMMIT", ConnectionResetError("gone"))
    async with await Database.open(dsn, observer=lost) as database:
        with pytest.raises(CommitUnknown):
            async with database.transaction() as conn:
                await conn.execute(INSERT, 5000, "a")
        with pytest.raises(CommitUnknown):  # run does not repeat it either
            await database.run(lambda conn: conn.execute(INSERT, 5000, "a"))
        assert lost.statements.count("COMMIT") == 2


@pytest.mark.parametrize("lost,stored", [("answer", 1), ("request", 0)])
async def test_a_commit_lost_on_the_wire_is_of_unknown_outcome(
    dsn: str, lost: Literal["answer", "request"], stored: int
) -> None:
    async with CommitEater(dsn) as eater, await Database.open(eater.dsn) as database:
        eater.eat(lost)
        with pytest.raises(CommitUnknown):
            await database.run(lambda conn: conn.execute(INSERT, 5000, "a"))
        assert eater.eaten == 1
        async with database.connection() as conn:
            assert await conn.fetchval(COUNT) == stored
        await database.run(lambda conn: conn.execute(INSERT, 5001, "b"))


async def test_a_read_whose_commit_is_lost_is_done_again(dsn: str) -> None:
    async with CommitEater(dsn) as eater, await Database.open(eater.dsn) as database:
        eater.eat("request")
        with pytest.raises(DatabaseUnavailable):
            async with database.transaction(readonly=True) as conn:
                await conn.fetchval(COUNT)
        eater.eat("answer")
        assert await database.run(lambda conn: conn.fetchval(COUNT), readonly=True) == 0
        assert eater.eaten == 2


# --------------------------------------------------------------------------------------------------
# retries


@pytest.mark.every_postgres
async def test_run_repeats_the_whole_work_after_a_deadlock(database: Database) -> None:
    async with database.transaction() as conn:
        await conn.execute(INSERT, 5000, "a")
        await conn.execute(INSERT, 5001, "b")
    both, won = asyncio.Barrier(2), asyncio.Event()
    attempts: deque[int] = deque()

    async def touch(first: int, second: int) -> None:
        async def work(conn: Connection) -> None:
            attempts.append(first)
            if len(attempts) > 2:  # else it could get its first row before the winner is woken
                await won.wait()
            await conn.execute(
                "UPDATE event_types SET type = type || '.' WHERE type_nid = $1::int", first
            )
            if len(attempts) <= 2:
                await both.wait()
            await conn.execute(
                "UPDATE event_types SET type = type || '.' WHERE type_nid = $1::int", second
            )

        await database.run(work)
        won.set()

    await asyncio.gather(touch(5000, 5001), touch(5001, 5000))
    assert len(attempts) == 3
    async with database.connection() as conn:
        assert await conn.fetchvals(
            "SELECT type FROM event_types WHERE type_nid >= 5000 ORDER BY 1"
        ) == ["a..", "b.."]


async def test_run_repeats_after_a_serialization_failure(database: Database) -> None:
    results = []

    async def work(conn: Connection) -> None:
        results.append(await conn.fetchval(COUNT))
        if len(results) == 1:
            async with database.transaction(isolation="serializable") as other:
                await other.fetchval(COUNT)
                await other.execute(INSERT, 5000, "a")
        await conn.execute(INSERT, 5001, "b")

    await database.run(work, isolation="serializable")
    assert results == [0, 1]


async def test_run_gives_up_after_some_attempts(database: Database) -> None:
    attempts = []

    async def work(conn: Connection) -> None:
        attempts.append(1)
        await conn.execute("SELECT refuse_stale_plan('again')")

    with pytest.raises(DatabaseConflict) as caught:
        await database.run(work)
    assert len(attempts) == ATTEMPTS_MAX
    assert caught.value.sqlstate == "RS001"


async def test_run_passes_other_errors_on_at_once(database: Database) -> None:
    attempts = []

    async def work(conn: Connection) -> None:
        attempts.append(1)
        await conn.execute("SELECT 1 / 0")

    with pytest.raises(DatabaseError, match="22012"):
        await database.run(work)
    assert len(attempts) == 1


async def test_run_survives_a_killed_backend(database: Database) -> None:
    pids = []

    async def work(conn: Connection) -> int:
        pids.append(await backend_of(conn))
        if len(pids) == 1:
            await kill(database, pids[0])
        await conn.execute(INSERT, 5000, "a")
        return int(await conn.fetchval(COUNT))

    assert await database.run(work) == 1
    assert len(pids) == 2
    assert pids[0] != pids[1]


async def test_a_wait_for_a_lock_is_bounded(dsn: str) -> None:
    async with (
        await Database.open(dsn, config=Config(lock_timeout_ms=50)) as database,
        database.transaction() as holder,
    ):
        await holder.execute("LOCK TABLE event_types")
        with pytest.raises(DatabaseConflict, match="55P03"):
            async with database.transaction() as conn:
                await conn.execute(INSERT, 5000, "a")


# -------------------------------------------------------------------------------------------------
# opening, closing, limits


async def test_a_killed_backend_outside_run_is_unavailable_and_the_pool_goes_on(
    database: Database,
) -> None:
    with pytest.raises(DatabaseUnavailable):
        async with database.transaction() as conn:
            await kill(database, await backend_of(conn))
            await conn.execute(INSERT, 5000, "a")
    async with database.connection() as conn:
        assert await conn.fetchval(COUNT) == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_connection_that_is_lost_while_it_is_given_back(
    database: Database, cancelled: bool
) -> None:
    conn = await database.acquire()
    driver: Any = conn._driver
    conn.is_at_rest = not cancelled
    giving = asyncio.ensure_future(database.release(conn))
    await asyncio.sleep(0)
    driver.terminate()
    await giving
    assert database.connections == ((0, 0, 0) if cancelled else (1, 0, 0))
    async with database.connection() as other:
        assert await other.fetchval("SELECT 1") == 1
    assert database.connections == (1, 0, 0)


async def test_a_statement_that_takes_too_long_is_cancelled(dsn: str) -> None:
    """A short limit for this statement alone: a busy machine may take long for the others."""
    async with await Database.open(
        dsn, config=Config(statement_timeout_ms=60_000, pool_size_max=1)
    ) as database:
        async with database.connection() as conn:
            driver: Any = conn._driver
        assert driver._config.command_timeout == 60
        driver._config = driver._config._replace(command_timeout=0.05)
        with pytest.raises(DatabaseUnavailable, match="time limit"):
            async with database.transaction() as conn:
                await conn.fetchval("SELECT pg_sleep(60)")
        driver._config = driver._config._replace(command_timeout=60)
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT 1") == 1


async def test_a_pool_without_a_free_connection_answers_in_time(dsn: str) -> None:
    async with (
        await Database.open(
            dsn, config=Config(pool_size_max=1, pool_acquire_timeout_ms=20)
        ) as database,
        database.connection(),
    ):
        with pytest.raises(DatabaseUnavailable):
            async with database.connection():
                pytest.fail("there is one connection only")


async def test_a_connection_at_hand_goes_to_who_waits(dsn: str) -> None:
    async with await Database.open(dsn, config=Config(pool_size_max=1)) as database:

        async def ask() -> int:
            async with database.connection() as conn:
                return await backend_of(conn)

        alone = await ask()
        assert set(await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(20))), 60)) == {
            alone
        }


async def test_a_connection_with_a_cancelled_statement_is_not_at_hand(dsn: str) -> None:
    async with await Database.open(dsn, config=Config(pool_size_max=1)) as database:
        async with database.connection() as conn:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(conn.fetchval("SELECT pg_sleep(60)"), 0.1)
            assert not conn.is_at_rest
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT 1") == 1
            assert conn.is_at_rest


async def test_a_closed_database_says_so(dsn: str) -> None:
    database = await Database.open(dsn)
    await database.close()
    await database.close()
    with pytest.raises(StorageClosed):
        async with database.connection():
            pytest.fail("closed")


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://postgres@/nowhere?host=/nonexistent",
        "postgresql://postgres@127.0.0.1:1/nowhere",
        "postgresql://postgres@no.such.host.invalid/nowhere",
    ],
)
async def test_nobody_answers(bad: str) -> None:
    with pytest.raises(DatabaseUnavailable):
        await Database.open(bad, config=Config(connect_timeout_ms=5000))


async def test_a_connection_that_the_driver_is_at_odds_with_is_not_used_again(dsn: str) -> None:
    """A session that Postgres ended while idle raises this between its last message and its end.

    Nothing was sent.
    """
    confused = RecordingObserver(
        "SELECT 1",
        asyncpg.InternalClientError(
            "cannot switch to state 12; another operation (2) is in progress"
        ),
    )
    async with await Database.open(
        dsn, config=Config(pool_size_max=1), observer=confused
    ) as database:
        async with database.connection() as conn:
            pid = conn.backend_pid
            with pytest.raises(DatabaseUnavailable, match="another operation"):
                await conn.fetchval("SELECT 1")
        async with database.connection() as conn:
            assert await conn.fetchval("SELECT 2") == 2
            assert conn.backend_pid != pid


async def test_no_such_database(dsn: str) -> None:
    with pytest.raises(DatabaseUnavailable, match="3D000"):
        await Database.open(dsn.replace("/storage_test_", "/absent_"))


@pytest.mark.parametrize(
    "bad", ["mysql://localhost/x", "not a dsn", "postgresql://localhost:port/x"]
)
async def test_a_dsn_that_cannot_be_read(bad: str) -> None:
    with pytest.raises(InputError, match="DSN"):
        await Database.open(bad)


async def test_a_connection_that_is_lost_between_two_steps_of_the_driver_is_unavailable(
    dsn: str,
) -> None:
    """asyncpg queries the types of a new statement.

    When the connection is lost meanwhile, it has no settings any more.
    """
    driver = await asyncpg.connect(dsn)

    async def lost(_: str) -> object:
        driver.terminate()
        return driver.get_settings()

    with pytest.raises(DatabaseUnavailable, match="the connection was lost"):
        await Connection(driver)._call("SELECT 1", lost, "SELECT 1")
