"""Signed requests to other servers, and the queues to them."""

import asyncio
import itertools
import logging
import re
import ssl
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
from signedjson.key import get_verify_key
from signedjson.sign import sign_json
from signedjson.types import SigningKey
from unpaddedbase64 import encode_base64
from yarl import URL

from storage import EventId, StorageError, Store

from .web import Json, MatrixError, now_ms

Ids = Sequence[str]
logger: Final = logging.getLogger(__name__)
TIMEOUT: Final = aiohttp.ClientTimeout(total=20)
KEYS_MS: Final = 3_600_000
CURSOR: Final = "federation"
POLL_S, PAUSE_S, PAUSE_S_MAX = 1.0, 0.5, 60.0
PDUS_MAX: Final = 50


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


class Outgoing:
    """A queue for each server. The cursor stays before the first event that a server lacks."""

    def __init__(self, store: Store, remote: Remote) -> None:
        self._store, self._remote = store, remote
        self._queues = defaultdict[str, dict[EventId, int]](dict)  # with positions in the outbox
        self._wakes = defaultdict[str, asyncio.Event](asyncio.Event)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._read, self._numbers = 0, itertools.count(now_ms())

    def wake(self, server: str = "") -> None:
        """Look for new events, or send to a server that was down: a request of it came."""
        self._wakes[server].set()

    def put(self, servers: Iterable[str], event_id: EventId, position: int | None = None) -> None:
        """Send an event to servers. Without a position, another server gave it to this one."""
        for server in {*servers} - {self._remote.name}:
            self._queues[server][event_id] = position or self._read + 1
            self.wake(server)
            if server not in self._tasks:
                self._tasks[server] = asyncio.create_task(self._serve(server))

    async def run(self) -> None:
        """Fill the queues, for as long as the server runs."""
        self._read = saved = await self._store.cursors.get(CURSOR)
        while True:
            listed = await self._store.outbox(self._read)
            for one in listed:
                self.put(one.servers, one.event_id, one.position)
            if self._read == listed.upto:
                await self._sleep("", POLL_S)
            self._read = listed.upto
            unsent = [min(queue.values()) - 1 for queue in self._queues.values() if queue]
            if min([*unsent, self._read]) > saved:
                saved = min([*unsent, self._read])
                await self._store.cursors.set(CURSOR, saved)

    async def _sleep(self, server: str, seconds: float | None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wakes[server].wait(), seconds)
        self._wakes[server].clear()

    async def _serve(self, server: str) -> None:
        queue, pause = self._queues[server], PAUSE_S
        while True:
            try:
                while queue:
                    await self._send(server, [*itertools.islice(queue, PDUS_MAX)])
                    pause = PAUSE_S
                await self._sleep(server, None)
            except (MatrixError, StorageError) as error:
                logger.warning("%s gets nothing for %.1f s: %s", server, pause, error)
                await self._sleep(server, pause)
                pause = min(2 * pause, PAUSE_S_MAX)

    async def _send(self, server: str, ids: list[EventId]) -> None:
        events = await self._store.events(ids)
        body: Json = {"origin": self._remote.name, "origin_server_ts": now_ms()}
        body["pdus"] = [events[one].json for one in ids if one in events]
        path = "v1", "send", str(next(self._numbers))
        answer = await self._remote.request(server, "PUT", *path, body=body)
        for event_id, result in answer.get("pdus", {}).items():
            if "error" in result:
                logger.warning("%s refused %s: %s", server, event_id, result["error"])
        for one in ids:
            del self._queues[server][one]
