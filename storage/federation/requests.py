"""Requests of one task to other servers: limited in time and number, with checked answers.

A failure of a server is recorded in `TaskRequests.failures` and raised as `RemoteError`. The caller
tries the next server, and keeps what others have given.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, ParamSpec

from signedjson.key import encode_verify_key_base64, get_verify_key
from signedjson.sign import sign_json
from signedjson.types import SigningKey

from storage import arguments as args
from storage.arguments import is_text
from storage.errors import InvalidSignature
from storage.event.signatures import read_old_keys
from storage.federation.remote import JsonObject, ReceiverLimits, Remote, RemoteError
from storage.ids import EventId, RoomId, ServerName
from storage.persist.receive import Pdu

P = ParamSpec("P")

logger: Final = logging.getLogger(__name__)


class TaskRequests:
    """The requests of one task. ``failures`` has the last failure of each server."""

    def __init__(self, remote: Remote, limits: ReceiverLimits) -> None:
        self.failures: dict[ServerName, str] = {}
        self._remote = remote
        self._limits = limits
        self._left = limits.requests_max
        self._end = asyncio.get_running_loop().time() + limits.task_seconds

    @property
    def seconds_left(self) -> float:
        """Return the time that is left for this task, 0 if it is over."""
        return max(0.0, self._end - asyncio.get_running_loop().time())

    @property
    def are_spent(self) -> bool:
        """Return whether no further request is made."""
        return self._left <= 0 or self.seconds_left <= 0

    def reason(self) -> str:
        """Return why this task did not get what it needed."""
        reasons = [f"{server}: {why}" for server, why in self.failures.items()]
        if self.are_spent:
            reasons.append("the limits of this task are reached")
        return "; ".join(reasons) or "no server returned what is missing"

    async def missing_events(
        self,
        server: ServerName,
        room_id: RoomId,
        earliest: Sequence[EventId],
        latest: Sequence[EventId],
    ) -> list[Pdu]:
        limit = self._limits.missing_events_max
        body = await self._send(
            server,
            self._remote.get_missing_events,
            server,
            room_id,
            earliest=earliest,
            latest=latest,
            limit=limit,
            min_depth=0,
        )
        return self._pdus(server, body, "events")[:limit]

    async def event(self, server: ServerName, event_id: EventId) -> list[Pdu]:
        body = await self._send(server, self._remote.event, server, event_id)
        return self._pdus(server, body, "pdus")[:1]

    async def state_ids(
        self, server: ServerName, room_id: RoomId, event_id: EventId
    ) -> tuple[list[EventId], list[EventId]]:
        """Return the ids of the state before an event, and of its auth chain."""
        body = await self._send(server, self._remote.state_ids, server, room_id, event_id)
        return self._ids(server, body, "pdu_ids"), self._ids(server, body, "auth_chain_ids")

    async def state(self, server: ServerName, room_id: RoomId, event_id: EventId) -> list[Pdu]:
        """Return the state before an event, and its auth chain."""
        body = await self._send(server, self._remote.state, server, room_id, event_id)
        return self._pdus(server, body, "pdus") + self._pdus(server, body, "auth_chain")

    async def backfill(
        self, server: ServerName, room_id: RoomId, event_ids: Sequence[EventId], limit: int
    ) -> list[Pdu]:
        body = await self._send(
            server, self._remote.backfill, server, room_id, event_ids, limit=limit
        )
        return self._pdus(server, body, "pdus")[:limit]

    async def event_auth(self, server: ServerName, room_id: RoomId, event_id: EventId) -> list[Pdu]:
        body = await self._send(server, self._remote.event_auth, server, room_id, event_id)
        return self._pdus(server, body, "auth_chain")

    async def _send(
        self,
        server: ServerName,
        method: Callable[P, Awaitable[JsonObject]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> JsonObject:
        if self.are_spent:
            raise RemoteError("the limits of this task are reached")
        self._left -= 1
        seconds = min(self._limits.request_seconds, self.seconds_left)
        try:
            return await answer_of(server, seconds, method, *args, **kwargs)
        except RemoteError as error:
            self.failures[server] = str(error)
            raise

    def _pdus(self, server: ServerName, body: JsonObject, name: str) -> list[Pdu]:
        try:
            return pdus_in(body, name, self._limits.state_events_max)
        except RemoteError as error:
            self.failures[server] = str(error)
            raise

    def _ids(self, server: ServerName, body: JsonObject, name: str) -> list[EventId]:
        ids = body.get(name)
        if not isinstance(ids, list) or not all(
            is_text(event_id) and event_id[:1] == "$" for event_id in ids
        ):
            self.failures[server] = f"{name} is no list of event ids"
            raise RemoteError(self.failures[server])
        if len(ids) > self._limits.state_events_max:
            self.failures[server] = f"{name} has {len(ids)} ids"
            raise RemoteError(self.failures[server])
        return list(dict.fromkeys(map(EventId, ids)))


async def answer_of(
    server: ServerName,
    seconds: float,
    method: Callable[P, Awaitable[JsonObject]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> JsonObject:
    """Return the response to one request; raise `RemoteError` for every kind of failure."""
    try:
        async with asyncio.timeout(seconds):
            body: Any = await method(*args, **kwargs)
    except RemoteError:
        raise
    except TimeoutError as error:
        raise RemoteError(f"no answer in {seconds:.0f} s") from error
    except Exception as error:
        # The class is the homeserver's; it cannot be listed here.
        logger.warning("a request to %s failed", server, exc_info=True)
        raise RemoteError(f"{type(error).__name__}: {error}") from error
    if not isinstance(body, dict):
        raise RemoteError(f"the response is no JSON object but {type(body).__name__}")
    return body


def pdus_in(body: JsonObject, name: str, limit: int) -> list[Pdu]:
    """Return a list of PDUs of a response; raise `RemoteError` if there is none, or if it is cut.

    An item that cannot be a PDU is refused as well: the response is damaged.
    """
    pdus = body.get(name)
    if not isinstance(pdus, list):
        raise RemoteError(f"the response has no list {name}")
    if len(pdus) > limit:
        raise RemoteError(f"{name} has {len(pdus)} events: at most {limit} are read")
    if not all(isinstance(pdu, bytes | dict) for pdu in pdus):
        raise RemoteError(f"{name} holds something else than PDUs")
    return pdus


# --------------------------------------------------------------------------------------------------
# Signatures of requests between servers: the header `Authorization`, and the published keys.
#
# Source: server-server API, "Request Authentication", "Publishing Keys".

SCHEME: Final = re.compile(r"X-Matrix\s+", re.IGNORECASE)
PARAMETER: Final = re.compile(r'(?<!\w)(\w++)\s*+=\s*+(?:"([^"]*+)"|([^",\s]++))')
"""A name and its value. It reads each character once: anybody may send a long header."""


class SignedHeader(NamedTuple):
    """The header `Authorization` of a request. ``destination`` is "" in requests of old servers."""

    origin: str
    key_id: str
    signature: str
    destination: str


def claim_of(
    method: str, uri: str, origin: str, destination: str, content: JsonObject | None
) -> dict[str, Any]:
    """Return the object that is signed for a request. ``content`` is None without a body."""
    claim = {"method": method, "uri": uri, "origin": origin, "destination": destination}
    return claim if content is None else {**claim, "content": content}


def authorization(claim: dict[str, Any], key: SigningKey) -> str:
    origin, key_id = claim["origin"], f"{key.alg}:{key.version}"
    signature = sign_json(claim, origin, key)["signatures"][origin][key_id]
    return (
        f'X-Matrix origin="{origin}",destination="{claim["destination"]}",'
        f'key="{key_id}",sig="{signature}"'
    )


def read_authorization(header: str | None) -> SignedHeader:
    """Return the parts of a header `Authorization`. `InvalidSignature` if one is missing."""
    if header is None:
        raise InvalidSignature("the request has no header Authorization")
    scheme = SCHEME.match(args.text(header))
    parameters = PARAMETER.findall(header[scheme.end() :]) if scheme else []
    values = {name.lower(): quoted or token for name, quoted, token in parameters}
    try:
        parts = values["origin"], values["key"], values["sig"], values.get("destination", "")
    except KeyError as error:
        raise InvalidSignature(f"the header Authorization has no {error}") from error
    return SignedHeader(*parts)


def published_keys(
    server_name: str,
    key: SigningKey,
    *,
    old_signing_keys: Mapping[str, Mapping[str, Any]] | None = None,
    valid_ms: int = 3_600_000,
) -> dict[str, Any]:
    """Return the response of /_matrix/key/v2/server. It is valid for ``valid_ms`` from now.

    ``old_signing_keys`` are those of `storage.open`. `InputError`.
    """
    name = args.own_server(server_name)
    verify_key = encode_verify_key_base64(get_verify_key(args.signing_key(key)))
    keys = {
        "server_name": name,
        "verify_keys": {f"{key.alg}:{key.version}": {"key": verify_key}},
        "old_verify_keys": {
            key_id: {"key": encode_verify_key_base64(old.verify_key), "expired_ts": old.expired_ts}
            for key_id, old in read_old_keys(old_signing_keys or {}).items()
        },
        "valid_until_ts": time.time_ns() // 1_000_000 + args.whole(valid_ms, "valid_ms"),
    }
    return dict(sign_json(keys, name, key))
