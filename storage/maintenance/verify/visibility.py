"""Check the visibility table: each principal may see exactly the audiences that the states allow.

The audiences are taken in ascending order. The ranges of the table are followed by their
boundaries, and the admitted principals by the difference between one state and the next. So the
cost is that of the changes, not events x principals.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom
from storage.maintenance.verify.visibility_model import (
    AdmittedPrincipals,
    by_invitation,
    read_facts,
)
from storage.state.groups import Group
from storage.visibility import multirange

SQL_POINTS: Final[LiteralString] = """
WITH used AS (
    SELECT audience, state_group_before,
        COALESCE(state_group_after, state_group_before) AS state_group_after,
        min(event_id) AS event_id, count(*) AS events
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
    GROUP BY 1, 2, 3
    UNION ALL
    SELECT audience, state_group, state_group, NULL, 0
    FROM state_groups
    WHERE room_nid = $1::int
)
SELECT u.audience, u.state_group_before, u.state_group_after, u.event_id, u.events
FROM used u
ORDER BY u.audience, path_of(u.state_group_before), u.state_group_after, u.event_id
"""

SQL_VISIBILITY: Final[LiteralString] = """
SELECT COALESCE(p.name, 'principal ' || v.principal_nid) AS name,
    v.audiences::text AS audiences, v.last_join_topological, v.joined_count,
    v.invited_count,
    v.invited_audiences::text AS invited_audiences
FROM whole_visibility v
LEFT JOIN LATERAL (
    SELECT name FROM principals WHERE principal_nid = v.principal_nid OFFSET 0
) AS p ON true
WHERE v.room_nid = $1::int
ORDER BY 1
"""

SQL_LAST_JOINS: Final[LiteralString] = """
SELECT k.state_key AS user_id, max(e.topological_ordering) AS topological_ordering
FROM events e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.room_nid = $1::int
    AND e.membership = 5
    AND NOT e.outlier
    AND NOT e.soft_failed
    AND e.rejected IS NULL
    AND substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text
GROUP BY k.state_key
"""

SQL_UNKNOWN_AUDIENCES: Final[LiteralString] = """
SELECT DISTINCT used.audience
FROM (
    SELECT audience FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION
    SELECT audience FROM state_groups WHERE room_nid = $1::int
) AS used
LEFT JOIN audiences a ON a.room_nid = $1::int AND a.audience = used.audience
WHERE a.audience IS NULL OR used.audience >= $2::bigint
ORDER BY used.audience
"""

SQL_STRAYS: Final[LiteralString] = """
WITH visible AS MATERIALIZED (
    SELECT COALESCE(range_agg(v.audiences), '{}') AS audiences
    FROM (
        SELECT unnest('{1, 2}'::int[]) AS principal_nid
        UNION ALL
        SELECT principal_nid FROM principals WHERE name = $2::text
    ) AS p
    CROSS JOIN LATERAL (
        SELECT audiences FROM whole_visibility
        WHERE room_nid = $1::int AND principal_nid = p.principal_nid
        OFFSET 0
    ) AS v
)
SELECT e.event_id, e.topological_ordering, l.opened, CASE
    WHEN l.audience >= r.current_audience THEN NULL ELSE l.closed END AS closed
FROM rooms r
CROSS JOIN visible
CROSS JOIN LATERAL (
    SELECT * FROM events WHERE room_nid = r.room_nid AND NOT outlier OFFSET 0
) AS e
LEFT JOIN LATERAL (  -- looked up: a join with all audiences could compare each event with each
    SELECT a.audience, a.opened_topological AS opened, (
            SELECT n.opened_topological
            FROM audiences n
            WHERE n.room_nid = a.room_nid AND n.audience > a.audience
                AND n.opened_topological IS NOT NULL
            ORDER BY n.audience
            LIMIT 1
        ) AS closed
    FROM audiences a
    WHERE a.room_nid = r.room_nid AND a.audience = (e.audience >> 40) << 40
        AND a.opened_topological IS NOT NULL
    OFFSET 0
) AS l ON true
WHERE r.room_nid = $1::int
    AND NOT r.out_of_range @> e.topological_ordering
    AND visible.audiences @> e.audience
    AND (
        l.audience IS NULL
        OR e.topological_ordering < l.opened - order_slack()
        OR (l.audience < r.current_audience AND e.topological_ordering > l.closed + order_slack())
    )
