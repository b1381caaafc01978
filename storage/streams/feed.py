"""Advances of streams, published inside one process.

The own writer publishes after each commit, replication publishes for the others. An `Advance` means
that one writer's position in one stream has moved. It carries the facts between, where they are
known. Readers (the notifier, cache invalidation, the replication server) subscribe. Each gets every
advance, in the order of its writer.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple

from storage.streams.positions import LARGEST_POSITION, VectorPosition
from storage.streams.tokens import (
    PaginationToken,
    RoomsToken,
    SyncToken,
    is_rooms_token,
    is_sync_token,
    read_positions,
)

# --------------------------------------------------------------------------------------------------
# The state that a standby has reached, and the facts that the answer of a read must include.
#
# A position and its facts are written in one transaction, and a standby replays transactions in the
# order of their commits. So a standby whose `stream_positions` are at a token has all its facts. A
# session on a standby never goes back: later statements find the facts that one has read.
#
# Positions do not cover everything: a deleted to-device message or an erased user has none, and a
# page token does not name the writer of its event. There the write-ahead log (WAL) decides. A
# commit is visible on the primary only after its WAL is flushed. So all that a process may have
# seen there is below the flushed position. A standby that has replayed up to it has all of that.

if TYPE_CHECKING:
    from storage.streams.registry import Streams

EVENT_STREAMS: Final = ("events", "backfill")
"""The streams whose positions are stream orderings of events."""

SQL_REPLAYED: Final[LiteralString] = """
SELECT d.deployment_id, pg_is_in_recovery() AS is_standby,
    pg_last_wal_receive_lsn() IS NOT NULL AS has_streamed,
    format('%s %s %s', pg_postmaster_start_time(), inet_server_addr(),
        inet_server_port()) AS server,
    CASE
        WHEN pg_is_in_recovery() THEN COALESCE(pg_last_wal_replay_lsn() - '0/0'::pg_lsn, 0)
        ELSE pg_current_wal_flush_lsn() - '0/0'::pg_lsn
    END::bigint AS wal,
    COALESCE((SELECT max(lost_upto) FROM lost_positions), 0) AS lost_upto,
    p.stream_names, p.instance_names, p.stream_ids
