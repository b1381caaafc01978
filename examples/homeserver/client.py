"""The requests of clients. Client-server API."""

import json
from typing import Any, Final

from aiohttp import web

import storage
from storage import EventId, RoomId, StateKey, StoredEvent, SyncFilter, UserId, responses
from storage.federation import published_keys

from .web import Api, Call, Json, MatrixError, now_ms, on

WAIT_MS_MAX = 30_000
BACKFILL = 100
ROOMS_MAX = 50
MEMBER = "m.room.member"
VISIBILITY = "m.room.history_visibility"
VERSIONS: Final = [f"v1.{minor}" for minor in range(1, 12)]
FEATURES: Final = {"org.matrix.simplified_msc3575": True}
LAZY: Final = "lazy_load_members"


class Doors(Api):
    """Requests without a login and a signature, and those that this server does not have."""

    @on("GET", "/_matrix/client/versions")
    async def versions(self, _: Call) -> Json:
        return {"versions": VERSIONS, "unstable_features": FEATURES}

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
        name, password = given["username"], given["password"]
        return self.home.accounts.register(name, password, given.get("device_id"))

    @on("GET", "/_matrix/key/v2/server")
    async def keys(self, _: Call) -> Json:
        return published_keys(self.home.remote.server_name, self.home.remote.signing_key)

    @on("OPTIONS", "/{path:.*}")
    async def preflight(self, _: Call, path: str) -> None:
        """Let a browser send any request. The headers of each response say so."""

    @on("*", "/{path:.*}")
    async def unrecognized(self, _: Call, path: str) -> None:
        raise MatrixError(404, "M_UNRECOGNIZED", f"this server does not have /{path}")


