"""Replay the forward extremities of a room, to know when one event alone gave its current state.

An accepted live event becomes an extremity, and its parents are none any more. Events that can be
no extremity are transparent: their parents are superseded, too (`extremities_after` in
storage/persist/plan/topology.py). An event that arrives after its children does the same then. Each
transparent event is passed once.

Where the replay cannot know an extremity that was dropped or purged, it has too many, and yields
less. It never yields a state that was not the current one.
"""

from collections.abc import AsyncIterator, Iterable
from heapq import heappop, heappush
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.maintenance.verify.room import BATCH, VerifiedRoom

SQL_STREAM: Final[LiteralString] = compose(
    """
SELECT event_nid, stream_ordering, COALESCE(state_group_after, state_group_before) AS state_group,
    rejected IS NULL AND NOT soft_failed AND NOT backfilled AS may_end, backfilled, event_id,
    :prev_nids.call AS prev_events
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND stream_ordering > $2::bigint
ORDER BY stream_ordering
LIMIT $3::bigint
""",
    PREV_NIDS,
).sql

SQL_NAMED: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.stream_ordering,
    COALESCE(e.state_group_after, e.state_group_before) AS state_group,
    e.rejected IS NULL AND NOT e.soft_failed AND NOT e.backfilled AS may_end, e.backfilled,
    e.event_id, :prev_nids.call(e) AS prev_events
FROM unnest($2::bigint[]) AS n (event_nid)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = n.event_nid OFFSET 0) AS e
WHERE e.room_nid = $1::int AND NOT e.outlier
""",
    PREV_NIDS,
).sql

SQL_LAST_GAP: Final[LiteralString] = """
SELECT max(e.stream_ordering)
FROM missing_events m
CROSS JOIN LATERAL unnest(m.child_nids) AS c (event_nid)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = c.event_nid OFFSET 0) AS e
WHERE m.room_nid = $1::int
"""


class ReplayedEventRow(NamedTuple):
    """An event of the timeline. ``may_end``: it can be a forward extremity."""

    event_nid: int
    stream_ordering: int
    state_group: int
    may_end: bool
    backfilled: bool
    event_id: str
    prev_events: list[int]


class CurrentPoint(NamedTuple):
    """An event that is the only forward extremity at a position, and the state after it.

    ``is_new``: the state differs from that of the point before.
    """

    stream_ordering: int
    event_id: str
    state_group: int
    is_new: bool


class CurrentReplay:
    """The extremities at a position, and the events that were named but have not arrived."""

    def __init__(self, conn: Connection, room_nid: int) -> None:
        self._conn = conn
        self._room_nid = room_nid
        self._named: set[int] = set()
        self._passed: set[int] = set()
        # named events that arrive as history, by position
        self._late: list[tuple[int, int]] = []
        self._known: dict[int, ReplayedEventRow] = {}
        self.ends: dict[int, ReplayedEventRow] = {}

    async def begin(self, rows: Iterable[ReplayedEventRow]) -> None:
        """Load what a page of events names, and forget the page before."""
        self._known = {row.event_nid: row for row in rows}
        await self._look_up([nid for row in rows for nid in row.prev_events])

    async def arrive(self, row: ReplayedEventRow) -> None:
        """Store an event, and before it the history that filled gaps."""
        while self._late and self._late[0][0] < row.stream_ordering:
            _, nid = heappop(self._late)
            await self._look_up([nid])
            await self._store(self._known[nid])
        await self._store(row)

    async def _store(self, row: ReplayedEventRow) -> None:
        """Make an event an extremity, unless a descendant of it arrived before."""
        is_named = row.event_nid in self._named
        self._named.discard(row.event_nid)
        if is_named and not row.may_end:
            self._passed.add(row.event_nid)
        if is_named or row.may_end:
            await self._supersede(row.prev_events, row.stream_ordering)
        if row.may_end and not is_named:
            self.ends[row.event_nid] = row

    async def _supersede(self, nids: Iterable[int], at: int) -> None:
        """Take these events, and those below transparent ones, out of the extremities."""
        front = list(nids)
        while front:
            await self._look_up([nid for nid in front if nid not in self.ends])
            below: list[int] = []
            for nid in front:
                row = self.ends.pop(nid, None) or self._known.get(nid)
                if row is None or row.stream_ordering > at:
                    if row is not None and row.backfilled and nid not in self._named:
                        heappush(self._late, (row.stream_ordering, nid))
                    self._named.add(nid)
                elif not row.may_end and nid not in self._passed:
                    self._passed.add(nid)
                    below += row.prev_events
            front = below

    async def _look_up(self, nids: Iterable[int]) -> None:
        """Load these events, as far as they are in the timeline."""
        lacking = list({nid for nid in nids if nid not in self._known})
        if lacking:
            rows = await self._conn.fetch(SQL_NAMED, self._room_nid, lacking, row=ReplayedEventRow)
            self._known.update((row.event_nid, row) for row in rows)


async def replayed_groups(
    conn: Connection, room: VerifiedRoom, *, after: int, is_cut: bool
) -> AsyncIterator[CurrentPoint]:
    """Yield the points above a position at which one event alone gave the current state.

    ``is_cut``: history was purged. Then extremities of the past may be unknown as long as live
    events name events that are not stored.
    """
    if is_cut:
        after = max(after, await conn.fetchval(SQL_LAST_GAP, room.nid) or 0)
    replay = CurrentReplay(conn, room.nid)
    position, group = 0, 0
    while rows := await conn.fetch(SQL_STREAM, room.nid, position, BATCH, row=ReplayedEventRow):
        await replay.begin(rows)
        for row in rows:
            await replay.arrive(row)
            if row.stream_ordering > after and len(replay.ends) == 1:
                [end] = replay.ends.values()
                is_new = end.state_group != group
                yield CurrentPoint(row.stream_ordering, end.event_id, end.state_group, is_new)
                group = end.state_group
        position = rows[-1].stream_ordering
