"""Rows of the mirror's `events`: every event of the timeline, as an outsider gets it.

The bytes are those received. They are pruned, as by a redaction, if the event is redacted, if only
its redacted form is valid, or if its sender was erased. So censoring changes nothing here.

``arrived`` is the stream ordering with which the event entered the timeline. It is unique and never
changes. ``digest`` is a hash of the columns that may change, so a comparison of a room reads no
text.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, LiteralString, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from storage.database.arrow_results import ArrowConnection
from storage.database.columns import PREV_NIDS
from storage.database.placeholders import compose, fill
from storage.errors import InputError, InvalidEvent
from storage.event import redact
from storage.event.hashes import canonical
from storage.event.reading import read_trusted
from storage.event.versions import version_of
from storage.pipeline.lake.delta_table import (
    MirrorFile,
    commit_files,
    created,
    keep_log,
    last_metadata,
    vacuum,
)
from storage.pipeline.lake.tables import EVENTS, MirrorTable
from storage.pipeline.source.filters import HIGHEST, LOWEST
from storage.pipeline.source.rows import decoded
from storage.pipeline.source.token_bounds import SQL_FIRST_POSITION, Bounds

PART_DIGEST: Final[LiteralString] = """
    hashtextextended(ROW(
        e.stream_ordering, e.topological_ordering, e.audience, e.soft_failed, e.refused, e.rejected,
        e.redacted_form, e.redacted_by IS NULL, redaction.event_id, erased.principal_nid
    )::text, 0) AS digest
"""
PART_REFERENCES: Final[LiteralString] = """
LEFT JOIN events redaction ON redaction.event_nid = e.redacted_by
LEFT JOIN erased_users erased ON erased.principal_nid = e.sender_nid
"""

TEMPLATE_EVENT_MARKS: Final[LiteralString] = """
SELECT e.event_nid, COALESCE(e.arrival_ordering, e.stream_ordering) AS arrived, {digest}
FROM {events}
JOIN unnest($1::bigint[], $2::bool[], $3::bigint[], $4::bigint[]) AS b (writer_nid, backfilled,
    after_id, upto_id)
    ON b.writer_nid = e.writer_nid AND b.backfilled = e.backfilled
{references}
WHERE NOT e.outlier AND e.stream_ordering > b.after_id AND e.stream_ordering <= b.upto_id
    {wanted}
"""
PART_ALL_EVENTS: Final[LiteralString] = "events e"
PART_EVENTS_OF_NIDS: Final[LiteralString] = """
unnest($5::bigint[]) AS w (event_nid)
JOIN events e USING (event_nid)
"""
PART_IN_ROOMS: Final[LiteralString] = """
AND e.room_nid = ANY($5::int[])
"""
PART_IN_RANGE: Final[LiteralString] = """
AND e.stream_ordering >= $5::bigint AND e.stream_ordering <= $6::bigint
"""

TEMPLATE_MIRRORED_EVENTS: Final[LiteralString] = """
SELECT
    COALESCE(e.arrival_ordering, e.stream_ordering) AS arrived,
    e.event_nid,
    e.room_nid::bigint AS room_nid,
    e.event_id,
    r.room_id,
    r.room_version,
    t.type,
    k.state_key,
    p.name AS sender,
    CASE WHEN e.backfilled THEN 'backfill' ELSE 'live' END AS origin,
    e.stream_ordering,
    e.topological_ordering,
    claimed_depth(e.depth, e.topological_ordering) AS depth,
    cardinality(:prev_nids.call(e))::bigint AS prev_count,
    e.origin_server_ts,
    e.received_ts,
    e.audience,
    e.soft_failed,
    e.refused,
    e.rejected,
    e.redacted_by IS NOT NULL AS redacted,
    redaction.event_id AS redacted_by,
    erased.principal_nid IS NOT NULL AS erased,
    e.redacted_by IS NOT NULL OR e.redacted_form OR erased.principal_nid IS NOT NULL AS pruned,
    e.json AS pdu,
    {digest}
