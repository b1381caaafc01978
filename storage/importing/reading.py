"""Read files and pipes in pieces and split them into numbered lines.

A pipe may be silent for long. It is read in a thread, so that the lines read so far are stored
meanwhile. The thread waits for the pipe and for a wake-up at once, so that an interrupt never waits
for a line.
"""

import asyncio
import os
import select
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from storage.errors import InputError
from storage.importing.parquet import parquet_bytes, read_parquet

STANDARD_INPUT: Final = "-"
CHUNK_BYTES: Final = 1 << 18
LINE_BYTES_MAX: Final = 16 << 20
"""A PDU has at most 64 KiB; its envelope may list the state before it, which may be large."""

PARQUET: Final = ".parquet"
OTHER_FORMATS: Final = {
    b"\x1f\x8b": "is compressed: use `gunzip -c FILE | room-storage import -`",
    b"\x28\xb5\x2f\xfd": "is compressed: use `zstd -dc FILE | room-storage import -`",
    b"PAR1": f"is Parquet: give it a name that ends with {PARQUET}",
}
"""The first bytes of files that are no NDJSON, and what to do."""
FORMAT_BYTES: Final = 4
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class RawLine(NamedTuple):
    """A line of a file, without the line break.

    ``whole`` is False if it was too long and cut off.
    """

    source: str
    number: int
    raw: bytes
    whole: bool


@dataclass(slots=True)
class Splitter:
    """Splits pieces of a file into lines. Empty lines are counted and omitted."""

    source: str
    line_bytes_max: int = LINE_BYTES_MAX
    _number: int = 0
    _parts: list[bytes] = field(default_factory=list)
    _length: int = 0

    def feed(self, chunk: bytes) -> Iterator[RawLine]:
        """Yield the lines that end in this piece."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._keep(part)
            yield from self._line()
        self._keep(rest)

    def end(self) -> Iterator[RawLine]:
        """Yield the last line, if no line break ended it."""
        if self._length:
            yield from self._line()

    def _keep(self, part: bytes) -> None:
        room = self.line_bytes_max - self._length
        if room > 0:
            self._parts.append(part[:room])
        self._length += len(part)

    def _line(self) -> Iterator[RawLine]:
        raw, length = b"".join(self._parts), self._length
        self._number += 1
        self._parts, self._length = [], 0
        if self._number == 1:
            raw = raw.removeprefix(BYTE_ORDER_MARK)
        if raw.strip():
            yield RawLine(self.source, self._number, raw, length <= self.line_bytes_max)


class FilePiece(NamedTuple):
    """The lines from one read of a file, and how many bytes it read."""

    lines: list[RawLine]
    size: int


def check_readable(source: str) -> int | None:
    """Return the approximate number of bytes of its lines, None if that is unknown.

    Raise `InputError` if it cannot be read or has another format.
    """
    if source == STANDARD_INPUT:
        return None
    path = Path(source)
    if path.suffix == PARQUET:
        return parquet_bytes(source)
    try:
        with path.open("rb") as file:
            if not path.is_file():  # a pipe: what is read now is lost
                return None
            _check_format(source, file.read(FORMAT_BYTES))
            return path.stat().st_size
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}") from None


def _check_format(source: str, begin: bytes) -> None:
    """Raise `InputError` for the first bytes of another format: each line would be a reject."""
    for magic, sentence in OTHER_FORMATS.items():
        if begin.startswith(magic):
            raise InputError(f"{source} {sentence}")


async def read_pieces(source: str) -> AsyncGenerator[FilePiece, None]:
    """Yield a file's lines, or the rows of a Parquet file as lines, a piece at a time.

    Raise `InputError` if reading fails midway.
    """
    if source != STANDARD_INPUT and Path(source).suffix == PARQUET:
        first = 1
        for lines in read_parquet(source):
            yield FilePiece(
                [
                    RawLine(source, number, raw, len(raw) <= LINE_BYTES_MAX)
                    for number, raw in enumerate(lines, first)
                ],
                0,
            )
            first += len(lines)
        return
    async with aclosing(read_lines(source)) as pieces:
        async for piece in pieces:
            yield piece


async def read_lines(source: str) -> AsyncGenerator[FilePiece, None]:
    """Yield the lines of a text file or a pipe."""
    splitter, begins = Splitter(source), True
    try:
        async with aclosing(_chunks(source)) as chunks:
            async for chunk in chunks:
                if begins:
                    _check_format(source, chunk)
                    begins = False
                yield FilePiece(list(splitter.feed(chunk)), len(chunk))
    except OSError as error:
        raise InputError(f"{source}: {error.strerror}") from error
    yield FilePiece(list(splitter.end()), 0)


async def _chunks(source: str) -> AsyncGenerator[bytes, None]:
    file = 0 if source == STANDARD_INPUT else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    woken, wake = os.pipe()
    try:
        while True:
            reading = asyncio.ensure_future(asyncio.to_thread(_read, file, woken))
            try:
                chunk = await asyncio.shield(reading)
            except asyncio.CancelledError:
                os.write(wake, b"!")
                await asyncio.wait([reading])
                raise
            if not chunk:
                return
            yield chunk
    finally:
        os.close(woken)
        os.close(wake)
        if source != STANDARD_INPUT:
            os.close(file)


def _read(file: int, woken: int) -> bytes:
    """Read the next available bytes; none at the end of the file, or after a wake-up."""
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    waiting.register(woken, select.POLLIN)
    ready = {descriptor for descriptor, _ in waiting.poll()}
    return b"" if woken in ready else os.read(file, CHUNK_BYTES)
