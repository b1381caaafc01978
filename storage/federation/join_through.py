"""Enter and leave a room through one server that is in it: make_join, send_join, and their kin.

1. Request a template (make_join), and check it: the room, the user and the version are those of the
   request.
2. Sign an event of our own. The template gives it parents and auth events, and the local user of
   the other server that authorises a restricted join. Nothing else of it is used.
3. Send it (send_join), and store what the response says.

Each function raises `RemoteError` if the server does not do its part. Nothing is stored then.

Source: server-server API, "Joining rooms", "Knocking upon a room", "Leaving rooms".
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from storage.auth.own_events import own_content
from storage.errors import InvalidEvent
from storage.event import ROOM_VERSIONS, event_id, parse, sign
from storage.federation.joining import JoinResult
from storage.federation.receiver import Receiver
from storage.federation.remote import JsonObject, MembershipRemote, RemoteError
from storage.federation.requests import answer_of
from storage.ids import EventId, RoomId, ServerName, UserId
from storage.persist import AppendResult
from storage.persist.model.local_event import Signer

AUTHORISER: Final = "join_authorised_via_users_server"
PLACE: Final = ("auth_events", "prev_events", "depth")
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
        self, make: Callable[..., Awaitable[JsonObject]], wanted: MembershipRequest, **query: Any
    ) -> SignedMembership:
        """Request a template, and sign the event that comes of it."""
        seconds = self.receiver.limits.request_seconds
        args = self.name, wanted.room_id, wanted.user_id
        return signed(
            await answer_of(self.name, seconds, make, *args, **query), wanted, self.signer
        )

    async def send(
        self, send: SendMembership, wanted: MembershipRequest, event: SignedMembership
    ) -> JsonObject:
        seconds = self.receiver.limits.send_membership_seconds
        args = self.name, wanted.room_id, event.event_id, event.pdu
        return await answer_of(self.name, seconds, send, *args)


async def join_through(server: OtherServer, wanted: MembershipRequest) -> JoinResult:
    """Join a room, and store its state."""
    remote = server.remote
    join = await server.template(remote.make_join, wanted, versions=VERSIONS)
    response = await server.send(remote.send_join, wanted, join)
    result = await server.receiver.joined(server.name, join.pdu, response, join.room_version)
    if result.outcome == "refused":
        raise RemoteError(f"{result.fault}: {result.reason}")
    return result


async def knock_through(server: OtherServer, wanted: MembershipRequest) -> AppendResult:
    """Knock on a room, and store what the server shows of it."""
    remote = server.remote
    knock = await server.template(remote.make_knock, wanted, versions=VERSIONS)
    response = await server.send(remote.send_knock, wanted, knock)
    version, receiver = knock.room_version, server.receiver
    shown = await receiver.shown_state(wanted.room_id, version, response.get("knock_room_state"))
    return _stored(await receiver.knocked(knock.pdu, version, shown.stripped))


async def leave_through(server: OtherServer, wanted: MembershipRequest) -> AppendResult:
    """Reject an invite, or take a knock back."""
    leave = await server.template(server.remote.make_leave, wanted)
    await server.send(server.remote.send_leave, wanted, leave)
    return _stored(await server.receiver.left(leave.pdu, leave.room_version))


def _stored(result: AppendResult) -> AppendResult:
    if not result.is_stored:
        raise RemoteError(f"{result.outcome}: {result.reason}")
    return result


def signed(response: JsonObject, wanted: MembershipRequest, signer: Signer) -> SignedMembership:
    """Return the signed event of a template; raise `RemoteError` for a false template.

    Only a server that is older than room versions, and so than knocks, names none.
    """
    oldest = None if wanted.content["membership"] == "knock" else "1"
    version = response.get("room_version", oldest)
    if not isinstance(version, str) or version not in ROOM_VERSIONS:
        raise RemoteError(f"its template is of room version {version!r}, which is not known")
    template = _checked(response.get("event"), wanted)
    content = {key: value for key, value in wanted.content.items() if key != AUTHORISER}
    if AUTHORISER in template["content"]:
        content[AUTHORISER] = template["content"][AUTHORISER]
    pdu: dict[str, Any] = {key: template[key] for key in PLACE if key in template}
    pdu |= wanted.fixed | {"content": content, "origin_server_ts": time.time_ns() // 1_000_000}
    if ROOM_VERSIONS[version].reference_pairs:
        pdu["event_id"] = f"${secrets.token_urlsafe(18)}:{signer.server_name}"
    try:
        own_content(pdu["type"], pdu["state_key"], content)
        pdu = sign(pdu, version, signer.server_name, signer.key)
        parse(pdu, version)
    except InvalidEvent as error:
        raise RemoteError(f"its template makes no event: {error}") from error
    return SignedMembership(pdu, EventId(event_id(pdu, version)), version)


def _checked(template: Any, wanted: MembershipRequest) -> dict[str, Any]:
    """Return a template of the room, the user and the membership; else raise `RemoteError`."""
    content = template.get("content") if isinstance(template, dict) else None
    if not isinstance(template, dict) or not isinstance(content, dict):
        raise RemoteError("its response has no template")
    expected = wanted.fixed | {"membership": wanted.content["membership"]}
    for key, value in expected.items():
        found = content.get(key) if key == "membership" else template.get(key)
        if found != value:
            raise RemoteError(f"its template has the {key} {found!r}, not {value!r}")
    return template
