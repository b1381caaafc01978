"""What happens to streams, told inside one process: by the own writer after each commit, by replication for the others.

An `Advance` is the news that one writer's position in one stream has moved, with the facts between, where they are known. Readers
(the notifier, cache invalidation, the replication server) subscribe; each gets every advance, in the order of its writer.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class Fact(NamedTuple):
    """One row of a stream: its id, who wrote it, and the row as it goes over the wire (a list of JSON values)."""

    stream_id: int
    instance_name: str
    row: list[Any]


class Advance(NamedTuple):
    """A writer's position went from ``previous`` to ``current``.

    ``facts`` are all facts of that writer between, in order.

    ``local`` is False for what was learned from another process. No facts and an advance all the
    same: ids that came to nothing.
    """

    stream_name: str
    instance_name: str
    previous: int
    current: int
    facts: Sequence[Fact]
    local: bool = True


def whole_ids(page: Sequence[Fact], limit: int) -> list[Fact] | None:
    """Of a page of at most ``limit`` facts those whose ids have all their rows in it; None: all of them, it is the last page.

    A full page may have cut through the rows of its last id. Empty: not even one id fits into it.
    """
    if len(page) < limit:
        return None
    return [fact for fact in page if fact.stream_id < page[-1].stream_id]


Subscriber = Callable[[Advance], None]


class Feed:
    """Passes advances on.

    A subscriber must not block and must not raise; one that does raise is logged, the others are
    told.
    """

    def __init__(self) -> None:
        self._subscribers: dict[Subscriber, None] = {}

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Tell this one from now on; the answer ends it."""
        self._subscribers[subscriber] = None
        return lambda: self._subscribers.pop(subscriber, None)

    def publish(self, advance: Advance) -> None:
        """Tell all."""
        for subscriber in list(self._subscribers):
            try:
                subscriber(advance)
            except Exception:
                logger.exception("a reader of the stream %s failed", advance.stream_name)
