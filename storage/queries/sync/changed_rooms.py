"""The rooms that can have changed for a user since a token: from caches, and one statement.

A process caches three things (storage/streams/caches.py): the rooms that the user is in, the
position of the last change of each room, and that of the last change of any membership of the user.
A sync reads the rooms that are in both of the first two, however many rooms there are on either
side.

The caches lag behind the database: by the commits of other processes, and by the moment between a
commit and its notification. So the statement that reads the positions also returns unseen rooms, in
the same snapshot. A writer committed to these above the position up to which this process has
followed that writer. They are candidates as well. A change of membership always has its cause in
its room, so that room is a candidate. But only the stream "caches" says what state resolution does
to memberships. If the process has not followed such a row yet, its rooms of the user may be wrong.
Other rows of that stream, such as those of a purge or of `forget`, change no joined rooms. Where
the caches do not suffice, the result is None, and the sync reads all rooms. A process that expects
nothing new requests the positions alone first (`SyncMemory.still`). That is a third of the work,
and enough if no position is ahead of the process.

The rooms of the user were the same from the token to the snapshot. No membership changed after the
token until they were read. A change since then would have invalidated the cache entry.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Generic, LiteralString, NamedTuple, Protocol, TypeVar

from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.database.prepared import prepare_ahead
from storage.ids import RoomId, UserId, intern
from storage.streams import SyncToken, VectorPosition
from storage.streams.caches import Cache, LastChange, RoomsOf, Ticket
from storage.streams.notifier import Notifier

# --------------------------------------------------------------------------------------------------
# The positions of the streams in a snapshot.
#
# A position and its facts are written in one transaction (storage/persist/write/all_tables.py), so
# within one snapshot the positions are those of exactly the facts that can be read.

TEMPLATE_POSITIONS: Final[LiteralString] = """
SELECT 'writer' AS kind, stream_name, instance_name, stream_id AS position
FROM stream_positions
WHERE stream_name <> 'backfill'
UNION ALL
SELECT 'purged', stream_name, NULL, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
{others}
"""
SQL_POSITIONS: Final[LiteralString] = fill(TEMPLATE_POSITIONS, others="")
prepare_ahead(SQL_POSITIONS)

SQL_POSITIONS_OF_CONNECTION: Final[LiteralString] = fill(
    TEMPLATE_POSITIONS,
    others="""
UNION ALL
SELECT 'connection', 'events', NULL, c.used_ts
FROM sliding_connections c
JOIN principals u USING (principal_nid)
WHERE c.connection_nid = $1::bigint AND ($2::bigint = c.base OR $2::bigint = ANY(c.unconfirmed))
    AND u.name = $3::text AND c.device_id = $4::text AND c.conn_id = $5::text
