"""Detection of a restored database or a standby that took over: the last commits may be lost.

Clients have tokens of those commits, and their positions would be assigned again. So a database
stores its identity: the cluster, the database, its tables, the timeline of the write-ahead log. The
first store that opens a database with another identity leaves a gap in every stream. A token from
within raises `ResyncNeeded`, one from before stays valid. Where nothing was lost, the gap does no
harm. It begins for each writer at its row of `stream_positions`, which is written with its facts.

    kept             a 60   b 101     the gap is (60, upto) for a and (101, upto) for b;
                                      100 is lost, 101 is not
    a token before   a 60   b 101     stays valid
    a token after    a 100  b 101     ResyncNeeded: it covers 100

`DESIGN.md` in this folder has the states found at start. A dump that is loaded into the existing
tables cannot be detected.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple, Self

from storage.database.connection import Connection
from storage.errors import DatabaseUnavailable, ResyncNeeded
from storage.streams.positions import VectorPosition

logger: logging.Logger = logging.getLogger(__name__)

JUMP: Final = 1 << 30
"""More ids than are assigned between a backup and its loss; 1 / 2^33 of all ids.

The least length of a gap.
"""

PER_SECOND: Final = 1 << 20
"""More ids than are assigned in a second.

A gap ends at least at this number times the time. So it ends above the ids assigned after an
earlier restore of the same backup.
"""

SQL_DATABASE_IDENTITY: Final[LiteralString] = """
SELECT d.incarnation AS stored,
    format('%s.%s.%s.%s', (SELECT system_identifier FROM pg_control_system()),
    (SELECT oid FROM pg_database WHERE datname = current_database()), 'deployment'::regclass::oid,
    left(pg_walfile_name(pg_current_wal_lsn()), 8)) AS current
FROM deployment d
"""

SQL_CHECK_SESSION: Final[LiteralString] = """
SELECT
    CASE  -- a standby has no place where it writes
        WHEN NOT pg_is_in_recovery() THEN format('%s.%s.%s.%s',
            (SELECT system_identifier FROM pg_control_system()),
            (SELECT oid FROM pg_database WHERE datname = current_database()),
                'deployment'::regclass::oid,
            left(pg_walfile_name(pg_current_wal_lsn()), 8))
    END AS identity,
    COALESCE((SELECT max(lost_upto) FROM lost_positions), 0) AS lost_upto,
    COALESCE((
        SELECT bool_or(p.stream_id IS NULL OR p.stream_id < k.stream_id)
        FROM unnest($1::text[], $2::text[], $3::bigint[]) AS k (stream_name, instance_name,
            stream_id)
        LEFT JOIN stream_positions p USING (stream_name, instance_name)
    ), false) AS has_lost_rows
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


class DatabaseIdentityRow(NamedTuple):
    """The last stored identity of the database, and the current one."""

    stored: str | None
    current: str


class SessionCheckRow(NamedTuple):
    """The findings of a new session.

    ``identity`` None: a standby. ``has_lost_rows``: the position of a writer is below the one that
    the process knows.
    """

    identity: str | None
    lost_upto: int
    has_lost_rows: bool


class LostRow(NamedTuple):
    """A gap in a stream."""

    stream_name: str
    lost_after: int
    lost_upto: int
    instance_names: list[str]
    kept_upto: list[int]


class Mark(NamedTuple):
    """The database that a process has entered: its identity, and the end of the last gap."""

    identity: str
    lost_upto: int


class PreviousState(NamedTuple):
    """The state of a process before it enters again.

    It has the positions of all writers by stream, and the end of the last gap.
    """

    positions: Mapping[str, Mapping[str, int]]
    lost_upto: int


