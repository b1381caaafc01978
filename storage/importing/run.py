"""The import: once through the files, then the waiting lines again until no more are stored.

An append is idempotent, so you can run an interrupted import again: stored events return
"duplicate".
"""

import asyncio
import heapq
import struct
import tempfile
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any, Final, NamedTuple, Self, TypeVar

from storage.errors import (
    CommitUnknown,
    InputError,
    InvalidEvent,
    StorageError,
    UnknownEvent,
    UnknownRoomVersion,
)
from storage.event import ROOM_VERSIONS, parse, peek
from storage.event.ndjson import Line, Origin, read_line
from storage.event.reading import without_extra_keys
from storage.ids import EventId
from storage.importing.reading import (
    LINE_BYTES_MAX,
    FilePiece,
    RawLine,
    Reject,
    RejectOutcome,
    Rejects,
    read_pieces,
)
from storage.observability.counters import Counted, Report, silent
from storage.persist import AppendResult
from storage.store.facade import Store

# --------------------------------------------------------------------------------------------------
# Queue each room's lines in order, and append different rooms concurrently.
#
# The result of a live event depends on the earlier events of its room. So a room's next batch waits
# for the result of the last. Batches of different rooms are appended at the same time, and the
# store's writer commits them together.

BATCH_MAX: Final = 1_000
WAITING_MAX: Final = 4_000
WAITING_BYTES_MAX: Final = 16 << 20
SIDE_BY_SIDE_MAX: Final = 256


class QueuedLine(NamedTuple):
    """A queued line: its position, its bytes, its content."""

    source: int
    number: int
    size: int
    raw: bytes
    line: Line

    @property
    def origin(self) -> Origin:
        """Return the line's origin; live by default."""
        return self.line.origin or "live"


