"""Differences of auth chains: the events in the chains of some sets of events, but not of all.

The sets are compared by the chain cover, as in `storage.queries.auth_chain`. Events without a
position are loose, and their auth chains are read.

Source: room versions, state resolution v2, auth difference.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Final, LiteralString, NamedTuple

from storage.database.array_text import text_array
from storage.database.connection import Connection
from storage.ids import EventId
from storage.queries.auth_chain import auth_chain_ids, ids_of, maintained_position, memory_of
from storage.streams.chain_memory import ChainMemory

LATER_MAX: Final = 256  # positions to read at first that may reach an event

SQL_DIFFERENCE: Final[LiteralString] = """
WITH RECURSIVE
placed AS MATERIALIZED (
    SELECT s.set_number, p.chain_nid, max(p.sequence_number) AS sequence_number
    FROM unnest($1::text[], $2::int[]) AS s (event_id, set_number)
    CROSS JOIN LATERAL (SELECT e.event_nid FROM events e
        WHERE e.event_id = s.event_id OFFSET 0) AS e
    CROSS JOIN LATERAL (SELECT COALESCE(a.chain_nid, -a.event_nid) AS chain_nid, a.sequence_number
        FROM auth_chains a
        WHERE a.event_nid = e.event_nid OFFSET 0) AS p
    GROUP BY 1, 2
),
first AS MATERIALIZED (  -- of each chain, the last target of links of the events' own chains
    SELECT p.set_number, l.chain_nid, max(l.sequence_number) AS sequence_number
    FROM placed p
    CROSS JOIN LATERAL reached_from(p.chain_nid, p.sequence_number) AS l (chain_nid,
        sequence_number)
    GROUP BY 1, 2
),
reach AS (  -- the targets beyond, without positions that `first` reaches
    SELECT set_number, chain_nid, sequence_number
    FROM first
    UNION
    SELECT r.set_number, l.chain_nid, l.sequence_number
    FROM reach r
    CROSS JOIN LATERAL reached_from(r.chain_nid, r.sequence_number) AS l (chain_nid,
        sequence_number)
    WHERE NOT EXISTS (
        SELECT
        FROM first f
        WHERE f.set_number = r.set_number AND f.chain_nid = l.chain_nid
            AND f.sequence_number >= l.sequence_number
    )
),
farthest AS (
    SELECT set_number, chain_nid, max(sequence_number) AS sequence_number
    FROM (SELECT * FROM reach UNION ALL SELECT set_number, chain_nid, sequence_number - 1
        FROM placed WHERE sequence_number > 1) AS reached
    GROUP BY 1, 2
),
differing AS MATERIALIZED (  -- of each chain, the positions that some sets reach, but not all
    SELECT *
    FROM (
        SELECT chain_nid,
            max(sequence_number) AS high,
            CASE WHEN count(*) = $3::int THEN min(sequence_number) ELSE 0 END AS low
        FROM farthest
        GROUP BY chain_nid
    ) AS reached
    WHERE high > low
)
SELECT s.chain_nid, a.sequence_number, s.high, a.event_id,
    COALESCE(a.sequence_number <= inbound.upto, false) AS linked
FROM differing s
CROSS JOIN LATERAL linked_upto(s.chain_nid) AS inbound
CROSS JOIN LATERAL (  -- with later positions of the chain: these may be in all sets
    SELECT a.*
    FROM chain_rows_from(s.chain_nid, s.low + 1) AS a
    ORDER BY a.sequence_number
    LIMIT s.high - s.low + $4::int
) AS a
ORDER BY s.chain_nid, a.sequence_number
"""

SQL_REACHED_BY: Final[LiteralString] = """
SELECT p.event_id AS reached, r.event_id
FROM events x
JOIN auth_chains p USING (event_nid)
CROSS JOIN LATERAL (
    WITH RECURSIVE up AS (  -- the chains that reach it, and their first position that does
        SELECT COALESCE(p.chain_nid, -p.event_nid) AS chain_nid, p.sequence_number
        UNION
        SELECT l.chain_nid_linking, l.place
        FROM up
        CROSS JOIN LATERAL linking_to(up.chain_nid, up.sequence_number) AS l
    )
    SELECT a.event_id
    FROM up
    CROSS JOIN LATERAL chain_rows_from(up.chain_nid, up.sequence_number) AS a
    WHERE a.event_nid <> p.event_nid
    LIMIT $2::bigint
) AS r
WHERE x.event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
))
"""

SQL_LOOSE: Final[LiteralString] = """
WITH
given AS MATERIALIZED (
    SELECT ARRAY(
        SELECT e.event_nid
        FROM (SELECT unnest($1::text::text[]) AS event_id) AS wanted  -- no tuple store
        CROSS JOIN LATERAL (SELECT event_nid FROM events
            WHERE event_id = wanted.event_id OFFSET 0) AS e
    ) AS nids
)
SELECT
    (SELECT cardinality(nids) FROM given) AS stored,
    (
        SELECT stream_id
        FROM stream_positions
        WHERE stream_name = 'caches' AND instance_name = 'maintenance'
    ) AS maintained,
    (
        SELECT json_agg(event_id)
        FROM events
        WHERE event_nid = ANY(
            CASE  -- count first: nearly always all of them have a position
                WHEN (SELECT cardinality(nids) FROM given) = (
                    SELECT count(*) FROM auth_chains
                        WHERE event_nid = ANY((SELECT nids FROM given)::bigint[])
                ) THEN '{}'
                ELSE ARRAY(
                    SELECT unnest(nids) FROM given
                    EXCEPT
                    SELECT event_nid FROM auth_chains
                        WHERE event_nid = ANY((SELECT nids FROM given)::bigint[])
                )
            END
        )
    )::text AS loose_ids
