"""Homeservers in one process: each has a store in a database of its own, and a `Receiver`.

A request to another server is a call of its store. A test can make a request fail, answer late, or
lie (`Network.faults`), and decides which events are delivered.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from signedjson.key import encode_verify_key_base64
from signedjson.sign import sign_json

import storage
from storage import AppendResult, EventId, RoomId, ServerName, Store, UserId
from storage.database.connection import Observer
from storage.event import sign
from storage.federation import (
    JoinResult,
    JsonObject,
    Memberships,
    Receiver,
    ReceiverLimits,
    RemoteError,
    Responder,
)
from storage.queries.events import StoredEvent
from storage.testing import KEY_ID, signing_key, verify_key
from tests.federation.hanging import forever

T = TypeVar("T")
Json = dict[str, Any]
Fault = Callable[[Json], Awaitable[Json]]
QUICK = ReceiverLimits(request_seconds=60.0, key_retry_seconds=0.001)


def as_json(event: StoredEvent) -> Json:
    found: Json = json.loads(event.raw)
    return found


def published_keys(server: str, **changes: Any) -> Json:
    """The response of /key/v2/server."""
    body = {
        "server_name": server,
        "verify_keys": {KEY_ID: {"key": encode_verify_key_base64(verify_key(server))}},
        "old_verify_keys": {},
        "valid_until_ts": 4_000_000_000_000,
        **changes,
    }
    return dict(sign_json(body, server, signing_key(server)))


class Network:
    """All servers by name. ``faults`` change the answers of a (server, request)."""

    def __init__(self) -> None:
        self.servers: dict[str, Homeserver] = {}
        self.faults: dict[tuple[str, str], Fault] = {}
        self.calls: Counter[str] = Counter()
        self.limit = 20
        self.left = 0
        self.victim: asyncio.Future[Any] | None = None

    async def interrupted(self, job: Awaitable[T], number: int) -> T | None:
        """Run it, and cancel it when it makes the request of this number; None if it was."""
        task = self.victim = asyncio.ensure_future(job)
        self.left = number
        await asyncio.wait([task])
        self.left = 0
        return None if task.cancelled() else task.result()

    async def answer(self, server: str, request: str, make: Callable[[], Awaitable[Json]]) -> Json:
        self.calls[request] += 1
        self.left -= 1
        if self.left == 0 and self.victim is not None:
            self.victim.cancel()
            await forever()
        body: Json = {}
        try:
            body = await make()
        except (storage.InputError, KeyError) as error:
            if (server, request) not in self.faults:
                raise RemoteError(f"404: {error}") from error
        fault = self.faults.get((server, request))
        return body if fault is None else await fault(body)


class NetworkRemote:
    """The requests of one server."""

    def __init__(self, network: Network, own: str) -> None:
        self._network = network
        self._own = own

    def _store(self, server: str) -> Store:
        return self._network.servers[server].store

    async def get_missing_events(
        self,
        server: ServerName,
        room_id: RoomId,
        *,
        earliest: Sequence[EventId],
        latest: Sequence[EventId],
        limit: int,
        min_depth: int,
    ) -> Json:
        async def make() -> Json:
            found = await self._store(server).missing_events(
                room_id,
                earliest,
                latest,
                limit=min(limit, self._network.limit),
                min_depth=min_depth,
                server_name=self._own,
            )
            return {"events": [as_json(one) for one in found]}

        return await self._network.answer(server, "get_missing_events", make)

    async def event(self, server: ServerName, event_id: EventId) -> Json:
        async def make() -> Json:
            found = await self._store(server).events([event_id])
            return {"pdus": [as_json(found[event_id])]}

        return await self._network.answer(server, "event", make)

    async def state_ids(self, server: ServerName, room_id: RoomId, event_id: EventId) -> Json:
        async def make() -> Json:
            found = await self._store(server).state_ids(event_id)
            assert room_id
            return {
                "pdu_ids": list(found.state_ids),
                "auth_chain_ids": list(found.auth_chain_ids),
            }

        return await self._network.answer(server, "state_ids", make)

    async def state(self, server: ServerName, room_id: RoomId, event_id: EventId) -> Json:
        async def make() -> Json:
            assert room_id
            return await self._network.servers[server].state_at(event_id, "pdus")

        return await self._network.answer(server, "state", make)

    async def backfill(
        self, server: ServerName, room_id: RoomId, event_ids: Sequence[EventId], *, limit: int
    ) -> Json:
        async def make() -> Json:
            found = await self._store(server).backfill(
                room_id, event_ids, limit, server_name=self._own
            )
            return {"pdus": [as_json(one) for one in found]}

        return await self._network.answer(server, "backfill", make)

    async def event_auth(self, server: ServerName, room_id: RoomId, event_id: EventId) -> Json:
        async def make() -> Json:
            found = await self._store(server).event_auth(event_id)
            assert room_id
            return {"auth_chain": [as_json(one) for one in found]}

        return await self._network.answer(server, "event_auth", make)

    async def server_keys(self, server: ServerName) -> Json:
        async def make() -> Json:
            return published_keys(server)

        return await self._network.answer(server, "server_keys", make)

    def _responder(self, server: str) -> Responder:
        if server not in self._network.servers:
            raise RemoteError("no such server")
        return self._network.servers[server].responder

    async def make_join(
        self, server: ServerName, room_id: RoomId, user_id: UserId, *, versions: Sequence[str]
    ) -> Json:
        return await self._make(server, "join", room_id, user_id, versions)

    async def make_knock(
        self, server: ServerName, room_id: RoomId, user_id: UserId, *, versions: Sequence[str]
    ) -> Json:
        return await self._make(server, "knock", room_id, user_id, versions)

    async def make_leave(self, server: ServerName, room_id: RoomId, user_id: UserId) -> Json:
        return await self._make(server, "leave", room_id, user_id, ())

    async def _make(
        self, server: str, change: str, room_id: RoomId, user_id: str, versions: Sequence[str]
    ) -> Json:
        async def make() -> Json:
            responder = self._responder(server)
            return await responder.make_membership(self._own, change, room_id, user_id, versions)

        return await self._network.answer(server, f"make_{change}", make)

    async def send_join(
        self, server: ServerName, room_id: RoomId, event_id: EventId, pdu: JsonObject
    ) -> Json:
        return await self._send(server, "join", room_id, event_id, pdu)

    async def send_knock(
        self, server: ServerName, room_id: RoomId, event_id: EventId, pdu: JsonObject
    ) -> Json:
        return await self._send(server, "knock", room_id, event_id, pdu)

    async def send_leave(
        self, server: ServerName, room_id: RoomId, event_id: EventId, pdu: JsonObject
    ) -> Json:
        return await self._send(server, "leave", room_id, event_id, pdu)

    async def _send(
        self, server: str, change: str, room_id: RoomId, event_id: EventId, pdu: JsonObject
    ) -> Json:
        async def make() -> Json:
            responder = self._responder(server)
            return await responder.take_membership(self._own, change, room_id, event_id, pdu)

        return await self._network.answer(server, f"send_{change}", make)

    async def invite(
        self, server: ServerName, room_id: RoomId, event_id: EventId, body: JsonObject
    ) -> Json:
        async def make() -> Json:
            return await self._responder(server).invite(self._own, room_id, event_id, body)

        return await self._network.answer(server, "invite", make)


class Homeserver:
    """One server of the network."""

    def __init__(self, network: Network, name: str, store: Store, limits: ReceiverLimits) -> None:
        self.network = network
        self.name = name
        self.store = store
        self.remote = NetworkRemote(network, name)
        self.receiver = Receiver(store, self.remote, limits=limits)
        self.memberships = Memberships(self.receiver, self.remote)
        self.responder = Responder(self.receiver)
        self.sent: list[Json] = []

    def user(self, name: str = "user") -> UserId:
        return UserId(f"@{name}:{self.name}")

    async def say(self, room_id: RoomId, body: str, user: str = "user") -> Json:
        """Send a message and return it as the other servers get it."""
        return await self.do(room_id, user, "m.room.message", {"body": body})

    async def do(self, room_id: RoomId, user: str, type_: str, content: Json, **how: Any) -> Json:
        result = await self.store.send(room_id, self.user(user), type_, content, **how)
        event = await self.store.event(result.event_id)
        assert event is not None
        self.sent.append(as_json(event))
        return self.sent[-1]

    async def state_at(self, event_id: EventId, name: str) -> Json:
        """The state before an event and its auth chain."""
        ids = await self.store.state_ids(event_id)
        state = await self.store.events(ids.state_ids)
        chain = await self.store.events(ids.auth_chain_ids)
        return {
            name: [as_json(one) for one in state.values()],
            "auth_chain": [as_json(one) for one in chain.values()],
        }

    async def send_join(self, join: Json) -> Json:
        """Answer send_join."""
        results = await self.receiver.transaction(join["sender"].split(":", 1)[1], [join])
        [(event_id, result)] = results.items()
        assert result.outcome in ("stored", "duplicate"), result
        authoriser = join["content"].get("join_authorised_via_users_server", "")
        if authoriser.endswith(f":{self.name}"):
            join = sign(
                join, await self.version(join["room_id"]), self.name, signing_key(self.name)
            )
        return {**await self.state_at(event_id, "state"), "event": join}

    async def make_join(self, room_id: RoomId, resident: "Homeserver", user: str) -> Json:
        template = await resident.store.template(
            room_id,
            self.user(user),
            "m.room.member",
            {"membership": "join"},
            state_key=self.user(user),
        )
        return sign(template, await resident.version(room_id), self.name, signing_key(self.name))

    async def join(self, room_id: RoomId, resident: "Homeserver", user: str = "user") -> JoinResult:
        """Join over federation."""
        join = await self.make_join(room_id, resident, user)
        response = await resident.send_join(join)
        return await self.receiver.joined(
            resident.name, join, response, await resident.version(room_id)
        )

    async def version(self, room_id: RoomId) -> str:
        state = await self.store.current_state(room_id)
        created = await self.store.event(state["m.room.create", ""])
        assert created is not None
        return created.room_version

    async def receive(
        self, origin: "Homeserver", pdus: Iterable[Json]
    ) -> dict[EventId, AppendResult]:
        return await self.receiver.transaction(origin.name, list(pdus))

    async def fill(self, room_id: RoomId) -> None:
        """Backfill until nothing is missing; all servers can be reached again."""
        for name in self.network.servers:
            await self.store.server_up(name)
        for _ in range(50):
            if (await self.receiver.backfill(room_id, 100)).outcome == "nothing_missing":
                return
        raise AssertionError(await self.store.gaps(room_id))


async def start(
    stack: AsyncExitStack,
    dsns: Sequence[str],
    *,
    limits: ReceiverLimits = QUICK,
    observer: Observer | None = None,
) -> list[Homeserver]:
    """Open a server for each database: s1.test, s2.test, …"""
    network = Network()
    for number, dsn in enumerate(dsns, 1):
        name = f"s{number}.test"
        store = await stack.enter_async_context(
            storage.open(dsn, server_name=name, signing_key=signing_key(name), observer=observer)
        )
        network.servers[name] = Homeserver(network, name, store, limits)
    return list(network.servers.values())


async def shown(server: Homeserver, room_id: RoomId, user: str = "user") -> list[EventId]:
    """All events that a user of the server can page to, oldest first."""
    page = await server.store.messages(room_id, server.user(user), limit=1_000)
    assert page.gaps == [], page.gaps
    return [one.event_id for one in reversed(page.chunk)]


async def fail(_: Json) -> Json:
    raise RemoteError("500: out of order")
