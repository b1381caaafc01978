"""Find the references between events that stay and events that go.

These are children of purged events, redactions of purged events, and events that a staying event
cites or was redacted by. They are looked up page by page before the first batch, without a lock.
Each transaction then reads the events that arrived since, under the room's lock. A job never takes
an event that arrived after it began, so only new arrivals can change the result. One exception:
forged depths can reorder events upwards. Then everything is looked up again (`ReorderedMeanwhile`).
"""

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.connection import Connection, Database
from storage.database.placeholders import compose
from storage.event import load
from storage.maintenance.purge.cut_point import CutPoint
from storage.maintenance.reencode import end_of_positions
from storage.persist.room_lock import lock_room_keeping_plans

PAGE: Final = 2_000
EVENTS: Final = 50_000  # of the stream that all rooms share, read by one statement

SQL_STAND: Final[LiteralString] = """
SELECT moves, forward_extremities, last_stream_ordering,
    (SELECT last_value FROM events_stream) AS position, write_version
FROM rooms
WHERE room_nid = $1::int
"""

SQL_STAYING: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.topological_ordering, e.stream_ordering, e.backfilled, e.redacted_by,
    e.type_nid = {TYPE_REDACTION} AND e.rejected IS NULL AND NOT e.soft_failed AS is_redaction,
    ARRAY(
        SELECT n.event_nid
        FROM unnest(:prev_nids.call(e)) AS n (event_nid)
        CROSS JOIN LATERAL (SELECT x.topological_ordering FROM events x
            WHERE x.event_nid = n.event_nid OFFSET 0) AS p
        WHERE p.topological_ordering < $4::bigint
    ) AS going,
    CASE WHEN e.rejected IS NULL THEN '{}' ELSE :auth_nids.call(e) END AS cited
FROM (
    SELECT *
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
        AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
    ORDER BY topological_ordering, stream_ordering
    LIMIT $5::bigint
) AS e
ORDER BY e.topological_ordering, e.stream_ordering
""",
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_LATE: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.topological_ordering, e.stream_ordering, e.backfilled, e.redacted_by,
    e.type_nid = {TYPE_REDACTION} AND e.rejected IS NULL AND NOT e.soft_failed AS is_redaction,
    CASE WHEN e.topological_ordering < $3::bigint THEN :prev_nids.call(e) ELSE '{}' END AS going,
    CASE WHEN e.rejected IS NULL THEN '{}' ELSE :auth_nids.call(e) END AS cited
FROM (
    SELECT *
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND stream_ordering > $2::bigint
    ORDER BY stream_ordering
    LIMIT $4::bigint
) AS e
ORDER BY e.stream_ordering
""",
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_SINCE: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.topological_ordering, e.stream_ordering, e.backfilled, e.redacted_by,
    e.type_nid = {TYPE_REDACTION} AND e.rejected IS NULL AND NOT e.soft_failed AS is_redaction,
    :prev_nids.call(e) AS going,
    CASE WHEN e.rejected IS NULL THEN '{}' ELSE :auth_nids.call(e) END AS cited
FROM events e
WHERE e.room_nid = $1::int AND NOT e.outlier AND e.stream_ordering > $2::bigint
    AND e.stream_ordering <= $3::bigint
ORDER BY e.stream_ordering
""",
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_OUTLIERS: Final[LiteralString] = compose(
    """
SELECT o.auth_nid
FROM (
    SELECT unnest(:auth_nids.call(e)) AS auth_nid
    FROM events e
    WHERE e.room_nid = $1::int AND e.outlier AND e.rejected IS NOT NULL
) AS o
GROUP BY o.auth_nid
""",
    AUTH_NIDS,
).sql

SQL_REDACTS: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, r.room_id, e.json, e.redacted_form
FROM events e
CROSS JOIN LATERAL (SELECT room_id FROM rooms WHERE room_nid = e.room_nid OFFSET 0) AS r
WHERE e.event_nid = ANY($1::bigint[])
"""


class RoomOrderVersion(NamedTuple):
    """A room as it is now. ``position``: no committed event of the room is above it."""

    moves: int
    forward_extremities: list[int]
    last_stream_ordering: int | None
    position: int
    write_version: int


class KeptRow(NamedTuple):
    """An event that stays, with those of its parents that may be purged (or all of them).

    ``cited``: its auth events, if it was rejected.
    """

    event_nid: int
    topological_ordering: int
    stream_ordering: int
    backfilled: bool
    redacted_by: int | None
    is_redaction: bool
    going: list[int]
    cited: list[int]


class RedactsRow(NamedTuple):
    """A redaction with its bytes."""

    event_nid: int
    event_id: str
    room_id: str
    json: StoredBytes
    redacted_form: bool


class ReorderedMeanwhile(Exception):  # noqa: N818  # control flow, not an error
    """Events of the room were reordered since the references were read: read them again."""


