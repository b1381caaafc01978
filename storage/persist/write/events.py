"""The parts of the write that insert and change events, gaps and redactions without a target."""

from typing import Final, LiteralString

from storage.database.columns import (
    DROPPED_EXTREMITIES,
    EVENTS,
    MISSING_EVENTS,
    WAITING_REDACTIONS,
)
from storage.database.placeholders import ColumnValues, InputRows, by_column
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow, MissingRow
from storage.persist.write.event_columns import (
    after_gap_column,
    depth_column,
    in_order_column,
    new_event_columns,
)
from storage.persist.write.event_edges import AUTH_DISTANCES, edge_columns

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

PART_EVENTS: Final[LiteralString] = """
new_event AS (
    INSERT INTO events (:new_event.columns, stream_ordering, received_ts, encoding, writer_nid)
    SELECT :new_event.values, p.stream_ordering, :received_ts, 0, :writer_nid
    FROM :new_event.rows AS i
    LEFT JOIN positioned p USING (event_nid)
),
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
)"""

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
)"""

PART_DROPPED: Final[LiteralString] = """
dropped_extremity AS (
    INSERT INTO dropped_extremities (:dropped.columns)
    SELECT * FROM :dropped.rows AS i
)"""


def event_values(change_set: ChangeSet) -> dict[str, ColumnValues]:
    """Return new and changed events, gaps, and redactions that wait for their targets."""
    filled = [gap.event_nid for gap in change_set.events.gone_missing.values()]
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
        "settled": {"redaction_nid": list(change_set.events.gone_waiting)},
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
