"""The requests of other servers. Server-server API."""

from collections.abc import Iterable

from aiohttp import web

from storage import EventId, StateIds, StoredEvent, UnknownEvent, event

from .server import MEMBER, server_of
from .web import Api, Call, Json, MatrixError, now_ms, on

LIMIT_MAX = 100
REFUSED = ("invalid", "rejected", "missing_parents")


class Federation(Api):
    """The requests that a server signs. What it may not see is withheld or redacted."""

    prefix = "/_matrix/federation/{api:v1|v2}"

    async def identify(self, request: web.Request, body: Json) -> tuple[str, str]:
        """Return the server that signed the request."""
        content = None if request.method == "GET" else body
        header = request.headers.get("Authorization", "")
        origin = await self.home.remote.origin_of(request.method, request.raw_path, header, content)
        self.home.outgoing.is_up(origin)
        return origin, ""

    @on("PUT", "/send/{txn}")
    async def transaction(self, call: Call) -> Json:
        results = await self.home.receiver.transaction(call.sender, call.body.get("pdus", []))
        return {
            "pdus": {
                event_id: {"error": str(result.reason)} if result.outcome in REFUSED else {}
                for event_id, result in results.items()
            }
        }

    # ---------------------------------------------------------------------------------------------
    # memberships

    @on("GET", "/make_{act:join|leave|knock}/{room}/{user}")
    async def make(self, call: Call) -> Json:
        room, user, act = call.path["room"], call.path["user"], call.path["act"]
        version = await self.home.version_of(room)
        if act != "leave" and version not in call.query.getall("ver", []):
            code = "M_INCOMPATIBLE_ROOM_VERSION"
            raise MatrixError(400, code, f"it has version {version}", room_version=version)
        if server_of(user) != call.sender:
            raise MatrixError(403, "M_FORBIDDEN", "that is a user of another server")
        content = {"membership": act}
        made = await self.store.template(room, user, MEMBER, content, state_key=user)
        return {"room_version": version, "event": made}

    @on("PUT", "/send_{act:join|leave|knock}/{room}/{event}")
    async def take(self, call: Call) -> Json:
        room, act, pdu, origin = call.path["room"], call.path["act"], call.body, call.sender
        version = await self.home.version_of(room)
        said = [pdu["type"], pdu["state_key"], pdu["content"]["membership"], pdu["room_id"]]
        said += [server_of(pdu["sender"]), event.event_id(pdu, version)]
        if said != [MEMBER, pdu["sender"], act, room, origin, call.path["event"]]:
            raise MatrixError(400, "M_INVALID_PARAM", "the event is not what the path says")
        if server_of(pdu["content"].get("join_authorised_via_users_server", "")) == self.home.name:
            pdu = event.sign(pdu, version, self.home.name, self.home.remote.key)
        event_id = await self.home.accept(origin, pdu, version)
        self.home.outgoing.pass_on(await self.store.joined_servers(room) - {origin}, event_id)
        if act != "join":
            return {"knock_room_state": await self.home.stripped_state(room)}
        ids = await self.store.state_ids(event_id)
        return {"event": pdu, "origin": self.home.name, **await self._states(ids, "state")}

    @on("PUT", "/invite/{room}/{event}")
    async def invite(self, call: Call) -> Json:
        given = call.body["event"], call.body["room_version"], call.body["invite_room_state"]
        invited = await self.home.receiver.invited(*given)
        if not invited.is_welcome:
            raise MatrixError(403, "M_FORBIDDEN", str(invited.result.reason))
        return {"event": invited.pdu}

    # ---------------------------------------------------------------------------------------------
    # history and state

    @on("GET", "/event/{event}")
    async def one_event(self, call: Call) -> Json:
        event_id, server = call.path["event"], call.sender
        room = (await self._stored(event_id)).room_id
        return _pdus(await self.store.backfill(room, [event_id], 1, server_name=server))

    @on("GET", "/backfill/{room}")
    async def backfill(self, call: Call) -> Json:
        ids, limit = call.query.getall("v"), min(int(call.query["limit"]), LIMIT_MAX)
        room, server = call.path["room"], call.sender
        return _pdus(await self.store.backfill(room, ids, limit, server_name=server))

    @on("POST", "/get_missing_events/{room}")
    async def missing_events(self, call: Call) -> Json:
        found = await self.store.missing_events(
            call.path["room"],
            call.body["earliest_events"],
            call.body["latest_events"],
            limit=min(call.body.get("limit", 10), LIMIT_MAX),
            min_depth=call.body.get("min_depth", 0),
            server_name=call.sender,
        )
        return {"events": [one.json for one in found]}

    @on("GET", "/state_ids/{room}")
    async def state_ids(self, call: Call) -> Json:
        ids = await self.store.state_ids(await self._of_room(call, call.query["event_id"]))
        return {"pdu_ids": [*ids.state_ids], "auth_chain_ids": [*ids.auth_chain_ids]}

    @on("GET", "/state/{room}")
    async def state(self, call: Call) -> Json:
        ids = await self.store.state_ids(await self._of_room(call, call.query["event_id"]))
        return await self._states(ids, "pdus")

    @on("GET", "/event_auth/{room}/{event}")
    async def event_auth(self, call: Call) -> Json:
        found = await self.store.event_auth(await self._of_room(call, call.path["event"]))
        return {"auth_chain": [one.json for one in found]}

    async def _of_room(self, call: Call, event_id: str) -> EventId:
        """Return the event id if the event is of the room, and the server is in the room."""
        found = await self._stored(event_id)
        if found.room_id != call.path["room"]:
            raise UnknownEvent(event_id)
        if not await self.store.is_resident(call.sender, found.room_id):
            raise MatrixError(403, "M_FORBIDDEN", "the server is not in the room")
        return found.event_id

    async def _stored(self, event_id: str) -> StoredEvent:
        found = await self.store.event(EventId(event_id))
        if found is None:
            raise UnknownEvent(event_id)
        return found

    async def _states(self, ids: StateIds, name: str) -> Json:
        state = await self.store.events(ids.state_ids)
        chain = await self.store.events(ids.auth_chain_ids)
        lists = {name: state.values(), "auth_chain": chain.values()}
        return {key: [one.json for one in events] for key, events in lists.items()}


def _pdus(events: Iterable[StoredEvent]) -> Json:
    return {"origin_server_ts": now_ms(), "pdus": [one.json for one in events]}
