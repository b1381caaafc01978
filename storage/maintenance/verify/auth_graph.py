"""The auth graph of a room, from the events' arrays alone: the reference for the chain cover.

It takes about 0.3 kB of memory for each state event; messages are not part of it.
"""

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.graph.chains import ChainPosition, links_of
from storage.maintenance.room_states import PART_ROOM_EVENTS
from storage.maintenance.verify.event_loader import Finding, VerifiedRoom

TEMPLATE_AUTH_EDGES: Final[LiteralString] = """
SELECT event_nid, event_id, state_key_nid,
    -- an out-of-band event counts as rejected
    rejected IS NOT NULL OR (outlier AND COALESCE(membership <> {JOIN}, false)
        AND :auth_nids.call = '{}') AS rejected,
    :auth_nids.call AS auth_events
FROM {events} AS e
WHERE state_key_nid IS NOT NULL
ORDER BY event_nid
"""

SQL_AUTH_EDGES: Final[LiteralString] = compose(
    fill(
        TEMPLATE_AUTH_EDGES,
        events=PART_ROOM_EVENTS,
    ),
    AUTH_NIDS,
).sql


class EdgesRow(NamedTuple):
    """A state event and its auth events.

    An out-of-band event counts as rejected: it has no position in the chain cover.
    """

    event_nid: int
    event_id: str
    state_key_nid: int
    rejected: bool
    auth_events: list[int]


class AuthGraph:
    """State events and the auth events they name, in both directions."""

    def __init__(self, rows: Iterable[EdgesRow]) -> None:
        self.rows: dict[int, EdgesRow] = {row.event_nid: row for row in rows}
        self.citing: dict[int, list[int]] = {}
        for nid, row in self.rows.items():
            for auth in row.auth_events:
                self.citing.setdefault(auth, []).append(nid)

    def parents(self, nid: int) -> Collection[int]:
        """Return the auth events of a state event; none for any other event."""
        row = self.rows.get(nid)
        return () if row is None else row.auth_events

    def name(self, nid: int) -> str:
        """Return the id of an event, or its nid if it is none of the graph."""
        row = self.rows.get(nid)
        return f"nid {nid}" if row is None else row.event_id

    def chain(self, nids: Iterable[int]) -> set[int]:
        """Return the auth chain of these events, without the events themselves."""
        reached: set[int] = set()
        queue = [parent for nid in nids for parent in self.parents(nid)]
        while queue:
            nid = queue.pop()
            if nid not in reached:
                reached.add(nid)
                queue.extend(self.parents(nid))
        return reached

    def reached_by(self, nid: int, state: Collection[int]) -> bool:
        """Return whether some event of a state has this one in its auth chain.

        The search goes up from the event: mostly one of the first that cite it is in the state.
        """
        seen: set[int] = set()
        queue = list(self.citing.get(nid, ()))
        while queue:
            citing_nid = queue.pop()
            if citing_nid in state:
                return True
            if citing_nid not in seen:
                seen.add(citing_nid)
                queue.extend(self.citing.get(citing_nid, ()))
        return False

    def in_order(self) -> list[int]:
        """Return the events, each after its auth events; circles (impossible) are omitted."""
        left = {
            nid: sum(auth in self.rows for auth in row.auth_events)
            for nid, row in self.rows.items()
        }
        free = [nid for nid, count in left.items() if not count]
        ordered: list[int] = []
        while free:
            nid = free.pop()
            ordered.append(nid)
            for citing_nid in self.citing.get(nid, ()):
                left[citing_nid] -= 1
                if not left[citing_nid]:
                    free.append(citing_nid)
        return ordered


async def read_auth_graph(conn: Connection, room_nid: int) -> AuthGraph:
    return AuthGraph(await conn.fetch(SQL_AUTH_EDGES, room_nid, row=EdgesRow))


# --------------------------------------------------------------------------------------------------
# Check that the chain cover gives the same reachability as the auth events.
#
# Every accepted state event has a chain position. The check takes each event after its auth events.
# For each event it keeps how far it reaches on each chain, until the last event that cites it is
# checked. The position and links of an event are correct if they lead to its own auth events only,
# and to all of them. Everything that those reach was checked before.

TEMPLATE_POSITIONS: Final[LiteralString] = """
SELECT a.event_nid, COALESCE(a.chain_nid, -a.event_nid) AS chain_nid, a.sequence_number, a.link_1,
    a.link_2
FROM {events} AS e
CROSS JOIN LATERAL (SELECT * FROM auth_chains WHERE event_nid = e.event_nid OFFSET 0) AS a
"""

SQL_POSITIONS: Final[LiteralString] = fill(
    TEMPLATE_POSITIONS,
    events=PART_ROOM_EVENTS,
)

TEMPLATE_MISNAMED: Final[LiteralString] = """
SELECT e.event_id
FROM {events} AS e
CROSS JOIN LATERAL (SELECT * FROM auth_chains WHERE event_nid = e.event_nid OFFSET 0) AS a
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE a.event_id <> e.event_id OR a.state_key <> k.state_key
"""

SQL_MISNAMED: Final[LiteralString] = fill(
    TEMPLATE_MISNAMED,
    events=PART_ROOM_EVENTS,
)

SQL_LINKS: Final[LiteralString] = """
SELECT chain_nid, sequence_number, target_chain_nid, target_sequence_number
FROM auth_chain_links
WHERE chain_nid = ANY($1::bigint[])
"""

Reach = dict[int, int]  # chain -> highest sequence number reached


