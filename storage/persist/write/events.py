"""The parts of the write that insert and change events, gaps and redactions without a target."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, LiteralString

from storage.database.columns import (
    DROPPED_EXTREMITIES,
    EVENTS,
    MISSING_EVENTS,
    WAITING_REDACTIONS,
)
from storage.database.placeholders import ColumnValues, InputRows, by_column
from storage.persist.model.cache_view import StoredColumns
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow, MissingRow
from storage.persist.write.streams import new_bytes

# --------------------------------------------------------------------------------------------------
# The columns of `events` for its parents and auth events: how these are written.
#
# One parent, and up to four auth events, are stored as distances from the nid of the event; more as
# an array of nids. In the schema prev_nids and auth_nids read both forms. An event with no parent,
# as an outlier, has neither form.
#
#     event 900 with prev_events [899]          prev_distance 1
#     event 900 with prev_events [899, 870]     prev_events {899,870}
#     event 900 with auth_events [1, 2, 880]    auth_distance_1 899, auth_distance_2 898, …_3 20

FARTHEST: Final = 2**31 - 1
NO_DISTANCES: Final = (None, None, None, None)
PADDING: Final = tuple(NO_DISTANCES[length:] for length in range(5))
AUTH_DISTANCES: Final = (
    "auth_distance_1",
    "auth_distance_2",
    "auth_distance_3",
    "auth_distance_4",
)

Nids = Sequence[int]


def edge_columns(
    nids: Nids, prev_events: Sequence[Nids], auth_events: Sequence[Nids]
) -> dict[str, Sequence[object]]:
    """Return the columns of the edges of events; a column without values is empty."""
    columns: dict[str, Sequence[object]] = dict.fromkeys(("prev_distance", *AUTH_DISTANCES), ())
    auth = [_auth_distances(*edges) for edges in zip(nids, auth_events, strict=True)]
    columns |= zip(AUTH_DISTANCES, map(sparse, zip(*auth, strict=True)), strict=True)
    distances = [_prev_distance(*edges) for edges in zip(nids, prev_events, strict=True)]
    return {
        **columns,
        "prev_distance": distances,
        "prev_events": _left(prev_events, distances),
        "auth_events": _left(auth_events, (four[0] for four in auth)),
    }


def _prev_distance(nid: int, parents: Nids) -> int | None:
    if len(parents) == 1 and -FARTHEST <= (distance := nid - parents[0]) <= FARTHEST:
        return distance
    return None


def _auth_distances(nid: int, auth: Nids) -> tuple[int | None, ...]:
    """Return the distances of up to four events; None for all of them if one is too far."""
    if len(auth) <= len(AUTH_DISTANCES):
        distances = tuple([nid - auth_nid for auth_nid in auth])
        if not auth or (max(distances) <= FARTHEST and min(distances) >= -FARTHEST):
            return distances + PADDING[len(auth)]
    return NO_DISTANCES


def _left(edges: Sequence[Nids], distances: Iterable[int | None]) -> Sequence[Nids | None]:
    return sparse(
        [
            nids if distance is None and nids else None
            for nids, distance in zip(edges, distances, strict=True)
        ]
    )


def sparse(column: Sequence[Any]) -> Sequence[Any]:
    """Return an empty column for one without values: unnest fills it up with NULLs."""
    return () if column.count(None) == len(column) else column


# --------------------------------------------------------------------------------------------------
# New events as columns, for the statements that insert them.
#
# The columns that the planner knows are the fields of `EventRow`, the others those of
# `StoredColumns`; so a new one needs no line here. The rows are turned into columns at once: an
# append binds each column by one call, not each value.

SET_BY_STATEMENT = "stream_ordering"
"""The field of `EventRow` that has no value before the write."""


def new_event_columns(change_set: ChangeSet) -> dict[str, Sequence[Any]]:
    columns = new_columns_but_bytes(change_set)
    return columns | {"json": new_bytes(change_set)} if columns else columns


def new_columns_but_bytes(change_set: ChangeSet) -> dict[str, Sequence[Any]]:
    """Return the columns of the new events without `json`; empty if there is none."""
    new = change_set.events.new_events
    if not new:
        return {}
    rows, _, stored = zip(*new.values(), strict=True)
    columns: dict[str, Sequence[Any]] = dict(
        zip(EventRow._fields, zip(*rows, strict=True), strict=True)
    )
    del columns[SET_BY_STATEMENT]
    for name, column in zip(StoredColumns._fields, zip(*stored, strict=True), strict=True):
        columns[name] = sparse(column)
    columns |= edge_columns(
        columns["event_nid"],
        columns["prev_events"],
        columns["auth_events"],
    )
    columns["depth"] = depth_column(rows)
    columns["after_gap"] = after_gap_column(change_set, new)
    columns["in_order_ts"] = in_order_column(change_set, new)
    return columns


def after_gap_column(change_set: ChangeSet, nids: Iterable[int]) -> Sequence[Any]:
    return sparse([nid in change_set.events.after_gaps or None for nid in nids])


def depth_column(rows: Iterable[EventRow]) -> Sequence[Any]:
    """Return the column `depth` of these events: None where it is the topological ordering."""
    return sparse([None if row.depth == row.topological_ordering else row.depth for row in rows])


def in_order_column(change_set: ChangeSet, nids: Iterable[int]) -> Sequence[Any]:
    return sparse([change_set.events.out_of_order.get(nid) for nid in nids])


NEW_EVENT: Final = EVENTS.rows(
    "new_event",
    EVENTS.but("stream_ordering", "received_ts", "arrival_ordering", "encoding", "writer_nid"),
)

REPLACED: Final = (  # what may change of an event; the role of a homeserver may update only these
    "topological_ordering",
    "depth",
    "state_group_before",
    "state_group_after",
    "audience",
    "redacted_by",
    "outlier",
    "backfilled",
    "soft_failed",
    "ineffective",
    "superseded",
    "rejected",
    "refused",
    "prev_events",
    "prev_distance",
)
AUTH_COLUMNS: Final = ("auth_events", *AUTH_DISTANCES)
CHANGED_EVENT: Final = EVENTS.rows(
    "changed_event",
    ("event_nid", *REPLACED),
    after_gap=EVENTS.types["after_gap"],
    in_order_ts=EVENTS.types["in_order_ts"],
    **{column: EVENTS.types[column] for column in AUTH_COLUMNS},
    authorised="boolean",
    readmitted="boolean",
)
NEW_GAP: Final = MISSING_EVENTS.rows("new_gap")
FILLED_GAP: Final = InputRows.own("filled_gap", event_nid="bigint")
EVENT_INPUTS: Final = (NEW_EVENT, CHANGED_EVENT, NEW_GAP, FILLED_GAP)

NEW_WAITING: Final = WAITING_REDACTIONS.rows("new_waiting")
TARGET: Final = InputRows.own("target", event_id="text", room_nid="int")
SETTLED: Final = InputRows.own("settled", redaction_nid="bigint")
DROPPED: Final = DROPPED_EXTREMITIES.rows("dropped")
REDACTION_INPUTS: Final = (NEW_WAITING, TARGET, SETTLED, DROPPED)

PART_NEW_EVENT: Final[LiteralString] = """
new_event AS (
    INSERT INTO events (:new_event.columns, stream_ordering, received_ts, encoding, writer_nid)
    SELECT :new_event.values, p.stream_ordering, :received_ts, 0, :writer_nid
    FROM :new_event.rows AS i
    LEFT JOIN positioned p USING (event_nid)
),
"""

PART_CHANGED_EVENTS: Final[LiteralString] = """
changed_event AS (
    UPDATE events e
    SET stream_ordering = COALESCE(p.stream_ordering, e.stream_ordering),
        writer_nid = CASE WHEN p.stream_ordering IS NULL THEN e.writer_nid ELSE :writer_nid END,
        after_gap = COALESCE(i.after_gap, e.after_gap),
        in_order_ts = CASE WHEN p.stream_ordering IS NULL THEN e.in_order_ts
            ELSE i.in_order_ts END,
        arrival_ordering = CASE WHEN i.readmitted THEN e.stream_ordering
            ELSE e.arrival_ordering END,
        auth_events = CASE WHEN i.authorised THEN i.auth_events::bigint[] ELSE e.auth_events END,
        auth_distance_1 = CASE WHEN i.authorised THEN i.auth_distance_1
            ELSE e.auth_distance_1 END,
        auth_distance_2 = CASE WHEN i.authorised THEN i.auth_distance_2
            ELSE e.auth_distance_2 END,
        auth_distance_3 = CASE WHEN i.authorised THEN i.auth_distance_3
            ELSE e.auth_distance_3 END,
        auth_distance_4 = CASE WHEN i.authorised THEN i.auth_distance_4
            ELSE e.auth_distance_4 END,
        :changed_event.update(i)
    FROM :changed_event.rows AS i
    LEFT JOIN positioned p USING (event_nid)
    WHERE e.event_nid = i.event_nid
),
"""

PART_GAPS: Final[LiteralString] = """
new_gap AS (
    INSERT INTO missing_events (:new_gap.columns)
    SELECT :new_gap.values
    FROM :new_gap.rows AS i
    ON CONFLICT (event_nid)
        DO UPDATE SET superseded = EXCLUDED.superseded, child_nids = EXCLUDED.child_nids
),
filled_gap AS (
    DELETE FROM missing_events
    WHERE event_id = ANY(:placed.event_id)
    RETURNING event_nid
),
"""

PART_REDACTIONS: Final[LiteralString] = """
new_waiting AS (
    INSERT INTO waiting_redactions (:new_waiting.columns)
    SELECT * FROM :new_waiting.rows AS i
),
settled AS (
    DELETE FROM waiting_redactions w
    WHERE w.target_event_id = ANY(:target.event_id) AND EXISTS (
        SELECT FROM :target.rows AS t
        WHERE t.event_id = w.target_event_id AND t.room_nid = w.room_nid
    )
    RETURNING w.redaction_nid
),
"""

PART_DROPPED: Final[LiteralString] = """
dropped_extremity AS (
    INSERT INTO dropped_extremities (:dropped.columns)
    SELECT * FROM :dropped.rows AS i
),
"""


def event_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    """Return new and changed events, gaps, and redactions that wait for their targets."""
    filled = [gap.event_nid for gap in change_set.events.deleted_missing.values()]
    return {
        "new_event": new_event_columns(change_set),
        "changed_event": _changed_events(change_set),
        "new_gap": by_column(MissingRow._fields, change_set.events.new_missing.values()),
        "filled_gap": {"event_nid": filled},
        "new_waiting": by_column(
            ("redaction_nid", "room_nid", "target_event_id"),
            ((nid, *value) for nid, value in change_set.events.new_waiting.items()),
        ),
        "target": by_column(("event_id", "room_nid"), _targets(change_set)),
        "settled": {"redaction_nid": list(change_set.events.deleted_waiting)},
        "dropped": by_column(("event_nid", "room_nid"), change_set.rooms.dropped.items()),
    }


def _changed_events(change_set: ChangeSet) -> ColumnValues:
    changed = change_set.events.changed_events
    if not changed:
        return {}
    columns = dict(by_column(EventRow._fields, changed.values()))
    columns |= edge_columns(
        columns["event_nid"],
        columns["prev_events"],
        columns["auth_events"],
    )
    return {name: columns[name] for name in (*CHANGED_EVENT.columns, *AUTH_COLUMNS)} | {
        "depth": depth_column(changed.values()),
        "after_gap": after_gap_column(change_set, changed),
        "in_order_ts": in_order_column(change_set, changed),
        "authorised": [nid in change_set.events.authorised for nid in changed],
        "superseded": [row.superseded or None for row in changed.values()],  # loaded, NULL is False
        "readmitted": [nid in change_set.events.readmitted for nid in changed],
    }


def _targets(change_set: ChangeSet) -> list[tuple[str, int]]:
    """Return the events whose redactions wait no longer, each with its room.

    They are those that arrive, unless refused.
    """
    placed = map(change_set.events.row_of, change_set.events.placed)
    return [(row.event_id, row.room_nid) for row in placed if row.refused is None]
