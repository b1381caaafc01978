"""`room-storage explain`: show plans and timings of a latency-critical query on this database."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from storage.cli.common import DsnOption, JsonOption, maintained
from storage.cli.interrupt import run
from storage.cli.output import print_json
from storage.database.connection import Connection, Database
from storage.database.explained import QueryPlan
from storage.database.pool import BEGIN
from storage.errors import InputError
from storage.store.catalogue import QUESTIONS, QueryArguments, ask, prepared, token_behind

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


def command(
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            autocompletion=_matching,
            help=QUERIES,
            show_default=False,
        ),
    ],
    dsn: DsnOption = None,
    *,
    room: Annotated[
        str | None, typer.Option(metavar="ROOM_ID", help="The room.", show_default=False)
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="USER_ID", help="The user who requests.", show_default=False),
    ] = None,
    event: Annotated[
        str | None, typer.Option(metavar="EVENT_ID", help="The event.", show_default=False)
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The server that requests.", show_default=False),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="A next_batch.", show_default=False)
    ] = None,
    behind: Annotated[
        int,
        typer.Option(
            min=0, help="Without --since: how many positions ago the client has synced last."
        ),
    ] = BEHIND,
    timestamp: Annotated[
        int | None, typer.Option(metavar="MS", help="A time, in milliseconds.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="The limit of a page, or of a timeline.")] = 10,
    generic: Annotated[
        bool,
        typer.Option(
            "--generic",
            help="The generic plan, which a session may keep after five runs.",
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
    if query not in QUESTIONS:
        raise InputError(f"no query is named {query!r}: {', '.join(QUESTIONS)}")
    async with maintained(dsn) as database, database.connection() as conn:
        await conn.execute(BEGIN["repeatable_read", True])
        try:
            return await _plans(database, conn, query, given, behind, generic=generic)
        finally:
            await conn.execute("ROLLBACK")


async def _plans(
    database: Database,
    conn: Connection,
    query: str,
    given: QueryArguments,
    behind: int,
    *,
    generic: bool,
) -> Sequence[QueryPlan]:
    takes_since = "since" in QUESTIONS[query].needs
    if takes_since and given.since is None:
        given = replace(given, since=await token_behind(conn, behind))
    if not takes_since and given.since is not None:
        raise InputError(f"{query} takes no --since")
    for _ in range(WARM):
        await ask(database, conn, query, given)
    return await (await prepared(database, conn, query, given)).plans(generic=generic)


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
    todo: list[tuple[int, dict[str, Any]]] = [(0, plan.tree)]
    while todo:
        depth, node = todo.pop()
        yield "  " * depth + _line(node)
        todo += [(depth + 1, part) for part in reversed(node.get("Plans", ()))]


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
