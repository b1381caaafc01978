"""The requests of other servers. Server-server API."""

import re
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from storage import EventId, RoomId, StateIds, UnknownEvent, event

from .remote import claim_of
from .server import MEMBER, server_of
from .web import Api, Call, Json, MatrixError, now_ms, on

LIMIT_MAX = 100
PARAMETER = re.compile(r'(\w+)="?([^",]*)"?')
REFUSED = ("invalid", "rejected", "missing_parents")


class Federation(Api):
    """The requests that a server signs. It gets no event that it may not see, or a redacted one."""

    prefix = "/_matrix/federation/{api:v1|v2}"

    async def identify(self, request: web.Request, body: Json) -> tuple[str, str]:
        """Return the server that signed the request."""
        content = None if request.method == "GET" else body
        header = request.headers.get("Authorization", "")
        given = dict(PARAMETER.findall(header.removeprefix("X-Matrix ")))
        if not given.keys() >= {"origin", "key", "sig"}:
            raise MatrixError(401, "M_UNAUTHORIZED", "the request is not signed")
        origin: str = given["origin"]
        claim = claim_of(request.method, request.raw_path, origin, self.home.name, content)
        claim["signatures"] = {origin: {given["key"]: given["sig"]}}
        await self.home.receiver.check_signed(origin, claim)
        self.home.sender.is_up(origin)
        return origin, ""

    @on("PUT", "/send/{txn}")
    async def transaction(self, call: Call, txn: str) -> Json:  # noqa: ARG002
        results = await self.home.receiver.transaction(call.sender, call.body.get("pdus", []))
        refused = {one: str(it.reason) for one, it in results.items() if it.outcome in REFUSED}
        return {"pdus": {one: {"error": refused[one]} if one in refused else {} for one in results}}

    @on("GET", "/make_{act:join|leave|knock}/{room}/{user}")
    async def make(self, call: Call, act: str, room: RoomId, user: str) -> Json:
        version = await self.home.version_of(room)
        if act != "leave" and version not in call.query.getall("ver", []):
            code = "M_INCOMPATIBLE_ROOM_VERSION"
            raise MatrixError(400, code, f"it has version {version}", room_version=version)
        if server_of(user) != call.sender:
            raise MatrixError(403, "M_FORBIDDEN", "that is a user of another server")
        content = {"membership": act}
        made = await self.store.template(room, user, MEMBER, content, state_key=user)
        return {"room_version": version, "event": made}

    @on("PUT", "/send_{act:join|leave|knock}/{room}/{event_id}")
    async def take(self, call: Call, act: str, room: RoomId, event_id: str) -> Json:
        pdu, version = call.body, await self.home.version_of(room)
        said = [pdu["type"], pdu["state_key"], pdu["content"]["membership"], pdu["room_id"]]
        said += [server_of(pdu["sender"]), event.event_id(pdu, version)]
        if said != [MEMBER, pdu["sender"], act, room, call.sender, event_id]:
            raise MatrixError(400, "M_INVALID_PARAM", "the event is not what the path says")
        if server_of(pdu["content"].get("join_authorised_via_users_server", "")) == self.home.name:
            pdu = event.sign(pdu, version, self.home.name, self.home.remote.key)
        stored = await self.home.accept(call.sender, pdu, version)
        others = await self.store.joined_servers(room) - {call.sender}
        self.home.sender.pass_on(others, (await self.store.events([stored]))[stored])
        if act != "join":
            return {"knock_room_state": await self.home.stripped_state(room)}
        state = await self._states(await self.store.state_ids(stored), "state")
        return {"event": pdu, "origin": self.home.name, **state}

    @on("PUT", "/invite/{room}/{event_id}")
    async def invite(self, call: Call, **_: str) -> Json:
        given = call.body["event"], call.body["room_version"], call.body["invite_room_state"]
        invited = await self.home.receiver.invited(*given)
        if not invited.is_welcome:
            raise MatrixError(403, "M_FORBIDDEN", str(invited.result.reason))
        return {"event": invited.pdu}

    @on("GET", "/event/{event_id}")
    async def one_event(self, call: Call, event_id: EventId) -> Json:
        return await self._history(call, await self._room_of(event_id), [event_id], 1)

    @on("GET", "/backfill/{room}")
    async def backfill(self, call: Call, room: RoomId) -> Json:
        ids, limit = call.query.getall("v"), min(int(call.query["limit"]), LIMIT_MAX)
        return await self._history(call, room, ids, limit)

    async def _history(self, call: Call, room: RoomId, ids: Iterable[Any], limit: int) -> Json:
        found = await self.store.backfill(room, ids, limit, server_name=call.sender)
        return {"origin_server_ts": now_ms(), "pdus": found}

    @on("POST", "/get_missing_events/{room}")
    async def missing_events(self, call: Call, room: RoomId) -> Json:
        ends = call.body["earliest_events"], call.body["latest_events"]
        limit, depth = min(call.body.get("limit", 10), LIMIT_MAX), call.body.get("min_depth", 0)
        how = {"limit": limit, "min_depth": depth, "server_name": call.sender}
        return {"events": await self.store.missing_events(room, *ends, **how)}

    @on("GET", "/state_ids/{room}")
    async def state_ids(self, call: Call, room: RoomId) -> Json:
        ids = await self.store.state_ids(await self._checked(call, room, call.query["event_id"]))
        return {"pdu_ids": ids.state_ids, "auth_chain_ids": ids.auth_chain_ids}

    @on("GET", "/state/{room}")
    async def state(self, call: Call, room: RoomId) -> Json:
        ids = await self.store.state_ids(await self._checked(call, room, call.query["event_id"]))
        return await self._states(ids, "pdus")

    @on("GET", "/event_auth/{room}/{event_id}")
    async def event_auth(self, call: Call, room: RoomId, event_id: str) -> Json:
        found = await self.store.event_auth(await self._checked(call, room, event_id))
        return {"auth_chain": found}

    async def _checked(self, call: Call, room: RoomId, event_id: str) -> EventId:
        """Return the event id if the event is of the room, and the server is in the room."""
        if await self._room_of(event_id) != room:
            raise UnknownEvent(event_id)
        if not await self.store.is_resident(call.sender, room):
            raise MatrixError(403, "M_FORBIDDEN", "the server is not in the room")
        return EventId(event_id)

    async def _room_of(self, event_id: str) -> RoomId:
        found = await self.store.event(EventId(event_id))
        if found is None:
            raise UnknownEvent(event_id)
        return found.room_id

    async def _states(self, ids: StateIds, name: str) -> Json:
        state, chain = [await self.store.events(one) for one in (ids.state_ids, ids.auth_chain_ids)]
        return {name: state.values(), "auth_chain": chain.values()}
