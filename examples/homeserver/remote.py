"""Signed requests to other servers."""

import re
import ssl
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
from signedjson.key import get_verify_key
from signedjson.sign import sign_json
from signedjson.types import SigningKey
from unpaddedbase64 import encode_base64
from yarl import URL

from storage import StoredEvent

from .web import Json, MatrixError, now_ms

Ids = Sequence[str]
TIMEOUT: Final = aiohttp.ClientTimeout(total=20)
KEYS_MS: Final = 3_600_000


class Remote:
    """The signed requests of this server: the `storage.federation.Remote` of its receiver."""

    def __init__(self, name: str, key: SigningKey, tls: ssl.SSLContext) -> None:
        self.name, self.key, self.key_id = name, key, f"{key.alg}:{key.version}"
        connector = aiohttp.TCPConnector(ssl=tls)
        self.session = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)

    async def request(
        self, server: str, method: str, *path: str, body: Json | None = None, **query: Any
    ) -> Json:
        """Return the response of a server below /_matrix/federation. Raise `MatrixError`."""
        uri = "/".join(("/_matrix/federation", *(quote(part, safe="") for part in path)))
        uri += "?" + urlencode(query, doseq=True) if query else ""
        claim = sign_json(claim_of(method, uri, self.name, server, body), self.name, self.key)
        signature = claim["signatures"][self.name][self.key_id]
        header = f'X-Matrix origin="{self.name}",destination="{server}",'
        header += f'key="{self.key_id}",sig="{signature}"'
        return await self._fetch(server, method, uri, json=body, headers={"Authorization": header})

    async def _fetch(self, server: str, method: str, uri: str, **how: Any) -> Json:
        host = server if re.search(r":\d+$", server) else f"{server}:8448"
        url = URL(f"https://{host}{uri}", encoded=True)
        try:
            async with self.session.request(method, url, **how) as response:
                answer, status = await response.json(content_type=None), response.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise MatrixError(502, "M_UNKNOWN", f"{server}: {error!r}") from error
        if not isinstance(answer, dict) or status != 200:
            raise MatrixError(status, "M_UNKNOWN", f"{server}: {str(answer)[:500]}")
        return answer

    async def send(self, server: str, transaction: str, events: list[StoredEvent]) -> None:
        """Send a transaction. Its server may refuse single events: they are its loss."""
        body: Json = {"origin": self.name, "origin_server_ts": now_ms()}
        body["pdus"] = [one.json for one in events]
        await self.request(server, "PUT", "v1", "send", transaction, body=body)

    def own_keys(self) -> Json:
        """Return the response of /_matrix/key/v2/server."""
        key = encode_base64(get_verify_key(self.key).encode())
        keys: Json = {"verify_keys": {self.key_id: {"key": key}}, "old_verify_keys": {}}
        keys |= {"server_name": self.name, "valid_until_ts": now_ms() + KEYS_MS}
        return sign_json(keys, self.name, self.key)

    async def server_keys(self, server: str) -> Json:
        return await self._fetch(server, "GET", "/_matrix/key/v2/server")

    async def get_missing_events(
        self, server: str, room_id: str, *, earliest: Ids, latest: Ids, **how: int
    ) -> Json:
        body = {"earliest_events": [*earliest], "latest_events": [*latest], **how}
        return await self.request(server, "POST", "v1", "get_missing_events", room_id, body=body)

    async def event(self, server: str, event_id: str) -> Json:
        return await self.request(server, "GET", "v1", "event", event_id)

    async def state_ids(self, server: str, room_id: str, event_id: str) -> Json:
        return await self.request(server, "GET", "v1", "state_ids", room_id, event_id=event_id)

    async def state(self, server: str, room_id: str, event_id: str) -> Json:
        return await self.request(server, "GET", "v1", "state", room_id, event_id=event_id)

    async def backfill(self, server: str, room_id: str, event_ids: Ids, *, limit: int) -> Json:
        how: Json = {"v": event_ids, "limit": limit}
        return await self.request(server, "GET", "v1", "backfill", room_id, **how)

    async def event_auth(self, server: str, room_id: str, event_id: str) -> Json:
        return await self.request(server, "GET", "v1", "event_auth", room_id, event_id)


def claim_of(method: str, uri: str, origin: str, destination: str, body: Json | None) -> Json:
    """Return what a request is signed for."""
    claim = {"method": method, "uri": uri, "origin": origin, "destination": destination}
    return claim if body is None else {**claim, "content": body}
