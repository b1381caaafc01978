"""Loading what planning needs: one statement per kind of thing, whatever the number of keys.

Everything loaded is put where `storage.persist.model.cache_view.CacheView` looks for it; what was
not found is remembered as absent for the batch in hand only.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.event import load as load_event
from storage.graph.chains import Chain, ChainPosition
from storage.persist.load.auth_closures import load_closures
from storage.persist.load.batch import load_batch
from storage.persist.load.chain_ancestors import (
    ChainPositionRow,
    load_chain_ancestors,
    powers,
    without_content,
)
from storage.persist.load.lookups import LOOKUPS, keep_rows
from storage.persist.load.prefetch import BatchRequest
from storage.persist.model.change_set import BLOCK_LENGTHS, ChangeSet, NidBlocks
from storage.persist.model.missing_data import MissingData
from storage.persist.model.rows import (
    UNSEEN,
    AudienceRow,
    EventRow,
    MissingRow,
    PastRow,
    RoomRow,
    VisibilityRow,
)
from storage.state.read import read_groups
from storage.visibility import multirange

SQL_EVENTS_BY_ID: Final[LiteralString] = """
SELECT event_nid, event_id, room_nid, stream_ordering, topological_ordering, depth,
    origin_server_ts,
    state_group_before, state_group_after, audience, redacted_by, sender_nid, type_nid,
        state_key_nid,
    membership, outlier, backfilled, soft_failed, redacted_form, rejected, prev_events, auth_events,
        ineffective
FROM events
WHERE event_id = ANY($1::text[])
"""

SQL_EVENTS_BY_NID: Final[LiteralString] = """
SELECT event_nid, event_id, room_nid, stream_ordering, topological_ordering, depth,
    origin_server_ts,
    state_group_before, state_group_after, audience, redacted_by, sender_nid, type_nid,
        state_key_nid,
    membership, outlier, backfilled, soft_failed, redacted_form, rejected, prev_events, auth_events,
        ineffective
FROM events
WHERE event_nid = ANY($1::bigint[])
"""

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
SELECT e.event_nid, e.event_id, e.encoding, e.redacted_form, e.json, r.room_version
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid = ANY($1::bigint[])
"""

SQL_ROOMS: Final[LiteralString] = """
SELECT room_nid, room_id, room_version, write_version, next_audience, current_state_group,
    max_topological_ordering, forward_extremities,
    current_audience, out_of_range::text AS out_of_range, removals
FROM rooms
WHERE room_id = ANY($1::text[])
"""

SQL_PRINCIPALS: Final[LiteralString] = """
SELECT name, principal_nid AS nid
FROM principals
WHERE name = ANY($1::text[])
"""

SQL_TYPES: Final[LiteralString] = """
SELECT type AS name, type_nid AS nid
FROM event_types
WHERE type = ANY($1::text[]) OR type_nid = ANY($2::int[])
"""

SQL_STATE_KEYS: Final[LiteralString] = """
SELECT k.type_nid, k.state_key, k.state_key_nid
FROM state_keys k
JOIN unnest($1::int[], $2::text[]) AS wanted (type_nid, state_key) USING (type_nid, state_key)
"""

SQL_STATE_KEY_NAMES: Final[LiteralString] = """
SELECT type_nid, state_key, state_key_nid
FROM state_keys
WHERE state_key_nid = ANY($1::int[])
"""

SQL_VISIBILITY: Final[LiteralString] = """
SELECT v.room_nid, v.principal_nid, v.audiences::text AS audiences, v.last_join_topological,
    v.joined_count, v.invited_count,
    COALESCE(v.invited_audiences, '{}')::text AS invited_audiences, v.first_audience
FROM visibility v
JOIN unnest($1::int[], $2::int[]) AS wanted (room_nid, principal_nid) USING (room_nid,
    principal_nid)
"""

SQL_PAST: Final[LiteralString] = """
SELECT wanted.room_nid, wanted.principal_nid, p.first_audience, COALESCE((
        SELECT min(o.first_audience)
        FROM past_visibility o
        WHERE o.room_nid = wanted.room_nid AND o.principal_nid = wanted.principal_nid
            AND o.first_audience > p.first_audience
    ), v.first_audience) AS end_audience, p.audiences::text AS audiences,
        COALESCE(p.invited_audiences, '{}')::text AS invited_audiences
FROM unnest($1::int[], $2::int[], $3::bigint[]) AS wanted (room_nid, principal_nid, audience)
CROSS JOIN LATERAL (
    SELECT *
    FROM past_visibility o
    WHERE o.room_nid = wanted.room_nid AND o.principal_nid = wanted.principal_nid
        AND o.first_audience <= wanted.audience
    ORDER BY o.first_audience DESC
    LIMIT 1
) AS p
JOIN visibility v ON v.room_nid = wanted.room_nid AND v.principal_nid = wanted.principal_nid
"""

