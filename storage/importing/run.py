"""The import: once through the files, then the waiting lines again until no more are stored.

An append is idempotent, so you can run an interrupted import again: stored events return
"duplicate".
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from storage.errors import (
    CommitUnknown,
    InputError,
    InvalidEvent,
    StorageError,
    UnknownEvent,
    UnknownRoomVersion,
)
from storage.event import ROOM_VERSIONS, glance, parse
from storage.event.ndjson import Line, read_line
from storage.event.reading import without_stray_keys
from storage.ids import EventId
from storage.importing.reading import LINE_BYTES_MAX, FilePiece, RawLine, read_pieces
from storage.importing.rejects import Reject, RejectOutcome, Rejects
from storage.importing.retry_queue import IN_MEMORY_MAX, RetryLine, RetryQueue
from storage.importing.room_queues import BATCH_MAX, QueuedLine, RoomQueues
from storage.observability.progress import Counted, Report, silent
from storage.persist import AppendResult
from storage.store.facade import Store

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

    ``batch_max`` events go into one append, ``held_max`` waiting lines stay in memory.
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
        held_max: int = IN_MEMORY_MAX,
    ) -> None:
        self.summary: Summary = Summary()
        self._store = store
        self._rejects = rejects
        self._report = report
        unit = "lines" if total_bytes is None else "bytes"
        self._counted = Counted(report, "import", total_bytes, unit)
        self._batch_max = batch_max
        self._held = RetryQueue(in_memory_max=held_max)
        self._sources: list[str] = []

    async def run(self, sources: Sequence[str]) -> Summary:
        """Import the files, ``-`` for standard input, one after the other.

        A `DatabaseError` ends it; run it again to continue.
        """
        self._sources = list(sources)
        with self._held:
            async with self._lanes() as lanes:
                for index, source in enumerate(self._sources):
                    async with aclosing(read_pieces(source)) as pieces:
                        async for piece in pieces:
                            await self._read(index, piece, lanes)
            await self._try_again()
            with closing(self._held.drain()) as unstored:
                for line in unstored:
                    self._reject(
                        self._sources[line.source], line.number, line.raw, Reject.decode(line.note)
                    )
        return self.summary

    @asynccontextmanager
    async def _lanes(self) -> AsyncIterator[RoomQueues]:
        """Open queues for rooms; at the end of the block all queued lines are processed.

        The first error ends everything.
        """
        try:
            async with asyncio.TaskGroup() as group:
                lanes = RoomQueues(group, self._append, batch_max=self._batch_max)
                yield lanes
                await lanes.drain()
        except BaseExceptionGroup as errors:
            if all(isinstance(error, StorageError) for error in errors.exceptions):
                raise errors.exceptions[0] from errors.exceptions[0].__cause__
            raise

    async def _read(self, source: int, piece: FilePiece, lanes: RoomQueues) -> None:
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
                await lanes.put(
                    room_of(line), QueuedLine(source, raw.number, len(raw.raw) + 1, raw.raw, line)
                )

    def _wait(self, source: int, raw: RawLine, line: Line) -> None:
        """Keep a second create event for the next round: the first one is the room's."""
        note = Reject("missing_parents", "the first create event of the room is missing").encode()
        self._held.add(RetryLine(line.depth or 0.0, source, raw.number, raw.raw, note))
        self._count(1, len(raw.raw) + 1)

    def _count(self, lines: int, size: int) -> None:
        """Report that so many lines of ``size`` bytes have their result, or wait."""
        self._counted.add(size if self._counted.unit == "bytes" else lines)

    async def _try_again(self) -> None:
        """Retry the waiting lines in rounds, until a round stores none."""
        settled = -1
        while len(self._held) and settled:
            before = len(self._held)
            self.summary.rounds += 1
            self._counted = Counted(self._report, "import again", before, "lines")
            async with self._lanes() as lanes:
                with closing(self._held.drain()) as waiting:
                    for held in waiting:
                        line = _mended(read_line(held.raw))
                        await lanes.put(
                            room_of(line), QueuedLine(held.source, held.number, 0, held.raw, line)
                        )
            settled = before - len(self._held)

    async def _append(self, run: list[QueuedLine]) -> None:
        """Append a run and record the outcome of each line."""
        for entry, result in zip(run, await self._answers(run), strict=True):
            if result.outcome == "missing_parents" or _lacks_its_room(entry, result):
                self._hold(entry, result)
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
        given = {
            event_id: tuple(map(EventId, ids))
            for entry in run
            for event_id, ids in _state_given(entry.line)
        }
        shown = {event_id: stripped for entry in run for event_id, stripped in _shown(entry.line)}
        refused = {event_id: reason for entry in run for event_id, reason in _refused(entry.line)}
        append = partial(
            self._store.append,
            [entry.line.pdu for entry in run],
            room_version=version,
            origin=origin,
            state_before=given,
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

    def _hold(self, entry: QueuedLine, result: AppendResult) -> None:
        outcome: RejectOutcome = (
            "missing_parents" if result.outcome == "missing_parents" else "invalid"
        )
        reject = Reject(outcome, result.reason or "", result.event_id, result.missing)
        self._held.add(
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
        pdu = glance(line.pdu) or {}
        # from room version 12 on, a room's id is the hash of its create event
        return parse(line.pdu, str(pdu["content"]["room_version"])).room_id
    except (KeyError, TypeError, InvalidEvent, UnknownRoomVersion):
        return NO_ROOM


def _line_of(raw: RawLine) -> Line:
    if not raw.whole:
        raise InvalidEvent(f"longer than {LINE_BYTES_MAX} bytes")
    line = _mended(read_line(raw.raw))
    if line.state_before is not None and line.room_version not in ROOM_VERSIONS:
        raise InvalidEvent("state_before needs a room_version that is known")
    if (line.refused is not None or line.readmit) and line.room_version not in ROOM_VERSIONS:
        raise InvalidEvent("refused and readmit need a room_version that is known")
    return line


def _mended(line: Line) -> Line:
    pdu = without_stray_keys(line.pdu)
    return line if pdu is None else replace(line, pdu=pdu, stray_keys=True)


def _named_versions(run: Iterable[QueuedLine]) -> dict[str, str]:
    """Return the versions that lines name, by room: they stand before what a create event says."""
    lines = (entry.line for entry in run)
    return {one.room_id: one.room_version for one in lines if one.room_id and one.room_version}


def _event_ids(line: Line) -> Iterator[EventId]:
    """Yield the id of the event of a line whose room version is known; else nothing."""
    if line.room_version is not None and line.room_version in ROOM_VERSIONS:
        with suppress(InvalidEvent):  # the append reports it
            yield parse(line.pdu, line.room_version).event_id


def _state_given(line: Line) -> Iterator[tuple[EventId, tuple[str, ...]]]:
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
