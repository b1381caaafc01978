"""Auth chains from the chain cover (storage/graph/chains.py): ids, and the difference of several sets.

The auth chain of an event is all it reaches by auth events, without the event itself; that of a set is the union.
Source: server-server API, auth chain; room versions, state resolution v2, auth difference.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import UnknownEvent
from storage.ids import EventId

PLACES_AT_ONCE: Final = 256

SQL_AUTH_CHAIN: Final[LiteralString] = """
WITH RECURSIVE
walked AS (  -- the events given, and what only rejected events, which have no place, stand in between
    SELECT e.event_nid, e.auth_events, true AS given, false AS placed
    FROM events e
    WHERE e.event_id = ANY($1::text[])
    UNION
    SELECT e.event_nid, e.auth_events, false, p.event_nid IS NOT NULL
    FROM walked w
    CROSS JOIN unnest(w.auth_events) AS parent (event_nid)
    JOIN events e ON e.event_nid = parent.event_nid
    LEFT JOIN auth_chains p ON p.event_nid = parent.event_nid
    WHERE w.given OR NOT w.placed
),
start AS (
    SELECT p.chain_nid, max(p.sequence_number) AS sequence_number
    FROM walked w
    JOIN auth_chains p USING (event_nid)
    WHERE NOT w.given
    GROUP BY p.chain_nid
),
reach AS (  -- chains, and up to where
    SELECT chain_nid, sequence_number
    FROM start
    UNION
    SELECT l.target_chain_nid, l.target_sequence_number
    FROM reach r
    JOIN auth_chain_links l ON l.chain_nid = r.chain_nid AND l.sequence_number <= r.sequence_number
),
farthest AS (
    SELECT chain_nid, max(sequence_number) AS sequence_number
    FROM reach
    GROUP BY chain_nid
)
SELECT e.event_id
FROM farthest f
JOIN auth_chains a ON a.chain_nid = f.chain_nid AND a.sequence_number <= f.sequence_number
JOIN events e USING (event_nid)
UNION ALL
SELECT e.event_id
FROM walked w
JOIN events e USING (event_nid)
WHERE NOT w.given AND NOT w.placed
"""

SQL_DIFFERENCE: Final[LiteralString] = """
WITH RECURSIVE
given AS (
    SELECT s.set_number, e.event_nid, e.auth_events
    FROM unnest($1::text[], $2::int[]) AS s (event_id, set_number)
    JOIN events e USING (event_id)
),
start AS (
    SELECT g.set_number, p.chain_nid, max(p.sequence_number) AS sequence_number
    FROM given g
    CROSS JOIN unnest(g.auth_events) AS parent (event_nid)
    JOIN auth_chains p ON p.event_nid = parent.event_nid
    GROUP BY 1, 2
),
reach AS (
    SELECT set_number, chain_nid, sequence_number
    FROM start
    UNION
    SELECT r.set_number, l.target_chain_nid, l.target_sequence_number
    FROM reach r
    JOIN auth_chain_links l ON l.chain_nid = r.chain_nid AND l.sequence_number <= r.sequence_number
),
farthest AS (
    SELECT set_number, chain_nid, max(sequence_number) AS sequence_number
    FROM reach
    GROUP BY 1, 2
),
stretch AS (  -- of each chain, what some set reaches and not every set
    SELECT chain_nid,
        max(sequence_number) AS high,
        CASE WHEN count(*) = $3::int THEN min(sequence_number) ELSE 0 END AS low
    FROM farthest
    GROUP BY chain_nid
)
SELECT e.event_id
FROM stretch s
JOIN auth_chains a ON a.chain_nid = s.chain_nid AND a.sequence_number > s.low AND a.sequence_number <= s.high
JOIN events e USING (event_nid)
"""

SQL_REACHED_BY: Final[LiteralString] = """
SELECT x.event_id AS reached, r.event_id
FROM events x
JOIN auth_chains p USING (event_nid)
CROSS JOIN LATERAL (
    WITH RECURSIVE up AS (  -- the chains that reach it, and from which number on
        SELECT p.chain_nid, p.sequence_number
        UNION
        SELECT l.chain_nid, l.sequence_number
        FROM up
        JOIN auth_chain_links l ON l.target_chain_nid = up.chain_nid AND l.target_sequence_number >= up.sequence_number
    )
    SELECT e.event_id
    FROM up
    JOIN auth_chains a ON a.chain_nid = up.chain_nid AND a.sequence_number >= up.sequence_number
    JOIN events e ON e.event_nid = a.event_nid
    WHERE a.event_nid <> x.event_nid
    LIMIT $2::bigint
) AS r
WHERE x.event_id = ANY($1::text[])
"""

SQL_HELD: Final[LiteralString] = """
SELECT event_id
FROM events
WHERE event_id = ANY($1::text[])
"""


class ReachedRow(NamedTuple):
    """An event, and one that reaches it."""

    reached: str
    event_id: str


async def auth_chain_ids(conn: Connection, event_ids: Iterable[EventId]) -> set[EventId]:
    """The auth chain of these events, in one statement; `UnknownEvent` if none of them is held."""
    wanted = list(dict.fromkeys(event_ids))
    found = set(await conn.fetchvals(SQL_AUTH_CHAIN, wanted))
    if not found:
        held = await conn.fetchvals(SQL_HELD, wanted)
        for event_id in wanted:
            if event_id not in held:
                raise UnknownEvent(event_id)
    return found


async def auth_chain_difference(conn: Connection, sets: Sequence[Collection[EventId]]) -> set[EventId]:
    """The events in the auth chain of some of these sets and not of all. Only what the sets differ in is walked.

    What the sets have in common is looked at from the few events in question upwards: one of the first places that reach one
    of them is nearly always in the common part.
    """
    own = [set(one) for one in sets]
    if len(own) < 2:  # one set has no difference
        return set()
    common = set.intersection(*own)
    given = [(event_id, number) for number, one in enumerate(own) for event_id in one - common]
    if not given:
        return set()
    ids = [event_id for event_id, _ in given]
    difference = set(await conn.fetchvals(SQL_DIFFERENCE, ids, [number for _, number in given], len(own)))
    return difference - await _reached_by(conn, difference, common)


async def _reached_by(conn: Connection, event_ids: set[EventId], common: set[EventId]) -> set[EventId]:
    """Those of these events that the auth chain of ``common`` holds."""
    found: set[EventId] = set()
    left = set(event_ids)
    limit = PLACES_AT_ONCE
    while left and common:
        rows = await conn.fetch(SQL_REACHED_BY, list(left), limit, row=ReachedRow)
        found |= {EventId(row.reached) for row in rows if row.event_id in common}
        full = Counter(row.reached for row in rows)
        left = {event_id for event_id in left - found if full[event_id] == limit}
        limit *= 16
    return found
