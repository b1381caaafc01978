"""Handlers of a homeserver: functions registered by the type of their argument.

    handlers = Handlers()
    handlers.on(RemoteServerUp, lambda command: retries.reset(command.server_name))
    handlers.on(UserIp, clients.seen)

You can register for every received command, and for `Advance` (storage.streams.feed): rows of a
stream, complete and in order. A handler runs in the event loop and must not block. If one raises,
that is logged, and the others are still called.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from storage.streams.feed import Fact

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

Fetch = Callable[[str, str, int, int, int], Awaitable[list[Fact]]]
"""Fetch missed rows where there is no store.

(stream name, writer, after, up to, limit) -> the facts of that writer, in order.
"""


class Handlers:
    """A registry.

    ``fetch`` is only for a client without a store; without it such a client cannot recover missed
    rows.
    """

    def __init__(self, *, fetch: Fetch | None = None) -> None:
        self.fetch = fetch
        self._handlers: dict[type, dict[Callable[[Any], None], None]] = {}

    def on(self, kind: type[T], handler: Callable[[T], None]) -> Callable[[], None]:
        """Call ``handler`` with each received ``kind``; return a function that unregisters it."""
        handlers = self._handlers.setdefault(kind, {})
        handlers[handler] = None
        return lambda: handlers.pop(handler, None)

    def wants(self, kind: type) -> bool:
        """Return whether there is a handler."""
        return bool(self._handlers.get(kind))

    def tell(self, what: object) -> None:
        """Call all handlers for the type of this."""
        for handler in list(self._handlers.get(type(what), ())):
            try:
                handler(what)
            except Exception:
                logger.exception("a handler of %s failed", type(what).__name__)
