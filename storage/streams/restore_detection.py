"""A database that was restored, or whose standby took over: what was committed last may be gone, and clients have tokens of it.

Their positions would be given again, to other facts, which they would take for known. So a database remembers which incarnation it is (the
cluster, the database, its tables, the timeline of the write-ahead log), and the first store that opens in another one leaves a gap in every
stream: ids go on JUMP above the last or more, and the positions between are written down as lost. A token from within is `ResyncNeeded`, one from before
goes on, and nothing is ever skipped. Where nothing was lost (a failover that was complete, an upgrade) the gap does no harm.

Writers do not commit in the order of their ids. So the gap begins for each writer where its own facts end: at its row of `stream_positions`,
which is written with them. Example: a takes 100, b takes 101 and commits, the standby gets no more, a commits, and the standby is promoted.

    kept             a 60   b 101     the gap is (60, upto) for a and (101, upto) for b; 100 is lost, 101 is not
    a token before   a 60   b 101     goes on
    a token after    a 100  b 101     ResyncNeeded: it covers 100

What this cannot see is a dump that is loaded over the tables in place, without making them anew: restore into an empty database.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple, Self

from storage.database.connection import Connection
from storage.errors import DatabaseUnavailable, ResyncNeeded
from storage.streams.positions import VectorPosition

logger = logging.getLogger(__name__)

JUMP: Final = 1 << 30
"""More ids than are given between a backup and its loss; one in eight billion of all there are.

The least length of a gap.
"""

PER_SECOND: Final = 1 << 20
"""More ids than are given in a second.

A gap ends at this times the time at least, so above what was given after an earlier restore of the
same backup.
"""

SQL_INCARNATION: Final[LiteralString] = """
SELECT d.incarnation AS known,
    format('%s.%s.%s.%s', (SELECT system_identifier FROM pg_control_system()),
    (SELECT oid FROM pg_database WHERE datname = current_database()), 'deployment'::regclass::oid,
    left(pg_walfile_name(pg_current_wal_lsn()), 8)) AS current
FROM deployment d
"""

SQL_LOOK: Final[LiteralString] = """
SELECT
    CASE  -- a standby has no place where it writes
        WHEN NOT pg_is_in_recovery() THEN format('%s.%s.%s.%s',
            (SELECT system_identifier FROM pg_control_system()),
            (SELECT oid FROM pg_database WHERE datname = current_database()),
                'deployment'::regclass::oid,
            left(pg_walfile_name(pg_current_wal_lsn()), 8))
    END AS incarnation,
    COALESCE((SELECT max(lost_upto) FROM lost_positions), 0) AS lost_upto,
    COALESCE((
        SELECT bool_or(p.stream_id IS NULL OR p.stream_id < k.stream_id)
        FROM unnest($1::text[], $2::text[], $3::bigint[]) AS k (stream_name, instance_name,
            stream_id)
        LEFT JOIN stream_positions p USING (stream_name, instance_name)
    ), false) AS is_behind
"""

SQL_REMEMBER: Final[LiteralString] = """
UPDATE deployment
SET incarnation = $1::text
"""

SQL_LEAVE_GAP: Final[LiteralString] = """
WITH jumped AS MATERIALIZED (
    SELECT s.name, setval(s.name::regclass, GREATEST(
            COALESCE(pg_sequence_last_value(s.name::regclass), 1) + $3::bigint,
            (extract(epoch FROM clock_timestamp()) * $4::bigint)::bigint
        )) AS upto
    FROM (SELECT DISTINCT name FROM unnest($2::text[]) AS i (name)) AS s
)
INSERT INTO lost_positions (stream_name, lost_after, lost_upto, instance_names, kept_upto)
SELECT d.stream_name, COALESCE(max(p.stream_id), 1), j.upto,
    COALESCE(array_agg(p.instance_name
        ORDER BY p.instance_name) FILTER (WHERE p.instance_name IS NOT NULL), '{}'),
    COALESCE(array_agg(p.stream_id
        ORDER BY p.instance_name) FILTER (WHERE p.instance_name IS NOT NULL), '{}')
