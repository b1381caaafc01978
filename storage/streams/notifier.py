"""Wake-ups: waiters for news of a room or user wake when a stream advances by a relevant fact.

A waiter passes its token. It is woken only by facts of the token's streams that the token does not
cover. No wake-up is lost between the read and the wait: for each writer and key the notifier stores
the position of the last relevant fact. So a late waiter returns at once, and facts of other rooms
wake nobody. The declaration of a stream maps a fact to its keys.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from storage.errors import StorageClosed
from storage.streams.caches import LastChange
from storage.streams.feed import Advance
from storage.streams.positions import VectorPosition
from storage.streams.registry import Restart, Streams
from storage.streams.tokens import SyncToken


@dataclass(slots=True, eq=False)
class _Waiter:
    """A waiter, with its position in each stream that matters to it."""

    seen: Mapping[str, VectorPosition]
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake_for(self, stream_name: str, instance_name: str, stream_id: int) -> None:
        """Wake the waiter for a fact of one of its keys, unless its token covers the fact."""
        position = self.seen.get(stream_name)
        if position is not None and not position.covers(instance_name, stream_id):
            self.woken.set()


class Notifier:
    """The waiters of one process.

    A subscriber of the feed. ``remembered`` is the number of keys for each writer and stream.
    """

    def __init__(self, streams: Streams, *, remembered: int = 10_000) -> None:
        self.streams = streams
        self._remembered = remembered
        self._waiting: dict[str, dict[_Waiter, None]] = {}
        self._closed = False
        self._concerned = self._begun()
        streams.feed.subscribe(self.on_advance)
        streams.on_restart(self._restart)

    def _begun(self) -> dict[tuple[str, str], LastChange]:
        return {
            (name, writer): LastChange(self._remembered, position)
            for name, writer, position in self.positions()
        }

    def _restart(self, _: Restart) -> None:
        """Wake everybody after a restart: the database was replaced, so all have to read again."""
        self._concerned = self._begun()
        self._wake_all()

    def on_advance(self, advance: Advance) -> None:
        """Wake the waiters of the facts' keys."""
        writer = advance.stream_name, advance.instance_name
        concerned = self._concerned.get(writer)
        if concerned is None:
            concerned = self._concerned[writer] = LastChange(self._remembered, advance.previous)
        wakes = self.streams[advance.stream_name].declaration.wakes
        for row in advance.rows:
            for key in wakes(row.row):
                concerned.note(key, row.stream_id)
                for waiter in self._waiting.get(key, ()):
                    waiter.wake_for(advance.stream_name, advance.instance_name, row.stream_id)

    def positions(self) -> Iterator[tuple[str, str, int]]:
        """Return stream, writer and position up to which this process has followed."""
        for name, stream in self.streams.items():
            for writer, position in stream.positions().items():
                yield name, writer, position

    def position(self, stream_name: str) -> VectorPosition:
        """Return the known position of a stream.

        Read it before the query; then it can be part of the token to wait on.
        """
        return self.streams[stream_name].current()

    async def wait(self, keys: Iterable[str], *, after: SyncToken, timeout_ms: int) -> bool:
        """Wait for news of one of the keys (room and user ids) in a stream that ``after`` names.

        Return whether there is news. Return True at once if there has been some since ``after``, or
        if that is too long ago to know. Raise `StorageClosed` when the store is closed.
        """
        keys = set(keys)
        waiter = _Waiter(after.positions())
        for key in keys:
            self._waiting.setdefault(key, {})[waiter] = None
        try:
            if not (self._closed or self.may_have_changed(keys, waiter.seen)):
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
        """Raise `StorageClosed` in all current and later waiters."""
        self._closed = True
        self._wake_all()

    def _wake_all(self) -> None:
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.woken.set()

    def may_have_changed(self, keys: Iterable[str], seen: Mapping[str, VectorPosition]) -> bool:
        """Return whether there may have been news for one of the keys after these positions.

        Only the streams in ``seen`` count.
        """
        keys = set(keys)
        for (stream_name, writer), concerned in self._concerned.items():
            position = seen.get(stream_name)
            if position is None or self.streams[stream_name].generator.current(
                writer
            ) <= position.position(writer):
                continue
            if any(concerned.may_have_changed(key, position.position(writer)) for key in keys):
                return True
        return False

    def changed_since(
        self, stream_name: str, after: VectorPosition, upto: VectorPosition
    ) -> set[str] | None:
        """Return the keys with facts in a range of a stream. None: unknown.

        It is unknown where this process has not followed the stream up to the end of the range, and
        where the beginning is too long ago.
        """
        changed_keys: set[str] = set()
        followed = self.streams[stream_name].positions()
        for writer in {*followed, *(writer for writer, _ in upto.items)}:
            since, last = after.position(writer), upto.position(writer)
            if since >= last:
                continue
            concerned = self._concerned.get((stream_name, writer))
            if concerned is None or since < concerned.floor or followed.get(writer, 0) < last:
                return None
            changed_keys.update(concerned.since(since))
        return changed_keys

    def _leave(self, keys: Iterable[str], waiter: _Waiter) -> None:
        for key in keys:
            waiting = self._waiting[key]
            del waiting[waiter]
            if not waiting:
                del self._waiting[key]
