"""Rows of states: the parts that the statements of sync and sliding sync share.

Each statement chooses keys and events (`entry`), a row each: kind, room_nid, state_key_nid,
event_nid. `TEMPLATE_ENTRY_ROWS` reads their events. `PART_SHOWN` chooses the events for a user who
is not in the room; stripped_state.py makes stripped state of them.
"""

from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes
from storage.errors import StorageCorrupt
from storage.ids import RoomId

PART_SHOWN: Final[LiteralString] = """
    -- create, join rules, name, topic, canonical alias, avatar, encryption
    SELECT 'shown', s.room_nid, c.state_key_nid, c.event_nid
    FROM shown s
    JOIN current_state c ON c.room_nid = s.room_nid AND c.state_key_nid IN (1, 4, 9, 10, 11, 12, 13)
"""
"""The entries of kind "shown" of the rooms in `shown`."""

PART_ENTRY_ROWS: Final[LiteralString] = """
SELECT CASE WHEN e.event_nid IS NULL AND n.event_nid IS NOT NULL
            OR gone.type IS NULL AND n.kind = 'removed' THEN 'lost' ELSE n.kind END AS kind,
    n.room_nid, e.event_id, e.stream_ordering, e.topological_ordering,
    CASE WHEN e.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = e.redacted_by) END AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.json, gone.type AS removed_type,
    gone.state_key AS removed_key, CASE WHEN n.kind = 'own' THEN (
        SELECT o.stripped_state FROM out_of_band_memberships o
        WHERE o.room_nid = n.room_nid AND o.event_nid = n.event_nid
    ) END AS stripped_state,
    NULL::int AS joined_count, NULL::int AS invited_count, NULL::text[] AS heroes
FROM entry n
-- not `stored_events`: it looks its room up for each event
LEFT JOIN events e ON e.event_nid = n.event_nid
LEFT JOIN LATERAL (  -- once for each of the few removed keys: a join could hash all keys
    SELECT t.type, k.state_key
    FROM state_keys k
    JOIN event_types t USING (type_nid)
    WHERE k.state_key_nid = n.state_key_nid AND n.kind = 'removed'
    OFFSET 0
) AS gone ON true
"""
"""The rows of all entries, with the columns of `StateRow`. Conditions may follow."""


class StateRow(NamedTuple):
    """One row of a room. `kind` says which columns it has besides `room_nid`.

    "removed": a key. "own": the membership event of a user who is not in the room, and its stripped
    state as JSON. "shown": an event that is shown to them. "summary": the counts and the heroes.
    "lost": rows of the state, or an event of it, are not there. The statements have other kinds of
    events.
    """

    kind: str
    room_nid: int
    event_id: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool | None
    outlier: bool | None
    redacted_form: bool | None
    json: StoredBytes | None
    removed_type: str | None
    removed_key: str | None
    stripped_state: str | None
    joined_count: int | None
    invited_count: int | None
    heroes: list[str] | None


EVENT: Final = StateRow._fields.index("event_id")
"""The first column of the event."""
EVENT_END: Final = StateRow._fields.index("removed_type")
"""The column after those of the event."""
STRIPPED: Final = StateRow._fields.index("stripped_state")


def lost_state(room_id: RoomId) -> StorageCorrupt:
    """Return the error for a row of kind "lost"."""
    lost = "rows of state_groups or events are lost, or an index does not find them"
    reason = f"the state of a room cannot be read: {lost} (`room-storage verify`)"
    return StorageCorrupt(reason, room_id=room_id)
