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

from collections.abc import Collection, Sequence
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.database.array_text import EMPTY_ARRAY, long_int_array, text_array
from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import UnknownEvent
from storage.ids import EventId
from storage.queries.state_entries import texts_of_any
from storage.streams.chain_memory import ChainMemory

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
    memory, given = memory_of(remembered), frozenset(event_ids)
    if memory.may_have(given):
        known = memory.chain(given, await maintained_position(conn))
        if known is not None:
            return set(known)
    row = await conn.fetchrow(SQL_AUTH_CHAIN, text_array(given), EMPTY_ARRAY, row=AuthChainIdsRow)
    found = set() if row is None else row.chain
    if row is None or (not found and row.stored < len(given)):
        stored = set(await conn.fetchvals(SQL_STORED, list(given)))
        raise UnknownEvent(next(event_id for event_id in event_ids if event_id not in stored))
    if row.placed == len(given):
        memory.keep(given, frozenset(found), row.maintained or 0)
    return found


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
    given, chain = ([], set()) if row is None else (ids_of(row.given_ids), row.chain)
    if len(given) != len(event_nids):
        given = [EventId(row.event_id) for row in (await texts_of_any(conn, event_nids)).values()]
    return frozenset(given), frozenset(chain)