""",
)
"""Also returns when a connection was in use, if the state of its `pos` is valid."""

ACCOUNT_DATA: Final = "account_data"
RECEIPTS: Final = "receipts"
TO_DEVICE: Final = "to_device"
OTHER_STREAMS: Final = (ACCOUNT_DATA, RECEIPTS, TO_DEVICE)
"""Streams of which a sync returns the position alone. The store of each returns its facts."""

STREAMS: Final = ("events", *OTHER_STREAMS)
"""The built-in streams of a sync token. Those that the process has defined are also in it."""

NOT_SYNCED: Final = ("backfill", "caches")
"""Streams that no token has."""

PART_STREAMS: Final[LiteralString] = "stream_name <> 'backfill'"
"""The streams of tokens, and the caches that a sync reads, for statements with other rows."""

WRITER: Final = "writer"
PURGED: Final = "purged"


class WriterRow(NamedTuple):
    """A position in a stream: of a writer, or up to which the stream is purged ("purged").

    A purged row has no ``instance_name``. Below its position facts may be missing.
    """

    kind: str
    stream_name: str
    instance_name: str | None
    position: int


class Reached(NamedTuple):
    """The positions of the streams of a sync token, and up to which the events may be purged."""

    token: SyncToken
    purged_upto: int


async def where(conn: Connection) -> Reached:
    """Return how far the streams are."""
    return reached_by(await writers(conn))


async def writers(conn: Connection) -> list[WriterRow]:
    """Return the position of each writer in each stream, and of the purge of the events."""
    return await conn.fetch(SQL_POSITIONS, row=WriterRow)


def reached_by(rows: Iterable[WriterRow]) -> Reached:
    """Return the positions of the streams for those of their writers. Recent ones are cached."""
    return _reached_by(tuple(rows))


@lru_cache(maxsize=64)
def _reached_by(rows: tuple[WriterRow, ...]) -> Reached:
    named = {row.stream_name for row in rows if row.kind == WRITER}.difference(NOT_SYNCED)
    vectors = {name: vector(positions_in(rows, name)) for name in named.union(STREAMS)}
    purged = (row.position for row in rows if row.kind == PURGED)
    return Reached(SyncToken.of(vectors), max(purged, default=0))


def covered(reached: SyncToken, defined: frozenset[str], previous: SyncToken | None) -> SyncToken:
    """Return the positions that a response covers: of the built-in and of the ``defined`` streams.

    A response has no facts of a stream that only other processes have defined. So the token keeps
    the position that it has in ``previous``, the token of the client, and lacks it without one.
    """
    if all(name in STREAMS or name in defined for name, _ in reached.streams):
        return reached
    previous_positions = {} if previous is None else previous.positions()
    return SyncToken(
        tuple(
            (name, at if name in STREAMS or name in defined else at.meet(previous_positions[name]))
            for name, at in reached.streams
            if name in STREAMS or name in defined or name in previous_positions
        )
    )


def positions_in(rows: Iterable[WriterRow], stream_name: str) -> dict[str, int]:
    return {
        row.instance_name or "": row.position
        for row in rows
        if row.kind == WRITER and row.stream_name == stream_name
    }


async def positions(conn: Connection) -> dict[str, VectorPosition]:
    """Return the position of each stream of a sync token."""
    return (await where(conn)).token.positions()


def vector(writers: Mapping[str, int]) -> VectorPosition:
    return VectorPosition.of(min(writers.values(), default=0), writers)


def events_of(token: SyncToken) -> VectorPosition:
    return token.position("events") or VectorPosition()


def reached(token: SyncToken) -> int:
    """Return the stream ordering above which the token covers no event."""
    return events_of(token).furthest()


UNSEEN: Final = "unseen"
UNRESOLVED: Final = "unresolved"
ROOMS_OF: Final = "rooms of"
CONNECTION: Final = "connection"
FOLLOWED: Final = ("events", "caches")  # the streams that invalidate the caches
FAR: Final = 5_000  # positions: a process further behind reads all rooms

TEMPLATE_CHANGE_SNAPSHOT: Final[LiteralString] = """
WITH
writer AS MATERIALIZED (
    SELECT p.stream_name, p.instance_name, p.stream_id, COALESCE(s.stream_id, p.entered_at) AS seen
    FROM stream_positions p
    LEFT JOIN unnest(:streams, :instances, :seen) AS s (stream_name, instance_name,
        stream_id) USING (stream_name, instance_name)
    WHERE {streams}
),
behind AS MATERIALIZED (  -- writers that are ahead of the position seen
    SELECT w.writer_nid, p.seen, p.stream_id
    FROM writer p
    JOIN writers w USING (instance_name)
    WHERE p.stream_name = 'events' AND p.stream_id > p.seen
),
unseen_range AS MATERIALIZED (
    SELECT min(seen) AS above, max(stream_id) AS upto,
        max(stream_id) - min(seen) > :far AS is_far
    FROM behind
    HAVING count(*) > 0
),
unseen AS (
    SELECT f.room_nid
    FROM (
        SELECT e.room_nid, e.stream_ordering, e.writer_nid
        FROM unseen_range s
        JOIN events e ON e.stream_ordering > s.above AND e.stream_ordering <= s.upto
        WHERE NOT s.is_far AND NOT e.backfilled
        UNION ALL
        SELECT e.room_nid, o.stream_id, o.writer_nid
        FROM unseen_range s
        JOIN outlier_memberships o ON o.stream_id > s.above AND o.stream_id <= s.upto
        JOIN events e USING (event_nid)
        WHERE NOT s.is_far
    ) AS f
    JOIN behind b ON b.writer_nid = f.writer_nid AND f.stream_ordering > b.seen
)
SELECT 'writer' AS kind, stream_name, instance_name, stream_id AS position, seen,
    NULL::int[] AS room_nids, NULL::text[] AS room_ids, NULL::bigint[] AS numbers
