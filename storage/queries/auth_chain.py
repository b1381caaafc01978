"""Auth chains from the chain cover (storage/graph/chains.py).

The auth chain of an event are all events that it reaches by auth events, without itself. The chain
of a set is the union. An event in the cover has a position on a chain. It reaches the earlier
positions, and the targets of the links of its chain up to its own position. Other events (messages,
rejected events) are loose: their auth events are walked until one has a position.

Statements with thousands of numbers take them as arrays made inside (`ANY(ARRAY(SELECT …))`): one
ordered pass over an index, instead of a descent for each number. The ranges of chains, and
statements that begin with a few events, go from row to row by index, whatever the planner's
statistics say (`OFFSET 0`): with them, it would expect one row of each.

Source: server-server API, auth chain.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import EMPTY_ARRAY, compose, long_int_array, text_array
from storage.errors import UnknownEvent
from storage.ids import EventId
from storage.queries.state_at import texts_of_any
from storage.streams.caches import ChainMemory

SQL_AUTH_CHAIN: Final[LiteralString] = compose(
    """
WITH RECURSIVE
given AS MATERIALIZED (  -- by number, or by id
    SELECT $2::text::bigint[] || ARRAY(
        SELECT e.event_nid
        -- one by one: a bitmap of a hash index compares each row with all ids
        FROM (SELECT unnest($1::text::text[]) AS given_id) AS wanted  -- no tuple store
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = given_id OFFSET 0) AS e
    ) AS nids
),
placed AS MATERIALIZED (
    SELECT event_nid, COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number, link_1, link_2
    FROM auth_chains
    WHERE event_nid = ANY((SELECT nids FROM given)::bigint[])
),
counted AS MATERIALIZED (SELECT count(*)::int AS placed FROM placed),
own AS (  -- of each chain the last given position
    SELECT chain_nid, max(sequence_number) AS sequence_number
    FROM placed
    GROUP BY chain_nid
),
later AS MATERIALIZED (  -- the same without first events, in order of the chains
    SELECT chain_nid, max(sequence_number) AS sequence_number
    FROM (
        SELECT chain_nid, sequence_number
        FROM placed
        WHERE sequence_number > 1
        ORDER BY chain_nid DESC  -- as the index has them
    ) AS p
    GROUP BY chain_nid
),
long AS MATERIALIZED (  -- chains with more before it than a first event without a number
    SELECT chain_nid, sequence_number
    FROM later
    WHERE sequence_number > CASE WHEN chain_nid < 0 THEN 2 ELSE 1 END
    ORDER BY chain_nid DESC
),
earlier AS (  -- the events before, of these chains
    SELECT a.*
    FROM long o
    CROSS JOIN LATERAL (SELECT event_nid, event_id, link_1, link_2 FROM auth_chains
        WHERE chain_nid = o.chain_nid AND sequence_number < o.sequence_number OFFSET 0) AS a
    UNION ALL
    SELECT a.event_nid, a.event_id, a.link_1, a.link_2
    FROM auth_chains a
    WHERE a.event_nid = ANY(ARRAY(SELECT -chain_nid FROM later)) AND a.chain_nid IS NULL
),
links AS MATERIALIZED (  -- by target, as few chains are the targets of most links; with the ids
    SELECT (link_1 >> 32) - event_nid AS target_1, max(link_1 & 4294967295) AS number_1,
        (link_2 >> 32) - event_nid AS target_2, max(link_2 & 4294967295) AS number_2,
        NULL::json AS event_ids
    FROM placed
    GROUP BY target_1, target_2
    UNION ALL
    SELECT (link_1 >> 32) - event_nid AS target_1, max(link_1 & 4294967295),
        (link_2 >> 32) - event_nid AS target_2, max(link_2 & 4294967295), json_agg(event_id)
    FROM earlier
    GROUP BY target_1, target_2
),
loose AS (  -- given events without a position, and those that they reach through such events only
    SELECT e.event_nid, :auth_nids.call(e) AS auth_events, true AS is_given
    FROM events e
    WHERE e.event_nid = ANY(
        CASE
            WHEN (SELECT cardinality(nids) FROM given) = (SELECT placed FROM counted) THEN '{}'
            ELSE ARRAY(
                SELECT unnest(nids) FROM given
                EXCEPT
                SELECT event_nid FROM auth_chains
                    WHERE event_nid = ANY((SELECT nids FROM given)::bigint[])
            )
        END
    )
    UNION
    SELECT e.event_nid, :auth_nids.call(e) AS auth_events, false
    FROM loose l
    CROSS JOIN unnest(l.auth_events) AS parent (event_nid)
    -- one by one, also below: a join could read all events or chains
    CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = parent.event_nid OFFSET 0) AS e
    WHERE (SELECT true FROM auth_chains p WHERE p.event_nid = parent.event_nid) IS NULL
),
-- the targets of the links of these chains, and of the auth events of the loose events
first AS MATERIALIZED (
    SELECT chain_nid, max(sequence_number)::int AS sequence_number
    FROM (
        SELECT t.chain, t.upto
        FROM links
        CROSS JOIN LATERAL (VALUES (target_1, number_1), (target_2, number_2)) AS t (chain, upto)
        WHERE t.chain IS NOT NULL
        UNION ALL
        SELECT l.target_chain_nid, l.target_sequence_number
        FROM auth_chain_links l
        JOIN own o USING (chain_nid)
        WHERE l.chain_nid = ANY(
            -- few chains have links there, if any
            CASE WHEN EXISTS (SELECT FROM auth_chain_links)
                THEN ARRAY(SELECT chain_nid FROM own) ELSE '{}' END
        ) AND l.sequence_number <= o.sequence_number
        UNION ALL
        SELECT COALESCE(p.chain_nid, -p.event_nid), p.sequence_number
        FROM loose w
        CROSS JOIN unnest(w.auth_events) AS parent (event_nid)
        CROSS JOIN LATERAL (SELECT chain_nid, event_nid, sequence_number FROM auth_chains
            WHERE event_nid = parent.event_nid OFFSET 0) AS p
    ) AS reached (chain_nid, sequence_number)
    GROUP BY chain_nid
),
-- the targets beyond, without positions that `first` reaches: the number of ways to those is the
-- number of power level events
reach AS (
    SELECT chain_nid, sequence_number
    FROM first
    UNION
    SELECT l.chain_nid, l.sequence_number
    FROM reach r
    CROSS JOIN LATERAL reached_from(r.chain_nid, r.sequence_number) AS l (chain_nid,
        sequence_number)
    WHERE NOT EXISTS (SELECT FROM first f
        WHERE f.chain_nid = l.chain_nid AND f.sequence_number >= l.sequence_number)
)
SELECT
    (SELECT cardinality(nids) FROM given) AS stored,
    (SELECT placed FROM counted) AS placed,
    (
        SELECT stream_id
        FROM stream_positions
        WHERE stream_name = 'caches' AND instance_name = 'maintenance'
    ) AS maintained,
    (
        SELECT json_agg(event_id)
        FROM auth_chains
        WHERE event_nid = ANY((SELECT $2::text::bigint[])::bigint[])
    )::text AS given_ids,
    (
        SELECT json_agg(event_ids) FILTER (WHERE event_ids IS NOT NULL)
        FROM links
    )::text AS own_ids,
    (
        SELECT json_agg(a.event_id)
        FROM (SELECT chain_nid, max(sequence_number) AS sequence_number FROM reach
            GROUP BY chain_nid) AS r
        CROSS JOIN LATERAL chain_rows(r.chain_nid, r.sequence_number) AS a
    )::text AS reached_ids,
    (
        SELECT json_agg(e.event_id)
        FROM loose l
        CROSS JOIN LATERAL (SELECT event_id FROM events
            WHERE event_nid = l.event_nid OFFSET 0) AS e
        WHERE NOT l.is_given
    )::text AS loose_ids