class RoomQueues:
    """Takes lines, calls ``work`` with runs of them.

    Bounded: `put` waits while too many lines are queued.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        work: Callable[[list[QueuedLine]], Awaitable[None]],
        *,
        batch_max: int = BATCH_MAX,
    ) -> None:
        self._group = group
        self._work = work
        self._batch_max = batch_max
        self._queues: dict[Hashable, deque[QueuedLine]] = {}
        self._side_by_side = asyncio.Semaphore(SIDE_BY_SIDE_MAX)
        self._waiting = 0
        self._waiting_bytes = 0
        self._progress = asyncio.Condition()

    async def put(self, room: Hashable, entry: QueuedLine) -> None:
        """Queue a line of a room, once there is space."""
        if self._waiting >= WAITING_MAX or self._waiting_bytes >= WAITING_BYTES_MAX:
            async with self._progress:
                await self._progress.wait_for(
                    lambda: self._waiting < WAITING_MAX and self._waiting_bytes < WAITING_BYTES_MAX
                )
        self._waiting += 1
        self._waiting_bytes += len(entry.raw)
        queue = self._queues.get(room)
        if queue is None:
            self._queues[room] = deque([entry])
            self._group.create_task(self._drive(room))
        else:
            queue.append(entry)

    async def drain(self) -> None:
        """Wait until all queued lines are processed."""
        async with self._progress:
            await self._progress.wait_for(lambda: not self._queues)

    async def _drive(self, room: Hashable) -> None:
        queue = self._queues[room]
        while queue:
            async with self._side_by_side:
                run = take_run(queue, self._batch_max)
                await self._work(run)
            self._waiting -= len(run)
            self._waiting_bytes -= sum(len(entry.raw) for entry in run)
            if not queue:
                del self._queues[room]
            async with self._progress:
                self._progress.notify_all()


def take_run(queue: deque[QueuedLine], most: int) -> list[QueuedLine]:
    """Take the next lines that can be appended in one call: of one origin and room version.

    Readmissions are not appended, so they make a run of their own.
    """
    run = [queue.popleft()]
    while queue and len(run) < most and _kind(queue[0]) == _kind(run[0]):
        run.append(queue.popleft())
    return run


def _kind(entry: QueuedLine) -> tuple[Origin, str | None, bool]:
    return entry.origin, entry.line.room_version, entry.line.readmit


# --------------------------------------------------------------------------------------------------
# Lines that wait for events they depend on, by depth: the order in which to retry them.
#
# The depth is a claim of the sender, so it is a hint: mostly parents come before children, and one
# more round stores the rest. Memory is bounded: beyond a number of lines they go to disk, sorted,
# and are merged when they are read back.

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


COMMIT_ATTEMPTS: Final = 3
NO_ROOM: Final = ""

T = TypeVar("T")


@dataclass(slots=True)
class Summary:
    """The numbers of lines by outcome.

    ``outcomes`` are those of `Store.append`, and ``bad_line`` for lines that are no PDU.
    """

    lines: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    """The number of rounds over the waiting lines."""
    stray_keys: int = 0
    """The lines whose content hash fits without the keys of old servers, which are removed."""


class Import:
    """One import into one store.

    ``batch_max`` events go into one append, ``retries_max`` waiting lines stay in memory.
    ``total_bytes`` of all files; None for a pipe: then lines are reported.
    """

    def __init__(
        self,
        store: Store,
        rejects: Rejects,
        *,
        report: Report = silent,
        total_bytes: int | None = None,
        batch_max: int = BATCH_MAX,
        retries_max: int = IN_MEMORY_MAX,
    ) -> None:
        self.summary: Summary = Summary()
        self._store = store
        self._rejects = rejects
        self._report = report
        unit = "lines" if total_bytes is None else "bytes"
        self._counted = Counted(report, "import", total_bytes, unit)
        self._batch_max = batch_max
        self._retries = RetryQueue(in_memory_max=retries_max)
        self._sources: list[str] = []

    async def run(self, sources: Sequence[str]) -> Summary:
        """Import the files, ``-`` for standard input, one after the other.

        A `DatabaseError` ends it; run it again to continue.
        """
        self._sources = list(sources)
        with self._retries:
            async with self._queues() as queues:
                for index, source in enumerate(self._sources):
                    async with aclosing(read_pieces(source)) as pieces:
                        async for piece in pieces:
                            await self._read(index, piece, queues)
            await self._try_again()
            with closing(self._retries.drain()) as unstored:
                for line in unstored:
                    self._reject(
                        self._sources[line.source], line.number, line.raw, Reject.decode(line.note)
                    )
        return self.summary

    @asynccontextmanager
    async def _queues(self) -> AsyncIterator[RoomQueues]:
        """Open queues for rooms; at the end of the block all queued lines are processed.

        The first error ends everything.
        """
        try:
            async with asyncio.TaskGroup() as group:
                queues = RoomQueues(group, self._append, batch_max=self._batch_max)
                yield queues
                await queues.drain()
        except BaseExceptionGroup as errors:
            if all(isinstance(error, StorageError) for error in errors.exceptions):
                raise errors.exceptions[0] from errors.exceptions[0].__cause__
            raise

    async def _read(self, source: int, piece: FilePiece, queues: RoomQueues) -> None:
        """Queue the lines of a piece; malformed lines are rejects."""
        used = sum(len(line.raw) + 1 for line in piece.lines)
        # Count empty lines, and early the start of a line that continues in the next piece.
        self._count(0, max(piece.size - used, 0))
        for raw in piece.lines:
            self.summary.lines += 1
            try:
                line = _line_of(raw)
            except InvalidEvent as error:
                self._reject(raw.source, raw.number, raw.raw, Reject("bad_line", error.reason))
                self._count(1, len(raw.raw) + 1)
                continue
            self.summary.stray_keys += line.stray_keys
            if line.second_create:
                self._wait(source, raw, line)
            else:
                await queues.put(
                    room_of(line), QueuedLine(source, raw.number, len(raw.raw) + 1, raw.raw, line)
                )

    def _wait(self, source: int, raw: RawLine, line: Line) -> None:
        """Keep a second create event for the next round: the first one is the room's."""
        note = Reject("missing_parents", "the first create event of the room is missing").encode()
        self._retries.add(RetryLine(line.depth or 0.0, source, raw.number, raw.raw, note))
        self._count(1, len(raw.raw) + 1)

    def _count(self, lines: int, size: int) -> None:
        """Report that so many lines of ``size`` bytes have their result, or wait."""
        self._counted.add(size if self._counted.unit == "bytes" else lines)

    async def _try_again(self) -> None:
        """Retry the waiting lines in rounds, until a round stores none."""
        settled = -1
        while len(self._retries) and settled:
            before = len(self._retries)
            self.summary.rounds += 1
            self._counted = Counted(self._report, "import again", before, "lines")
            async with self._queues() as queues:
                with closing(self._retries.drain()) as waiting:
                    for retry in waiting:
                        line = _without_extra_keys(read_line(retry.raw))
                        await queues.put(
                            room_of(line),
                            QueuedLine(retry.source, retry.number, 0, retry.raw, line),
                        )
            settled = before - len(self._retries)

    async def _append(self, run: list[QueuedLine]) -> None:
        """Append a run and record the outcome of each line."""
        for entry, result in zip(run, await self._answers(run), strict=True):
            if result.outcome == "missing_parents" or _lacks_its_room(entry, result):
                self._retry_later(entry, result)
            elif result.outcome == "invalid":
                reject = Reject("invalid", result.reason or "", result.event_id)
                self._reject(self._sources[entry.source], entry.number, entry.raw, reject)
            else:
                self.summary.outcomes[result.outcome] += 1
        self._count(len(run), sum(entry.size for entry in run))

    async def _answers(self, run: list[QueuedLine]) -> list[AppendResult]:
        """Return the results; an invalid `state_before` or `refused` makes only its line invalid.

        The other lines are appended without it.
        """
        if run[0].line.readmit:
            return [await self._readmitted(entry.line) for entry in run]
        try:
            return await self._appended(run)
        except InputError as error:
            if len(run) == 1:
                return [
                    AppendResult(
                        next(_event_ids(run[0].line), None),
                        "invalid",
                        str(error),
                    )
                ]
        return [answer for entry in run for answer in await self._answers([entry])]

    async def _appended(self, run: list[QueuedLine]) -> list[AppendResult]:
        """Append a run; again if the result of a COMMIT was lost."""
        version, origin = run[0].line.room_version, run[0].origin
        states_before = {
            event_id: tuple(map(EventId, ids))
            for entry in run
            for event_id, ids in _state_before(entry.line)
        }
        shown = {event_id: stripped for entry in run for event_id, stripped in _shown(entry.line)}
        refused = {event_id: reason for entry in run for event_id, reason in _refused(entry.line)}
        append = partial(
            self._store.append,
            [entry.line.pdu for entry in run],
            room_version=version,
            origin=origin,
            state_before=states_before,
            stripped_state=shown,
            refused=refused,
            room_versions=_named_versions(run),
        )
        return await _repeated(append)

    async def _readmitted(self, line: Line) -> AppendResult:
        """Readmit the event of a line. It waits if the event is not stored."""
        event_id = next(_event_ids(line), None)
        if event_id is None:
            return AppendResult(None, "invalid", "the event to readmit cannot be read")
        try:
            return await _repeated(partial(self._store.readmit, event_id))
        except UnknownEvent:
            reason = "the event to readmit is not stored"
            return AppendResult(event_id, "missing_parents", reason, missing=(event_id,))
        except InputError as error:
            return AppendResult(event_id, "invalid", str(error))

    def _retry_later(self, entry: QueuedLine, result: AppendResult) -> None:
        outcome: RejectOutcome = (
            "missing_parents" if result.outcome == "missing_parents" else "invalid"
        )
        reject = Reject(outcome, result.reason or "", result.event_id, result.missing)
        self._retries.add(
            RetryLine(
                entry.line.depth or 0.0, entry.source, entry.number, entry.raw, reject.encode()
            )
        )

    def _reject(self, source: str, number: int, raw: bytes, reject: Reject) -> None:
        self.summary.outcomes[reject.outcome] += 1
        self._rejects.write(source, number, raw, reject)