class RestoreGap(NamedTuple):
    """A gap: positions below ``lost_upto`` that are above the kept facts of their writer.

    They were assigned before the restore, if at all. ``kept`` is the end of each writer's own kept
    facts. ``lost_after`` is the same for a writer that is not among these.
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
        """Build it from the columns of `lost_positions`."""
        return cls(lost_after, lost_upto, dict(zip(instance_names, kept_upto, strict=True)))

    def begin(self, writer: str) -> int:
        """Return the position where the gap begins for a writer."""
        return self.kept.get(writer, self.lost_after)

    def holds(self, writer: str, position: int) -> bool:
        return self.begin(writer) < position < self.lost_upto

    def is_reached(self, position: VectorPosition) -> bool:
        """Return whether a reader there may have read lost facts: a position is in the gap."""
        named = position.writers()
        return self.lost_after < position.min < self.lost_upto or any(
            self.holds(writer, named.get(writer, position.min)) for writer in {*self.kept, *named}
        )


@dataclass(frozen=True, slots=True)
class LostPositions:
    """The positions of a stream that restores removed."""

    gaps: tuple[RestoreGap, ...] = ()

    def refuse(self, token: str, position: VectorPosition) -> None:
        """Raise `ResyncNeeded` for a token that covers lost facts."""
        if any(gap.is_reached(position) for gap in self.gaps):
            raise ResyncNeeded(
                token,
                "it covers facts that were lost: the database was restored from an earlier state",
            )

    @property
    def upto(self) -> int:
        """Return the end of the last gap; 0 if there is none."""
        return max((gap.lost_upto for gap in self.gaps), default=0)

    def before(self, writer: str, position: int) -> int:
        """Return the position of a writer, or the beginning of the gap that it is in."""
        return min(
            (gap.begin(writer) for gap in self.gaps if gap.holds(writer, position)),
            default=position,
        )

    def holds(self, writer: str, position: int) -> bool:
        """Return whether the position of a writer is in a gap: no fact there is stored."""
        return any(gap.holds(writer, position) for gap in self.gaps)

    def outside(self, position: VectorPosition) -> VectorPosition:
        """Return the position that covers the same stored facts, with no writer inside a gap."""
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


async def is_noticed(conn: Connection) -> bool:
    """Return whether this identity is the stored one: `notice` would do nothing."""
    row = await conn.fetchrow(SQL_DATABASE_IDENTITY, row=DatabaseIdentityRow)
    return row is not None and row.stored == row.current


async def notice(
    conn: Connection, streams: Iterable[tuple[str, str]], *, previous: PreviousState | None = None
) -> None:
    """Leave a gap in each stream (name, sequence) if the database has another identity.

    Run it in a transaction during which nobody writes.

    ``previous`` is that of a process that enters again. If writes are lost then, a gap is left,
    too,
    unless another process has left it already.
    """
    row = await conn.fetchrow(SQL_DATABASE_IDENTITY, row=DatabaseIdentityRow)
    if row is None or (
        row.stored == row.current
        and not (previous is not None and await _lacks_gap(conn, previous))
    ):
        return
    if row.stored is not None:
        names, sequences = (list(column) for column in zip(*streams, strict=True))
        await conn.execute(SQL_LEAVE_GAP, names, sequences, JUMP, PER_SECOND)
        logger.warning(
            "the database was restored, copied, or taken over by a standby (%s, now %s): "
            "positions continue higher, tokens of lost facts are refused",
            *row,
        )
    await conn.execute(SQL_REMEMBER, row.current)


async def _lacks_gap(conn: Connection, previous: PreviousState) -> bool:
    """Return whether writes are lost, and nobody has left a gap since."""
    session_check = await check_session(conn, previous.positions)
    # or the last gap is lost with them
    return session_check.has_lost_rows and session_check.lost_upto <= previous.lost_upto


async def check_session(
    conn: Connection, positions: Mapping[str, Mapping[str, int]]
) -> SessionCheckRow:
    """Check a session against the positions that the process knows, by stream and writer.

    Raise `DatabaseUnavailable` for a standby.
    """
    columns = [
        list(column)
        for column in zip(
            *(
                (name, *writer_position)
                for name, writers in positions.items()
                for writer_position in writers.items()
            ),
            strict=True,
        )
    ]
    row = await conn.fetchrow(SQL_CHECK_SESSION, *(columns or [[], [], []]), row=SessionCheckRow)
    if row is None or row.identity is None:
        raise DatabaseUnavailable("the server is a standby: writes wait until it is promoted")
    return row


async def mark(conn: Connection) -> Mark:
    """Return the mark of the database that is being entered."""
    row = await check_session(conn, {})
    return Mark(row.identity or "", row.lost_upto)


async def lost(conn: Connection) -> Mapping[str, LostPositions]:
    """Return the positions that restores removed, by stream."""
    gaps: dict[str, list[RestoreGap]] = {}
    for row in await conn.fetch(SQL_LOST, row=LostRow):
        gaps.setdefault(row.stream_name, []).append(RestoreGap.of(*row[1:]))
    return {name: LostPositions(tuple(stream_gaps)) for name, stream_gaps in gaps.items()}


# --------------------------------------------------------------------------------------------------
# Identity of the writer: server name, instance name, writer nid and deployment id.


@dataclass(frozen=True, slots=True)
class Identity:
    """The homeserver, the process, its writer nid, and the database."""

    server_name: str
    instance_name: str
    writer_nid: int
    deployment_id: str
