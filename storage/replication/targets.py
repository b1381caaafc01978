"""What a reader follows: the streams of a store, or, where there is no store, whatever comes and the handlers that take it."""

import logging
from typing import Any, Final, Protocol

from storage.errors import ProtocolError
from storage.replication.handlers import Handlers
from storage.streams.feed import Advance, Fact
from storage.streams.registry import Streams

logger = logging.getLogger(__name__)

UNKNOWN_MAX: Final = 100
"""Names of streams of others that are logged, each once; the sender chooses them."""


class FollowTarget(Protocol):
    """Where followed rows go, and where missed ones come from."""

    def follows(self, stream_name: str, instance_name: str) -> bool:
        """Whether this writer's facts in this stream are wanted."""

    def position(self, stream_name: str, instance_name: str) -> int | None:
        """The last token up to which everything is known. None: no matter what was before."""

    def check(self, stream_name: str, row: Any) -> None:
        """`ProtocolError` if a row does not have the shape of its stream."""

    def leaps(self, stream_name: str, instance_name: str, token: int) -> bool:
        """Whether a restore may lie between what is known and this token, so that the rows have to be fetched."""

    async def rows(
        self, stream_name: str, instance_name: str, after: int, upto: int, limit: int
    ) -> list[Fact]:
        """The facts of a writer with ``after < stream_id <= upto``, at most ``limit``, in order."""

    def advance(
        self, stream_name: str, instance_name: str, current: int, facts: list[Fact]
    ) -> None:
        """A writer has moved to ``current``; these are all its facts since its last position."""


class StreamsTarget:
    """The streams of a store: what others write there. The store's own facts it knows already."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._unknown: set[str] = set()

    def follows(self, stream_name: str, instance_name: str) -> bool:
        """See `FollowTarget`."""
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

        A writer that nothing is known of has been told of nowhere: it is at 0.
        """
        try:
            return self._streams[stream_name].generator.current(instance_name)
        except KeyError:
            return 0

    def check(self, stream_name: str, row: Any) -> None:
        """See `FollowTarget`.

        The keys that a fact wakes are the part of its shape that is relied on.
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
        """See `FollowTarget`."""
        return self._streams.leaps(stream_name, instance_name, token)

    async def rows(
        self, stream_name: str, instance_name: str, after: int, upto: int, limit: int
    ) -> list[Fact]:
        """See `FollowTarget`.

        `DatabaseReplaced` where a restore lies between, until the store has entered the database
        again.
        """
        if self._streams.leaps(stream_name, instance_name, upto):
            await self._streams.confirm()
        return await self._streams[stream_name].rows(
            after, upto, limit, instance_name=instance_name
        )

    def advance(
        self, stream_name: str, instance_name: str, current: int, facts: list[Fact]
    ) -> None:
        """See `FollowTarget`."""
        self._streams.advance(stream_name, instance_name, current, facts, local=False)


class HandlersTarget:
    """No store: each advance is told to the handlers of `Advance`.

    What is missed can be had only if they can fetch it.
    """

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._positions: dict[tuple[str, str], int] = {}

    def follows(self, stream_name: str, instance_name: str) -> bool:  # noqa: ARG002  # everything
        """See `FollowTarget`."""
        return True

    def position(self, stream_name: str, instance_name: str) -> int | None:
        """See `FollowTarget`."""
        return self._positions.get((stream_name, instance_name))

    def check(self, stream_name: str, row: Any) -> None:
        """See `FollowTarget`. What a row has to look like is the handlers' affair."""

    def leaps(self, stream_name: str, instance_name: str, token: int) -> bool:  # noqa: ARG002  # nothing is remembered here
        """See `FollowTarget`."""
        return False

    async def rows(
        self, stream_name: str, instance_name: str, after: int, upto: int, limit: int
    ) -> list[Fact]:
        """See `FollowTarget`."""
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
        """See `FollowTarget`."""
        previous = self._positions.get((stream_name, instance_name), current)
        self._positions[stream_name, instance_name] = current
        self._handlers.tell(
            Advance(stream_name, instance_name, previous, current, facts, local=False)
        )
