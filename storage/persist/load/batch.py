"""The one statement that loads what a batch names, whatever the kind of thing, or a small one for names: see `storage.persist.load.prefetch`.

Rows of all kinds come in the same columns, and each kind has its function that takes them in. What is loaded while planning goes through
`storage.persist.load.by_kind`, one kind at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.array_text import array_text, column_texts, transposed
from storage.database.connection import Connection
from storage.database.names import (
    KEY_CREATE,
    KEY_HISTORY_VISIBILITY,
    KEY_JOIN_RULES,
    KEY_POWER_LEVELS,
)
from storage.event import load as load_event
from storage.graph.chains import Chain, ChainPosition
from storage.persist.load.lookups import keep_rows
from storage.persist.load.prefetch import STANDING, BatchRequest
from storage.persist.model.change_set import BLOCK_LENGTHS, ChangeSet
from storage.persist.model.rows import UNSEEN, EventRow, MissingRow, RoomRow, VisibilityRow
from storage.state.read import groups_of
from storage.state.rows import GroupRow
from storage.visibility import multirange

SQL_AHEAD: Final[LiteralString] = """
WITH
room AS MATERIALIZED (
    SELECT * FROM rooms WHERE room_id = ANY($1::text[])
),
held AS MATERIALIZED (
    SELECT event_nid, event_id, room_nid, stream_ordering, topological_ordering, depth,
        origin_server_ts,
        state_group_before, state_group_after, audience, redacted_by, sender_nid, type_nid,
            state_key_nid,
        membership, outlier, backfilled, soft_failed, redacted_form, rejected, prev_events,
            auth_events, ineffective
    FROM events
    WHERE event_id = ANY($2::text[])
        OR event_nid = ANY(ARRAY(SELECT unnest(forward_extremities) FROM room))
),
auth AS MATERIALIZED (
    SELECT event_nid FROM held WHERE event_id = ANY($4::text[])
),
path AS MATERIALIZED (
    SELECT g.state_group - unnest(g.back) AS state_group
    FROM state_groups g
    WHERE g.state_group = ANY(ARRAY(
        SELECT COALESCE(state_group_after, state_group_before)
        FROM held
        WHERE NOT outlier AND (event_id = ANY($3::text[])
            OR event_nid = ANY(ARRAY(SELECT unnest(forward_extremities) FROM room)))
        UNION
        SELECT current_state_group FROM room
    ) || $6::bigint[])
),
place AS MATERIALIZED (
    SELECT event_nid, chain_nid, sequence_number
    FROM auth_chains
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM auth) || $7::bigint[])
)
SELECT 'room' AS kind, ARRAY[room_id, room_version, out_of_range::text] AS texts,
    ARRAY[room_nid, write_version, next_audience, current_state_group, max_topological_ordering,
        current_audience, removals] AS numbers,
    forward_extremities AS one, NULL::bigint[] AS two, NULL::int[] AS three, NULL::int[] AS four,
        NULL::int[] AS five, NULL::bytea AS data
FROM room
UNION ALL
SELECT 'event', ARRAY[event_id, rejected],
    ARRAY[event_nid, room_nid, stream_ordering, topological_ordering, depth, origin_server_ts,
        state_group_before, state_group_after, audience,
        redacted_by, sender_nid, type_nid, state_key_nid, membership, outlier::int, backfilled::int,
            soft_failed::int, redacted_form::int,
        ineffective::int],
    prev_events, auth_events, NULL, NULL, NULL, NULL
FROM held
UNION ALL
SELECT 'missing', ARRAY[event_id], ARRAY[event_nid, room_nid, superseded::int], child_nids, NULL,
    NULL, NULL, NULL, NULL
