"""Lines that wait for events they depend on, by depth: the order in which to retry them.

The depth is a claim of the sender, so it is a hint: mostly parents come before children, and one
more round stores the rest. Memory is bounded: beyond a number of lines they go to disk, sorted, and
are merged when they are read back.
"""

import heapq
import struct
import tempfile
from collections.abc import Generator, Iterable, Iterator
from typing import IO, Final, NamedTuple, Self

IN_MEMORY_MAX: Final = 10_000
RUNS_MAX: Final = 64

_HEADER: Final = struct.Struct("<dqqqq")


class RetryLine(NamedTuple):
    """A waiting line; sorts by depth, then by position.

    ``raw`` is the line; ``note`` the reject to report if it is never stored.
    """

    depth: float
    source: int
    number: int
    raw: bytes
    note: bytes


class RetryQueue:
    """A queue that is emptied in order of depth.

    Use it as a context manager; its files are deleted at the end.
    """

    def __init__(self, *, in_memory_max: int = IN_MEMORY_MAX, runs_max: int = RUNS_MAX) -> None:
        self._in_memory_max = in_memory_max
        self._runs_max = runs_max
        self._lines: list[RetryLine] = []
        self._runs: list[IO[bytes]] = []
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._runs)

    def __len__(self) -> int:
        return self._count

    def add(self, line: RetryLine) -> None:
        self._lines.append(line)
        self._count += 1
        if len(self._lines) >= self._in_memory_max:
            self._runs.append(_written(sorted(self._lines)))
            self._lines = []
            if len(self._runs) > self._runs_max:
                self._merge_runs()

    def drain(self) -> Generator[RetryLine, None, None]:
        """Yield all current lines, by depth; lines added from now on are for the next time.

        Close it if you do not read it to its end.
        """
        lines, runs = sorted(self._lines), self._runs
        self._lines, self._runs, self._count = [], [], 0
        try:
            yield from heapq.merge(*map(_read_back, runs), lines)
        finally:
            _close(runs)

    def _merge_runs(self) -> None:
        """Merge all runs into one, because open files are limited, too."""
        merged = _written(heapq.merge(*map(_read_back, self._runs)))
        _close(self._runs)
        self._runs = [merged]


def _close(runs: Iterable[IO[bytes]]) -> None:
    for run in runs:
        run.close()


def _written(lines: Iterable[RetryLine]) -> IO[bytes]:
    # closed with the queue
    run = tempfile.TemporaryFile(prefix="room-storage-held-")  # noqa: SIM115
    for line in lines:
        run.write(_HEADER.pack(*line[:3], len(line.raw), len(line.note)) + line.raw + line.note)
    return run


def _read_back(run: IO[bytes]) -> Iterator[RetryLine]:
    run.seek(0)
    while header := run.read(_HEADER.size):
        depth, source, number, raw_bytes, note_bytes = _HEADER.unpack(header)
        yield RetryLine(depth, source, number, run.read(raw_bytes), run.read(note_bytes))
