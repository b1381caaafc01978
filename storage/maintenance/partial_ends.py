"""Find the states that make the current state of a partial room, from the tables.

The planner has the same rule (`storage.persist.plan.partial_state.keeping_the_join`).
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.state.groups import Group

SQL_JOIN: Final[LiteralString] = """
SELECT e.event_nid, e.state_key_nid, claimed_depth(e.depth, e.topological_ordering) AS depth
FROM partial_rooms p
JOIN rooms r ON r.room_nid = p.room_nid AND r.is_partial
JOIN events e ON e.event_id = p.join_event_id AND NOT e.outlier
WHERE p.room_nid = $1::int
"""

SQL_DEPTHS: Final[LiteralString] = """
SELECT event_nid, claimed_depth(depth, topological_ordering) AS depth
FROM events
WHERE event_nid = ANY($1::bigint[])
"""


class PartialJoinRow(NamedTuple):
    """The join of a partial room."""

    event_nid: int
    state_key_nid: int
    depth: int


class MembershipDepthRow(NamedTuple):
    """The depth of a membership."""

    event_nid: int
    depth: int


async def following(conn: Connection, room_nid: int, states: Sequence[Group]) -> Sequence[Group]:
    """Return those of the states after the extremities that make the current state.

    In a partial room they are those that follow its join, if there is any.
    """
    join = await conn.fetchrow(SQL_JOIN, room_nid, row=PartialJoinRow)
    if join is None:
        return states
    entries = [state.entries.get(join.state_key_nid, 0) for state in states]
    depths = dict(await conn.fetch(SQL_DEPTHS, entries, row=MembershipDepthRow))
    found = [
        state
        for state, nid in zip(states, entries, strict=True)
        if nid == join.event_nid or depths.get(nid, join.depth) > join.depth
    ]
    return found or states
