"""The requests of clients. Client-server API."""

import json
from typing import Any

from aiohttp import web

from storage import EventId, StateKey, UserId

from .server import MEMBER
from .shapes import client_events, sync
from .web import Api, Call, Json, MatrixError, now_ms, on

WAIT_MS_MAX = 30_000
VISIBILITY = "m.room.history_visibility"


class Doors(Api):
    """What needs no login and no signature, and what is not there."""

    @on("GET", "/_matrix/client/versions")
    async def versions(self, _: Call) -> Json:
        return {"versions": ["v1.1", "v1.2", "v1.3", "v1.4", "v1.5"]}

    @on("GET", "/_matrix/client/{api}/login")
    async def login_flows(self, _: Call) -> Json:
        return {"flows": [{"type": "m.login.password"}]}

    @on("POST", "/_matrix/client/{api}/login")
    async def log_in(self, call: Call) -> Json:
        given = call.body
        name = given["identifier"]["user"] if "identifier" in given else given["user"]
        return self.home.accounts.log_in(name, given["password"], given.get("device_id"))

    @on("POST", "/_matrix/client/{api}/register")
    async def register(self, call: Call) -> Json:
        given = call.body
        if given.get("auth", {}).get("type") != "m.login.dummy":
            flows = {"flows": [{"stages": ["m.login.dummy"]}], "params": {}, "session": "0"}
            raise MatrixError(401, "M_FORBIDDEN", "register in one stage", **flows)
        return self.home.accounts.register(
            given["username"], given["password"], given.get("device_id")
        )

    @on("GET", "/_matrix/key/v2/server")
    async def keys(self, _: Call) -> Json:
        return self.home.remote.own_keys()

    @on("*", "/{path:.*}")
    async def unrecognized(self, _: Call) -> Json:
        raise MatrixError(404, "M_UNRECOGNIZED", "this server does not have that")


