"""Check the visibility table: each principal may see exactly the audiences that the states allow.

The audiences are taken in ascending order. The ranges of the table are followed by their
boundaries, and the admitted principals by the difference between one state and the next. So the
cost is that of the changes, not events x principals.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.names import (
    INVITE,
    JOIN,
    KEY_HISTORY_VISIBILITY,
    KNOWN_EMPTY_KEYS,
    KNOWN_TYPES,
)
from storage.database.placeholders import fill
from storage.ids import server_name_of
from storage.maintenance.room_states import PART_ROOM_EVENTS
from storage.maintenance.verify.event_loader import EventLoader, Finding, VerifiedRoom
from storage.state.groups import Group, changed_keys
from storage.visibility import multirange
from storage.visibility.multirange import LINE, UNIT, depth, following, main

# --------------------------------------------------------------------------------------------------
# Compute visibility from the states alone: admitted principals, moved from state to state.

TEMPLATE_MEMBERS: Final[LiteralString] = """
SELECT e.event_nid, e.membership, e.state_key_nid, k.state_key AS user_id
FROM {events} AS e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.type_nid = {TYPE_MEMBER}
"""

SQL_MEMBERS: Final[LiteralString] = fill(
    TEMPLATE_MEMBERS,
    events=PART_ROOM_EVENTS,
)

TEMPLATE_VISIBILITY_EVENTS: Final[LiteralString] = """
SELECT e.event_nid
FROM {events} AS e
WHERE e.state_key_nid = {KEY_HISTORY_VISIBILITY}
"""

SQL_VISIBILITY_EVENTS: Final[LiteralString] = fill(
    TEMPLATE_VISIBILITY_EVENTS,
    events=PART_ROOM_EVENTS,
)

EVERYBODY: Final = "*everybody"
BY_INVITATION: Final = " (by an invitation alone)"
SHARED: Final = "*shared"


class MemberRow(NamedTuple):
    """A membership event."""

    event_nid: int
    membership: int
    state_key_nid: int
    user_id: str


@dataclass(frozen=True, slots=True)
class VisibilityFacts:
    """The facts that decide visibility: memberships, history visibilities and principals.

    The first two are by event, principals by state key.
    """

    memberships: Mapping[int, int]
    visibilities: Mapping[int, str]
    principals: Mapping[int, tuple[str, ...]]


async def read_facts(conn: Connection, room: VerifiedRoom) -> VisibilityFacts:
    """Return the facts of a room: one entry for each membership event in it."""
    rows = await conn.fetch(SQL_MEMBERS, room.nid, row=MemberRow)
    contents = EventLoader(room)
    stored = await contents.load(conn, await conn.fetchvals(SQL_VISIBILITY_EVENTS, room.nid))
    return VisibilityFacts(
        {row.event_nid: row.membership for row in rows},
        {
            nid: visibility_of(one.event.content.get("history_visibility"))
            for nid, one in stored.items()
        },
        {row.state_key_nid: principals_of(row.user_id, room.server_name) for row in rows},
    )


def visibility_of(visibility: object) -> str:
    """Return one of the four values; "shared" for anything else."""
    return (
        visibility
        if isinstance(visibility, str) and visibility in {"world_readable", "invited", "joined"}
        else "shared"
    )


def by_invitation(principal: str) -> str:
    """Return the name under which an audience by invitation alone is recorded for a principal."""
    return principal + BY_INVITATION


def principals_of(user_id: str, server_name: str) -> tuple[str, ...]:
    """Return the principals that a user's membership concerns: the server, and a local user."""
    server = server_name_of(user_id)
    names = (server, user_id) if server == server_name else (server,)
    return tuple(name for name in names if name)