FROM writer
UNION ALL
SELECT 'unseen', 'events', NULL, upto, NULL, CASE
    WHEN NOT is_far THEN ARRAY(SELECT DISTINCT room_nid FROM unseen) END, NULL, NULL
FROM unseen_range
UNION ALL
SELECT 'unresolved', 'caches', p.instance_name, p.stream_id, p.seen, NULL, NULL, NULL
FROM writer p
WHERE p.stream_name = 'caches' AND p.stream_id > p.seen
    AND (p.stream_id - p.seen > :far OR EXISTS (
        SELECT FROM cache_invalidations i
        JOIN writers w USING (writer_nid)
        WHERE i.stream_id > p.seen AND i.stream_id <= p.stream_id
            AND w.instance_name = p.instance_name
            AND (i.cache_name IN ('cs_cache_fake', 'rooms_of') {invalidating})
    ))
UNION ALL
SELECT 'purged', stream_name, NULL, purged_upto, NULL, NULL, NULL, NULL
FROM purged_streams
WHERE stream_name = 'events'
UNION ALL
SELECT 'rooms of', 'events', NULL, max(m.stream_ordering), NULL,
    array_agg(m.room_nid ORDER BY m.room_nid) FILTER (WHERE m.membership = {JOIN}),
    array_agg(r.room_id ORDER BY m.room_nid) FILTER (WHERE m.membership = {JOIN}), NULL
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = :rooms_of
{connection}
"""
SQL_CHANGE_SNAPSHOT: Final[LiteralString] = compose(
    fill(TEMPLATE_CHANGE_SNAPSHOT, streams=PART_STREAMS, invalidating="", connection=""),
    streams="text[]",
    instances="text[]",
    seen="bigint[]",
    rooms_of="text",
    far="bigint",
).sql
prepare_ahead(SQL_CHANGE_SNAPSHOT)
SQL_CHANGE_SNAPSHOT_OF_CONNECTION: Final[LiteralString] = compose(
    fill(
        TEMPLATE_CHANGE_SNAPSHOT,
        streams=PART_STREAMS,
        # a list of sliding sync has no rooms that the user has forgotten
        invalidating="OR i.cache_name = 'forgotten' AND i.keys[2] = :user_id",
        connection="""
UNION ALL
SELECT 'connection', 'events', NULL, c.base, c.used_ts, NULL, c.required_states,
    c.last_number || c.unconfirmed
FROM sliding_connections c
JOIN principals u USING (principal_nid)
WHERE c.connection_nid = :connection_nid AND (:number = c.base OR :number = ANY(c.unconfirmed))
    AND u.name = :user_id AND c.device_id = :device_id AND c.conn_id = :conn_id
