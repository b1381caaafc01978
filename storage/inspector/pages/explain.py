"""The plans of a latency-critical query on this database, as `room-storage explain` prints them.

Reads: `storage.store.catalogue`, on a connection that explains each statement before it runs. All
of them are reads, in a read-only transaction.
"""

from dataclasses import replace
from typing import Final

from starlette.responses import Response

from storage.database.connection import Connection
from storage.database.explained import QueryPlan
from storage.errors import InputError
from storage.inspector.visit import Visit
from storage.store.catalogue import QUESTIONS, QueryArguments, prepared, token_behind

BEHIND: Final = 100
FIELDS: Final = ("room", "user", "event", "server", "since", "timestamp")


async def page(visit: Visit) -> Response:
    """Show the form of a query; and its plans, once all arguments are given."""
    name = visit.wanted("query")
    query = QUESTIONS.get(name)
    if query is None:
        raise InputError(f"no query is named {name!r}: {', '.join(QUESTIONS)}")
    given = QueryArguments(
        **{field: visit.text(field) for field in FIELDS if field != "timestamp"},
        timestamp=visit.whole("timestamp"),
        limit=min(visit.whole("limit") or 10, 1_000),
    )
    wanted = [need for need in query.needs if need != "since"]
    is_complete = all(getattr(given, need) is not None for need in wanted)
    plans = await _plans(visit, name, given) if is_complete else []
    return visit.render(
        "explain.html",
        name=name,
        query=query,
        given=given,
        plans=plans,
        trees=[list(described(plan)) for plan in plans],
        behind=BEHIND,
    )


async def _plans(visit: Visit, name: str, given: QueryArguments) -> list[QueryPlan]:
    async def explained(conn: Connection) -> list[QueryPlan]:
        complete = given
        if "since" in QUESTIONS[name].needs and given.since is None:
            complete = replace(given, since=await token_behind(conn, BEHIND))
        return await (await prepared(visit.store.database, conn, name, complete)).plans()

    return await visit.store.reads.run(explained, snapshot=True)


def described(plan: QueryPlan) -> list[tuple[int, str]]:
    """Return the nodes of a plan, with their depth."""
    lines = []
    todo = [(0, plan.tree)]
    while todo:
        depth, node = todo.pop()
        what = [str(node["Node Type"])]
        what += [f"by {node['Index Name']}"] if "Index Name" in node else []
        what += [f"on {node['Relation Name']}"] if "Relation Name" in node else []
        rows = node["Actual Rows"] * node["Actual Loops"]
        time_ms = node["Actual Total Time"] * node["Actual Loops"]
        lines.append((depth, f"{' '.join(what)}: {rows:g} rows, {time_ms:.3f} ms"))
        todo += [(depth + 1, part) for part in reversed(node.get("Plans", ()))]
    return lines
