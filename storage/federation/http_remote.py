"""`HttpRemote`: the requests to other servers, signed. The homeserver gives it an HTTP request.

Source: server-server API.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

from signedjson.types import SigningKey

from storage import arguments as args
from storage.federation.remote import JsonObject, RemoteError
from storage.federation.requests import authorization, claim_of
from storage.ids import ServerName
from storage.queries.events import StoredEvent

HttpRequest = Callable[
    [ServerName, str, str, Mapping[str, str], JsonObject | None], Awaitable[tuple[int, Any]]
]
"""A request to a server: method, path with query, headers, and the object to send as JSON.

It returns the status and the decoded JSON of the response. Send the path as it is: the signature
covers it. Raise `RemoteError` if there is no response. The server is a host, and perhaps a port.
Any sender of an event may name it, so refuse the addresses of your own network.
"""

FEDERATION: Final = "/_matrix/federation"
REASON_MAX: Final = 500
NO_V2: Final = frozenset({400, 404})
"""Statuses by which an old server says that it lacks v2 of a request."""


class HttpRemote:
    """All requests of a server. It is a `MembershipRemote`, and its `send` is for a `Sender`.

    With ``omit_members`` a server may leave the members out of its answer to a join (MSC3706). Call
    `Receiver.complete_partial_rooms` from time to time: it fetches them.
    """

    def __init__(
        self,
        server_name: str,
        signing_key: SigningKey,
        request: HttpRequest,
        *,
        omit_members: bool = False,
    ) -> None:
        self.server_name = args.server(server_name)
        self.signing_key: SigningKey = args.signing_key(signing_key)
        self._request, self._omit_members = request, omit_members

    async def get_missing_events(
        self,
        server: str,
        room_id: str,
        *,
        earliest: Sequence[str],
        latest: Sequence[str],
        limit: int,
        min_depth: int,
    ) -> JsonObject:
        """Request events between others."""
        body: JsonObject = {
            "earliest_events": args.events(earliest),
            "latest_events": args.events(latest),
            "limit": args.whole(limit, "limit"),
            "min_depth": args.whole(min_depth, "min_depth"),
        }
        return await self._signed(server, "POST", "v1", "get_missing_events", room_id, body=body)

    async def event(self, server: str, event_id: str) -> JsonObject:
        """Request one event."""
        return await self._get(server, "event", event_id)

    async def state_ids(self, server: str, room_id: str, event_id: str) -> JsonObject:
        """Request the ids of the state before an event."""
        return await self._get(server, "state_ids", room_id, event_id=args.event(event_id))

    async def state(self, server: str, room_id: str, event_id: str) -> JsonObject:
        """Request the state before an event."""
        return await self._get(server, "state", room_id, event_id=args.event(event_id))

    async def backfill(
        self, server: str, room_id: str, event_ids: Sequence[str], *, limit: int
    ) -> JsonObject:
        """Request events and those before them."""
        query = {"v": args.events(event_ids), "limit": args.whole(limit, "limit")}
        return await self._get(server, "backfill", room_id, **query)

    async def event_auth(self, server: str, room_id: str, event_id: str) -> JsonObject:
        """Request the auth chain of an event."""
        return await self._get(server, "event_auth", room_id, event_id)

    async def server_keys(self, server: str) -> JsonObject:
        """Request the keys of a server. The request has no signature."""
        return await self._answer(server, "GET", "/_matrix/key/v2/server", {}, None)

    async def make_join(
        self, server: str, room_id: str, user_id: str, *, versions: Sequence[str]
    ) -> JsonObject:
        """Request the template of a join."""
        known_versions = args.texts(versions, "versions")
        return await self._get(server, "make_join", room_id, user_id, ver=known_versions)

    async def make_knock(
        self, server: str, room_id: str, user_id: str, *, versions: Sequence[str]
    ) -> JsonObject:
        """Request the template of a knock."""
        known_versions = args.texts(versions, "versions")
        return await self._get(server, "make_knock", room_id, user_id, ver=known_versions)

    async def make_leave(self, server: str, room_id: str, user_id: str) -> JsonObject:
        """Request the template of a leave."""
        return await self._get(server, "make_leave", room_id, user_id)

    async def send_join(
        self, server: str, room_id: str, event_id: str, pdu: JsonObject
    ) -> JsonObject:
        """Send a join, and return the state before it."""
        query = {"omit_members": "true"} if self._omit_members else {}
        path = ("send_join", room_id, event_id)
        return await self._put_v2(server, *path, body=pdu, pdu=pdu, **query)

    async def send_knock(
        self, server: str, room_id: str, event_id: str, pdu: JsonObject
    ) -> JsonObject:
        """Send a knock."""
        return await self._signed(server, "PUT", "v1", "send_knock", room_id, event_id, body=pdu)

    async def send_leave(
        self, server: str, room_id: str, event_id: str, pdu: JsonObject
    ) -> JsonObject:
        """Send a leave."""
        return await self._put_v2(server, "send_leave", room_id, event_id, body=pdu, pdu=pdu)

    async def invite(
        self, server: str, room_id: str, event_id: str, body: JsonObject
    ) -> JsonObject:
        """Send an invite."""
        fields = args.mapping(body, "the body")
        event, shown = fields.get("event"), fields.get("invite_room_state")
        pdu = event if isinstance(event, dict) else {}
        old = {**pdu, "unsigned": {"invite_room_state": shown}}
        return await self._put_v2(server, "invite", room_id, event_id, body=body, pdu=old)

    async def send(self, server: str, transaction_id: str, events: Sequence[StoredEvent]) -> None:
        """Send a transaction. The server may refuse single events of it."""
        body: JsonObject = {
            "origin": self.server_name,
            "origin_server_ts": time.time_ns() // 1_000_000,
            "pdus": [
                args.instance(event, StoredEvent, "an event").json
                for event in args.listed(events, "events")
            ],
        }
        await self._signed(server, "PUT", "v1", "send", transaction_id, body=body)

    async def _get(self, server: str, *path: str, **query: Any) -> JsonObject:
        return await self._signed(server, "GET", "v1", *path, **query)

    async def _put_v2(
        self, server: str, *path: str, body: JsonObject, pdu: JsonObject, **query: Any
    ) -> JsonObject:
        """Send a membership; if the server has no v2 for it, and the room is old, by v1 of the API.

        The body is a PDU then. One of the room versions 1 and 2 has its id in it.
        """
        is_old = "event_id" in args.mapping(pdu, "the event")
        try:
            return await self._signed(server, "PUT", "v2", *path, body=body, **query)
        except RemoteError as error:
            if error.status not in NO_V2 or not is_old:
                raise
            try:
                return await self._signed(server, "PUT", "v1", *path, body=pdu)
            except RemoteError as again:
                raise (error if again.status in NO_V2 else again) from error

    async def _signed(
        self,
        server: str,
        method: str,
        *path: str,
        body: JsonObject | None = None,
        **query: Any,
    ) -> JsonObject:
        uri = "/".join((FEDERATION, *(quote(args.text(part), safe="") for part in path)))
        uri += "?" + urlencode(query, doseq=True) if query else ""
        signed_body = None if body is None else args.mapping(body, "the body")
        claim = claim_of(method, uri, self.server_name, args.text(server), signed_body)
        header = {"Authorization": authorization(claim, self.signing_key)}
        return await self._answer(server, method, uri, header, body)

    async def _answer(
        self,
        server: str,
        method: str,
        uri: str,
        headers: Mapping[str, str],
        body: JsonObject | None,
    ) -> JsonObject:
        """Return the object of a response; raise `RemoteError` for a status other than 200.

        Also raise it for a name that is no host: in an address, it could be another path. The old
        form of an answer is a list of 200 and the object.
        """
        if args.SERVER_NAME.fullmatch(args.text(server)) is None:
            raise RemoteError(f"{server[:REASON_MAX]!r} is not a server name")
        status, answer = await self._request(ServerName(server), method, uri, headers, body)
        is_old = isinstance(answer, list) and len(answer) == 2 and answer[0] == 200
        content = answer[1] if is_old else answer
        if status == 200 and isinstance(content, dict):
            return content
        fields = answer if isinstance(answer, dict) else {}
        raise RemoteError(
            f"{status}: {str(answer)[:REASON_MAX]}",
            status=status,
            errcode=_text(fields.get("errcode")),
            room_version=_text(fields.get("room_version")),
        )


def _text(value: object) -> str | None:
    return value if args.is_text(value) else None
