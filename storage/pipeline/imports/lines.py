"""What executors read archives as: stretches of a file, line by line, each opened once.

A line's bytes are cut out of it and read by orjson, once; what orjson has read goes on to
`storage.event.parse`. That is so for lines that are a PDU, and for envelopes of the usual form,
where ``pdu`` stands first and short texts follow: the stretch between is an object by itself, which
its reading proves. Anything else goes through `storage.event.ndjson`, which is slower and knows all
forms.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from storage.errors import InputError, InvalidEvent
from storage.event import glance
from storage.event.ndjson import ORIGINS, Origin, pdus_of, read_line

PIECE_BYTES: Final = 1 << 20
LINE_BYTES_MAX: Final = 16 << 20
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
ROWS_MAX: Final = 2_000
"""Rows of Parquet read at a time."""

FILE_SHIFT: Final = 40
"""A place is the number of a file, shifted by so much, and the number of a line in it."""

ANSWER_SHIFT: Final = 16
"""In a file with answers of /backfill the number of a PDU is that of the answer, shifted by so much, and its own, from 1."""

_BEGIN: Final = re.compile(rb'[ \t\r]*\{[ \t\r]*"pdu"[ \t\r]*:[ \t\r]*(?=\{)')
_MEMBER: Final = (
    rb'[ \t\r]*,[ \t\r]*"(?:room_version"[ \t\r]*:[ \t\r]*"([^"\\]*)"|origin"[ \t\r]*:[ \t\r]*"(live|backfill|outlier|out_of_band)"'
    rb'|state_before"[ \t\r]*:[ \t\r]*(\[[^\]\\]*\]))'
)
_MEMBERS: Final = re.compile(_MEMBER)
_END: Final = re.compile(rb"(?:" + _MEMBER + rb"){0,3}[ \t\r]*")


class LineContent(NamedTuple):
    """What a line or row holds. ``glanced``: the PDU as orjson reads it, {} where it cannot."""

    pdu: bytes
    glanced: dict[str, Any]
    room_version: str | None
    origin: Origin
    state_before: tuple[str, ...] | None


class FileRange(NamedTuple):
    """What one task reads: the lines of a file that begin from byte ``begin`` to before ``end``, or its row groups by number.

    Or a file with answers of /backfill; or stream orderings of a Synapse, whose DSN is then ``path``.
    ``at``: the path's place among those given; ``file``: the file's among all; ``within``: the file's place in its path. ``number``: of the
    first line or row, from 1; ``lines``: how many there are, at most.
    """

    kind: Literal["lines", "rows", "answer", "synapse"]
    at: int
    file: int
    within: int
    path: str
    begin: int
    end: int
    number: int = 1
    lines: int = 0

    @property
    def places(self) -> tuple[int, int]:
        """Where the bytes of its lines are put aside: from, and before."""
        return place_of(self.file, self.number), place_of(self.file, self.number + self.lines)


class ParsedLine(NamedTuple):
    """A line: its place among those of its path, that of its bytes, and what it holds; or what is wrong with it, and its bytes."""

    rank: int
    place: int
    given: LineContent | InvalidEvent
    raw: bytes


def opened(path: str) -> tuple[Any, str]:
    """The file system of a path, and the path in it. `InputError`."""
    try:
        where, at = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: {error}") from None
    return where, at


def read_answer(stretch: FileRange) -> Iterator[ParsedLine]:
    """The PDUs of a file with answers of /backfill, byte for byte: one answer, or one on each line.

    `OSError`; `InputError` if it is too long.
    """
    base, within = place_of(stretch.file, 0), place_of(stretch.within, 0)
    for number, raw in answers_of(stretch):
        if number >= 1 << (FILE_SHIFT - ANSWER_SHIFT):
            raise InputError(f"{stretch.path} has {number} answers or more: split it")
        first = number << ANSWER_SHIFT
        try:
            pdus = pdus_of(raw)
            if len(pdus) >= 1 << ANSWER_SHIFT:
                raise InvalidEvent(f"an answer of {len(pdus)} PDUs")  # noqa: TRY301  # one more thing that is wrong with an answer
        except InvalidEvent as error:
            yield ParsedLine(within + first, base + first, error, raw[:LINE_BYTES_MAX])
            continue
        for at, pdu in enumerate(pdus, first + 1):
            yield ParsedLine(
                within + at,
                base + at,
                LineContent(pdu, glance(pdu) or {}, None, "backfill", None),
                pdu,
            )


def answers_of(stretch: FileRange) -> Iterator[tuple[int, bytes]]:
    """The answers of a file, from number 1: its lines where these are answers by themselves, else all of it."""
    lines = ((number, raw) for number, raw in enumerate(lines_of(stretch), 1) if raw.strip())
    number, first = next(lines, (1, b""))
    if not _is_json(first):
        where, path = opened(stretch.path)
        with where.open_input_file(path) as file:
            whole = file.read()
        if _is_json(whole) or not any(
            b'"pdus"' in raw and _is_json(raw) for raw in lines_of(stretch)
        ):
            yield 1, whole
            return
    yield number, first
    yield from lines


def answered(number: int) -> tuple[int, int]:
    """The number of the answer in its file, and of the PDU in the answer; 0 for the answer itself."""
    return number >> ANSWER_SHIFT, number & ((1 << ANSWER_SHIFT) - 1)


def _is_json(raw: bytes) -> bool:
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return True


def place_of(file: int, number: int) -> int:
    """Where the bytes of a line are put aside."""
    return (file << FILE_SHIFT) + number


def placed(place: int) -> tuple[int, int]:
    """The file, and the number of the line."""
    return place >> FILE_SHIFT, place & ((1 << FILE_SHIFT) - 1)


def read(stretch: FileRange) -> Iterator[ParsedLine]:
    """The rows of a stretch.

    `pyarrow.ArrowException` and `OSError` where the file cannot be read.
    """
    return READERS[stretch.kind](stretch)


# -----------------------------------------------------------------------------------------------------------------
# lines


def _read_lines(stretch: FileRange) -> Iterator[ParsedLine]:
    base, within = place_of(stretch.file, 0), place_of(stretch.within, 0)
    for number, raw in enumerate(lines_of(stretch), stretch.number):
        if raw.strip():
            yield ParsedLine(within + number, base + number, _given(raw), raw)


def _given(raw: bytes) -> LineContent | InvalidEvent:
    try:
        return given_of(raw)
    except InvalidEvent as error:
        return error


def given_of(raw: bytes) -> LineContent:
    """What a line of NDJSON holds. `InvalidEvent` for a bad one."""
    begin = _BEGIN.match(raw)
    found = _alone(raw) if begin is None else _enveloped(raw, begin.end())
    if found is not None:
        return found
    line = read_line(raw)
    return LineContent(
        line.pdu,
        glance(line.pdu) or {},
        line.room_version,
        line.origin or "live",
        line.state_before,
    )


def _alone(raw: bytes) -> LineContent | None:
    """The line of a PDU; None for other lines."""
    pdu = raw.strip(b" \t\r\n")
    glanced = glance(pdu)
    return (
        None
        if glanced is None or "sender" not in glanced
        else LineContent(pdu, glanced, None, "live", None)
    )


def _enveloped(raw: bytes, begin: int) -> LineContent | None:
    """The line of an envelope of the usual form; None for others."""
    end = raw.rfind(b"}")
    cut = raw.rfind(b"}", begin, end) + 1
    after = raw[cut:end]
    if not cut or raw[end + 1 :].strip(b" \t\r\n") or _END.fullmatch(after) is None:
        return None
    pdu = raw[begin:cut]
    glanced = glance(pdu)
    members = _MEMBERS.findall(after)
    if glanced is None or len({one.index(max(one)) for one in members}) < len(members):
        return None  # not an object by itself, or a key that stands twice
    return _opened(pdu, glanced, members)


def _opened(
    pdu: bytes, glanced: dict[str, Any], members: Iterable[tuple[bytes, bytes, bytes]]
) -> LineContent | None:
    version: str | None = None
    origin: Origin = "live"
    state: tuple[str, ...] | None = None
    try:
        for version_text, origin_text, state_text in members:
            if origin_text:
                origin = cast("Origin", origin_text.decode())
            elif state_text:
                state = tuple(orjson.loads(state_text))
            else:
                version = version_text.decode()
    except (orjson.JSONDecodeError, UnicodeDecodeError):
        return None
    if state is not None and not all(isinstance(one, str) for one in state):
        return None
    return LineContent(pdu, glanced, version, origin, state)


def lines_of(stretch: FileRange) -> Iterator[bytes]:
    """The lines that begin within the stretch, the last one to its end, without line breaks.

    Too long ones are cut off.
    """
    for at, block in _blocks(stretch):
        yield from _split(block, at)


def lines_with(stretch: FileRange, mark: bytes) -> tuple[int, list[bytes]]:
    """How many lines begin within the stretch, and those that hold ``mark``."""
    count, found = 0, list[bytes]()
    for at, block in _blocks(stretch):
        count += block.count(b"\n") + 1
        if mark in block:
            found += [line for line in _split(block, at) if mark in line]
    return count, found


def _blocks(stretch: FileRange) -> Iterator[tuple[int, bytes]]:
    """The lines that begin within the stretch, many at once, without the last break; and where they begin."""
    where, path = opened(stretch.path)
    with where.open_input_file(path) as file:
        at = stretch.begin
        if at:  # pass over what is left of a line that began before: nothing but its break if one begins just here
            file.seek(at - 1)
            at += len(_line(file)) - 1
            file.seek(at)
        rest = b""
        while at < stretch.end and (piece := file.read(PIECE_BYTES)):
            block, found_break, rest = (rest + piece).rpartition(b"\n")
            if not found_break:
                continue
            last = block.find(
                b"\n", max(stretch.end - 1 - at, 0)
            )  # what comes after it begins behind the stretch
            block = block if last < 0 else block[:last]
            yield at, block
            at += len(block) + 1
        if rest and at < stretch.end:
            yield at, rest


def _split(block: bytes, at: int) -> Iterator[bytes]:
    for line in block.split(b"\n"):
        yield _kept(line, at)
        at += len(line) + 1


def _kept(line: bytes, at: int) -> bytes:
    return (line if at else line.removeprefix(BYTE_ORDER_MARK))[: LINE_BYTES_MAX + 1]


def _line(file: Any) -> bytes:
    """What is left of the line at hand, with its break."""
    parts: list[bytes] = []
    while piece := file.read(PIECE_BYTES):
        head, found_break, _ = piece.partition(b"\n")
        parts += [head, found_break]
        if found_break:
            break
    return b"".join(parts)


# ---------------------------------------------------------------------------------------------------------------
# Parquet


TAKEN: Final = {
    "pdu": pa.binary(),
    "room_version": pa.string(),
    "origin": pa.string(),
    "state_before": pa.list_(pa.string()),
}
POSITION: Final = "stream_ordering"
"""Where there is such a column, as in exports, it tells the order; what has none (outliers) comes first."""


def _read_rows(stretch: FileRange) -> Iterator[ParsedLine]:
    where, path = opened(stretch.path)
    base, within, number = place_of(stretch.file, 0), place_of(stretch.within, 0), stretch.number
    with where.open_input_file(path) as file:
        parquet = pq.ParquetFile(file)
        names = [name for name in (*TAKEN, POSITION) if name in parquet.schema_arrow.names]
        groups = range(stretch.begin, stretch.end)
        for batch in parquet.iter_batches(ROWS_MAX, row_groups=list(groups), columns=names):
            columns = {
                name: batch.column(name).cast(TAKEN.get(name, pa.int64())).to_pylist()
                for name in names
            }
            for index in range(batch.num_rows):
                row = {name: values[index] for name, values in columns.items()}
                rank = (row[POSITION] or 0) if POSITION in row else within + number
                yield ParsedLine(rank, base + number, _given_row(row), row["pdu"] or b"")
                number += 1


def _given_row(row: dict[str, Any]) -> LineContent | InvalidEvent:
    try:
        return given_of_row(row)
    except InvalidEvent as error:
        return error


def given_of_row(row: dict[str, Any]) -> LineContent:
    """What a row of Parquet, or of a data frame, holds. `InvalidEvent` for a bad one."""
    if row.get("pdu") is None:
        raise InvalidEvent("there is no PDU in this row")
    origin, state = row.get("origin") or "live", row.get("state_before")
    if origin not in ORIGINS:
        raise InvalidEvent(f"origin {origin!r} is none of {', '.join(ORIGINS)}")
    known = cast("Origin", origin)
    return LineContent(
        row["pdu"],
        glance(row["pdu"]) or {},
        row.get("room_version"),
        known,
        None if state is None else tuple(state),
    )


def rows_of(batch: pa.RecordBatch, names: Sequence[str] = tuple(TAKEN)) -> Iterator[dict[str, Any]]:
    """The rows of a batch of a data frame, with those of these columns that it has."""
    yield from batch.select([name for name in names if name in batch.schema.names]).to_pylist()


READERS: Final[dict[str, Callable[[FileRange], Iterator[ParsedLine]]]] = {
    "lines": _read_lines,
    "rows": _read_rows,
    "answer": read_answer,
}
"""By kind; `storage.pipeline.synapse.source` has its own."""
