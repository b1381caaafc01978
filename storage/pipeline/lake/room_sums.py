"""A number for the rows of each room, by which many rooms are compared in one pass over the files.

The number is the sum of 64-bit hashes of the rows, so their order and their files do not matter.
Sums are compared in the process that made them: Python's hash of a text differs between processes.
"""

from collections.abc import Iterable
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

KEY: Final = "room_nid"


class RoomSums:
    """The sums of the rooms from ``first`` to ``last``: eight bytes for each."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._sums = np.zeros(max(last - first + 1, 0), np.uint64)

    @classmethod
    def of(cls, first: int, last: int, parts: Iterable[pa.Table]) -> Self:
        """Return the sums of these rows. Rows of other rooms are left out."""
        found = cls(first, last)
        for part in parts:
            found._add(part)
        return found

    def differing(self, room_nids: list[int], rows: pa.Table) -> set[int]:
        if not room_nids:
            return set()
        others = RoomSums.of(min(room_nids), max(room_nids), [rows])
        wanted = np.asarray(room_nids, np.int64)
        differ = self.at(wanted) != others.at(wanted)
        return set(wanted[differ].tolist())

    def at(self, room_nids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        return self._sums[room_nids - self._first]

    def _add(self, rows: pa.Table) -> None:
        numbers = rows.column(KEY).to_numpy() - self._first
        known = (numbers >= 0) & (numbers < len(self._sums))
        np.add.at(self._sums, numbers[known], _hashes(rows)[known])


def _hashes(rows: pa.Table) -> npt.NDArray[np.uint64]:
    """Return a hash of each row: of a text that only equal rows have, as no value has a NUL."""
    columns = [
        pc.binary_join_element_wise("=", column.cast(pa.string()), "") for column in rows.columns
    ]
    texts = pc.binary_join_element_wise(
        *columns, "\0", null_handling="replace", null_replacement="-"
    )
    return np.fromiter(map(hash, texts.to_pylist()), np.int64, rows.num_rows).view(np.uint64)
