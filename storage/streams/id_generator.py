"""The id generator of one stream in one process: reserve ids, complete them, follow other writers.

This writer's ids come from `allocate` (the stream's sequence). Of the other writers only positions
are known, from `advance`. Everything here happens between two awaits of one event loop, so no state
is ever half-changed and no lock is needed; the only await is `allocate`. Nothing here is durable.
The transaction that writes the facts also writes positions, and the generator is built again from
those at start-up.

There are several "current" ids:

    current(w)   the minimum: the largest id that W itself completed (or announced) such that all
                 ids of W up to it have completed
    maximum(w)   the maximum: the largest id, of any writer, known to have completed, with no id of
                 W at or below it in flight
    linear()     the largest id known to have completed such that every id of every writer up to it
                 has completed

    Writers a (this process) and b start at 1.
      a reserves 2      current(a) 1   maximum(a) 1   linear 1
      b announces 3     current(a) 1   maximum(a) 1   linear 1     2 is in flight
      a completes 2     current(a) 2   maximum(a) 3   linear 3
      b announces 9     current(a) 2   maximum(a) 9   linear 9     a has nothing in flight

All are monotonic, and never reach an id that is still in flight, not even before its number is
known. An id that `allocate` has not returned yet may be any number above the largest known one at
the time of the call. So an open reservation has a bound (the number below all ids it may get), and
no current passes the smallest bound.

An announced position must be a completed id, of any writer. A writer announces its own `maximum`:
when it is idle that follows the others, so it never delays their linear position.
"""

import heapq
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from storage.errors import StorageCorrupt
from storage.streams.positions import IntervalSet, VectorPosition

Allocate = Callable[[int], Awaitable[Sequence[int]]]


