"""Advances of streams, published inside one process.

The own writer publishes after each commit, replication publishes for the others. An `Advance` means
that one writer's position in one stream has moved. It carries the facts between, where they are
known. Readers (the notifier, cache invalidation, the replication server) subscribe. Each gets every
advance, in the order of its writer.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

logger: logging.Logger = logging.getLogger(__name__)


class Fact(NamedTuple):
    """One row of a stream: its id, its writer, and the row in wire form (a list of JSON values)."""

    stream_id: int
    instance_name: str
    row: list[Any]


class Advance(NamedTuple):
    """A writer's position went from ``previous`` to ``current``.

    ``facts`` are all facts of that writer between, in order.

    ``local`` is False for an advance from another process. An advance without facts means that ids
    were not used.
    """

    stream_name: str
    instance_name: str
    previous: int
    current: int
    facts: Sequence[Fact]
    local: bool = True


def whole_ids(page: Sequence[Fact], limit: int) -> list[Fact] | None:
    """Return the facts of a page whose ids have all their rows in it; None for the last page.

    ``limit`` is the size of the page. A full page may have cut the rows of its last id. An empty
    result means that not even one id fits into it.
    """
    if len(page) < limit:
        return None
    return [fact for fact in page if fact.stream_id < page[-1].stream_id]


Subscriber = Callable[[Advance], None]


class Feed:
    """Publishes advances to subscribers.

    A subscriber must not block and must not raise. If one raises, that is logged, and the others
    still get the advance.
    """

    def __init__(self) -> None:
        self._subscribers: dict[Subscriber, None] = {}

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Add a subscriber; return a function that removes it."""
        self._subscribers[subscriber] = None
        return lambda: self._subscribers.pop(subscriber, None)

    def publish(self, advance: Advance) -> None:
        """Call all subscribers."""
        for subscriber in list(self._subscribers):
            try:
                subscriber(advance)
            except Exception:
                logger.exception("a reader of the stream %s failed", advance.stream_name)