"""

SQL_MISPLACED: Final[LiteralString] = """
SELECT p.name, o.first_audience, o.opened_topological,
    o.topological_ranges::text AS topological_ranges, right_place.opened,
    right_place.topological_ranges::text AS right_ranges
FROM past_visibility o
JOIN principals p USING (principal_nid)
CROSS JOIN LATERAL (
    SELECT COALESCE((
            SELECT a.opened_topological
            FROM audiences a
            WHERE a.room_nid = o.room_nid AND a.audience <= (o.first_audience >> 40) << 40
                AND a.opened_topological IS NOT NULL
            ORDER BY a.audience DESC
            LIMIT 1
        ), 0) AS opened, COALESCE(disjoint_topological_ranges(o.room_nid, o.audiences, NULL, NULL,
            '{}'), '{}') AS topological_ranges
    OFFSET 0
) AS right_place
WHERE o.room_nid = $1::int
    AND (o.opened_topological <> right_place.opened
        OR NOT o.topological_ranges @> right_place.topological_ranges)
ORDER BY p.name, o.first_audience
"""

POINTS_TOGETHER: Final = 500


class OutOfRangeRow(NamedTuple):
    """An event outside the range of its audience's positions, where reads do not look for it."""

    event_id: str
    topological_ordering: int
    opened: int | None
    closed: int | None


class MisplacedRow(NamedTuple):
    """A row of `past_visibility` whose topological range is not that of its audiences."""

    name: str
    first_audience: int
    opened_topological: int
    topological_ranges: str
    opened: int
    right_ranges: str


class PointRow(NamedTuple):
    """An audience with the states before and after its events, and one of these events.

    Without an event, it is the audience of a state group.
    """

    audience: int
    state_group_before: int
    state_group_after: int
    event_id: str | None
    events: int


class StoredVisibilityRow(NamedTuple):
    """A row of `visibility`."""

    name: str
    audiences: str
    last_join_topological: int | None
    joined_count: int
    invited_count: int
    invited_audiences: str


class LastJoinRow(NamedTuple):
    """A local user's latest accepted join in topological order."""

    user_id: str
    topological_ordering: int


@dataclass(slots=True)
class Sweep:
    """The comparison at the current audience.

    ``seeing``: principals that see it by the table. ``wrong``: those that differ from the current
    state.
    """

    admitted: AdmittedPrincipals
    boundaries: Sequence[tuple[int, str]]
    place: int = 0
    seeing: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)

    def reach(self, audience: int) -> None:
        touched = set[str]()
        while self.place < len(self.boundaries) and self.boundaries[self.place][0] <= audience:
            name = self.boundaries[self.place][1]
            self.seeing ^= {name}
            touched.add(name)
            self.place += 1
        self._judge(touched)

    def stand(self, group: Group) -> set[str]:
        """Move to a state; return the principals admitted in only one of it and the one before."""
        changed = self.admitted.move(group)
        self._judge(changed)
        return changed

    def _judge(self, names: set[str]) -> None:
        for name in names:
            if (name in self.seeing) == (name in self.admitted):
                self.wrong.discard(name)
            else:
                self.wrong.add(name)


@dataclass(slots=True)
class Tally:
    """A principal's wrong visibility: audiences too many and too few, and one example."""

    leaked: int = 0
    hidden: int = 0
    example: str = ""