class IdGenerator:
    """Stream ids of one stream.

    `allocate(n)` returns n increasing new ids; `positions` are the known positions at start-up.
    """

    def __init__(
        self, allocate: Allocate, writer: str = "main", positions: Mapping[str, int] | None = None
    ) -> None:
        """Start with the positions in the database, by writer.

        This writer starts at 0 if it has none.

        At start-up no id of this writer is in flight.
        """
        self.writer: Final = writer
        self._allocate = allocate
        self._currents: dict[str, int] = {writer: 0, **(positions or {})}
        self._open: set[Reservation] = set()
        self._own_completed: list[int] = []  # heap: completed by this writer, above its current
        # known to have completed, of any writer; runs below the linear position are dropped
        self._completed = IntervalSet()
        self._largest_known = max(self._currents.values())
        self._linear = 0
        for position in self._currents.values():
            self._completed.add(position)
        self._move()

    def reserve(self, n: int = 1) -> "Reservation":
        """Reserve n increasing ids; leaving the block, in any way, completes them.

        Use it as `async with generator.reserve(n) as ids:`. If it is unknown whether the writer's
        COMMIT succeeded, the writer resolves that before it leaves the block. Raise ValueError if n
        < 1, and StorageCorrupt (on entering) if the sequence returns ids that were used before.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        return Reservation(self, n)

    def current(self, writer: str | None = None) -> int:
        """Return the minimum per-writer current id (this writer's by default).

        Raise KeyError for an unknown writer.
        """
        return self._currents[self.writer if writer is None else writer]

    def maximum(self, writer: str | None = None) -> int:
        """Return the maximum per-writer current id (this writer's by default).

        Raise KeyError for an unknown writer.
        """
        current = self.current(writer)
        if writer is not None and writer != self.writer:
            return max(current, self._linear)
        return max(current, self._largest_completed(self._bound()))

    def positions(self) -> dict[str, int]:
        """Return `current` of every writer."""
        return dict(self._currents)

    def linear(self) -> int:
        """Return the linear current id."""
        return self._linear

    def vector(self) -> VectorPosition:
        """Return both as one value: `linear()` as `min`, and the writers with a `current` above."""
        return VectorPosition.of(self._linear, self._currents)

    @property
    def is_busy(self) -> bool:
        """Return whether this writer may have ids in flight."""
        return bool(self._open)

    def in_flight(self) -> tuple[int, ...]:
        """Return the ids of this writer that await completion, ascending."""
        return tuple(
            sorted(stream_id for reservation in self._open for stream_id in reservation.ids)
        )

    def advance(self, writer: str, stream_id: int, *, completed: bool = True) -> None:
        """Record that `stream_id` and all smaller ids of a writer have completed (POSITION).

        A new writer is added. An older position than the known one changes nothing. ``completed``
        False means the position of an idle writer, whose own ids up to there have completed. The id
        itself may be another's, and in flight.
        """
        self._largest_known = max(self._largest_known, stream_id)
        if completed:
            self._completed.add(stream_id)
        previous = self._currents.setdefault(writer, 0)
        if writer != self.writer or stream_id <= self._bound():
            self._currents[writer] = max(previous, stream_id)
        self._move()

    def remove_writer(self, writer: str) -> None:
        """Remove a writer that is gone for good, so that it no longer delays the linear position.

        Raise ValueError for this writer itself.

        Its transactions must have ended: its ids in flight count as completed from here on.
        """
        if writer == self.writer:
            raise ValueError(f"{writer!r} is the writer of this generator")
        self._currents.pop(writer, None)
        self._move()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep positions at or below the largest known id during a block.

        Use it while ids are taken and completed elsewhere, inside one statement.
        """
        reservation = self.hold()
        try:
            yield
        finally:
            self.let_go(reservation)

    def hold(self) -> "Reservation":
        """Begin the same without a block; end it with `let_go`."""
        reservation = Reservation(self, 0)
        reservation.bound = self._largest_known
        self._open.add(reservation)
        return reservation

    def let_go(self, reservation: "Reservation") -> None:
        """End a `hold`."""
        if reservation.bound == self._largest_known:
            self._open.discard(reservation)  # its bound is that without it: no position moves
        else:
            self._leave(reservation)

    async def _enter(self, reservation: "Reservation", n: int) -> None:
        reservation.bound = self._largest_known
        self._open.add(reservation)
        try:
            ids = tuple(await self._allocate(n))
            self._check_allocated(ids, n, reservation.bound)
        except BaseException:
            # Cancelled or failed: allocated ids never reach a caller, so no fact will ever have
            # them.
            self._leave(reservation)
            raise
        reservation.ids = ids
        reservation.bound = ids[0] - 1
        self._largest_known = max(self._largest_known, ids[-1])
        self._move()

    def _leave(self, reservation: "Reservation") -> None:
        self._open.discard(reservation)
        for stream_id in reservation.ids:
            heapq.heappush(self._own_completed, stream_id)
            self._completed.add(stream_id)
        reservation.ids = ()
        self._move()

    def _bound(self) -> int:
        """Return the bound: no id of this writer at or below it is or will be in flight."""
        return min((reservation.bound for reservation in self._open), default=self._largest_known)

    def _largest_completed(self, bound: int) -> int:
        completed = self._completed.floor(bound)
        return self._linear if completed is None else max(self._linear, completed)

    def _move(self) -> None:
        """Move this writer's current and the linear position as far as possible."""
        bound = self._bound()
        while self._own_completed and self._own_completed[0] <= bound:
            self._currents[self.writer] = max(
                self._currents[self.writer], heapq.heappop(self._own_completed)
            )
        others = (position for writer, position in self._currents.items() if writer != self.writer)
        linear = self._largest_completed(min(bound, min(others, default=self._largest_known)))
        # no writer has an id in flight up to the smallest position
        linear = max(linear, min(bound, *self._currents.values()))
        # Ids that follow without a gap have all completed, even beyond the position of another
        # writer: an id has one owner.
        self._linear = self._completed.run_end(linear + 1)
        self._completed.discard_below(self._linear)

    def _check_allocated(self, ids: tuple[int, ...], n: int, bound: int) -> None:
        if len(ids) != n or list(ids) != sorted(set(ids)):
            raise StorageCorrupt(
                f"not {n} increasing stream ids", writer=self.writer, allocated=ids
            )
        if ids[0] <= bound:
            raise StorageCorrupt(
                "the sequence is behind its table: it returned ids that were used",
                writer=self.writer,
                allocated=ids,
                used=bound,
            )


class Reservation:
    """One `reserve` call; an async context manager that can be entered once."""

    __slots__ = ("_generator", "_n", "bound", "ids")

    def __init__(self, generator: IdGenerator, n: int) -> None:
        self._generator = generator
        self._n = n
        self.ids: tuple[int, ...] = ()  # awaiting completion
        self.bound: int = 0  # below every id that this reservation has or may still get

    async def __aenter__(self) -> list[int]:
        if self._n == 0:
            raise RuntimeError("a reservation can be entered only once")
        n, self._n = self._n, 0
        await self._generator._enter(self, n)  # noqa: SLF001  (the two classes are one unit)
        return list(self.ids)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._generator._leave(self)  # noqa: SLF001