FROM deployment d
CROSS JOIN (
    SELECT array_agg(stream_name ORDER BY stream_name, instance_name) AS stream_names,
        array_agg(instance_name ORDER BY stream_name, instance_name) AS instance_names,
        array_agg(stream_id ORDER BY stream_name, instance_name) AS stream_ids
    FROM stream_positions
) AS p
"""

SQL_FLUSHED: Final[LiteralString] = """
SELECT (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint
"""


class StandbyStateRow(NamedTuple):
    """The state of a server.

    ``server`` identifies it from its start to its end. ``wal`` is the replayed position of the WAL,
    or the flushed one of a primary. ``has_streamed``: it has requested WAL from the primary since
    it was started or has crashed. A standby does so once it has replayed all WAL on its disk.
    """

    deployment_id: str
    is_standby: bool
    has_streamed: bool
    server: str
    wal: int
    lost_upto: int
    stream_names: list[str] | None
    instance_names: list[str] | None
    stream_ids: list[int] | None


@dataclass(frozen=True, slots=True)
class Need:
    """The facts that the answer of one read must include.

    ``tokens`` are those of the caller, with their texts. ``events_upto`` is the largest stream
    ordering in page tokens, which do not name the writer of the event.
    """

    tokens: tuple[tuple[str, SyncToken], ...] = ()
    events_upto: int = 0

    @classmethod
    def of(cls, texts: Iterable[str | None], deployment: str) -> "Need":
        """Return the facts that the tokens of a call cover. `InvalidToken`."""
        tokens: list[tuple[str, SyncToken]] = []
        events_upto = 0
        for text in texts:
            if text is None:
                continue
            if is_sync_token(text):
                tokens.append((text, read_positions(text, deployment)))
            elif is_rooms_token(text):
                tokens.append((text, RoomsToken.parse(text, deployment).upto))
            else:
                events_upto = max(events_upto, _reach(PaginationToken.parse(text, deployment)))
        return cls(tuple(tokens), events_upto)

    def refuse_lost(self, streams: "Streams") -> None:
        """Raise `ResyncNeeded` for a token of facts that a restore removed."""
        for text, token in self.tokens:
            streams.refuse_lost(text, token)


def _reach(token: PaginationToken) -> int:
    """Return the largest stream ordering in a token, 0 for the ends of a room."""
    named = (token.live, token.stream, *(level.stream for level in token.earlier))
    return max((ordering for ordering in named if ordering < LARGEST_POSITION), default=0)


NOTHING: Final = Need()

Followed = Mapping[tuple[str, str], int]
"""By stream and writer, the last fact that a process knows of."""


@dataclass(frozen=True, slots=True)
class StandbyState:
    """A state that a server has reached.

    ``is_replaying_again``: it has crashed, and may not be where it was.
    """

    wal: int = -1
    lost_upto: int = 0
    positions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    is_replaying_again: bool = False

    @classmethod
    def of(cls, row: StandbyStateRow, *, is_replaying_again: bool = False) -> "StandbyState":
        positions: dict[str, dict[str, int]] = {}
        columns = row.stream_names or (), row.instance_names or (), row.stream_ids or ()
        for stream_name, instance_name, stream_id in zip(*columns, strict=True):
            positions.setdefault(stream_name, {})[instance_name] = stream_id
        return cls(row.wal, row.lost_upto, positions, is_replaying_again)

    def has(self, need: Need) -> bool:
        """Return whether all facts of the tokens are there."""
        return self.has_events(need.events_upto) and all(
            self.covers(name, position)
            for _, token in need.tokens
            for name, position in token.streams
        )

    def covers(self, stream_name: str, position: VectorPosition) -> bool:
        """Return whether all facts of a position are there.

        A writer without a row here has no fact at or below ``position.min``, if the others are at
        ``min``: it had entered before they could get there (`storage.streams.startup`).
        """
        positions = self.positions.get(stream_name, {})
        return min(positions.values(), default=0) >= position.min and all(
            positions.get(writer, 0) >= stream_id for writer, stream_id in position.items
        )

    def has_events(self, upto: int) -> bool:
        """Return whether all events up to a stream ordering are there, whoever wrote them.

        A writer stores its events in the order of their ids, new ones and backfill. So it has
        stored all below its further position.
        """
        events, backfill = (self.positions.get(name, {}) for name in EVENT_STREAMS)
        return not upto or all(
            max(events.get(writer, 0), backfill.get(writer, 0)) >= upto
            for writer in {*events, *backfill}
        )

    def has_followed(self, followed: Followed) -> bool:
        """Return whether all facts are there that a process knows of."""
        return all(
            self.positions.get(stream_name, {}).get(writer, 0) >= stream_id
            for (stream_name, writer), stream_id in followed.items()
        )


logger: logging.Logger = logging.getLogger(__name__)


class StreamRow(NamedTuple):
    """One row of a stream: its id, its writer, and the row in wire form (a list of JSON values)."""

    stream_id: int
    instance_name: str
    row: list[Any]


class Advance(NamedTuple):
    """A writer's position went from ``previous`` to ``current``.

    ``rows`` are all facts of that writer between, in order.

    ``local`` is False for an advance from another process. An advance without facts means that ids
    were not used.
    """

    stream_name: str
    instance_name: str
    previous: int
    current: int
    rows: Sequence[StreamRow]
    local: bool = True


def whole_ids(page: Sequence[StreamRow], limit: int) -> list[StreamRow] | None:
    """Return the facts of a page whose ids have all their rows in it; None for the last page.

    ``limit`` is the size of the page. A full page may have cut the rows of its last id. An empty
    result means that not even one id fits into it.
    """
    if len(page) < limit:
        return None
    return [row for row in page if row.stream_id < page[-1].stream_id]


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
        for subscriber in list(self._subscribers):
            try:
                subscriber(advance)
            except Exception:
                logger.exception("a reader of the stream %s failed", advance.stream_name)
