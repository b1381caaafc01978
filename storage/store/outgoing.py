"""Calls of the sender to other servers: what to send, and to whom."""

from storage import arguments as args
from storage.observability.instrument import measured
from storage.queries import outbox as queries
from storage.queries.outbox import Outbox
from storage.store.core import StoreCore, page_limit


@measured("outbox")
async def outbox(store: StoreCore, after: int, limit: int = 100) -> Outbox:
    """Return events of local users after a position, oldest first, with the servers to send to.

    These are the other servers that are joined at the event, and the server of the target of an
    invite, a kick or a ban. Rejected and soft-failed events, history and out-of-band memberships
    are left out. The result is a list of `Outgoing`, and its ``upto`` is the position to go on
    from, also when it is empty. No later event appears at or below ``upto``: with several writers
    it follows after at most `Config.follow_ms`. `InputError`.
    """
    position, most = args.position(after, "after"), page_limit(store, limit)
    async with store.database.connection() as conn:
        return await queries.outbox(
            conn,
            position,
            most,
            server_name=store.server_name,
            rows_max=store.database.config.traversal_rows_max,
        )
