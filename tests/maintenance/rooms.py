"""Rooms for maintenance, delivered to a store, and what verification says of them."""

from collections.abc import Iterable

from storage import Store
from storage.maintenance.verify import Finding, verify
from storage.testing import GeneratedRoom, RoomBuilder, Shape
from storage.testing.world import ALL_ACTIONS

SERVER = "s1.test"
LIVELY = Shape(
    "lively",
    servers=4,
    members=20,
    mix={**ALL_ACTIONS, "visibility": 3, "invite": 4, "leave": 4, "redaction": 4},
    fork_rate=0.1,
)
"""Everything that verification looks at, in a few hundred events."""


async def findings(store: Store, *room_ids: str) -> list[Finding]:
    return [
        finding
        async for finding in verify(
            store.database, server_name=store.server_name, room_ids=room_ids or None
        )
    ]


async def deliver(store: Store, room: GeneratedRoom, batch: int = 50) -> None:
    """Consecutive events of the same origin together, up to a number."""
    events = list(room.events)
    while events:
        origin = events[0].origin
        count = next(
            (at for at, event in enumerate(events[:batch]) if event.origin != origin),
            min(batch, len(events)),
        )
        part, events = events[:count], events[count:]
        given = {
            event.event_id: event.state_before for event in part if event.state_before is not None
        }
        await store.append(
            [event.pdu for event in part],
            room_version=room.room_version,
            origin=origin,
            state_before=given,
        )


async def everything_seen(
    store: Store, room: RoomBuilder, event_ids: Iterable[str]
) -> dict[str, set[str]]:
    """Who may see what, by asking the store for every user and server of the room."""
    ids = list(event_ids)
    users = sorted(
        {event.sender for event in room.events if event.sender.endswith(f":{store.server_name}")}
    )
    servers = sorted({event.sender.partition(":")[2] for event in room.events})
    seen: dict[str, set[str]] = {
        user: set(await store.visible_to_user(user, ids)) for user in users
    }
    return seen | {server: set(await store.visible_to_server(server, ids)) for server in servers}