FROM unnest($1::text[], $2::text[]) AS d (stream_name, sequence_name)
JOIN jumped j ON j.name = d.sequence_name
LEFT JOIN stream_positions p ON p.stream_name = d.stream_name
GROUP BY d.stream_name, j.upto
"""

SQL_LOST: Final[LiteralString] = """
SELECT stream_name, lost_after, lost_upto, instance_names, kept_upto
FROM lost_positions
ORDER BY stream_name, lost_after
"""


class IncarnationRow(NamedTuple):
    """Which incarnation of the database was there last, and which is there now."""

    known: str | None
    current: str


class LookRow(NamedTuple):
    """What a new session finds.

    ``incarnation`` None: a standby. ``is_behind``: a writer has not come as far as the process
    knows.
    """

    incarnation: str | None
    lost_upto: int
    is_behind: bool


class LostRow(NamedTuple):
    """A gap in a stream."""

    stream_name: str
    lost_after: int
    lost_upto: int
    instance_names: list[str]
    kept_upto: list[int]


class Mark(NamedTuple):
    """The database that a process has entered: its incarnation, and the end of the last gap."""

    incarnation: str
    lost_upto: int


class Known(NamedTuple):
    """The positions of all writers by stream, and the end of the last gap, as a process knew them before it enters again."""

    positions: Mapping[str, Mapping[str, int]]
    lost_upto: int


class RestoreGap(NamedTuple):
    """Positions below ``lost_upto`` were given before the restore, if at all, where they are above what was kept of their writer.

    ``kept``: up to where each writer's own facts were kept. ``lost_after``: the same for a writer that is not among these.
    """

    lost_after: int
    lost_upto: int
    kept: Mapping[str, int]

    @classmethod
    def of(
        cls,
        lost_after: int,
        lost_upto: int,
        instance_names: Sequence[str],
        kept_upto: Sequence[int],
    ) -> Self:
        """From the columns of `lost_positions`."""
        return cls(lost_after, lost_upto, dict(zip(instance_names, kept_upto, strict=True)))

    def begin(self, writer: str) -> int:
        """Where the gap begins for a writer."""
        return self.kept.get(writer, self.lost_after)

    def holds(self, writer: str, position: int) -> bool:
        """Whether the position of a writer is in the gap."""
        return self.begin(writer) < position < self.lost_upto

    def is_reached(self, position: VectorPosition) -> bool:
        """Whether a reader who is there may have read what is lost: the position of any writer is in the gap."""
        named = position.writers()
        return self.lost_after < position.min < self.lost_upto or any(
            self.holds(writer, named.get(writer, position.min)) for writer in {*self.kept, *named}
        )


@dataclass(frozen=True, slots=True)
class LostPositions:
    """The positions of a stream that restores took back."""

    gaps: tuple[RestoreGap, ...] = ()

    def refuse(self, token: str, position: VectorPosition) -> None:
        """`ResyncNeeded` for a token that was given for what is gone."""
        if any(gap.is_reached(position) for gap in self.gaps):
            raise ResyncNeeded(
                token,
                "it is of a time that the database was restored from: what happened then is lost",
            )

    @property
    def upto(self) -> int:
        """The end of the last gap; 0 if there is none."""
        return max((gap.lost_upto for gap in self.gaps), default=0)

    def before(self, writer: str, position: int) -> int:
        """The position of a writer, or the beginning of the gap that it is in."""
        return min(
            (gap.begin(writer) for gap in self.gaps if gap.holds(writer, position)),
            default=position,
        )

    def holds(self, writer: str, position: int) -> bool:
        """Whether the position of a writer is in a gap: nothing that it stands for is stored."""
        return any(gap.holds(writer, position) for gap in self.gaps)

    def outside(self, position: VectorPosition) -> VectorPosition:
        """The position that covers the same stored facts, with no writer inside a gap."""
        writers = {*position.writers(), *(writer for gap in self.gaps for writer in gap.kept)}
        positions = {writer: self.before(writer, position.position(writer)) for writer in writers}
        least = min(
            (gap.lost_after for gap in self.gaps if gap.lost_after < position.min < gap.lost_upto),
            default=position.min,
        )
        return (
            VectorPosition.of(min(least, *positions.values()), positions)
            if positions
            else VectorPosition(least)
        )


async def notice(
    conn: Connection, streams: Iterable[tuple[str, str]], *, known: Known | None = None
) -> None:
    """Leave a gap in each stream (name, sequence) if this is another incarnation.

    In a transaction in which nobody writes.

    ``known``: of a process that enters again. Where writes are gone a gap is left, too, unless
    another process has left it already.
    """
    row = await conn.fetchrow(SQL_INCARNATION, row=IncarnationRow)
    if row is None or (
        row.known == row.current and not (known is not None and await _lacks_gap(conn, known))
    ):
        return
    if row.known is not None:
        names, sequences = (list(column) for column in zip(*streams, strict=True))
        await conn.execute(SQL_LEAVE_GAP, names, sequences, JUMP, PER_SECOND)
        logger.warning(
            "the database was restored, copied, or taken over by a standby (%s, now %s): positions go on higher, tokens of what is lost are refused",
            *row,
        )
    await conn.execute(SQL_REMEMBER, row.current)


async def _lacks_gap(conn: Connection, known: Known) -> bool:
    """Whether writes are gone, and nobody has left a gap since."""
    found = await look(conn, known.positions)
    return (
        found.is_behind and found.lost_upto <= known.lost_upto
    )  # or the last gap is gone with them


async def look(conn: Connection, known: Mapping[str, Mapping[str, int]]) -> LookRow:
    """What a session finds; ``known``: the positions that the process knows, by stream and writer.

    `DatabaseUnavailable` for a standby.
    """
    columns = [
        list(column)
        for column in zip(
            *((name, *one) for name, writers in known.items() for one in writers.items()),
            strict=True,
        )
    ]
    row = await conn.fetchrow(SQL_LOOK, *(columns or [[], [], []]), row=LookRow)
    if row is None or row.incarnation is None:
        raise DatabaseUnavailable("the server is a standby: writes wait until it is promoted")
    return row


async def mark(conn: Connection) -> Mark:
    """The database that is being entered."""
    row = await look(conn, {})
    return Mark(row.incarnation or "", row.lost_upto)


async def lost(conn: Connection) -> Mapping[str, LostPositions]:
    """What restores took back, by stream."""
    gaps: dict[str, list[RestoreGap]] = {}
    for row in await conn.fetch(SQL_LOST, row=LostRow):
        gaps.setdefault(row.stream_name, []).append(RestoreGap.of(*row[1:]))
    return {name: LostPositions(tuple(found)) for name, found in gaps.items()}
