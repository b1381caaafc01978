"""Calls that answer other servers: backfill, missing events, state, and auth chains."""

from collections.abc import Iterable
from time import time_ns

from storage import arguments as args
from storage.database.connection import Connection
from storage.ids import EventId, ServerName
from storage.observability.instrument import measured
from storage.queries import auth_chain
from storage.queries import federation as auth_queries
from storage.queries import federation as queries
from storage.queries import gaps as gap_queries
from storage.queries import outbox as outbox_queries
from storage.queries import timestamp_to_event as timestamps
from storage.queries.events import StoredEvent
from storage.queries.federation import StateIds
from storage.queries.gaps import OpenGap
from storage.queries.outbox import Outbox, OutboxRead
from storage.queries.pagination.page import Direction
from storage.store.core import StoreCore, page_limit
from storage.streams.position_poller import move_idle


async def is_resident(store: StoreCore, server_name: str, room_id: str) -> bool:
    """Return whether a user of the server is joined to the room now. `UnknownRoom`.

    Use it to refuse requests of a server that has left. While the state of the room is partial, a
    server that was in the room counts as joined until a user of it has left.
    """
    server, room = args.server(server_name), args.room(room_id)
    return await store.reads.run(lambda conn: queries.is_resident(conn, server, room))


@measured("backfill")
async def backfill(
    store: StoreCore,
    room_id: str,
    from_ids: Iterable[str],
    limit: int,
    *,
    server_name: str | None = None,
) -> list[StoredEvent]:
    """Return these events and their ancestors, newest first. `UnknownRoom`.

    With ``server_name``, events that the server may not see are redacted, in ``json`` and in
    ``raw``. A server that was never joined to the room gets world-readable events only.
    `PartialState` for a server while members of the room are missing.
    """
    room, ids, server = (
        args.room(room_id),
        await args.many(args.events, from_ids),
        _server(server_name),
    )
    most = page_limit(store, limit)
    rows_max = store.database.config.traversal_rows_max
    return await store.reads.run(
        lambda conn: queries.backfill(conn, room, ids, most, server_name=server, rows_max=rows_max)
    )


@measured("missing_events")
async def missing_events(
    store: StoreCore,
    room_id: str,
    earliest: Iterable[str],
    latest: Iterable[str],
    *,
    limit: int = 10,
    min_depth: int = 0,
    server_name: str | None = None,
) -> list[StoredEvent]:
    """Return the events between ``earliest`` and ``latest``, without both, oldest first.

    The walk is breadth first from the latest. ``server_name`` is that of `backfill`.
    `UnknownRoom`, `PartialState` as there.
    """
    room = args.room(room_id)
    early = await args.many(args.events, earliest)
    late = await args.many(args.events, latest)
    server, most = _server(server_name), page_limit(store, limit)
    lowest = args.whole(min_depth, "min_depth")
    rows_max = store.database.config.traversal_rows_max
    return await store.reads.run(
        lambda conn: queries.missing_events(
            conn,
            room,
            early,
            late,
            limit=most,
            min_depth=lowest,
            server_name=server,
            rows_max=rows_max,
        )
    )


@measured("timestamp_to_event")
async def timestamp_to_event(
    store: StoreCore,
    room_id: str,
    timestamp_ms: int,
    direction: Direction,
    *,
    server_name: str | None = None,
) -> StoredEvent | None:
    """Return the event at a time, or the nearest before ("b") or after ("f") it, for a server.

    The time is `origin_server_ts`. The result is an accepted event that the server may have whole.
    None: the `Config.traversal_rows_max` nearest events have none. Refuse a server that is not in
    the room first (`is_resident`). `UnknownRoom`, `InputError`, `PartialState` for a server.
    """
    room, at = args.room(room_id), args.whole(timestamp_ms, "timestamp_ms")
    server, rows_max = _server(server_name), store.database.config.traversal_rows_max
    return await store.reads.run(
        lambda conn: timestamps.timestamp_to_event(
            conn, room, at, direction, server_name=server, rows_max=rows_max
        )
    )


def _server(server_name: str | None) -> ServerName | None:
    return None if server_name is None else args.server(server_name)


@measured("state_ids")
async def state_ids(store: StoreCore, event_id: str) -> StateIds:
    """Return the state before an event, and the auth chain of that state.

    `UnknownEvent`, `StateUnknown` for an outlier, `PartialState` for a state that lacks members.
    """
    target = args.event(event_id)
    return await store.reads.run(lambda conn: auth_queries.state_ids(conn, target))


