"""Following other writers: rows are used as they arrive, holes are detected by tokens and fetched.

All state is kept per link, stream and writer (a `_Track`). So batches of two writers never mix, and
a fetch for one delays no other. A track is live once everything up to the last token from its link
is known. Then the tokens of its rows have no gaps, because a link loses nothing while it lasts.
Until then, and whenever a POSITION shows a hole, rows are fetched up to the newest token. Later
input only moves that goal: the rows themselves are in the table, so nothing accumulates.

Rows that arrive together are passed on together, one advance for each track: readers are woken
once, not a thousand times.

    known 10   POSITION events w 12 14     hole: fetch 11..14, then live
    known 10   POSITION events w 9 14      nothing was written in 10..14: known 14, live
    known 10   RDATA events w 11 […]       live: known 11. Still behind: fetch to 11, then live
    known 10   RDATA events w 8 […]        known already, over another link
    known 10   POSITION events w 0 4       on a shared link: a third party has just learned of the
                                           writer, which may be at 12 by now: still behind
    known 10   POSITION events w 10 2^30   a gap that a restore left: fetch, and check first
                                           whether the database is the same
"""

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

from storage.errors import DatabaseError, ProtocolError
from storage.replication import transport
from storage.replication.commands import Position, Rdata
from storage.replication.transport import Handlers, Link, ReplicationLimits
from storage.streams.feed import Advance, StreamRow, whole_ids
from storage.streams.registry import Streams

# --------------------------------------------------------------------------------------------------
# The target of a reader: the streams of a store, or handlers where there is no store.

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
    ) -> list[StreamRow]:
        """Return a writer's facts with ``after < stream_id <= upto``, at most ``limit``."""

    def advance(
        self, stream_name: str, instance_name: str, current: int, rows: list[StreamRow]
    ) -> None:
        """Advance a writer to ``current``; ``rows`` are all its facts since its last position."""


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
    ) -> list[StreamRow]:
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
        self, stream_name: str, instance_name: str, current: int, rows: list[StreamRow]
    ) -> None:
        self._streams.advance(stream_name, instance_name, current, rows, local=False)


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
    ) -> list[StreamRow]:
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
        self, stream_name: str, instance_name: str, current: int, rows: list[StreamRow]
    ) -> None:
        previous = self._positions.get((stream_name, instance_name), current)
        self._positions[stream_name, instance_name] = current
        self._handlers.tell(
            Advance(stream_name, instance_name, previous, current, rows, local=False)
        )


# --------------------------------------------------------------------------------------------------
# Pauses between attempts, which double with each failure.
#
# They are random, so that the clients of a lost server do not return at the same moment.


@dataclass(slots=True)
class Backoff:
    """Pauses of at most ``first`` seconds, doubled each time up to ``largest``.

    A pause is at least half of its bound.
    """

    first: float
    largest: float
    _failures: int = field(default=0, init=False)

    @classmethod
    def of(cls, limits: ReplicationLimits) -> Self:
        """Use the pauses of these limits."""
        return cls(limits.retry_ms_first / 1000, limits.retry_ms_max / 1000)

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        bound = min(self.first * float(2 ** min(self._failures, 32)), self.largest)
        self._failures += 1
        return bound * random.uniform(0.5, 1)  # noqa: S311  # not secret

    def reset(self) -> None:
        """Reset after a success: the next pause is a short one."""
        self._failures = 0


@dataclass(slots=True, eq=False)
class _Track:
    """One writer in one stream, over one link."""

    link: Link
    stream_name: str
    instance_name: str
    live: bool = False
    goal: int = 0
    rows: list[Any] = field(default_factory=list)
    """Of a batch whose end has not arrived."""

    complete_rows: list[StreamRow] = field(default_factory=list)
    """Complete, up to `token`, and about to be passed on."""

    token: int | None = None
    torn: bool = False
    """Some rows of the current batch were not kept: at its end, it is read from the table."""

    fetching: asyncio.Task[None] | None = None

    def is_cut(self, token: int, position: int | None) -> bool:
        """Return whether another sender repeats a token, within a batch of a later one.

        Rows of either may have come, so the later one is read from the table.
        """
        repeats = token <= max(position or 0, self.goal, self.token or 0)
        return repeats and (self.torn or bool(self.rows))


