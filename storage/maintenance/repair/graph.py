"""Rebuild missing events, forward extremities and latest orderings, from the events."""

from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection, Database
from storage.database.placeholders import compose, fill, int_array, transposed
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import load, parse
from storage.graph.chains import (
    Chain,
    ChainColumns,
    ChainEntry,
    ChainParent,
    ChainPosition,
    all_columns,
    enter,
    extended,
)
from storage.maintenance.expiry import delete_connections
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.room_states import PART_ROOM_EVENTS
from storage.maintenance.verify.auth_graph import AuthGraph, read_auth_graph
from storage.maintenance.verify.event_columns import (
    CONTENTS,
    SQL_INEFFECTIVE,
    SQL_NIDS,
    misnamed,
    redactions,
    relation_columns,
)
from storage.maintenance.verify.event_loader import VerifiedRoom
from storage.maintenance.verify.graph import (
    SQL_CONNECTIONS,
    SQL_EXTREMITIES,
    SQL_GAPS,
    SQL_LAGGING_POSITIONS,
    SQL_NO_EXTREMITIES,
    SQL_TIME_ORDER,
    SQL_WRONG_REORDERINGS,
    LaggingWriterRow,
    MistakenConnectionRow,
    TimeOrderRow,
    WrongGapRow,
    WrongReorderingRow,
)
from storage.streams.startup import lock_positions, set_sequences_forward

SQL_DROP_GAPS: Final[LiteralString] = """
DELETE FROM missing_events
WHERE event_nid = ANY($1::bigint[])
"""

SQL_ADD_GAPS: Final[LiteralString] = """
INSERT INTO missing_events (event_nid, event_id, room_nid, superseded, child_nids)
SELECT i.event_nid, i.event_id, $1::int, i.superseded, i.child_nids::bigint[]
FROM unnest($2::bigint[], $3::text[], $4::boolean[], $5::text[]) AS i (event_nid, event_id,
    superseded, child_nids)
"""

SQL_DROP_MOVES: Final[LiteralString] = """
DELETE FROM reordered_events m
USING unnest($2::bigint[], $3::bigint[]) AS i (moves, event_nid)
WHERE m.room_nid = $1::int AND m.moves = i.moves AND m.event_nid = i.event_nid
"""

SQL_COUNT_MOVES: Final[LiteralString] = """
UPDATE rooms
SET moves = GREATEST(moves,
    (SELECT max(m.moves) FROM reordered_events m WHERE m.room_nid = $1::int))
WHERE room_nid = $1::int
"""

SQL_CHILD: Final[LiteralString] = compose(
    """
SELECT event_id, redacted_form, :prev_nids.call AS prev_events, json
FROM events
WHERE event_nid = $1::bigint
""",
    PREV_NIDS,
).sql

SQL_SET_ENDS: Final[LiteralString] = """
UPDATE rooms
SET forward_extremities = $2::bigint[],
    max_topological_ordering = GREATEST(max_topological_ordering, latest.topological_ordering),
    last_stream_ordering = GREATEST(latest.stream_ordering, completed_at)
FROM (
    SELECT COALESCE(max(topological_ordering), 0) AS topological_ordering,
        max(stream_ordering) FILTER (WHERE NOT backfilled) AS stream_ordering
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
) AS latest
WHERE room_nid = $1::int
"""

SQL_DROP_NEVER_ENDS: Final[LiteralString] = """
DELETE FROM dropped_extremities
WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])
"""


class ChildRow(NamedTuple):
    """A child, from whose bytes the id of a parent is read."""

    event_id: str
    redacted_form: bool
    prev_events: list[int]
    json: StoredBytes


async def repair_gaps(conn: Connection, room: VerifiedRoom) -> None:
    """Set the missing events by the edges."""
    rows = await conn.fetch(SQL_GAPS, room.nid, row=WrongGapRow)
    await conn.execute(SQL_DROP_GAPS, [row.event_nid for row in rows])
    gaps = [
        (
            row.event_nid,
            await _missing_id(conn, room, row),
            row.expected_superseded,
            int_array(row.expected_nids),
        )
        for row in rows
        if row.expected_nids is not None
    ]
    await conn.execute(SQL_ADD_GAPS, room.nid, *transposed(gaps, 4))


async def repair_reorderings(conn: Connection, room_nid: int) -> None:
    """Drop impossible reorderings; tokens then use the current positions of these events."""
    while wrong := await conn.fetch(SQL_WRONG_REORDERINGS, room_nid, row=WrongReorderingRow):
        await conn.execute(SQL_DROP_MOVES, room_nid, *transposed((row[:2] for row in wrong), 2))
    await conn.execute(SQL_COUNT_MOVES, room_nid)


