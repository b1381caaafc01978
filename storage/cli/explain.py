"""`room-storage explain`: show plans and timings of a latency-critical query on this database."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import typer

from storage.cli.common import DsnOption, JsonOption, maintained
from storage.cli.interrupt import run
from storage.cli.output import print_json
from storage.database.explained import QueryPlan
from storage.database.pool import BEGIN
from storage.errors import InputError
from storage.store.catalogue import (
    QUESTIONS,
    QueryArguments,
    ask,
    prepared,
    query_of,
    with_token,
)

QUERIES: Final = "\n\n".join(
    [
        "The query, and its arguments.",
        *(f"{name} ({', '.join(one.needs)}): {one.about}." for name, one in QUESTIONS.items()),
    ]
)
BEHIND: Final = 100
WARM: Final = 6
"""The number of runs before: a new session reads the catalogue, and plans functions five times."""


def _matching(incomplete: str) -> list[str]:
    """Return the queries that a shell can complete this to."""
    return [name for name in QUESTIONS if name.startswith(incomplete)]


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


def command(
    query: Annotated[
        str,
        typer.Argument(metavar="QUERY", autocompletion=_matching, help=QUERIES, show_default=False),
    ],
    dsn: DsnOption = None,
    *,
    room: Annotated[str | None, _option("ROOM_ID", "The room.")] = None,
    user: Annotated[str | None, _option("USER_ID", "The user who requests.")] = None,
    event: Annotated[str | None, _option("EVENT_ID", "The event.")] = None,
    server: Annotated[str | None, _option("NAME", "The server that requests.")] = None,
    since: Annotated[str | None, _option("TOKEN", "A next_batch.")] = None,
    behind: Annotated[
        int,
        typer.Option(
            min=0, help="Without --since: how many positions ago the client has synced last."
        ),
    ] = BEHIND,
    timestamp: Annotated[int | None, _option("MS", "A time, in milliseconds.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="The limit of a page, or of a timeline.")] = 10,
    generic: Annotated[
        bool,
        typer.Option(
            "--generic", help="The generic plan, which a session may keep after five runs."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the plans and timings of a latency-critical query on this database.

    The query runs in a read-only transaction, which is rolled back. It runs several times before,
    because a new session must read the catalogue and plan. EXPLAIN itself takes time, most of it
    for reading clocks.
    """
    given = QueryArguments(
        room=room,
        user=user,
        event=event,
        server=server,
        since=since,
        timestamp=timestamp,
        limit=limit,
    )
    plans = run(_explain(dsn, query, given, behind, generic=generic))
    if as_json:
        print_json([_document(plan) for plan in plans])
        return
    for number, plan in enumerate(plans, 1):
        typer.echo(f"statement {number} of {len(plans)}")
        typer.echo("\n".join(_described(plan)) + "\n")


async def _explain(
    dsn: str | None, query: str, given: QueryArguments, behind: int, *, generic: bool
) -> Sequence[QueryPlan]:
    if "since" not in query_of(query).needs and given.since is not None:
        raise InputError(f"{query} takes no --since")
    async with maintained(dsn) as database, database.connection() as conn:
        await conn.execute(BEGIN["repeatable_read", True])
        try:
            given = await with_token(conn, query, given, behind)
            for _ in range(WARM):
                await ask(database, conn, query, given)
            return await (await prepared(database, conn, query, given)).plans(generic=generic)
        finally:
            await conn.execute("ROLLBACK")


def _document(plan: QueryPlan) -> dict[str, Any]:
    return {
        "sql": plan.sql.strip(),
        "planning_ms": plan.planning_ms,
        "execution_ms": plan.execution_ms,
        "rows": plan.answer_rows,
        "rows_looked_at": plan.rows_of_tables(),
        "pages": plan.pages,
        "plan": plan.tree,
    }


def _described(plan: QueryPlan) -> Iterator[str]:
    """Describe the plan for people: one line per node, indented."""
    looked = (
        ", ".join(f"{count} of {table}" for table, count in sorted(plan.rows_of_tables().items()))
        or "none"
    )
    times = f"{plan.planning_ms:.2f} ms planning, {plan.execution_ms:.2f} ms running"
    yield f"{times}, {plan.pages} pages; {plan.answer_rows} rows out"
    yield f"rows looked at: {looked}"
    for depth, node in plan.nodes_by_depth():
        yield "  " * depth + _line(node)


def _line(node: dict[str, Any]) -> str:
    """Describe one node: what it does, on what, how often, how long."""
    where = next(
        (
            f" on {node[key]}"
            for key in ("Relation Name", "CTE Name", "Function Name")
            if key in node
        ),
        "",
    )
    index = f" by {node['Index Name']}" if "Index Name" in node else ""
    name = f"{node['Subplan Name']}: " if "Subplan Name" in node else ""
    if not node["Actual Loops"]:
        return f"{name}{node['Node Type']}{index}{where} (never run)"
    removed = node.get("Rows Removed by Filter", 0)
    rows = f"rows {node['Actual Rows']:g}" + (f", {removed:g} passed over" if removed else "")
    pages = node["Shared Hit Blocks"] + node["Shared Read Blocks"]
    loops = "" if node["Actual Loops"] == 1 else f", {node['Actual Loops']} times"
    expected = f"expected {node['Plan Rows']}"
    cost = f"{node['Actual Total Time']:.3f} ms each, {pages} pages"
    return f"{name}{node['Node Type']}{index}{where} ({rows}, {expected}{loops}; {cost})"
