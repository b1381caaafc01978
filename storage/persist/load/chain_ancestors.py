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
    places = await conn.fetch(SQL_ANCESTORS, list(nids), each, row=ChainPositionRow) if nids else []
    for place in places:
        change_set.auth_graph.places.setdefault(
            place.event_nid, ChainPosition(place.chain_nid, place.sequence_number)
        )
    found = list({*nids, *(place.event_nid for place in places)})
    lacking = [nid for nid in found if change_set.events.known_row(nid) is None]
    if lacking:
        await load_rows(conn, change_set, lacking)
    return found


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
    return [nid for nid in lacking if change_set.events.known_row(nid) is not None]
