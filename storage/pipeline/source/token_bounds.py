"""Stream tokens as bounds of reads: which events a token covers, writer by writer.

An event is covered if its stream ordering is at most the position of its writer in its stream
("events", or "backfill" for history). Positions are committed with their facts. So events that a
token covers can be read from then on, and all others come later. Reading the events between two
tokens misses nothing and repeats nothing, however many writers there are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.arrow_results import ArrowConnection
from storage.database.placeholders import fill
from storage.errors import InputError
from storage.streams import SyncToken, VectorPosition
from storage.streams.restore_detection import LostPositions, RestoreGap

STREAMS: Final = ("backfill", "events")

SQL_STREAM_POSITIONS: Final[LiteralString] = """
SELECT s.stream_name, s.instance_name, s.stream_id
FROM stream_positions s
WHERE s.stream_name IN ('events', 'backfill')
"""

SQL_WRITER_NIDS: Final[LiteralString] = """
SELECT writer_nid::bigint AS writer_nid, instance_name
FROM writers
"""

SQL_LOST_POSITIONS: Final[LiteralString] = """
SELECT stream_name, lost_after, lost_upto, instance_names, kept_upto
FROM lost_positions
WHERE stream_name IN ('events', 'backfill')
"""

SQL_DEPLOYMENT_ID: Final[LiteralString] = """
SELECT deployment_id
FROM deployment
"""


class Bound(NamedTuple):
    """The requested range of one writer and stream: ``after < stream_ordering <= upto``."""

    writer_nid: int
    backfilled: bool
    after: int
    upto: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """The events between two tokens."""

    parts: tuple[Bound, ...]

    @property
    def after(self) -> int:
        """Return the position at or below which no event is requested."""
        return min((part.after for part in self.parts), default=0)

    @property
    def upto(self) -> int:
        """Return the position above which no event is requested."""
        return max((part.upto for part in self.parts), default=0)

    def columns(self) -> tuple[list[int], list[bool], list[int], list[int]]:
        """Return the parts as arrays, for a statement."""
        nids, backfilled, after, upto = (
            zip(*self.parts, strict=True) if self.parts else ((), (), (), ())
        )
        return list(nids), list(backfilled), list(after), list(upto)


def deployment_of(conn: ArrowConnection) -> str:
    """Return the id in tokens. Raise `InputError` if no store was ever opened in the database."""
    rows = conn.rows(SQL_DEPLOYMENT_ID)
    if not rows:
        raise InputError("the database is new: no store was ever opened in it")
    return str(rows[0]["deployment_id"])


def token_of(conn: ArrowConnection, text: str, deployment: str) -> SyncToken:
    """Return the token in the text.

    Raise `InvalidToken`, or `ResyncNeeded` if it covers positions that a restore removed.
    """
    token = SyncToken.parse(text, deployment)
    for name, lost in lost_positions(conn).items():
        lost.refuse(text, position_of(token, name))
    return token


def lost_positions(conn: ArrowConnection) -> dict[str, LostPositions]:
    """Return the positions that restores removed, for each stream of events."""
    gaps: dict[str, list[RestoreGap]] = {name: [] for name in STREAMS}
    for row in conn.rows(SQL_LOST_POSITIONS):
        gaps[row["stream_name"]].append(
            RestoreGap.of(
                row["lost_after"], row["lost_upto"], row["instance_names"], row["kept_upto"]
            )
        )
    return {name: LostPositions(tuple(restore_gaps)) for name, restore_gaps in gaps.items()}


def current(conn: ArrowConnection) -> SyncToken:
    """Return the position of the event streams in this snapshot."""
    rows = conn.rows(SQL_STREAM_POSITIONS)
    positions: dict[str, VectorPosition] = {}
    for name in STREAMS:
        writers = {
            row["instance_name"]: row["stream_id"] for row in rows if row["stream_name"] == name
        }
        positions[name] = VectorPosition.of(min(writers.values(), default=0), writers)
    return SyncToken.of(positions)


def between(conn: ArrowConnection, start: SyncToken, end: SyncToken) -> Bounds:
    """Return the events that ``end`` covers and ``start`` does not.

    A token of /sync works as well; a stream that it does not name counts as at 0.
    """
    parts: list[Bound] = []
    for row in conn.rows(SQL_WRITER_NIDS):
        for name in STREAMS:
            after, upto = (
                position_of(token, name).position(row["instance_name"]) for token in (start, end)
            )
            if upto > after:
                parts.append(Bound(row["writer_nid"], name == "backfill", after, upto))
    return Bounds(tuple(parts))


def position_of(token: SyncToken, stream: str) -> VectorPosition:
    return token.position(stream) or VectorPosition()


def cut(
    start: SyncToken, end: SyncToken, stream_ordering: int, lost: Mapping[str, LostPositions]
) -> SyncToken:
    """Return the position from ``start`` towards ``end``, up to this stream ordering.

    ``lost``: as `lost_positions` returns it. A writer that would be inside its gap stays where the
    gap begins. Otherwise the token would be refused as one of lost positions.
    """
    most = VectorPosition(stream_ordering)
    reached = {
        name: position_of(start, name).merge(position_of(end, name).meet(most)) for name in STREAMS
    }
    return SyncToken.of({name: lost[name].outside(position) for name, position in reached.items()})


# --------------------------------------------------------------------------------------------------
# Ranges of numbers that have rows: of events, of rooms, of stream positions.
#
# Numbers have gaps of any length: a restore skips 2^30 stream positions and more.

TEMPLATE_FIRST: Final[LiteralString] = """
SELECT {number}::bigint AS first
FROM {rows}
WHERE {number} >= $1::bigint AND {number} < $2::bigint
ORDER BY {number}
LIMIT 1
"""

SQL_FIRST_NUMBER: Final[LiteralString] = fill(TEMPLATE_FIRST, number="e.event_nid", rows="events e")
SQL_FIRST_ROOM: Final[LiteralString] = fill(TEMPLATE_FIRST, number="r.room_nid", rows="rooms r")
SQL_FIRST_POSITION: Final[LiteralString] = fill(
    TEMPLATE_FIRST, number="e.stream_ordering", rows="events e"
)


def filled(
    conn: ArrowConnection, first: LiteralString, begin: int, end: int, size: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges (begin, end) of ``size`` numbers that have all rows from ``begin`` to ``end``.

    ``first`` is the statement that finds the first row. A long range without rows costs nothing, as
    above the positions that a restore skipped.
    """
    at = begin
    while rows := conn.rows(first, at, end):
        low: int = rows[0]["first"]
        at = min(low + size, end)
        yield low, at