async def _missing_id(conn: Connection, room: VerifiedRoom, gap: WrongGapRow) -> str:
    """Return the id of a missing event: its own if it is an outlier, else as a child names it."""
    child = await conn.fetchrow(SQL_CHILD, gap.event_nid, row=ChildRow)
    if child is not None:
        return child.event_id
    [child_nid, *_] = gap.expected_nids or [0]
    child = await conn.fetchrow(SQL_CHILD, child_nid, row=ChildRow)
    assert child is not None, "the child was read in this snapshot"  # noqa: S101  # for the types
    raw = decode(child.json, child.event_id, room.row.room_id)
    event = load(raw, room.row.room_version, child.event_id, redacted=child.redacted_form)
    return list(dict.fromkeys(event.prev_event_ids))[child.prev_events.index(gap.event_nid)]


async def repair_extremities(conn: Connection, room_nid: int) -> list[int]:
    """Set the forward extremities by the edges, without the dropped ones; return them."""
    await conn.execute(
        SQL_DROP_NEVER_ENDS, room_nid, await conn.fetchvals(SQL_NO_EXTREMITIES, room_nid)
    )
    ends: list[int] = sorted(await conn.fetchvals(SQL_EXTREMITIES, room_nid))
    await conn.execute(SQL_SET_ENDS, room_nid, ends)
    return ends


# --------------------------------------------------------------------------------------------------
# Rebuild the chain cover of a room, with the same function that extends it event by event.

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
            known = (
                None if entry.position.sequence_number == 1 else chains[entry.position.chain_nid]
            )
            chains[entry.position.chain_nid] = extended(known, entry)
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
        ChainParent(auth.event_nid, entries[auth.event_nid].position, auth.auth_events)
        for auth in rows
    ]
    own: list[ChainPosition] = [
        entries[auth.event_nid].position for auth in rows if auth.state_key_nid == row.state_key_nid
    ]
    predecessor = max(own, default=None)
    chain = None if predecessor is None else chains[predecessor.chain_nid]
    return enter(predecessor, chain, -nid, parents)


# --------------------------------------------------------------------------------------------------
# Rebuild the relations of events, from their bytes.

SQL_BYTES: Final[LiteralString] = """
SELECT event_nid, event_id, json
FROM events
WHERE event_nid = ANY($1::bigint[])
"""

SQL_ADD_TYPES: Final[LiteralString] = """
INSERT INTO event_types (type_nid, type)
SELECT nextval('type_nids'), i.type
FROM unnest($1::text[]) AS i (type)
WHERE NOT EXISTS (SELECT FROM event_types t WHERE t.type = i.type)
ON CONFLICT DO NOTHING
"""

SQL_SET_RELATIONS: Final[LiteralString] = """
UPDATE events e
SET relates_to = i.relates_to,
    rel_type_nid = t.type_nid,
    replaces = i.replaces
FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::boolean[]) AS i (event_nid, relates_to,
    rel_type, replaces)
    LEFT JOIN event_types t ON t.type = i.rel_type
WHERE e.event_nid = i.event_nid
    AND (e.relates_to, e.rel_type_nid, e.replaces) IS DISTINCT FROM (i.relates_to, t.type_nid,
        i.replaces)
"""


class RelatingEventRow(NamedTuple):
    """The bytes of an event."""

    event_nid: int
    event_id: str
    json: StoredBytes


async def repair_relations(conn: Connection, room: VerifiedRoom) -> None:
    """Set the relation columns of every event by its bytes; none for an unreadable event."""
    nids: list[int] = await conn.fetchvals(SQL_NIDS, room.nid)
    for start in range(0, len(nids), CONTENTS):
        rows = await conn.fetch(SQL_BYTES, nids[start : start + CONTENTS], row=RelatingEventRow)
        relations = [(row.event_nid, *_columns(room, row)) for row in rows]
        await conn.execute(
            SQL_ADD_TYPES,
            list({rel_type for _, _, rel_type, _ in relations if rel_type is not None}),
        )
        await conn.execute(SQL_SET_RELATIONS, *transposed(relations, 4))


def _columns(
    room: VerifiedRoom, row: RelatingEventRow
) -> tuple[int | None, str | None, bool | None]:
    try:
        raw = decode(row.json, row.event_id, room.row.room_id)
        return relation_columns(parse(raw, room.row.room_version))
    except (InvalidEvent, StorageCorrupt):  # `verify` reports it
        return None, None, None


# --------------------------------------------------------------------------------------------------
# Repair which redaction took effect on which event, and which redactions wait, from the events.

