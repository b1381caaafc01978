"""Vector positions: the position of a reader in a stream with several writers.

A position is a lower set of facts. Each fact is (writer, stream id). The position covers it if the
stream id is at most the position of that writer. `min` applies to every writer, listed or not;
`items` lists the writers that are further.

    VectorPosition(5, (("b", 9),))   covers every fact up to 5, and those of writer b up to 9:
        covers("b", 7)  True         covers("a", 7)  False        linear()  5

The whole value is a map from writer to stream id, `linear()` is a single stream id. Positions form
a lattice: `<=` is inclusion of the covered facts, which is a partial order (two positions may be
incomparable), `merge` is the union and `meet` the intersection.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

LARGEST_POSITION = 2**63 - 1  # a stream id is a bigint


@dataclass(frozen=True, slots=True)
class VectorPosition:
    """Every writer is at least at `min`; `items` lists those above it, sorted by writer."""

    min: int = 0
    items: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not in normal form; `of` normalises."""
        writers = [writer for writer, _ in self.items]
        if writers != sorted(set(writers)):
            raise ValueError(f"the writers must be sorted and distinct: {writers}")
        if not 0 <= self.min <= LARGEST_POSITION:
            raise ValueError(f"min {self.min} is not a stream position (0 to 2^63-1)")
        for writer, position in self.items:
            if not self.min < position <= LARGEST_POSITION:
                raise ValueError(
                    f"position {position} of writer {writer!r} is not above min {self.min} "
                    f"and below 2^63"
                )

    @classmethod
    def of(cls, minimum: int, positions: Mapping[str, int]) -> "VectorPosition":
        """Return the position at `minimum`, with the writers of `positions` that are further."""
        return cls(
            minimum,
            tuple(
                sorted(
                    (writer, position)
                    for writer, position in positions.items()
                    if position > minimum
                )
            ),
        )

    def writers(self) -> dict[str, int]:
        """Return the writers that are above `min`, as a new dict."""
        return dict(self.items)

    def position(self, writer: str) -> int:
        """Return the position of a writer: its facts with at most this stream id are covered."""
        for name, position in self.items:
            if name == writer:
                return position
        return self.min

    def covers(self, writer: str, stream_id: int) -> bool:
        """Return whether the fact `stream_id` of `writer` is at or before this position."""
        return stream_id <= self.position(writer)

    def linear(self) -> int:
        """Return the linear position: facts of all writers with at most this id are covered."""
        return self.min

    def furthest(self) -> int:
        """Return the largest covered stream id."""
        return max((position for _, position in self.items), default=self.min)

    def advance(self, writer: str, stream_id: int) -> "VectorPosition":
        """Return this position with `writer` at `stream_id`.

        Unchanged if it is there or further.
        """
        if self.covers(writer, stream_id):
            return self
        return VectorPosition.of(self.min, self.writers() | {writer: stream_id})

    def merge(self, other: "VectorPosition") -> "VectorPosition":
        """Return the smallest position that covers what either covers (the union)."""
        names = self.writers() | other.writers()
        return VectorPosition.of(
            max(self.min, other.min), {w: max(self.position(w), other.position(w)) for w in names}
        )

    def meet(self, other: "VectorPosition") -> "VectorPosition":
        """Return the largest position that covers only what both cover (the intersection)."""
        if self is other or self == other:
            return self
        names = self.writers() | other.writers()
        return VectorPosition.of(
            min(self.min, other.min), {w: min(self.position(w), other.position(w)) for w in names}
        )

    def __le__(self, other: "VectorPosition") -> bool:
        """Return whether `other` covers every fact that this position covers.

        It is no total order: `not a <= b` is not `b < a`.
        """
        if self.min > other.min:
            return False
        return all(position <= other.position(writer) for writer, position in self.items)

    def __lt__(self, other: "VectorPosition") -> bool:
        return self != other and self <= other

    def __ge__(self, other: "VectorPosition") -> bool:
        return other <= self

    def __gt__(self, other: "VectorPosition") -> bool:
        return other < self


# --------------------------------------------------------------------------------------------------
# A set of integers as runs, for ids that arrive nearly in order: one pair of bounds per run.


class IntervalSet:
    """A growing set of integers.

    `add`, `floor` and `run_end` cost O(log runs), plus moving the tail of a short list.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """Return the number of runs, which determines the memory."""
        return len(self._starts)

    def add(self, number: int) -> None:
        """Add `number`; runs that it joins become one."""
        after = bisect_right(self._starts, number)
        if after and number <= self._ends[after - 1]:
            return
        joins_before = after > 0 and self._ends[after - 1] == number - 1
        joins_after = after < len(self._starts) and self._starts[after] == number + 1
        if joins_before and joins_after:
            self._ends[after - 1] = self._ends.pop(after)
            del self._starts[after]
        elif joins_before:
            self._ends[after - 1] = number
        elif joins_after:
            self._starts[after] = number
        else:
            self._starts.insert(after, number)
            self._ends.insert(after, number)

    def floor(self, bound: int) -> int | None:
        """Return the largest member that is at most `bound`; None if there is none."""
        after = bisect_right(self._starts, bound)
        return min(bound, self._ends[after - 1]) if after else None

    def run_end(self, number: int) -> int:
        """Return the last of the consecutive members number, number + 1, ….

        Return `number - 1` if `number` is not a member.
        """
        after = bisect_right(self._starts, number)
        if after and number <= self._ends[after - 1]:
            return self._ends[after - 1]
        return number - 1

    def discard_below(self, bound: int) -> None:
        """Drop every run that ends below `bound`."""
        keep = bisect_right(self._ends, bound - 1)
        del self._starts[:keep]
        del self._ends[:keep]
