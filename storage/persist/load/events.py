"""Load events: their rows, their contents, and what waits for one that is missing."""

from collections.abc import Collection
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode_recent
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import StorageCorrupt
from storage.event import load as load_event
from storage.graph.chains import Chain, ChainPosition
from storage.persist.load.chain_ancestors import (
    ChainPositionRow,
    load_chain_ancestors,
    powers,
    without_content,
)
from storage.persist.load.lookups import EVENT_ROW, keep_rows
from storage.persist.load.names import NameRow
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow, MissingRow

SQL_EVENTS_BY_ID: Final[LiteralString] = compose(
    """
SELECT :event.columns
FROM unnest($1::text[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.id OFFSET 0) AS e
""",
    EVENT_ROW,
).sql

SQL_EVENTS_BY_NID: Final[LiteralString] = compose(
    """
SELECT :event.columns
FROM events
WHERE event_nid = ANY($1::bigint[])
""",
    EVENT_ROW,
).sql

SQL_GAPS: Final[LiteralString] = """
SELECT 'missing' AS kind, event_nid, event_id, room_nid, superseded, child_nids
FROM missing_events
WHERE event_id = ANY($1::text[])
UNION ALL
SELECT 'waiting', redaction_nid, target_event_id, room_nid, NULL, NULL
FROM waiting_redactions
WHERE target_event_id = ANY($1::text[])
"""

SQL_GAP_IDS: Final[LiteralString] = """
SELECT event_id AS name, event_nid AS nid
FROM missing_events
WHERE event_nid = ANY($1::bigint[])
"""

SQL_CONTENT: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, e.encoding, e.redacted_form, e.json, r.room_id, r.room_version
FROM events e
CROSS JOIN LATERAL (
    SELECT room_id, room_version FROM rooms WHERE room_nid = e.room_nid OFFSET 0
) AS r
WHERE e.event_nid = ANY($1::bigint[])
"""

SQL_PLACES: Final[LiteralString] = """
SELECT event_nid, COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
FROM auth_chains
WHERE event_nid = ANY($1::bigint[])
"""

SQL_CHAINS: Final[LiteralString] = """
WITH wanted AS MATERIALIZED (SELECT DISTINCT unnest($1::bigint[]) AS chain_nid)
SELECT w.chain_nid, NULL::bigint AS target_chain_nid, max(a.sequence_number) AS number
FROM wanted w
CROSS JOIN LATERAL chain_rows(w.chain_nid, 2147483647) AS a
GROUP BY w.chain_nid
UNION ALL
SELECT w.chain_nid, l.chain_nid_reached, l.upto
FROM wanted w
CROSS JOIN LATERAL reached_from(w.chain_nid, 2147483647) AS l
"""


class AwaitedEventRow(NamedTuple):
    """A gap, or a redaction, that waits for an event."""

    kind: str
    event_nid: int
    event_id: str
    room_nid: int
    superseded: bool | None
    child_nids: list[int] | None


class ContentRow(NamedTuple):
    """The bytes of an event, and how to read them."""

    event_nid: int
    event_id: str
    encoding: int
    redacted_form: bool
    json: StoredBytes
    room_id: str
    room_version: str


class ChainReachRow(NamedTuple):
    """The length of a chain (no target), or how far it reaches into another."""

    chain_nid: int
    target_chain_nid: int | None
    number: int


async def load_event_ids(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    """Load events by id, and what waits for those that are missing."""
    rows = await conn.fetch(SQL_EVENTS_BY_ID, list(keys), row=EventRow)
    gaps = await conn.fetch(SQL_GAPS, list(keys), row=AwaitedEventRow)
    for key in keys:
        change_set.events.rows.setdefault(key, None)
        change_set.events.missing.setdefault(key, None)
        change_set.events.waiting.setdefault(key, ())
    keep_rows(change_set, rows)
    for gap in gaps:
        if gap.kind == "waiting":
            change_set.events.waiting[gap.event_id] = (
                *change_set.events.waiting[gap.event_id],
                gap.event_nid,
            )
        elif (
            gap.event_id not in change_set.events.new_missing
            and gap.event_id not in change_set.events.gone_missing
        ):
            change_set.events.missing[gap.event_id] = MissingRow(
                *gap[1:4], superseded=bool(gap.superseded), child_nids=tuple(gap.child_nids or ())
            )


async def load_gap_nids(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    """Load the ids of missing events."""
    change_set.events.gap_ids.update(
        (nid, event_id) for event_id, nid in await conn.fetch(SQL_GAP_IDS, list(keys), row=NameRow)
    )


async def load_event_nids(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    rows = await conn.fetch(SQL_EVENTS_BY_NID, list(keys), row=EventRow)
    for key in keys:
        change_set.events.row_ids.setdefault(key, "")
    keep_rows(change_set, rows)


async def load_events(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    for row in await conn.fetch(SQL_CONTENT, list(keys), row=ContentRow):
        raw = decode_recent(row.json, row.event_id, row.room_id)
        change_set.events.parsed[row.event_nid] = load_event(
            raw, row.room_version, row.event_id, redacted=row.redacted_form
        )


async def load_cited(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    """Load the auth events of an event: rows, contents, and the ancestors on their chains."""
    if unknown := [
        key
        for key in keys
        if key not in change_set.events.rows and key not in change_set.caches.rows
    ]:
        await load_event_ids(conn, change_set, unknown)
    rows = [
        row
        for key in keys
        if (row := change_set.events.rows.get(key) or change_set.caches.rows.row(key)) is not None
    ]
    nids = {row.event_nid for row in rows}.union(
        await load_chain_ancestors(conn, change_set, powers(rows), load_event_nids)
    )
    if lacking := without_content(change_set, nids):
        await load_events(conn, change_set, lacking)


async def load_ancestors(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    await load_chain_ancestors(conn, change_set, keys, load_event_nids)
    _check_places(change_set, keys)
    for key in keys:
        change_set.events.row_of(key)


async def load_chain_positions(
    conn: Connection, change_set: ChangeSet, keys: Collection[int]
) -> None:
    for row in await conn.fetch(SQL_PLACES, list(keys), row=ChainPositionRow):
        change_set.auth_graph.places[row.event_nid] = ChainPosition(
            row.chain_nid, row.sequence_number
        )
    _check_places(change_set, keys)


def _check_places(change_set: ChangeSet, keys: Collection[int]) -> None:
    lost = [key for key in keys if key not in change_set.auth_graph.places]
    if lost:
        raise StorageCorrupt("auth events have no place in the chain cover", event_nids=lost)


async def load_chains(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    """Load the lengths and the links of chains."""
    rows = await conn.fetch(SQL_CHAINS, list(keys), row=ChainReachRow)
    for row in rows:
        if row.target_chain_nid is None:
            links = {
                one.target_chain_nid: one.number
                for one in rows
                if one.chain_nid == row.chain_nid and one.target_chain_nid is not None
            }
            change_set.auth_graph.chains[row.chain_nid] = Chain(row.number, links)
