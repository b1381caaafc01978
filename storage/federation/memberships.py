"""`Memberships`: local users join, knock, leave and invite, here or through other servers.

If this server is in the room, it makes the event. If not, the servers of the room are tried one
after the other (joining.py). The server of an invited user signs the invite.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from storage import arguments as args
from storage.auth.auth_events import own_content
from storage.errors import AuthDenied, InvalidEvent, InvalidSignature, PartialState
from storage.event import ROOM_VERSIONS, event_id, parse, redact, sign
from storage.event import event_id as event_id_of
from storage.event.hashes import canonical
from storage.event.reading import MAX_PDU_BYTES
from storage.federation.invites import end_of
from storage.federation.joining import JoinResult
from storage.federation.receiver import Receiver
from storage.federation.remote import JsonObject, MembershipRemote, RemoteError
from storage.federation.requests import answer_of
from storage.ids import EventId, RoomId, ServerName, UserId, server_name_of
from storage.persist import AppendResult
from storage.persist.model.incoming import Signer
from storage.queries.federation import pending_membership, servers_by_size
from storage.queries.filters import SyncFilter
from storage.store.facade import Store
from storage.store.writing import signer_of

# --------------------------------------------------------------------------------------------------
# Enter and leave a room through one server that is in it: make_join, send_join, and their kin.
#
# 1. Request a template (make_join), and check it: the room, the user and the version are those of
# the
#    request.
# 2. Sign an event of our own. The template gives it parents and auth events, and the local user of
#    the other server that authorises a restricted join. Nothing else of it is used.
# 3. Send it (send_join), and store what the response says.
#
# Each function raises `RemoteError` if the server does not do its part. Nothing is stored then.
#
# Source: server-server API, "Joining rooms", "Knocking upon a room", "Leaving rooms".

AUTHORISER: Final = "join_authorised_via_users_server"
PLACEMENT_KEYS: Final = ("auth_events", "prev_events", "depth")
"""The fields of an event that the template decides."""

VERSIONS: Final = tuple(ROOM_VERSIONS)

SendMembership = Callable[[ServerName, RoomId, EventId, JsonObject], Awaitable[JsonObject]]


class MembershipRequest(NamedTuple):
    """A membership that a local user wants: ``content`` is that of the event."""

    room_id: RoomId
    user_id: UserId
    content: Mapping[str, Any]

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the fields that no template may change."""
        return {
            "type": "m.room.member",
            "room_id": self.room_id,
            "sender": self.user_id,
            "state_key": self.user_id,
        }


class SignedMembership(NamedTuple):
    """The signed event of a membership."""

    pdu: dict[str, Any]
    event_id: EventId
    room_version: str


class OtherServer(NamedTuple):
    """A server to enter a room through, and the means to do it."""

    name: ServerName
    remote: MembershipRemote
    receiver: Receiver
    signer: Signer

    async def template(
        self, make: Callable[..., Awaitable[JsonObject]], request: MembershipRequest, **query: Any
    ) -> SignedMembership:
        """Request a template, and sign the event that comes of it."""
        seconds = self.receiver.limits.request_seconds
        args = self.name, request.room_id, request.user_id
        return signed(
            await answer_of(self.name, seconds, make, *args, **query), request, self.signer
        )

    async def send(
        self, send: SendMembership, request: MembershipRequest, event: SignedMembership
    ) -> JsonObject:
        seconds = self.receiver.limits.send_membership_seconds
        args = self.name, request.room_id, event.event_id, event.pdu
        return await answer_of(self.name, seconds, send, *args)


async def join_through(server: OtherServer, request: MembershipRequest) -> JoinResult:
    """Join a room, and store its state."""
    remote = server.remote
    join = await server.template(remote.make_join, request, versions=VERSIONS)
    response = await server.send(remote.send_join, request, join)
    result = await server.receiver.joined(server.name, join.pdu, response, join.room_version)
    if result.outcome == "refused":
        raise RemoteError(f"{result.fault}: {result.reason}")
    return result


async def knock_through(server: OtherServer, request: MembershipRequest) -> AppendResult:
    """Knock on a room, and store what the server shows of it."""
    remote = server.remote
    knock = await server.template(remote.make_knock, request, versions=VERSIONS)
    response = await server.send(remote.send_knock, request, knock)
    version, receiver = knock.room_version, server.receiver
    shown = await receiver.shown_state(request.room_id, version, response.get("knock_room_state"))
    return _stored(await receiver.knocked(knock.pdu, version, shown.stripped))


