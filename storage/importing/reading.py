"""Read files and pipes in pieces and split them into numbered lines.

A pipe may be silent for long. It is read in a thread, so that the lines read so far are stored
meanwhile. The thread waits for the pipe and for a wake-up at once, so that an interrupt never waits
for a line.
"""

import asyncio
import base64
import os
import select
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, Self

import orjson

from storage.errors import ExtraMissing, InputError
from storage.event.ndjson import READMITTED, SECOND_CREATE, envelope

# --------------------------------------------------------------------------------------------------
# Read Parquet as lines: each row becomes the envelope that `storage.event.ndjson` reads.
#
# It needs pyarrow (the extra `spark`). Columns: ``pdu`` (the received bytes), and optionally
# ``room_version``, ``origin``, ``state_before``, ``refused``, ``rejected`` and
# ``arrival_ordering``, as in the files of `room-storage spark export`. Other columns are ignored. A
# row with ``arrival_ordering`` is of a readmitted event, and becomes two lines: refused, and
# readmitted. Of ``rejected`` only a second create event counts.

COLUMNS: Final = (
    "pdu",
    "room_version",
    "origin",
    "state_before",
    "refused",
    "rejected",
    "arrival_ordering",
)
ROWS_MAX: Final = 500
"""Rows read at a time."""

ENVELOPE_BYTES: Final = 64
"""The approximate size of an envelope without its PDU."""


def parquet_bytes(source: str) -> int:
    """Return the approximate number of bytes of its lines.

    Raise `InputError` if it is no Parquet or has no column ``pdu`` of bytes, else `ExtraMissing`.
    """
    with _opened(source) as file:
        names = file.schema_arrow.names
        if "pdu" not in names or not str(file.schema_arrow.field("pdu").type).endswith("binary"):
            raise InputError(f"{source}: there is no column pdu of bytes")
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        columns = [group.column(at) for group in groups for at in range(group.num_columns)]
        pdus = sum(
            column.total_uncompressed_size for column in columns if column.path_in_schema == "pdu"
        )
        return int(pdus + file.metadata.num_rows * ENVELOPE_BYTES)


def read_parquet(source: str) -> Iterator[list[bytes]]:
    """Yield the rows as envelopes, in pages. Raise `InputError` if reading fails midway."""
    with _opened(source) as file:
        names = [name for name in COLUMNS if name in file.schema_arrow.names]
        for batch in file.iter_batches(ROWS_MAX, columns=names):
            yield [line for row in batch.to_pylist() for line in _lines(row)]


def _lines(row: dict[str, Any]) -> list[bytes]:
    pdu, version, origin = row["pdu"] or b"", row.get("room_version"), row.get("origin")
    state = row.get("state_before")
    if row.get("arrival_ordering") is None:
        second = str(row.get("rejected")).startswith(SECOND_CREATE)
        refused = row.get("refused")
        return [envelope(pdu, version, origin, state, refused=refused, second_create=second)]
    return [
        envelope(pdu, version, origin, state, refused=READMITTED),
        envelope(pdu, version, origin, readmit=True),
    ]


@contextmanager
def _opened(source: str) -> Iterator[Any]:
    try:
        import pyarrow as pa  # noqa: PLC0415  # an optional dependency
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise ExtraMissing(f"{source}: Parquet", "spark") from None
    try:
        with Path(source).open("rb") as raw, pq.ParquetFile(raw) as file:
            yield file
    except OSError as error:
        raise InputError(f"{source}: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise InputError(f"{source}: {error}") from None


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


# --------------------------------------------------------------------------------------------------
# The file of lines that were not stored: NDJSON that can be inspected and imported again.
#
# Each line is one object:
#
#   {"file": "room.ndjson", "line": 12, "outcome": "missing_parents", "event_id": "$…",
#    "reason": "…", "missing": ["$…"], "text": "…"}
#
# ``text`` is the line unchanged; if it is not UTF-8, there is ``base64`` instead. Lines that could
# be imported later: `jq -r 'select(.outcome == "missing_parents") | .text'`.

RejectOutcome = Literal["bad_line", "invalid", "missing_parents"]
TEXT_BYTES_MAX = 1 << 20
"""The number of bytes kept of a longer line."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Why one line was not stored."""

    outcome: RejectOutcome
    reason: str
    event_id: str | None = None
    missing: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the bytes for `RetryLine.note`."""
        return orjson.dumps(self)

    @classmethod
    def decode(cls, note: bytes) -> Self:
        fields: dict[str, Any] = orjson.loads(note)
        return cls(
            fields["outcome"], fields["reason"], fields["event_id"], tuple(fields["missing"])
        )


class Rejects:
    """Counts rejects, and writes them if there is a file."""

    def __init__(self, target: IO[bytes] | None) -> None:
        self._target = target
        self.count: int = 0

    def write(self, source: str, number: int, raw: bytes, reject: Reject) -> None:
        """Write one line that was not stored."""
        self.count += 1
        if self._target is None:
            return
        fields: dict[str, object] = {
            "file": source,
            "line": number,
            "outcome": reject.outcome,
            "event_id": reject.event_id,
        }
        fields["reason"] = reject.reason
        if reject.missing:
            fields["missing"] = reject.missing
        self._target.write(orjson.dumps(fields | _shown(raw)) + b"\n")


def _shown(raw: bytes) -> dict[str, str]:
    kept = raw.rstrip(b"\r")[:TEXT_BYTES_MAX]
    try:
        return {"text": kept.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(kept).decode()}