""",
    ),
    streams="text[]",
    instances="text[]",
    seen="bigint[]",
    rooms_of="text",
    far="bigint",
    connection_nid="bigint",
    number="bigint",
    user_id="text",
    device_id="text",
    conn_id="text",
).sql
"""Also returns the connection of a sliding sync, if the state of its `pos` is valid."""


class ChangeSnapshotRow(NamedTuple):
    """One row of a kind, with a position of a stream.

    "writer": its position, and up to which this process has ``seen`` it. "unseen": the last unseen
    position, and the rooms with an event up to it (None: too many). "unresolved": a writer of the
    stream "caches" that has changed rooms of users above ``seen``. "purged": up to which the
    stream is purged. "rooms of": the rooms of the user, and the last change of their memberships.
    "connection": its base, when it was in use, and the values of required_state. Its ``numbers``
    are those of states: the last one, and then the unconfirmed ones.
    """

    kind: str
    stream_name: str
    instance_name: str | None
    position: int | None
    seen: int | None
    room_nids: list[int] | None
    room_ids: list[str] | None
    numbers: list[int] | None


@dataclass(frozen=True, slots=True)
class ChangeSnapshot:
    """The positions of the streams in one snapshot, and what the caches know there."""

    token: SyncToken
    rooms_of: RoomsOf | None
    """The rooms that the user is in. None: unknown."""
    unseen: frozenset[int] | None
    """The rooms with commits that this process has not seen. None: unknown."""
    changes: LastChange
    purged_upto: int = 0
    is_read: bool = False
    """The rooms of the user were read in the snapshot, not from the cache."""
    time: int = 0
    """The time on the clock of the process before the snapshot. 0: unknown."""
    is_resolved: bool = True
    """The process has followed the stream "caches", as far as it changes rooms of users."""

    def candidates(self, since: VectorPosition) -> list[int] | None:
        """Return the nids of the rooms that can have changed since then. None: any can."""
        if self.rooms_of is None or self.unseen is None:
            return None
        if not _reaches_back(self.rooms_of, self.changes, since):
            return None
        return sorted(self.unseen.union(_changed(self.rooms_of, self.changes, since)))

    @property
    def positions(self) -> dict[str, VectorPosition]:
        """Return the position of each stream of a sync token."""
        return self.token.positions()

    @property
    def room_ids(self) -> list[RoomId] | None:
        """Return the rooms that the user is in, if they are known for certain."""
        is_certain = self.is_read or self.unseen == frozenset()
        return (
            list(map(RoomId, self.rooms_of.joined))
            if self.rooms_of is not None and is_certain
            else None
        )


class SyncMemory:
    """The caches of a process for its syncs.

    ``seen`` returns, for a stream, up to which position the process has followed each writer.
    ``clock`` returns the time of the last change that was published to the process.
    """

    def __init__(
        self,
        seen: Callable[[str], Mapping[str, int]],
        rooms_of: Cache[RoomsOf],
        changes: LastChange,
        state_changes: LastChange,
        clock: Callable[[], int] = lambda: 0,
    ) -> None:
        self._seen = seen
        self._rooms_of = rooms_of
        self._changes = changes
        self._state_changes = state_changes
        self._clock = clock

    def has_no_changes(self, user_id: UserId, since: VectorPosition) -> bool:
        """Return whether nothing is new to the user, as far as this process has followed."""
        entry = self._rooms_of.peek(user_id)
        return (
            entry is not None
            and _reaches_back(entry, self._changes, since)
            and next(_changed(entry, self._changes, since), None) is None
        )

    async def snapshot(
        self, conn: Connection, user_id: UserId, *, reread: bool = False
    ) -> ChangeSnapshot:
        """Return the snapshot for a user, by one statement.

        It also reads the rooms of the user where they are not cached, or if ``reread``.
        """
        entry, time = self._rooms_of.get(user_id), self._clock()
        seen = [(name, writer, at) for name in FOLLOWED for writer, at in self._seen(name).items()]
        is_read = reread or isinstance(entry, Ticket)
        rows = await read(conn, seen, user_id if is_read else None)
        is_current = _is_resolved(rows)
        rooms_of = entry if is_current and not isinstance(entry, Ticket) else None
        if is_read:
            rooms_of = _rooms_of(rows)
        if isinstance(entry, Ticket) and rooms_of is not None:
            self._rooms_of.fill(entry, rooms_of)
        reached = _reached(rows)
        unseen = _unseen(rows)
        return ChangeSnapshot(
            reached.token,
            rooms_of,
            unseen,
            self._changes,
            reached.purged_upto,
            is_read,
            time,
            is_current,
        )

    async def snapshot_of_connection(
        self, conn: Connection, pos: tuple[int, int], key: tuple[str, str, str]
    ) -> tuple[ChangeSnapshot, ChangeSnapshotRow | None]:
        """Return the snapshot, and the row of the connection. None: its state is not valid now.

        ``pos``: the connection and the number of its state. ``key``: user, device and conn_id.
        """
        time = self._clock()
        seen = [(name, writer, at) for name in FOLLOWED for writer, at in self._seen(name).items()]
        columns = [list(column) for column in zip(*seen, strict=True)] or [[], [], []]
        rows = await conn.fetch(
            SQL_CHANGE_SNAPSHOT_OF_CONNECTION,
            *columns,
            None,
            FAR,
            *pos,
            *key,
            row=ChangeSnapshotRow,
        )
        reached = _reached(rows)
        snapshot = ChangeSnapshot(
            reached.token,
            None,
            _unseen(rows),
            self._changes,
            reached.purged_upto,
            time=time,
            is_resolved=_is_resolved(rows),
        )
        return snapshot, next((row for row in rows if row.kind == CONNECTION), None)

    async def positions_only(self, conn: Connection, user_id: UserId) -> ChangeSnapshot | None:
        """Return a snapshot of the positions alone. None: there are commits not seen yet."""
        seen = self.seen_positions(user_id)
        return seen.confirmed(await writers(conn))

    def seen_positions(self, user_id: UserId) -> "SeenPositions":
        """Return what this process has seen and cached, without a statement."""
        entry = self._rooms_of.get(user_id)
        seen = {name: dict(self._seen(name)) for name in FOLLOWED}
        rooms_of = None if isinstance(entry, Ticket) else entry
        return SeenPositions(seen, rooms_of, self._changes, self._clock())

    def has_state(self, user_id: UserId, since: VectorPosition) -> bool:
        """Return whether a room of the user has had a state event, as far as the caches know.

        If not, there may still be state to return.
        """
        entry = self._rooms_of.peek(user_id)
        return (
            entry is not None
            and next(_changed(entry, self._state_changes, since), None) is not None
        )


class SeenPositions(NamedTuple):
    """The positions that a process has seen, by stream and writer, and the cached rooms of a user.

    ``rooms_of`` None: unknown.
    """

    seen: Mapping[str, Mapping[str, int]]
    rooms_of: RoomsOf | None
    changes: LastChange
    time: int = 0

    @property
    def upto(self) -> VectorPosition:
        """Return the position up to which the process has seen the events."""
        return vector(self.seen["events"])

    def candidates(self, since: VectorPosition) -> list[int] | None:
        return ChangeSnapshot(SyncToken(), self.rooms_of, frozenset(), self.changes).candidates(
            since
        )

    def confirmed(self, rows: Iterable[WriterRow]) -> ChangeSnapshot | None:
        """Return the snapshot. None: there are commits that this process has not seen."""
        rows = tuple(rows)
        if any(
            row.position > self.seen[row.stream_name].get(row.instance_name or "", -1)
            for row in rows
            if row.kind == WRITER and row.stream_name in self.seen
        ):
            return None
        reached = reached_by(rows)
        purged_upto = reached.purged_upto
        return ChangeSnapshot(
            reached.token, self.rooms_of, frozenset(), self.changes, purged_upto, time=self.time
        )


async def read(
    conn: Connection, seen: Sequence[tuple[str, str, int]], user_id: UserId | None
) -> list[ChangeSnapshotRow]:
    """Return the positions, the rooms with commits after ``seen``, and the rooms of a user.

    ``seen``: (stream, writer, position). ``user_id`` None: no user's rooms.
    """
    columns = [list(column) for column in zip(*seen, strict=True)] or [[], [], []]
    return await conn.fetch(SQL_CHANGE_SNAPSHOT, *columns, user_id, FAR, row=ChangeSnapshotRow)


async def rooms_of(conn: Connection, user_id: UserId) -> RoomsOf:
    return _rooms_of(await read(conn, (), user_id))


def _reaches_back(rooms_of: RoomsOf, changes: LastChange, since: VectorPosition) -> bool:
    """Return whether the caches reach back so far, and the user's rooms were the same since."""
    reaches_back = rooms_of.changed_at <= since.min and since.min >= changes.floor
    changes.hits += reaches_back
    changes.misses += not reaches_back
    return reaches_back