@dataclass(slots=True)
class AdmittedPrincipals:
    """The principals in the audience of one state.

    `move` goes to another state by the difference.
    """

    facts: VisibilityFacts
    group: Group | None = None
    visibility: str = "shared"
    joined: dict[str, int] = field(default_factory=dict)
    invited: dict[str, int] = field(default_factory=dict)
    # before the last move, of the principals that it touched
    were_joined: set[str] = field(default_factory=set)

    def __contains__(self, principal: str) -> bool:
        if self.group is None:
            return False
        if principal == EVERYBODY:
            return self.visibility == "world_readable"
        if principal == SHARED:
            return self.visibility in {"world_readable", "shared"}
        name = principal.removesuffix(BY_INVITATION)
        joined = self.joined.get(name, 0) > 0
        invited = self.visibility == "invited" and self.invited.get(name, 0) > 0
        return joined or invited if name == principal else invited and not joined

    def either(self, principal: str) -> bool:
        """Return whether one admitted only before or only after the last move is so at the event.

        Joined takes precedence over invited.
        """
        name = principal.removesuffix(BY_INVITATION)
        return name == principal or not (name in self.were_joined or self.joined.get(name, 0) > 0)

    def move(self, target: Group) -> set[str]:
        """Go to a state; return the principals admitted in only one of the two."""
        old = self.group
        gains: list[tuple[dict[str, int], str, int]] = []
        for key in set(target.entries) if old is None else changed_keys(old, target):
            gains += self._gains(
                key, None if old is None else old.entries.get(key), target.entries.get(key)
            )
        visibility = self.facts.visibilities.get(
            target.entries.get(KEY_HISTORY_VISIBILITY, 0), "shared"
        )
        touched = {principal for _, principal, _ in gains}
        if old is None or visibility != self.visibility:
            touched |= {
                EVERYBODY,
                SHARED,
                *(principal for principal, count in self.invited.items() if count),
            }
        self.were_joined = {principal for principal in touched if self.joined.get(principal, 0) > 0}
        touched |= {by_invitation(principal) for principal in touched}
        before = {principal for principal in touched if principal in self}
        for counts, principal, gained in gains:
            counts[principal] = counts.get(principal, 0) + gained
        self.visibility = visibility
        self.group = target
        return {principal for principal in touched if (principal in self) != (principal in before)}

    def _gains(
        self, key: int, old: int | None, new: int | None
    ) -> list[tuple[dict[str, int], str, int]]:
        """Return the changes of counts by a new event under a key: counter, principal, change."""
        principals = self.facts.principals.get(key, ())
        was, becomes = self.facts.memberships.get(old or 0), self.facts.memberships.get(new or 0)
        gains = [
            (self.joined, (becomes == JOIN) - (was == JOIN)),
            (self.invited, (becomes == INVITE) - (was == INVITE)),
        ]
        return [
            (counts, principal, gained)
            for counts, gained in gains
            if gained
            for principal in principals
        ]


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

