"""Wake-ups: whoever waits for news of a room or user is woken when a stream advances by a fact that concerns it.

A waiter says what it has seen: a token. It is woken by facts of the token's streams that the token does not cover, and by those only.
No wake-up is lost between looking and waiting: for each writer it is remembered where each key was last concerned, so one who comes
late goes on at once; and one who comes while other rooms are busy does wait. What a fact concerns its stream's declaration says.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from storage.errors import StorageClosed
from storage.streams.caches import LastChange
from storage.streams.feed import Advance
from storage.streams.positions import VectorPosition
from storage.streams.registry import Restart, Streams
from storage.streams.tokens import SyncToken


@dataclass(slots=True, eq=False)
class _Waiter:
    """Somebody who waits, with what they have seen of the streams that matter to them."""

    seen: Mapping[str, VectorPosition]
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def told(self, stream_name: str, instance_name: str, stream_id: int) -> None:
        """A fact that concerns one of the keys."""
        position = self.seen.get(stream_name)
        if position is not None and not position.covers(instance_name, stream_id):
            self.woken.set()


class Notifier:
    """The waiters of one process.

    A subscriber of the feed. ``remembered``: keys for each writer and stream.
    """

    def __init__(self, streams: Streams, *, remembered: int = 10_000) -> None:
        self._streams = streams
        self._remembered = remembered
        self._waiting: dict[str, dict[_Waiter, None]] = {}
        self._closed = False
        self._concerned = self._begun()
        streams.feed.subscribe(self.told)
        streams.on_restart(self._restart)

    def _begun(self) -> dict[tuple[str, str], LastChange]:
        return {
            (name, writer): LastChange(self._remembered, position)
            for name, stream in self._streams.items()
            for writer, position in stream.positions().items()
        }

    def _restart(self, _: Restart) -> None:
        """The database is another one: whoever waits has to look again."""
        self._concerned = self._begun()
        self._wake_all()

    def told(self, advance: Advance) -> None:
        """Wake those whom the facts concern."""
        place = advance.stream_name, advance.instance_name
        concerned = self._concerned.get(place)
        if concerned is None:
            concerned = self._concerned[place] = LastChange(self._remembered, advance.previous)
        wakes = self._streams[advance.stream_name].declaration.wakes
        for fact in advance.facts:
            for key in wakes(fact.row):
                concerned.note(key, fact.stream_id)
                for waiter in self._waiting.get(key, ()):
                    waiter.told(advance.stream_name, advance.instance_name, fact.stream_id)

    def position(self, stream_name: str) -> VectorPosition:
        """How far a stream is known to be.

        Taken before looking, it can be part of the token after which one waits.
        """
        return self._streams[stream_name].current()

    async def wait(self, keys: Iterable[str], *, after: SyncToken, timeout_ms: int) -> bool:
        """Wait until there is news for one of the keys (room and user ids) in a stream that ``after`` names; whether there is.

        True at once if there has been some since ``after``, or if that is too long ago to know. `StorageClosed` when the store is closed.
        """
        keys = set(keys)
        waiter = _Waiter(after.positions())
        for key in keys:
            self._waiting.setdefault(key, {})[waiter] = None
        try:
            if not (self._closed or self.was_told(keys, waiter.seen)):
                async with asyncio.timeout(timeout_ms / 1000):
                    await waiter.woken.wait()
        except TimeoutError:
            return False
        finally:
            self._leave(keys, waiter)
        if self._closed:
            raise StorageClosed
        return True

    def close(self) -> None:
        """All who wait get `StorageClosed`, and who comes later."""
        self._closed = True
        self._wake_all()

    def _wake_all(self) -> None:
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.woken.set()

    def was_told(self, keys: Iterable[str], seen: Mapping[str, VectorPosition]) -> bool:
        """Whether there has been, or may have been, news for one of the keys after these positions, in the streams that they name."""
        keys = set(keys)
        for (stream_name, writer), concerned in self._concerned.items():
            position = seen.get(stream_name)
            if position is None or self._streams[stream_name].generator.current(
                writer
            ) <= position.position(writer):
                continue
            if any(concerned.may_have_changed(key, position.position(writer)) for key in keys):
                return True
        return False

    def _leave(self, keys: Iterable[str], waiter: _Waiter) -> None:
        for key in keys:
            waiting = self._waiting[key]
            del waiting[waiter]
            if not waiting:
                del self._waiting[key]
