"""The requests of clients, and the form of the responses. Client-server API."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from aiohttp import web

from storage import EventId, JoinedRoom, RoomId, StateKey, Store, StoredEvent, SyncFilter, UserId

from .server import BACKFILL, MEMBER
from .web import Api, Call, Json, MatrixError, now_ms, on

WAIT_MS_MAX = 30_000
VISIBILITY = "m.room.history_visibility"
KEYS: Final[tuple[str, ...]] = ("content", "origin_server_ts", "sender", "state_key", "type")
"""The keys of an event that a client gets. A sender can claim anything in others."""


class Doors(Api):
    """Requests without a login and a signature, and those that this server does not have."""

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
        name, password = given["username"], given["password"]
        return self.home.accounts.register(name, password, given.get("device_id"))

    @on("GET", "/_matrix/key/v2/server")
    async def keys(self, _: Call) -> Json:
        return self.home.remote.own_keys()

    @on("OPTIONS", "/{path:.*}")
    async def preflight(self, _: Call, path: str) -> None:
        """Let a browser send any request. The headers of each response say so."""

    @on("*", "/{path:.*}")
    async def unrecognized(self, _: Call, path: str) -> None:
        raise MatrixError(404, "M_UNRECOGNIZED", f"this server does not have /{path}")


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
        query, since, store = call.query, call.query.get("since"), self.store
        wanted = json.loads(query.get("filter", "{}")).get("room", {})
        lazy = wanted.get("state", {}).get("lazy_load_members", False)
        before = {} if since is None else store.positions_of(since)
        if "to_device" in before:  # the device has these
            await store.to_device.delete(call.sender, call.device, before["to_device"])
        found = await store.sync(
            call.sender,
            since=since,
            timeout_ms=min(int(query.get("timeout", 0)), WAIT_MS_MAX),
            timeline_limit=wanted.get("timeline", {}).get("limit", 10),
            filter=SyncFilter(lazy_load_members=lazy),
            full_state=query.get("full_state") == "true",
        )
        now = store.positions_of(found.next_batch)
        after = {name: before[name].min if name in before else 0 for name in now}
        rooms: Json = {
            "join": {room: await _room(store, one) for room, one in found.join.items()},
            "leave": {room: await _room(store, one) for room, one in found.leave.items()},
            "invite": {
                room: {"invite_state": {"events": one.invite_state}}
                for room, one in found.invite.items()
            },
            "knock": {
                room: {"knock_state": {"events": one.knock_state}}
                for room, one in found.knock.items()
            },
        }
        account_data = await _add_facts(store, call.sender, rooms["join"], after, found.next_batch)
        inbox = await store.to_device.inbox(call.sender, call.device, upto=now["to_device"])
        return {
            "next_batch": found.next_batch,
            "rooms": rooms,
            "account_data": {"events": account_data},
            "to_device": {"events": [json.loads(row.content) for row in inbox]},
        }

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
        await self.store.receipts.set(room, kind, call.sender, event, {"ts": now_ms()})

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
    async def change_membership(self, call: Call, room: RoomId, act: str) -> Json:
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
        ids = (await self._state(call, room)).values()
        return await _shown(self.store, (await self.store.events(ids)).values())

    @on("GET", "/rooms/{room}/state/{kind}{key:(/[^/]*)?}")
    async def state_event(self, call: Call, room: RoomId, kind: str, key: str) -> Any:
        event_id = _found(await self._state(call, room), (kind, key[1:]))
        return (await self.store.events([event_id]))[event_id].json["content"]

    async def _state(self, call: Call, room: RoomId) -> dict[StateKey, EventId]:
        """Return the state of a room: now, or when the user left."""
        state = await self.store.current_state(room)
        match await self.store.membership(room, call.sender):
            case "join":
                return state
            case "leave" | "ban":
                return await self.store.state_before(state[MEMBER, call.sender])
        raise MatrixError(403, "M_FORBIDDEN", "the user was never in the room")

    @on("GET", "/rooms/{room}/members")
    async def members(self, call: Call, room: RoomId) -> Json:
        await self._state(call, room)
        how = {name: call.query.get(name) for name in ("at", "membership", "not_membership")}
        return {"chunk": await _shown(self.store, await self.store.members(room, **how))}

    @on("GET", "/rooms/{room}/messages")
    async def messages(self, call: Call, room: RoomId) -> Json:
        how = _page(call) | {"to": call.query.get("to"), "direction": call.query.get("dir", "b")}
        page = await self.store.messages(room, call.sender, **how)
        if page.gaps and (await self.home.receiver.backfill(room, BACKFILL)).stored:
            page = await self.store.messages(room, call.sender, **how)
        chunk = await _shown(self.store, page.chunk)
        return {"start": page.start, "chunk": chunk} | ({"end": page.end} if page.end else {})

    @on("GET", "/rooms/{room}/context/{event}")
    async def context(self, call: Call, room: RoomId, event: EventId) -> Json:  # noqa: ARG002
        limit = int(call.query.get("limit", 10))
        found = await self.store.context(event, call.sender, limit=limit)
        answer: Json = {"start": found.start, "end": found.end}
        for name in ("events_before", "events_after", "state"):
            answer[name] = await _shown(self.store, getattr(found, name))
        [answer["event"]] = await _shown(self.store, [found.event])
        return answer

    @on("GET", "/rooms/{room}/relations/{event}{rel_type:(/[^/]*)?}{event_type:(/[^/]*)?}")
    async def relations(self, call: Call, room: RoomId, event: EventId, **kinds: str) -> Json:  # noqa: ARG002
        how = _page(call) | {name: kind[1:] or None for name, kind in kinds.items()}
        page = await self.store.relations(event, call.sender, **how)
        chunk = await _shown(self.store, page.chunk)
        return {"chunk": chunk} | ({"next_batch": page.end} if page.end else {})


def _page(call: Call) -> Json:
    return {"from_": call.query.get("from"), "limit": int(call.query.get("limit", 10))}


def _found(known: Any, key: Any) -> Any:
    if key not in known:
        raise MatrixError(404, "M_NOT_FOUND", f"{key} is not there")
    return known[key]


async def _shown(store: Store, events: Iterable[StoredEvent]) -> list[Json]:
    """Return events for a client; a redacted one has the event that redacted it."""
    listed = list(events)
    redactions = await store.events([one.redacted_by for one in listed if one.redacted_by])
    return [_shape(one, redactions) for one in listed]


def _shape(event: StoredEvent, redactions: Mapping[EventId, StoredEvent]) -> Json:
    shown: Json = {key: event.json[key] for key in KEYS if key in event.json}
    shown |= {"event_id": event.event_id, "room_id": event.room_id}
    shown["unsigned"] = {"age": now_ms() - event.json["origin_server_ts"]}
    target = event.content.get("redacts") or event.json.get("redacts")
    if event.type == "m.room.redaction" and target:
        shown["redacts"] = target
    if event.redacted_by and event.redacted_by in redactions:
        shown["unsigned"]["redacted_because"] = _shape(redactions[event.redacted_by], {})
    return shown


async def _room(store: Store, room: JoinedRoom) -> Json:
    answer = _quiet_room(room.timeline.prev_batch, limited=room.timeline.limited)
    answer["timeline"]["events"] = await _shown(store, room.timeline.events)
    answer["state"]["events"] = await _shown(store, room.state)
    return answer


def _quiet_room(prev_batch: str, *, limited: bool = False) -> Json:
    timeline = {"events": [], "limited": limited, "prev_batch": prev_batch}
    parts = ("state", "ephemeral", "account_data")
    return {"timeline": timeline, **{part: {"events": []} for part in parts}}


async def _add_facts(
    store: Store, user: UserId, joined: Json, after: Mapping[str, int], token: str
) -> list[Json]:
    """Add new receipts and account data to their rooms. Return the global account data."""
    rooms, everywhere = await store.rooms_of(user), list[Json]()
    for room in rooms:
        receipts: Json = {}
        for row in await store.receipts.of_room(room, after=after["receipts"]):
            if row.receipt_type != "m.read.private" or row.user_id == user:
                kinds = receipts.setdefault(row.event_id, {})
                kinds.setdefault(row.receipt_type, {})[row.user_id] = json.loads(row.data)
        if receipts:
            event = {"type": "m.receipt", "content": receipts}
            joined.setdefault(room, _quiet_room(token))["ephemeral"]["events"].append(event)
    for one in await store.account_data.changes(user, after=after["account_data"]):
        event = {"type": one.type, "content": json.loads(one.content)}
        if one.room_id is None:
            everywhere.append(event)
        elif one.room_id in rooms:
            of_room = joined.setdefault(one.room_id, _quiet_room(token))
            of_room["account_data"]["events"].append(event)
    return everywhere
