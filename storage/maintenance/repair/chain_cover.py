"""Rebuild the chain cover of a room, with the same function that extends it event by event."""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.sql_template import fill
from storage.graph.chain_rows import ChainColumns, all_columns
from storage.graph.chains import Chain, ChainEntry, ChainParent, ChainPosition, enter, extended
from storage.maintenance.room_events import PART_ROOM_EVENTS
from storage.maintenance.verify.auth_graph import AuthGraph, read_auth_graph

TEMPLATE_STATE_KEYS: Final[LiteralString] = """
SELECT e.event_nid, k.state_key
FROM {events} AS e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
"""

SQL_STATE_KEYS: Final[LiteralString] = fill(
    TEMPLATE_STATE_KEYS,
    events=PART_ROOM_EVENTS,
)

TEMPLATE_DELETE_COVER: Final[LiteralString] = """
WITH gone AS (
    DELETE FROM auth_chains a
    WHERE a.event_nid = ANY(ARRAY(SELECT e.event_nid FROM {events} AS e))
    RETURNING COALESCE(a.chain_nid, -a.event_nid) AS chain_nid
)
DELETE FROM auth_chain_links
WHERE chain_nid = ANY(ARRAY(SELECT chain_nid FROM gone))
"""

SQL_DELETE_COVER: Final[LiteralString] = fill(
    TEMPLATE_DELETE_COVER,
    events=PART_ROOM_EVENTS,
)


class CoveredStateKeyRow(NamedTuple):
    """The state key of a state event."""

    event_nid: int
    state_key: str


async def rebuild_cover(conn: Connection, room_nid: int) -> int:
    """Give every state event that needs one its chain position; return how many there are."""
    graph = await read_auth_graph(conn, room_nid)
    placed = _placed(graph)
    entries = _entries(graph, placed)
    await conn.execute(SQL_DELETE_COVER, room_nid)
    state_keys = dict(await conn.fetch(SQL_STATE_KEYS, room_nid, row=CoveredStateKeyRow))
    places, links = all_columns(entries)
    await conn.copy_in(
        "auth_chains",
        (*ChainColumns._fields, "event_id", "state_key"),
        (
            (*place, graph.rows[place.event_nid].event_id, state_keys[place.event_nid])
            for place in places
        ),
    )
    await conn.copy_in(
        "auth_chain_links",
        ("chain_nid", "sequence_number", "target_chain_nid", "target_sequence_number"),
        links,
    )
    return len(entries)


def _placed(graph: AuthGraph) -> set[int]:
    """Return the accepted state events and the events that they name.

    An auth event may have been rejected only after another event named it.
    """
    accepted = {nid for nid, row in graph.rows.items() if not row.rejected}
    return (accepted | graph.chain(accepted)) & graph.rows.keys()


def _entries(graph: AuthGraph, placed: set[int]) -> dict[int, ChainEntry]:
    entries: dict[int, ChainEntry] = {}
    chains: dict[int, Chain] = {}
    for nid in graph.in_order():
        if nid in placed:
            entry = _enter(graph, nid, entries, chains)
            entries[nid] = entry
            known = None if entry.place.sequence_number == 1 else chains[entry.place.chain_nid]
            chains[entry.place.chain_nid] = extended(known, entry)
    return entries


def _enter(
    graph: AuthGraph,
    nid: int,
    entries: dict[int, ChainEntry],
    chains: dict[int, Chain],
) -> ChainEntry:
    row = graph.rows[nid]
    rows = [graph.rows[auth] for auth in row.auth_events if auth in entries]
    parents = [
        ChainParent(auth.event_nid, entries[auth.event_nid].place, auth.auth_events)
        for auth in rows
    ]
    own: list[ChainPosition] = [
        entries[auth.event_nid].place for auth in rows if auth.state_key_nid == row.state_key_nid
    ]
    predecessor = max(own, default=None)
    chain = None if predecessor is None else chains[predecessor.chain_nid]
    return enter(predecessor, chain, -nid, parents)