class Follower:
    """Takes RDATA and POSITION from any number of links, and advances the target.

    The target gets every fact once, in its writer's order. On a shared link, several participants
    may send the facts of one writer, and each that learns of a writer announces it, from 0.
    """

    def __init__(self, target: FollowTarget, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._target = target
        self._limits = transport.LIMITS
        self._tracks: dict[Link, dict[tuple[str, str], _Track]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[_Track] = []
        self.is_advancing: bool = False
        """The target is being advanced: all on a shared link have received this."""

    def rdata(self, command: Rdata, link: Link) -> None:
        """Take a row. Raise `ProtocolError` for one that does not have its stream's shape."""
        track = self._track(command.stream_name, command.instance_name, link)
        if track is None:
            return
        self._target.check(command.stream_name, command.row)
        if command.token is None:
            self._keep(track, command.row)
        elif self._is_shared and track.is_cut(
            command.token, self._target.position(track.stream_name, track.instance_name)
        ):
            track.torn = True
            track.rows.clear()
        elif (
            track.torn
            or not track.live
            or self._target.leaps(track.stream_name, track.instance_name, command.token)
        ):
            track.torn = False
            track.rows.clear()
            self._fetch(track, command.token)
        else:
            track.rows.append(command.row)
            self._pass_on_soon(track, command.token)

    def position(self, command: Position, link: Link) -> None:
        """Take a position. Raise `ProtocolError` for one that goes backwards."""
        if command.new_token < command.prev_token:
            raise ProtocolError(f"a position before the previous one: {command}")
        track = self._track(command.stream_name, command.instance_name, link)
        if track is None:
            return
        self._pass_on(track)
        track.torn = track.torn or bool(track.rows)
        track.rows.clear()
        position = self._target.position(track.stream_name, track.instance_name)
        leaps = self._target.leaps(track.stream_name, track.instance_name, command.new_token)
        if track.fetching or leaps or (position is not None and position < command.prev_token):
            self._fetch(track, command.new_token)
        else:
            is_learned = self._is_shared and command.prev_token == 0 < command.new_token
            track.live = track.live or not is_learned
            self._apply(track, command.new_token, [])

    def lost(self, link: Link) -> None:
        """Drop the tracks of a link that has ended; the next link starts them again."""
        for track in self._tracks.pop(link, {}).values():
            self._pass_on(track)
            if track.fetching:
                track.fetching.cancel()

    async def close(self) -> None:
        """Stop fetching."""
        for link in list(self._tracks):
            self.lost(link)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _track(self, stream_name: str, instance_name: str, link: Link) -> _Track | None:
        tracks = self._tracks.setdefault(link, {})
        track = tracks.get((stream_name, instance_name))
        if track is None and self._target.follows(stream_name, instance_name):
            anywhere = self._target.position(stream_name, instance_name) is None
            track = tracks[stream_name, instance_name] = _Track(
                link, stream_name, instance_name, live=anywhere
            )
        return track

    def _keep(self, track: _Track, row: Any) -> None:
        if track.torn or not track.live or len(track.rows) >= self._limits.batch_rows_max:
            track.torn = True
            track.rows.clear()
        else:
            track.rows.append(row)

    def _pass_on_soon(self, track: _Track, token: int) -> None:
        """Pass the rows of this token on, after all that arrived with it."""
        rows, track.rows = track.rows, []
        if track.token is not None and token <= track.token:
            return  # a link that starts to repeat
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._pass_on_all)
        if track.token is None:
            self._ready.append(track)
        track.complete_rows += [StreamRow(token, track.instance_name, row) for row in rows]
        track.token = token

    def _pass_on_all(self) -> None:
        ready, self._ready = self._ready, []
        for track in ready:
            try:
                self._pass_on(track)
            except Exception:
                logger.exception(
                    "rows of %s by %s could not be passed on",
                    track.stream_name,
                    track.instance_name,
                )
                track.link.refuse(
                    f"rows of {track.stream_name} by {track.instance_name} could not be passed on"
                )

    def _pass_on(self, track: _Track) -> None:
        rows, token = track.complete_rows, track.token
        if token is not None:
            track.complete_rows, track.token = [], None
            self._apply(track, token, rows)

    def _apply(self, track: _Track, current: int, rows: list[StreamRow]) -> None:
        """Advance the target. Leave out facts that another link has delivered already."""
        position = self._target.position(track.stream_name, track.instance_name)
        if position is not None and current <= position:
            return
        if position is not None and rows and rows[0].stream_id <= position:
            rows = [row for row in rows if row.stream_id > position]
        self.is_advancing = True
        try:
            self._target.advance(track.stream_name, track.instance_name, current, rows)
        finally:
            self.is_advancing = False

    # ---------------------------------------------------------------------------------------------
    # holes

    def _fetch(self, track: _Track, goal: int) -> None:
        track.live = False
        track.goal = max(track.goal, goal)
        if track.fetching is None:
            name = f"replication-fetch-{track.stream_name}-{track.instance_name}"
            track.fetching = asyncio.create_task(self._fetch_up_to_goal(track), name=name)
            self._tasks.add(track.fetching)
            track.fetching.add_done_callback(self._tasks.discard)

    async def _fetch_up_to_goal(self, track: _Track) -> None:
        """Fetch page by page, while the goal may move.

        Retry an unavailable database until it is back.
        """
        backoff = Backoff.of(self._limits)
        limit = self._limits.page_rows_max
        try:
            while (
                position := self._target.position(track.stream_name, track.instance_name) or 0
            ) < track.goal:
                goal = track.goal
                try:
                    page = await self._target.rows(
                        track.stream_name, track.instance_name, position, goal, limit
                    )
                except DatabaseError as error:
                    logger.warning(
                        "rows of %s by %s after %d: %s; trying again",
                        track.stream_name,
                        track.instance_name,
                        position,
                        error,
                    )
                    await asyncio.sleep(backoff.next())
                    continue
                backoff.reset()
                limit = self._take(track, page, goal, limit)
            track.live = True
        except Exception:
            logger.exception(
                "rows of %s by %s could not be fetched", track.stream_name, track.instance_name
            )
            track.link.refuse(
                f"rows of {track.stream_name} by {track.instance_name} could not be fetched"
            )
        finally:
            track.fetching = None

    def _take(self, track: _Track, page: list[StreamRow], goal: int, limit: int) -> int:
        """Apply one page; return the limit for the next."""
        whole = whole_ids(page, limit)
        if whole is None:
            self._apply(track, goal, page)
        elif whole:
            self._apply(track, whole[-1].stream_id, whole)
        else:
            return limit * 2
        return self._limits.page_rows_max