FROM missing_events
WHERE event_id = ANY($2::text[])
UNION ALL
SELECT 'waiting', ARRAY[target_event_id], ARRAY[redaction_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM waiting_redactions
WHERE target_event_id = ANY($2::text[])
UNION ALL
SELECT 'content', ARRAY[e.event_id, r.room_version], ARRAY[e.event_nid, e.redacted_form::int], NULL,
    NULL, NULL, NULL, NULL, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid = ANY(ARRAY(
    SELECT event_nid FROM auth
    UNION
    SELECT c.event_nid FROM room JOIN current_state c USING (room_nid)
        WHERE c.state_key_nid = ANY($16::int[])
) || $5::bigint[])
UNION ALL
SELECT 'group', NULL, ARRAY[state_group, digest, audience, room_nid, entry_count, runs],
    event_nids, member_event_nids, back, key_nids, member_key_nids, NULL
FROM state_groups
WHERE state_group IN (SELECT state_group FROM path)
UNION ALL
SELECT 'place', NULL, ARRAY[event_nid, chain_nid, sequence_number], NULL, NULL, NULL, NULL, NULL,
    NULL
FROM place
UNION ALL
SELECT 'chain', NULL, ARRAY[chain_nid, NULL, max(sequence_number)], NULL, NULL, NULL, NULL, NULL,
    NULL
FROM auth_chains
WHERE chain_nid IN (SELECT chain_nid FROM place)
GROUP BY chain_nid
UNION ALL
SELECT 'chain', NULL, ARRAY[chain_nid, target_chain_nid, max(target_sequence_number)], NULL, NULL,
    NULL, NULL, NULL, NULL
FROM auth_chain_links
WHERE chain_nid IN (SELECT chain_nid FROM place)
GROUP BY chain_nid, target_chain_nid
UNION ALL
SELECT 'principal', ARRAY[name], ARRAY[principal_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM principals
WHERE name = ANY($8::text[])
UNION ALL
SELECT 'type', ARRAY[type], ARRAY[type_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM event_types
WHERE type = ANY($9::text[])
UNION ALL
SELECT 'state_key', ARRAY[k.state_key], ARRAY[k.type_nid, k.state_key_nid], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest($10::text[], $11::text[]) AS wanted (type, state_key)
JOIN event_types t ON t.type = wanted.type
-- one by one, by the whole key, as the next: never all keys of a type, nor all members of a room,
-- for each
CROSS JOIN LATERAL (
    SELECT * FROM state_keys WHERE type_nid = t.type_nid AND state_key = wanted.state_key OFFSET 0
) AS k
UNION ALL
SELECT 'seen', ARRAY[v.audiences::text, COALESCE(v.invited_audiences, '{}')::text],
    ARRAY[v.room_nid, v.principal_nid, v.last_join_topological, v.joined_count, v.invited_count,
        v.first_audience],
    NULL, NULL, NULL, NULL, NULL, NULL
FROM unnest($12::text[], $13::text[]) AS wanted (room_id, name)
JOIN rooms r ON r.room_id = wanted.room_id
JOIN principals p ON p.name = wanted.name
CROSS JOIN LATERAL (
    SELECT * FROM visibility
        WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid OFFSET 0
) AS v
UNION ALL
SELECT 'number', ARRAY[wanted.name], ARRAY[nextval(wanted.name::regclass)], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest($14::text[], $15::int[]) AS wanted (name, blocks)
CROSS JOIN generate_series(1, wanted.blocks)
"""

SQL_NAMES_AHEAD: Final[LiteralString] = """
SELECT 'principal' AS kind, ARRAY[name] AS texts, ARRAY[principal_nid]::bigint[] AS numbers,
    NULL::bigint[] AS one, NULL::bigint[] AS two, NULL::int[] AS three, NULL::int[] AS four,
        NULL::int[] AS five, NULL::bytea AS data
FROM principals
WHERE name = ANY($1::text::text[])
UNION ALL
SELECT 'type', ARRAY[type], ARRAY[type_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM event_types
WHERE type = ANY($2::text::text[])
UNION ALL
SELECT 'state_key', ARRAY[k.state_key], ARRAY[k.type_nid, k.state_key_nid], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest($3::text::text[], $4::text::text[]) AS wanted (type, state_key)
JOIN event_types t ON t.type = wanted.type
CROSS JOIN LATERAL (
    SELECT * FROM state_keys WHERE type_nid = t.type_nid AND state_key = wanted.state_key OFFSET 0
) AS k
UNION ALL
SELECT 'seen', ARRAY[v.audiences::text, COALESCE(v.invited_audiences, '{}')::text],
    ARRAY[v.room_nid, v.principal_nid, v.last_join_topological, v.joined_count, v.invited_count,
        v.first_audience],
    NULL, NULL, NULL, NULL, NULL, NULL
FROM unnest($5::text::text[], $6::text::text[]) AS wanted (room_id, name)
JOIN rooms r ON r.room_id = wanted.room_id
JOIN principals p ON p.name = wanted.name
CROSS JOIN LATERAL (
    SELECT * FROM visibility
        WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid OFFSET 0
) AS v
UNION ALL
SELECT 'number', ARRAY[wanted.name], ARRAY[nextval(wanted.name::regclass)], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest($7::text::text[], $8::text::int[]) AS wanted (name, blocks)
CROSS JOIN generate_series(1, wanted.blocks)
"""
"""The same without rooms and events: all that is lacking where a room is known and somebody new comes, for a third of the cost."""


RULING_KEYS: Final = [KEY_CREATE, KEY_POWER_LEVELS, KEY_JOIN_RULES, KEY_HISTORY_VISIBILITY]
"""State keys whose events decide about most others: their contents come with the room."""


EVENT_FLAGS: Final = ("outlier", "backfilled", "soft_failed", "redacted_form", "ineffective")
EVENT_NUMBERS: Final = (  # in the order of the statement
    "event_nid",
    "room_nid",
    "stream_ordering",
    "topological_ordering",
    "depth",
    "origin_server_ts",
    "state_group_before",
    "state_group_after",
    "audience",
    "redacted_by",
    "sender_nid",
    "type_nid",
    "state_key_nid",
    "membership",
    *EVENT_FLAGS,
)


class BatchLoadRow(NamedTuple):
    """A row of any kind."""

    kind: str
    texts: list[Any]
    numbers: list[Any]
    one: list[int] | None
    two: list[int] | None
    three: list[int] | None
    four: list[int] | None
    five: list[int] | None
    data: bytes | None


async def load_batch(conn: Connection, change_set: ChangeSet, lacking: BatchRequest) -> None:
    """Load it, and remember as absent what is not there.

    Until the answer is here nothing of that is known: events are planned meanwhile.
    """
    if lacking.is_of_names:
        rows = await conn.fetch(SQL_NAMES_AHEAD, *_names(lacking), row=BatchLoadRow)
    else:
        rows = await conn.fetch(SQL_AHEAD, *_arguments(lacking), row=BatchLoadRow)
    _expect(change_set, lacking)
    found: dict[str, list[BatchLoadRow]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    for kind, rows in found.items():
        KEEP[kind](change_set, rows, lacking)
    _absent_names(change_set, lacking)


def _blocks(lacking: BatchRequest) -> dict[str, int]:
    return {name: -(-number // BLOCK_LENGTHS[name]) for name, number in lacking.numbers.items()}


def _names(lacking: BatchRequest) -> list[str]:
    return [
        array_text(list(lacking.principals)),
        array_text(list(lacking.types)),
        *column_texts(lacking.state_keys, 2),
        *column_texts(lacking.seen, 2),
        *column_texts(_blocks(lacking).items(), 2),
    ]


def _arguments(lacking: BatchRequest) -> list[object]:
    blocks = _blocks(lacking)
    return [
        list(lacking.rooms),
        list(lacking.events),
        list(lacking.parents),
        list(lacking.auth),
        list(lacking.contents),
        list(lacking.groups),
        list(lacking.places),
        list(lacking.principals),
        list(lacking.types),
        *transposed(lacking.state_keys, 2),
        *transposed(lacking.seen, 2),
        list(blocks),
        list(blocks.values()),
        RULING_KEYS,
    ]


def _expect(change_set: ChangeSet, lacking: BatchRequest) -> None:
    """Nothing of it is there, but for what the rows will tell."""
    for room_id in lacking.rooms:
        change_set.rooms.setdefault(room_id, None)
    for event_id in lacking.events:
        change_set.rows.setdefault(event_id, None)
        change_set.missing.setdefault(event_id, None)
        change_set.waiting.setdefault(event_id, ())
    for name in lacking.principals:
        change_set.principals.setdefault(name, None)
    for name in lacking.types:
        change_set.types.setdefault(name, None)


def _absent_names(change_set: ChangeSet, lacking: BatchRequest) -> None:
    """What was asked for by names whose nids are known only now."""
    names = change_set.caches.names
    for type_name, state_key in lacking.state_keys:
        type_nid = names.types.get(type_name) or change_set.types.get(type_name)
        if type_nid is not None:
            change_set.state_keys.setdefault((type_nid, state_key), None)
    for room_id, name in lacking.seen:
        room = change_set.rooms.get(room_id) or change_set.caches.rooms.get(room_id)
        nid = STANDING.get(name) or change_set.principals.get(name) or names.principals.get(name)
        if (
            room is not None
            and nid is not None
            and not change_set.knows_visibility(room.room_nid, nid)
        ):
            change_set.visibility[room.room_nid, nid] = UNSEEN


def _rooms(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        room_id, version, out_of_range = row.texts
        *numbers, audience, removals = row.numbers
        nid, write_version, next_audience, group, largest = numbers
        ends, strayed = tuple(row.one or ()), multirange.from_text(out_of_range)
        room = RoomRow(
            nid,
            room_id,
            version,
            write_version,
            next_audience,
            group,
            largest,
            ends,
            audience,
            strayed,
            removals,
        )
        change_set.rooms[room_id] = room


def _events(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    held: list[EventRow] = []
    for row in rows:
        fields: dict[str, Any] = dict(zip(EVENT_NUMBERS, row.numbers, strict=True))
        fields.update((name, bool(fields[name])) for name in EVENT_FLAGS)
        event_id, rejected = row.texts
        held.append(
            EventRow(
                event_id=event_id,
                rejected=rejected,
                prev_events=tuple(row.one or ()),
                auth_events=tuple(row.two or ()),
                **fields,
            )
        )
    keep_rows(change_set, held)


def _missing(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        nid, room_nid, superseded = row.numbers
        if (
            row.texts[0] not in change_set.new_missing
            and row.texts[0] not in change_set.gone_missing
        ):
            change_set.missing[row.texts[0]] = MissingRow(
                nid, row.texts[0], room_nid, bool(superseded), tuple(row.one or ())
            )


def _waiting(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        change_set.waiting[row.texts[0]] = (*change_set.waiting[row.texts[0]], row.numbers[0])


def _contents(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        event_id, version = row.texts
        nid, redacted = row.numbers
        change_set.events[nid] = load_event(
            row.data or b"", version, event_id, redacted=bool(redacted)
        )


def _groups(change_set: ChangeSet, rows: Sequence[BatchLoadRow], lacking: BatchRequest) -> None:
    """The groups that are wanted; others are of their paths."""
    known = [
        GroupRow._make((*row.numbers, row.three, row.four, row.one, row.five, row.two))
        for row in rows
    ]
    parts = {row.state_group: row for row in known}
    rooms = [
        room for room_id in lacking.rooms if (room := change_set.rooms.get(room_id)) is not None
    ]
    parents = lacking.parents | {
        change_set.row_ids[nid] for room in rooms for nid in room.forward_extremities
    }
    rows_before = (change_set.rows.get(parent) for parent in parents)
    wanted = {row.after for row in rows_before if row is not None and not row.outlier}
    wanted |= {room.current_state_group for room in rooms if room.current_state_group is not None}
    change_set.groups.update(groups_of(wanted | lacking.groups, parts))


def _places(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        nid, chain_nid, number = row.numbers
        change_set.places[nid] = ChainPosition(chain_nid, number)


def _chains(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    """Chains, and after their numbers their links; what is known of a chain already is newer."""
    links: dict[int, dict[int, int]] = {}
    for row in rows:
        chain_nid, target, number = row.numbers
        if target is not None:
            links.setdefault(chain_nid, {})[target] = number
    for row in rows:
        chain_nid, target, number = row.numbers
        if (
            target is None
            and chain_nid not in change_set.chains
            and chain_nid not in change_set.caches.chains
        ):
            change_set.chains[chain_nid] = Chain(number, links.get(chain_nid, {}))


def _principals(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    change_set.principals.update((row.texts[0], row.numbers[0]) for row in rows)


def _types(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        change_set.types[row.texts[0]] = row.numbers[0]
        change_set.type_names[row.numbers[0]] = row.texts[0]


def _state_keys(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        type_nid, nid = row.numbers
        change_set.state_keys[type_nid, row.texts[0]] = nid
        change_set.state_key_names[nid] = (type_nid, row.texts[0])


def _seen(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        room_nid, nid, last_join, joined, invited, first = row.numbers
        if not change_set.knows_visibility(room_nid, nid):
            audiences, invited_audiences = map(multirange.from_text, row.texts)
            change_set.visibility[room_nid, nid] = VisibilityRow(
                audiences, last_join, joined, invited, invited_audiences, first
            )


def _numbers(change_set: ChangeSet, rows: Sequence[BatchLoadRow], _: BatchRequest) -> None:
    for row in rows:
        change_set.blocks.put(row.texts[0], row.numbers[0])


KEEP: Final[dict[str, Callable[[ChangeSet, Sequence[BatchLoadRow], BatchRequest], None]]] = {
    "room": _rooms,
    "event": _events,
    "missing": _missing,
    "waiting": _waiting,
    "content": _contents,
    "group": _groups,
    "place": _places,
    "chain": _chains,
    "principal": _principals,
    "type": _types,
    "state_key": _state_keys,
    "seen": _seen,
    "number": _numbers,
}
