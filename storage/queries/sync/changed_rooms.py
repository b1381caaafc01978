"""Which rooms can have news for a user since a token: what a process remembers, and one statement for what it does not.

Three things are remembered (storage/streams/caches.py): the rooms that the user is in, the position of the last change of each room,
and that of the last change of any membership of the user. So what a sync looks at are the rooms that are in both of the first two,
whatever the number of rooms on either side.

What a process remembers lags behind the database: by what others have committed, by the moment between a commit and its news. So the
statement that reads the positions also tells, in the same snapshot, in which rooms something was committed by a writer after the
position up to which this process has heard of that writer. These are candidates as well. A change of membership always has its
cause in its room, so a candidate; but what resolution does to memberships, only the stream "caches" tells: if the process is behind in
that, its rooms of the user may be wrong. Where anything is not known, the answer is None, and all rooms are looked at. Who expects that
nothing is new asks for the positions alone first (`SyncMemory.still`): that is a third of the work, and enough if none is ahead of what was heard.

That the rooms of the user were the same ones throughout, from the token to the snapshot, follows from: no membership of theirs changed
after the token until they were read, and no change was told since then, which would have made them be forgotten.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import RoomId, UserId
from storage.queries.sync.positions import PURGED, STREAMS, WriterRow, reached_by, vector, writers
from storage.streams import SyncToken, VectorPosition
from storage.streams.caches import Cache, LastChange, RoomsOf, Ticket

UNSEEN: Final = "unseen"
ROOMS_OF: Final = "rooms of"
HEARD: Final = ("events", "caches")  # the streams that what is remembered follows
FAR: Final = 5_000  # positions; who is further behind looks at all rooms

SQL_NEWS: Final[LiteralString] = """
WITH
writer AS MATERIALIZED (
    SELECT p.stream_name, p.instance_name, p.stream_id, COALESCE(s.stream_id, p.entered_at) AS seen
    FROM stream_positions p
    LEFT JOIN unnest($1::text[], $2::text[], $3::bigint[]) AS s (stream_name, instance_name,
        stream_id) USING (stream_name, instance_name)
    WHERE p.stream_name IN ('events', 'caches', 'account_data', 'receipts', 'to_device')
),
behind AS MATERIALIZED (  -- writers of which there is more than was seen
    SELECT w.writer_nid, p.seen, p.stream_id
    FROM writer p
    JOIN writers w USING (instance_name)
    WHERE p.stream_name = 'events' AND p.stream_id > p.seen
),
stretch AS MATERIALIZED (
    SELECT min(seen) AS above, max(stream_id) AS upto,
        max(stream_id) - min(seen) > $5::bigint AS is_far
    FROM behind
    HAVING count(*) > 0
),
unseen AS (
    SELECT f.room_nid
    FROM (
        SELECT e.room_nid, e.stream_ordering, e.writer_nid
        FROM stretch s
        JOIN events e ON e.stream_ordering > s.above AND e.stream_ordering <= s.upto
        WHERE NOT s.is_far AND NOT e.backfilled
        UNION ALL
        SELECT e.room_nid, o.stream_id, o.writer_nid
        FROM stretch s
        JOIN outlier_memberships o ON o.stream_id > s.above AND o.stream_id <= s.upto
        JOIN events e USING (event_nid)
        WHERE NOT s.is_far
    ) AS f
    JOIN behind b ON b.writer_nid = f.writer_nid AND f.stream_ordering > b.seen
)
SELECT stream_name AS what, instance_name, stream_id AS position, seen, NULL::int[] AS room_nids,
    NULL::text[] AS room_ids
FROM writer
UNION ALL
SELECT 'unseen', NULL, upto, above, CASE
    WHEN NOT is_far THEN ARRAY(SELECT DISTINCT room_nid FROM unseen) END, NULL
