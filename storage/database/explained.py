"""A connection that has Postgres explain each statement before it runs it: whoever asks through it leaves the plans behind.

So a question can be looked at as it is asked, with its own arguments, however many statements it takes and whatever they are.
EXPLAIN ANALYZE runs the statement too, so only statements that change nothing belong here.

A session plans a prepared statement for its arguments five times; from then on it keeps one plan for all arguments, the generic
one, if that seems no worse. Either can be looked at.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from storage.database.connection import Connection, R

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
    """What EXPLAIN (ANALYZE, BUFFERS) told of one statement; ``tree`` is its outermost node, in Postgres' words."""

    sql: str
    tree: dict[str, Any]
    planning_ms: float
    execution_ms: float

    @classmethod
    def of(cls, sql: str, document: str) -> Self:
        """From the JSON that Postgres gives."""
        [told] = json.loads(document)
        return cls(sql, told["Plan"], told["Planning Time"], told["Execution Time"])

    def nodes(self) -> Iterator[dict[str, Any]]:
        """All nodes, those of subplans too."""
        todo = [self.tree]
        while todo:
            node = todo.pop()
            yield node
            todo += reversed(node.get("Plans", ()))

    @property
    def indexes(self) -> set[str]:
        """The indexes that were read."""
        return {
            node["Index Name"]
            for node in self.nodes()
            if "Index Name" in node and node["Actual Loops"]
        }

    @property
    def sequential(self) -> set[str]:
        """The tables that were read from one end to the other, at least until somebody had enough."""
        return {
            node["Relation Name"]
            for node in self.nodes()
            if node["Node Type"] == "Seq Scan" and node["Actual Loops"]
        }

    @property
    def rows(self) -> int:
        """Rows of tables that were looked at, also those that were passed over then."""
        return sum(self.rows_of_tables().values())

    def rows_of_tables(self) -> dict[str, int]:
        """The same by table."""
        found: dict[str, int] = {}
        for node in self.nodes():
            if node["Node Type"] in SCANS:
                name = node["Relation Name"]
                found[name] = found.get(name, 0) + _looked_at(node)
        return found

    @property
    def pages(self) -> int:
        """Pages of 8 kB that were looked at, as often as they were."""
        return int(self.tree["Shared Hit Blocks"] + self.tree["Shared Read Blocks"])

    @property
    def answer_rows(self) -> int:
        """Rows that the statement answers with."""
        return int(self.tree["Actual Rows"])


def _looked_at(node: dict[str, Any]) -> int:
    passed_over = node.get("Rows Removed by Filter", 0) + node.get(
        "Rows Removed by Index Recheck", 0
    )
    return int((node["Actual Rows"] + passed_over) * node["Actual Loops"] + 0.5)


class ExplainingConnection(Connection):
    """A connection whose ``plans`` are those of the statements that were asked, in order."""

    __slots__ = ("generic", "plans")

    def __init__(self, driver: Any, *, generic: bool = False) -> None:
        super().__init__(driver)
        self.generic = generic
        self.plans: list[QueryPlan] = []

    @classmethod
    def over(cls, conn: Connection, *, generic: bool = False) -> Self:
        """On the same session, and in its transaction, which there must be for ``generic``."""
        return cls(conn._driver, generic=generic)  # noqa: SLF001  # a connection of another kind

    async def fetch(self, sql: str, *args: object, row: type[R]) -> list[R]:
        """All rows, each as a `row`."""
        await self._explain(sql, args)
        return await super().fetch(sql, *args, row=row)

    async def records(self, sql: str, *args: object, row: type[R]) -> list[Any]:
        """All rows as the driver gives them."""
        await self._explain(sql, args)
        return await super().records(sql, *args, row=row)

    async def fetchrow(self, sql: str, *args: object, row: type[R]) -> R | None:
        """The first row as a `row`, or None."""
        await self._explain(sql, args)
        return await super().fetchrow(sql, *args, row=row)

    async def fetchval(self, sql: str, *args: object) -> Any:
        """The first column of the first row, or None."""
        await self._explain(sql, args)
        return await super().fetchval(sql, *args)

    async def fetchvals(self, sql: str, *args: object) -> list[Any]:
        """The first column of all rows."""
        await self._explain(sql, args)
        return await super().fetchvals(sql, *args)

    async def _explain(self, sql: str, args: tuple[object, ...]) -> None:
        told = (
            await self._explain_generic(sql, args)
            if self.generic
            else await super().fetchval(f"{EXPLAIN} {sql}", *args)
        )
        self.plans.append(QueryPlan.of(sql, told))

    async def _explain_generic(self, sql: str, args: tuple[object, ...]) -> str:
        types = [parameter.name for parameter in (await self._driver.prepare(sql)).get_parameters()]
        given = [
            await self._literal(value, type_) for value, type_ in zip(args, types, strict=True)
        ]
        await self.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await self.execute(f"PREPARE explained AS {sql}")
        told: str = await super().fetchval(
            f"{EXPLAIN} EXECUTE explained ({', '.join(given)})"
            if given
            else f"{EXPLAIN} EXECUTE explained"
        )
        await self.execute("DEALLOCATE explained")
        await self.execute("SET LOCAL plan_cache_mode = auto")
        return told

    async def _literal(self, value: object, type_: str) -> str:
        """EXECUTE takes no parameters."""
        return f"{await super().fetchval(f'VALUES (quote_nullable($1::{type_}::text))', value)}::{type_}"