SQL_AUDIENCES: Final[LiteralString] = """
SELECT a.room_nid, a.audience, a.branches, a.continued, a.opened_topological
FROM audiences a
JOIN unnest($1::int[], $2::bigint[]) AS wanted (room_nid, audience) USING (room_nid, audience)
"""

SQL_NIDS: Final[LiteralString] = """
SELECT 'event_nids' AS name, nextval('event_nids') AS nid FROM generate_series(1, $1::int)
UNION ALL
SELECT 'state_group_nids', nextval('state_group_nids') FROM generate_series(1, $2::int)
UNION ALL
SELECT 'state_key_nids', nextval('state_key_nids') FROM generate_series(1, $3::int)
UNION ALL
SELECT 'type_nids', nextval('type_nids') FROM generate_series(1, $4::int)
UNION ALL
SELECT 'principal_nids', nextval('principal_nids') FROM generate_series(1, $5::int)
UNION ALL
SELECT 'room_nids', nextval('room_nids') FROM generate_series(1, $6::int)
UNION ALL
SELECT 'auth_chain_nids', nextval('auth_chain_nids') FROM generate_series(1, $7::int)
"""

SQL_PLACES: Final[LiteralString] = """
SELECT event_nid, chain_nid, sequence_number
FROM auth_chains
WHERE event_nid = ANY($1::bigint[])
"""

SQL_CHAINS: Final[LiteralString] = """
SELECT chain_nid, NULL::bigint AS target_chain_nid, max(sequence_number) AS number
FROM auth_chains
WHERE chain_nid = ANY($1::bigint[])
GROUP BY chain_nid
UNION ALL
SELECT chain_nid, target_chain_nid, max(target_sequence_number)
FROM auth_chain_links
WHERE chain_nid = ANY($1::bigint[])
GROUP BY chain_nid, target_chain_nid
"""


class KnownRoomRow(NamedTuple):
    """A row of `rooms`."""

    room_nid: int
    room_id: str
    room_version: str
    write_version: int
    next_audience: int
    current_state_group: int | None
    max_topological_ordering: int
    forward_extremities: list[int]
    current_audience: int
    out_of_range: str
    removals: int


class AwaitedEventRow(NamedTuple):
    """What waits for an event: its gap, or a redaction."""

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
    json: bytes
    room_version: str


class NameRow(NamedTuple):
    """A name and its nid."""

    name: str
    nid: int


class StateKeyRow(NamedTuple):
    """A state key and its nid."""

    type_nid: int
    state_key: str
    state_key_nid: int


class LoadedVisibilityRow(NamedTuple):
    """A row of `visibility`."""

    room_nid: int
    principal_nid: int
    audiences: str
    last_join_topological: int | None
    joined_count: int
    invited_count: int
    invited_audiences: str
    first_audience: int | None


class LoadedPastRow(NamedTuple):
    """A row of `past_visibility`, and where the next one begins."""

    room_nid: int
    principal_nid: int
    first_audience: int
    end_audience: int
    audiences: str
    invited_audiences: str


class AudienceNumberRow(NamedTuple):
    """A row of `audiences`."""

    room_nid: int
    audience: int
    branches: int
    continued: bool
    opened_topological: int | None


class ChainReachRow(NamedTuple):
    """The last number of a chain (no target), or up to where it reaches another."""

    chain_nid: int
    target_chain_nid: int | None
    number: int


async def load(conn: Connection, change_set: ChangeSet, needs: MissingData) -> None:
    """Load what a decision lacks."""
    await LOADERS[needs.kind](conn, change_set, needs.keys)


def tells_of(needs: MissingData, change_set: ChangeSet) -> bool:
    """Whether the database can tell this while the rows of a change set are on their way to it, and in the caches already."""
    if needs.kind == "questions":
        return False
    if needs.kind == "past":
        changed = {key[:2] for key in change_set.new_past}
        return all(key[:2] not in changed for key in needs.keys if isinstance(key, tuple))
    if needs.kind == "events":
        return change_set.new_events.keys().isdisjoint(needs.keys)
    gaps = (
        change_set.new_missing
        or change_set.gone_missing
        or change_set.new_waiting
        or change_set.gone_waiting
    )
    if needs.kind == "ahead":
        asked = [one for one in needs.keys if isinstance(one, BatchRequest)]
        return all(
            change_set.new_events.keys().isdisjoint(one.contents) and not (one.events and gaps)
            for one in asked
        )
    return not (needs.kind in ("event_ids", "cited", "gap_nids") and gaps)


