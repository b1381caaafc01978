"""Calls that page through events: history, context, relations, and the event near a time."""

import time
from collections.abc import Iterable
from typing import Any

from storage import arguments as args
from storage.database.connection import Connection
from storage.errors import InputError
from storage.ids import EventId
from storage.observability.instrument import measured
from storage.queries import client_page as queries
from storage.queries import context as context_queries
from storage.queries import events as event_queries
from storage.queries import events as visible_events
from storage.queries import explain_visibility as explanations
from storage.queries import messages as message_queries
from storage.queries import relations as aggregation_queries
from storage.queries import relations as relation_queries
from storage.queries import threads as thread_queries
from storage.queries import timestamp_to_event
from storage.queries.context import Context
from storage.queries.events import Aggregations, StoredEvent
from storage.queries.filters import ANY_EVENT, EventFilter
from storage.queries.pagination.page import END, Direction, Page, between
from storage.queries.relations import RelationsPage
from storage.queries.threads import Include, ThreadsRequest
from storage.store.core import StoreCore, page_limit
from storage.streams import PaginationToken


@measured("messages")
async def messages(
    store: StoreCore,
    room_id: str,
    user_id: str,
    *,
    from_: str | None = None,
    to: str | None = None,
    direction: Direction = "b",
    limit: int = 10,
    ignored: args.Ignored = args.ACCOUNT_DATA,
    filter: EventFilter = ANY_EVENT,  # noqa: A002  # as the client-server API calls it
    aggregations: bool = False,
) -> Page:
    """Return a page of a room's history from a token.

    The ``direction`` is backwards ("b") or forwards ("f"), and ``to`` is a token to end at.
    ``from_`` None is the end of the room, or forwards its beginning. Tokens of sync are accepted.
    The page has ``limit`` visible events that pass the ``filter``, or fewer where there are no
    more. `Page.end` is None at the beginning of the room, and forwards once a page is empty. Events
    of ``ignored`` users are left out, except for state. ``aggregations`` adds
    `StoredEvent.relations` to each event.

    `UnknownRoom`, `InvalidIdentifier`, `InvalidToken`, `InputError`.
    """
    room, user = args.room(room_id), args.local_user(user_id, store.server_name)
    silent, bundles = args.ignored(ignored), args.flag(aggregations, "aggregations")
    event_filter = args.instance(filter, EventFilter, "filter")
    bounds = between(from_, to, direction, page_limit(store, limit), store.deployment_id)

    async def read(conn: Connection) -> Page:
        page = await message_queries.messages(
            conn,
            room,
            user,
            bounds,
            store.deployment_id,
            rows_max=store.database.config.traversal_rows_max,
            ignored=silent,
            event_filter=event_filter,
        )
        if not bundles:
            return page
        return await aggregation_queries.of_page(conn, user, page, ignored=silent)

    return await store.reads.run(read, tokens=(from_, to))


@measured("context")
async def context(
    store: StoreCore,
    event_id: str,
    user_id: str,
    *,
    room_id: str | None = None,
    limit: int = 10,
    ignored: args.Ignored = args.ACCOUNT_DATA,
    filter: EventFilter = ANY_EVENT,  # noqa: A002  # as the client-server API calls it
    aggregations: bool = False,
) -> Context:
    """Return an event, at most ``limit`` events around it, and the state.

    The ``filter`` applies to the events around it and to the state. ``room_id``: the room that the
    event must be of. `UnknownEvent`, also where it is not, or where the user may not see it.
    """
    target, user = args.event(event_id), args.local_user(user_id, store.server_name)
    room = None if room_id is None else args.room(room_id)
    silent, bundles = args.ignored(ignored), args.flag(aggregations, "aggregations")
    most, event_filter = page_limit(store, limit), args.instance(filter, EventFilter, "filter")

    async def read(conn: Connection) -> Context:
        result = await context_queries.context(
            conn,
            target,
            user,
            room_id=room,
            limit=most,
            deployment=store.deployment_id,
            ignored=silent,
            event_filter=event_filter,
        )
        if not bundles:
            return result
        return await aggregation_queries.of_context(conn, user, result, ignored=silent)

    return await store.reads.run(read, snapshot=True)


