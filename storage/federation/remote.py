"""`Remote`: the requests of a `Receiver`; `MembershipRemote`: those of `Memberships` as well.

`HttpRemote` implements both, and needs one function from the homeserver: an HTTP request.

Each method sends one request to one server and returns the decoded JSON object of the response,
whatever it holds: the receiver checks it. PDUs in it may be bytes instead of objects; they are then
stored byte for byte. Decode integers exactly, as Python's `json` does.

A method raises `RemoteError` if it got no response, or another one than 200. The receiver limits
the time of each call and cancels it at its end.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from storage.ids import EventId, RoomId, ServerName, UserId

JsonObject = Mapping[str, Any]
"""The decoded JSON object of a response: a dict."""


class RemoteError(Exception):
    """Another server did not answer, or refused: the receiver tries the next server.

    Raise it in a `Remote`. Any other exception counts as the same, and is logged with its
    traceback. ``status`` and ``errcode`` are those of the response, if there was one.
    ``room_version`` goes with the errcode M_INCOMPATIBLE_ROOM_VERSION.
    """

    def __init__(
        self,
        reason: str,
        *,
        status: int | None = None,
        errcode: str | None = None,
        room_version: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.errcode = errcode
        self.room_version = room_version


class Remote(Protocol):
    """Requests to other servers. ``server`` is the one that is asked."""

    async def get_missing_events(
        self,
        server: ServerName,
        room_id: RoomId,
        *,
        earliest: Sequence[EventId],
        latest: Sequence[EventId],
        limit: int,
        min_depth: int,
    ) -> JsonObject:
        """POST /_matrix/federation/v1/get_missing_events/{roomId}: ``{"events": [pdu, …]}``.

        The arguments are the fields ``earliest_events``, ``latest_events``, ``limit`` and
        ``min_depth`` of the body.
        """
        ...

    async def event(self, server: ServerName, event_id: EventId) -> JsonObject:
        """GET /_matrix/federation/v1/event/{eventId}: ``{"pdus": [pdu]}``."""
        ...

    async def state_ids(self, server: ServerName, room_id: RoomId, event_id: EventId) -> JsonObject:
        """GET /_matrix/federation/v1/state_ids/{roomId}?event_id=…: the state before an event.

        ``{"pdu_ids": [id, …], "auth_chain_ids": [id, …]}``.
        """
        ...

    async def state(self, server: ServerName, room_id: RoomId, event_id: EventId) -> JsonObject:
        """GET /_matrix/federation/v1/state/{roomId}?event_id=…: the state before an event, whole.

        ``{"pdus": [pdu, …], "auth_chain": [pdu, …]}``.
        """
        ...

    async def backfill(
        self, server: ServerName, room_id: RoomId, event_ids: Sequence[EventId], *, limit: int
    ) -> JsonObject:
        """GET /_matrix/federation/v1/backfill/{roomId}?v=…&v=…&limit=…: ``{"pdus": [pdu, …]}``."""
        ...

    async def event_auth(
        self, server: ServerName, room_id: RoomId, event_id: EventId
    ) -> JsonObject:
        """GET /_matrix/federation/v1/event_auth/{roomId}/{eventId}.

        ``{"auth_chain": [pdu, …]}``.
        """
        ...

    async def server_keys(self, server: ServerName) -> JsonObject:
        """GET /_matrix/key/v2/server of ``server``, or what a notary returned for it.

        ``{"server_name": …, "verify_keys": …, "old_verify_keys": …, "valid_until_ts": ms,
        "signatures": …}``. The receiver checks the server's own signature.
        """
        ...


class MembershipRemote(Remote, Protocol):
    """Requests by which local users enter and leave rooms of other servers.

    ``pdu`` is a signed event. ``versions`` are the values of the parameter ``ver``.
    """

    async def make_join(
        self, server: ServerName, room_id: RoomId, user_id: UserId, *, versions: Sequence[str]
    ) -> JsonObject:
        """GET /_matrix/federation/v1/make_join/{roomId}/{userId}?ver=…&ver=….

        ``{"room_version": …, "event": template}``.
        """
        ...

    async def make_knock(
        self, server: ServerName, room_id: RoomId, user_id: UserId, *, versions: Sequence[str]
    ) -> JsonObject:
        """GET /_matrix/federation/v1/make_knock/{roomId}/{userId}: as `make_join`."""
        ...

    async def make_leave(self, server: ServerName, room_id: RoomId, user_id: UserId) -> JsonObject:
        """GET /_matrix/federation/v1/make_leave/{roomId}/{userId}: as `make_join`."""
        ...

    async def send_join(
        self, server: ServerName, room_id: RoomId, event_id: EventId, pdu: JsonObject
    ) -> JsonObject:
        """PUT /_matrix/federation/v2/send_join/{roomId}/{eventId}.

        ``{"event": pdu, "state": [pdu, …], "auth_chain": [pdu, …]}``.
        """
        ...

    async def send_knock(
        self, server: ServerName, room_id: RoomId, event_id: EventId, pdu: JsonObject
    ) -> JsonObject:
        """PUT /_matrix/federation/v1/send_knock/{roomId}/{eventId}.

        ``{"knock_room_state": [pdu, …]}``.
        """
        ...

    async def send_leave(
        self, server: ServerName, room_id: RoomId, event_id: EventId, pdu: JsonObject
    ) -> JsonObject:
        """PUT /_matrix/federation/v2/send_leave/{roomId}/{eventId}: ``{}``."""
        ...

    async def invite(
        self, server: ServerName, room_id: RoomId, event_id: EventId, body: JsonObject
    ) -> JsonObject:
        """PUT /_matrix/federation/v2/invite/{roomId}/{eventId}: ``{"event": pdu}``.

        ``body`` has ``event``, ``room_version`` and ``invite_room_state``.
        """
        ...
