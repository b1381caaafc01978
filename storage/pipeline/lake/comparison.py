"""Compare the mirror's `events` with the store: rows that are gone, and events to read again.

Both sides are read piece by piece, so memory depends on what differs, not on the store:

  all events   by ranges of stream orderings; the log has the range of `arrived` in each file, which
               is the stream ordering of an event unless it was readmitted
  some rooms   as many rooms as have `PIECE` events, and three columns of each file
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.delta_table import LakeTable
from storage.pipeline.lake.event_rows import (
    MARKS,
    marks_by_position,
    marks_of_events,
    marks_of_rooms,
)
from storage.pipeline.source.token_bounds import Bounds

PIECE: Final = 20_000
"""Stream orderings, or events of rooms, that are compared at a time."""


@dataclass(slots=True)
class MirrorChanges:
    """The changes of a pass: ``gone`` are values of `arrived`, ``again`` nids to read again."""

    gone: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)

    def take(self, marks: pa.Table) -> None:
        """Read these rows again, in place of those that the table has."""
        self.gone.update(marks.column("arrived").to_pylist())
        self.again.update(marks.column("event_nid").to_pylist())

    def drop(self, ours: pa.Table) -> None:
        """Delete these rows of the table."""
        self.gone.update(ours.column("arrived").to_pylist())

    def add(self, other: "MirrorChanges") -> None:
        self.gone |= other.gone
        self.again |= other.again


def compare_all(conn: ArrowConnection, lake: LakeTable, covered: Bounds) -> MirrorChanges:
    """Compare all events that the position of the table covers."""
    found = MirrorChanges()
    for first, last, stored in marks_by_position(conn, covered, PIECE):
        ours = lake.within(MARKS.names, first, last)
        arrived = stored.column("arrived")
        keys = arrived.filter(pc.or_(pc.less(arrived, first), pc.greater(arrived, last)))
        found.take(
            _differing(stored, pa.concat_tables([ours, lake.rows(MARKS.names, keys.to_pylist())]))
        )
        # The rest of ours is gone, or was readmitted: then it is stored at another position.
        rest = _missing(ours, stored)
        moved = marks_of_events(conn, rest.column("event_nid").to_pylist(), covered)
        moved = moved.filter(_is_in(moved, rest))
        found.take(_differing(moved, rest))
        found.drop(_missing(rest, moved))
    return found


def compare_rooms(
    conn: ArrowConnection, lake: LakeTable, room_nids: Collection[int], covered: Bounds
) -> MirrorChanges:
    """Compare the events of these rooms; those of a room that is not stored are gone."""
    found = MirrorChanges()
    for rooms, stored in marks_of_rooms(conn, sorted(room_nids), covered, PIECE):
        wanted = pa.array(rooms, pa.int64())
        parts = [
            part.filter(pc.is_in(part.column("room_nid"), value_set=wanted)).select(MARKS.names)
            for part in lake.parts(["room_nid", *MARKS.names])
        ]
        ours = pa.concat_tables([MARKS.empty_table(), *parts])
        found.take(_differing(stored, ours))
        found.drop(_missing(ours, stored))
    return found


def _differing(stored: pa.Table, ours: pa.Table) -> pa.Table:
    """Return the stored events that are not among ours with the same digest."""
    arrived, digest = (ours.column(name).to_numpy() for name in ("arrived", "digest"))
    order = np.argsort(arrived)
    wanted = stored.column("arrived").to_numpy()
    at = np.searchsorted(arrived, wanted, sorter=order)
    same = at < len(order)
    found = order[at[same]]
    same[same] = (arrived[found] == wanted[same]) & (
        digest[found] == stored.column("digest").to_numpy()[same]
    )
    return stored.filter(pa.array(~same))


def _missing(rows: pa.Table, others: pa.Table) -> pa.Table:
    """Return the rows that arrived where none of the others did."""
    return rows.filter(pc.invert(_is_in(rows, others)))


def _is_in(rows: pa.Table, others: pa.Table) -> pa.ChunkedArray:
    return pc.is_in(rows.column("arrived"), value_set=others.column("arrived"))