FROM unnest($1::bigint[]) AS wanted (event_nid)
JOIN events e USING (event_nid)
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
JOIN principals p ON p.principal_nid = e.sender_nid
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
{references}
WHERE NOT e.outlier
ORDER BY arrived
"""

SQL_MARKS_OF_NIDS: Final[LiteralString] = fill(
    TEMPLATE_EVENT_MARKS,
    digest=PART_DIGEST,
    events=PART_EVENTS_OF_NIDS,
    references=PART_REFERENCES,
    wanted="",
)
SQL_MARKS_OF_ROOMS: Final[LiteralString] = fill(
    TEMPLATE_EVENT_MARKS,
    digest=PART_DIGEST,
    events=PART_ALL_EVENTS,
    references=PART_REFERENCES,
    wanted=PART_IN_ROOMS,
)
SQL_MARKS_BY_POSITION: Final[LiteralString] = fill(
    TEMPLATE_EVENT_MARKS,
    digest=PART_DIGEST,
    events=PART_ALL_EVENTS,
    references=PART_REFERENCES,
    wanted=PART_IN_RANGE,
)
SQL_MIRRORED_EVENTS: Final[LiteralString] = compose(
    fill(TEMPLATE_MIRRORED_EVENTS, digest=PART_DIGEST, references=PART_REFERENCES), PREV_NIDS
).sql

SQL_NIDS_OF_IDS: Final[LiteralString] = """
SELECT e.event_nid
FROM unnest($1::text[]) AS wanted (event_id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.event_id OFFSET 0) AS e
WHERE NOT e.outlier
"""

SQL_ERASED_NAMES: Final[LiteralString] = """
SELECT p.name
FROM erased_users u
JOIN principals p USING (principal_nid)
ORDER BY p.name
"""

PAGE: Final = 5_000
ROOMS_PER_STATEMENT: Final = 20
"""Rooms of a statement for marks. It returns all their events at once."""
DAY_MS: Final = 86_400_000


def event_rows(conn: ArrowConnection, event_nids: Sequence[int]) -> Iterator[pa.Table]:
    """Yield the rows of these events, page by page. Outliers are left out.

    Raise `StorageCorrupt` for bytes that are damaged.
    """
    for start in range(0, len(event_nids), PAGE):
        table = conn.table(SQL_MIRRORED_EVENTS, list(event_nids[start : start + PAGE]))
        if table.num_rows:
            table = _pruned(decoded(conn, table, "pdu"))
            days = pc.divide(table.column("received_ts"), DAY_MS).cast(pa.int32())
            table = table.append_column("day", days.cast(pa.date32()))
            yield table.select(EVENTS.schema.names).cast(EVENTS.schema)


def marks_of_events(conn: ArrowConnection, nids: Sequence[int], covered: Bounds) -> pa.Table:
    """Return event_nid, arrived and digest of these events, as far as they are in the bounds."""
    pages = (list(nids[start : start + PAGE]) for start in range(0, len(nids), PAGE))
    return pa.concat_tables(
        [
            MARKS.empty_table(),
            *(
                conn.table(SQL_MARKS_OF_NIDS, *covered.columns(), page).cast(MARKS)
                for page in pages
            ),
        ]
    )


def marks_of_rooms(
    conn: ArrowConnection, room_nids: Sequence[int], covered: Bounds, size: int
) -> Iterator[tuple[list[int], pa.Table]]:
    """Yield some of these rooms with the same of their events, until all rooms have come.

    They are about ``size`` events.
    """
    rooms: list[int] = []
    marks = MARKS.empty_table()
    for start in range(0, len(room_nids), ROOMS_PER_STATEMENT):
        some = list(room_nids[start : start + ROOMS_PER_STATEMENT])
        new_marks = conn.table(SQL_MARKS_OF_ROOMS, *covered.columns(), some).cast(MARKS)
        rooms, marks = [*rooms, *some], pa.concat_tables([marks, new_marks])
        if marks.num_rows >= size:
            yield rooms, marks
            rooms, marks = [], MARKS.empty_table()
    if rooms:
        yield rooms, marks


def marks_by_position(
    conn: ArrowConnection, covered: Bounds, size: int
) -> Iterator[tuple[int, int, pa.Table]]:
    """Yield ranges of stream orderings, both ends included, with the same of their events.

    Together they are all numbers. A long range without events costs nothing.
    """
    first = LOWEST
    columns = covered.columns()
    while rows := conn.rows(SQL_FIRST_POSITION, max(first, covered.after + 1), covered.upto + 1):
        begin = rows[0]["first"]
        last = min(begin + size - 1, covered.upto)
        yield first, last, conn.table(SQL_MARKS_BY_POSITION, *columns, begin, last).cast(MARKS)
        first = last + 1
    yield first, HIGHEST, MARKS.empty_table()


def nids_of(conn: ArrowConnection, event_ids: Sequence[str]) -> list[int]:
    if not event_ids:
        return []
    nids: list[int] = conn.table(SQL_NIDS_OF_IDS, list(event_ids)).column(0).to_pylist()
    return nids


def erased_names(conn: ArrowConnection) -> list[str]:
    """Return the users who are erased, in order."""
    return [row["name"] for row in conn.rows(SQL_ERASED_NAMES)]


MARKS: Final = pa.schema(
    [("event_nid", pa.int64()), ("arrived", pa.int64()), ("digest", pa.int64())]
)


def _pruned(table: pa.Table) -> pa.Table:
    """Replace the bytes of events whose content an outsider does not get."""
    pruned = table.column("pruned").to_pylist()
    if not any(pruned):
        return table
    bytes_of: list[Any] = table.column("pdu").to_pylist()
    versions = table.column("room_version").to_pylist()
    kept = [
        redacted_bytes(raw, version) if one else raw
        for raw, version, one in zip(bytes_of, versions, pruned, strict=True)
    ]
    index = table.schema.get_field_index("pdu")
    return table.set_column(index, "pdu", pa.array(kept, pa.binary()))


def redacted_bytes(raw: bytes, room_version: str) -> bytes | None:
    """Return the canonical JSON of the redacted form; None for bytes that cannot be read."""
    try:
        version = version_of(room_version)
        json = read_trusted(raw, strict=version.strict_canonical_json)
        return canonical(redact(json, version))
    except (InvalidEvent, KeyError):
        return None


# --------------------------------------------------------------------------------------------------
# A daily table of answers, in Delta Lake's format, and the days of `events` that it follows.
#
# A commit replaces the rows of some days. Its metadata has the version of the mirror's `events`
# that the table has read. So a refresh finds the days whose files have changed:
#
#   events, version 7    day=2024-05-01 part-a            day=2024-05-02 part-b
#   events, version 9    day=2024-05-01 part-a part-c                              changed: both
#   days

ANSWER: Final = "answer"
"""The key of a commit's metadata with the `AnswerState`."""