FROM stretch
UNION ALL
SELECT 'purged', stream_name, purged_upto, 0, NULL, NULL
FROM purged_streams
WHERE stream_name = 'events'
UNION ALL
SELECT 'rooms of', NULL, max(m.stream_ordering), 0,
    array_agg(m.room_nid ORDER BY m.room_nid) FILTER (WHERE m.membership = 5),
    array_agg(r.room_id ORDER BY m.room_nid) FILTER (WHERE m.membership = 5)
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $4::text
"""


class NewsRow(NamedTuple):
    """A writer in a stream: how far it is, and how far this process has heard; or what is unseen, or purged; or the rooms of the user."""

    what: str
    instance_name: str | None
    position: int | None
    seen: int
    room_nids: list[int] | None
    """Of "unseen" the rooms in which something was committed meanwhile; None: too much was."""
    room_ids: list[str] | None


@dataclass(frozen=True, slots=True)
class News:
    """How far the streams are in one snapshot, and what is known there."""

    token: SyncToken
    rooms_of: RoomsOf | None
    """The rooms that the user is in. None: it is not known."""
    unseen: frozenset[int] | None
    """The rooms in which something was committed that this process has not heard of.

    None: it is not known.
    """
    changes: LastChange
    purged_upto: int = 0
    is_read: bool = False
    """The rooms of the user were read in the snapshot, not remembered."""

    def candidates(self, since: VectorPosition) -> list[int] | None:
        """The rooms that can have news for the user since then, by room nid. None: any can."""
        if self.rooms_of is None or self.unseen is None:
            return None
        if not _is_known(self.rooms_of, self.changes, since):
            return None
        return sorted(self.unseen.union(_changed(self.rooms_of, self.changes, since)))

    @property
    def positions(self) -> dict[str, VectorPosition]:
        """Of each stream of a sync token."""
        return self.token.positions()

    @property
    def room_ids(self) -> list[RoomId] | None:
        """The rooms that the user is in, if they are known for certain."""
        is_certain = self.is_read or self.unseen == frozenset()
        return (
            list(map(RoomId, self.rooms_of.joined))
            if self.rooms_of is not None and is_certain
            else None
        )


class SyncMemory:
    """What a process remembers for its syncs.

    ``heard``: up to which position it has heard of a stream, by writer.
    """

    def __init__(
        self,
        heard: Callable[[str], Mapping[str, int]],
        rooms_of: Cache[RoomsOf],
        changes: LastChange,
        state_changes: LastChange,
    ) -> None:
        self._heard = heard
        self._rooms_of = rooms_of
        self._changes = changes
        self._state_changes = state_changes

    def is_quiet(self, user_id: UserId, since: VectorPosition) -> bool:
        """Whether nothing is new to the user as far as this process has heard."""
        entry = self._rooms_of.peek(user_id)
        return (
            entry is not None
            and _is_known(entry, self._changes, since)
            and next(_changed(entry, self._changes, since), None) is None
        )

    async def news(self, conn: Connection, user_id: UserId, *, anew: bool = False) -> News:
        """In one statement.

        The rooms of the user are read with it where they are not remembered, or wanted ``anew``.
        """
        entry = self._rooms_of.get(user_id)
        heard = [(name, writer, at) for name in HEARD for writer, at in self._heard(name).items()]
        rows = await read(conn, heard, user_id if anew or isinstance(entry, Ticket) else None)
        is_current = all(
            row.position is not None and row.position <= row.seen
            for row in rows
            if row.what == "caches"
        )
        rooms_of = entry if is_current and not isinstance(entry, Ticket) else None
        is_read = anew or isinstance(entry, Ticket)
        if is_read:
            rooms_of = _rooms_of(rows)
        if isinstance(entry, Ticket) and rooms_of is not None:
            self._rooms_of.fill(entry, rooms_of)
        purged_upto = max((row.position or 0 for row in rows if row.what == PURGED), default=0)
        found = {
            name: {row.instance_name or "": row.position or 0 for row in rows if row.what == name}
            for name in STREAMS
        }
        token = SyncToken.of({name: vector(writers) for name, writers in found.items()})
        return News(token, rooms_of, _unseen(rows), self._changes, purged_upto, is_read)

    async def still(self, conn: Connection, user_id: UserId) -> News | None:
        """The same in a smaller statement, if nothing was committed that this process has not heard of. None: something was."""
        known = self.known(user_id)
        return known.confirmed(await writers(conn, (*STREAMS, "caches")))

    def known(self, user_id: UserId) -> "KnownPositions":
        """What this process has heard and remembers, before it asks."""
        entry = self._rooms_of.get(user_id)
        heard = {name: dict(self._heard(name)) for name in HEARD}
        return KnownPositions(heard, None if isinstance(entry, Ticket) else entry, self._changes)

    def has_state(self, user_id: UserId, since: VectorPosition) -> bool:
        """Whether one of the rooms of the user has had a state event, as far as is remembered.

        It may still have state to tell if not.
        """
        entry = self._rooms_of.peek(user_id)
        return (
            entry is not None
            and next(_changed(entry, self._state_changes, since), None) is not None
        )


class KnownPositions(NamedTuple):
    """What a process has heard and remembers: up to where, by stream and writer; the rooms of a user, None: not known."""

    heard: Mapping[str, Mapping[str, int]]
    rooms_of: RoomsOf | None
    changes: LastChange

    @property
    def upto(self) -> VectorPosition:
        """Up to where it has heard of the events."""
        return vector(self.heard["events"])

    def candidates(self, since: VectorPosition) -> list[int] | None:
        """As `News.candidates`, if nobody has committed anything else."""
        return News(SyncToken(), self.rooms_of, frozenset(), self.changes).candidates(since)

    def confirmed(self, rows: Iterable[WriterRow]) -> News | None:
        """As known where the writers are there.

        None: somebody has committed what was not heard of.
        """
        rows = tuple(rows)
        if any(
            row.stream_id > self.heard[row.stream_name].get(row.instance_name, -1)
            for row in rows
            if row.stream_name in self.heard
        ):
            return None
        reached = reached_by(rows)
        return News(reached.token, self.rooms_of, frozenset(), self.changes, reached.purged_upto)


async def read(
    conn: Connection, heard: Sequence[tuple[str, str, int]], user_id: UserId | None
) -> list[NewsRow]:
    """The positions of the streams; what was committed after those ``heard`` of, by stream and writer; the rooms of a user, if asked for."""
    columns = [list(column) for column in zip(*heard, strict=True)] or [[], [], []]
    return await conn.fetch(SQL_NEWS, *columns, user_id, FAR, row=NewsRow)


async def rooms_of(conn: Connection, user_id: UserId) -> RoomsOf:
    """The rooms that a local user is in."""
    return _rooms_of(await read(conn, (), user_id))


def _is_known(rooms_of: RoomsOf, changes: LastChange, since: VectorPosition) -> bool:
    """Whether it is remembered what has changed; and no other rooms became the user's, or ceased to be."""
    is_known = rooms_of.moved <= since.min and since.min >= changes.floor
    changes.hits += is_known
    changes.misses += not is_known
    return is_known


def _changed(rooms_of: RoomsOf, changes: LastChange, since: VectorPosition) -> Iterator[int]:
    """Those of the user's rooms that have changed; some may be told twice."""
    joined = rooms_of.joined
    for count, room_id in enumerate(changes.since(since.min)):
        if count > len(joined):  # from here on it is shorter to go through the user's rooms
            yield from (nid for room_id, nid in joined.items() if changes.last(room_id) > since.min)
            return
        if room_id in joined:
            yield joined[room_id]


def _rooms_of(rows: Sequence[NewsRow]) -> RoomsOf:
    for row in rows:
        if row.what == ROOMS_OF:
            ids = map(intern, row.room_ids or ())
            return RoomsOf(dict(zip(ids, row.room_nids or (), strict=True)), row.position or 0)
    return RoomsOf({}, 0)


def _unseen(rows: Sequence[NewsRow]) -> frozenset[int] | None:
    for row in rows:
        if row.what == UNSEEN:
            return None if row.room_nids is None else frozenset(row.room_nids)
    return frozenset()
