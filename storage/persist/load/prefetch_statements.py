"""The statements that load what a batch of events needs (`prefetch_rows` sends them)."""

from dataclasses import replace
from typing import Final, LiteralString

from storage.database.columns import (
    AUTH_CHAINS,
    EVENTS,
    MISSING_EVENTS,
    ROOMS,
    STATE_GROUPS,
    VISIBILITY,
    WAITING_REDACTIONS,
)
from storage.database.placeholders import InputRows, NumberedStatement, compose
from storage.database.prepared import prepare_ahead
from storage.database.sql_template import fill
from storage.persist.load.column_packing import PART_COLUMNS, packed
from storage.persist.model.rows import EventRow, MissingRow, RoomRow, VisibilityRow
from storage.state.rows import GroupRow

ROOM: Final = packed("room", ROOMS, RoomRow._fields)
EVENT: Final = packed("event", EVENTS, EventRow._fields)
GAP: Final = packed("gap", MISSING_EVENTS, MissingRow._fields)
WAITING: Final = packed("waiting", WAITING_REDACTIONS, ("redaction_nid", "target_event_id"))
GROUP: Final = packed("state_group", STATE_GROUPS, GroupRow._fields)
POSITION: Final = packed("position", AUTH_CHAINS, ("event_nid", "chain_nid", "sequence_number"))
VISIBLE: Final = packed(
    "visible", VISIBILITY, ("room_nid", "principal_nid", *VisibilityRow._fields)
)

REQUEST: Final = InputRows.own(
    "request",
    rooms="text",
    events="text",
    parents="text",
    auth="text",
    contents="bigint",
    groups="bigint",
    positions="bigint",
    deciding_keys="int",
)
NAMES: Final = InputRows.own(
    "names",
    principals="text",
    types="text",
    key_types="text",
    state_keys="text",
    visible_rooms="text",
    visible_names="text",
    sequences="text",
    blocks="int",
)

TEMPLATE_LOAD_BATCH: Final[LiteralString] = """
WITH
room AS MATERIALIZED (
    SELECT * FROM rooms WHERE room_id = ANY(:request.rooms)
),
stored AS MATERIALIZED (
    SELECT :event.columns
    FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT e.event_nid  -- one by one: for many ids a scan looks cheaper while a table is small
        FROM unnest(:request.events) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
        UNION
        SELECT unnest(forward_extremities)
        FROM room
    ))
),
auth AS MATERIALIZED (
    SELECT event_nid FROM stored WHERE event_id = ANY(:request.auth)
),
path AS MATERIALIZED (
    SELECT step.part AS state_group
    FROM unnest(ARRAY(
        SELECT COALESCE(state_group_after, state_group_before)
        FROM stored
        WHERE NOT outlier AND (
            event_id = ANY(:request.parents)
            OR event_nid = ANY(ARRAY(SELECT unnest(forward_extremities) FROM room))
        )
        UNION
        SELECT current_state_group FROM room
    ) || :request.groups) AS wanted (state_group)
    CROSS JOIN LATERAL state_path(wanted.state_group) AS step
),
chain_position AS MATERIALIZED (
    SELECT event_nid, COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
    FROM auth_chains
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM auth) || :request.positions)
),
chain AS MATERIALIZED (SELECT DISTINCT chain_nid FROM chain_position)
{columns}
UNION ALL
SELECT 'room', :room.packed
FROM room
UNION ALL
SELECT 'event', :event.packed
FROM stored
UNION ALL
SELECT 'missing', :gap.packed
FROM missing_events
WHERE event_id = ANY(:request.events)
UNION ALL
SELECT 'waiting', :waiting.packed
FROM waiting_redactions
WHERE target_event_id = ANY(:request.events)
UNION ALL
SELECT 'content', ARRAY[e.event_id, r.room_id, r.room_version],
    ARRAY[e.event_nid, e.redacted_form::int], NULL, NULL, NULL, NULL, NULL, e.json
FROM events e
CROSS JOIN LATERAL (
    SELECT room_id, room_version FROM rooms WHERE room_nid = e.room_nid OFFSET 0
) AS r
WHERE e.event_nid = ANY(ARRAY(
    SELECT event_nid FROM auth
    UNION
    SELECT c.event_nid
    FROM room
    CROSS JOIN unnest(:request.deciding_keys) AS deciding (state_key_nid)
    CROSS JOIN LATERAL (
        SELECT event_nid
        FROM current_state
        WHERE room_nid = room.room_nid AND state_key_nid = deciding.state_key_nid
        OFFSET 0
    ) AS c
) || :request.contents)
UNION ALL
SELECT 'group', :state_group.packed
FROM state_groups
WHERE state_group = ANY(ARRAY(SELECT DISTINCT state_group FROM path))
UNION ALL
SELECT 'position', :position.packed
FROM chain_position
UNION ALL
SELECT 'chain', NULL, ARRAY[c.chain_nid, NULL, max(a.sequence_number)], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM chain c
CROSS JOIN LATERAL chain_rows(c.chain_nid, 2147483647) AS a
GROUP BY c.chain_nid
UNION ALL
SELECT 'chain', NULL, ARRAY[c.chain_nid, l.chain_nid_reached, l.upto], NULL, NULL, NULL, NULL, NULL,
    NULL
FROM chain c
CROSS JOIN LATERAL reached_from(c.chain_nid, 2147483647) AS l
{names}
"""

