"""Check rules within one row of the tables that each append writes.

Constraints of the schema would hold them as well, but Postgres parses their texts again in each
statement. The write builds each of these rows in one place.
"""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.placeholders import fill
from storage.maintenance.room_states import PART_ROOM_EVENTS
from storage.maintenance.verify.event_loader import Finding, VerifiedRoom

TEMPLATE_BROKEN: Final[LiteralString] = """
SELECT {subject} AS subject, rule.name
FROM {rows} AS e
CROSS JOIN LATERAL (VALUES
    {rules}
) AS rule (name, holds)
WHERE NOT rule.holds
ORDER BY 1, 2
"""

SQL_EVENTS: Final[LiteralString] = fill(
    TEMPLATE_BROKEN,
    subject="e.event_id",
    rows=PART_ROOM_EVENTS,
    rules="""
    ('an outlier has no position, state and audience, and any other event has all of them',
        e.outlier = (e.stream_ordering IS NULL) AND e.outlier = (e.topological_ordering IS NULL)
            AND e.outlier = (e.state_group_before IS NULL) AND e.outlier = (e.audience IS NULL)),
    ('an outlier has a depth', e.depth IS NOT NULL OR e.topological_ordering IS NOT NULL),
    ('only an accepted state event has a state after it', e.state_group_after IS NULL
        OR (e.state_key_nid IS NOT NULL AND e.rejected IS NULL AND NOT e.outlier)),
    ('a member event has a membership, and no other event has one',
        (e.membership IS NOT NULL) = (e.type_nid = {TYPE_MEMBER} AND e.state_key_nid IS NOT NULL)),
    ('a relation has a type, and an edit says whether it replaces',
        (e.relates_to IS NULL) = (e.rel_type_nid IS NULL)
            AND (e.replaces IS NULL) = (e.rel_type_nid IS DISTINCT FROM {REL_REPLACE})),
    ('a refused event is soft-failed', e.refused IS NULL OR e.soft_failed),
    ('only a refused event is superseded', e.superseded IS NULL OR e.refused IS NOT NULL),
    ('edges have one of two forms', (e.prev_events IS NULL OR e.prev_distance IS NULL)
        AND (e.auth_events IS NULL OR e.auth_distance_1 IS NULL))
    """,
)

SQL_GROUPS: Final[LiteralString] = fill(
    TEMPLATE_BROKEN,
    subject="e.state_group::text",
    rows="(SELECT * FROM state_groups WHERE room_nid = $1::int)",
    rules="""
    ('a path has one of two forms, and ends with its group', (e.path IS NULL) <> (e.back IS NULL)
        AND COALESCE(e.back[cardinality(e.back)] = 0, true)
        AND (e.digest IS NOT NULL OR COALESCE(get_byte(e.path, 0) > 4, false))),
    ('each key has an event', cardinality(e.key_nids) IS NOT DISTINCT FROM cardinality(e.event_nids)
        AND cardinality(e.member_key_nids) IS NOT DISTINCT FROM cardinality(e.member_event_nids)),
    ('entries have one of two forms', CASE
        WHEN e.event_nid IS NULL THEN COALESCE(e.key_nid, e.member_key_nid) IS NULL
        ELSE (e.key_nid IS NULL) <> (e.member_key_nid IS NULL)
            AND COALESCE(e.key_nids, e.member_key_nids) IS NULL
    END)
    """,
)

SQL_OTHERS: Final[LiteralString] = """
SELECT 'rooms' AS subject, 'a room with extremities has a state' AS name
FROM rooms
WHERE room_nid = $1::int AND forward_extremities <> '{}' AND current_state_group IS NULL
UNION ALL
SELECT 'reordered_events', 'moves are counted from 1'
FROM reordered_events
WHERE room_nid = $1::int AND moves <= 0
UNION ALL
SELECT 'visibility of ' || COALESCE(p.name, 'principal ' || v.principal_nid),
    'no count is below 0'
FROM visibility v
LEFT JOIN principals p USING (principal_nid)
WHERE v.room_nid = $1::int AND (v.joined_count < 0 OR v.invited_count < 0)
"""


class BrokenRuleRow(NamedTuple):
    """A row that breaks a rule."""

    subject: str
    name: str


async def check_row_rules(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check rules within one row ("row_rules")."""
    for sql in (SQL_EVENTS, SQL_GROUPS, SQL_OTHERS):
        for row in await conn.fetch(sql, room.nid, row=BrokenRuleRow):
            yield room.finding("row_rules", [row.subject], "another row", row.name)
