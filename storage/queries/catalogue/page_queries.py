"""The pages, relations and single events of the catalogue, as a user may see them."""

from collections.abc import Mapping
from typing import Any, Final

from storage.database.connection import Connection
from storage.ids import EventId, RoomId, UserId
from storage.queries import (
    aggregations,
    client_events,
    context,
    events,
    messages,
    relations,
    threads,
    unread,
)
from storage.queries import timestamp_to_event as timestamps
from storage.queries.catalogue.query import Ask, CatalogueQuery, of_event
from storage.queries.pagination.page import END, Direction, between

PAGED: Final = ("room", "user")


def _pages(direction: Direction) -> Ask:
    async def page(conn: Connection, given: Any) -> object:
        page_range = between(None, None, direction, given.limit, given.deployment)
        return await messages.messages(
            conn,
            RoomId(given.room),
            UserId(given.user),
            page_range,
            given.deployment,
            rows_max=given.config.traversal_rows_max,
        )

    return page


async def _since(conn: Connection, given: Any) -> object:
    page_range = between(None, given.since, "b", given.limit, given.deployment)
    return await messages.messages(
        conn,
        RoomId(given.room),
        UserId(given.user),
        page_range,
        given.deployment,
        rows_max=given.config.traversal_rows_max,
    )


async def _context(conn: Connection, given: Any) -> object:
    return await context.context(
        conn,
        EventId(given.event),
        UserId(given.user),
        limit=given.limit,
        deployment=given.deployment,
    )


def _relations(*, recurse: bool) -> Ask:
    async def related(conn: Connection, given: Any) -> object:
        page_range = between(None, None, "b", given.limit, given.deployment)
        wanted = relations.RelationFilter(recurse=recurse)
        rows_max = given.config.traversal_rows_max
        ids = EventId(given.event), UserId(given.user)
        return await relations.relations(
            conn, *ids, wanted, page_range, deployment=given.deployment, rows_max=rows_max
        )

    return related


async def _client_events(conn: Connection, given: Any) -> object:
    found = await events.events(conn, [EventId(given.event)])
    request = client_events.ClientRequest(UserId(given.user), "DEVICE")
    return await client_events.client_events(conn, request, list(found.values()))


async def _threads(conn: Connection, given: Any) -> object:
    request = threads.ThreadsRequest(
        room_id=RoomId(given.room),
        user_id=UserId(given.user),
        participated=False,
        start=END,
        limit=given.limit,
        rows_max=given.config.traversal_rows_max,
    )
    return await threads.threads(conn, request, given.deployment)


async def _unread(conn: Connection, given: Any) -> object:
    return await unread.unread(conn, UserId(given.user))


async def _aggregations(conn: Connection, given: Any) -> object:
    return await aggregations.aggregations(conn, UserId(given.user), [EventId(given.event)])


def _near(direction: Direction) -> Ask:
    async def nearest(conn: Connection, given: Any) -> object:
        rows_max = given.config.traversal_rows_max
        return await timestamps.event_near(
            conn,
            RoomId(given.room),
            UserId(given.user),
            given.timestamp,
            direction,
            rows_max=rows_max,
        )

    return nearest


QUERIES: Final[Mapping[str, CatalogueQuery]] = {
    "messages": CatalogueQuery("the last page of a room", PAGED, _pages("b")),
    "messages-forwards": CatalogueQuery("the first page of a room", PAGED, _pages("f")),
    "messages-since": CatalogueQuery(
        "the last page of a room, down to where a client was", (*PAGED, "since"), _since
    ),
    "context": CatalogueQuery(
        "an event with those around it, and the state there", ("event", "user"), _context
    ),
    "relations": CatalogueQuery(
        "the latest events that relate to one", ("event", "user"), _relations(recurse=False)
    ),
    "relations-indirect": CatalogueQuery(
        "the same with indirect relations", ("event", "user"), _relations(recurse=True)
    ),
    "threads": CatalogueQuery("the latest threads of a room", PAGED, _threads),
    "unread": CatalogueQuery("the unread counts of a user's rooms", ("user",), _unread),
    "aggregations": CatalogueQuery(
        "the aggregations of an event", ("event", "user"), _aggregations
    ),
    "client-events": CatalogueQuery(
        "an event as a client gets it", ("event", "user"), _client_events
    ),
    "event-before": CatalogueQuery(
        "the event nearest to a time, before it", (*PAGED, "timestamp"), _near("b")
    ),
    "event-after": CatalogueQuery(
        "the event nearest to a time, after it", (*PAGED, "timestamp"), _near("f")
    ),
    "event": CatalogueQuery(
        "one event", ("event",), of_event(lambda conn, event_id: events.events(conn, [event_id]))
    ),
}
