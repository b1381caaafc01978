"""A database that was restored, or whose standby took over: what was committed last may be gone, and clients have tokens of it.

Their positions would be given again, to other facts, which they would take for known. So a database remembers which incarnation it is (the
cluster, the database, its tables, the timeline of the write-ahead log), and the first store that opens in another one leaves a gap in every
stream: ids go on JUMP above the last, and the positions between are written down as lost. A token from within is `ResyncNeeded`, one from before
goes on, and nothing is ever skipped. Where nothing was lost (a failover that was complete, an upgrade) the gap does no harm.

What this cannot see is a dump that is loaded over the tables in place, without making them anew: restore into an empty database.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import ResyncNeeded
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
SELECT lost_after, lost_upto
FROM lost_positions
WHERE stream_name = 'events'
ORDER BY lost_after
"""


class IncarnationRow(NamedTuple):
    """Which incarnation of the database was there last, and which is there now."""

    known: str | None
    current: str


class Gap(NamedTuple):
    """Positions that are above ``lost_after`` and below ``lost_upto`` were given before the restore, if at all."""

    lost_after: int
    lost_upto: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The positions of the stream "events" that restores took back."""

    gaps: tuple[Gap, ...] = ()

    def refuse(self, token: str, position: VectorPosition) -> None:
        """`ResyncNeeded` for a token that was given for what is gone."""
        if self.gaps and self._holds((position.min, *(at for _, at in position.items))):
            raise ResyncNeeded(token, "it is of a time that the database was restored from: what happened then is lost")

    def _holds(self, positions: Iterable[int]) -> bool:
        return any(gap.lost_after < at < gap.lost_upto for at in positions for gap in self.gaps)


async def notice(conn: Connection, streams: Iterable[tuple[str, str]]) -> None:
    """Leave a gap in each stream (name, sequence) if this is another incarnation. In a transaction in which nobody writes."""
    row = await conn.fetchrow(SQL_INCARNATION, row=IncarnationRow)
    if row is None or row.known == row.current:
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


async def lost(conn: Connection) -> Lost:
    """What restores took back."""
    return Lost(tuple(await conn.fetch(SQL_LOST, row=Gap)))