class CoverPositionRow(NamedTuple):
    """The chain position of an event."""

    event_nid: int
    chain_nid: int
    sequence_number: int
    link_1: int | None
    link_2: int | None


class LinkRow(NamedTuple):
    """A link that begins at a chain position."""

    chain_nid: int
    sequence_number: int
    target_chain_nid: int
    target_sequence_number: int


class ChainCover(NamedTuple):
    """The cover of a room: positions of events, events of positions, links by where they begin."""

    positions: Mapping[int, ChainPosition]
    events: Mapping[ChainPosition, int]
    links: Mapping[ChainPosition, list[ChainPosition]]


async def check_cover(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the cover agrees with the auth events ("auth_chains")."""
    graph = await read_auth_graph(conn, room.nid)
    cover = await read_cover(conn, room.nid)
    for finding in (*_out_of_range(room, cover, graph), *_check_positions(room, cover, graph)):
        yield finding
    for event_id in await conn.fetchvals(SQL_MISNAMED, room.nid):
        yield room.finding(
            "auth_chains", [event_id], "a position under another id or state key", "its own"
        )


def _out_of_range(room: VerifiedRoom, cover: ChainCover, graph: AuthGraph) -> Iterator[Finding]:
    """Report positions and links of events that are no state events."""
    for nid, position in cover.positions.items():
        if nid not in graph.rows:
            yield room.finding(
                "auth_chains",
                [f"nid {nid}"],
                f"{_described(position)} for an event that is no state event",
                "no position",
            )
    for position, targets in cover.links.items():
        if position not in cover.events or any(target not in cover.events for target in targets):
            yield room.finding(
                "auth_chains",
                [_described(position)],
                "a link to or from a position without an event",
                "no link",
            )


def _check_positions(room: VerifiedRoom, cover: ChainCover, graph: AuthGraph) -> Iterator[Finding]:
    """Check the events in order; keep how far each reaches until its last child is done."""
    left = {nid: len(graph.citing.get(nid, ())) for nid in graph.rows}
    reaches: dict[int, Reach] = {}
    for nid in graph.in_order():
        row = graph.rows[nid]
        reaches[nid] = _reach(cover, graph, reaches, nid)
        if nid in cover.positions:
            for found, expected in _differences(cover, graph, reaches, nid):
                yield room.finding("auth_chains", [row.event_id], found, expected)
        elif not row.rejected:
            yield room.finding("auth_chains", [row.event_id], "no position", "a position")
        for auth in {*row.auth_events} & left.keys():
            left[auth] -= 1
        for done in [
            related for related in {nid, *row.auth_events} & left.keys() if left[related] <= 0
        ]:
            reaches.pop(done, None)


async def read_cover(conn: Connection, room_nid: int) -> ChainCover:
    positions: dict[int, ChainPosition] = {}
    links: dict[ChainPosition, list[ChainPosition]] = {}
    for nid, chain_nid, number, *own in await conn.fetch(
        SQL_POSITIONS, room_nid, row=CoverPositionRow
    ):
        position = positions[nid] = ChainPosition(chain_nid, number)
        if targets := links_of(nid, own):
            links[position] = targets
    for row in await conn.fetch(
        SQL_LINKS, list({position.chain_nid for position in positions.values()}), row=LinkRow
    ):
        links.setdefault(ChainPosition(*row[:2]), []).append(ChainPosition(*row[2:]))
    return ChainCover(positions, {position: nid for nid, position in positions.items()}, links)


def _reach(cover: ChainCover, graph: AuthGraph, reaches: Mapping[int, Reach], nid: int) -> Reach:
    """Return how far the auth events of an event reach, themselves included."""
    reach: Reach = {}
    for auth in graph.rows[nid].auth_events:
        _add(reach, reaches.get(auth, {}))
        if auth in cover.positions:
            _add(reach, dict([cover.positions[auth]]))
    return reach


def _differences(
    cover: ChainCover, graph: AuthGraph, reaches: Mapping[int, Reach], nid: int
) -> list[tuple[str, str]]:
    """Return what the position and the links of an event state wrongly, or omit."""
    position = cover.positions[nid]
    auth = set(graph.rows[nid].auth_events)
    before = cover.events.get(ChainPosition(position.chain_nid, position.sequence_number - 1))
    wrong: list[tuple[str, str]] = []
    if position.sequence_number < 1:
        wrong.append((_described(position), "a number from 1 on"))
    if position.sequence_number > 1 and before not in auth:
        wrong.append(
            (
                f"{_described(position)}, after an event that is none of its auth events",
                "a chain of auth events",
            )
        )
    reached: Reach = {}
    for auth_nid in [
        before,
        *(cover.events.get(target) for target in cover.links.get(position, ())),
    ]:
        if auth_nid is None:
            continue
        if auth_nid in auth:
            _add(reached, reaches.get(auth_nid, {}))
            _add(reached, dict([cover.positions[auth_nid]]))
        elif auth_nid != before:
            wrong.append((f"a link to {graph.name(auth_nid)}", "links to its auth events only"))
    for auth_nid in auth:
        target = cover.positions.get(auth_nid)
        if target is None or target.sequence_number > reached.get(target.chain_nid, 0):
            wrong.append((f"{graph.name(auth_nid)} not reached", "every auth event reached"))
    return wrong


def _add(reach: Reach, other: Mapping[int, int]) -> None:
    for chain, number in other.items():
        if number > reach.get(chain, 0):
            reach[chain] = number


def _described(position: ChainPosition) -> str:
    return f"number {position.sequence_number} of chain {position.chain_nid}"
