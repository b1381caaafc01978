"""Read ranges of archive files in executors, line by line, parsing each once.

The bytes of a PDU are cut out of its line and parsed by orjson once; `storage.event.parse` uses
that result. This works for lines that are a PDU. It also works for envelopes of the usual form,
where ``pdu`` comes first and short texts follow. The bytes in between are a JSON object by
themselves, and parsing proves it. All other lines go through `storage.event.ndjson`, which is
slower and knows all forms.
"""

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, Final, Literal, NamedTuple, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from storage.errors import InputError, InvalidEvent
from storage.event import peek
from storage.event.ndjson import ORIGINS, READMITTED, SECOND_CREATE, Origin, pdus_of, read_line
from storage.event.reading import without_extra_keys
from storage.graph.topological_ordering import topological_sort
from storage.persist.receive import reason_of
from storage.pipeline.file_systems import below
from storage.pipeline.file_systems import opened as opened  # noqa: PLC0414  # users import it here

PIECE_BYTES: Final = 1 << 20
LINE_BYTES_MAX: Final = 16 << 20
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
ROWS_MAX: Final = 2_000
"""Rows of Parquet read at a time."""

FILE_SHIFT: Final = 40
"""A place is the number of a file, shifted by this, plus the number of a line in it."""

ANSWER_SHIFT: Final = 16
"""The shift of a response's number in a file with /backfill responses.

The number of a PDU is that of its response, shifted by this, plus its index from 1.
"""

_BEGIN: Final = re.compile(rb'[ \t\r]*\{[ \t\r]*"pdu"[ \t\r]*:[ \t\r]*(?=\{)')
_MEMBER: Final = (
    rb'[ \t\r]*,[ \t\r]*"(?:room_version"[ \t\r]*:[ \t\r]*"([^"\\]*)"'
    rb'|origin"[ \t\r]*:[ \t\r]*"(live|backfill|outlier|out_of_band)"'
    rb'|state_before"[ \t\r]*:[ \t\r]*(\[[^\]\\]*\]))'
)
_MEMBERS: Final = re.compile(_MEMBER)
_END: Final = re.compile(rb"(?:" + _MEMBER + rb"){0,3}[ \t\r]*")
FEW_BYTES: Final = 128
"""So long are the members of an envelope without a state, at most."""


class LineContent(NamedTuple):
    """The content of a line or row. ``header``: the PDU as orjson reads it, {} where it cannot.

    ``readmit``: the event of an earlier line is readmitted. ``second``: a second create event of
    its room, which is stored after the first one. ``arrived``: the row is of a readmitted event,
    which arrived at this position and was refused then.
    """

    pdu: bytes
    header: dict[str, Any]
    room_version: str | None
    origin: Origin
    state_before: tuple[str, ...] | None
    refused: str | None = None
    readmit: bool = False
    arrived: int | None = None
    second: bool = False

    def without_old_keys(self) -> "LineContent":
        """Return it without the keys of old servers, if the content hash fits only so."""
        pdu = without_extra_keys(self.pdu)
        return self if pdu is None else self._replace(pdu=pdu, header=peek(pdu) or {})

    def steps(self, rank: int) -> list[tuple[int, "LineContent"]]:
        """Return what to do with the event, each with its rank; ``rank`` is that of the row."""
        if self.arrived is None:
            return [(rank, self)]
        arrival = self._replace(arrived=None, refused=READMITTED)
        return [(self.arrived, arrival), (rank, self._replace(arrived=None, readmit=True))]


