"""A set of integers as runs, for ids that arrive nearly in order: one pair of bounds per run."""

from bisect import bisect_right


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