@dataclass(frozen=True, slots=True)
class AnswerState:
    """The version of `events` that a daily table has read, the id of `events`, and the query."""

    source: str
    version: int
    definition: str


@dataclass(frozen=True, slots=True)
class MirroredDays:
    """The files of `events` at a version, and their rows, by day. ``source``: the table's id."""

    source: str
    version: int
    files: dict[str, frozenset[str]]
    rows: dict[str, int]

    @classmethod
    def of(cls, folder: str, version: int | None = None) -> Self:
        """Read the log: now, or as of a version. Raise `InputError` where there is none."""
        try:
            delta = DeltaTable(folder, version=version)
        except (DeltaError, TableNotFoundError) as error:
            raise InputError(
                f"{folder}: the mirror has no such table or version: {error}"
            ) from error
        paths_of_days: dict[str, set[str]] = {}
        rows: Counter[str] = Counter()
        for row in _actions(delta):
            day = str(row["partition.day"])
            paths_of_days.setdefault(day, set()).add(row["path"])
            rows[day] += row["num_records"]
        days = {day: frozenset(paths) for day, paths in sorted(paths_of_days.items())}
        return cls(str(delta.metadata().id), delta.version(), days, rows)

    def changed_since(self, previous: Self) -> set[str]:
        """Return the days whose files are not the same as at an earlier version."""
        return {
            day
            for day in {*self.files, *previous.files}
            if self.files.get(day) != previous.files.get(day)
        }

    def paths(self, days: Collection[str]) -> list[str]:
        """Return the files of these days, below the folder."""
        return [path for day in sorted(days) for path in sorted(self.files.get(day, ()))]


class DayTable:
    """A daily table in a folder."""

    def __init__(self, table: MirrorTable, folder: str, delta: DeltaTable) -> None:
        self.table = table
        self.folder = folder
        self._delta = delta

    @classmethod
    def open(cls, folder: str, table: MirrorTable, keep_hours: int) -> Self:
        """Open the table, or make an empty one. Raise `InputError` for something else there."""
        try:
            delta = DeltaTable(folder)
        except TableNotFoundError:
            delta = created(folder, table, ANSWER, keep_hours)
        except DeltaError as error:
            raise InputError(f"{folder} is no table of answers: {error}") from error
        if pa.schema(delta.schema()).names != table.schema.names:
            raise InputError(f"{folder} is no table of this release's answers: use a new folder")
        keep_log(delta, keep_hours)
        return cls(table, folder, delta)

    def state(self) -> AnswerState | None:
        """Return what the table was made of; None if it is new, or the log does not know it."""
        metadata = last_metadata(self._delta, ANSWER)
        return None if metadata is None else AnswerState(**metadata)

    def paths(self) -> list[str]:
        """Return the files of the table, below its folder."""
        return [file.path for file in _day_files(self._delta)]

    def replace(
        self, days: Collection[str] | None, files: Sequence[MirrorFile], state: AnswerState
    ) -> None:
        """Replace the rows of these days, or of all, in one commit.

        Raise `StorageError` if another process has refreshed the table since it was opened.
        """
        removed = [file for file in _day_files(self._delta) if days is None or file.day in days]
        commit_files(self._delta, self.table, files, removed, {ANSWER: asdict(state)})

    def vacuum(self, keep_hours: int) -> None:
        """Delete files that no version of the last hours needs."""
        state = self.state()
        metadata = {} if state is None else {ANSWER: asdict(state)}
        vacuum(self._delta, self.table, keep_hours, metadata)


def _day_files(delta: DeltaTable) -> list[MirrorFile]:
    return [
        MirrorFile(
            row["path"], row["size_bytes"], row["num_records"], 0, 0, str(row["partition.day"])
        )
        for row in _actions(delta)
    ]


def _actions(delta: DeltaTable) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.table(delta.get_add_actions(flatten=True)).to_pylist()
    return rows