@measured("relations")
async def relations(
    store: StoreCore,
    event_id: str,
    user_id: str,
    *,
    room_id: str | None = None,
    rel_type: str | None = None,
    event_type: str | None = None,
    from_: str | None = None,
    to: str | None = None,
    direction: Direction = "b",
    limit: int = 10,
    recurse: bool = False,
    ignored: args.Ignored = args.ACCOUNT_DATA,
    aggregations: bool = False,
) -> RelationsPage:
    """Return a page of the events that relate to an event, newest first, or oldest first ("f").

    These are edits, reactions, references, and threads; ``rel_type`` and ``event_type`` pick from
    them. ``recurse`` adds the events that relate to those, and so on
    (`RelationsPage.recursion_depth`). Limits and tokens are those of `messages`. ``room_id``: the
    room that the event must be of.

    `UnknownEvent`, also where it is not, or where the user may not see it, `InvalidToken`,
    `InputError`.
    """
    user, target = args.local_user(user_id, store.server_name), args.event(event_id)
    silent, bundles = args.ignored(ignored), args.flag(aggregations, "aggregations")
    room = None if room_id is None else args.room(room_id)
    relation_filter = relation_queries.RelationFilter(
        rel_type=None if rel_type is None else args.text(rel_type),
        event_type=None if event_type is None else args.text(event_type),
        ignored=silent,
        recurse=args.flag(recurse, "recurse"),
    )
    bounds = between(from_, to, direction, page_limit(store, limit), store.deployment_id)

    async def read(conn: Connection) -> RelationsPage:
        page = await relation_queries.relations(
            conn,
            target,
            user,
            relation_filter,
            bounds,
            room_id=room,
            deployment=store.deployment_id,
            rows_max=store.database.config.traversal_rows_max,
        )
        if not bundles:
            return page
        return await aggregation_queries.of_page(conn, user, page, ignored=silent)

    return await store.reads.run(read, tokens=(from_, to))


@measured("aggregations")
async def aggregations(
    store: StoreCore,
    user_id: str,
    event_ids: Iterable[str],
    *,
    ignored: args.Ignored = args.ACCOUNT_DATA,
) -> dict[EventId, Aggregations]:
    """Return the aggregations that a client gets with events: edit, thread summary, references.

    One statement serves any number of events; those without aggregations are left out. Use it for
    /sync and for single events. `InvalidIdentifier`.
    """
    user, ids = args.local_user(user_id, store.server_name), await args.many(args.events, event_ids)
    silent = args.ignored(ignored)
    return await store.reads.run(
        lambda conn: aggregation_queries.aggregations(conn, user, ids, ignored=silent)
    )


@measured("threads")
async def threads(
    store: StoreCore,
    room_id: str,
    user_id: str,
    *,
    include: Include = "all",
    from_: str | None = None,
    limit: int = 20,
    ignored: args.Ignored = args.ACCOUNT_DATA,
) -> Page:
    """Return a page of the thread roots of a room, latest reply first, with their aggregations.

    ``include`` "participated" picks the threads whose root or a reply the user sent. Replies that
    are redacted, hidden from the user, or by ``ignored`` users do not count. A page that has read
    `Config.traversal_rows_max` replies may have fewer roots than ``limit``, and an `end` to go on;
    with "participated" that is after 2,000 replies.
    A thread that gets a reply while you page moves to the front, so read the first page again.

    `UnknownRoom`, `InvalidIdentifier`, `InvalidToken`, `InputError`.
    """
    room, user = args.room(room_id), args.local_user(user_id, store.server_name)
    if include not in ("all", "participated"):
        raise InputError(f"include is {include!r}: all or participated is wanted")
    request = ThreadsRequest(
        room_id=room,
        user_id=user,
        participated=include == "participated",
        start=END if from_ is None else PaginationToken.parse(from_, store.deployment_id),
        limit=page_limit(store, limit),
        rows_max=store.database.config.traversal_rows_max,
        ignored=args.ignored(ignored),
    )
    return await store.reads.run(
        lambda conn: thread_queries.threads(conn, request, store.deployment_id),
        tokens=(from_,),
        snapshot=True,
    )


@measured("event_near")
async def event_near(
    store: StoreCore, room_id: str, user_id: str, timestamp_ms: int, direction: Direction
) -> StoredEvent | None:
    """Return the visible event at a time, or the nearest before ("b") or after ("f") it.

    None if there is none. `UnknownRoom`.
    """
    room, user = args.room(room_id), args.local_user(user_id, store.server_name)
    at = args.whole(timestamp_ms, "timestamp_ms")
    rows_max = store.database.config.traversal_rows_max
    return await store.reads.run(
        lambda conn: timestamp_to_event.event_near(
            conn, room, user, at, direction, rows_max=rows_max
        )
    )


# --------------------------------------------------------------------------------------------------
# Calls that read events by their ids, and who may see them.