async def check_visibility(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the table has the visibility that the states allow ("visibility").

    Check also the current and the next audience.
    """
    facts = await read_facts(conn, room)
    rows = await conn.fetch(SQL_VISIBILITY, room.nid, row=StoredVisibilityRow)
    sweep = Sweep(AdmittedPrincipals(facts), _boundaries(rows))
    tallies: dict[str, Tally] = {}
    points = await conn.fetch(SQL_POINTS, room.nid, row=PointRow)
    current = room.row.current_state_group
    if current is not None:
        points.append(PointRow(room.row.current_audience, current, current, None, 0))
        points.append(PointRow(room.row.next_audience, current, current, None, 0))
        points.sort(key=lambda point: point.audience)
    for start in range(0, len(points), POINTS_TOGETHER):
        batch = points[start : start + POINTS_TOGETHER]
        groups = await room.states.load(conn, {group for point in batch for group in point[1:3]})
        for point in batch:
            if point.state_group_before in groups and point.state_group_after in groups:
                _look(
                    sweep,
                    point,
                    groups[point.state_group_before],
                    groups[point.state_group_after],
                    tallies,
                )
    for name, tally in sorted(tallies.items()):
        found = (
            f"sees {tally.leaked} audiences that the states deny,"
            f" and not {tally.hidden} that they allow"
        )
        yield room.finding("visibility", [name, tally.example], found, "what the states allow")


def _look(
    sweep: Sweep, point: PointRow, before: Group, after: Group, tallies: dict[str, Tally]
) -> None:
    """Compare the table with the states at one audience.

    It is visible to the principals admitted before or after the event, and to no others. Joined
    takes precedence over invited.
    """
    sweep.reach(point.audience)
    sweep.stand(before)
    wrong = set(sweep.wrong)
    if after.state_group != before.state_group:
        either = sweep.stand(after)
        wrong = (wrong - either) | {
            name for name in either if (name in sweep.seeing) != sweep.admitted.either(name)
        }
    for name in wrong:
        tally = tallies.setdefault(
            name, Tally(example=point.event_id or f"state group {point.state_group_before}")
        )
        if name in sweep.seeing:
            tally.leaked += 1
        else:
            tally.hidden += 1


async def check_visibility_counts(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check each principal's member counts, and a local user's last join ("visibility_counts")."""
    facts = await read_facts(conn, room)
    found = {
        row.name: row for row in await conn.fetch(SQL_VISIBILITY, room.nid, row=StoredVisibilityRow)
    }
    joins = dict(await conn.fetch(SQL_LAST_JOINS, room.nid, room.server_name, row=LastJoinRow))
    current = room.row.current_state_group
    groups = await room.states.load(conn, [] if current is None else [current])
    admitted = AdmittedPrincipals(facts)
    for group in groups.values():
        admitted.move(group)
    for name in sorted(
        found.keys() | joins.keys() | admitted.joined.keys() | admitted.invited.keys()
    ):
        row = found.get(name)
        actual = (
            (0, 0, None)
            if row is None
            else (row.joined_count, row.invited_count, row.last_join_topological)
        )
        wanted = (
            admitted.joined.get(name, 0),
            admitted.invited.get(name, 0),
            _last_join(room, joins.get(name), actual[2]),
        )
        if actual != wanted:
            yield room.finding("visibility_counts", [name], _counts(*actual), _counts(*wanted))


async def check_audiences(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that each used audience has a row and that its events are in range ("audiences")."""
    for audience in await conn.fetchvals(SQL_UNKNOWN_AUDIENCES, room.nid, room.row.next_audience):
        yield room.finding(
            "audiences",
            [f"audience {audience}"],
            "not known",
            f"a row, below {room.row.next_audience}",
        )
    for row in await conn.fetch(SQL_STRAYS, room.nid, room.server_name, row=OutOfRangeRow):
        expected = f"between {row.opened} and {row.closed}, or listed as out of range"
        yield room.finding(
            "audiences",
            [row.event_id],
            f"topological ordering {row.topological_ordering}",
            expected,
        )
    for past in await conn.fetch(SQL_MISPLACED, room.nid, row=MisplacedRow):
        found = f"opened at {past.opened_topological}, {past.topological_ranges}"
        expected = f"opened at {past.opened}, {past.right_ranges}"
        yield room.finding(
            "audiences", [past.name, f"audiences from {past.first_audience} on"], found, expected
        )


def _last_join(room: VerifiedRoom, held: int | None, found: int | None) -> int | None:
    """Return a user's last join by the events, or the stored one if that was purged.

    The stored one counts only if no later join exists.
    """
    purged = (
        found is not None and room.row.purged_below is not None and found < room.row.purged_below
    )
    return found if purged and (held is None or held < (found or 0)) else held


def _counts(joined: int, invited: int, last_join: int | None) -> str:
    return f"{joined} joined, {invited} invited, last join at {last_join}"


def _boundaries(rows: Sequence[StoredVisibilityRow]) -> list[tuple[int, str]]:
    """Return where ranges begin and end, ascending."""

    def ends() -> Iterator[tuple[int, str]]:
        for row in rows:
            for name, text in (
                (row.name, row.audiences),
                (by_invitation(row.name), row.invited_audiences),
            ):
                for low, high in multirange.from_text(text):
                    yield low, name
                    if high is not None:
                        yield high, name

    return sorted(ends())