class FileRange(NamedTuple):
    """The range that one task reads, from ``begin`` to before ``end``.

    It has the lines of a file that begin in this byte range, or its row groups by number. Or it is
    a file with /backfill responses, or a range of stream orderings of a Synapse, whose DSN is then
    ``path``. ``at``: the index of the path among those given; ``file``: the index of the file among
    all; ``within``: its index in its path. ``number``: of the first line or row, from 1; ``lines``:
    how many there are at most.
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

    def __repr__(self) -> str:
        path = "…" if self.kind == "synapse" else self.path  # a DSN may contain a password
        return f"FileRange({self.kind!r}, {path!r}, {self.begin}, {self.end})"

    @property
    def places(self) -> tuple[int, int]:
        """Return the range of places under which the bytes of its lines are staged."""
        return place_of(self.file, self.number), place_of(self.file, self.number + self.lines)


class EnvelopeMembers(NamedTuple):
    """The members of an envelope but `pdu`, as in `LineContent`."""

    room_version: str | None
    origin: Origin
    state_before: tuple[str, ...] | None


class ParsedLine(NamedTuple):
    """A line: its rank among the lines of its path, the place of its bytes, and its content.

    ``content`` is an error for a bad line.
    """

    rank: int
    place: int
    content: LineContent | InvalidEvent
    raw: bytes


def read_answer(span: FileRange) -> Iterator[ParsedLine]:
    """Yield the PDUs of a file with /backfill responses, byte for byte.

    The file has one response, or one on each line. Raise `OSError`, or `InputError` if it is too
    long.
    """
    base, within = place_of(span.file, 0), place_of(span.within, 0)
    for number, raw in answers_of(span):
        if number >= 1 << (FILE_SHIFT - ANSWER_SHIFT):
            raise InputError(f"{span.path} has {number} answers or more: split it")
        first = number << ANSWER_SHIFT
        try:
            pdus = pdus_of(raw)
            if len(pdus) >= 1 << ANSWER_SHIFT:
                reason = f"an answer of {len(pdus)} PDUs"
                raise InvalidEvent(reason)  # noqa: TRY301  # one more defect of an answer
        except InvalidEvent as error:
            yield ParsedLine(within + first, base + first, error, raw[:LINE_BYTES_MAX])
            continue
        for at, pdu in enumerate(pdus, first + 1):
            yield ParsedLine(
                within + at,
                base + at,
                LineContent(pdu, peek(pdu) or {}, None, "backfill", None),
                pdu,
            )


def answers_of(span: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield a file's responses, numbered from 1: its lines if these are responses, else all."""
    lines = ((number, raw) for number, raw in enumerate(lines_of(span), 1) if raw.strip())
    number, first = next(lines, (1, b""))
    if not _is_json(first):
        where, path = opened(span.path)
        with where.open_input_file(path) as file:
            whole = file.read()
        if _is_json(whole) or not any(b'"pdus"' in raw and _is_json(raw) for raw in lines_of(span)):
            yield 1, whole
            return
    yield number, first
    yield from lines


def answered(number: int) -> tuple[int, int]:
    """Return the number of a response in its file, and of the PDU; 0 for the response itself."""
    return number >> ANSWER_SHIFT, number & ((1 << ANSWER_SHIFT) - 1)


def _is_json(raw: bytes) -> bool:
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return True


def place_of(file: int, number: int) -> int:
    """Return the place under which the bytes of a line are staged."""
    return (file << FILE_SHIFT) + number


def placed(place: int) -> tuple[int, int]:
    """Return the file, and the number of the line."""
    return place >> FILE_SHIFT, place & ((1 << FILE_SHIFT) - 1)


def read(span: FileRange) -> Iterator[ParsedLine]:
    """Yield the rows of a range.

    Raise `pyarrow.ArrowException` or `OSError` where the file cannot be read.
    """
    return READERS[span.kind](span)


# ------------------------------------------------------------------------------------------------
# lines


def _read_lines(span: FileRange) -> Iterator[ParsedLine]:
    base, within = place_of(span.file, 0), place_of(span.within, 0)
    for number, raw in enumerate(lines_of(span), span.number):
        if raw.strip():
            yield ParsedLine(within + number, base + number, _content(raw), raw)


def _content(raw: bytes) -> LineContent | InvalidEvent:
    try:
        return parse_line(raw)
    except InvalidEvent as error:
        return error


def parse_line(raw: bytes) -> LineContent:
    """Return the content of a line of NDJSON. Raise `InvalidEvent` for a bad one."""
    begin = _BEGIN.match(raw)
    content = _alone(raw) if begin is None else _enveloped(raw, begin.end())
    if content is not None:
        return content
    line = read_line(raw)
    return LineContent(
        line.pdu,
        peek(line.pdu) or {},
        line.room_version,
        line.origin or "live",
        line.state_before,
        _reason(line.refused),
        line.readmit,
        second=line.second_create,
    )