class UserApi(Api):
    """Requests of users that are logged in."""

    prefix = "/_matrix/client/{api:r0|v1|v3|v4|unstable}"

    async def identify(self, request: web.Request, body: Json) -> tuple[str, str]:  # noqa: ARG002
        """Return the user and the device of the access token."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        user, device = self.home.accounts.owner(token)
        if request.match_info.get("user", user) != user:
            raise MatrixError(403, "M_FORBIDDEN", "that is another user's")
        return user, device


class Client(UserApi):
    """Syncing, account data, messages to devices, and rooms."""

    @on("GET", "/sync")
    async def sync(self, call: Call) -> Json:
        query, since = call.query, call.query.get("since")
        wanted = json.loads(query.get("filter", "{}")).get("room", {})
        if since and "to_device" in (reached := self.store.positions_of(since)):
            await self.store.to_device.delete(call.sender, call.device, reached["to_device"])
        how: Json = {
            "timeout_ms": min(int(query.get("timeout", 0)), WAIT_MS_MAX),
            "timeline_limit": wanted.get("timeline", {}).get("limit", 10),
            "full_state": query.get("full_state") == "true",
            "device_id": call.device,
            "filter": SyncFilter(lazy_load_members=bool(wanted.get("state", {}).get(LAZY))),
        }
        try:
            found = await self.store.sync(call.sender, since=since, **how)
        except storage.ResyncNeeded:  # clients do not begin again by themselves
            found = await self.store.sync(call.sender, **how)
        how = {"use_state_after": query.get("use_state_after") == "true"}
        return await responses.sync(self.store, call.sender, found, device_id=call.device, **how)

    @on("POST", "/sync")
    @on("POST", "/{old:org.matrix.simplified_msc3575}/sync")
    async def sliding_sync(self, call: Call, old: str = "") -> Json:
        given, device = {**call.body, **call.query}, call.device
        request = responses.sliding_request(given)
        if received := responses.received_upto(given):
            await self.store.to_device.delete(call.sender, device, received)
        wait_ms = min(int(given.get("timeout", 0)), WAIT_MS_MAX)
        how: Json = {"pos": given.get("pos"), "timeout_ms": wait_ms, "device_id": device}
        found = await self.store.sliding_sync(call.sender, request, **how)
        how = {"device_id": device, "unstable": bool(old)}
        return await responses.sliding_sync(self.store, call.sender, request, found, **how)

    @on("GET", "/pushrules/")
    async def push_rules(self, _: Call) -> Json:
        return {"global": {}}

    @on("PUT", "/user/{user}/account_data/{kind}")
    @on("PUT", "/user/{user}/rooms/{room}/account_data/{kind}")
    async def set_account_data(self, call: Call, user: UserId, kind: str, room: Any = None) -> None:
        await self.store.account_data.set(user, kind, call.body, room_id=room)

    @on("GET", "/user/{user}/account_data/{kind}")
    @on("GET", "/user/{user}/rooms/{room}/account_data/{kind}")
    async def account_data(self, _: Call, user: UserId, kind: str, room: Any = None) -> Any:
        return _found(await self.store.account_data.get(user, room_id=room), kind)

    @on("PUT", "/sendToDevice/{kind}/{txn}")
    async def send_to_device(self, call: Call, kind: str, txn: str) -> None:  # noqa: ARG002
        inboxes: dict[UserId, dict[str, Json]] = {}
        for user, devices in call.body["messages"].items():
            for device, content in devices.items():
                message = {"type": kind, "sender": call.sender, "content": content}
                for one in self.home.accounts.devices(user) if device == "*" else [device]:
                    inboxes.setdefault(user, {})[one] = message
        await self.store.to_device.send(inboxes)

    @on("POST", "/rooms/{room}/receipt/{kind}/{event}")
    async def receipt(self, call: Call, room: RoomId, kind: str, event: EventId) -> None:
        if event not in await self.store.visible_to_user(call.sender, [event]):
            raise MatrixError(403, "M_FORBIDDEN", f"{call.sender} may not see {event}")
        at, thread = {"ts": now_ms()}, call.body.get("thread_id")
        await self.store.receipts.set(room, kind, call.sender, event, at, thread_id=thread)

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
        if given.get("visibility") == "public":
            await self.home.directory.publish(room, "public")
        for user in given.get("invite", ()):
            await self.home.memberships.invite(call.sender, room, user)
        return {"room_id": room}

    @on("POST", "/{act:join|knock}/{room}")
    @on("POST", "/rooms/{room}/{act:join|leave|invite|kick|ban|unban|forget}")
    async def change_membership(self, call: Call, room: RoomId, act: str) -> Json:
        content = {key: value for key, value in call.body.items() if key == "reason"}
        members, user = self.home.memberships, call.sender
        if act == "forget":
            await self.store.forget(user, room)
        elif act == "invite":
            await members.invite(user, room, call.body["user_id"], content=content)
        elif act in ("join", "knock", "leave"):
            change = {"join": members.join, "knock": members.knock, "leave": members.leave}[act]
            via = [one for key in ("via", "server_name") for one in call.query.getall(key, [])]
            await change(user, room, via, content=content)
        else:
            content["membership"] = "ban" if act == "ban" else "leave"
            await self.home.send(room, user, MEMBER, content, state_key=call.body["user_id"])
        return {"room_id": room} if act in ("join", "knock") else {}

    @on("PUT", "/rooms/{room}/send/{kind}/{txn}")
    @on("PUT", "/rooms/{room}/redact/{redacts}/{txn}")
    async def send(self, call: Call, room: RoomId, txn: str, **path: str) -> Json:
        kind = path.pop("kind", "m.room.redaction")
        how = {"transaction": (call.device, txn), **path}
        return await self.home.send(room, call.sender, kind, call.body, **how)

    @on("PUT", "/rooms/{room}/state/{kind}{key:(/[^/]*)?}")
    async def set_state(self, call: Call, room: RoomId, kind: str, key: str) -> Json:
        return await self.home.send(room, call.sender, kind, call.body, state_key=key[1:])

    @on("GET", "/rooms/{room}/state")
    async def state(self, call: Call, room: RoomId) -> list[Json]:
        state = await responses.room_state(self.store, call.sender, room)
        events = await self.store.events(state.values())
        return await self.store.client_events(call.sender, events.values(), as_state=True)

    @on("GET", "/rooms/{room}/state/{kind}{key:(/[^/]*)?}")
    async def state_event(self, call: Call, room: RoomId, kind: str, key: str) -> Any:
        state = await responses.room_state(self.store, call.sender, room)
        event_id = _found(state, (kind, key[1:]))
        return (await self.store.events([event_id]))[event_id].json["content"]

    @on("GET", "/rooms/{room}/members")
    async def members(self, call: Call, room: RoomId) -> Json:
        await responses.room_state(self.store, call.sender, room)  # they may read it
        how = {name: call.query.get(name) for name in ("at", "membership", "not_membership")}
        found = await self.store.members(room, reader=call.sender, **how)
        return {"chunk": await self.store.client_events(call.sender, found, as_state=True)}

    @on("GET", "/rooms/{room}/event/{event}")
    async def event(self, call: Call, room: RoomId, event: EventId) -> Any:
        found = (await self.store.events([event])).values()
        shown = await self._shown(call, [one for one in found if one.room_id == room])
        return _found({one["event_id"]: one for one in shown}, event)

    @on("GET", "/rooms/{room}/messages")
    async def messages(self, call: Call, room: RoomId) -> Json:
        how = _page(call) | {"to": call.query.get("to"), "direction": call.query.get("dir", "b")}
        page = await self.store.messages(room, call.sender, **how)
        is_known = page.chunk or "from" in call.query  # a page at the live end is empty
        if not is_known and not await self.store.membership(room, call.sender):
            raise MatrixError(403, "M_FORBIDDEN", f"{call.sender} was never in {room}")
        if page.gaps and (await self.home.receiver.backfill(room, BACKFILL)).stored:
            page = await self.store.messages(room, call.sender, **how)
        return await self._chunk(call, page.chunk, start=page.start, end=page.end)

    @on("GET", "/rooms/{room}/context/{event}")
    async def context(self, call: Call, room: RoomId, event: EventId) -> Json:
        limit = int(call.query.get("limit", 10))
        found = await self.store.context(event, call.sender, room_id=room, limit=limit)
        parts = ("events_before", "events_after")
        shown = {part: await self._shown(call, getattr(found, part)) for part in parts}
        shown["state"] = await self.store.client_events(call.sender, found.state, as_state=True)
        [event_form] = await self._shown(call, [found.event])
        return {**shown, "event": event_form, "start": found.start, "end": found.end}

    @on("GET", "/rooms/{room}/relations/{event}{rel_type:(/[^/]*)?}{event_type:(/[^/]*)?}")
    async def relations(self, call: Call, room: RoomId, event: EventId, **kinds: str) -> Json:
        how = _page(call) | {name: kind[1:] or None for name, kind in kinds.items()}
        page = await self.store.relations(event, call.sender, room_id=room, **how)
        return await self._chunk(call, page.chunk, next_batch=page.end)

    @on("GET", "/rooms/{room}/threads")
    async def threads(self, call: Call, room: RoomId) -> Json:
        how = _page(call) | {"include": call.query.get("include", "all")}
        page = await self.store.threads(room, call.sender, **how)
        return await self._chunk(call, page.chunk, next_batch=page.end)

    @on("GET", "/publicRooms")
    @on("POST", "/publicRooms")
    async def public_rooms(self, call: Call) -> Json:
        given = {**call.query, **call.body}
        listed = await self.store.rooms({one.key for one in await self.home.directory.rows()})
        by_size = sorted(listed.values(), key=lambda room: (-room.joined_count, room.room_id))
        start = int(given.get("since", 0))
        end = start + int(given.get("limit", ROOMS_MAX))
        more = {"next_batch": str(end)} if end < len(by_size) else {}
        return {"chunk": [responses.room_summary(one) for one in by_size[start:end]], **more}

    @on("GET", "/rooms/{room}/hierarchy")
    async def hierarchy(self, call: Call, room: RoomId) -> Json:
        given = call.query
        return await responses.hierarchy(
            self.store,
            call.sender,
            room,
            from_=given.get("from"),
            limit=int(given.get("limit", ROOMS_MAX)),
            max_depth=int(given.get("max_depth", ROOMS_MAX)),
            suggested_only=given.get("suggested_only") == "true",
        )

    async def _shown(self, call: Call, events: list[StoredEvent]) -> list[Json]:
        return await self.store.client_events(call.sender, events, device_id=call.device)

    async def _chunk(self, call: Call, events: list[StoredEvent], **tokens: str | None) -> Json:
        known = {name: token for name, token in tokens.items() if token is not None}
        return {"chunk": await self._shown(call, events), **known}


def _page(call: Call) -> Json:
    return {"from_": call.query.get("from"), "limit": int(call.query.get("limit", 10))}


def _found(known: Any, key: Any) -> Any:
    if key not in known:
        raise MatrixError(404, "M_NOT_FOUND", f"{key} is not there")
    return known[key]
