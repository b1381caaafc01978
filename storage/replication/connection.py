"""One TCP connection of the line protocol, from either side.

PING is sent at once and then every `ping_ms`. The peer counts as gone when nothing was
received for `timeout_ms`, but only once it has sent a PING: a person with netcat has no
time limit. Unread data for the peer is buffered up to `buffer_bytes_max`. A connection
that ends with an error sends ERROR and the reason. Further input is then discarded until the peer
hangs up, for at most `close_ms`, so that the reason is not lost with the connection.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

from storage.errors import ProtocolError
from storage.replication import transport
from storage.replication.commands import (
    LINE_BYTES_MAX,
    SENT_BY,
    Command,
    Error,
    Ping,
    Side,
    encode,
    parse,
)

logger: logging.Logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 65_536


class LineConnection:
    """A `Link` to the peer at the other end. ``side`` is ours."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        side: Side,
    ) -> None:
        self.peer_name: str = "{}:{}".format(
            *(writer.get_extra_info("peername") or ("an unknown peer", 0))
        )
        self.replicates = False
        """Whether the peer has requested rows (REPLICATE)."""

        self.refused: str | None = None
        """Why this side has ended the connection."""

        self.ended: asyncio.Event = asyncio.Event()
        """Set by the owner, when the connection has ended and is cleaned up."""

        self._reader = reader
        self._writer = writer
        self._side = side
        self._sent_by_peer = SENT_BY["client" if side == "server" else "server"]
        self._limits = transport.LIMITS
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._heard = self._loop.time()
        self._peer_pings = False
        self._abort: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """See `Link`: the name that the peer has sent, or its address."""
        return self.peer_name

    def silent_s(self) -> float:
        return self._loop.time() - self._heard

    # ---------------------------------------------------------------------------------------------
    # sending

    def send(self, *commands: Command) -> None:
        """See `Link`. Raise `ProtocolError` for a command that cannot be a line."""
        if commands:
            self.send_lines(b"".join(map(encode, commands)))

    def send_lines(self, lines: bytes) -> None:
        """Send lines from `encode`. Disconnect a peer that has too much unread."""
        if self.refused is not None:
            return
        if self._unsent() + len(lines) > self._limits.buffer_bytes_max:
            self.refuse(f"too slow: {self._unsent()} bytes wait to be read")
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(lines)
        self._waiting_bytes += len(lines)

    def refuse(self, reason: str) -> None:
        """See `Link`: send ERROR, then send and read nothing more."""
        if self.refused is not None:
            return
        logger.warning("the connection with %s ends: %s", self.name, reason)
        self._end(reason, encode(Error.of(reason)))

    def end(self, reason: str) -> None:
        """End it in good order: a server sends ERROR with the reason, a client hangs up."""
        if self.refused is None:
            self._end(reason, encode(Error.of(reason)) if self._side == "server" else b"")

    def _end(self, reason: str, last_words: bytes) -> None:
        self._waiting.append(last_words)
        self._flush()
        self.refused = reason
        self._abort = self._loop.call_later(
            self._limits.close_ms / 1000, self._writer.transport.abort
        )
        with contextlib.suppress(OSError, RuntimeError):  # the peer was faster
            if self._writer.can_write_eof():
                self._writer.write_eof()
            else:
                self._writer.close()

    def _unsent(self) -> int:
        return self._writer.transport.get_write_buffer_size() + self._waiting_bytes

    def _flush(self) -> None:
        """Send all commands of one turn of the event loop together."""
        if self._waiting and self.refused is None and not self._writer.is_closing():
            self._writer.write(b"".join(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0

    # ---------------------------------------------------------------------------------------------
    # receiving

    async def run(self, received: Callable[[Command], None]) -> str:
        """Pass on received commands until the connection ends; return the reason.

        ``received`` may refuse a command with `ProtocolError`.
        """
        alive = asyncio.create_task(self._keep_alive(), name="replication-keep-alive")
        try:
            return await self._read(received)
        finally:
            alive.cancel()
            await asyncio.wait([alive])
            if self._abort is not None:
                self._abort.cancel()
            if self.refused is None:
                self.refused = "hung up"
            await self._close()

    async def _close(self) -> None:
        """Close the socket; unsent data may go out first."""
        if not self._writer.is_closing():
            self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._limits.close_ms / 1000):
                await self._writer.wait_closed()
                return
        self._writer.transport.abort()

    async def _read(self, received: Callable[[Command], None]) -> str:
        rest = b""
        try:
            while data := await self._reader.read(CHUNK_BYTES):
                if self.refused is None:
                    self._heard = self._loop.time()
                    rest = self._take(rest + data, received)
        except (OSError, EOFError) as error:
            return self.refused or str(error) or type(error).__name__
        return self.refused or "the peer hung up"

    def _take(self, data: bytes, received: Callable[[Command], None]) -> bytes:
        """Process the complete lines; return the rest."""
        complete, _, rest = data.rpartition(b"\n")
        try:
            for line in complete.decode().split("\n") if complete else ():
                if not line or line.isspace():
                    continue
                self._command(parse(line), received)
                if self.refused is not None:
                    return b""
        except UnicodeDecodeError:
            self.refuse("a line that is not UTF-8")
        except ProtocolError as error:
            self.refuse(str(error))
        if len(rest) > LINE_BYTES_MAX + 1:  # a carriage return may still belong to its end
            self.refuse(f"a line of more than {LINE_BYTES_MAX} bytes")
        return rest

    def _command(self, command: Command, received: Callable[[Command], None]) -> None:
        if type(command) not in self._sent_by_peer:
            raise ProtocolError(
                f"a {'client' if self._side == 'server' else 'server'} must not send {command.NAME}"
            )
        if isinstance(command, Ping):
            self._peer_pings = True
        elif isinstance(command, Error):
            logger.warning("%s reports an error: %s", self.name, command.reason)
        received(command)

    # ---------------------------------------------------------------------------------------------
    # keeping alive

    async def _keep_alive(self) -> None:
        every, timeout = (
            self._limits.ping_ms / 1000,
            self._limits.timeout_ms / 1000,
        )
        next_ping = self._loop.time()
        while self.refused is None:
            now = self._loop.time()
            if self._peer_pings and now - self._heard >= timeout:
                self.refuse(f"nothing has come for {timeout:g} s")
                return
            if now >= next_ping:
                self.send(Ping(str(time.time_ns() // 1_000_000)))
                next_ping = now + every
            silent_at = self._heard + timeout if self._peer_pings else now + timeout
            await asyncio.sleep(max(min(next_ping, silent_at) - now, 0))
