"""Calls about missing events: which ones are missing, and when to request them again."""

from collections.abc import Iterable
from time import time_ns

from storage import arguments as args
from storage.database.connection import Connection
from storage.queries import gaps as queries
from storage.queries.gaps import OpenGap
from storage.store.core import StoreCore


async def gaps(store: StoreCore, room_id: str) -> list[OpenGap]:
    """Return the missing parents of stored events, the latest first. `UnknownRoom`.

    Each says what is known of it, and when to request it again.
    """
    room = args.room(room_id)
    return await store.reads.run(lambda conn: queries.gaps(conn, room, time_ns() // 1_000_000))


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
        await queries.gap_failed(conn, room, ids, why, servers=servers, now_ms=now_ms)

    with store.reads.writing():
        await store.database.run(record)


async def server_up(store: StoreCore, server_name: str) -> None:
    """Record that a server can be reached again, which ends the pauses of its failed gaps.

    Replication calls this for REMOTE_SERVER_UP.
    """
    server = args.server(server_name)
    with store.reads.writing():
        async with store.database.connection() as conn:
            await queries.server_up(conn, server)