""",
    AUTH_NIDS,
).sql

SQL_MAINTAINED: Final[LiteralString] = """
SELECT stream_id
FROM stream_positions
WHERE stream_name = 'caches' AND instance_name = 'maintenance'
"""

SQL_STORED: Final[LiteralString] = """
SELECT event_id
FROM events
WHERE event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
))
"""


class AuthChainIdsRow(NamedTuple):
    """How many of the events are stored, the ids of those given by number, and of their auth chain.

    ``placed``: how many have a position in the cover. ``maintained``: see `SQL_MAINTAINED`.

    The chain is in three lists that may overlap: on the events' own chains, on chains that these
    reach, and loose events. They are JSON lists, the first one of lists; None for an empty one.
    """

    stored: int
    placed: int
    maintained: int | None
    given_ids: str | None
    own_ids: str | None
    reached_ids: str | None
    loose_ids: str | None

    @property
    def chain(self) -> set[EventId]:
        own: list[list[EventId]] = ids_of(self.own_ids)
        return set[EventId]().union(*own, ids_of(self.reached_ids), ids_of(self.loose_ids))


async def auth_chain_ids(
    conn: Connection, event_ids: Collection[EventId], remembered: ChainMemory | None = None
) -> set[EventId]:
    """Return the auth chain of these events, by one statement. `UnknownEvent` if none is stored."""
    memory, requested = memory_of(remembered), frozenset(event_ids)
    if memory.may_have(requested):
        cached = memory.chain(requested, await maintained_position(conn))
        if cached is not None:
            return set(cached)
    row = await conn.fetchrow(
        SQL_AUTH_CHAIN, text_array(requested), EMPTY_ARRAY, row=AuthChainIdsRow
    )
    chain = set() if row is None else row.chain
    if row is None or (not chain and row.stored < len(requested)):
        stored = set(await conn.fetchvals(SQL_STORED, list(requested)))
        raise UnknownEvent(next(event_id for event_id in event_ids if event_id not in stored))
    if row.placed == len(requested):
        memory.keep(requested, frozenset(chain), row.maintained or 0)
    return chain


def memory_of(remembered: ChainMemory | None) -> ChainMemory:
    """Return the given memory, or one that keeps nothing."""
    return ChainMemory(0) if remembered is None else remembered


async def maintained_position(conn: Connection) -> int:
    """Return the position of the writer "maintenance" in this snapshot; 0 if it has none."""
    return await conn.fetchval(SQL_MAINTAINED) or 0


def ids_of(text: str | None) -> Any:
    """Return a list of ids, or of lists of ids; None is an empty one."""
    return orjson.loads(text) if text else []


async def state_and_chain_ids(
    conn: Connection, event_nids: Sequence[int]
) -> tuple[frozenset[EventId], frozenset[EventId]]:
    row = await conn.fetchrow(
        SQL_AUTH_CHAIN, EMPTY_ARRAY, long_int_array(event_nids), row=AuthChainIdsRow
    )
    state_ids, chain = ([], set()) if row is None else (ids_of(row.given_ids), row.chain)
    if len(state_ids) != len(event_nids):
        state_ids = [
            EventId(row.event_id) for row in (await texts_of_any(conn, event_nids)).values()
        ]
    return frozenset(state_ids), frozenset(chain)


# --------------------------------------------------------------------------------------------------
# Differences of auth chains: the events in the chains of some sets of events, but not of all.
#
# The sets are compared by the chain cover, as above. Events without a
# position are loose, and their auth chains are read.
#
# Source: room versions, state resolution v2, auth difference.

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
    own = [set(ids_of_set) for ids_of_set in sets]
    if len(own) < 2:  # one set has no difference
        return set()
    common = set.intersection(*own)
    unshared = [
        (event_id, number)
        for number, ids_of_set in enumerate(own)
        for event_id in ids_of_set - common
    ]
    if not unshared:
        return set()
    ids = [event_id for event_id, _ in unshared]
    loose = await _loose(conn, {*common, *ids}, memory_of(remembered))
    if not loose <= common:
        chains = [
            await auth_chain_ids(conn, ids_of_set) if ids_of_set else set() for ids_of_set in own
        ]
        return set().union(*chains) - chains[0].intersection(*chains[1:])
    difference = await _placed_difference(conn, unshared, common, len(own))
    return difference - await auth_chain_ids(conn, loose) if difference and loose else difference


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
    conn: Connection, unshared: Sequence[tuple[EventId, int]], common: set[EventId], count: int
) -> set[EventId]:
    """Return the difference by the cover alone, of ``count`` sets.

    All of them have ``common``; ``unshared`` are the other events, with the number of their set.
    """
    ids, numbers = [event_id for event_id, _ in unshared], [number for _, number in unshared]
    ranges = await conn.fetch(SQL_DIFFERENCE, ids, numbers, count, LATER_MAX, row=ChainRangeRow)
    difference: set[EventId] = set()
    unsure: set[EventId] = set()
    for _, rows in groupby(ranges, key=lambda row: row.chain_nid):
        _divide(list(rows), common, difference, unsure)
    return difference | unsure - await _reached_by(conn, unsure, common)


def _divide(
    rows: Sequence[ChainRangeRow],
    common: set[EventId],
    difference: set[EventId],
    unsure: set[EventId],
) -> None:
    """Divide the positions of one chain.

    Add to ``difference`` those that no common event reaches, to ``unsure`` those to check upwards.
    """
    last_common = max((row.sequence_number for row in rows if row.event_id in common), default=0)
    more = len(rows) - sum(row.sequence_number <= row.high for row in rows) == LATER_MAX
    for row in rows:
        if last_common <= row.sequence_number <= row.high:
            (unsure if row.linked or more else difference).add(EventId(row.event_id))


async def _reached_by(
    conn: Connection, event_ids: set[EventId], common: set[EventId]
) -> set[EventId]:
    reached: set[EventId] = set()
    left = set(event_ids)
    limit = LATER_MAX
    while left and common:
        rows = await conn.fetch(SQL_REACHED_BY, list(left), limit, row=ReachedRow)
        reached |= {EventId(row.reached) for row in rows if row.event_id in common}
        full = Counter(row.reached for row in rows)
        left = {event_id for event_id in left - reached if full[event_id] == limit}
        limit *= 16
    return reached