def _changed(rooms_of: RoomsOf, changes: LastChange, since: VectorPosition) -> Iterator[int]:
    """Yield the nids of the user's rooms that have changed; some of them twice."""
    joined = rooms_of.joined
    for count, room_id in enumerate(changes.since(since.min)):
        if count > len(joined):  # from here on the user's rooms are fewer
            yield from (nid for room_id, nid in joined.items() if changes.last(room_id) > since.min)
            return
        if room_id in joined:
            yield joined[room_id]


def _reached(rows: Sequence[ChangeSnapshotRow]) -> Reached:
    """Return the positions of the streams in these rows."""
    return reached_by(
        WriterRow(row.kind, row.stream_name, row.instance_name, row.position or 0)
        for row in rows
        if row.kind in (WRITER, PURGED)
    )


def _is_resolved(rows: Sequence[ChangeSnapshotRow]) -> bool:
    """Return whether the process has followed what changes the rooms of users."""
    return all(row.kind != UNRESOLVED for row in rows)


def _rooms_of(rows: Sequence[ChangeSnapshotRow]) -> RoomsOf:
    for row in rows:
        if row.kind == ROOMS_OF:
            ids = map(intern, row.room_ids or ())
            return RoomsOf(dict(zip(ids, row.room_nids or (), strict=True)), row.position or 0)
    return RoomsOf({}, 0)