"""


class LooseRow(NamedTuple):
    """How many of the events are stored, and the ids of those without a position, as JSON."""

    stored: int
    maintained: int | None
    loose_ids: str | None


class ChainRangeRow(NamedTuple):
    """A position of a chain. Up to ``high`` some sets reach it, but not all.

    A later one may be in a set itself. ``linked``: other chains reach it.
    """

    chain_nid: int
    sequence_number: int
    high: int
    event_id: str
    linked: bool


class ReachedRow(NamedTuple):
    """An event, and one that reaches it."""

    reached: str
    event_id: str


async def auth_chain_difference(
    conn: Connection,
    sets: Sequence[Collection[EventId]],
    remembered: ChainMemory | None = None,
) -> set[EventId]:
    """Return the events in the auth chain of some of these sets, but not of all.

    Only the events in which the sets differ are walked. An event of the difference is checked
    upwards for one of them: first later positions on its own chain, then, if other chains reach it,
    all events that reach it. A few positions are read at a time, as one of the first is nearly
    always common. Loose events are looked up in all sets, except among those that ``remembered``
    knows to have a position: for large sets that takes most of the time. The events that a common
    loose event reaches are in no difference. If the sets differ in a loose event, they are walked
    whole.
    """
    own = [set(one) for one in sets]
    if len(own) < 2:  # one set has no difference
        return set()
    common = set.intersection(*own)
    given = [(event_id, number) for number, one in enumerate(own) for event_id in one - common]
    if not given:
        return set()
    ids = [event_id for event_id, _ in given]
    loose = await _loose(conn, {*common, *ids}, memory_of(remembered))
    if not loose <= common:
        chains = [await auth_chain_ids(conn, one) if one else set() for one in own]
        return set().union(*chains) - chains[0].intersection(*chains[1:])
    found = await _placed_difference(conn, given, common, len(own))
    return found - await auth_chain_ids(conn, loose) if found and loose else found


async def _loose(conn: Connection, event_ids: set[EventId], memory: ChainMemory) -> set[EventId]:
    if memory.may_know_placed(event_ids):
        event_ids = memory.without_placed(event_ids, await maintained_position(conn))
    if not event_ids:
        return set()
    [row] = await conn.fetch(SQL_LOOSE, text_array(event_ids), row=LooseRow)
    loose = set(ids_of(row.loose_ids))
    if row.stored == len(event_ids):
        memory.keep_placed(event_ids - loose, row.maintained or 0)
    return loose


async def _placed_difference(
    conn: Connection, given: Sequence[tuple[EventId, int]], common: set[EventId], count: int
) -> set[EventId]:
    """Return the difference by the cover alone, of ``count`` sets.

    All of them have ``common``; ``given`` are the other events, with the number of their set.
    """
    ids, numbers = [event_id for event_id, _ in given], [number for _, number in given]
    places = await conn.fetch(SQL_DIFFERENCE, ids, numbers, count, LATER_MAX, row=ChainRangeRow)
    found: set[EventId] = set()
    unsure: set[EventId] = set()
    for _, rows in groupby(places, key=lambda row: row.chain_nid):
        _divide(list(rows), common, found, unsure)
    return found | unsure - await _reached_by(conn, unsure, common)


def _divide(
    rows: Sequence[ChainRangeRow], common: set[EventId], found: set[EventId], unsure: set[EventId]
) -> None:
    """Divide the positions of one chain.

    Add to ``found`` those that no common event reaches, and to ``unsure`` those to check upwards.
    """
    last_common = max((row.sequence_number for row in rows if row.event_id in common), default=0)
    more = len(rows) - sum(row.sequence_number <= row.high for row in rows) == LATER_MAX
    for row in rows:
        if last_common <= row.sequence_number <= row.high:
            (unsure if row.linked or more else found).add(EventId(row.event_id))


async def _reached_by(
    conn: Connection, event_ids: set[EventId], common: set[EventId]
) -> set[EventId]:
    found: set[EventId] = set()
    left = set(event_ids)
    limit = LATER_MAX
    while left and common:
        rows = await conn.fetch(SQL_REACHED_BY, list(left), limit, row=ReachedRow)
        found |= {EventId(row.reached) for row in rows if row.event_id in common}
        full = Counter(row.reached for row in rows)
        left = {event_id for event_id in left - found if full[event_id] == limit}
        limit *= 16
    return found