class Client(Api):
    """The requests of users that are logged in."""

    prefix = "/_matrix/client/{api:r0|v1|v3}"

    async def identify(self, request: web.Request, body: Json) -> tuple[str, str]:  # noqa: ARG002
        """Return the user and the device of the access token."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        user, device = self.home.accounts.owner(token)
        if request.match_info.get("user", user) != user:
            raise MatrixError(403, "M_FORBIDDEN", "that is another user's")
        return user, device

    @on("GET", "/sync")
    async def sync(self, call: Call) -> Json:
        query = call.query
        wanted = json.loads(query.get("filter", "{}")).get("room", {}).get("timeline", {})
        return await sync(
            self.store,
            call.sender,
            call.device,
            query.get("since"),
            timeout_ms=min(int(query.get("timeout", 0)), WAIT_MS_MAX),
            timeline_limit=wanted.get("limit", 10),
            full_state=query.get("full_state") == "true",
        )

    @on("PUT", "/user/{user}/account_data/{type}")
    @on("PUT", "/user/{user}/rooms/{room}/account_data/{type}")
    async def set_account_data(self, call: Call) -> Json:
        kind, room = call.path["type"], call.path.get("room")
        await self.store.account_data.set(call.sender, kind, call.body, room_id=room)
        return {}

    @on("GET", "/user/{user}/account_data/{type}")
    @on("GET", "/user/{user}/rooms/{room}/account_data/{type}")
    async def account_data(self, call: Call) -> Any:
        found = await self.store.account_data.get(call.sender, room_id=call.path.get("room"))
        return _found(found.get(call.path["type"]))

    @on("PUT", "/sendToDevice/{type}/{txn}")
    async def send_to_device(self, call: Call) -> Json:
        inboxes: dict[UserId, dict[str, Json]] = {}
        for user, devices in call.body["messages"].items():
            for device, content in devices.items():
                for one in self.home.accounts.devices(user) if device == "*" else [device]:
                    message = {"type": call.path["type"], "sender": call.sender, "content": content}
                    inboxes.setdefault(user, {})[one] = message
        await self.store.to_device.send(inboxes)
        return {}

    @on("POST", "/rooms/{room}/receipt/{kind}/{event}")
    async def receipt(self, call: Call) -> Json:
        room, kind, event_id = (call.path[name] for name in ("room", "kind", "event"))
        await self.store.receipts.set(room, kind, call.sender, event_id, {"ts": now_ms()})
        return {}

    # ---------------------------------------------------------------------------------------------
    # rooms

    @on("POST", "/createRoom")
    async def create_room(self, call: Call) -> Json:
        given = call.body
        public = given.get("preset", given.get("visibility")) in ("public_chat", "public")
        state: dict[StateKey, Json] = {
            ("m.room.join_rules", ""): {"join_rule": "public" if public else "invite"},
            (VISIBILITY, ""): {"history_visibility": "shared"},
            **{(f"m.room.{key}", ""): {key: given[key]} for key in {"name", "topic"} & {*given}},
        }
        for one in given.get("initial_state", ()):
            state[one["type"], one.get("state_key", "")] = one["content"]
        room = await self.store.create_room(
            call.sender,
            room_version=given.get("room_version", "12"),
            content=given.get("creation_content"),
            initial_state=[(*key, content) for key, content in state.items()],
        )
        for user in given.get("invite", ()):
            await self.home.invite(call.sender, room, user, {"membership": "invite"})
        return {"room_id": room}

    @on("POST", "/{act:join|knock}/{room}")
    @on("POST", "/rooms/{room}/{act:join|leave|invite|kick|ban|unban}")
    async def change_membership(self, call: Call) -> Json:
        room, act = call.path["room"], call.path["act"]
        content = {key: value for key, value in call.body.items() if key == "reason"}
        content["membership"] = {"kick": "leave", "unban": "leave"}.get(act, act)
        if act in ("join", "knock", "leave"):
            via = [one for key in ("via", "server_name") for one in call.query.getall(key, [])]
            await self.home.change(call.sender, room, content, via)
        elif act == "invite":
            await self.home.invite(call.sender, room, call.body["user_id"], content)
        else:
            target = call.body["user_id"]
            await self.home.send(room, call.sender, MEMBER, content, state_key=target)
        return {"room_id": room} if act in ("join", "knock") else {}

    # ---------------------------------------------------------------------------------------------
    # events

    @on("PUT", "/rooms/{room}/send/{type}/{txn}")
    @on("PUT", "/rooms/{room}/redact/{redacts}/{txn}")
    @on("PUT", "/rooms/{room}/state/{type}{key:(/[^/]*)?}")
    async def send(self, call: Call) -> Json:
        path, kind = call.path, call.path.get("type", "m.room.redaction")
        how = {"redacts": path.get("redacts")}
        if "txn" in path:
            how["transaction"] = call.device, path["txn"]
        else:
            how["state_key"] = path["key"][1:]
        return await self.home.send(path["room"], call.sender, kind, call.body, **how)

    async def _state(self, call: Call) -> dict[StateKey, EventId]:
        """Return the state of a room: now, or when the user left."""
        room = call.path["room"]
        state = await self.store.current_state(room)
        match await self.store.membership(room, call.sender):
            case "join":
                return state
            case "leave" | "ban":
                return await self.store.state_before(state[MEMBER, call.sender])
        raise MatrixError(403, "M_FORBIDDEN", "the user was never in the room")

    @on("GET", "/rooms/{room}/state")
    async def state(self, call: Call) -> list[Json]:
        return await client_events(self.store, (await self._state(call)).values())

    @on("GET", "/rooms/{room}/state/{type}{key:(/[^/]*)?}")
    async def state_event(self, call: Call) -> Any:
        state, key = await self._state(call), (call.path["type"], call.path["key"][1:])
        [found] = await client_events(self.store, [_found(state.get(key))])
        return found["content"]

    @on("GET", "/rooms/{room}/members")
    async def members(self, call: Call) -> Json:
        await self._state(call)
        how = {name: call.query.get(name) for name in ("at", "membership", "not_membership")}
        found = await self.store.members(call.path["room"], **how)
        return {"chunk": await client_events(self.store, found)}

    @on("GET", "/rooms/{room}/messages")
    async def messages(self, call: Call) -> Json:
        room, query, how = call.path["room"], call.query, _page(call)
        how |= {"to": query.get("to"), "direction": query.get("dir", "b")}
        page = await self.store.messages(room, call.sender, **how)
        if page.gaps and await self.home.backfill(room):
            page = await self.store.messages(room, call.sender, **how)
        chunk = await client_events(self.store, page.chunk)
        return {"start": page.start, "chunk": chunk} | ({"end": page.end} if page.end else {})

    @on("GET", "/rooms/{room}/context/{event}")
    async def context(self, call: Call) -> Json:
        limit = int(call.query.get("limit", 10))
        found = await self.store.context(call.path["event"], call.sender, limit=limit)
        answer: Json = {"start": found.start, "end": found.end}
        for name in ("events_before", "events_after", "state"):
            answer[name] = await client_events(self.store, getattr(found, name))
        [answer["event"]] = await client_events(self.store, [found.event])
        return answer

    @on("GET", "/rooms/{room}/relations/{event}{rel_type:(/[^/]*)?}{type:(/[^/]*)?}")
    async def relations(self, call: Call) -> Json:
        how = _page(call) | {"rel_type": call.path["rel_type"][1:] or None}
        how |= {"event_type": call.path["type"][1:] or None}
        page = await self.store.relations(call.path["event"], call.sender, **how)
        chunk = await client_events(self.store, page.chunk)
        return {"chunk": chunk} | ({"next_batch": page.end} if page.end else {})


def _page(call: Call) -> Json:
    return {"from_": call.query.get("from"), "limit": int(call.query.get("limit", 10))}


def _found(value: Any) -> Any:
    if value is None:
        raise MatrixError(404, "M_NOT_FOUND", "it is not there")
    return value