def _unseen(rows: Sequence[ChangeSnapshotRow]) -> frozenset[int] | None:
    for row in rows:
        if row.kind == UNSEEN:
            return None if row.room_nids is None else frozenset(row.room_nids)
    return frozenset()


# --------------------------------------------------------------------------------------------------
# Long polling: look, and while nothing is new wait for a change that concerns the user.
#
# The response of a sync follows from events in the user's rooms, and from facts that name the user.
# So these end the wait. One change is not in the events: state resolution may make a user a member
# again, or remove a membership. The stream "caches" publishes that.
#
# News of the user in a stream beside the events (account data, receipts, to-device, and those that
# the process has defined) end the wait, too. The response is empty then, and its `next_batch`
# covers them.

RESOLVED: Final = "caches"


class Waited(Protocol):
    """A response that may be empty."""

    @property
    def is_empty(self) -> bool: ...


A = TypeVar("A", bound=Waited)


class PollResult(NamedTuple, Generic[A]):
    """A response, and the keys to wait for if it is empty: the user, and the rooms of the user.

    The rooms are those as of the response, or of a later moment.
    """

    answer: A
    keys: Iterable[str]


async def poll_until_changed(
    poll: Callable[[], Awaitable[PollResult[A]]],
    notifier: Notifier,
    reached: Callable[[A], SyncToken],
    since: SyncToken | None,
    *,
    timeout_ms: int,
    ending: Collection[str],
    included: Collection[str] = (),
) -> A:
    """Return the first response that is not empty, or before which a stream beside had news.

    Return the last one when the time is over. ``reached`` returns the positions of a response.
    ``ending`` are the streams beside the events whose news end the wait. A response has the news of
    ``included`` streams, so these only end it where the response is not empty.
    """
    if timeout_ms <= 0:
        return (await poll()).answer
    other_positions = _other_positions(since, ending)
    polled_again = False
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    while True:
        resolved = notifier.position(RESOLVED)
        answer, keys = await poll()
        left_ms = int((deadline - loop.time()) * 1000)
        if not answer.is_empty or left_ms <= 0:
            return answer
        upto = reached(answer)
        if notifier.may_have_changed(keys, other_positions):
            # The news may have come after the snapshot of this response. Look once more then, so
            # that `next_batch` covers them; only once, as news may never end.
            if polled_again or not notifier.may_have_changed(keys, _other_positions(upto, ending)):
                return answer
            polled_again = True
            continue
        other_positions = _followed(_other_positions(upto, ending), notifier)
        others = _followed(_other_positions(upto, included), notifier)
        waited = {"events": events_of(upto), **others, **other_positions, RESOLVED: resolved}
        if not await notifier.wait(keys, after=SyncToken.of(waited), timeout_ms=left_ms):
            return answer


def _other_positions(token: SyncToken | None, names: Iterable[str]) -> dict[str, VectorPosition]:
    """Return the positions of a token in the streams beside the events.

    A token from before a stream was added or defined does not name it. Then it is at 0.
    """
    if token is None:
        return {}
    named = token.positions()
    return {name: named.get(name, VectorPosition()) for name in names}


def _followed(
    positions: Mapping[str, VectorPosition], notifier: Notifier
) -> dict[str, VectorPosition]:
    """Return these positions as far as this process has followed the streams.

    A snapshot may have facts of other processes that are published here later. They are not in the
    response, so they still have to end the wait.
    """
    return {name: at.meet(notifier.position(name)) for name, at in positions.items()}
