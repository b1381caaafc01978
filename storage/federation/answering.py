"""`Responder`: the responses to other servers' requests, as JSON objects.

It checks that a server may have what it requests, and reads the events. The homeserver checks the
signature of the request (`Receiver.check_request`) and access control lists before.

Source: server-server API.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from storage import arguments as args
from storage.errors import AuthDenied, InputError, PartialState, UnknownEvent, UnknownRoom
from storage.event import ROOM_VERSIONS, Event, parse, sign
from storage.federation.memberships import AUTHORISER, MEMBER, state_to_show
from storage.federation.receiver import Receiver
from storage.federation.sender import Sender
from storage.ids import EventId, RoomId, server_name_of
from storage.queries.events import StoredEvent, size_of, visible_after_leaving
from storage.queries.federation import StateIds
from storage.queries.pagination.page import Direction
from storage.queries.state_at import reduced_state
from storage.store.writing import signer_of
from storage.turns import in_turns

Json = dict[str, Any]
CHANGES: Final = ("join", "knock", "leave")
OUTSIDE: Final = ("invite", "knock", "leave")
"""Memberships of users who may leave a room of which only the state is here.

The last of them is that of one who repeats the request.
"""

CLOSEST: Final[Mapping[str, Direction]] = {"b": "b", "f": "f"}

EVENTS_MAX: Final = 100
"""Events of one response to /backfill and /get_missing_events."""

IDS_MAX: Final = 1_000
"""Ids of each list of a request to /get_missing_events that are read: the first ones."""

REFUSED: Final = frozenset({"invalid", "rejected", "missing_parents"})


class IncompatibleRoomVersion(InputError):  # noqa: N818  # the errcode of the specification
    """The other server does not know the version of the room: answer 400, and name it.

    The server-server API calls it M_INCOMPATIBLE_ROOM_VERSION.
    """

    def __init__(self, room_id: str, room_version: str) -> None:
        super().__init__(f"{room_id} has version {room_version}")
        self.room_id = room_id
        self.room_version = room_version


class Responder:
    """Responses to other servers. ``origin`` is the server that signed the request.

    Events that the server may not see are redacted, because its graph needs them. For a server that
    is not in the room (any more) they are left out. Each call raises `InputError` for a malformed
    request, `UnknownRoom` and `UnknownEvent` for what is not here, `AuthDenied` for what
    the server may not do, and `PartialState` where members of the room are missing. ``sender``
    passes an accepted membership on to the other servers in the room.
    """

    def __init__(self, receiver: Receiver, sender: Sender | None = None) -> None:
        self._receiver, self._sender, self._store = receiver, sender, receiver.store

    # ---------------------------------------------------------------------------------------------
    # what other servers send

    async def transaction(self, origin: str, body: Mapping[str, Any]) -> Json:
        """Answer PUT /send/{txnId}. EDUs are ignored."""
        results = await self._receiver.transaction(origin, _listed(body, "pdus"))
        errors = {
            event_id: {"error": str(result.reason)}
            for event_id, result in results.items()
            if result.outcome in REFUSED
        }
        return {"pdus": {event_id: errors.get(event_id, {}) for event_id in results}}

    async def make_membership(
        self,
        origin: str,
        change: str,
        room_id: str,
        user_id: str,
        versions: Iterable[str] = (),
    ) -> Json:
        """Answer GET /make_join, /make_knock and /make_leave. `IncompatibleRoomVersion`.

        ``change`` is "join", "knock" or "leave". ``versions`` are the values of the parameter
        ``ver``: none mean "1". A leave needs none.
        """
        if change not in CHANGES:
            raise InputError(f"no server makes the membership {change!r} for another")
        room, user = args.room(room_id), args.user(user_id)
        version = await self._version_inside(room, change, user)
        if change != "leave" and version not in (args.texts(versions, "versions") or ["1"]):
            raise IncompatibleRoomVersion(room, version)
        if server_name_of(user) != origin:
            raise AuthDenied(f"{user} is no user of {origin}", rule="request.other_server")
        content = {"membership": change}
        template = await self._store.template(room, user, MEMBER, content, state_key=user)
        return {"room_version": version, "event": template}

    async def take_membership(
        self,
        origin: str,
        change: str,
        room_id: str,
        event_id: str,
        pdu: Mapping[str, Any],
        *,
        omit_members: bool = False,
    ) -> Json:
        """Answer PUT /send_join, /send_knock and /send_leave: store the event and pass it on.

        ``omit_members`` is the parameter of that name of /send_join. The response then has only the
        members that the other server needs at once, and the servers in the room.
        """
        fields = dict(args.mapping(pdu, "the event"))
        version = await self._version_inside(args.room(room_id), change, fields.get("sender"))
        event = parse(fields, version)
        _check_membership(event, origin, change, (room_id, event_id))
        signed = await self._authorised(event)
        if change == "join" and await self._receiver.partial_room(event.room_id) is not None:
            raise PartialState(event.room_id)  # the response needs the whole state
        await self._receiver.accepted(origin, signed, version)
        await self._pass_on(origin, event)
        if change == "join":
            await self._pass_on_missed(origin, event)
        if change == "knock":
            return {"knock_room_state": await state_to_show(self._store, event.room_id)}
        if change == "leave":
            return {}
        response = {"event": signed, "origin": self._store.server_name}
        if omit_members:
            return response | await self._without_members(event)
        ids = await self._store.state_ids(event.event_id)
        return response | await self._with_chain(ids, "state")

    async def _without_members(self, join: Event) -> Json:
        """Return the state before a join without most members, and the rest of its auth chains.

        Source: server-server API, `PUT /_matrix/federation/v2/send_join`, `omit_members`.
        """
        state = await self._store.reads.run(lambda conn: reduced_state(conn, join.event_id))
        chain = await self._store.auth_chain_ids([*state, join.event_id])
        servers = await self._store.joined_servers(join.room_id, at_event=join.event_id)
        return {
            "members_omitted": True,
            "servers_in_room": sorted(servers),
            **await self._with_chain(StateIds(state, frozenset(chain - state)), "state"),
        }

    async def _version_inside(self, room_id: RoomId, change: str, user_id: Any) -> str:
        """Return the version of a room that this server is in. `UnknownRoom`.

        An invited user may leave the room after the last user of this server has left it.
        """
        room = await self._receiver.known_room(room_id)
        if room is not None and not room.is_resident and change == "leave":
            here = await self._store.membership(room_id, args.user(user_id))
            room = room._replace(is_resident=here in OUTSIDE)
        if room is None or not room.is_resident:
            raise UnknownRoom(room_id)
        return room.room_version

    async def _authorised(self, event: Event) -> Json:
        """Return an event, signed if a local user authorises a restricted join.

        The auth rules check that user only. Whether the join rule allows the join is checked here
        once more, as another server need not have requested a template. `AuthDenied`.
        """
        authoriser, own = event.content.get(AUTHORISER), self._store.server_name
        if not isinstance(authoriser, str) or server_name_of(authoriser) != own:
            return event.json
        room, user, content = event.room_id, event.sender, {"membership": "join"}
        await self._store.template(room, user, MEMBER, content, state_key=user)
        return sign(event.json, event.room_version, *signer_of(self._store, None))

    async def _pass_on(self, origin: str, event: Event) -> None:
        if self._sender is not None:
            servers = await self._store.joined_servers(event.room_id)
            [stored] = (await self._store.events([event.event_id])).values()
            await self._sender.pass_on(servers - {origin}, stored)

    async def _pass_on_missed(self, origin: str, join: Event) -> None:
        """Send a server what was stored after the template of its join: no event of it cites that.

        The other server requests what lies between. A later event that cites both does the same.
        """
        extremities = await self._store.forward_extremities(join.room_id)
        if self._sender is not None and join.event_id in extremities:
            for missed in (await self._store.events(extremities - {join.event_id})).values():
                await self._sender.pass_on([origin], missed)

    async def invite(
        self, origin: str, room_id: str, event_id: str, body: Mapping[str, Any]
    ) -> Json:
        """Answer PUT /v2/invite: store the invite of a local user, and sign it.

        The state that the invite shows is checked. From room version 12 on, a fault of it refuses
        the invite; before, what is at fault is left out. So is the event's own ``unsigned``, which
        may show another state. `IncompatibleRoomVersion`.
        """
        fields = args.mapping(body, "the body")
        pdu, version = fields.get("event"), fields.get("room_version")
        if not isinstance(pdu, dict) or not isinstance(version, str):
            raise InputError("an invite has an event and a room_version")
        if version not in ROOM_VERSIONS:
            raise IncompatibleRoomVersion(room_id, version)
        event = parse(pdu, version)
        _check_invite(event, origin, (room_id, event_id))
        pdus = _listed(fields, "invite_room_state")
        shown = await self._receiver.shown_state(room_id, version, pdus)
        if event.room_version.create_room_id and shown.fault is not None:
            raise InputError(f"invite_room_state: {shown.fault}")
        bare = {key: value for key, value in event.json.items() if key != "unsigned"}
        invited = await self._receiver.invited(bare, version, shown.stripped)
        if invited.result.outcome == "invalid":
            raise InputError(str(invited.result.reason))
        if not invited.is_welcome:
            reason = str(invited.result.reason)
            raise AuthDenied(reason, rule="invite.not_accepted", event_id=event_id)
        return {"event": event.json | {"signatures": invited.pdu["signatures"]}}

    # ---------------------------------------------------------------------------------------------
    # what other servers request

    async def event(self, origin: str, event_id: str) -> Json:
        """Answer GET /event. `UnknownEvent` also for a server that may not have it."""
        response = await self.backfill(origin, await self._room_of(event_id), [event_id], 1)
        if not response["pdus"]:
            raise UnknownEvent(event_id)
        return response

    async def backfill(
        self, origin: str, room_id: str, event_ids: Iterable[str], limit: int
    ) -> Json:
        """Answer GET /backfill: at most 100 events."""
        most = args.limit(limit, EVENTS_MAX)
        events = await self._store.backfill(room_id, event_ids, most, server_name=origin)
        shown = await self._shown(origin, room_id, events)
        own, now_ms = self._store.server_name, time.time_ns() // 1_000_000
        return {"origin": own, "origin_server_ts": now_ms, "pdus": await _pdus(shown)}

    async def missing_events(self, origin: str, room_id: str, body: Mapping[str, Any]) -> Json:
        """Answer POST /get_missing_events: at most 100 events. Of each list 1,000 ids count."""
        fields = args.mapping(body, "the body")
        events = await self._store.missing_events(
            room_id,
            _listed(fields, "earliest_events")[:IDS_MAX],
            _listed(fields, "latest_events")[:IDS_MAX],
            limit=args.limit(fields.get("limit", 10), EVENTS_MAX),
            min_depth=fields.get("min_depth", 0),
            server_name=origin,
        )
        return {"events": await _pdus(await self._shown(origin, room_id, events))}

    async def state_ids(self, origin: str, room_id: str, event_id: str) -> Json:
        """Answer GET /state_ids. `StateUnknown`."""
        ids = await self._store.state_ids(await self._checked(origin, room_id, event_id))
        return {"pdu_ids": [*ids.state_ids], "auth_chain_ids": [*ids.auth_chain_ids]}

    async def state(self, origin: str, room_id: str, event_id: str) -> Json:
        """Answer GET /state. `StateUnknown`."""
        ids = await self._store.state_ids(await self._checked(origin, room_id, event_id))
        return await self._with_chain(ids, "pdus")

    async def event_auth(self, origin: str, room_id: str, event_id: str) -> Json:
        """Answer GET /event_auth."""
        events = await self._store.event_auth(await self._checked(origin, room_id, event_id))
        return {"auth_chain": await _pdus(events)}

    async def timestamp_to_event(
        self, origin: str, room_id: str, timestamp_ms: int, direction: str
    ) -> Json:
        """Answer GET /timestamp_to_event."""
        closest = CLOSEST.get(direction) if args.is_text(direction) else None
        if closest is None:
            raise InputError(f"the direction is b or f, not {direction!r}")
        await self._check_resident(origin, room_id)
        event = await self._store.timestamp_to_event(
            room_id, timestamp_ms, closest, server_name=origin
        )
        if event is None:
            raise UnknownEvent(f"at {timestamp_ms}")
        return {"event_id": event.event_id, "origin_server_ts": event.json["origin_server_ts"]}

    async def _shown(
        self, origin: str, room_id: str, events: list[StoredEvent]
    ) -> list[StoredEvent]:
        """Return all events for a server in the room, and for any other what it may still see."""
        if not events or await self._store.is_resident(origin, room_id):
            return events
        ids, server = [event.event_id for event in events], args.server(origin)
        visible = await self._store.reads.run(lambda conn: visible_after_leaving(conn, server, ids))
        return [event for event in events if event.event_id in visible]

    async def _checked(self, origin: str, room_id: str, event_id: str) -> EventId:
        """Return the event id if the event is of the room, and the server is in the room."""
        if await self._room_of(event_id) != room_id:
            raise UnknownEvent(event_id)
        await self._check_resident(origin, room_id)
        return EventId(event_id)

    async def _check_resident(self, origin: str, room_id: str) -> None:
        if not await self._store.is_resident(origin, room_id):
            raise AuthDenied(f"{origin} is not in {room_id}", rule="request.not_in_room")

    async def _room_of(self, event_id: str) -> RoomId:
        event = await self._store.event(EventId(event_id))
        if event is None:
            raise UnknownEvent(event_id)
        return event.room_id

    async def _with_chain(self, ids: StateIds, name: str) -> Json:
        state = await self._store.events(ids.state_ids)
        chain = await self._store.events(ids.auth_chain_ids)
        return {name: await _pdus(state.values()), "auth_chain": await _pdus(chain.values())}


def _check_membership(event: Event, origin: str, change: str, path: tuple[str, str]) -> None:
    """Raise `InputError` unless an event is what the path of its request says."""
    if change not in CHANGES:
        raise InputError(f"no server takes the membership {change!r} of another")
    membership_of = (event.type, event.content.get("membership"), event.room_id, event.event_id)
    if membership_of != (MEMBER, change, *path) or event.state_key != event.sender:
        raise InputError(f"{event.event_id} is no {change} of {path[0]} with the id {path[1]}")
    if server_name_of(event.sender) != origin:
        raise AuthDenied(f"{event.sender} is no user of {origin}", rule="request.other_server")


def _check_invite(event: Event, origin: str, path: tuple[str, str]) -> None:
    """Raise `InputError` unless an event is of the path of its request, and of its sender."""
    if (event.room_id, event.event_id) != path:
        raise InputError(f"the event is {event.event_id} of {event.room_id}")
    if not event.room_version.may_have_room(event.room_id):
        raise InputError(f"{event.room_id} is no room of version {event.room_version.identifier}")
    if server_name_of(event.sender) != args.server(origin):
        raise InputError(f"{event.sender} is no user of {origin}")


def _listed(body: Mapping[str, Any], name: str) -> list[Any]:
    listed = args.mapping(body, "the body").get(name, [])
    if not isinstance(listed, list):
        raise InputError(f"{name} is no list")
    return listed


async def _pdus(events: Iterable[StoredEvent]) -> Sequence[Json]:
    return [event.json async for event in in_turns(events, size_of)]