@measured("event_auth")
async def event_auth(store: StoreCore, event_id: str) -> list[StoredEvent]:
    """Return the auth chain of an event, without the event, as far as it is of the event's room.

    `UnknownEvent`.
    """
    target = args.event(event_id)
    return await store.reads.run(lambda conn: auth_queries.event_auth(conn, target))


async def auth_chain_ids(store: StoreCore, event_ids: Iterable[str]) -> set[EventId]:
    """Return the union of the auth chains of these events. `UnknownEvent`."""
    ids, memory = await args.many(args.events, event_ids), store.caches.chains
    return await store.reads.run(lambda conn: auth_chain.auth_chain_ids(conn, ids, memory))


async def auth_chain_difference(store: StoreCore, sets: Iterable[Iterable[str]]) -> set[EventId]:
    """Return the events that are in the auth chains of some of the sets, but not of all of them.

    `UnknownEvent`.
    """
    ids = [await args.many(args.events, event_ids) for event_ids in args.listed(sets, "sets")]
    memory = store.caches.chains
    return await store.reads.run(lambda conn: auth_chain.auth_chain_difference(conn, ids, memory))


# --------------------------------------------------------------------------------------------------
# Calls about missing events: which ones are missing, and when to request them again.


async def gaps(store: StoreCore, room_id: str) -> list[OpenGap]:
    """Return the missing parents of stored events, the latest first. `UnknownRoom`.

    Each says what is known of it, and when to request it again.
    """
    room = args.room(room_id)
    return await store.reads.run(lambda conn: gap_queries.gaps(conn, room, time_ns() // 1_000_000))


async def gap_failed(
    store: StoreCore,
    room_id: str,
    event_ids: Iterable[str],
    reason: str,
    *,
    server_names: Iterable[str] = (),
) -> None:
    """Record that other servers did not return these missing events. `UnknownRoom`.

    Each failure doubles `OpenGap.retry_after_ms`. The pause ends when one of the ``server_names``
    that were tried is up again (`server_up`). Ids that are no gaps are ignored.
    """
    room, ids, why = args.room(room_id), await args.many(args.events, event_ids), args.text(reason)
    servers = [args.server(name) for name in args.texts(server_names, "server_names")]
    now_ms = time_ns() // 1_000_000

    async def record(conn: Connection) -> None:
        await gap_queries.gap_failed(conn, room, ids, why, servers=servers, now_ms=now_ms)

    with store.reads.writing():
        await store.database.run(record)


async def server_up(store: StoreCore, server_name: str) -> None:
    """Record that a server can be reached again, which ends the pauses of its failed gaps.

    Replication calls this for REMOTE_SERVER_UP.
    """
    server = args.server(server_name)
    with store.reads.writing():
        async with store.database.connection() as conn:
            await gap_queries.server_up(conn, server)


# --------------------------------------------------------------------------------------------------
# Calls of the sender to other servers: what to send, and to whom.


@measured("outbox")
async def outbox(store: StoreCore, after: int, limit: int = 100) -> Outbox:
    """Return events of local users after a position, oldest first, with the servers to send to.

    These are the other servers that are joined at the event, and the server of the target of an
    invite, a kick or a ban. Rejected and soft-failed events, history and out-of-band memberships
    are left out. The result is a list of `Outgoing`, and its ``upto`` is the position to go on
    from, also when it is empty. No later event appears at or below ``upto``: it waits for other
    open stores that are idle, for at most their `Config.follow_ms`. `InputError`.
    """
    position, most = args.position(after, "after"), page_limit(store, limit)

    async def read(conn: Connection) -> Outbox:
        events, is_blocked = await _read(store, conn, position, most)
        if is_blocked and not store.reads.read_only:
            await move_idle(conn, store.streams)
            events, _ = await _read(store, conn, position, most)
        return events

    return await store.reads.of_primary(read)


async def _read(store: StoreCore, conn: Connection, after: int, limit: int) -> OutboxRead:
    return await outbox_queries.outbox(
        conn,
        after,
        limit,
        server_name=store.server_name,
        instance_name=store.instance_name,
        rows_max=store.database.config.traversal_rows_max,
    )
