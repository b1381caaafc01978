"""Calls of the sender to other servers: what to send, and to whom."""

from storage import arguments as args
from storage.database.connection import Connection
from storage.observability.instrument import measured
from storage.queries import outbox as queries
from storage.queries.outbox import Outbox, OutboxRead
from storage.store.core import StoreCore, page_limit
from storage.streams.position_poller import move_idle


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
        events, is_held = await _read(store, conn, position, most)
        if is_held and not store.reads.read_only:
            await move_idle(conn, store.streams)
            events, _ = await _read(store, conn, position, most)
        return events

    return await store.reads.of_primary(read)


async def _read(store: StoreCore, conn: Connection, after: int, limit: int) -> OutboxRead:
    return await queries.outbox(
        conn,
        after,
        limit,
        server_name=store.server_name,
        instance_name=store.instance_name,
        rows_max=store.database.config.traversal_rows_max,
    )
