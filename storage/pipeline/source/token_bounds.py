"""Stream tokens as bounds of reads: which events a token covers, writer by writer.

An event is covered if its stream ordering is at most the position of its writer in its stream
("events", or "backfill" for history). Positions are committed with their facts, so what a token
covers can be read from then on, and what it does not cover comes later: reading what lies between
two tokens misses nothing and repeats nothing, however many writers there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.arrow import ArrowConnection
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
    """What is asked for of one writer and stream: ``after < stream_ordering <= upto``."""

    writer_nid: int
    backfilled: bool
    after: int
    upto: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What lies between two tokens."""

    parts: tuple[Bound, ...]

    @property
    def after(self) -> int:
        """Nothing at or below it is asked for."""
        return min((one.after for one in self.parts), default=0)

    @property
    def upto(self) -> int:
        """Nothing above it is asked for."""
        return max((one.upto for one in self.parts), default=0)

    def columns(self) -> tuple[list[int], list[bool], list[int], list[int]]:
        """The parts as arrays, for a statement."""
        nids, backfilled, after, upto = (
            zip(*self.parts, strict=True) if self.parts else ((), (), (), ())
        )
        return list(nids), list(backfilled), list(after), list(upto)


def deployment_of(conn: ArrowConnection) -> str:
    """The id that tokens carry. `InputError` if no store was ever opened in the database."""
    found = conn.rows(SQL_DEPLOYMENT_ID)
    if not found:
        raise InputError("the database is new: nothing was ever stored in it")
    return str(found[0]["deployment_id"])


def token_of(conn: ArrowConnection, text: str, deployment: str) -> SyncToken:
    """The token in the text.

    `InvalidToken`; `ResyncNeeded` if it was given for what a restore took back.
    """
    token = SyncToken.parse(text, deployment)
    for name, lost in lost_positions(conn).items():
        lost.refuse(text, position_of(token, name))
    return token


def lost_positions(conn: ArrowConnection) -> dict[str, LostPositions]:
    """Return what restores took back, for each stream of events."""
    gaps: dict[str, list[RestoreGap]] = {name: [] for name in STREAMS}
    for row in conn.rows(SQL_LOST_POSITIONS):
        gaps[row["stream_name"]].append(
            RestoreGap.of(
                row["lost_after"], row["lost_upto"], row["instance_names"], row["kept_upto"]
            )
        )
    return {name: LostPositions(tuple(found)) for name, found in gaps.items()}


def current(conn: ArrowConnection) -> SyncToken:
    """Where the streams of events are in this snapshot."""
    rows = conn.rows(SQL_STREAM_POSITIONS)
    positions: dict[str, VectorPosition] = {}
    for name in STREAMS:
        writers = {
            row["instance_name"]: row["stream_id"] for row in rows if row["stream_name"] == name
        }
        positions[name] = VectorPosition.of(min(writers.values(), default=0), writers)
    return SyncToken.of(positions)


def between(conn: ArrowConnection, start: SyncToken, end: SyncToken) -> Bounds:
    """What ``end`` covers and ``start`` does not.

    A token of /sync does as well; a stream that it does not name counts as at 0.
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
    """The position of a token in a stream."""
    return token.position(stream) or VectorPosition()


def cut(
    start: SyncToken, end: SyncToken, stream_ordering: int, lost: Mapping[str, LostPositions]
) -> SyncToken:
    """From ``start`` on to ``end``, but no further than this stream ordering.

    ``lost``: as `lost_positions` returns it.

    A writer that would come to be inside its gap stays where the gap begins: otherwise the token
    would be refused as one of what is lost.
    """
    most = VectorPosition(stream_ordering)
    reached = {
        name: position_of(start, name).merge(position_of(end, name).meet(most)) for name in STREAMS
    }
    return SyncToken.of({name: lost[name].outside(position) for name, position in reached.items()})
