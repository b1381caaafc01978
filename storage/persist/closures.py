"""Closures of events (`storage.graph.chains`): worked out from those of their auth events, or asked for where these are not at hand."""

from collections.abc import Collection, Iterable
from typing import Final, LiteralString, NamedTuple

from immutables import Map

from storage.database.connection import Connection
from storage.graph.chains import Closure, Place, closure_of
from storage.persist.context import Needs
from storage.persist.draft import Draft
from storage.persist.rows import EventRow

SQL_CLOSURES: Final[LiteralString] = """
WITH RECURSIVE
placed AS MATERIALIZED (
    SELECT event_nid, chain_nid, sequence_number
    FROM auth_chains
    WHERE event_nid = ANY($1::bigint[])
),
first AS MATERIALIZED (  -- what an event reaches by the links of its own chain
    SELECT p.event_nid, l.chain_nid, l.sequence_number
    FROM placed p
    CROSS JOIN LATERAL reached_from(p.chain_nid, p.sequence_number) AS l (chain_nid, sequence_number)
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
        CROSS JOIN LATERAL reached_from(f.chain_nid, f.sequence_number) AS l (chain_nid, sequence_number)
    ) AS reached
    GROUP BY event_nid, chain_nid
),
reach AS (  -- and where that leads, but for what lies before something near: there are as many ways to it as power levels were set
    SELECT n.*
    FROM near n
    WHERE NOT EXISTS (SELECT FROM placed p WHERE p.event_nid = n.event_nid AND p.chain_nid = n.chain_nid)
    UNION
    SELECT r.event_nid, l.chain_nid, l.sequence_number
    FROM reach r
    CROSS JOIN LATERAL reached_from(r.chain_nid, r.sequence_number) AS l (chain_nid, sequence_number)
    WHERE NOT EXISTS (
        SELECT
        FROM near n
        WHERE n.event_nid = r.event_nid AND n.chain_nid = l.chain_nid AND n.sequence_number >= l.sequence_number
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
    SELECT event_nid, array_agg(chain_nid) AS chain_nids, array_agg(sequence_number) AS sequence_numbers
    FROM farthest
    GROUP BY event_nid
) AS f USING (event_nid)
"""


class ClosureRow(NamedTuple):
    """An event's place, and the last numbers that it reaches on other chains; None if it reaches none."""

    event_nid: int
    chain_nid: int
    sequence_number: int
    chain_nids: list[int] | None
    sequence_numbers: list[int] | None


def closures(draft: Draft, nids: Iterable[int]) -> dict[int, Closure] | None:
    """The closures of these events; None if one of them has no place in the cover, and so none."""
    lacking: set[int] = set()
    found: dict[int, Closure] = {}
    for nid in nids:
        closure = known(draft, nid)
        if closure is None:
            closure = _closure(draft, nid, lacking)
        if closure is not None:
            found[nid] = closure
    if not lacking.isdisjoint(draft.loose):
        return None
    if lacking:
        raise Needs("closures", lacking)
    return found


def _closure(draft: Draft, nid: int, lacking: set[int]) -> Closure | None:
    """The closure of an event, kept for later; None if it builds on what is not at hand, which is added to ``lacking``."""
    stuck: set[int] = set()
    front = [nid]
    while front:
        one = front[-1]
        row = None if known(draft, one) is not None else _placed_row(draft, one)
        if row is not None and (ahead := [auth for auth in row.auth_events if auth not in stuck and known(draft, auth) is None]):
            front += ahead
            continue
        front.pop()
        if row is not None and stuck.isdisjoint(row.auth_events):
            draft.closures[one] = closure_of(
                [(draft.place(auth), own) for auth in row.auth_events if (own := known(draft, auth)) is not None]
            )
        elif known(draft, one) is None:
            stuck.add(one)
            if row is None:
                lacking.add(one)
    return known(draft, nid)


def known(draft: Draft, nid: int) -> Closure | None:
    """The closure of an event if it is at hand; None says nothing about the event."""
    closure = draft.closures.get(nid)
    return draft.caches.closures.get(nid) if closure is None else closure


def _placed_row(draft: Draft, nid: int) -> EventRow | None:
    """The row of an event whose auth events have places, as far as is known here: it has one itself, or is about to get it."""
    row = draft.known_row(nid)
    if row is draft.pending or nid in draft.places or nid in draft.caches.places:
        return row
    return None


async def load_closures(conn: Connection, draft: Draft, nids: Collection[int]) -> None:
    """The places and closures of committed events; those without a place are `loose` for this draft."""
    for row in await conn.fetch(SQL_CLOSURES, list(nids), row=ClosureRow):
        draft.places[row.event_nid] = Place(row.chain_nid, row.sequence_number)
        reached = dict(zip(row.chain_nids or (), row.sequence_numbers or (), strict=True))
        if row.sequence_number > 1:
            reached[row.chain_nid] = row.sequence_number - 1
        draft.closures[row.event_nid] = Map(reached)
    draft.loose.update(nid for nid in nids if nid not in draft.closures)
