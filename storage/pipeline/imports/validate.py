"""The first step of an import: validate each line by itself, in executors.

A line is read once, parsed and hashed; its signatures are checked if keys are given. Lines are
independent of each other, and the functions are the pure ones of `Store.append`. The bytes of valid
lines are staged in the database by COPY, one transaction per range. Only the data that planning
needs goes on (`storage.pipeline.imports.validate`), in bundles by room, which wait in files. A
defect of a line becomes a reason. An event that is already stored is a duplicate, and costs one
lookup of its id.
"""

import asyncio
import marshal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Any, Final, LiteralString, NamedTuple

import orjson
import pyarrow as pa
import uvloop
from signedjson.key import decode_verify_key_bytes
from signedjson.types import VerifyKey
from unpaddedbase64 import decode_base64, encode_base64

from storage.arguments import is_text
from storage.codec import Dictionary, encode
from storage.config import Config
from storage.database.arrow_results import ArrowConnection
from storage.database.connection import Connection, Database
from storage.errors import InvalidEvent
from storage.event import ROOM_VERSIONS, Event
from storage.event.model import implied_auth_ids
from storage.event.ndjson import OUTLIERS
from storage.persist import receive
from storage.persist.model.results import AppendResult
from storage.persist.write.streams import writers_dictionary
from storage.pipeline.imports import stage as stages
from storage.pipeline.imports.append_events import BULK_TIMEOUT_MS, spare_collector
from storage.pipeline.imports.intern_names import BundleWriter, spread_number
from storage.pipeline.imports.lines import (
    FileRange,
    LineContent,
    ParsedLine,
    lines_with,
    parse_line,
    place_of,
    read,
)
from storage.pipeline.synapse.source import read_synapse
from storage.rebuild.planner import SlimEvent, slim

# --------------------------------------------------------------------------------------------------
# A list of slim events is packed by `marshal`, which takes a microsecond an event. Packed data
# never outlives the job, which has one version of Python.


def slim_line(event: Event, rank: int, place: int, content: LineContent) -> tuple[Any, ...]:
    return slim(
        event,
        rank,
        place,
        content.origin,
        content.state_before,
        refused=content.refused,
        readmit=content.readmit,
        second=content.second,
    )


def packed(rows: Iterable[Any]) -> bytes:
    return marshal.dumps(list(rows))


def unpacked(data: bytes) -> Iterable[SlimEvent]:
    """Yield the rows again."""
    rows = marshal.loads(data)  # noqa: S302  # the result of `packed` in another task of this job
    return map(SlimEvent._make, rows)


def needs(line: SlimEvent, room_id: str, version: str) -> list[str]:
    """Return the ids that must be stored before this event.

    These are its auth events, and its parents, or the state given instead of them. Parents have a
    leading ``^``: for them an outlier is not enough. A readmission needs the event.
    """
    if line.readmit:
        return ["^" + line.event_id]
    if line.origin == "out_of_band":
        return []
    needed = [*line.auth_events, *implied_auth_ids(ROOM_VERSIONS[version], line.type, room_id)]
    if line.origin == "outlier":
        return needed
    if line.state_before is not None:
        return [*needed, *line.state_before]
    return [*needed, *("^" + parent for parent in line.prev_events)]


# --------------------------------------------------------------------------------------------------
# The versions of rooms, as the tasks of an import look them up.
#
# A room that the store has keeps its version. For others the line says it, or else the first create
# event of the archive, which may be in any file. So a first pass finds the create events, and
# stages what they say in `import_events`, below the places of lines. Tasks that validate lines look
# up the rooms of each chunk. No process has the versions of all rooms.

SQL_STAGE_VERSIONS: Final[LiteralString] = """
WITH staged AS (
    INSERT INTO import_events (place, import_number, json)
    SELECT created.place, $1::int, convert_to(created.line, 'UTF8')
    FROM unnest($2::bigint[], $3::text[]) AS created (place, line)
    ORDER BY created.place
    ON CONFLICT DO NOTHING
    RETURNING place
)
SELECT place FROM staged
"""

