"""Load events with their chain ancestors, for walks of the auth graph.

A state resolution goes back from one power levels event, or one membership, to the one that it
replaced, through the whole fork. One by one, each would take a round trip. A chain of the chain
cover has them in sequence, so some hundred are loaded at a time.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.names import TYPE_POWER_LEVELS
from storage.graph.chains import ChainPosition
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow
from storage.persistent_map import Map

# --------------------------------------------------------------------------------------------------
# Load closures of events (`storage.graph.chains`) that are not derived from known ones.

SQL_CLOSURES: Final[LiteralString] = """
WITH RECURSIVE
placed AS MATERIALIZED (
    SELECT event_nid, COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
    FROM auth_chains
    WHERE event_nid = ANY($1::bigint[])
),
first AS MATERIALIZED (  -- what an event reaches by the links of its own chain
    SELECT p.event_nid, l.chain_nid, l.sequence_number
    FROM placed p
    CROSS JOIN LATERAL reached_from(p.chain_nid, p.sequence_number) AS l (chain_nid,
        sequence_number)
),
near AS MATERIALIZED (  -- and by theirs: mostly all that there is
    SELECT event_nid, chain_nid, max(sequence_number) AS sequence_number
    FROM (
        SELECT * FROM placed
        UNION ALL
        SELECT * FROM first
        UNION ALL
        SELECT f.event_nid, l.chain_nid, l.sequence_number
        FROM first f
        CROSS JOIN LATERAL reached_from(f.chain_nid, f.sequence_number) AS l (chain_nid,
            sequence_number)
    ) AS reached
    GROUP BY event_nid, chain_nid
),
-- and where that leads, but for what lies before something near: there are as many ways to it as
-- power levels were set
reach AS (
    SELECT n.*
    FROM near n
    WHERE NOT EXISTS (SELECT FROM placed p
        WHERE p.event_nid = n.event_nid AND p.chain_nid = n.chain_nid)
    UNION
    SELECT r.event_nid, l.chain_nid, l.sequence_number
    FROM reach r
    CROSS JOIN LATERAL reached_from(r.chain_nid, r.sequence_number) AS l (chain_nid,
        sequence_number)
    WHERE NOT EXISTS (
        SELECT
        FROM near n
        WHERE n.event_nid = r.event_nid AND n.chain_nid = l.chain_nid
            AND n.sequence_number >= l.sequence_number
    )
),
farthest AS (
    SELECT event_nid, chain_nid, max(sequence_number) AS sequence_number
    FROM reach
    GROUP BY event_nid, chain_nid
)
SELECT p.event_nid, p.chain_nid, p.sequence_number, f.chain_nids, f.sequence_numbers
FROM placed p
LEFT JOIN (
    SELECT event_nid, array_agg(chain_nid) AS chain_nids,
        array_agg(sequence_number) AS sequence_numbers
    FROM farthest
    GROUP BY event_nid
) AS f USING (event_nid)
"""


class ClosureRow(NamedTuple):
    """An event's position, and how far it reaches on other chains; None if it reaches none."""

    event_nid: int
    chain_nid: int
    sequence_number: int
    chain_nids: list[int] | None
    sequence_numbers: list[int] | None


async def load_closures(conn: Connection, change_set: ChangeSet, nids: Collection[int]) -> None:
    """Load positions and closures of committed events; an event without a position is `loose`."""
    for row in await conn.fetch(SQL_CLOSURES, list(nids), row=ClosureRow):
        change_set.auth_graph.places[row.event_nid] = ChainPosition(
            row.chain_nid, row.sequence_number
        )
        reached = dict(zip(row.chain_nids or (), row.sequence_numbers or (), strict=True))
        if row.sequence_number > 1:
            reached[row.chain_nid] = row.sequence_number - 1
        change_set.auth_graph.closures[row.event_nid] = Map(reached)
    change_set.auth_graph.loose.update(
        nid for nid in nids if nid not in change_set.auth_graph.closures
    )


ANCESTORS_MAX: Final = 256

SQL_ANCESTORS: Final[LiteralString] = """
SELECT ancestor.event_nid, p.chain_nid, ancestor.sequence_number
FROM unnest($1::bigint[]) AS young (event_nid)
CROSS JOIN LATERAL (SELECT COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
    FROM auth_chains
    WHERE event_nid = young.event_nid OFFSET 0) AS p
CROSS JOIN LATERAL (
    SELECT later.*
    FROM (
        SELECT a.event_nid, a.sequence_number
        FROM auth_chains a
        WHERE a.chain_nid = p.chain_nid AND a.sequence_number <= p.sequence_number
        ORDER BY a.sequence_number DESC
        LIMIT $2::bigint
    ) AS later
    UNION ALL
    SELECT a.event_nid, a.sequence_number
    FROM auth_chains a
    WHERE a.event_nid = -p.chain_nid AND a.chain_nid IS NULL
) AS ancestor
"""

LoadRows = Callable[[Connection, ChangeSet, Collection[int]], Awaitable[None]]


class ChainPositionRow(NamedTuple):
    """A position in the chain cover."""

    event_nid: int
    chain_nid: int
    sequence_number: int


async def load_chain_ancestors(
    conn: Connection, change_set: ChangeSet, nids: Collection[int], load_rows: LoadRows
) -> list[int]:
    """Load the positions and rows of events and their chain ancestors; return the nids of all.

    A row that the change set has already is newer.
    """
    each = max(ANCESTORS_MAX // len(nids), 2) if nids else 0
    positions = (
        await conn.fetch(SQL_ANCESTORS, list(nids), each, row=ChainPositionRow) if nids else []
    )
    for position in positions:
        change_set.auth_graph.places.setdefault(
            position.event_nid, ChainPosition(position.chain_nid, position.sequence_number)
        )
    loaded = list({*nids, *(position.event_nid for position in positions)})
    lacking = [nid for nid in loaded if change_set.events.row_in_memory(nid) is None]
    if lacking:
        await load_rows(conn, change_set, lacking)
    return loaded


def powers(rows: Iterable[EventRow]) -> list[int]:
    """Return the nids of the power levels events; their ancestors are needed next."""
    return [row.event_nid for row in rows if row.type_nid == TYPE_POWER_LEVELS]


def without_content(change_set: ChangeSet, nids: Iterable[int]) -> list[int]:
    """Return the events that are stored and whose contents are not in memory."""
    lacking = (
        nid
        for nid in nids
        if nid not in change_set.events.parsed and nid not in change_set.caches.events
    )
    return [nid for nid in lacking if change_set.events.row_in_memory(nid) is not None]