async def fill_blocks(conn: Connection, blocks: NidBlocks, wanted: dict[str, int]) -> None:
    """Have at least so many numbers of each sequence at hand. No statement if there are enough."""
    lacking = [max(0, wanted.get(name, 0) - blocks.left(name)) for name in BLOCK_LENGTHS]
    if not any(lacking):
        return
    counts = [
        -(-lack // length) for lack, length in zip(lacking, BLOCK_LENGTHS.values(), strict=True)
    ]
    for name, first in await conn.fetch(SQL_NIDS, *counts, row=NameRow):
        blocks.put(name, first)


async def _nids(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    await fill_blocks(conn, change_set.blocks, dict.fromkeys(keys, 1))


async def _ahead(conn: Connection, change_set: ChangeSet, keys: Collection[BatchRequest]) -> None:
    for lacking in keys:
        await load_batch(conn, change_set, lacking)


async def _event_ids(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    rows = await conn.fetch(SQL_EVENTS_BY_ID, list(keys), row=EventRow)
    gaps = await conn.fetch(SQL_GAPS, list(keys), row=AwaitedEventRow)
    for key in keys:
        change_set.rows.setdefault(key, None)
        change_set.missing.setdefault(key, None)
        change_set.waiting.setdefault(key, ())
    keep_rows(change_set, rows)
    for gap in gaps:
        if gap.kind == "waiting":
            change_set.waiting[gap.event_id] = (*change_set.waiting[gap.event_id], gap.event_nid)
        elif (
            gap.event_id not in change_set.new_missing
            and gap.event_id not in change_set.gone_missing
        ):
            change_set.missing[gap.event_id] = MissingRow(
                *gap[1:4], superseded=bool(gap.superseded), child_nids=tuple(gap.child_nids or ())
            )


async def _gap_nids(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    change_set.gap_ids.update(
        (nid, event_id) for event_id, nid in await conn.fetch(SQL_GAP_IDS, list(keys), row=NameRow)
    )


async def _event_nids(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    rows = await conn.fetch(SQL_EVENTS_BY_NID, list(keys), row=EventRow)
    for key in keys:
        change_set.row_ids.setdefault(key, "")
    keep_rows(change_set, rows)


async def _events(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    for row in await conn.fetch(SQL_CONTENT, list(keys), row=ContentRow):
        change_set.events[row.event_nid] = load_event(
            row.json, row.room_version, row.event_id, redacted=row.redacted_form
        )


async def _cited(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    if unknown := [
        key for key in keys if key not in change_set.rows and key not in change_set.caches.rows
    ]:
        await _event_ids(conn, change_set, unknown)
    rows = [
        row
        for key in keys
        if (row := change_set.rows.get(key) or change_set.caches.rows.get(key)) is not None
    ]
    nids = {row.event_nid for row in rows}.union(
        await load_chain_ancestors(conn, change_set, powers(rows), _event_nids)
    )
    if lacking := without_content(change_set, nids):
        await _events(conn, change_set, lacking)


async def _standing(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    await load_chain_ancestors(conn, change_set, keys, _event_nids)
    _check_places(change_set, keys)
    for key in keys:
        change_set.row_of(key)


async def _groups(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    change_set.groups.update(await read_groups(conn, keys))


async def _rooms(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    for key in keys:
        change_set.rooms.setdefault(key, None)
    for row in await conn.fetch(SQL_ROOMS, list(keys), row=KnownRoomRow):
        out_of_range = multirange.from_text(row.out_of_range)
        change_set.rooms[row.room_id] = RoomRow(
            *row[:7],
            tuple(row.forward_extremities),
            row.current_audience,
            out_of_range,
            row.removals,
        )


async def _types(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    for key in keys:
        change_set.types.setdefault(key, None)
    _keep_types(change_set, await conn.fetch(SQL_TYPES, list(keys), [], row=NameRow))


async def _type_names(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    _keep_types(change_set, await conn.fetch(SQL_TYPES, [], list(keys), row=NameRow))


def _keep_types(change_set: ChangeSet, rows: Iterable[NameRow]) -> None:
    for name, nid in rows:
        change_set.types[name] = nid
        change_set.type_names[nid] = name


async def _state_keys(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, str]]
) -> None:
    for key in keys:
        change_set.state_keys.setdefault(key, None)
    _keep_state_keys(
        change_set,
        await conn.fetch(
            SQL_STATE_KEYS, [key[0] for key in keys], [key[1] for key in keys], row=StateKeyRow
        ),
    )


async def _state_key_names(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    _keep_state_keys(change_set, await conn.fetch(SQL_STATE_KEY_NAMES, list(keys), row=StateKeyRow))


def _keep_state_keys(change_set: ChangeSet, rows: Iterable[StateKeyRow]) -> None:
    for type_nid, state_key, nid in rows:
        change_set.state_keys[type_nid, state_key] = nid
        change_set.state_key_names[nid] = (type_nid, state_key)


async def _principals(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    for key in keys:
        change_set.principals.setdefault(key, None)
    change_set.principals.update(await conn.fetch(SQL_PRINCIPALS, list(keys), row=NameRow))


async def _visibility(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int]]
) -> None:
    for key in keys:
        change_set.visibility.setdefault(key, UNSEEN)
    for row in await conn.fetch(
        SQL_VISIBILITY, [key[0] for key in keys], [key[1] for key in keys], row=LoadedVisibilityRow
    ):
        if (row.room_nid, row.principal_nid) not in change_set.new_visibility:
            change_set.visibility[row.room_nid, row.principal_nid] = VisibilityRow(
                multirange.from_text(row.audiences),
                row.last_join_topological,
                row.joined_count,
                row.invited_count,
                multirange.from_text(row.invited_audiences),
                row.first_audience,
            )


async def _past(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int, int]]
) -> None:
    """Rows of old audiences.

    Where there are none, the principal is in none of these: a purge has let go of them.
    """
    for row in await conn.fetch(SQL_PAST, *transposed(keys, 3), row=LoadedPastRow):
        seen = multirange.from_text(row.audiences), multirange.from_text(row.invited_audiences)
        _keep_past(change_set, row[:2], PastRow(row.first_audience, row.end_audience, *seen))
    for room_nid, principal_nid, _ in keys:
        if not change_set.past.get((room_nid, principal_nid)):
            end = change_set.visible(room_nid, principal_nid).first_audience or 0
            _keep_past(
                change_set,
                (room_nid, principal_nid),
                PastRow(0, end, multirange.EMPTY, multirange.EMPTY),
            )


def _keep_past(change_set: ChangeSet, key: tuple[int, int], row: PastRow) -> None:
    """A row as the table has it; what the change set has made of it is newer."""
    change_set.past.setdefault(key, {}).setdefault(row.first_audience, row)


async def _audiences(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, int]]
) -> None:
    for row in await conn.fetch(
        SQL_AUDIENCES, [key[0] for key in keys], [key[1] for key in keys], row=AudienceNumberRow
    ):
        if (row.room_nid, row.audience) not in change_set.new_audiences:
            change_set.audiences[row.room_nid, row.audience] = AudienceRow(
                row.branches, row.continued, row.opened_topological
            )


async def _places(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    for row in await conn.fetch(SQL_PLACES, list(keys), row=ChainPositionRow):
        change_set.places[row.event_nid] = ChainPosition(row.chain_nid, row.sequence_number)
    _check_places(change_set, keys)


def _check_places(change_set: ChangeSet, keys: Collection[int]) -> None:
    lost = [key for key in keys if key not in change_set.places]
    if lost:
        raise StorageCorrupt("auth events have no place in the chain cover", event_nids=lost)


async def _chains(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    rows = await conn.fetch(SQL_CHAINS, list(keys), row=ChainReachRow)
    for row in rows:
        if row.target_chain_nid is None:
            links = {
                one.target_chain_nid: one.number
                for one in rows
                if one.chain_nid == row.chain_nid and one.target_chain_nid is not None
            }
            change_set.chains[row.chain_nid] = Chain(row.number, links)


async def _questions(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[Any, ...]]
) -> None:
    for question in keys:
        change_set.answers[question] = await LOOKUPS[question[0]](conn, change_set, *question[1:])


LOADERS: Final[dict[str, Callable[[Connection, ChangeSet, Any], Awaitable[None]]]] = {
    "nids": _nids,
    "ahead": _ahead,
    "event_ids": _event_ids,
    "event_nids": _event_nids,
    "gap_nids": _gap_nids,
    "events": _events,
    "cited": _cited,
    "standing": _standing,
    "groups": _groups,
    "rooms": _rooms,
    "types": _types,
    "type_names": _type_names,
    "state_keys": _state_keys,
    "state_key_names": _state_key_names,
    "principals": _principals,
    "visibility": _visibility,
    "past": _past,
    "audiences": _audiences,
    "places": _places,
    "chains": _chains,
    "closures": load_closures,
    "questions": _questions,
}