SQL_TAKEN_PLACES: Final[LiteralString] = """
SELECT place, json
FROM import_events
WHERE import_number = $1::int AND place = ANY($2::bigint[])
"""

SQL_STORED_VERSIONS: Final[LiteralString] = """
SELECT room_id, room_version
FROM rooms
WHERE room_id = ANY($1::text[])
"""

SQL_STAGED_VERSIONS: Final[LiteralString] = """
SELECT e.json AS created
FROM unnest($2::bigint[]) AS wanted (first)
JOIN import_events e ON e.import_number = $1::int AND e.place >= wanted.first
    AND e.place < wanted.first + $3::bigint
"""

PLACES: Final = 1 << 20
"""Places for what create events say of the rooms with one hash."""

REMEMBERED_MAX: Final = 50_000
"""Rooms in the memory of a task: some 10 MB."""


class StoredVersionRow(NamedTuple):
    """A room that the store has."""

    room_id: str
    room_version: str


class StagedVersionRow(NamedTuple):
    """A `CreatedRoom`, as JSON."""

    created: bytes


class CreatedRoom(NamedTuple):
    """A create event: the file and the range where it is, so that the first one counts."""

    file: int
    begin: int
    room_id: str
    version: str


def first_place(room_id: str) -> int:
    """Return the first of the `PLACES` below 0 for a room id. Rooms may share them."""
    return -(1 + _hash(room_id) % (1 << 43)) * PLACES


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def stage_versions(conn: ArrowConnection, number: int, rooms: Iterable[CreatedRoom]) -> None:
    """Stage what create events say. To do it twice changes nothing.

    Raise `DatabaseConflict` if the import ``number`` has ended.
    """
    left: dict[int, str] = {}
    for room in rooms:
        line = orjson.dumps(list(room)).decode()
        _put(left, first_place(room.room_id), _hash(line), line)
    with stages.working(conn, number):
        while left:
            left = _not_staged(conn, number, left)


def _put(lines: dict[int, str], first: int, offset: int, line: str) -> None:
    """Add a line at its place, or at the next free one."""
    while lines.setdefault(first + offset % PLACES, line) != line:
        offset += 1


def _not_staged(conn: ArrowConnection, number: int, lines: dict[int, str]) -> dict[int, str]:
    """Stage lines; return those whose places have another one, each with its next place."""
    staged = conn.rows(SQL_STAGE_VERSIONS, number, list(lines), list(lines.values()))
    others = lines.keys() - {row["place"] for row in staged}
    taken = conn.rows(SQL_TAKEN_PLACES, number, list(others)) if others else []
    again: dict[int, str] = {}
    for row in taken:
        place, line = row["place"], lines[row["place"]]
        if row["json"] != line.encode():
            _put(again, place - place % PLACES, place % PLACES + 1, line)
    return again


class RoomVersions:
    """The versions that a task knows, and the rooms that the store has.

    ``room_versions`` are those that it knows without the database.
    """

    def __init__(self, number: int, room_versions: Mapping[str, str]) -> None:
        self._number = number
        self._initial = room_versions
        self._looked_up = set[str]()
        self.versions: dict[str, str] = dict(room_versions)
        self.stored: dict[str, str] = {}

    async def learn(self, conn: Connection, room_ids: Iterable[object]) -> None:
        """Look up those of these rooms that were not looked up before."""
        rooms = {one for one in room_ids if is_text(one)}
        new = rooms - self._looked_up
        if not new:
            return
        if len(self._looked_up) + len(new) > REMEMBERED_MAX:
            self._forget()
            new = rooms
        self._looked_up |= new
        places = sorted({first_place(one) for one in new})
        staged = await conn.fetch(
            SQL_STAGED_VERSIONS, self._number, places, PLACES, row=StagedVersionRow
        )
        created = sorted(CreatedRoom(*orjson.loads(row.created)) for row in staged)
        for room in created:
            if room.room_id in new:
                self.versions.setdefault(room.room_id, room.version)
        for row in await conn.fetch(SQL_STORED_VERSIONS, list(new), row=StoredVersionRow):
            self.stored[row.room_id] = row.room_version

    def _forget(self) -> None:
        self._looked_up.clear()
        self.stored.clear()
        self.versions.clear()
        self.versions.update(self._initial)


