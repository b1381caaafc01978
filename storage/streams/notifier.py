"""Wake-ups: whoever waits for news of a room or user is woken when a stream advances by a fact that concerns it.

No wake-up is lost between looking and waiting: a waiter says what it has seen (a token), and does not wait at all if the
streams are further already; and it stands in the list before it looks. What a fact concerns its stream's declaration says.
"""

import asyncio
from collections.abc import Iterable

from storage.streams.feed import Advance
from storage.streams.registry import STREAMS, Streams
from storage.streams.tokens import SyncToken


class Notifier:
    """The waiters of one process. A subscriber of the feed."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._waiting: dict[str, dict[asyncio.Event, None]] = {}
        streams.feed.subscribe(self.told)

    def told(self, advance: Advance) -> None:
        """Wake those whom the facts concern. Several facts wake a waiter once."""
        wakes = STREAMS[advance.stream_name].wakes
        for key in {key for fact in advance.facts for key in wakes(fact.row)}:
            for event in self._waiting.get(key, ()):
                event.set()

    async def wait(self, keys: Iterable[str], *, after: SyncToken, timeout_ms: int) -> bool:
        """Wait until there is news for one of the keys (room and user ids); whether there is.

        True at once if a stream that ``after`` names has moved on since: then look again, it may or may not concern the keys.
        """
        event = asyncio.Event()
        keys = set(keys)
        for key in keys:
            self._waiting.setdefault(key, {})[event] = None
        try:
            if self._moved_on(after):
                return True
            async with asyncio.timeout(timeout_ms / 1000):
                await event.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._leave(keys, event)

    def _moved_on(self, after: SyncToken) -> bool:
        for name, position in after.streams:
            current = self._streams[name].current()
            if not current <= position:
                return True
        return False

    def _leave(self, keys: Iterable[str], event: asyncio.Event) -> None:
        for key in keys:
            waiting = self._waiting[key]
            del waiting[event]
            if not waiting:
                del self._waiting[key]
