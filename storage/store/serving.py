"""Calls that make what clients get of events."""

import time
from collections.abc import Iterable
from typing import Any

from storage import arguments as args
from storage.observability.instrument import measured
from storage.queries import client_events as queries
from storage.queries.events import StoredEvent
from storage.store.core import StoreCore


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
    listed = [args.instance(one, StoredEvent, "events") for one in args.listed(events, "events")]
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
