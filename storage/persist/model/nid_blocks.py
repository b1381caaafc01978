"""Numbers from the sequences of the schema, taken a block at a time."""

from collections import deque
from typing import Final

from storage.persist.model.missing_data import MissingData

BLOCK_LENGTHS: Final = {  # the increments of the sequences in the schema
    "event_nids": 1000,
    "state_group_nids": 1000,
    "state_key_nids": 100,
    "type_nids": 10,
    "principal_nids": 100,
    "room_nids": 10,
}


class NidBlocks:
    """Numbers reserved from the sequences, one block at a time.

    Unused numbers of a process are lost, which is harmless.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, deque[int]] = {name: deque() for name in BLOCK_LENGTHS}

    def put(self, sequence: str, first: int) -> None:
        self._numbers[sequence].extend(range(first, first + BLOCK_LENGTHS[sequence]))

    def left(self, sequence: str) -> int:
        """Return how many numbers are reserved."""
        return len(self._numbers[sequence])

    def take(self, sequence: str) -> int:
        """Return the next number. Raise `MissingData` if none is reserved."""
        try:
            return self._numbers[sequence].popleft()
        except IndexError:
            raise MissingData("nids", (sequence,)) from None
