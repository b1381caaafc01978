"""A database that was restored, or whose standby took over: what was committed last may be gone, and clients have tokens of it.

Their positions would be given again, to other facts, which they would take for known. So a database remembers which incarnation it is (the
cluster, the database, its tables, the timeline of the write-ahead log), and the first store that opens in another one leaves a gap in every
stream: ids go on JUMP above the last, and the positions between are written down as lost. A token from within is `ResyncNeeded`, one from before
goes on, and nothing is ever skipped. Where nothing was lost (a failover that was complete, an upgrade) the gap does no harm.

What this cannot see is a dump that is loaded over the tables in place, without making them anew: restore into an empty database.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import DatabaseUnavailable, ResyncNeeded
from storage.streams.positions import VectorPosition

logger = logging.getLogger(__name__)

JUMP: Final = 1 << 30
"""More ids than are given between a backup and its loss; one in eight billion of all there are."""

SQL_INCARNATION: Final[LiteralString] = """
SELECT d.incarnation AS known, format('%s.%s.%s.%s', (SELECT system_identifier FROM pg_control_system()),
    (SELECT oid FROM pg_database WHERE datname = current_database()), 'deployment'::regclass::oid,
    left(pg_walfile_name(pg_current_wal_lsn()), 8)) AS current
FROM deployment d
"""

SQL_LOOK: Final[LiteralString] = """
SELECT
    CASE  -- a standby has no place where it writes
        WHEN NOT pg_is_in_recovery() THEN format('%s.%s.%s.%s', (SELECT system_identifier FROM pg_control_system()),
            (SELECT oid FROM pg_database WHERE datname = current_database()), 'deployment'::regclass::oid,
            left(pg_walfile_name(pg_current_wal_lsn()), 8))
    END AS incarnation,
    COALESCE((SELECT max(lost_upto) FROM lost_positions), 0) AS lost_upto,
    COALESCE((
        SELECT bool_or(p.stream_id IS NULL OR p.stream_id < k.stream_id)
        FROM unnest($2::text[], $3::bigint[]) AS k (stream_name, stream_id)
        LEFT JOIN stream_positions p ON p.stream_name = k.stream_name AND p.instance_name = $1::text
    ), false) AS is_behind
"""

SQL_REMEMBER: Final[LiteralString] = """
UPDATE deployment
SET incarnation = $1::text
"""

SQL_LEAVE_GAP: Final[LiteralString] = """
WITH jumped AS MATERIALIZED (
    SELECT s.name, setval(s.name::regclass, COALESCE(pg_sequence_last_value(s.name::regclass), 1) + $3::bigint) AS upto
    FROM (SELECT DISTINCT name FROM unnest($2::text[]) AS i (name)) AS s
)
INSERT INTO lost_positions (stream_name, lost_after, lost_upto)
SELECT d.stream_name, COALESCE(max(p.stream_id), 1), j.upto
FROM unnest($1::text[], $2::text[]) AS d (stream_name, sequence_name)
JOIN jumped j ON j.name = d.sequence_name
LEFT JOIN stream_positions p ON p.stream_name = d.stream_name
GROUP BY d.stream_name, j.upto
"""

SQL_LOST: Final[LiteralString] = """
SELECT stream_name, lost_after, lost_upto
FROM lost_positions
ORDER BY stream_name, lost_after
"""


class IncarnationRow(NamedTuple):
    """Which incarnation of the database was there last, and which is there now."""

    known: str | None
    current: str


class LookRow(NamedTuple):
    """What a new session finds. ``incarnation`` None: a standby. ``is_behind``: a stream has not come as far as the process knows of its own writes."""

    incarnation: str | None
    lost_upto: int
    is_behind: bool


class LostRow(NamedTuple):
    """A gap in a stream."""

    stream_name: str
    lost_after: int
    lost_upto: int


class Mark(NamedTuple):
    """The database that a process has entered: its incarnation, and the end of the last gap."""

    incarnation: str
    lost_upto: int


class Gap(NamedTuple):
    """Positions that are above ``lost_after`` and below ``lost_upto`` were given before the restore, if at all."""

    lost_after: int
    lost_upto: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The positions of a stream that restores took back."""

    gaps: tuple[Gap, ...] = ()

    def refuse(self, token: str, position: VectorPosition) -> None:
        """`ResyncNeeded` for a token that was given for what is gone."""
        if self.gaps and self._holds((position.min, *(at for _, at in position.items))):
            raise ResyncNeeded(token, "it is of a time that the database was restored from: what happened then is lost")

    @property
    def upto(self) -> int:
        """The end of the last gap; 0 if there is none."""
        return max((gap.lost_upto for gap in self.gaps), default=0)

    def before(self, position: int) -> int:
        """The position, or the beginning of the gap that it is in."""
        return next((gap.lost_after for gap in self.gaps if gap.lost_after < position < gap.lost_upto), position)

    def past(self, position: int) -> int:
        """The position, or the end of the gap that it is in: nothing is stored in between."""
        return next((gap.lost_upto for gap in self.gaps if gap.lost_after < position < gap.lost_upto), position)

    def _holds(self, positions: Iterable[int]) -> bool:
        return any(gap.lost_after < at < gap.lost_upto for at in positions for gap in self.gaps)


async def notice(conn: Connection, streams: Iterable[tuple[str, str]], *, is_rolled_back: bool = False) -> None:
    """Leave a gap in each stream (name, sequence) if this is another incarnation. In a transaction in which nobody writes.

    ``is_rolled_back``: writes are gone, whatever the incarnation says.
    """
    row = await conn.fetchrow(SQL_INCARNATION, row=IncarnationRow)
    if row is None or (row.known == row.current and not is_rolled_back):
        return
    if row.known is not None:
        names, sequences = (list(column) for column in zip(*streams, strict=True))
        await conn.execute(SQL_LEAVE_GAP, names, sequences, JUMP)
        logger.warning(
            "the database was restored, copied, or taken over by a standby (%s, now %s): positions go on %d higher, tokens of what is lost are refused",
            *row,
            JUMP,
        )
    await conn.execute(SQL_REMEMBER, row.current)


async def look(conn: Connection, instance_name: str, known: Mapping[str, int]) -> LookRow:
    """What a session finds; ``known``: the positions of the process's own writes, by stream. `DatabaseUnavailable` for a standby."""
    row = await conn.fetchrow(SQL_LOOK, instance_name, list(known), list(known.values()), row=LookRow)
    if row is None or row.incarnation is None:
        raise DatabaseUnavailable("the server is a standby: writes wait until it is promoted")
    return row


async def mark(conn: Connection, instance_name: str) -> Mark:
    """The database that is being entered."""
    row = await look(conn, instance_name, {})
    return Mark(row.incarnation or "", row.lost_upto)


async def lost(conn: Connection) -> Mapping[str, Lost]:
    """What restores took back, by stream."""
    gaps: dict[str, list[Gap]] = {}
    for name, *bounds in await conn.fetch(SQL_LOST, row=LostRow):
        gaps.setdefault(name, []).append(Gap(*bounds))
    return {name: Lost(tuple(found)) for name, found in gaps.items()}