async def _repeated(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a call; call again if the result of a COMMIT was lost."""
    for _ in range(1, COMMIT_ATTEMPTS):
        try:
            return await call()
        except CommitUnknown:
            continue
    return await call()


def room_of(line: Line) -> str:
    """Return the room of a line, by which lines are ordered; empty if unknown (an invalid PDU)."""
    if line.room_id is not None:
        return line.room_id
    try:
        pdu = peek(line.pdu) or {}
        # from room version 12 on, a room's id is the hash of its create event
        return parse(line.pdu, str(pdu["content"]["room_version"])).room_id
    except (KeyError, TypeError, InvalidEvent, UnknownRoomVersion):
        return NO_ROOM


def _line_of(raw: RawLine) -> Line:
    if not raw.whole:
        raise InvalidEvent(f"longer than {LINE_BYTES_MAX} bytes")
    line = _without_extra_keys(read_line(raw.raw))
    if line.state_before is not None and line.room_version not in ROOM_VERSIONS:
        raise InvalidEvent("state_before needs a room_version that is known")
    if (line.refused is not None or line.readmit) and line.room_version not in ROOM_VERSIONS:
        raise InvalidEvent("refused and readmit need a room_version that is known")
    return line


def _without_extra_keys(line: Line) -> Line:
    pdu = without_extra_keys(line.pdu)
    return line if pdu is None else replace(line, pdu=pdu, stray_keys=True)


def _named_versions(run: Iterable[QueuedLine]) -> dict[str, str]:
    """Return the versions that lines name, by room: they stand before what a create event says."""
    lines = (entry.line for entry in run)
    return {line.room_id: line.room_version for line in lines if line.room_id and line.room_version}


def _event_ids(line: Line) -> Iterator[EventId]:
    """Yield the id of the event of a line whose room version is known; else nothing."""
    if line.room_version is not None and line.room_version in ROOM_VERSIONS:
        with suppress(InvalidEvent):  # the append reports it
            yield parse(line.pdu, line.room_version).event_id


def _state_before(line: Line) -> Iterator[tuple[EventId, tuple[str, ...]]]:
    """Yield the event of a line that gives the state before it, with that state; else nothing."""
    if line.state_before is not None:
        for event_id in _event_ids(line):
            yield event_id, line.state_before


def _refused(line: Line) -> Iterator[tuple[EventId, str]]:
    """Yield the event of a line with a verdict, with the reason; else nothing."""
    if line.refused is not None:
        for event_id in _event_ids(line):
            yield event_id, line.refused


def _shown(line: Line) -> Iterator[tuple[EventId, tuple[dict[str, Any], ...]]]:
    """Yield the event of a line that gives stripped state, with that; else nothing."""
    if line.stripped_state is not None:
        for event_id in _event_ids(line):
            yield event_id, line.stripped_state


def _lacks_its_room(entry: QueuedLine, result: AppendResult) -> bool:
    """Return whether the room's version is unknown: its create event may follow later."""
    return (
        result.outcome == "invalid"
        and result.event_id is None
        and entry.line.room_version is None
        and room_of(entry.line) != NO_ROOM
    )