SQL_LAST_JOINS: Final[LiteralString] = fill("""
SELECT k.state_key AS user_id, max(e.topological_ordering) AS topological_ordering
FROM events e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.room_nid = $1::int
    AND e.membership = {JOIN}
    AND NOT e.outlier
    AND NOT e.soft_failed
    AND e.rejected IS NULL
    AND substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text
GROUP BY k.state_key
""")

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
    boundary: int = 0
    seeing: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)

    def reach(self, audience: int) -> None:
        touched = set[str]()
        while (
            self.boundary < len(self.boundaries) and self.boundaries[self.boundary][0] <= audience
        ):
            name = self.boundaries[self.boundary][1]
            self.seeing ^= {name}
            touched.add(name)
            self.boundary += 1
        self._update_wrong(touched)

    def stand(self, group: Group) -> set[str]:
        """Move to a state; return the principals admitted in only one of it and the one before."""
        changed = self.admitted.move(group)
        self._update_wrong(changed)
        return changed

    def _update_wrong(self, names: set[str]) -> None:
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
                _compare_point(
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


def _compare_point(
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
        expected = (
            admitted.joined.get(name, 0),
            admitted.invited.get(name, 0),
            _last_join(room, joins.get(name), actual[2]),
        )
        if actual != expected:
            yield room.finding("visibility_counts", [name], _counts(*actual), _counts(*expected))


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


def _last_join(room: VerifiedRoom, by_events: int | None, stored: int | None) -> int | None:
    """Return a user's last join by the events, or the stored one if that was purged.

    The stored one counts only if no later join exists.
    """
    purged = (
        stored is not None and room.row.purged_below is not None and stored < room.row.purged_below
    )
    return stored if purged and (by_events is None or by_events < (stored or 0)) else by_events


def _counts(joined: int, invited: int, last_join: int | None) -> str:
    return f"{joined} joined, {invited} invited, last join at {last_join}"


def _boundaries(rows: Sequence[StoredVisibilityRow]) -> list[tuple[int, str]]:
    """Return where ranges begin and end, ascending."""

    def boundaries() -> Iterator[tuple[int, str]]:
        for row in rows:
            for name, text in (
                (row.name, row.audiences),
                (by_invitation(row.name), row.invited_audiences),
            ):
                for low, high in multirange.from_text(text):
                    yield low, name
                    if high is not None:
                        yield high, name

    return sorted(boundaries())


# --------------------------------------------------------------------------------------------------
# Check the rows of `audiences`: the lines of numbers, from which new numbers are taken.
#
# A number that seems to be free would be given to a second audience, and show events to others.

SQL_NUMBERS: Final[LiteralString] = """
SELECT audience, opened_topological, branches, COALESCE(continued, false) AS continued
FROM audiences
WHERE room_nid = $1::int
ORDER BY audience
"""

SQL_HAS_PURGES: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM purge_jobs WHERE room_nid = $1::int)
"""

SQL_PAST_WITHOUT_USE: Final[LiteralString] = """
SELECT COALESCE(p.name, 'principal ' || o.principal_nid) AS name, o.first_audience
FROM past_visibility o
LEFT JOIN principals p USING (principal_nid)
LEFT JOIN visibility v USING (room_nid, principal_nid)
WHERE o.room_nid = $1::int AND (v.first_audience > o.first_audience) IS NOT TRUE
ORDER BY 1, 2
"""


class NumberRow(NamedTuple):
    """A number in use, and what has left from it."""

    audience: int
    opened_topological: int | None
    branches: int
    continued: bool


class PastAudienceRow(NamedTuple):
    """A row of past visibility that no row of visibility refers to."""

    name: str
    first_audience: int


async def check_audience_numbers(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check lines of audiences, and that past visibility continues a row ("audiences")."""
    is_cut = await conn.fetchval(SQL_HAS_PURGES, room.nid)
    rows = {row.audience: row for row in await conn.fetch(SQL_NUMBERS, room.nid, row=NumberRow)}
    for number, found, expected in _faults(rows, is_cut=is_cut):
        yield room.finding("audiences", [f"audience {number}"], found, expected)
    opened = [row.audience for row in rows.values() if row.opened_topological is not None]
    current = opened[-1] if opened else 0
    if room.row.current_audience != current:
        found = f"current_audience {room.row.current_audience}"
        yield room.finding("audiences", [room.row.room_id], found, current)
    if room.row.next_audience % UNIT[0]:
        found = f"next_audience {room.row.next_audience}"
        yield room.finding("audiences", [room.row.room_id], found, "a number of the main line")
    for past in await conn.fetch(SQL_PAST_WITHOUT_USE, room.nid, row=PastAudienceRow):
        subject = [past.name, f"audiences from {past.first_audience} on"]
        yield room.finding("audiences", subject, "a row of the past", "a row that it continues")


def _faults(rows: Mapping[int, NumberRow], *, is_cut: bool) -> Iterator[tuple[int, str, str]]:
    """Yield number, found and expected value; a purge may have deleted numbers of lines."""
    branches: dict[int, int] = {}
    for number in rows:
        if depth(number):
            base, index = _origin(number)
            branches[base] = max(index, branches.get(base, 0))
            if index < 1:
                yield number, "a number of no line", "a line that branches off"
    highest = -1
    for number, row in rows.items():
        expected = branches.get(number, 0)
        if row.branches < expected or (row.branches > expected and not is_cut):
            yield number, f"{row.branches} branches", str(expected)
        after = following(number)
        continued = depth(number) > 0 and after is not None and after.number in rows
        if row.continued < continued or (row.continued > continued and not is_cut):
            yield number, f"continued {row.continued}", str(continued)
        if row.opened_topological is not None:
            if depth(number):
                yield number, f"opened at {row.opened_topological}", "only on the main line"
            elif row.opened_topological < highest:
                yield number, f"opened at {row.opened_topological}", f"{highest} or more"
            highest = max(highest, row.opened_topological)


def _origin(number: int) -> tuple[int, int]:
    """Return the number from which the line of this one leaves, and which line it is, from 1."""
    level = depth(number)
    length = LINE[level] or 0
    base = main(number) if level == 1 else number - number % UNIT[1]
    return base, (number - base) // length


# --------------------------------------------------------------------------------------------------
# Check interned names that the code knows, and that no row is of a room that is not stored.

SQL_KNOWN_NAMES: Final[LiteralString] = """
SELECT 'event_types' AS table_name, k.nid, t.type AS found, k.name AS expected
FROM unnest($1::int[], $2::text[]) AS k (nid, name)
LEFT JOIN event_types t ON t.type_nid = k.nid
WHERE t.type IS DISTINCT FROM k.name
UNION ALL
SELECT 'state_keys', k.nid, s.type_nid || ' ' || quote_literal(s.state_key), k.nid || ' '''''
FROM unnest($3::int[]) AS k (nid)
LEFT JOIN state_keys s ON s.state_key_nid = k.nid
WHERE (s.type_nid = k.nid AND s.state_key = '') IS NOT TRUE
UNION ALL
SELECT 'principals', k.nid, p.name, k.name
FROM (VALUES (1, '*everybody'), (2, '*shared')) AS k (nid, name)
LEFT JOIN principals p ON p.principal_nid = k.nid
WHERE p.name IS DISTINCT FROM k.name
ORDER BY 1, 2
"""

SQL_ORPHANS: Final[LiteralString] = """
SELECT o.table_name, o.room_nid, o.rows,
    EXISTS (SELECT FROM events e WHERE e.room_nid = o.room_nid AND NOT e.outlier)
        OR EXISTS (SELECT FROM events e WHERE e.room_nid = o.room_nid AND e.outlier) AS has_events
FROM (
    SELECT 'events' AS table_name, room_nid, count(*) AS rows FROM events GROUP BY 2
    UNION ALL SELECT 'missing_events', room_nid, count(*) FROM missing_events GROUP BY 2
    UNION ALL SELECT 'dropped_extremities', room_nid, count(*) FROM dropped_extremities GROUP BY 2
    UNION ALL SELECT 'waiting_redactions', room_nid, count(*) FROM waiting_redactions GROUP BY 2
    UNION ALL SELECT 'reordered_events', room_nid, count(*) FROM reordered_events GROUP BY 2
    UNION ALL SELECT 'state_groups', room_nid, count(*) FROM state_groups GROUP BY 2
    UNION ALL SELECT 'current_state', room_nid, count(*) FROM current_state GROUP BY 2
    UNION ALL SELECT 'state_deltas', room_nid, count(*) FROM state_deltas GROUP BY 2
    UNION ALL SELECT 'memberships', room_nid, count(*) FROM memberships GROUP BY 2
    UNION ALL SELECT 'visibility', room_nid, count(*) FROM visibility GROUP BY 2
    UNION ALL SELECT 'past_visibility', room_nid, count(*) FROM past_visibility GROUP BY 2
    UNION ALL SELECT 'audiences', room_nid, count(*) FROM audiences GROUP BY 2
    UNION ALL SELECT 'partial_rooms', room_nid, count(*) FROM partial_rooms GROUP BY 2
    UNION ALL
    SELECT 'out_of_band_memberships', room_nid, count(*) FROM out_of_band_memberships GROUP BY 2
    UNION ALL SELECT 'local_transactions', room_nid, count(*) FROM local_transactions GROUP BY 2
) AS o
LEFT JOIN rooms r USING (room_nid)
WHERE r.room_nid IS NULL
ORDER BY 1, 2
"""


class WrongNameRow(NamedTuple):
    """A number below 1000 with another name than the code gives it."""

    table_name: str
    nid: int
    found: str | None
    expected: str


class OrphansRow(NamedTuple):
    """Rows of a room that has no row in `rooms`. ``has_events``: some of them are its events."""

    table_name: str
    room_nid: int
    rows: int
    has_events: bool


async def check_names(conn: Connection) -> AsyncIterator[Finding]:
    """Check the names whose numbers the code knows ("names")."""
    types, numbers = list(KNOWN_TYPES), list(KNOWN_TYPES.values())
    for row in await conn.fetch(
        SQL_KNOWN_NAMES, numbers, types, list(KNOWN_EMPTY_KEYS), row=WrongNameRow
    ):
        subject = (row.table_name, str(row.nid))
        yield Finding("names", None, subject, row.found or "no row", row.expected)


async def check_orphans(conn: Connection) -> AsyncIterator[Finding]:
    """Check that each row of a room has a room.

    Rows of a room with events are "orphans": only the lost row names the room. Those of a room
    without events are "derived_orphans".
    """
    for row in await conn.fetch(SQL_ORPHANS, row=OrphansRow):
        check, expected = (
            ("orphans", "a row of rooms") if row.has_events else ("derived_orphans", "no rows")
        )
        subject = (row.table_name, f"room_nid {row.room_nid}")
        yield Finding(check, None, subject, f"{row.rows} rows", expected)