SQL_SET_REDACTED: Final[LiteralString] = """
UPDATE events e
SET redacted_by = (SELECT r.event_nid FROM events r WHERE r.event_id = i.redaction_id)
FROM unnest($1::text[], $2::text[]) AS i (event_id, redaction_id)
WHERE e.event_id = i.event_id
"""

SQL_SET_INEFFECTIVE: Final[LiteralString] = """
UPDATE events e
SET ineffective = i.ineffective
FROM unnest($1::text[], $2::boolean[]) AS i (event_id, ineffective)
WHERE e.event_id = i.event_id
"""

SQL_DROP_WAITING: Final[LiteralString] = """
DELETE FROM waiting_redactions
WHERE room_nid = $1::int
"""

SQL_ADD_WAITING: Final[LiteralString] = """
INSERT INTO waiting_redactions (redaction_nid, room_nid, target_event_id)
SELECT i.redaction_nid, $1::int, i.target_event_id
FROM unnest($2::bigint[], $3::text[]) AS i (redaction_nid, target_event_id)
"""


async def repair_redactions(conn: Connection, room: VerifiedRoom) -> None:
    """Set the flags of redactions and their targets, and the redactions that wait."""
    expected = await redactions(conn, room)
    named = [
        (event_id, wanted)
        for event_id, (_, wanted) in (await misnamed(conn, room, expected)).items()
    ]
    flags = (
        dict.fromkeys(await conn.fetchvals(SQL_INEFFECTIVE, room.nid), False) | expected.mistaken
    )
    await conn.execute(SQL_SET_REDACTED, *transposed(named, 2))
    await conn.execute(SQL_SET_INEFFECTIVE, *transposed(flags.items(), 2))
    await conn.execute(SQL_DROP_WAITING, room.nid)
    await conn.execute(SQL_ADD_WAITING, room.nid, *transposed(expected.waiting.items(), 2))


# --------------------------------------------------------------------------------------------------
# Repair what all rooms share: sequences, and the stream positions of writers.
#
# Connections of sliding sync with mistaken rows are deleted: their clients begin new ones.
# Sequences are set past the values in the tables, and positions up to the facts of each writer. A
# store that opens also sets the sequences forward (storage/streams/startup.py). This is for a
# running store.

SQL_SET_POSITION: Final[LiteralString] = """
INSERT INTO stream_positions (stream_name, instance_name, stream_id)
VALUES ($1::text, $2::text, $3::bigint)
ON CONFLICT (stream_name, instance_name)
    DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
"""


async def repair_positions(database: Database, *, indexes_compared: bool = False) -> None:
    """Set sequences and positions forward, in one transaction that blocks writers.

    Delete connections with mistaken rows.

    Facts of an unknown writer stay as they are. ``indexes_compared``: the caller has called
    `refuse_corrupt_indexes`. Raise `StorageCorrupt` if an index is corrupt: nothing has changed
    then.
    """

    async def work(conn: Connection) -> None:
        await lock_positions(conn)
        for row in await conn.fetch(SQL_LAGGING_POSITIONS, row=LaggingWriterRow):
            if row.instance_name is not None:
                await conn.execute(SQL_SET_POSITION, row.stream_name, row.instance_name, row.latest)
        await set_sequences_forward(conn)
        mistaken = await conn.fetch(SQL_CONNECTIONS, row=MistakenConnectionRow)
        await delete_connections(conn, [row.connection_nid for row in mistaken])

    if not indexes_compared:
        await refuse_corrupt_indexes(database, "a repair")
    await database.run(work)


# --------------------------------------------------------------------------------------------------
# Put events that are wrongly left out of the index of times into it.

SQL_SET_OUT_OF_ORDER: Final[LiteralString] = """
UPDATE events e
SET in_order_ts = i.in_order_ts
FROM unnest($1::bigint[], $2::bigint[]) AS i (event_nid, in_order_ts)
WHERE e.event_nid = i.event_nid
"""

SQL_SET_REACHED: Final[LiteralString] = """
UPDATE rooms r
SET in_order_ts = reached.in_order_ts
FROM (
    SELECT max(COALESCE(in_order_ts, origin_server_ts)) AS in_order_ts
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled
) AS reached
WHERE r.room_nid = $1::int AND r.in_order_ts < reached.in_order_ts
"""


async def repair_time_order(conn: Connection, room_nid: int) -> None:
    """Set the time that was reached before it for each event where it is not possible.

    The time reached after it stays what it was, so no other event becomes wrong.
    """
    wrong = await conn.fetch(SQL_TIME_ORDER, room_nid, row=TimeOrderRow)
    await conn.execute(
        SQL_SET_OUT_OF_ORDER, *transposed(((row.event_nid, row.before) for row in wrong), 2)
    )
    await conn.execute(SQL_SET_REACHED, room_nid)
