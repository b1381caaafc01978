"""One homeserver: its store, its accounts, and its ways to other servers."""

from typing import Any

from storage import RoomId, Store
from storage.federation import HttpRemote, Memberships, Receiver, Responder, Sender

from .accounts import Accounts
from .web import Json


class Homeserver:
    """What the requests of clients and of other servers share."""

    def __init__(self, store: Store, accounts: Accounts, remote: HttpRemote) -> None:
        self.store, self.accounts, self.remote = store, accounts, remote
        self.receiver = Receiver(store, remote)
        self.sender = Sender(store, remote.send)
        self.memberships = Memberships(self.receiver, remote)
        self.responder = Responder(self.receiver, self.sender)
        self.directory = store.define_stream("directory")

    async def send(self, room: RoomId, sender: str, kind: str, content: Json, **how: Any) -> Json:
        """Make an event of a local user."""
        result = await self.store.send(room, sender, kind, content, **how)
        return {"event_id": result.event_id}
