"""The work that requests of clients and of other servers have in common."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from storage import EventId, RoomId, Store, SyncFilter, UnknownRoom, event
from storage.federation import Receiver, Sender

from .accounts import Accounts
from .remote import Remote
from .web import Json, MatrixError, now_ms

MEMBER: Final = "m.room.member"
BACKFILL: Final = 100
SHOWN: Final = ("create", "join_rules", "name", "avatar", "topic", "encryption", "canonical_alias")
"""State that a user sees before joining, without the prefix "m.room."."""


class Homeserver:
    """One homeserver: a store, accounts, and the way to other servers."""

    def __init__(self, store: Store, accounts: Accounts, remote: Remote) -> None:
        self.store, self.accounts, self.remote, self.name = store, accounts, remote, remote.name
        self.receiver = Receiver(store, remote)
        self.sender = Sender(store, remote.send)
        self.directory = store.define_stream("directory")

    async def send(self, room: RoomId, sender: str, kind: str, content: Json, **how: Any) -> Json:
        """Make an event of a local user."""
        result = await self.store.send(room, sender, kind, content, **how)
        return {"event_id": result.event_id}

    async def invite(self, sender: str, room: RoomId, target: str, content: Json) -> None:
        """Invite a user. The server of the user signs the event first, unless it is in the room."""
        server = server_of(target)
        if await self.store.is_resident(server, room):
            await self.send(room, sender, MEMBER, content, state_key=target)
            return
        made = await self.store.template(room, sender, MEMBER, content, state_key=target)
        version = await self.version_of(room)
        pdu = event.sign(made, version, self.name, self.remote.key)
        shown = await self.stripped_state(room)
        body = {"event": pdu, "room_version": version, "invite_room_state": shown}
        path = "v2", "invite", room, event.event_id(pdu, version)
        answer = await self.remote.request(server, "PUT", *path, body=body)
        await self.accept(self.name, answer["event"], version)

    async def accept(self, origin: str, pdu: Json, version: str) -> EventId:
        """Store an event that must be accepted."""
        event_id = event.event_id(pdu, version)
        result = (await self.receiver.transaction(origin, [pdu]))[event_id]
        if result.outcome not in ("stored", "duplicate"):
            raise MatrixError(403, "M_FORBIDDEN", str(result.reason))
        return event_id

    async def change(self, user: str, room: RoomId, content: Json, via: Iterable[str]) -> None:
        """Join, leave or knock: in the room, or through a server that is in it."""
        with suppress(UnknownRoom):
            if await self.store.is_resident(self.name, room):
                await self.send(room, user, MEMBER, content, state_key=user)
                return
        error = MatrixError(404, "M_NOT_FOUND", "no server of the room is known")
        for server in await self._servers(user, room, via):
            try:
                await self._through(server, user, room, content)
            except MatrixError as refused:
                error = refused
            else:
                return
        raise error

    async def _through(self, server: str, user: str, room: RoomId, content: Json) -> None:
        act = content["membership"]
        ask = self.remote.request
        made = await ask(server, "GET", "v1", f"make_{act}", room, user, ver=[*event.ROOM_VERSIONS])
        version, template = made["room_version"], made["event"]
        fixed = {"type": MEMBER, "room_id": room, "sender": user, "state_key": user}
        content = {**template["content"], **content}
        template |= fixed | {"content": content, "origin_server_ts": now_ms()}
        pdu = event.sign(template, version, self.name, self.remote.key)
        path = "v1" if act == "knock" else "v2", f"send_{act}", room, event.event_id(pdu, version)
        answer = await ask(server, "PUT", *path, body=pdu)
        if act == "join":
            joined = await self.receiver.joined(server, pdu, answer, version)
            if joined.outcome == "refused":
                raise MatrixError(502, "M_UNKNOWN", f"{server}: {joined.fault}: {joined.reason}")
        elif act == "knock":
            await self.receiver.knocked(pdu, version, answer["knock_room_state"])
        else:
            await self.receiver.left(pdu, version)

    async def _servers(self, user: str, room: RoomId, via: Iterable[str]) -> list[str]:
        """Return servers that may be in a room: those named, that of the inviter, the room's."""
        found = await self.store.sync(user, filter=SyncFilter(rooms=[room]))
        shown = found.invite[room].invite_state if room in found.invite else ()
        inviters = [server_of(one["sender"]) for one in shown if one["state_key"] == user]
        candidates = [*via, *inviters, server_of(room)]
        return [one for one in dict.fromkeys(candidates) if one not in ("", self.name)]

    async def version_of(self, room: RoomId) -> str:
        """Return the version of a room."""
        [any_id, *_] = await self.store.forward_extremities(room)
        return (await self.store.events([any_id]))[any_id].room_version

    async def stripped_state(self, room: RoomId) -> list[Json]:
        """Return what another server's user sees of a room before joining it."""
        ids = await self.store.current_state(room, types=[f"m.room.{one}" for one in SHOWN])
        keys = ("type", "state_key", "sender", "content")
        events = await self.store.events(ids.values())
        return [{key: one.json[key] for key in keys} for one in events.values()]


def server_of(name: str) -> str:
    """Return the server name in a user id or a room id; "" if there is none."""
    return name.partition(":")[2]