PART_NAME_ROWS: Final[LiteralString] = """
UNION ALL
SELECT 'principal', ARRAY[name], ARRAY[principal_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM principals
WHERE name = ANY(:names.principals)
UNION ALL
SELECT 'type', ARRAY[type], ARRAY[type_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM event_types
WHERE type = ANY(:names.types)
UNION ALL
SELECT 'state_key', ARRAY[k.state_key], ARRAY[k.type_nid, k.state_key_nid], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest(:names.key_types, :names.state_keys) AS wanted (type, state_key)
CROSS JOIN LATERAL (SELECT type_nid FROM event_types WHERE type = wanted.type OFFSET 0) AS t
-- one by one, by the whole key, as the next: never all keys of a type, nor all members of a room,
-- for each
CROSS JOIN LATERAL (
    SELECT * FROM state_keys WHERE type_nid = t.type_nid AND state_key = wanted.state_key OFFSET 0
) AS k
UNION ALL
SELECT 'visible', :visible.packed(v)
FROM unnest(:names.visible_rooms, :names.visible_names) AS wanted (room_id, name)
CROSS JOIN LATERAL (SELECT room_nid FROM rooms WHERE room_id = wanted.room_id OFFSET 0) AS r
CROSS JOIN LATERAL (SELECT principal_nid FROM principals WHERE name = wanted.name OFFSET 0) AS p
CROSS JOIN LATERAL (
    SELECT *
    FROM visibility
    WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid
    OFFSET 0
) AS v
UNION ALL
SELECT 'number', ARRAY[wanted.name], ARRAY[nextval(wanted.name::regclass)], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest(:names.sequences, :names.blocks) AS wanted (name, blocks)
CROSS JOIN generate_series(1, wanted.blocks)
"""

LOAD_BATCH: Final[NumberedStatement] = compose(
    fill(TEMPLATE_LOAD_BATCH, columns=PART_COLUMNS, names=PART_NAME_ROWS),
    replace(REQUEST, is_text=False),  # filters compare its arrays with loaded rows
    replace(NAMES, is_text=False),
    ROOM,
    EVENT,
    GAP,
    WAITING,
    GROUP,
    POSITION,
    VISIBLE,
)
SQL_LOAD_BATCH: Final[LiteralString] = LOAD_BATCH.sql

TEMPLATE_LOAD_NAMES: Final[LiteralString] = """
{columns}
{names}
"""

LOAD_NAMES: Final[NumberedStatement] = compose(
    fill(TEMPLATE_LOAD_NAMES, columns=PART_COLUMNS, names=PART_NAME_ROWS), NAMES, VISIBLE
)
SQL_LOAD_NAMES: Final[LiteralString] = LOAD_NAMES.sql
"""The load without rooms and events. It is enough if a new user comes to a known room."""
prepare_ahead(SQL_LOAD_BATCH, SQL_LOAD_NAMES, writes=True)
