"""Calls that read events by their ids, and who may see them."""

from collections.abc import Iterable

from storage import arguments as args
from storage.ids import EventId
from storage.observability.instrument import measured
from storage.queries import events as event_queries
from storage.queries import explain_visibility as explanations
from storage.queries import visible_events
from storage.queries.events import StoredEvent
from storage.store.core import StoreCore


async def event(store: StoreCore, event_id: str, *, redact: bool = True) -> StoredEvent | None:
    """Return one event, or None if it is not stored.

    With ``redact`` False its content is returned even where a redaction took effect.
    """
    found = await events(store, [event_id], redact=redact)
    return next(iter(found.values()), None)


@measured("events")
async def events(
    store: StoreCore, event_ids: Iterable[str], *, redact: bool = True
) -> dict[EventId, StoredEvent]:
    """Return those of the events that are stored, by id."""
    wanted = await args.many(args.possible, event_ids)
    if args.flag(redact, "redact") and store.database.config.cache_reads:
        return await store.caches.events.many(wanted, lambda ids: _load(store, ids))
    return await store.reads.run(lambda conn: event_queries.events(conn, wanted, redacted=redact))


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
    is_user, wanted = args.text(user_or_server).startswith("@"), args.event(event_id)
    reader = (
        args.local_user(user_or_server, store.server_name)
        if is_user
        else args.server(user_or_server)
    )
    return await store.reads.run(
        lambda conn: explanations.explain_visibility(conn, wanted, reader), snapshot=True
    )
