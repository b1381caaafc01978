"""Remove events from the timeline: delete rows or make them outliers, and update references.

All of it happens in one transaction.

  children that stay    the parent becomes a missing event under its own nid: edges are never
                        rewritten, and an event that fills the gap takes the nid back
  gaps below            lose the purged children; a missing event without children is deleted
  redactions that stay  wait for their target, so that it is redacted again if it comes back
  extremities           an event that stays without the children that named it never becomes a
                        forward extremity (`dropped_extremities`)
  the stream            `purged_streams`: a client with an older token syncs from the beginning
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.purge.references import References

SQL_DELETE: Final[LiteralString] = """
WITH
gone AS (
    DELETE FROM events
    WHERE event_nid = ANY($2::bigint[]) AND room_nid = $1::int AND (outlier OR NOT $4::boolean)
    RETURNING event_nid
),
place AS (  -- only state events can have one
    DELETE FROM auth_chains
    WHERE event_nid = ANY($3::bigint[]) AND event_nid IN (SELECT event_nid FROM gone)
    RETURNING COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
),
link AS (
    DELETE FROM auth_chain_links l
    USING place
    WHERE l.chain_nid = place.chain_nid AND l.sequence_number = place.sequence_number
),
leaving AS (
    DELETE FROM purge_retained_events
    WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])
)
SELECT count(*)
FROM gone
"""

SQL_MAKE_OUTLIERS: Final[LiteralString] = """
UPDATE events
SET outlier = true,
    stream_ordering = NULL,
    topological_ordering = NULL,
    depth = claimed_depth(depth, topological_ordering),
    state_group_before = NULL,
    state_group_after = NULL,
    audience = NULL,
    backfilled = false,
    arrival_ordering = NULL,
    soft_failed = false,
    ineffective = false,
    after_gap = NULL,
    in_order_ts = DEFAULT,
    superseded = NULL,
    refused = NULL,
    prev_events = '{}',
    prev_distance = NULL
