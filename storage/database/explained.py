"""A connection that runs EXPLAIN on each statement before it, and keeps the plans.

So you can analyse a query with its real arguments, however many statements it runs. EXPLAIN ANALYZE
runs the statement too, so only statements that change nothing belong here.

A session plans a prepared statement for its arguments five times. From then on it keeps one plan
for all arguments, the generic one, if that seems no worse. Both kinds can be analysed.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from storage.database.connection import Connection

EXPLAIN = "EXPLAIN (ANALYZE, BUFFERS, VERBOSE, FORMAT JSON)"
SCANS = (
    "Seq Scan",
    "Index Scan",
    "Index Only Scan",
    "Bitmap Heap Scan",
    "Tid Scan",
    "Tid Range Scan",
    "Sample Scan",
)


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The result of EXPLAIN (ANALYZE, BUFFERS) of one statement.

    ``tree`` is its outermost node, with Postgres' keys.
    """

    sql: str
    tree: dict[str, Any]
    planning_ms: float
    execution_ms: float

    @classmethod
    def of(cls, sql: str, document: str) -> Self:
        """Read the JSON that Postgres returns."""
        [plan] = json.loads(document)
        return cls(sql, plan["Plan"], plan["Planning Time"], plan["Execution Time"])

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Return all nodes, including those of subplans."""
        return (node for _, node in self.nodes_by_depth())

    def nodes_by_depth(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Return all nodes from the outermost on, each with its depth."""
        todo = [(0, self.tree)]
        while todo:
            depth, node = todo.pop()
            yield depth, node
            todo += [(depth + 1, part) for part in reversed(node.get("Plans", ()))]

    @property
    def indexes(self) -> set[str]:
        return {
            node["Index Name"]
            for node in self.nodes()
            if "Index Name" in node and node["Actual Loops"]
        }

    @property
    def sequential(self) -> set[str]:
        """Return the tables that were read by a sequential scan, whole or up to a limit."""
        return {
            node["Relation Name"]
            for node in self.nodes()
            if node["Node Type"] == "Seq Scan" and node["Actual Loops"]
        }

    @property
    def rows(self) -> int:
        """Return the rows that were read from tables, including those that a filter removed."""
        return sum(self.rows_of_tables().values())

    def rows_of_tables(self) -> dict[str, int]:
        rows_by_table: dict[str, int] = {}
        for node in self.nodes():
            if node["Node Type"] in SCANS:
                name = node["Relation Name"]
                rows_by_table[name] = rows_by_table.get(name, 0) + _rows_read(node)
        return rows_by_table

    @property
    def pages(self) -> int:
        """Return the pages of 8 kB that were accessed, counted each time."""
        return int(self.tree["Shared Hit Blocks"] + self.tree["Shared Read Blocks"])

    @property
    def answer_rows(self) -> int:
        """Return the number of rows that the statement returns."""
        return int(self.tree["Actual Rows"])


def _rows_read(node: dict[str, Any]) -> int:
    discarded = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return int((node["Actual Rows"] + discarded) * node["Actual Loops"] + 0.5)


class ExplainingConnection(Connection):
    """A connection whose ``plans`` are those of the executed statements, in order."""

    __slots__ = ("generic", "plans")

    def __init__(self, driver: Any, *, generic: bool = False) -> None:
        super().__init__(driver)
        self.generic: bool = generic
        self.plans: list[QueryPlan] = []

    @classmethod
    def over(cls, conn: Connection, *, generic: bool = False) -> Self:
        """Use the same session and its transaction, which ``generic`` requires."""
        return cls(conn._driver, generic=generic)  # noqa: SLF001  # a connection of another kind

    async def _call(
        self, statement: str, call: Callable[..., Awaitable[Any]], *args: object
    ) -> Any:
        driver = self._driver
        if call in (driver.fetch, driver.fetchrow, driver.fetchval):
            await self._explain(statement, args[1:])
        return await super()._call(statement, call, *args)

    async def _explain(self, sql: str, args: tuple[object, ...]) -> None:
        document = (
            await self._explain_generic(sql, args)
            if self.generic
            else await self._value(f"{EXPLAIN} {sql}", *args)
        )
        self.plans.append(QueryPlan.of(sql, document))

    async def _value(self, sql: str, *args: object) -> str:
        """Return the first column of the first row, without a plan of it."""
        return str(await super()._call(sql, self._driver.fetchval, sql, *args))

    async def _explain_generic(self, sql: str, args: tuple[object, ...]) -> str:
        types = [parameter.name for parameter in (await self._driver.prepare(sql)).get_parameters()]
        literals = [
            await self._literal(value, type_) for value, type_ in zip(args, types, strict=True)
        ]
        await self.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await self.execute(f"PREPARE explained AS {sql}")
        values = f"({', '.join(literals)})" if literals else ""
        document = await self._value(f"{EXPLAIN} EXECUTE explained {values}")
        await self.execute("DEALLOCATE explained")
        await self.execute("SET LOCAL plan_cache_mode = auto")
        return document

    async def _literal(self, value: object, type_: str) -> str:
        """Return a literal, because EXECUTE takes no parameters."""
        literal = await self._value(f"VALUES (quote_nullable($1::{type_}::text))", value)
        return f"{literal}::{type_}"
