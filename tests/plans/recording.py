"""The plans of every statement that a store runs, also of those that write.

Each statement is analysed before it runs, in a savepoint that is undone, by the generic plan of its
prepared statement, which a session keeps: that is how it runs in a store.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import pytest

from storage.database.connection import Connection
from storage.database.explained import QueryPlan
from storage.streams.position_poller import SQL_MOVE_IDLE, SQL_SEQUENCES

EXPLAIN: Final = "EXPLAIN (ANALYZE, BUFFERS, VERBOSE, TIMING off, FORMAT JSON) EXECUTE"
ANALYSED: Final = re.compile(r"\s*(--[^\n]*\n\s*)*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")
LASTING: Final = ("pg_advisory", "pg_terminate", "set_config", "pg_notify")
"""Effects that a rollback does not undo."""


ROWS: Final = 10
PAGES: Final = 40
"""What a statement may touch more, and twice the pages: the trees of indexes are higher."""


FROM_TIME_TO_TIME: Final = (SQL_SEQUENCES, SQL_MOVE_IDLE)
"""A store sends these by the clock, whatever else is done."""


class PlanRecorder:
    """The plans of what was run in `recording`."""

    def __init__(self) -> None:
        self.plans: list[QueryPlan] = []
        self._is_on = False
        self._prepared = WeakKeyDictionary[Any, dict[str, Any]]()

    @contextmanager
    def recording(self) -> Iterator[list[QueryPlan]]:
        """Record the block; yield its plans."""
        self.plans, self._is_on = [], True
        yield self.plans
        self._is_on = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Analyse the statements of all connections from now on."""
        call = Connection._call

        async def recorded(conn: Connection, statement: str, *args: Any) -> Any:
            sent = args[1:]  # after the driver's function
            is_sent = self._is_on and sent and sent[0] is statement
            if is_sent and is_analysed(statement) and statement not in FROM_TIME_TO_TIME:
                prepared = await self._prepared_on(conn._driver, statement)
                self.plans.append(await plan_of(conn._driver, statement, prepared, sent[1:]))
            return await call(conn, statement, *args)

        monkeypatch.setattr(Connection, "_call", recorded)

    async def _prepared_on(self, driver: Any, statement: str) -> Any:
        """Return a statement of a session, which keeps its plan."""
        kept = self._prepared.setdefault(driver, {})
        if statement not in kept:
            kept[statement] = await driver.prepare(statement)
        return kept[statement]


def is_analysed(statement: str) -> bool:
    """Return whether it is one statement that reads or writes rows of the store alone."""
    return (
        ANALYSED.match(statement) is not None
        and ";" not in re.sub(r"--[^\n]*", "", statement).strip().rstrip(";")
        and not any(name in statement for name in (*LASTING, "pg_stat_activity"))
    )


async def plan_of(driver: Any, statement: str, prepared: Any, args: tuple[Any, ...]) -> QueryPlan:
    """Run a statement by its generic plan, and undo it."""
    literals = await _literals(driver, [one.name for one in prepared.get_parameters()], args)
    inside = driver.is_in_transaction()
    await driver.execute("SAVEPOINT analysed" if inside else "BEGIN")
    document = await driver.fetchval(f'{EXPLAIN} "{prepared.get_name()}"{literals}')
    await driver.execute("ROLLBACK TO analysed; RELEASE analysed" if inside else "ROLLBACK")
    return QueryPlan.of(statement, document)


async def _literals(driver: Any, types: list[str], args: tuple[Any, ...]) -> str:
    if not types:
        return ""
    quoted = ", ".join(f"quote_nullable(${n}::{type_}::text)" for n, type_ in enumerate(types, 1))
    values = await driver.fetchrow(f"SELECT {quoted}", *args)
    return f"({', '.join(f'{value}::{type_}' for value, type_ in zip(values, types, strict=True))})"


class Touched(dict[str, tuple[int, int]]):
    """By statement: the rows of tables and the pages that its runs accessed."""

    @classmethod
    def of(cls, plans: Iterable[QueryPlan]) -> "Touched":
        """Add up the runs of each statement."""
        rows, pages = defaultdict[str, int](int), defaultdict[str, int](int)
        for plan in plans:
            rows[plan.sql] += plan.rows
            pages[plan.sql] += plan.pages
        return cls({sql: (rows[sql], pages[sql]) for sql in rows})

    def rows_only(self) -> "Touched":
        """Return it without pages, as where dead rows have not been removed yet."""
        return Touched({sql: (rows, 0) for sql, (rows, _) in self.items()})

    def grown(self, before: "Touched", what: str, *, rows_more: int = ROWS) -> dict[str, str]:
        """Return the statements that touch more rows or pages than ``before``."""
        found = {}
        for sql, (rows, pages) in self.items():
            rows_before, pages_before = before.get(sql, (0, 0))
            if rows > 1.5 * rows_before + rows_more or pages > 2 * pages_before + PAGES:
                text = " ".join(sql.split())
                found[f"{what}: {text}"] = (
                    f"{rows_before} -> {rows} rows, {pages_before} -> {pages} pages"
                )
        return found
