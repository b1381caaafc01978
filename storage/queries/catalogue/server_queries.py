"""The traversals of the catalogue, states and auth chains, as other servers request them."""

from collections.abc import Mapping
from typing import Any, Final

from storage.database.connection import Connection
from storage.ids import EventId, RoomId, ServerName
from storage.queries import auth_chain, federation, joined_servers, state_at
from storage.queries import event_auth as auth_queries
from storage.queries import timestamp_to_event as timestamps
from storage.queries import visible_events as visibility_queries
from storage.queries.catalogue.query import Ask, CatalogueQuery, of_event
from storage.queries.pagination.page import Direction

TRAVERSED: Final = ("room", "event", "server")
TIMED: Final = ("room", "server", "timestamp")


async def _backfill(conn: Connection, given: Any) -> object:
    rows_max = given.config.traversal_rows_max
    return await federation.backfill(
        conn,
        RoomId(given.room),
        [EventId(given.event)],
        given.limit,
        server_name=ServerName(given.server),
        rows_max=rows_max,
    )


async def _missing_events(conn: Connection, given: Any) -> object:
    return await federation.missing_events(
        conn,
        RoomId(given.room),
        [],
        [EventId(given.event)],
        limit=given.limit,
        min_depth=0,
        server_name=ServerName(given.server),
        rows_max=given.config.traversal_rows_max,
    )


async def _whole_state(conn: Connection, event_id: EventId) -> object:
    return await state_at.states_at(conn, [event_id], after=False)


async def _few_keys(conn: Connection, event_id: EventId) -> object:
    keys = [("m.room.power_levels", ""), ("m.room.join_rules", "")]
    return await state_at.states_at(conn, [event_id], after=False, keys=keys)


async def _but_members(conn: Connection, event_id: EventId) -> object:
    return await state_at.states_at(
        conn, [event_id], after=False, types=["m.room.create", "m.room.name", "m.room.power_levels"]
    )


async def _visible_to_server(conn: Connection, given: Any) -> object:
    return await visibility_queries.visible_to_server(
        conn, ServerName(given.server), [EventId(given.event)]
    )


async def _is_resident(conn: Connection, given: Any) -> object:
    return await federation.is_resident(conn, ServerName(given.server), RoomId(given.room))


async def _joined_servers(conn: Connection, given: Any) -> object:
    return await joined_servers.joined_servers(conn, RoomId(given.room))


async def _joined_servers_at(conn: Connection, given: Any) -> object:
    return await joined_servers.joined_servers_at(conn, RoomId(given.room), EventId(given.event))


def _near(direction: Direction) -> Ask:
    async def nearest(conn: Connection, given: Any) -> object:
        return await timestamps.timestamp_to_event(
            conn,
            RoomId(given.room),
            given.timestamp,
            direction,
            server_name=ServerName(given.server),
            rows_max=given.config.traversal_rows_max,
        )

    return nearest


QUERIES: Final[Mapping[str, CatalogueQuery]] = {
    "backfill": CatalogueQuery("an event and its ancestors, for a server", TRAVERSED, _backfill),
    "missing-events": CatalogueQuery(
        "the ancestors of an event, for a server", TRAVERSED, _missing_events
    ),
    "state-ids": CatalogueQuery(
        "the state before an event with its auth chain",
        ("event",),
        of_event(auth_queries.state_ids),
    ),
    "event-auth": CatalogueQuery(
        "the auth chain of an event, whole", ("event",), of_event(auth_queries.event_auth)
    ),
    "auth-chain": CatalogueQuery(
        "the ids of the auth chain of an event",
        ("event",),
        of_event(lambda conn, event_id: auth_chain.auth_chain_ids(conn, [event_id])),
    ),
    "state-at": CatalogueQuery(
        "the whole state before an event", ("event",), of_event(_whole_state)
    ),
    "state-keys": CatalogueQuery(
        "a few keys of the state before an event", ("event",), of_event(_few_keys)
    ),
    "state-types": CatalogueQuery(
        "a few types of the state before an event", ("event",), of_event(_but_members)
    ),
    "visible-to-server": CatalogueQuery(
        "whether a server may have an event whole", ("server", "event"), _visible_to_server
    ),
    "is-resident": CatalogueQuery(
        "whether a server is in a room now", ("server", "room"), _is_resident
    ),
    "joined-servers": CatalogueQuery("the servers in a room now", ("room",), _joined_servers),
    "joined-servers-at": CatalogueQuery(
        "the servers in a room at an event", ("room", "event"), _joined_servers_at
    ),
    "server-event-before": CatalogueQuery(
        "the event nearest to a time, before it, for a server", TIMED, _near("b")
    ),
    "server-event-after": CatalogueQuery(
        "the event nearest to a time, after it, for a server", TIMED, _near("f")
    ),
}
