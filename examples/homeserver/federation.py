"""The requests of other servers. Server-server API."""

from aiohttp import web

from storage import EventId, RoomId

from .web import Api, Call, Json, on


class Federation(Api):
    """The requests that a server signs. `call.sender` is that server."""

    prefix = "/_matrix/federation/{api:v1|v2}"

    async def identify(self, request: web.Request, body: Json) -> tuple[str, str]:
        """Return the server that signed the request."""
        sent = None if request.method == "GET" else body
        auth, check = request.headers.get("Authorization", ""), self.home.receiver.check_request
        origin = await check(request.method, request.raw_path, auth, sent)
        self.home.sender.is_up(origin)
        return origin, ""

    @on("PUT", "/send/{txn}")
    async def transaction(self, call: Call, txn: str) -> Json:  # noqa: ARG002
        return await self.home.responder.transaction(call.sender, call.body)

    @on("GET", "/make_{act:join|leave|knock}/{room}/{user}")
    async def make(self, call: Call, act: str, room: RoomId, user: str) -> Json:
        versions = call.query.getall("ver", [])
        return await self.home.responder.make_membership(call.sender, act, room, user, versions)

    @on("PUT", "/send_{act:join|leave|knock}/{room}/{event}")
    async def take(self, call: Call, act: str, room: RoomId, event: str) -> object:
        omits, take = call.query.get("omit_members") == "true", self.home.responder.take_membership
        found = await take(call.sender, act, room, event, call.body, omit_members=omits)
        return [200, found] if call.api == "v1" and act != "knock" else found

    @on("PUT", "/invite/{room}/{event}")
    async def invite(self, call: Call, room: RoomId, event: str) -> object:
        body, is_old = call.body, call.api == "v1"  # of room versions 1 and 2
        if is_old:
            shown = body.get("unsigned", {}).get("invite_room_state", [])
            body = {"event": body, "room_version": "1", "invite_room_state": shown}
        found = await self.home.responder.invite(call.sender, room, event, body)
        return [200, found] if is_old else found

    @on("GET", "/event/{event}")
    async def event(self, call: Call, event: EventId) -> Json:
        return await self.home.responder.event(call.sender, event)

    @on("GET", "/backfill/{room}")
    async def backfill(self, call: Call, room: RoomId) -> Json:
        ids, limit = call.query.getall("v"), int(call.query["limit"])
        return await self.home.responder.backfill(call.sender, room, ids, limit)

    @on("POST", "/get_missing_events/{room}")
    async def missing_events(self, call: Call, room: RoomId) -> Json:
        return await self.home.responder.missing_events(call.sender, room, call.body)

    @on("GET", "/state_ids/{room}")
    async def state_ids(self, call: Call, room: RoomId) -> Json:
        return await self.home.responder.state_ids(call.sender, room, call.query["event_id"])

    @on("GET", "/state/{room}")
    async def state(self, call: Call, room: RoomId) -> Json:
        return await self.home.responder.state(call.sender, room, call.query["event_id"])

    @on("GET", "/event_auth/{room}/{event}")
    async def event_auth(self, call: Call, room: RoomId, event: str) -> Json:
        return await self.home.responder.event_auth(call.sender, room, event)

    @on("GET", "/timestamp_to_event/{room}")
    async def timestamp_to_event(self, call: Call, room: RoomId) -> Json:
        at, direction = int(call.query["ts"]), call.query["dir"]
        return await self.home.responder.timestamp_to_event(call.sender, room, at, direction)
