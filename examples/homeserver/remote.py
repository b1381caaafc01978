"""Requests to other servers over HTTPS. `storage.federation.HttpRemote` makes and signs them."""

import re
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
from yarl import URL

from storage.federation import JsonObject, RemoteError


class HttpClient:
    """The HTTP client of this server."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        connector = aiohttp.TCPConnector(ssl=tls)
        self.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60))

    async def request(
        self,
        server: str,
        method: str,
        uri: str,
        headers: Mapping[str, str],
        body: JsonObject | None,
    ) -> tuple[int, Any]:
        """Return the status and the JSON of a response."""
        host = server if re.search(r":\d+$", server) else f"{server}:8448"
        url = URL(f"https://{host}{uri}", encoded=True)
        try:
            async with self.session.request(method, url, json=body, headers=headers) as response:
                return response.status, await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RemoteError(f"{server}: {error!r}") from error
