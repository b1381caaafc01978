"""`Remote`: the requests of a `Receiver`; `MembershipRemote`: those of `Memberships` as well.

`HttpRemote` implements both, and needs one function from the homeserver: an HTTP request.

Each method sends one request to one server and returns the decoded JSON object of the response,
whatever it holds: the receiver checks it. PDUs in it may be bytes instead of objects; they are then
stored byte for byte. Decode integers exactly, as Python's `json` does.

A method raises `RemoteError` if it got no response, or another one than 200. The receiver limits
the time of each call and cancels it at its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from storage import arguments as args
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


# --------------------------------------------------------------------------------------------------
# The bounds on what one message of another server can make this server do.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    """The limits of a `Receiver`. Work that reaches one stops, and its outcome says so.

    A *task* is the gap of one room in one transaction, a join, or a backfill.
    """

    pdus_max: int = 50
    """PDUs of one transaction. More are an `InputError`; the specification allows no more."""

    rooms_at_once: int = 4
    """Rooms of one transaction that are worked on at the same time."""

    request_seconds: float = 10.0
    """Time for one request to another server."""

    task_seconds: float = 60.0
    """Time for the requests of one task, with the wait for another task in the same room."""

    requests_max: int = 100
    """Requests to other servers in one task, without those for keys."""

    requests_at_once: int = 5
    """Single events that one task requests at the same time."""

    send_membership_seconds: float = 60.0
    """Time for one send_join, send_knock, send_leave or invite. A server resolves a state first."""

    resident_servers_max: int = 5
    """Servers that are tried for one join, knock or leave."""

    servers_max: int = 3
    """Servers that are tried for the same answer."""

    missing_rounds_max: int = 5
    """Requests of `get_missing_events` that follow each other backwards in one gap."""

    missing_events_max: int = 20
    """Events of one answer to `get_missing_events`."""

    backfill_max: int = 100
    """Events of one answer to `backfill`."""

    left_gap_seconds: float = 604_800.0
    """Gaps that were left open for longer are filled by `Receiver.backfill` alone."""

    states_max: int = 5
    """Events of one task for which the state before them is requested."""

    state_events_max: int = 100_000
    """Events of one state, and of its auth chain. A larger state is refused."""

    single_events_max: int = 20
    """Events of a state that are requested one by one. If more are missing, all are requested."""

    keys_seconds: float = 20.0
    """Time for the keys of all servers that signed the events of one answer."""

    key_servers_at_once: int = 20
    """Servers whose keys are requested at the same time."""

    key_servers_cached: int = 10_000
    """Servers whose keys are kept in memory."""

    key_retry_seconds: float = 60.0
    """Pause until a server is asked again for a key that it did not have, or could not return."""

    completing_seconds: float = 30.0
    """Pause until rooms of which members are missing are looked for again."""

    def __post_init__(self) -> None:
        check_limits(self)


def check_limits(limits: Any) -> None:
    """Raise `InputError` unless each field of a dataclass is a positive number of its type."""
    for field in fields(limits):
        args.positive(getattr(limits, field.name), field.name, whole=field.type is int)