async def event(store: StoreCore, event_id: str, *, redact: bool = True) -> StoredEvent | None:
    """Return one event, or None if it is not stored.

    With ``redact`` False its content is returned even where a redaction took effect.
    """
    stored = await events(store, [event_id], redact=redact)
    return next(iter(stored.values()), None)


@measured("events")
async def events(
    store: StoreCore, event_ids: Iterable[str], *, redact: bool = True
) -> dict[EventId, StoredEvent]:
    """Return those of the events that are stored, by id."""
    requested = await args.many(args.possible, event_ids)
    if args.flag(redact, "redact") and store.database.config.cache_reads:
        return await store.caches.events.many(requested, lambda ids: _load(store, ids))
    return await store.reads.run(
        lambda conn: event_queries.events(conn, requested, redacted=redact)
    )


async def _load(store: StoreCore, event_ids: list[EventId]) -> dict[EventId, StoredEvent]:
    return await store.reads.run(lambda conn: event_queries.events(conn, event_ids))


async def visible_to_user(store: StoreCore, user_id: str, event_ids: Iterable[str]) -> set[EventId]:
    """Return those of the events that a local user may see.

    `InvalidIdentifier`, also for a user of another server.
    """
    user, ids = args.local_user(user_id, store.server_name), await args.many(args.events, event_ids)
    return await store.reads.run(lambda conn: visible_events.visible_to_user(conn, user, ids))


async def visible_to_server(
    store: StoreCore, server_name: str, event_ids: Iterable[str]
) -> set[EventId]:
    """Return those of the events that a server may have unredacted.

    A server that was never joined to a room gets its world-readable events only. While members of
    a room are missing, no server gets any of its events.
    `InvalidIdentifier`.
    """
    server, ids = args.server(server_name), await args.many(args.events, event_ids)
    return await store.reads.run(lambda conn: visible_events.visible_to_server(conn, server, ids))


async def explain_visibility(
    store: StoreCore, event_id: str, user_or_server: str
) -> explanations.Explanation:
    """Return why a local user, or a server, may see an event or may not.

    `Explanation.sentence` is the answer in words. `InvalidIdentifier`, `UnknownEvent`.
    """
    is_user, target = args.text(user_or_server).startswith("@"), args.event(event_id)
    reader = (
        args.local_user(user_or_server, store.server_name)
        if is_user
        else args.server(user_or_server)
    )
    return await store.reads.run(
        lambda conn: explanations.explain_visibility(conn, target, reader), snapshot=True
    )


# --------------------------------------------------------------------------------------------------
# Calls that make what clients get of events.


@measured("client_events")
async def client_events(
    store: StoreCore,
    user_id: str,
    events: Iterable[StoredEvent],
    *,
    device_id: str | None = None,
    with_room_id: bool = True,
    as_state: bool = False,
    ignored: args.Ignored = args.ACCOUNT_DATA,
) -> list[dict[str, Any]]:
    """Return events of any reads and rooms in the form of the client-server API, in their order.

    Each is a dict of its own with the known keys, pruned where it is redacted, and with an
    ``unsigned`` built here: ``age``, ``membership``, ``prev_content``, ``replaces_state``,
    ``prev_sender``, ``redacted_because``, ``m.relations``, and ``transaction_id`` for the device
    ``device_id`` that sent it. Treat the contents as immutable. Without ``with_room_id`` the room
    id is left out, as /sync does. Events of ``ignored`` users are in no ``m.relations``.

    An event that the user may not see is left out, and so is one that is not stored any more. The
    user's own memberships are always returned, unless they were rejected or soft-failed.

    ``as_state`` is for events of a state that the user may have, however large it is. State is not
    always visible as history, so nothing is checked: all events are returned. Give it only what a
    read of a state returned. The events have no ``membership``, ``prev_content`` and
    ``m.relations``.

    `InvalidIdentifier`, `InputError`.
    """
    user = args.local_user(user_id, store.server_name)
    listed = [
        args.instance(event, StoredEvent, "events") for event in args.listed(events, "events")
    ]
    request = queries.ClientRequest(
        user,
        None if device_id is None else args.text(device_id),
        args.ignored(ignored),
        with_room_id=args.flag(with_room_id, "with_room_id"),
        now_ms=time.time_ns() // 1_000_000,
    )
    read = queries.client_state if args.flag(as_state, "as_state") else queries.client_events
    if not listed:
        return []
    return await store.reads.run(lambda conn: read(conn, request, listed))
