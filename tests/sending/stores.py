"""Stores and rooms for tests of local events."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import storage
from storage import Store
from storage.ids import RoomId
from storage.persist import SendResult
from storage.testing import signing_key

SERVER: Final = "s1.test"
ALICE, BOB, CAROL = "@alice:s1.test", "@bob:s1.test", "@carol:s1.test"
REMOTE: Final = "@remote:s2.test"
PUBLIC: Final = ("m.room.join_rules", "", {"join_rule": "public"})
TEXT: Final = {"msgtype": "m.text", "body": "hello"}


@asynccontextmanager
async def opened(dsn: str, instance_name: str = "main", **options: Any) -> AsyncIterator[Store]:
    """Open a store with a key, as a homeserver's process does."""
    async with storage.open(
        dsn,
        server_name=SERVER,
        instance_name=instance_name,
        signing_key=signing_key(SERVER),
        **options,
    ) as store:
        yield store


async def joined(store: Store, room_id: RoomId, *users: str) -> None:
    """Let users join a room."""
    for user in users:
        await store.send(room_id, user, "m.room.member", {"membership": "join"}, state_key=user)


async def say(
    store: Store, room_id: RoomId, transaction: Any = None, sender: str = ALICE, **content: Any
) -> SendResult:
    """Send a message."""
    return await store.send(
        room_id, sender, "m.room.message", content or TEXT, transaction=transaction
    )
