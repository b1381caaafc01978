"""A query of the catalogue, and its arguments."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from storage.config import Config
from storage.database.connection import Connection
from storage.ids import EventId


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryArguments:
    """The arguments of a query. `CatalogueQuery.needs` lists those that it needs."""

    room: str | None = None
    user: str | None = None
    event: str | None = None
    server: str | None = None
    since: str | None = None
    timestamp: int | None = None
    limit: int = 10
    deployment: str = ""
    config: Config = field(default_factory=Config)


Ask = Callable[[Connection, Any], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class CatalogueQuery:
    """A query. ``needs`` are fields of `QueryArguments`; they are never None in ``ask``."""

    about: str
    needs: tuple[str, ...]
    ask: Ask


def of_event(read: Callable[[Connection, EventId], Awaitable[object]]) -> Ask:
    """Return the query that reads something about the event of the arguments."""

    async def about(conn: Connection, given: Any) -> object:
        return await read(conn, EventId(given.event))

    return about
