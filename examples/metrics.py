"""Expose the metrics of a store to Prometheus from your own process, and scrape them once.

Run it with a DSN in STORAGE_DSN, or without one on the embedded Postgres:

    python metrics.py
"""

import asyncio
import os
import time
from urllib.request import urlopen

from prometheus_client import CollectorRegistry, start_http_server

import storage
from storage.observability.prometheus import expose
from storage.testing import RoomBuilder

ALICE = "@alice:s1.test"


async def main() -> None:
    """Store a room, then read the metrics over HTTP as Prometheus does."""
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    dsn = os.environ.get("STORAGE_DSN")
    async with storage.open(dsn, server_name="s1.test", migrate=True) as store:
        expose(store, registry)
        room = RoomBuilder("12", seed=time.time_ns())
        room.start(ALICE)
        await store.append(room.pdus)
        await store.sync(ALICE)
        page = await asyncio.to_thread(scrape, f"http://127.0.0.1:{server.server_port}/metrics")
    for line in page.splitlines():
        if line.startswith(("room_storage_events_total", "room_storage_call_seconds_count")):
            print(line)
    server.shutdown()
    thread.join()


def scrape(url: str) -> str:
    """Return the page."""
    with urlopen(url) as response:  # noqa: S310 - the address is ours
        text: bytes = response.read()
    return text.decode()


asyncio.run(main())