class References:
    """The events of a room that stay, as far as they matter to those that go.

    ``children``: by the nid of a parent that may go, the staying events that name it.
    ``redactions``: by the id of a target, the staying redactions. ``referred``: events that are no
    state and stay in the timeline until the end, because other events refer to them. ``deleted``:
    events that stayed until the end of the purge and are deleted now.
    """

    def __init__(
        self,
        room_nid: int,
        room_version: str,
        cut: CutPoint,
        arrived_upto: int,
        stand: RoomOrderVersion,
    ) -> None:
        self.room_nid = room_nid
        self.cut = cut
        self.arrived_upto = arrived_upto
        self.moves: int = stand.moves
        self.position: int = stand.position
        self.children: dict[int, set[int]] = {}
        self.redactions: dict[str, list[int]] = {}
        self.referred: set[int] = set()
        self.deleted: set[int] = set()
        self._room_version = room_version

    def stays(self, topological: int, stream: int, *, backfilled: bool) -> bool:
        """Return whether the job leaves an event of this position in place."""
        return topological >= self.cut.topological or stream > (
            self.arrived_upto if backfilled else self.cut.stream
        )

    def name(self, child: int, parents: Iterable[int]) -> None:
        """Record that a staying event names these parents."""
        for parent in parents:
            self.children.setdefault(parent, set()).add(child)

    async def since(self, conn: Connection) -> RoomOrderVersion:
        """Read the events that have arrived since the last call; the room must be locked.

        Set `position` to the returned one once the transaction is committed.
        """
        stand = await stand_of(conn, self.room_nid)
        if stand.moves != self.moves:
            raise ReorderedMeanwhile
        await self._take(
            conn,
            await conn.fetch(SQL_SINCE, self.room_nid, self.position, stand.position, row=KeptRow),
        )
        return stand

    async def read_staying(self, database: Database) -> None:
        at = (self.cut.topological - 1, 1 << 62)
        while True:
            async with database.connection() as conn:
                rows = await conn.fetch(
                    SQL_STAYING, self.room_nid, *at, self.cut.topological, PAGE, row=KeptRow
                )
                await self._take(conn, rows)
            if len(rows) < PAGE:
                break
            at = (rows[-1].topological_ordering, rows[-1].stream_ordering)
        late = self.cut.stream
        while True:
            async with database.connection() as conn:
                rows = await conn.fetch(
                    SQL_LATE, self.room_nid, late, self.cut.topological, PAGE, row=KeptRow
                )
                await self._take(conn, rows)
            if len(rows) < PAGE:
                break
            late = rows[-1].stream_ordering
        await self._read_later(database)
        async with database.connection() as conn:
            self.referred.update(await conn.fetchvals(SQL_OUTLIERS, self.room_nid))

    async def _read_later(self, database: Database) -> None:
        """Read the events that arrived since the job began, of any origin."""
        after = self.arrived_upto
        while after < self.position:
            async with database.connection() as conn:
                end = await end_of_positions(conn, after, self.position, EVENTS)
                if end is None:
                    return
                rows = await conn.fetch(SQL_SINCE, self.room_nid, after, end, row=KeptRow)
                await self._take(conn, rows)
            after = end

    async def _take(self, conn: Connection, rows: Sequence[KeptRow]) -> None:
        redactions: list[int] = []
        for row in rows:
            if not self.stays(
                row.topological_ordering, row.stream_ordering, backfilled=row.backfilled
            ):
                continue
            self.name(row.event_nid, row.going)
            self.referred.update(row.cited)
            if row.redacted_by is not None:
                self.referred.add(row.redacted_by)
            if row.is_redaction:
                redactions.append(row.event_nid)
        for one in await conn.fetch(SQL_REDACTS, redactions, row=RedactsRow) if redactions else ():
            raw = decode(one.json, one.event_id, one.room_id)
            event = load(raw, self._room_version, one.event_id, redacted=one.redacted_form)
            if event.redacts is not None and one.event_nid not in self.redactions.get(
                event.redacts, ()
            ):
                self.redactions.setdefault(event.redacts, []).append(one.event_nid)


async def stand_of(conn: Connection, room_nid: int) -> RoomOrderVersion:
    """Return the columns of the room's row that a purge needs."""
    rows = await conn.fetch(SQL_STAND, room_nid, row=RoomOrderVersion)
    return rows[0]


async def keeping(
    database: Database, room_id: str, room_version: str, cut: CutPoint, arrived_upto: int
) -> References:
    async def begin(conn: Connection) -> References:
        # The lock waits for the writers of the room: later events have larger positions.
        room_nid = await lock_room_keeping_plans(conn, room_id)
        return References(room_nid, room_version, cut, arrived_upto, await stand_of(conn, room_nid))

    kept = await database.run(begin)
    await kept.read_staying(database)
    return kept
