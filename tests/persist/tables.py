"""The tables of a store in the terms of the protocol.

They must be equal whatever the numbers and the order of arrival.
"""

from collections.abc import Mapping
from typing import Any

from storage.codec import decode
from storage.database.connection import Database

SQL_LOGICAL = {
    "events": """
        SELECT e.event_id, e.topological_ordering, e.outlier, e.backfilled, e.soft_failed,
            e.redacted_form, e.rejected, e.refused, e.superseded, e.membership,
            t.type, k.state_key, p.name, b.event_id AS redacted_by,
            claimed_depth(e.depth, e.topological_ordering), e.origin_server_ts, e.json, r.room_id,
            ARRAY(SELECT COALESCE(x.event_id, m.event_id)
                FROM unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance))
                    WITH ORDINALITY AS n (nid, place)
                LEFT JOIN events x ON x.event_nid = n.nid
                    LEFT JOIN missing_events m ON m.event_nid = n.nid ORDER BY n.place) AS prev,
            ARRAY(SELECT x.event_id FROM unnest(auth_nids(e.event_nid, e.auth_events,
                    e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4))
                    WITH ORDINALITY AS n (nid, place)
                JOIN events x ON x.event_nid = n.nid ORDER BY n.place) AS auth
        FROM events e
        JOIN rooms r USING (room_nid)
        JOIN event_types t USING (type_nid)
        JOIN principals p ON p.principal_nid = e.sender_nid
        LEFT JOIN state_keys k USING (state_key_nid)
        LEFT JOIN events b ON b.event_nid = e.redacted_by
        ORDER BY e.event_id""",
    "states": """
        WITH wanted AS (
            SELECT event_id, which, g FROM events, LATERAL (VALUES ('before', state_group_before),
                ('after', COALESCE(state_group_after, state_group_before))) AS v (which, g)
            WHERE NOT outlier
        ), entry AS (
            SELECT DISTINCT ON (w.event_id, w.which, x.key) w.event_id, w.which, x.key, x.event
            FROM wanted w CROSS JOIN LATERAL state_path(w.g) AS p
            JOIN state_groups r ON r.state_group = p.part
            CROSS JOIN LATERAL (SELECT * FROM unnest(r.key_nids, r.event_nids)
                UNION ALL SELECT * FROM unnest(r.member_key_nids, r.member_event_nids)
                UNION ALL SELECT COALESCE(r.key_nid, r.member_key_nid), r.event_nid
                    WHERE r.event_nid IS NOT NULL) AS x (key, event)
            ORDER BY w.event_id, w.which, x.key, p.place DESC
        )
        SELECT n.event_id, n.which, t.type, k.state_key, e.event_id AS value
        FROM entry n JOIN state_keys k ON k.state_key_nid = n.key
            JOIN event_types t USING (type_nid) JOIN events e ON e.event_nid = n.event
        ORDER BY 1, 2, 3, 4""",
    "rooms": """
        SELECT r.room_id, r.room_version, r.max_topological_ordering,
            ARRAY(SELECT e.event_id FROM unnest(r.forward_extremities) AS n (nid)
                JOIN events e ON e.event_nid = n.nid ORDER BY 1) AS ends
        FROM rooms r ORDER BY 1""",
    "current_state": """
        SELECT r.room_id, t.type, k.state_key, e.event_id, c.membership
        FROM current_state c JOIN rooms r USING (room_nid) JOIN state_keys k USING (state_key_nid)
            JOIN event_types t USING (type_nid)
        JOIN events e ON e.event_nid = c.event_nid ORDER BY 1, 2, 3""",
    "memberships": """
        SELECT p.name, r.room_id, m.membership, e.event_id
        FROM memberships m JOIN principals p USING (principal_nid) JOIN rooms r USING (room_nid)
        LEFT JOIN events e ON e.event_nid = m.event_nid ORDER BY 1, 2""",
    "seen": """
        SELECT r.room_id, p.name, e.event_id
        FROM whole_visibility v JOIN rooms r USING (room_nid)
            JOIN principals p USING (principal_nid)
        JOIN events e ON e.room_nid = v.room_nid AND e.audience <@ v.audiences ORDER BY 1, 2, 3""",
    "seen_since": """
        SELECT r.room_id, p.name, v.last_join_topological, v.joined_count, v.invited_count
        FROM visibility v JOIN rooms r USING (room_nid) JOIN principals p USING (principal_nid)
        WHERE v.last_join_topological IS NOT NULL OR v.joined_count > 0 OR v.invited_count > 0
        ORDER BY 1, 2""",
    "missing_events": """
        SELECT m.event_id, m.superseded, cardinality(m.child_nids)
        FROM missing_events m ORDER BY 1""",
    "waiting_redactions": """
        SELECT w.target_event_id, e.event_id
        FROM waiting_redactions w JOIN events e ON e.event_nid = w.redaction_nid ORDER BY 1, 2""",
}

COUNTED = (
    "rooms",
    "events",
    "missing_events",
    "state_groups",
    "current_state",
    "state_deltas",
    "memberships",
    "visibility",
    "past_visibility",
    "audiences",
)


async def logical_tables(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every table, its rows without numbers and positions."""
    async with database.connection() as conn:
        return {
            name: [_decoded(row) for row in await conn._driver.fetch(sql)]
            for name, sql in SQL_LOGICAL.items()
        }


def _decoded(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A row with the bytes of its event, in whatever form these are stored."""
    values = dict(row)
    if "json" in values:
        values["json"] = decode(values["json"], values["event_id"], values["room_id"])
    return tuple(values.values())


async def row_counts(database: Database) -> dict[str, int]:
    """How many rows each table has."""
    async with database.connection() as conn:
        return {
            name: await conn._driver.fetchval(f"SELECT count(*) FROM {name}") for name in COUNTED
        }
