"""A session with Redis ends although a cancellation was lost, as by redis-py on Python 3.11."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from storage.replication import ReplicationPeer
from storage.replication.commands import RemoteServerUp
from storage.replication.redis_transport import RedisTransport
from tests.replication.processes import SERVER_NAME, Process, limit
from tests.replication.redis_server import RedisServer
from tests.replication.sessions import check_complete


class Sending:
    """The method of a transport that sends. Its first call loses a cancellation."""

    def __init__(self, transport: RedisTransport) -> None:
        self.begun = asyncio.Event()
        self._send = transport._send_some
        transport._send_some = self  # type: ignore[method-assign]

    async def __call__(self, speaker: Any) -> None:
        if not self.begun.is_set():
            self.begun.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await self._send(speaker)


async def test_another_session_begins(main: Process, worker: Process) -> None:
    """Without it, this process would hear nothing any more."""
    async with RedisServer() as redis:
        one, other = (RedisTransport(redis.url, SERVER_NAME) for _ in range(2))
        async with ReplicationPeer(main, one), ReplicationPeer(worker, other):
            await one.connected()
            await other.connected()
            sending = Sending(other)
            other.publish(RemoteServerUp("one.org"))
            await sending.begun.wait()
            other.refuse()
            await main.write(3)
            await check_complete(worker, main)


async def test_a_transport_is_closed(worker: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, close_ms=20)
    async with RedisServer() as redis:
        transport = RedisTransport(redis.url, SERVER_NAME)
        async with ReplicationPeer(worker, transport):
            await transport.connected()
            sending = Sending(transport)
            transport.publish(RemoteServerUp("one.org"))
            await sending.begun.wait()
        assert transport.links == []
