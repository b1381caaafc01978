"""A second process follows the first: its sync wakes up as soon as the first has stored an event.

The first process writes and serves replication over TCP. The worker is another process with a store
of its own on the same database; it only reads. Run it with a DSN in STORAGE_DSN, or without one on
the embedded Postgres:

    python replication_worker.py
"""

import asyncio
import os
import sys
import time

import storage
from storage.replication import Client, Server
from storage.testing import RoomBuilder

ALICE, BOB = "@alice:s1.test", "@bob:s1.test"
MESSAGES = 3


async def worker(port: int) -> None:
    """Sync as Bob until all messages are there. This is the second process."""
    dsn = os.environ.get("STORAGE_DSN")
    async with (
        storage.open(dsn, server_name="s1.test", instance_name="worker") as store,
        Client(store, "127.0.0.1", port),
    ):
        answer = await store.sync(BOB)
        print("worker: ready", flush=True)
        seen = 0
        while seen < MESSAGES:
            answer = await store.sync(BOB, since=answer.next_batch, timeout_ms=30_000)
            for room in answer.join.values():
                for event in room.timeline.events:
                    print("worker: Bob gets", event.content["body"], flush=True)
                    seen += 1
        for name, stream in store.streams.items():
            print(f"worker: {name} is at {stream.linear()}")


async def writer() -> None:
    """Store a room, start the worker, then send messages."""
    room = RoomBuilder("12", seed=time.time_ns())
    room.start(ALICE)
    room.join(BOB)
    dsn = os.environ.get("STORAGE_DSN")
    async with (
        storage.open(dsn, server_name="s1.test", migrate=True) as store,
        await Server(store).serve(port=0) as server,
    ):
        await store.append(room.pdus)
        port = server.address[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, str(port), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        print((await process.stdout.readline()).decode(), end="")
        for number in range(MESSAGES):
            await store.append([room.message(ALICE, f"message {number}").pdu])
        print((await process.stdout.read()).decode(), end="")
        print("the worker ended with", await process.wait())


asyncio.run(worker(int(sys.argv[1])) if len(sys.argv) > 1 else writer())
