"""Vector positions: how far a reader has got in a stream that several writers add to.

A position is a lower set of facts. Each fact is (writer, stream id); the position covers it if the
stream id is at most the position of that writer. `min` stands for every writer, listed or not;
`items` lists the writers that are further.

    VectorPosition(5, (("b", 9),))   covers every fact up to 5, and those of writer b up to 9:
        covers("b", 7)  True         covers("a", 7)  False        linear()  5

In the words of the seed (streams.md, "Multi-writer streams"): the whole value is view 1 (a map from
writer to stream id), `linear()` is view 2 (a single stream id). Positions form a lattice: `<=` is
inclusion of the covered facts, which is a partial order (two positions may be incomparable),
`merge` is the union and `meet` the intersection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LARGEST_POSITION = 2**63 - 1  # a stream id is a bigint


@dataclass(frozen=True, slots=True)
class VectorPosition:
    """`min`: every writer is at least here; `items`: (writer, position) sorted by writer, only positions above `min`."""

    min: int = 0
    items: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        """ValueError for a value that is not in its one normal form; `of` brings anything into it."""
        writers = [writer for writer, _ in self.items]
        if writers != sorted(set(writers)):
            raise ValueError(f"the writers must be sorted and distinct: {writers}")
        if not 0 <= self.min <= LARGEST_POSITION:
            raise ValueError(f"min {self.min} is not a stream position (0 to 2^63-1)")
        for writer, position in self.items:
            if not self.min < position <= LARGEST_POSITION:
                raise ValueError(
                    f"position {position} of writer {writer!r} is not above min {self.min} and below 2^63"
                )

    @classmethod
    def of(cls, minimum: int, positions: Mapping[str, int]) -> "VectorPosition":
        """The position at `minimum`, with the writers of `positions` that are further; the others are left out."""
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
        """The writers that are above `min`, as a new dict."""
        return dict(self.items)

    def position(self, writer: str) -> int:
        """The per-writer position: every fact of this writer with an equal or smaller stream id is covered."""
        for name, position in self.items:
            if name == writer:
                return position
        return self.min

    def covers(self, writer: str, stream_id: int) -> bool:
        """Whether the fact `stream_id`, added by `writer`, is at or before this position."""
        return stream_id <= self.position(writer)

    def linear(self) -> int:
        """The linear position: every fact with an equal or smaller stream id, of whatever writer, is covered."""
        return self.min

    def furthest(self) -> int:
        """No fact above this stream id is covered."""
        return max((position for _, position in self.items), default=self.min)

    def advance(self, writer: str, stream_id: int) -> "VectorPosition":
        """This position with `writer` at `stream_id`; unchanged if the writer is there or further."""
        if self.covers(writer, stream_id):
            return self
        return VectorPosition.of(self.min, self.writers() | {writer: stream_id})

    def merge(self, other: "VectorPosition") -> "VectorPosition":
        """The smallest position that covers what either covers (the union)."""
        names = self.writers() | other.writers()
        return VectorPosition.of(
            max(self.min, other.min), {w: max(self.position(w), other.position(w)) for w in names}
        )

    def meet(self, other: "VectorPosition") -> "VectorPosition":
        """The largest position that covers only what both cover (the intersection)."""
        if self is other or self == other:
            return self
        names = self.writers() | other.writers()
        return VectorPosition.of(
            min(self.min, other.min), {w: min(self.position(w), other.position(w)) for w in names}
        )

    def __le__(self, other: "VectorPosition") -> bool:
        """Whether `other` covers every fact that this position covers.

        Not a total order: `not a <= b` is not `b < a`.
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
