"""The bundles of a room, which can be read in order several times."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from storage.pipeline.imports.intern_names import BundleLocation
from storage.pipeline.imports.validate import unpacked
from storage.rebuild.planner import SlimEvent


class RoomBundle(NamedTuple):
    """A bundle: its room version, its path, its ranks, and its location."""

    version: str
    path_index: int
    first: int
    last: int
    place: BundleLocation


class BundleSource(Protocol):
    """Reads bundles: from files, or from the database."""

    def get(self, place: BundleLocation) -> bytes: ...


class BundledRoom:
    """A room's bundles in order of path and rank. It keeps none of them in memory."""

    def __init__(self, room_id: str, reader: BundleSource) -> None:
        self.room_id = room_id
        self.events: Any = 0
        self._reader = reader
        self._pieces: list[RoomBundle] = []

    def add(self, bundle: Mapping[str, Any]) -> None:
        """Add a bundle: a row of `storage.pipeline.imports.validate.EXAMINED`."""
        place = BundleLocation(bundle["file"], bundle["start"], bundle["length"])
        self._pieces.append(
            RoomBundle(
                bundle["room_version"], bundle["path_index"], bundle["first"], bundle["last"], place
            )
        )
        self.events += bundle["events"]

    @property
    def places(self) -> Iterator[BundleLocation]:
        return (piece.place for piece in self._pieces)

    def lines(self, most: int) -> Iterator[tuple[str, list[SlimEvent]]]:
        """Yield all lines with the room version, ``most`` at a time."""
        for version, lines in self._ranges():
            while chunk := list(islice(lines, most)):
                yield version, chunk

    def _ranges(self) -> Iterator[tuple[str, Iterator[SlimEvent]]]:
        """Merge bundles with overlapping ranks (parallel files); only these share the memory."""
        together: list[RoomBundle] = []
        for piece in sorted(self._pieces, key=lambda bundle: (bundle.path_index, bundle.first)):
            if together and not (
                piece.path_index == together[0].path_index
                and piece.first <= max(bundle.last for bundle in together)
            ):
                yield together[0].version, self._merged(together)
                together = []
            together.append(piece)
        if together:
            yield together[0].version, self._merged(together)

    def _merged(self, pieces: Iterable[RoomBundle]) -> Iterator[SlimEvent]:
        opened = [self._opened(piece) for piece in pieces]
        return (
            iter(opened[0])
            if len(opened) == 1
            else iter(heapq.merge(*opened, key=attrgetter("rank")))
        )

    def _opened(self, piece: RoomBundle) -> list[SlimEvent]:
        lines = list(unpacked(self._reader.get(piece.place)))
        return (
            lines
            if all(a.rank <= b.rank for a, b in pairwise(lines))
            else sorted(lines, key=attrgetter("rank"))
        )


def rooms_of(batches: Iterable[pa.RecordBatch], reader: BundleSource) -> Iterator[BundledRoom]:
    """Yield the rooms of sorted bundles (`storage.pipeline.imports.validate.EXAMINED`)."""
    room: BundledRoom | None = None
    for batch in batches:
        for row in batch.to_pylist():
            if room is not None and row["room_id"] != room.room_id:
                yield room
                room = None
            room = room or BundledRoom(row["room_id"], reader)
            room.add(row)
    if room is not None:
        yield room