def _reason(refused: str | None) -> str | None:
    """Return the reason of a verdict. Raise `InvalidEvent` for one that `append` would refuse."""
    if refused is None:
        return None
    try:
        return reason_of(refused)
    except InputError as error:
        raise InvalidEvent(str(error)) from None


def _alone(raw: bytes) -> LineContent | None:
    """Return the content of a line that is a PDU; None for other lines."""
    pdu = raw.strip(b" \t\r\n")
    header = peek(pdu)
    return (
        None
        if header is None or "sender" not in header
        else LineContent(pdu, header, None, "live", None)
    )


def _enveloped(raw: bytes, begin: int) -> LineContent | None:
    """Return the content of an envelope of the usual form; None for others."""
    end = raw.rfind(b"}")
    cut = raw.rfind(b"}", begin, end) + 1
    if not cut or raw[end + 1 :].strip(b" \t\r\n"):
        return None
    after = raw[cut:end]
    members = (_few_members if len(after) <= FEW_BYTES else _members)(after)
    pdu = raw[begin:cut]
    if members is None or (header := peek(pdu)) is None:
        return None  # not an object by itself
    return LineContent(pdu, header, *members)


def _members(after: bytes) -> EnvelopeMembers | None:
    """Return what follows the PDU in an envelope; None where that has another form."""
    if _END.fullmatch(after) is None:
        return None
    members = _MEMBERS.findall(after)
    if len({match.index(max(match)) for match in members}) < len(members):
        return None  # a repeated key
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
    if state is not None and not all(isinstance(event_id, str) for event_id in state):
        return None
    return EnvelopeMembers(version, origin, state)


_few_members = lru_cache(1_024)(_members)
"""Most lines of a file have the same ones."""


def lines_of(span: FileRange) -> Iterator[bytes]:
    """Yield the lines that begin within the range, each whole and without its line break.

    Lines that are too long are cut off.
    """
    for at, block in _blocks(span):
        yield from _split(block, at)


def lines_with(span: FileRange, mark: bytes) -> tuple[int, list[bytes]]:
    """Return how many lines begin within the range, and those that contain ``mark``."""
    count, lines = 0, list[bytes]()
    for at, block in _blocks(span):
        count += block.count(b"\n") + 1
        if mark in block:
            lines += [line for line in _split(block, at) if mark in line]
    return count, lines


