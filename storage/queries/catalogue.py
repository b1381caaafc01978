"""Catalogue of latency-critical queries: name, arguments, callable.

`room-storage explain` runs one of them on the operator's database. The plan tests run them all
among a million events. To add one, add a line to `QUESTIONS`. It runs by the same function as in
the store.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString

from storage import arguments as args
from storage.config import Config
from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.errors import InputError
from storage.ids import EventId, RoomId, ServerName, UserId, server_name_of
from storage.queries import (
    aggregations,
    auth_chain,
    client_events,
    context,
    events,
    federation,
    joined_servers,
    member_ids,
    members,
    messages,
    relations,
    room_info,
    sharing,
    space_children,
    state,
    state_at,
    threads,
    unread,
)
from storage.queries import event_auth as auth_queries
from storage.queries import timestamp_to_event as timestamps
from storage.queries import visible_events as visibility_queries
from storage.queries.filters import ANY_ROOM, SyncFilter
from storage.queries.pagination.page import END, Direction, between
from storage.queries.room_position import NOW
from storage.queries.sync import SyncMemory, SyncRequest, brief, sync
from storage.queries.sync.changed_rooms import rooms_of
from storage.queries.sync.positions import events_of, positions
from storage.streams import SyncToken, VectorPosition, startup
from storage.streams.caches import Cache, LastChange, RoomsOf, Ticket

SQL_DEPLOYMENT: Final[LiteralString] = """
SELECT deployment_id
FROM deployment
"""

CHANGED: Final = 10  # rooms that have changed, in the caches


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


# --------------------------------------------------------------------------------------------------
# the queries


def _request(given: Any, wanted: SyncFilter = ANY_ROOM) -> SyncRequest:
    return SyncRequest.of(
        given.user,
        given.since,
        timeline_limit=given.limit,
        rooms_limit=None,
        full_state=False,
        filter=wanted,
        server_name=server_name_of(given.user),
        deployment=given.deployment,
        config=given.config,
    )


async def _sync(conn: Connection, given: Any) -> object:
    return await sync(conn, _request(given))


async def _lazy_sync(conn: Connection, given: Any) -> object:
    return await sync(conn, _request(given, SyncFilter(lazy_load_members=True)))


async def _sync_some(conn: Connection, given: Any) -> object:
    """Run the sync of a process that has followed the streams up to the token.

    The first statement is not a part of it: it reads the positions.
    """
    since = SyncToken.parse(given.since, given.deployment).position("events") or VectorPosition()
    seen = dict(await startup.positions(conn))
    seen["events"] = {writer: min(at, since.min) for writer, at in seen["events"].items()}
    return await sync(
        conn,
        _request(given),
        memory=SyncMemory(
            lambda name: seen[name], Cache("rooms_of", 1), LastChange(1, 0), LastChange(1, 0)
        ),
    )


async def _sync_timelines(conn: Connection, given: Any) -> object:
    """Run the sync of a process that has followed all, with messages in some of the user's rooms.

    The first two statements are not a part of it: they read the positions and the rooms.
    """
    seen = await startup.positions(conn)
    joined = await rooms_of(conn, UserId(given.user))
    remembered: Cache[RoomsOf] = Cache("rooms_of", 1)
    ticket = remembered.get(given.user)
    if isinstance(ticket, Ticket):
        remembered.fill(ticket, joined._replace(moved=0))
    changes = LastChange(CHANGED, 0)
    for room_id in list(joined.joined)[:CHANGED]:
        changes.note(room_id, max(seen["events"].values(), default=0))
    return await brief(
        conn,
        _request(given),
        SyncMemory(lambda name: seen[name], remembered, changes, LastChange(1, 0)),
    )


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


def _of_event(read: Callable[[Connection, EventId], Awaitable[object]]) -> Ask:
    async def about(conn: Connection, given: Any) -> object:
        return await read(conn, EventId(given.event))

    return about


async def _whole_state(conn: Connection, event_id: EventId) -> object:
    return await state_at.states_at(conn, [event_id], after=False)


async def _few_keys(conn: Connection, event_id: EventId) -> object:
    keys = [("m.room.power_levels", ""), ("m.room.join_rules", "")]
    return await state_at.states_at(conn, [event_id], after=False, keys=keys)


async def _but_members(conn: Connection, event_id: EventId) -> object:
    return await state_at.states_at(
        conn, [event_id], after=False, types=["m.room.create", "m.room.name", "m.room.power_levels"]
    )


async def _current_state(conn: Connection, given: Any) -> object:
    return await state.current_state(conn, RoomId(given.room))


async def _rooms_of(conn: Connection, given: Any) -> object:
    return await state.rooms_of(conn, UserId(given.user))


async def _visible_to_user(conn: Connection, given: Any) -> object:
    return await visibility_queries.visible_to_user(
        conn, UserId(given.user), [EventId(given.event)]
    )


async def _visible_to_server(conn: Connection, given: Any) -> object:
    return await visibility_queries.visible_to_server(
        conn, ServerName(given.server), [EventId(given.event)]
    )


async def _is_resident(conn: Connection, given: Any) -> object:
    return await federation.is_resident(conn, ServerName(given.server), RoomId(given.room))


async def _membership(conn: Connection, given: Any) -> object:
    return await members.membership(conn, RoomId(given.room), UserId(given.user), NOW)


async def _members(conn: Connection, given: Any) -> object:
    return await members.members(conn, RoomId(given.room), NOW, wanted=JOIN, unwanted=None)


async def _member_ids(conn: Connection, given: Any) -> object:
    return await member_ids.member_ids(conn, RoomId(given.room), JOIN, None)


async def _joined_servers(conn: Connection, given: Any) -> object:
    return await joined_servers.joined_servers(conn, RoomId(given.room))


async def _joined_servers_at(conn: Connection, given: Any) -> object:
    return await joined_servers.joined_servers_at(conn, RoomId(given.room), EventId(given.event))


async def _room_info(conn: Connection, given: Any) -> object:
    return await room_info.rooms(conn, [RoomId(given.room)])


async def _space_children(conn: Connection, given: Any) -> object:
    return await space_children.space_children(conn, RoomId(given.room))


async def _users_sharing(conn: Connection, given: Any) -> object:
    return await sharing.users_sharing(conn, UserId(given.user))


async def _sharing_changes(conn: Connection, given: Any) -> object:
    since = events_of(SyncToken.parse(given.since, given.deployment))
    now = (await positions(conn))["events"]
    return await sharing.sharing_changes(conn, UserId(given.user), since, now, text=given.since)


PAGED: Final = ("room", "user")
TRAVERSED: Final = ("room", "event", "server")

QUESTIONS: Final[Mapping[str, CatalogueQuery]] = {
    "sync": CatalogueQuery("what is new to a user since a token", ("user", "since"), _sync),
    "sync-remembered": CatalogueQuery(
        "the same, where the caches have the rooms that can have changed",
        ("user", "since"),
        _sync_some,
    ),
    "sync-timelines": CatalogueQuery(
        "the same, where only some timelines have new events", ("user", "since"), _sync_timelines
    ),
    "initial-sync": CatalogueQuery("everything of a user", ("user",), _sync),
    "lazy-sync": CatalogueQuery(
        "what is new to a user since a token, with the members that matter only",
        ("user", "since"),
        _lazy_sync,
    ),
    "initial-lazy-sync": CatalogueQuery(
        "everything of a user, with the members that matter only", ("user",), _lazy_sync
    ),
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
        "one event", ("event",), _of_event(lambda conn, event_id: events.events(conn, [event_id]))
    ),
    "backfill": CatalogueQuery("an event and its ancestors, for a server", TRAVERSED, _backfill),
    "missing-events": CatalogueQuery(
        "the ancestors of an event, for a server", TRAVERSED, _missing_events
    ),
    "state-ids": CatalogueQuery(
        "the state before an event with its auth chain",
        ("event",),
        _of_event(auth_queries.state_ids),
    ),
    "event-auth": CatalogueQuery(
        "the auth chain of an event, whole", ("event",), _of_event(auth_queries.event_auth)
    ),
    "auth-chain": CatalogueQuery(
        "the ids of the auth chain of an event",
        ("event",),
        _of_event(lambda conn, event_id: auth_chain.auth_chain_ids(conn, [event_id])),
    ),
    "state-at": CatalogueQuery(
        "the whole state before an event", ("event",), _of_event(_whole_state)
    ),
    "state-keys": CatalogueQuery(
        "a few keys of the state before an event", ("event",), _of_event(_few_keys)
    ),
    "state-types": CatalogueQuery(
        "a few types of the state before an event", ("event",), _of_event(_but_members)
    ),
    "current-state": CatalogueQuery("the current state of a room", ("room",), _current_state),
    "room-info": CatalogueQuery("a room as its state describes it", ("room",), _room_info),
    "space-children": CatalogueQuery("the children of a space", ("room",), _space_children),
    "membership": CatalogueQuery("the membership of a user in a room", PAGED, _membership),
    "members": CatalogueQuery("the events of the joined members of a room", ("room",), _members),
    "member-ids": CatalogueQuery("the joined members of a room", ("room",), _member_ids),
    "joined-servers": CatalogueQuery("the servers in a room now", ("room",), _joined_servers),
    "joined-servers-at": CatalogueQuery(
        "the servers in a room at an event", ("room", "event"), _joined_servers_at
    ),
    "users-sharing": CatalogueQuery("the users who share a room", ("user",), _users_sharing),
    "sharing-changes": CatalogueQuery(
        "the users who share a room since a token", ("user", "since"), _sharing_changes
    ),
    "rooms-of": CatalogueQuery("the rooms that a user is in", ("user",), _rooms_of),
    "visible-to-user": CatalogueQuery(
        "whether a user may see an event", ("user", "event"), _visible_to_user
    ),
    "visible-to-server": CatalogueQuery(
        "whether a server may have an event whole", ("server", "event"), _visible_to_server
    ),
    "is-resident": CatalogueQuery(
        "whether a server is in a room now", ("server", "room"), _is_resident
    ),
}
