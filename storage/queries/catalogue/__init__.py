"""Catalogue of latency-critical queries: name, arguments, callable.

`room-storage explain` runs one of them on the operator's database. The plan tests run them all
among a million events. To add one, add a line to the `QUERIES` of its module. It runs by the same
function as in the store.
"""

from collections.abc import Mapping
from typing import Final, LiteralString

from storage import arguments as args
from storage.database.connection import Connection
from storage.errors import InputError
from storage.queries.catalogue import page_queries, room_queries, server_queries, sync_queries
from storage.queries.catalogue.query import CatalogueQuery, QueryArguments
from storage.queries.sync.positions import positions
from storage.streams import SyncToken, VectorPosition

__all__ = ["QUESTIONS", "QueryArguments", "ask", "deployment_of", "token_behind"]

SQL_DEPLOYMENT: Final[LiteralString] = """
SELECT deployment_id
FROM deployment
"""

QUESTIONS: Final[Mapping[str, CatalogueQuery]] = {
    **sync_queries.QUERIES,
    **page_queries.QUERIES,
    **server_queries.QUERIES,
    **room_queries.QUERIES,
}


async def ask(conn: Connection, name: str, given: QueryArguments) -> object:
    """Return the result of a query.

    `InputError` for an unknown name or a missing argument; else the errors of the query.
    """
    query = QUESTIONS.get(name)
    if query is None:
        raise InputError(f"no query is named {name!r}: {', '.join(QUESTIONS)}")
    lacking = [need for need in query.needs if getattr(given, need) is None]
    if lacking:
        raise InputError(f"{name} needs {', '.join(lacking)}")
    _check(given)
    return await query.ask(conn, given)


def _check(given: QueryArguments) -> None:
    """Raise `InvalidIdentifier` for a malformed id, `InputError` for a negative limit."""
    if given.user is not None:
        args.user(given.user)
    if given.event is not None:
        args.events([given.event])
    if given.server is not None:
        args.server(given.server)
    args.limit(given.limit, given.config.page_limit_max)


async def deployment_of(conn: Connection) -> str:
    """Return the id of the deployment, a part of tokens. Empty before a store was opened."""
    return await conn.fetchval(SQL_DEPLOYMENT) or ""


async def token_behind(conn: Connection, behind: int, deployment: str) -> str:
    """Return the token of a client that is ``behind`` positions of the events stream behind."""
    current = (await positions(conn))["events"].furthest()
    return SyncToken.of({"events": VectorPosition(max(current - behind, 0))}).print(deployment)