def _blocks(span: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin within the range, many at once, and the offset of each block.

    The last line break is left out.
    """
    where, path = opened(span.path)
    with where.open_input_file(path) as file:
        at = span.begin
        # Skip the rest of a line that began before: only its line break if one begins here.
        if at:
            file.seek(at - 1)
            at += len(_line(file)) - 1
            file.seek(at)
        rest = b""
        while at < span.end and (piece := file.read(PIECE_BYTES)):
            block, found_break, rest = (rest + piece).rpartition(b"\n")
            if not found_break:
                continue
            # The lines after this break begin behind the range.
            last = block.find(b"\n", max(span.end - 1 - at, 0))
            block = block if last < 0 else block[:last]
            yield at, block
            at += len(block) + 1
        if rest and at < span.end:
            yield at, rest


def _split(block: bytes, at: int) -> Iterator[bytes]:
    for line in block.split(b"\n"):
        yield _kept(line, at)
        at += len(line) + 1


def _kept(line: bytes, at: int) -> bytes:
    return (line if at else line.removeprefix(BYTE_ORDER_MARK))[: LINE_BYTES_MAX + 1]


def _line(file: Any) -> bytes:
    """Read the rest of the current line, with its line break."""
    parts: list[bytes] = []
    while piece := file.read(PIECE_BYTES):
        head, found_break, _ = piece.partition(b"\n")
        parts += [head, found_break]
        if found_break:
            break
    return b"".join(parts)


# ------------------------------------------------------------------------------------------------
# Parquet


TAKEN: Final = {
    "pdu": pa.binary(),
    "room_version": pa.string(),
    "origin": pa.string(),
    "state_before": pa.list_(pa.string()),
    "refused": pa.string(),
    "rejected": pa.string(),
    "arrival_ordering": pa.int64(),
}
POSITION: Final = "stream_ordering"
"""The column that gives the order, if there is one, as in exports; null (outliers) comes first."""


def _read_rows(span: FileRange) -> Iterator[ParsedLine]:
    where, path = opened(span.path)
    base, within, number = place_of(span.file, 0), place_of(span.within, 0), span.number
    with where.open_input_file(path) as file:
        parquet = pq.ParquetFile(file)
        names = [name for name in (*TAKEN, POSITION) if name in parquet.schema_arrow.names]
        groups = range(span.begin, span.end)
        for batch in parquet.iter_batches(ROWS_MAX, row_groups=list(groups), columns=names):
            columns = {
                name: batch.column(name).cast(TAKEN.get(name, pa.int64())).to_pylist()
                for name in names
            }
            for index in range(batch.num_rows):
                row = {name: values[index] for name, values in columns.items()}
                rank = (row[POSITION] or 0) if POSITION in row else within + number
                yield ParsedLine(rank, base + number, _parsed_row(row), row["pdu"] or b"")
                number += 1


def _parsed_row(row: dict[str, Any]) -> LineContent | InvalidEvent:
    try:
        return parse_row(row)
    except InvalidEvent as error:
        return error


def parse_row(row: dict[str, Any]) -> LineContent:
    """Return the content of a row of Parquet or of a data frame.

    Raise `InvalidEvent` for a bad one.
    """
    if row.get("pdu") is None:
        raise InvalidEvent("there is no PDU in this row")
    origin, state = row.get("origin") or "live", row.get("state_before")
    if origin not in ORIGINS:
        raise InvalidEvent(f"origin {origin!r} is none of {', '.join(ORIGINS)}")
    checked_origin = cast("Origin", origin)
    return LineContent(
        row["pdu"],
        peek(row["pdu"]) or {},
        row.get("room_version"),
        checked_origin,
        None if state is None else tuple(state),
        _reason(row.get("refused")),
        arrived=row.get("arrival_ordering") if row.get(POSITION) is not None else None,
        second=str(row.get("rejected")).startswith(SECOND_CREATE),
    )


def rows_of(batch: pa.RecordBatch, names: Sequence[str] = tuple(TAKEN)) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch of a data frame, with those of these columns that it has."""
    yield from batch.select([name for name in names if name in batch.schema.names]).to_pylist()


READERS: Final[dict[str, Callable[[FileRange], Iterator[ParsedLine]]]] = {
    "lines": _read_lines,
    "rows": _read_rows,
    "answer": read_answer,
}
"""The readers by kind; `storage.pipeline.synapse.source` has a separate one."""


# --------------------------------------------------------------------------------------------------
# The files of an import, and the ranges of them that executors read.
#
# NDJSON is read by byte ranges, with true line numbers, and Parquet by row groups. Files with
# /backfill responses are read whole: one response per file, or one per line. They are recognised by
# their name, ``….json``, or by their first bytes. Paths are those of
# `storage.pipeline.file_systems`, and must mean the same on every executor.

RANGE_BYTES_MAX: Final = 32 << 20
RANGE_BYTES_MIN: Final = 1 << 20
RANGES_EACH: Final = 3
"""Ranges of NDJSON per concurrent task, unless they become too small or too large."""

SMALL_FILES_MAX: Final = 1_000
"""The maximum number of small ranges per task."""

ANSWER: Final = re.compile(
    rb'\s*\{(?:\s*"(?:origin|origin_server_ts)"\s*:\s*(?:"[^"]*"|[0-9]+)\s*,)*\s*"pdus"\s*:\s*\['
)
"""The start of a file with /backfill responses."""

HEAD_BYTES: Final = 4096


class ArchiveFile(NamedTuple):
    """A file to import.

    ``at``: the index of its path among those given; ``within``: its index in that path. ``groups``:
    the numbers of rows in its row groups (Parquet). ``is_answer``: it has /backfill responses.
    """

    at: int
    within: int
    path: str
    size: int
    groups: tuple[int, ...] | None = None
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class ArchiveFiles:
    """The files to import; ``broken``: Parquet files that cannot be read, with the reason."""

    files: tuple[ArchiveFile, ...]
    broken: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the file names for dead letters."""
        return tuple(one.path for one in self.files)

    def line_of(self, file: int, number: int) -> tuple[int | None, int | None]:
        """Return the line or row for dead letters, and the PDU's index in a /backfill response."""
        line, pdu = answered(number) if self.files[file].is_answer else (number, 0)
        return line or None, pdu or None

    def ranges(self, tasks: int) -> list[FileRange]:
        """Return all ranges, in the order of the files; `numbered` adds line numbers later.

        Each task gets the same number of ranges, so that none waits long.
        """
        total = sum(one.size for one in self.files if one.groups is None)
        each = max(RANGES_EACH, ceil(total / (tasks * RANGE_BYTES_MAX)))
        length = max(ceil(total / (tasks * each)), RANGE_BYTES_MIN)
        return [span for file, one in enumerate(self.files) for span in _of_file(file, one, length)]


def found(paths: Sequence[str]) -> ArchiveFiles:
    """Return the files of these paths.

    Raise `InputError` for a missing path or an unknown format.
    """
    files: list[ArchiveFile] = []
    broken: dict[str, str] = {}
    for at, path in enumerate(paths):
        where, inner = opened(path)
        info = where.get_file_info(inner)
        if info.type == fs.FileType.NotFound:
            raise InputError(f"{path}: there is no such file or folder")
        infos = [info] if info.type == fs.FileType.File else _files(where, inner)
        tables = [one for one in infos if one.path.endswith(".parquet")]
        if not tables and any(one.path.endswith((".gz", ".zst", ".zip")) for one in infos):
            raise InputError(f"{path}: compressed files cannot be read in parts: unpack them")
        for within, one in enumerate(tables or infos):
            full = _named(path, one.path.removeprefix(inner).lstrip("/"), one.path)
            try:
                groups = _groups(where, one.path) if tables else None
                files.append(
                    ArchiveFile(
                        at,
                        within,
                        full,
                        one.size,
                        groups,
                        is_answer=groups is None and _is_answer(where, one.path),
                    )
                )
            except (pa.ArrowException, OSError, InputError) as error:
                broken[one.path] = str(error)
    return ArchiveFiles(tuple(files), broken)


def _named(path: str, rest: str, inner: str) -> str:
    """Return how executors open a file: ``rest`` of its path is below ``path``."""
    if "://" not in path:
        return inner
    return below(path, rest) if rest else path


def literal(path: str) -> str:
    """Return a path that Spark reads literally: some characters would be patterns."""
    return re.sub(r"([\\\[\]{}*?])", r"\\\1", path)


def numbered(
    ranges: Iterable[FileRange], counts: Mapping[tuple[int, int], int]
) -> Iterator[FileRange]:
    """Yield the ranges with the number of the first line of each.

    ``counts``: lines by file and first byte.
    """
    number, file = 1, None
    for one in ranges:
        if one.kind != "lines":
            yield one
            continue
        number, file = (number if one.file == file else 1), one.file
        count = counts[one.file, one.begin]
        yield one._replace(number=number, lines=count)
        number += count


def together(ranges: Sequence[FileRange]) -> list[list[FileRange]]:
    """Return the ranges of each task: one, or as many consecutive small ones as fill a task."""
    tasks: list[list[FileRange]] = []
    room = 0
    for one in ranges:
        size = _size(one)
        if size > room or len(tasks[-1]) >= SMALL_FILES_MAX:
            tasks.append([])
            room = RANGE_BYTES_MIN
        tasks[-1].append(one)
        room -= size
    return tasks


def bounded(tasks: Sequence[list[FileRange]], most: int | None) -> list[list[FileRange]]:
    """Return the same in at most ``most`` tasks, so that no more run at once.

    The next ranges always go to the task with the least work.
    """
    if most is None or len(tasks) <= most:
        return list(tasks)
    shares: list[list[FileRange]] = [[] for _ in range(most)]
    loads = [(0, index) for index in range(most)]
    for some in tasks:
        load, index = heapq.heappop(loads)
        shares[index] += some
        heapq.heappush(loads, (load + sum(_size(one) for one in some), index))
    return shares


def _size(span: FileRange) -> int:
    return span.end - span.begin if span.kind in {"lines", "answer"} else RANGE_BYTES_MIN


def _of_file(file: int, archive_file: ArchiveFile, length: int) -> Iterator[FileRange]:
    if archive_file.is_answer:
        yield FileRange(
            "answer",
            archive_file.at,
            file,
            archive_file.within,
            archive_file.path,
            0,
            archive_file.size,
            0,
            1 << FILE_SHIFT,
        )
        return
    if archive_file.groups is None:
        for begin in range(0, archive_file.size, length):
            yield FileRange(
                "lines",
                archive_file.at,
                file,
                archive_file.within,
                archive_file.path,
                begin,
                min(begin + length, archive_file.size),
            )
        return
    number = 1
    for group, rows in enumerate(archive_file.groups):
        yield FileRange(
            "rows",
            archive_file.at,
            file,
            archive_file.within,
            archive_file.path,
            group,
            group + 1,
            number,
            rows,
        )
        number += rows


def _is_answer(where: Any, path: str) -> bool:
    if path.endswith(".json"):
        return True
    with where.open_input_file(path) as file:
        return ANSWER.match(file.read(HEAD_BYTES)) is not None


def _files(where: Any, folder: str) -> list[Any]:
    """Return data files below a folder, by name.

    Spark writes other files, whose names begin with ``_`` or ``.``; they are skipped.
    """
    infos = where.get_file_info(fs.FileSelector(folder, recursive=True))
    files = [
        info for info in infos if info.type == fs.FileType.File and info.base_name[0] not in "_."
    ]
    return sorted(files, key=lambda info: str(info.path))


def _groups(where: Any, path: str) -> tuple[int, ...]:
    """Return the numbers of rows in each row group of a Parquet file, from its footer."""
    with where.open_input_file(path) as file:
        parquet = pq.ParquetFile(file)
        if "pdu" not in parquet.schema_arrow.names:
            raise InputError("it has no column pdu")
        return tuple(
            parquet.metadata.row_group(group).num_rows
            for group in range(parquet.metadata.num_row_groups)
        )


# --------------------------------------------------------------------------------------------------
# The order in which the lines of a room are stored.
#
# Each step takes the first line whose dependencies are all stored. This is the order of a reader
# who appends line by line, and returns to a deferred line as soon as it can be stored. A room whose
# lines come in causal order is stored in that order. This is the usual case and costs a dictionary.
# Only the slim graph is in memory: ids and positions, never PDUs.

PARENT: Final = "^"
"""Prefix of a required id that must not be an outlier (`slim_event.needs`)."""


class LineWithoutPdu(NamedTuple):
    """A line without its PDU."""

    event_id: str
    outlier: bool
    needs: Sequence[str]


def order(lines: Sequence[LineWithoutPdu]) -> list[int] | None:
    """Return the indexes of the lines in the order in which to store them; None: as they are.

    Lines of one event keep their order. In a cycle, which the ids of versions 1 and 2 allow, the
    first line goes first.
    """
    first: dict[str, int] = {}
    first_parent: dict[str, int] = {}
    previous: list[int | None] = []
    last: dict[str, int] = {}
    for index, line in enumerate(lines):
        previous.append(last.get(line.event_id))
        last[line.event_id] = index
        first.setdefault(line.event_id, index)
        if not line.outlier:
            first_parent.setdefault(line.event_id, index)
    waits: list[set[int]] = []
    for index, line in enumerate(lines):
        named = {
            first_parent.get(one[1:]) if one.startswith(PARENT) else first.get(one)
            for one in line.needs
        }
        named.add(previous[index])
        waits.append({one for one in named if one is not None and one != index})
    if all(max(befores, default=-1) < index for index, befores in enumerate(waits)):
        return None
    return topological_sort(waits)
