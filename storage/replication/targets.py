"""The target of a reader: the streams of a store, or handlers where there is no store."""

import logging
from typing import Any, Final, Protocol

from storage.errors import ProtocolError
from storage.replication.handlers import Handlers
from storage.streams.feed import Advance, Fact
from storage.streams.registry import Streams

logger: logging.Logger = logging.getLogger(__name__)

UNKNOWN_MAX: Final = 100
"""Names of streams of others that are logged, each once; the sender chooses them."""


class FollowTarget(Protocol):
    """Receives followed rows, and fetches missed ones."""

    def follows(self, stream_name: str, instance_name: str) -> bool:
        """Return whether this writer's facts in this stream are wanted."""

    def position(self, stream_name: str, instance_name: str) -> int | None:
        """Return the last token up to which everything is known.

        None: earlier facts do not matter.
        """

    def check(self, stream_name: str, row: Any) -> None:
        """Raise `ProtocolError` if a row does not have the shape of its stream."""

    def leaps(self, stream_name: str, instance_name: str, token: int) -> bool:
        """Return whether a restore may lie before this token, so that the rows must be fetched."""

    async def rows(
        self, stream_name: str, instance_name: str, after: int, upto: int, limit: int
    ) -> list[Fact]:
        """Return a writer's facts with ``after < stream_id <= upto``, at most ``limit``."""

    def advance(
        self, stream_name: str, instance_name: str, current: int, facts: list[Fact]
    ) -> None:
        """Advance a writer to ``current``; ``facts`` are all its facts since its last position."""


class StreamsTarget:
    """The streams of a store, for facts of other writers. The store knows its own facts."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._unknown: set[str] = set()

    def follows(self, stream_name: str, instance_name: str) -> bool:
        if stream_name in self._streams:
            return instance_name != self._streams.instance_name
        if stream_name not in self._unknown and len(self._unknown) < UNKNOWN_MAX:
            self._unknown.add(stream_name)
            logger.info(
                "the stream %s of %s is not one of this store: ignored", stream_name, instance_name
            )
        return False

    def position(self, stream_name: str, instance_name: str) -> int:
        """See `FollowTarget`.

        An unknown writer is at 0.
        """
        try:
            return self._streams[stream_name].generator.current(instance_name)
        except KeyError:
            return 0

    def check(self, stream_name: str, row: Any) -> None:
        """See `FollowTarget`.

        Only the keys that a fact wakes are checked, because nothing else of its shape is used.
        """
        try:
            keys = (
                self._streams[stream_name].declaration.wakes(row)
                if isinstance(row, list)
                else [None]
            )
        except (ValueError, LookupError, TypeError):
            keys = [None]
        if not all(isinstance(key, str) for key in keys):
            raise ProtocolError(f"malformed row of the stream {stream_name}: {str(row)[:200]}")

    def leaps(self, stream_name: str, instance_name: str, token: int) -> bool:
        return self._streams.leaps(stream_name, instance_name, token)

    async def rows(
        self, stream_name: str, instance_name: str, after: int, upto: int, limit: int
    ) -> list[Fact]:
        """See `FollowTarget`.

        Raise `DatabaseReplaced` where a restore lies between, until the store has entered the
        database again.
        """
        if self._streams.leaps(stream_name, instance_name, upto):
            await self._streams.confirm()
        return await self._streams[stream_name].rows(
            after, upto, limit, instance_name=instance_name
        )

    def advance(
        self, stream_name: str, instance_name: str, current: int, facts: list[Fact]
    ) -> None:
        self._streams.advance(stream_name, instance_name, current, facts, local=False)


class HandlersTarget:
    """A target without store: each advance goes to the handlers of `Advance`.

    Missed rows can be recovered only if they can fetch them.
    """

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._positions: dict[tuple[str, str], int] = {}

    def follows(self, stream_name: str, instance_name: str) -> bool:  # noqa: ARG002  # everything
        return True

    def position(self, stream_name: str, instance_name: str) -> int | None:
        return self._positions.get((stream_name, instance_name))

    def check(self, stream_name: str, row: Any) -> None:
        """See `FollowTarget`. The handlers check the shape of a row."""

    # nothing is stored here
    def leaps(self, stream_name: str, instance_name: str, token: int) -> bool:  # noqa: ARG002
        return False

    async def rows(
        self, stream_name: str, instance_name: str, after: int, upto: int, limit: int
    ) -> list[Fact]:
        if self._handlers.fetch is None:
            logger.warning(
                "rows of %s by %s between %d and %d were missed, and cannot be fetched",
                stream_name,
                instance_name,
                after,
                upto,
            )
            return []
        return await self._handlers.fetch(stream_name, instance_name, after, upto, limit)

    def advance(
        self, stream_name: str, instance_name: str, current: int, facts: list[Fact]
    ) -> None:
        previous = self._positions.get((stream_name, instance_name), current)
        self._positions[stream_name, instance_name] = current
        self._handlers.tell(
            Advance(stream_name, instance_name, previous, current, facts, local=False)
        )
