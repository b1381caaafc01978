"""The database of a running Synapse as a source of repeated imports; read only.

It reads `events`, `event_json`, `rooms` and `event_edges`. If a parent is missing or came later, as
after a join over federation, the events do not determine the state before an event. Then it also
reads `event_to_state_groups`, `state_groups_state` and `state_group_edges`. The tables and columns
are those of Synapse's published schema. Events that Synapse has rejected or soft-failed are
authorised again, by the same rules. Events that it has pruned after a redaction come in their
redacted form, as `redacted`. Outliers stay outliers.

Stream orderings are the positions: positive for live events and outliers, negative for history. An
import continues where an earlier one ended (`Synapse.since`). It starts somewhat earlier, because
Synapse's writers commit out of order; repeated events are duplicates. Events with missing
dependencies are read again, wherever they are. Outliers that have since entered the timeline keep
their old position there. `ex_outlier_stream` lists them, at positions of either sign.

One value is not known: the former value of a state event's own key, if its state group was stored
whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.arrow_results import arrow_snapshot
from storage.database.placeholders import fill
from storage.errors import InputError, InvalidEvent
from storage.event import peek
from storage.event.ndjson import Origin
from storage.pipeline.imports.lines import FileRange, LineContent, ParsedLine, place_of, placed
from storage.pipeline.source.token_bounds import TEMPLATE_FIRST, filled

# Statements for another schema than ours: tests/source/sql.py omits them, and
# tests/pipeline/test_synapse.py runs each.
SQL_SYNAPSE_RANGES: Final[LiteralString] = """
SELECT COALESCE(min(one.first), 0)::bigint AS first, COALESCE(max(one.last), 0)::bigint AS last
FROM (
    SELECT min(stream_ordering) AS first, max(stream_ordering) AS last
    FROM events
    UNION ALL
    -- positions that no event has
    SELECT min(event_stream_ordering) AS first, max(event_stream_ordering) AS last
    FROM ex_outlier_stream
) AS one
"""

SQL_SYNAPSE_EVENTS: Final[LiteralString] = """
SELECT e.stream_ordering AS place, e.stream_ordering < 0 AS is_history, e.event_id, r.room_version,
    e.outlier, j.json,
    NOT e.outlier AND EXISTS (
        SELECT
        FROM event_edges x
        LEFT JOIN events p ON p.event_id = x.prev_event_id
        WHERE x.event_id = e.event_id
            AND (p.event_id IS NULL OR p.outlier
                OR (e.stream_ordering > 0
                    AND (p.stream_ordering < 0 OR p.stream_ordering > e.stream_ordering)))
    ) AS is_undetermined
FROM events e
LEFT JOIN event_json j ON j.event_id = e.event_id
LEFT JOIN rooms r ON r.room_id = e.room_id
WHERE e.stream_ordering >= $1::bigint AND e.stream_ordering < $2::bigint
ORDER BY e.stream_ordering
"""

SQL_SYNAPSE_FORMER_OUTLIERS: Final[LiteralString] = """
SELECT x.event_stream_ordering AS place, x.event_stream_ordering < 0
    OR e.stream_ordering < 0 AS is_history, e.event_id, r.room_version,
    e.outlier, j.json, true AS is_undetermined
FROM ex_outlier_stream x
JOIN events e ON e.event_id = x.event_id
LEFT JOIN event_json j ON j.event_id = e.event_id
LEFT JOIN rooms r ON r.room_id = e.room_id
WHERE x.event_stream_ordering >= $1::bigint AND x.event_stream_ordering < $2::bigint
ORDER BY x.event_stream_ordering
"""

SQL_SYNAPSE_JOINED_AS_HISTORY: Final[LiteralString] = """
SELECT e.event_id, max(x.event_stream_ordering)::bigint AS place
FROM ex_outlier_stream x
JOIN events e ON e.event_id = x.event_id
WHERE e.stream_ordering >= $1::bigint AND e.stream_ordering < $2::bigint
    AND x.event_stream_ordering < 0
