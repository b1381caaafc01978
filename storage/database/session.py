"""A session with Postgres, with every setting pinned that could change an answer or lose data.

A setting may come from the server, the role or the database (`ALTER SYSTEM`, `ALTER ROLE`, `ALTER
DATABASE … SET`). What a session asks for when it starts outranks them all, so what is in PINNED and
`pinned` is sent along and costs nothing. Some settings cannot be sent along: not every Postgres
knows them, or only a superuser may set them. SQL_SESSION sets those where it may, and says which
are wrong still.

tests/database/test_settings.py lists every setting that a session may change, and why the others
need not be pinned.
"""

from collections.abc import Mapping
from typing import Any, Final, LiteralString, NamedTuple

import asyncpg

from storage.config import Config
from storage.errors import DatabaseError, InputError

ENCODING: Final = "UTF8"

PINNED: Final[Mapping[str, str]] = {
    # What a transaction is that does not say so.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # How statements are read.
    "standard_conforming_strings": "on",
    "backslash_quote": "safe_encoding",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "quote_all_identifiers": "off",
    "client_min_messages": "notice",
    # How values are read and written as text.
    "bytea_output": "hex",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    "xmlbinary": "base64",
    "xmloption": "content",
    # Which rows there are: an error where a policy would hide some.
    "row_security": "off",
    "gin_fuzzy_search_limit": "0",
    # When a session ends, and what else its timeouts end: those of Config alone.
    "exit_on_error": "off",
    "idle_session_timeout": "0",
    # Each statement is planned once a session, for any arguments: to plan a sync or a page anew
    # takes longer than to run it, and Postgres would do so for ever where it expects a plan for the
    # arguments to be cheaper. tests/queries/test_large_plans.py looks at these plans. They may have
    # been made while tables were small, and stay until a table is analysed: so where an order of
    # joins is good at one size only, the statement says which (LATERAL with OFFSET 0).
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}
"""Settings that are the same in every session."""

SQL_SESSION: Final[LiteralString] = """
WITH pinned AS MATERIALIZED (
    SELECT p.name, p.wanted,
        CASE
            -- this Postgres has no such setting
            WHEN current_setting(p.name, true) IS NULL THEN p.wanted
            WHEN p.is_free OR has_parameter_privilege(p.name, 'SET') THEN set_config(p.name,
                p.wanted, false)
            ELSE current_setting(p.name)
        END AS found
    FROM (
        VALUES ('transaction_timeout', '0', true), ('session_replication_role', 'origin', false),
            ('zero_damaged_pages', 'off', false),
            ('ignore_checksum_failure', 'off', false)
    ) AS p (name, wanted, is_free)
)
SELECT current_database()::text AS database_name, current_setting('server_encoding') AS encoding,
    ARRAY(SELECT name || ' = ' || found FROM pinned WHERE found <> wanted) AS wrong,
    CASE  -- a standby has no place where it writes
        WHEN NOT pg_is_in_recovery() THEN format('%s.%s',
            (SELECT system_identifier FROM pg_control_system()),
            left(pg_walfile_name(pg_current_wal_lsn()), 8))
    END AS cluster
"""


class SessionRow(NamedTuple):
    """What a session says of itself.

    ``wrong``: settings that it may not mend; ``cluster``: the cluster and its timeline, None for a
    standby.
    """

    database_name: str
    encoding: str
    wrong: list[str]
    cluster: str | None


class Session:
    """One connection of the driver, from its start to its end."""

    __slots__ = ("cluster", "driver", "idle_since", "is_over")

    def __init__(self, driver: Any, cluster: str | None = None) -> None:
        self.driver = driver
        self.cluster = cluster
        """Where it leads: the cluster and its timeline, None for a standby."""
        self.idle_since = 0.0
        self.is_over = False
        """It was ended on purpose: an answer that came over it nevertheless is not to be believed.
        """

    def end(self) -> None:
        """End it, whatever it is doing."""
        self.is_over = True
        self.driver.terminate()


def pinned(config: Config) -> dict[str, str]:
    """The settings of a session: PINNED, and what `Config` says."""
    schema = config.database_schema.replace('"', '""')
    return {**PINNED, "search_path": f'"{schema}"', "synchronous_commit": config.synchronous_commit}


def check_session(row: SessionRow) -> None:
    """`InputError` if the database cannot hold every event; `DatabaseError` for a setting that only a superuser may change."""
    if row.encoding != ENCODING:
        raise InputError(
            f"the database {row.database_name} has the encoding {row.encoding}, and events need UTF8: create one with CREATE DATABASE … ENCODING "
            f"'UTF8' TEMPLATE template0, and give its DSN"
        )
    if row.wrong:
        raise DatabaseError(
            f"the server, the database or the role has {', '.join(row.wrong)}, with which data can be lost: reset it as a superuser "
            f"(ALTER SYSTEM, ALTER DATABASE or ALTER ROLE … RESET)"
        )


async def check_driver(driver: Any) -> SessionRow:
    """Set what cannot be sent along when a session starts; as `check_session`."""
    row = SessionRow._make(await driver.fetchrow(SQL_SESSION))  # NamedTuple's public method
    check_session(row)
    return row


async def connect(dsn: str, config: Config, mark: str) -> Session:
    """A session for any use.

    Errors of the driver, ValueError for parts of the DSN that are no numbers, and those of
    `check_session`.
    """
    driver = await asyncpg.connect(
        dsn,
        timeout=config.connect_timeout_ms / 1000,
        command_timeout=config.statement_timeout_ms / 1000,
        statement_cache_size=config.statement_cache_size,
        max_cached_statement_lifetime=0,
        max_cacheable_statement_size=0,  # no limit: the longest is the one that writes
        server_settings=_server_settings(config, mark),
    )
    try:
        row = await check_driver(driver)
    except BaseException:
        driver.terminate()
        raise
    return Session(driver, row.cluster)


def migration_settings(database_schema: str) -> dict[str, str]:
    """Settings of the session of a migration.

    Its steps say how long they wait for locks, and may take any time.
    """
    timeouts = ("statement_timeout", "idle_in_transaction_session_timeout")
    return {**pinned(Config(database_schema=database_schema)), **dict.fromkeys(timeouts, "0")}


def _server_settings(config: Config, mark: str) -> dict[str, str]:
    """Settings of every session. Timeouts on the server end what a vanished client left behind."""
    return {
        **pinned(config),
        "application_name": f"room-storage {config.instance_name} {mark}".rstrip()[:63],
        "lock_timeout": str(config.lock_timeout_ms),
        "statement_timeout": str(config.statement_timeout_ms + 5_000),
        "idle_in_transaction_session_timeout": str(config.statement_timeout_ms + 5_000),
    }