async def leave_through(server: OtherServer, request: MembershipRequest) -> AppendResult:
    """Reject an invite, or take a knock back."""
    leave = await server.template(server.remote.make_leave, request)
    await server.send(server.remote.send_leave, request, leave)
    return _stored(await server.receiver.left(leave.pdu, leave.room_version))


def _stored(result: AppendResult) -> AppendResult:
    if not result.is_stored:
        raise RemoteError(f"{result.outcome}: {result.reason}")
    return result


def signed(response: JsonObject, request: MembershipRequest, signer: Signer) -> SignedMembership:
    """Return the signed event of a template; raise `RemoteError` for a false template.

    Only a server that is older than room versions, and so than knocks, names none.
    """
    oldest = None if request.content["membership"] == "knock" else "1"
    version = response.get("room_version", oldest)
    if not isinstance(version, str) or version not in ROOM_VERSIONS:
        raise RemoteError(f"its template is of room version {version!r}, which is not known")
    template = _checked(response.get("event"), request)
    content = {key: value for key, value in request.content.items() if key != AUTHORISER}
    if AUTHORISER in template["content"]:
        content[AUTHORISER] = template["content"][AUTHORISER]
    pdu: dict[str, Any] = {key: template[key] for key in PLACEMENT_KEYS if key in template}
    pdu |= request.fixed | {"content": content, "origin_server_ts": time.time_ns() // 1_000_000}
    if ROOM_VERSIONS[version].reference_pairs:
        pdu["event_id"] = f"${secrets.token_urlsafe(18)}:{signer.server_name}"
    try:
        own_content(pdu["type"], pdu["state_key"], content)
        pdu = sign(pdu, version, signer.server_name, signer.key)
        parse(pdu, version)
    except InvalidEvent as error:
        raise RemoteError(f"its template makes no event: {error}") from error
    return SignedMembership(pdu, EventId(event_id(pdu, version)), version)


def _checked(template: Any, request: MembershipRequest) -> dict[str, Any]:
    """Return a template of the room, the user and the membership; else raise `RemoteError`."""
    content = template.get("content") if isinstance(template, dict) else None
    if not isinstance(template, dict) or not isinstance(content, dict):
        raise RemoteError("its response has no template")
    expected = request.fixed | {"membership": request.content["membership"]}
    for key, value in expected.items():
        template_value = content.get(key) if key == "membership" else template.get(key)
        if template_value != value:
            raise RemoteError(f"its template has the {key} {template_value!r}, not {value!r}")
    return template


T = TypeVar("T")

MEMBER: Final = "m.room.member"
FOR_OTHERS: Final = ("member.join.no_authoriser", "member.join.cannot_check")
"""Rules of a restricted join that another server may keep.

Only a server that knows all members, too, can let a user in (`PartialState`).
"""
NOT_OF_THE_CLIENT: Final = frozenset({"M_MISSING_PARAM", "M_INVALID_PARAM"})
"""Refusals of an invite whose cause is not in the client's request.

It gets 502 then. Server-server API, `PUT /_matrix/federation/v2/invite`, response 400.
"""
SHOWN: Final = (
    "m.room.create",
    "m.room.join_rules",
    "m.room.name",
    "m.room.avatar",
    "m.room.topic",
    "m.room.encryption",
    "m.room.canonical_alias",
)
"""State that a user sees of a room before joining. Client-server API, "Stripped state"."""


class Memberships:
    """Joins, knocks, leaves and invites of local users. Make one for each store and keep it.

    ``content`` adds keys to the event, such as ``reason`` or ``displayname``. Every call stores the
    membership or raises: `AuthDenied` if the room refuses it, `RemoteError` if no other server did
    its part. The ``status`` and ``errcode`` of the latter are those of the last response.
    """

    def __init__(self, receiver: Receiver, remote: MembershipRemote) -> None:
        self._receiver, self._remote, self._store = receiver, remote, receiver.store

    async def join(
        self,
        user_id: str,
        room_id: str,
        servers: Iterable[str] = (),
        *,
        content: Mapping[str, Any] | None = None,
    ) -> JoinResult:
        """Join a room. ``servers`` may be in it: the parameter ``via`` of the client's request.

        The server of an inviter and that of the room id are tried after them, at most
        `ReceiverLimits.resident_servers_max` in all.
        """
        request = self._requested(user_id, room_id, "join", content)
        async with self._receiver.joins.lock(
            request.room_id
        ):  # the second user finds the room here
            if not await self._is_inside(request.room_id):
                return await self._through(join_through, request, servers)
        try:
            result = await self._send(request)
        except (PartialState, AuthDenied) as error:
            if isinstance(error, AuthDenied) and error.rule not in FOR_OTHERS:
                raise
            others = await self._others(request.room_id, servers)
            if not others:
                raise
            return await self._through(join_through, request, others)
        return JoinResult(
            "joined", request.room_id, result.event_id, request.user_id, result=result
        )

    async def _others(self, room_id: RoomId, servers: Iterable[str]) -> list[str]:
        """Return servers that may let a user in where this one may not."""
        inside = await self._store.joined_servers(room_id) - {self._store.server_name}
        return [*args.listed(servers, "servers"), *sorted(inside)]

    async def knock(
        self,
        user_id: str,
        room_id: str,
        servers: Iterable[str] = (),
        *,
        content: Mapping[str, Any] | None = None,
    ) -> AppendResult:
        """Knock on a room, as `join` joins one."""
        request = self._requested(user_id, room_id, "knock", content)
        if await self._is_inside(request.room_id):
            return await self._send(request)
        return await self._through(knock_through, request, servers)

    async def leave(
        self,
        user_id: str,
        room_id: str,
        servers: Iterable[str] = (),
        *,
        content: Mapping[str, Any] | None = None,
    ) -> AppendResult:
        """Leave a room, reject an invite, or take a knock back.

        An invite or a knock ends here also if no other server does its part.
        """
        request = self._requested(user_id, room_id, "leave", content)
        if await self._is_inside(request.room_id):
            return await self._send(request)
        try:
            return await self._through(leave_through, request, servers)
        except RemoteError:
            left = await self._end_here(request)
            if left is None:
                raise
            return left

    async def _end_here(self, request: MembershipRequest) -> AppendResult | None:
        """End an invite or a knock without another server. Return None if there is none."""
        async with self._store.database.connection() as conn:
            pending = await pending_membership(conn, request.room_id, request.user_id)
        ended = None if pending is None else await self._store.event(pending)
        if ended is None:
            return None
        try:
            return await self._send(request)  # by the state that is here
        except (AuthDenied, PartialState):
            leave = end_of(ended, request.user_id, request.content, signer_of(self._store, None))
            result = await self._receiver.left(leave, ended.room_version)
            return result if result.is_stored else None

    async def invite(
        self,
        sender: str,
        room_id: str,
        user_id: str,
        *,
        content: Mapping[str, Any] | None = None,
    ) -> AppendResult:
        """Invite a user. The server of another server's user signs the invite first.

        `RemoteError`: it refuses to, or does not answer.
        """
        inviter = args.local_user(sender, self._store.server_name)
        room, guest = args.room(room_id), args.user(user_id)
        fields = _fields(content, "invite")
        server = server_name_of(guest)
        if server == self._store.server_name:
            return await self._store.send(room, inviter, MEMBER, fields, state_key=guest)
        template = await self._store.template(room, inviter, MEMBER, fields, state_key=guest)
        return await self._invite_through(server, room, template)

    async def _invite_through(
        self, server: ServerName, room_id: RoomId, template: dict[str, Any]
    ) -> AppendResult:
        """Let a server sign an invite, and store it with both signatures."""
        version, signer = await self._receiver.version_of(room_id), signer_of(self._store, None)
        pdu = sign(template, version, *signer)
        event_id = event_id_of(pdu, version)
        shown = await state_to_show(self._store, room_id)
        body = {"event": pdu, "room_version": version, "invite_room_state": shown}
        seconds = self._receiver.limits.send_membership_seconds
        try:
            response = await answer_of(
                server, seconds, self._remote.invite, server, room_id, EventId(event_id), body
            )
        except RemoteError as error:
            if error.errcode in NOT_OF_THE_CLIENT:
                raise RemoteError(str(error), errcode=error.errcode) from error
            raise
        signatures = _signature(response, server)
        try:
            parse(pdu | {"signatures": pdu["signatures"] | signatures}, version)
            await self._receiver.check_signed(
                server, redact(pdu, version) | {"signatures": signatures}
            )
        except (InvalidEvent, InvalidSignature) as error:
            raise RemoteError(f"{server} has not signed the invite: {error}") from error
        pdu["signatures"] |= signatures
        return await self._receiver.accepted(signer.server_name, pdu, version)

    def _requested(
        self, user_id: str, room_id: str, membership: str, content: Mapping[str, Any] | None
    ) -> MembershipRequest:
        user = args.local_user(user_id, self._store.server_name)
        return MembershipRequest(args.room(room_id), user, _fields(content, membership))

    async def _is_inside(self, room_id: RoomId) -> bool:
        room = await self._receiver.known_room(room_id)
        return room is not None and room.is_resident

    async def _send(self, request: MembershipRequest) -> AppendResult:
        room_id, user_id, content = request
        return await self._store.send(room_id, user_id, MEMBER, content, state_key=user_id)

    async def _through(
        self,
        enter: Callable[[OtherServer, MembershipRequest], Awaitable[T]],
        request: MembershipRequest,
        servers: Iterable[str],
    ) -> T:
        """Try servers one after the other; raise `RemoteError` with the failures of all."""
        signer = signer_of(self._store, None)
        failures: dict[ServerName, RemoteError] = {}
        for server in await self._candidates(request, servers):
            try:
                return await enter(
                    OtherServer(server, self._remote, self._receiver, signer), request
                )
            except RemoteError as error:
                failures[server] = error
        raise _failure_of_all(failures)

    async def _candidates(
        self, request: MembershipRequest, servers: Iterable[str]
    ) -> list[ServerName]:
        """Return the servers to try: those named, that of the inviter, and that of the room id.

        Then those of the stored state, and of the state that the invite or the knock shows.
        """
        named = [args.server(server) for server in args.listed(servers, "servers")]
        shown = await self._shown(request.user_id, request.room_id)
        inviters = [event["sender"] for event in shown if event["state_key"] == request.user_id]
        limit = self._receiver.limits.resident_servers_max
        async with self._store.database.connection() as conn:
            inside = await servers_by_size(conn, request.room_id, limit)
        users = [*inviters, request.room_id], [event["sender"] for event in shown]
        first, last = (map(server_name_of, user_ids) for user_ids in users)
        candidates = dict.fromkeys([*named, *first, *inside, *last])
        return [server for server in candidates if server not in ("", self._store.server_name)][
            :limit
        ]

    async def _shown(self, user_id: UserId, room_id: RoomId) -> Sequence[Mapping[str, Any]]:
        """Return the state that a user's invite or knock shows."""
        response = await self._store.sync(user_id, filter=SyncFilter(rooms=[room_id]))
        if room_id in response.invite:
            return response.invite[room_id].invite_state
        return response.knock[room_id].knock_state if room_id in response.knock else ()


async def state_to_show(store: Store, room_id: str) -> list[dict[str, Any]]:
    """Return the PDUs of the state that a user sees of a room before joining."""
    state = await store.current_state(room_id, types=SHOWN)
    events = await store.events(state.values())
    return [event.json for event in events.values()]


def _signature(response: JsonObject, server: ServerName) -> dict[str, Any]:
    """Return the signatures of a server on an invite; raise `RemoteError` if there are none."""
    event = response.get("event")
    signatures = event.get("signatures") if isinstance(event, dict) else None
    own = signatures.get(server) if isinstance(signatures, dict) else None
    if not isinstance(own, dict) or not own or not all(map(args.is_text, own.values())):
        raise RemoteError(f"{server} has not signed the invite")
    return {server: own}


def _fields(content: Mapping[str, Any] | None, membership: str) -> dict[str, Any]:
    """Return the content of a membership. Raise `InvalidEvent` if no event can have it."""
    fields = dict(args.mapping({} if content is None else content, "content"))
    fields["membership"] = membership
    if (size := len(canonical({"content": fields}))) > MAX_PDU_BYTES:
        raise InvalidEvent(
            f"the content has {size} bytes, more than {MAX_PDU_BYTES}",
            kind="too_large",
            key="content",
        )
    return fields


def _failure_of_all(failures: Mapping[ServerName, RemoteError]) -> RemoteError:
    if not failures:
        return RemoteError("no server of the room is known", status=404, errcode="M_NOT_FOUND")
    reason = "; ".join(f"{server}: {error}" for server, error in failures.items())
    answers = [error for error in failures.values() if error.status is not None]
    last = answers[-1] if answers else RemoteError(reason)
    return RemoteError(
        reason, status=last.status, errcode=last.errcode, room_version=last.room_version
    )