GROUP BY e.event_id
"""

SQL_SYNAPSE_STATES: Final[LiteralString] = """
SELECT wanted.event_id, ARRAY(
    SELECT folded.event_id
    FROM (
        -- the ancestors of this group: the nearest value of a key counts
        WITH RECURSIVE up AS (
            SELECT g.state_group, 0 AS far
            UNION ALL
            SELECT x.prev_state_group, up.far + 1
            FROM up
            JOIN state_group_edges x ON x.state_group = up.state_group
        )
        SELECT DISTINCT ON (s.type, s.state_key) s.event_id
        FROM up
        JOIN state_groups_state s ON s.state_group = up.state_group
        WHERE s.event_id <> wanted.event_id
        ORDER BY s.type, s.state_key, up.far
    ) AS folded
    ORDER BY folded.event_id
) AS state_before
FROM unnest($1::text[]) AS wanted (event_id)
JOIN event_to_state_groups g ON g.event_id = wanted.event_id
"""

SQL_FIRST_EVENT: Final[LiteralString] = fill(
    TEMPLATE_FIRST, number="e.stream_ordering", rows="events e"
)
SQL_FIRST_FORMER_OUTLIER: Final[LiteralString] = fill(
    TEMPLATE_FIRST, number="x.event_stream_ordering", rows="ex_outlier_stream x"
)

LACKING_MAX: Final = 100_000
"""The maximum number of events with missing dependencies in the checkpoint."""

PAGE: Final = 2_000
"""Stream orderings read by one statement."""

POSITIONS_EACH: Final = 40_000
NEAR: Final = 100
OVERLAP: Final = 10_000
HISTORY_LAST: Final = 1 << 50
NAMES: Final = (
    "events by stream ordering",
    "history by stream ordering, negative",
    "former outliers by stream ordering",
    "former outliers by stream ordering, negative",
)
LIVE, HISTORY, FORMER, FORMER_HISTORY = range(4)


class SynapseCheckpoint(NamedTuple):
    """The end of an import of a Synapse: the largest stream ordering, and the smallest."""

    live: int
    history: int

    @classmethod
    def parse(cls, text: str) -> "SynapseCheckpoint":
        """Parse a text such as ``12345,-678``. Raise `InputError`."""
        live, _, history = text.partition(",")
        try:
            return cls(int(live), int(history))
        except ValueError:
            raise InputError(
                f"{text!r} is no position in a Synapse: it looks like 12345,-678"
            ) from None

    def __str__(self) -> str:
        return f"{self.live},{self.history}"


@dataclass(frozen=True, slots=True)
class Synapse:
    """A source of an import. ``since``: where an earlier one ended; ``upto``: where this one does.

    ``lacking``: positions of events with missing dependencies; they are read again, however old.
    """

    dsn: str = field(repr=False)  # it may contain a password
    since: SynapseCheckpoint | None
    upto: SynapseCheckpoint
    lacking: tuple[int, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, dsn: str, since: SynapseCheckpoint | None = None, lacking: Sequence[int] = ()
    ) -> "Synapse":
        """Return the events that exist now. Raise `DatabaseUnavailable`."""
        with arrow_snapshot(dsn, foreign=True) as conn:
            [row] = conn.rows(SQL_SYNAPSE_RANGES)
        return cls(
            dsn, since, SynapseCheckpoint(max(row["last"], 0), min(row["first"], 0)), tuple(lacking)
        )

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a range of positions, without those that have no event."""
        if begin >= end:
            return
        with arrow_snapshot(self.dsn, foreign=True) as conn:
            yield from filled(conn, SQL_FIRST_EVENT, begin, end, POSITIONS_EACH)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the source names for dead letters; their lines are stream orderings."""
        return NAMES

    def line_of(self, file: int, number: int) -> tuple[int | None, int | None]:
        """Return the line for dead letters: the stream ordering."""
        return -number if file in {HISTORY, FORMER_HISTORY} else number, None

    def ranges(self, tasks: int) -> list[FileRange]:
        del tasks
        live = 1 if self.since is None else max(self.since.live - OVERLAP, 0) + 1
        history = 0 if self.since is None else min(self.since.history + OVERLAP, 0)
        both = ((LIVE, live, self.upto.live + 1), (HISTORY, self.upto.history, history))
        spans = [
            self._span(kind, low, high)
            for kind, begin, end in both
            for low, high in self.within(begin, end)
        ]
        if self.since is None:
            return spans
        former = ((FORMER, live, self.upto.live + 1), (FORMER_HISTORY, self.upto.history, history))
        spans += [self._span(kind, begin, end) for kind, begin, end in former if begin < end]
        return [*spans, *self._again(spans)]

    def _again(self, ranges: Sequence[FileRange]) -> Iterator[FileRange]:
        """Yield ranges for the events with missing dependencies that are in none of these.

        Positions near each other are read together: the others between them are duplicates.
        """
        lacking: dict[int, list[int]] = {}
        for place in self.lacking:
            kind, number = placed(place)
            at = -number if kind in {HISTORY, FORMER_HISTORY} else number
            if not any(span.file == kind and span.begin <= at < span.end for span in ranges):
                lacking.setdefault(kind, []).append(at)
        for kind, positions in lacking.items():
            begin = last = min(positions)
            for at in sorted(positions):
                if at - last > NEAR or at - begin >= POSITIONS_EACH:
                    yield self._span(kind, begin, last + 1)
                    begin = at
                last = at
            yield self._span(kind, begin, last + 1)

    def _span(self, kind: int, begin: int, end: int) -> FileRange:
        first = -(end - 1) if kind in {HISTORY, FORMER_HISTORY} else begin
        return FileRange("synapse", 0, kind, kind, self.dsn, begin, end, first, end - begin)


def read_synapse(span: FileRange) -> Iterator[ParsedLine]:
    """Yield the rows of a range, in pages, in one snapshot."""
    first, statement = (
        (SQL_FIRST_FORMER_OUTLIER, SQL_SYNAPSE_FORMER_OUTLIERS)
        if span.file in {FORMER, FORMER_HISTORY}
        else (SQL_FIRST_EVENT, SQL_SYNAPSE_EVENTS)
    )
    with arrow_snapshot(span.path, foreign=True) as conn:
        joined_rows = (
            conn.rows(SQL_SYNAPSE_JOINED_AS_HISTORY, span.begin, span.end)
            if span.file == LIVE
            else []
        )
        joined = {row["event_id"]: row["place"] for row in joined_rows}
        for begin, end in filled(conn, first, span.begin, span.end, PAGE):
            rows = conn.rows(statement, begin, end)
            undetermined = [
                row["event_id"] for row in rows if row["is_undetermined"] and not row["outlier"]
            ]
            states = (
                {
                    row["event_id"]: row["state_before"]
                    for row in conn.rows(SQL_SYNAPSE_STATES, undetermined)
                }
                if undetermined
                else {}
            )
            for row in rows:
                yield _row(span.file, row, joined.get(row["event_id"]), states.get(row["event_id"]))


def _row(
    file: int, row: Mapping[str, Any], joined: int | None, state: list[str] | None
) -> ParsedLine:
    """Return the line of a row.

    ``joined``: the position, below 0, at which a former outlier entered the timeline as history.
    """
    place: int = row["place"]
    is_history = row["is_history"] or joined is not None
    rank = HISTORY_LAST - (joined or place) if is_history else place
    origin: Origin = "outlier" if row["outlier"] else "backfill" if is_history else "live"
    raw: bytes = (row["json"] or "").encode()
    return ParsedLine(
        rank, place_of(file, abs(place)), _content(raw, row["room_version"], origin, state), raw
    )


def _content(
    raw: bytes, version: str | None, origin: Origin, state: list[str] | None
) -> LineContent | InvalidEvent:
    header = peek(raw)
    if header is None:
        return InvalidEvent("not JSON" if raw else "this event has no row in event_json")
    return LineContent(raw, header, version, origin, None if state is None else tuple(state))