SQL_STORED: Final[LiteralString] = """
SELECT event_id, outlier
FROM events
WHERE event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
))
"""

EXAMINED: Final = pa.schema(
    [
        ("room_id", pa.string()),
        ("room_version", pa.string()),
        ("path_index", pa.int32()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("events", pa.int64()),
        ("file", pa.string()),
        ("start", pa.int64()),
        ("length", pa.int64()),
        ("place", pa.int64()),
        ("outcome", pa.string()),
        ("event_id", pa.string()),
        ("reason", pa.string()),
        ("pdu", pa.binary()),
    ]
)
"""A bundle of a room's events: ranks from ``first`` to ``last``, and its location.

With an ``outcome``, a row is a reject, or the number of duplicates or of ``stray_keys``.
"""

CHUNK: Final = 1_000
BUNDLE: Final = 2_000
"""Events of one bundle: half a megabyte."""


class AlreadyStoredRow(NamedTuple):
    """A stored event."""

    event_id: str
    outlier: bool


@dataclass(frozen=True, slots=True)
class LineValidator:
    """The settings by which lines are validated.

    ``stored``: the versions of stored rooms; then that of the line; then ``versions`` as create
    events say; then ``room_version``. ``keys``: (server, key id) to the unpadded base64 of a verify
    key; empty: signatures are not checked.
    """

    versions: Mapping[str, str]
    room_version: str | None = None
    keys: Mapping[tuple[str, str], str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)

    def verify_keys(self) -> dict[tuple[str, str], VerifyKey]:
        return {
            (server, key_id): verify_key(key_id, text)
            for (server, key_id), text in self.keys.items()
        }

    def parsed(self, content: LineContent) -> Event | AppendResult:
        """Return the event, or its defect. The bytes come from `LineContent.without_old_keys`."""
        content = content.without_old_keys()
        [room] = receive.room_ids([content.header])
        version = None
        if room is not None:
            version = self.stored.get(room) or content.room_version or self.versions.get(room)
        if version is None:
            named_version = content.room_version or self.room_version
            created: dict[str, str] = {}
            receive.note_create_event(created, content.pdu, content.header)
            [version] = receive.versions([content.header], [room], {}, created, named_version)
        return receive.read(content.pdu, content.header, version)


@dataclass(slots=True)
class Bundle:
    """Events of one room, in the order of a range."""

    path_index: int
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def emitted(self, room_id: str, version: str, writer: BundleWriter) -> dict[str, Any]:
        """Return a row of `EXAMINED`."""
        rows, self.rows = self.rows, []
        ranks = [row[0] for row in rows]
        location = writer.put(packed(rows))
        return {
            "room_id": room_id,
            "room_version": version,
            "path_index": self.path_index,
            "first": min(ranks),
            "last": max(ranks),
            "events": len(rows),
            **location._asdict(),
        }


@dataclass(frozen=True, slots=True)
class TaskValidation:
    """Write lines of ranges into bundles in ``work``, and their bytes into the database of ``dsn``.

    ``number`` is that of the import.
    """

    examiner: LineValidator
    dsn: str = field(repr=False)  # it may contain a password
    number: int
    work: str
    config: Config = field(default_factory=Config.from_env)

    def run(self, ranges: Iterable[FileRange]) -> Iterator[pa.RecordBatch]:
        """Yield `EXAMINED`, at least one batch per range."""
        spare_collector()
        with (
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            BundleWriter(self.work) as writer,
        ):
            stack = AsyncExitStack()
            try:
                database = runner.run(self._opened(stack))
                rooms = RoomVersions(self.number, self.examiner.versions)
                for span in ranges:
                    yield from runner.run(self._span(database, span, writer, rooms))
            finally:
                runner.run(stack.aclose())

    async def _opened(self, stack: AsyncExitStack) -> Database:
        config = replace(self.config, pool_size_max=1, statement_timeout_ms=BULK_TIMEOUT_MS)
        return await stack.enter_async_context(await Database.open(self.dsn, config=config))

    async def _span(
        self, database: Database, span: FileRange, writer: BundleWriter, rooms: RoomVersions
    ) -> list[pa.RecordBatch]:
        async with database.transaction() as conn:
            work = _RangeValidation(self, span.at, writer, rooms, await writers_dictionary(conn))
            await stages.work_for_import(conn, self.number)
            await stages.forget(conn, self.number, *span.places)
            try:
                rows = read_synapse(span) if span.kind == "synapse" else read(span)
                while chunk := list(islice(rows, CHUNK)):
                    await work.take(conn, chunk)
            except (pa.ArrowException, OSError) as error:
                work.reject(
                    place_of(span.file, 0),
                    "bad_file",
                    None,
                    f"{type(error).__name__}: {error}",
                    None,
                )
        return [pa.RecordBatch.from_pylist(rows, schema=EXAMINED) for rows in work.batches()]


class _RangeValidation:
    """One range while it is validated."""

    def __init__(
        self,
        stage: TaskValidation,
        path_index: int,
        writer: BundleWriter,
        rooms: RoomVersions,
        dictionary: Dictionary | None,
    ) -> None:
        self._dictionary = dictionary
        self._rooms = rooms
        self._examiner = replace(stage.examiner, versions=rooms.versions, stored=rooms.stored)
        self._number = stage.number
        self._keys = stage.examiner.verify_keys()
        self._path_index = path_index
        self._writer = writer
        self._bundles: dict[tuple[str, str], Bundle] = {}
        self._done: list[dict[str, Any]] = []
        self._numbers = Counter[str]()

    async def take(self, conn: Connection, chunk: Sequence[ParsedLine]) -> None:
        """Validate some lines, and stage their bytes."""
        events: list[tuple[ParsedLine, LineContent, Event]] = []
        await self._rooms.learn(conn, (_room_of(row) for row in chunk))
        for row in chunk:
            event = self._parsed(row)
            if event is not None and isinstance(row.content, LineContent):
                events.append((row, row.content, event))
        stored = await self._find_stored(conn, events)
        # step by step, which takes a tenth less time than event by event
        signed = [
            one
            for one in events
            if not self._is_duplicate(stored, one) and await self._is_signed(one[0], one[2])
        ]
        for row, content, event in signed:
            self._add(row, content, event)
        staged = [
            (row.place, encode(event.raw, event.event_id, event.room_id, self._dictionary))
            for row, _, event in signed
        ]
        await stages.put(conn, self._number, staged)

    def _is_duplicate(
        self, stored: Mapping[str, bool], line: tuple[ParsedLine, LineContent, Event]
    ) -> bool:
        """Return whether the event is stored, and count it if so."""
        _, content, event = line
        if event.event_id not in stored or content.readmit or content.arrived:
            return False
        if stored[event.event_id] and content.origin not in OUTLIERS:
            return False
        self._numbers["duplicate"] += 1
        return True

    def _parsed(self, row: ParsedLine) -> Event | None:
        if isinstance(row.content, InvalidEvent):
            self.reject(row.place, "bad_line", None, row.content.reason, row.raw)
            return None
        content = row.content.without_old_keys()
        read_ = self._examiner.parsed(content)
        if isinstance(read_, Event):
            self._numbers["stray_keys"] += content is not row.content
            return read_
        self.reject(row.place, read_.outcome, read_.event_id, read_.reason, row.content.pdu)
        return None

    async def _find_stored(
        self, conn: Connection, events: Iterable[tuple[ParsedLine, LineContent, Event]]
    ) -> dict[str, bool]:
        """Return the stored ones of these events, and whether each is only an outlier.

        Only events of rooms that the store has are looked up.
        """
        await self._rooms.learn(conn, {event.room_id for _, _, event in events})
        stored = self._rooms.stored
        ids = [event.event_id for _, _, event in events if event.room_id in stored]
        return (
            {
                row.event_id: row.outlier
                for row in await conn.fetch(SQL_STORED, ids, row=AlreadyStoredRow)
            }
            if ids
            else {}
        )

    async def _is_signed(self, row: ParsedLine, event: Event) -> bool:
        if not self._keys or (wrong := await receive.check_signatures(event, self._keys)) is None:
            return True
        self.reject(row.place, wrong.outcome, wrong.event_id, wrong.reason, event.raw)
        return False

    def _add(self, row: ParsedLine, content: LineContent, event: Event) -> None:
        key = event.room_id, event.room_version.identifier
        *rest, (rank, last) = content.steps(row.rank)
        for at, step in rest:  # far from the others of a bundle: overlapping ones share memory
            alone = Bundle(self._path_index, [slim_line(event, at, row.place, step)])
            self._done.append(alone.emitted(*key, self._writer))
        bundle = self._bundles.get(key)
        if bundle is None:
            bundle = self._bundles[key] = Bundle(self._path_index)
        bundle.rows.append(slim_line(event, rank, row.place, last))
        if len(bundle.rows) >= BUNDLE:
            self._done.append(bundle.emitted(*key, self._writer))

    def reject(
        self, place: int, outcome: str, event_id: str | None, reason: str | None, raw: bytes | None
    ) -> None:
        """Record a line that is not imported."""
        self._done.append(
            {
                "place": place,
                "outcome": outcome,
                "event_id": event_id,
                "reason": reason,
                "events": 1,
                "pdu": raw,
            }
        )

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield all rows of the range; write the small bundles in the order of loading."""
        self._done += [
            {"outcome": name, "events": count} for name, count in self._numbers.items() if count
        ]
        self._done += [
            bundle.emitted(*key, self._writer)
            for key, bundle in sorted(self._bundles.items(), key=_loading_order)
            if bundle.rows
        ]
        for start in range(0, len(self._done), CHUNK):
            yield self._done[start : start + CHUNK]


def _loading_order(entry: tuple[tuple[str, str], Bundle]) -> tuple[int, str]:
    (room_id, _), _ = entry
    return spread_number(room_id), room_id


def _room_of(row: ParsedLine) -> object:
    """Return the room that a line names; a create event may name none."""
    return None if isinstance(row.content, InvalidEvent) else row.content.header.get("room_id")


def scanned_range(span: FileRange) -> tuple[int, dict[str, str]]:
    """Return how many lines a range of NDJSON has, and the versions of rooms created in it.

    For /backfill responses return only the versions.
    """
    if span.kind == "answer":
        return 0, _created_in_answers(span)
    versions = dict[str, str]()
    count, creating = lines_with(span, b"m.room.create")
    for raw in creating:
        for room, version in created(raw).items():
            receive.note_created(versions, room, version)
    return count, versions


def _created_in_answers(span: FileRange) -> dict[str, str]:
    versions = dict[str, str]()
    for row in read(span):
        if isinstance(row.content, LineContent):
            for room, version in created_by(row.content).items():
                receive.note_created(versions, room, version)
    return versions


def created(raw: bytes) -> dict[str, str]:
    """Return the version of the room that this line creates; nothing for other lines."""
    try:
        content = parse_line(raw)
    except InvalidEvent:
        return {}  # the validation reports it
    return created_by(content)


def created_by(content: LineContent) -> dict[str, str]:
    """Return the version of the room that this creates, if it is a create event."""
    if content.header.get("type") != "m.room.create" or content.header.get("state_key") != "":
        return {}
    event = LineValidator({}, content.room_version).parsed(content)
    return {event.room_id: event.room_version.identifier} if isinstance(event, Event) else {}


def key_texts(keys: Mapping[tuple[str, str], VerifyKey]) -> dict[tuple[str, str], str]:
    """Return verify keys as text, to send them to executors."""
    return {name: encode_base64(bytes(key)) for name, key in keys.items()}


def verify_key(key_id: str, text: str) -> VerifyKey:
    return decode_verify_key_bytes(key_id, decode_base64(text))
