"""The bundles of a room, gathered in a file that grows to disk: to be gone through in order, and once more if need be."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from operator import attrgetter
from tempfile import SpooledTemporaryFile
from typing import Any, Final, NamedTuple

import pyarrow as pa

from storage.pipeline.slim import Slim, unpacked

MEMORY_BYTES: Final = 16 << 20


class Piece(NamedTuple):
    """A bundle: its version, the path it is of, its ranks, and where it lies in the file."""

    version: str
    path_index: int
    first: int
    last: int
    start: int
    length: int


class SpooledRoom:
    """A room's bundles in order of path and rank."""

    def __init__(self, room_id: str) -> None:
        self.room_id = room_id
        self.events = 0
        self._file = SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115  # closed by `close`
        self._pieces: list[Piece] = []

    def add(self, bundle: Mapping[str, Any]) -> None:
        """One more bundle: a row of `storage.pipeline.examining.EXAMINED`."""
        place = (self._file.tell(), len(bundle["slim"]))
        self._pieces.append(Piece(bundle["room_version"], bundle["path_index"], bundle["first"], bundle["last"], *place))
        self._file.write(bundle["slim"])
        self.events += bundle["events"]

    def close(self) -> None:
        """Forget it."""
        self._file.close()

    def lines(self, most: int) -> Iterator[tuple[str, list[Slim]]]:
        """All lines, so many at a time, with the room version."""
        for version, lines in self._stretches():
            while chunk := list(islice(lines, most)):
                yield version, chunk

    def _stretches(self) -> Iterator[tuple[str, Iterator[Slim]]]:
        """Bundles whose ranks overlap are merged, as those of files side by side; only these are held together."""
        together: list[Piece] = []
        for piece in sorted(self._pieces, key=lambda one: (one.path_index, one.first)):
            if together and not (piece.path_index == together[0].path_index and piece.first <= max(one.last for one in together)):
                yield together[0].version, self._merged(together)
                together = []
            together.append(piece)
        if together:
            yield together[0].version, self._merged(together)

    def _merged(self, pieces: Iterable[Piece]) -> Iterator[Slim]:
        opened = [self._opened(piece) for piece in pieces]
        return iter(opened[0]) if len(opened) == 1 else iter(heapq.merge(*opened, key=attrgetter("rank")))

    def _opened(self, piece: Piece) -> list[Slim]:
        self._file.seek(piece.start)
        lines = list(unpacked(self._file.read(piece.length)))
        self._file.seek(0, 2)
        return lines if all(a.rank <= b.rank for a, b in pairwise(lines)) else sorted(lines, key=attrgetter("rank"))


def rooms_of(batches: Iterable[pa.RecordBatch]) -> Iterator[SpooledRoom]:
    """The rooms of sorted bundles (`storage.pipeline.examining.EXAMINED`), one after the other. To be closed by who takes them."""
    room: SpooledRoom | None = None
    for batch in batches:
        for row in batch.to_pylist():
            if room is not None and row["room_id"] != room.room_id:
                yield room
                room = None
            room = room or SpooledRoom(row["room_id"])
            room.add(row)
    if room is not None:
        yield room