WHERE event_nid = ANY($2::bigint[]) AND room_nid = $1::int AND NOT outlier
"""

SQL_LEAVE: Final[LiteralString] = """
INSERT INTO purge_retained_events (event_nid, room_nid, local)
SELECT i.event_nid, $1::int, i.local
FROM unnest($2::bigint[], $3::boolean[]) AS i (event_nid, local)
ON CONFLICT (room_nid, event_nid) DO UPDATE SET local = EXCLUDED.local
"""

SQL_SHRINK_GAPS: Final[LiteralString] = """
WITH
gap AS (
    SELECT m.event_nid, ARRAY(SELECT c.nid
        FROM unnest(m.child_nids) WITH ORDINALITY AS c (nid, place) WHERE c.nid <> ALL($2::bigint[])
            ORDER BY c.place)
        AS child_nids
    FROM missing_events m
    WHERE m.event_nid = ANY($1::bigint[]) AND m.child_nids && $2::bigint[]
),
closed AS (
    DELETE FROM missing_events
    WHERE event_nid IN (SELECT event_nid FROM gap WHERE child_nids = '{}')
    RETURNING event_id
),
shrunk AS (
    UPDATE missing_events m
    SET child_nids = gap.child_nids
    FROM gap
    WHERE m.event_nid = gap.event_nid AND gap.child_nids <> '{}'
    RETURNING m.event_id
)
SELECT event_id FROM closed
UNION ALL
SELECT event_id FROM shrunk
"""

SQL_OPEN_GAPS: Final[LiteralString] = """
WITH opened AS (
    INSERT INTO missing_events (event_nid, event_id, room_nid, superseded, child_nids)
    SELECT i.event_nid, i.event_id, $1::int, true, i.child_nids::bigint[]
    FROM unnest($2::bigint[], $3::text[], $4::text[]) AS i (event_nid, event_id, child_nids)
    ON CONFLICT (event_nid) DO UPDATE
    SET child_nids = ARRAY(SELECT DISTINCT c.nid
        FROM unnest(missing_events.child_nids || EXCLUDED.child_nids) AS c (nid))
)
UPDATE events
SET after_gap = true
WHERE event_nid = ANY($5::bigint[]) AND NOT outlier AND NOT backfilled AND after_gap IS NOT TRUE
"""

SQL_FOLLOW: Final[LiteralString] = """
WITH
waiting AS (
    DELETE FROM waiting_redactions
    WHERE redaction_nid = ANY($2::bigint[])
),
dropped AS (
    DELETE FROM dropped_extremities
    WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])
),
moved AS (
    DELETE FROM reordered_events
    WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])
),
purged AS (
    INSERT INTO purged_streams (stream_name, purged_upto)
    SELECT 'events', $3::bigint
    WHERE $3::bigint IS NOT NULL
    ON CONFLICT (stream_name) DO UPDATE SET purged_upto = EXCLUDED.purged_upto
    WHERE purged_streams.purged_upto < EXCLUDED.purged_upto
),
-- parents of removed events, and staying events without their children: never an extremity again
ended AS (
    INSERT INTO dropped_extremities (event_nid, room_nid)
    SELECT e.event_nid, r.room_nid
    FROM rooms r
    CROSS JOIN (SELECT DISTINCT event_nid FROM unnest($4::bigint[]) AS i (event_nid)) AS i
    CROSS JOIN LATERAL (SELECT x.* FROM events x WHERE x.event_nid = i.event_nid OFFSET 0) AS e
    WHERE r.room_nid = $1::int AND e.room_nid = r.room_nid AND NOT e.outlier AND NOT e.backfilled
        AND NOT e.soft_failed AND e.rejected IS NULL
        AND e.event_nid <> ALL (r.forward_extremities)
    ON CONFLICT DO NOTHING
)
INSERT INTO waiting_redactions (redaction_nid, room_nid, target_event_id)
SELECT i.redaction_nid, $1::int, i.target_event_id
FROM unnest($5::bigint[], $6::text[]) AS i (redaction_nid, target_event_id)
ON CONFLICT DO NOTHING
"""


class PurgedEventRow(NamedTuple):
    """An event below the cut, without its content. ``local``: a local user sent it."""

    event_nid: int
    event_id: str
    topological_ordering: int
    stream_ordering: int
    type_nid: int
    is_state: bool
    is_rejected: bool
    soft_failed: bool
    ineffective: bool
    backfilled: bool
    local: bool
    prev_events: list[int]


@dataclass(slots=True)
class Removal:
    """The events that one transaction takes out of the timeline, and those that stay."""

    deleted: list[PurgedEventRow] = field(default_factory=list)
    outliers: list[PurgedEventRow] = field(default_factory=list)
    staying: list[PurgedEventRow] = field(default_factory=list)
    """In the timeline, for good or until the end of the purge: their missing parents become gaps.
    """
    retained: dict[int, bool] = field(default_factory=dict)
    """Events set aside or staying that the end of the purge examines again; True for local ones."""
    extremities: list[int] = field(default_factory=list)
    """Staying events that would become forward extremities without the events that named them."""

    @property
    def removed(self) -> list[PurgedEventRow]:
        """Return the events that leave the timeline."""
        return [*self.deleted, *self.outliers]


async def take(conn: Connection, room_nid: int, removal: Removal) -> None:
    """Take the rows of events out of the timeline.

    Call `follow` in the same transaction to update what refers to them.
    """
    if removal.deleted:
        chained = [row.event_nid for row in removal.deleted if row.is_state]
        await delete(conn, room_nid, [row.event_nid for row in removal.deleted], chained)
    if removal.outliers:
        await conn.execute(SQL_MAKE_OUTLIERS, room_nid, [row.event_nid for row in removal.outliers])
    if removal.retained:
        await conn.execute(
            SQL_LEAVE, room_nid, list(removal.retained), list(removal.retained.values())
        )


async def follow(conn: Connection, keeping: References, removal: Removal) -> list[str]:
    """Update the references to removed events; the room must be locked.

    Return the ids that writers must forget: of removed events, and of gaps that changed.
    """
    room_nid, removed = keeping.room_nid, removal.removed
    nids = [row.event_nid for row in removed]
    for row in removal.staying:
        keeping.name(row.event_nid, row.prev_events)
    changed: list[str] = []
    if removed:
        changed = await conn.fetchvals(
            SQL_SHRINK_GAPS, list({parent for row in removed for parent in row.prev_events}), nids
        )
        await _open_gaps(conn, keeping, removed)
    deleted = {*nids, *keeping.deleted}
    waiting = [
        (redaction, row.event_id)
        for row in removed
        for redaction in keeping.redactions.get(row.event_id, ())
        if redaction not in deleted
    ]
    purged_upto = max((row.stream_ordering for row in removed if not row.backfilled), default=None)
    named = {
        *removal.extremities,
        *(parent for row in removed for parent in row.prev_events),
    } - set(nids)
    if named or removed:
        await conn.execute(
            SQL_FOLLOW,
            room_nid,
            nids,
            purged_upto,
            list(named),
            [redaction for redaction, _ in waiting],
            [event_id for _, event_id in waiting],
        )
    return [*(row.event_id for row in removed), *changed]


async def delete(
    conn: Connection,
    room_nid: int,
    nids: Sequence[int],
    chained: Sequence[int],
    *,
    outliers_only: bool = False,
) -> int:
    """Delete these events of a room, and the chain cover positions of those ``chained``.

    Return how many were deleted.
    """
    return int(await conn.fetchval(SQL_DELETE, room_nid, list(nids), list(chained), outliers_only))


async def _open_gaps(
    conn: Connection, keeping: References, removed: Sequence[PurgedEventRow]
) -> None:
    deleted = {row.event_nid for row in removed} | keeping.deleted
    gaps = [
        (row.event_nid, row.event_id, children)
        for row in removed
        if (children := keeping.children.get(row.event_nid, set()) - deleted)
    ]
    if gaps:
        texts = ["{" + ",".join(map(str, sorted(children))) + "}" for _, _, children in gaps]
        naming = sorted(set[int]().union(*(children for _, _, children in gaps)))
        await conn.execute(
            SQL_OPEN_GAPS,
            keeping.room_nid,
            [nid for nid, _, _ in gaps],
            [event_id for _, event_id, _ in gaps],
            texts,
            naming,
        )
