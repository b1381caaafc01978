"""Requests to other servers, and the keys of their signatures. Server-server API."""

import re
import ssl
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
from signedjson.key import decode_verify_key_bytes, get_verify_key
from signedjson.sign import SignatureVerifyException, sign_json, verify_signed_json
from signedjson.types import SigningKey, VerifyKey
from unpaddedbase64 import decode_base64, encode_base64
from yarl import URL

from .web import Json, MatrixError, now_ms

TIMEOUT: Final = aiohttp.ClientTimeout(total=20)
KEYS_MS: Final = 3_600_000
PARAMETER: Final = re.compile(r'(\w+)="?([^",]*)"?')


class Remote:
    """The signed requests of this server: the `storage.federation.Remote` of its receiver."""

    def __init__(self, name: str, key: SigningKey, tls: ssl.SSLContext) -> None:
        self.name, self.key, self.key_id = name, key, f"{key.alg}:{key.version}"
        connector = aiohttp.TCPConnector(ssl=tls)
        self._session = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)
        self._keys: dict[str, tuple[Json, float]] = {}

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def request(
        self, server: str, method: str, *path: str, body: Json | None = None, **query: Any
    ) -> Json:
        """Return the response of a server below /_matrix/federation. Raise `MatrixError`."""
        uri = "/".join(("/_matrix/federation", *(quote(part, safe="") for part in path)))
        uri += "?" + urlencode(query, doseq=True) if query else ""
        claim = sign_json(_claim(method, uri, self.name, server, body), self.name, self.key)
        signature = claim["signatures"][self.name][self.key_id]
        header = f'X-Matrix origin="{self.name}",destination="{server}",'
        header += f'key="{self.key_id}",sig="{signature}"'
        return await self._fetch(server, method, uri, json=body, headers={"Authorization": header})

    async def _fetch(self, server: str, method: str, uri: str, **how: Any) -> Json:
        host = server if re.search(r":\d+$", server) else f"{server}:8448"
        url = URL(f"https://{host}{uri}", encoded=True)
        try:
            async with self._session.request(method, url, **how) as response:
                answer, status = await response.json(content_type=None), response.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise MatrixError(502, "M_UNKNOWN", f"{server}: {error!r}") from error
        if not isinstance(answer, dict) or status != 200:
            raise MatrixError(status, "M_UNKNOWN", f"{server}: {str(answer)[:500]}")
        return answer

    async def origin_of(self, method: str, uri: str, header: str, body: Json | None) -> str:
        """Return the server that signed a request. Raise `MatrixError` for another signature."""
        given: dict[str, str] = dict(PARAMETER.findall(header.removeprefix("X-Matrix ")))
        origin, key_id = given.get("origin", ""), given.get("key", "")
        claim = _claim(method, uri, origin, self.name, body)
        claim["signatures"] = {origin: {key_id: given.get("sig", "")}}
        try:
            verify_signed_json(claim, origin, await self._verify_key(origin, key_id))
        except (SignatureVerifyException, LookupError, ValueError) as error:
            raise MatrixError(401, "M_UNAUTHORIZED", f"{origin!r}: {error!r}") from None
        return origin

    def own_keys(self) -> Json:
        """Return the response of /_matrix/key/v2/server."""
        key = encode_base64(get_verify_key(self.key).encode())
        keys: Json = {"verify_keys": {self.key_id: {"key": key}}, "old_verify_keys": {}}
        keys |= {"server_name": self.name, "valid_until_ts": now_ms() + KEYS_MS}
        return sign_json(keys, self.name, self.key)

    async def _verify_key(self, server: str, key_id: str) -> VerifyKey:
        keys, until = self._keys.get(server, ({}, 0.0))
        if until < time.monotonic():
            keys = (await self.server_keys(server))["verify_keys"]
            self._keys[server] = keys, time.monotonic() + 60
        return decode_verify_key_bytes(key_id, decode_base64(keys[key_id]["key"]))

    # ---------------------------------------------------------------------------------------------
    # what the receiver requests

    async def server_keys(self, server: str) -> Json:
        """Return the keys of a server."""
        return await self._fetch(server, "GET", "/_matrix/key/v2/server")

    async def get_missing_events(
        self,
        server: str,
        room_id: str,
        *,
        earliest: Sequence[str],
        latest: Sequence[str],
        limit: int,
        min_depth: int,
    ) -> Json:
        """Return events between those that are stored and those that came."""
        body = {"earliest_events": [*earliest], "latest_events": [*latest], "limit": limit}
        body["min_depth"] = min_depth
        return await self.request(server, "POST", "v1", "get_missing_events", room_id, body=body)

    async def event(self, server: str, event_id: str) -> Json:
        """Return one event."""
        return await self.request(server, "GET", "v1", "event", event_id)

    async def state_ids(self, server: str, room_id: str, event_id: str) -> Json:
        """Return the ids of the state before an event, and of its auth chain."""
        return await self.request(server, "GET", "v1", "state_ids", room_id, event_id=event_id)

    async def state(self, server: str, room_id: str, event_id: str) -> Json:
        """Return the state before an event, and its auth chain."""
        return await self.request(server, "GET", "v1", "state", room_id, event_id=event_id)

    async def backfill(
        self, server: str, room_id: str, event_ids: Sequence[str], *, limit: int
    ) -> Json:
        """Return these events and their ancestors."""
        how: dict[str, Any] = {"v": [*event_ids], "limit": limit}
        return await self.request(server, "GET", "v1", "backfill", room_id, **how)

    async def event_auth(self, server: str, room_id: str, event_id: str) -> Json:
        """Return the auth chain of an event."""
        return await self.request(server, "GET", "v1", "event_auth", room_id, event_id)


def _claim(method: str, uri: str, origin: str, destination: str, body: Json | None) -> Json:
    """Return what a request is signed for."""
    claim = {"method": method, "uri": uri, "origin": origin, "destination": destination}
    return claim if body is None else {**claim, "content": body}
