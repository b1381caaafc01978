"""Check the received bytes, and the columns derived from them."""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.auth import keys_needed, redaction_allowed
from storage.codec import StoredBytes, decode
from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.connection import Connection
from storage.database.names import TYPE_MEMBER, membership_code
from storage.database.placeholders import compose, fill
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import Event, parse, redact, relation_of
from storage.event.hashes import canonical
from storage.event.model import target_key
from storage.event.ndjson import describes_room
from storage.event.reading import read_trusted
from storage.event.versions import version_of
from storage.ids import StateKey
from storage.maintenance.censor import AS_RECEIVED, CENSORED
from storage.maintenance.room_states import PART_ROOM_EVENTS
from storage.maintenance.verify.event_loader import (
    EventLoader,
    Finding,
    VerifiedRoom,
    event_ids,
    id_of_bytes,
    unknown,
    version_of_id,
)

SQL_CONTENTS: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.event_id, e.encoding, e.redacted_form, e.redacted_by, e.outlier, e.json,
    t.type, p.name AS sender, k.state_key,
    k.type_nid AS key_type_nid, e.type_nid,
    claimed_depth(e.depth, e.topological_ordering) AS depth, e.origin_server_ts, e.membership,
        :prev_nids.call(e) AS prev_events, :auth_nids.call(e) AS auth_events,
    e.relates_to, x.type AS rel_type, e.replaces, e.has_url, e.describes_room,
    is_out_of_band(e) AS is_out_of_band, e.rejected IS NOT NULL AS is_rejected
FROM events e
LEFT JOIN event_types t USING (type_nid)
LEFT JOIN event_types x ON x.type_nid = e.rel_type_nid
LEFT JOIN principals p ON p.principal_nid = e.sender_nid
LEFT JOIN state_keys k USING (state_key_nid)
WHERE e.event_nid = ANY($1::bigint[])
""",
    PREV_NIDS,
    AUTH_NIDS,
).sql

TEMPLATE_NIDS: Final[LiteralString] = """
SELECT e.event_nid
FROM {events} AS e
ORDER BY e.event_nid
"""

SQL_NIDS: Final[LiteralString] = fill(
    TEMPLATE_NIDS,
    events=PART_ROOM_EVENTS,
)

CONTENTS: Final = 200  # events read together with their bytes
INT8_MAX: Final = (1 << 63) - 1


class ContentsRow(NamedTuple):
    """An event with its bytes and the columns derived from them, with names instead of nids."""

    event_nid: int
    event_id: str
    encoding: int
    redacted_form: bool
    redacted_by: int | None
    outlier: bool
    json: StoredBytes
    type: str | None
    sender: str | None
    state_key: str | None
    key_type_nid: int | None
    type_nid: int
    depth: int
    origin_server_ts: int
    membership: int | None
    prev_events: list[int]
    auth_events: list[int]
    relates_to: int | None
    rel_type: str | None
    replaces: bool | None
    has_url: bool | None
    describes_room: bool | None
    is_out_of_band: bool
    is_rejected: bool


async def check_contents(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the event id and content hash ("bytes"), and the columns ("columns", "relations").

    An id that the bytes do not have, or have by the rules of another room version, is reported
    apart if the bytes say the right one ("event_ids").
    """
    nids: list[int] = await conn.fetchvals(SQL_NIDS, room.nid)
    for start in range(0, len(nids), CONTENTS):
        rows = await conn.fetch(SQL_CONTENTS, nids[start : start + CONTENTS], row=ContentsRow)
        ids = await event_ids(
            conn, (nid for row in rows for nid in (*row.prev_events, *row.auth_events))
        )
        for row in rows:
            try:
                event = parse(
                    decode(row.json, row.event_id, room.row.room_id), room.row.room_version
                )
            except InvalidEvent as error:
                yield room.finding("bytes", [row.event_id], error.reason, "a valid event")
                continue
            except StorageCorrupt as error:
                yield await _unreadable(conn, room, row, error.reason)
                continue
            if event.event_id != row.event_id:
                yield await _other_id(conn, room, row, event)
            for finding in (
                *_bytes(room, row, event),
                *_columns(room, row, event, ids),
                *_relation(room, row, event),
            ):
                yield finding


def _bytes(room: VerifiedRoom, row: ContentsRow, event: Event) -> Iterator[Finding]:
    if row.encoding == CENSORED:
        yield from _censored(room, row, event.raw)
    elif row.encoding != AS_RECEIVED:
        yield room.finding(
            "bytes", [row.event_id], f"encoding {row.encoding}", f"{AS_RECEIVED} or {CENSORED}"
        )
    elif event.content_hash_valid == row.redacted_form:
        # bytes that fit their hash are right, so the flag is wrong
        yield room.finding(
            "columns" if row.redacted_form else "bytes",
            [row.event_id],
            f"redacted_form {row.redacted_form}",
            not event.content_hash_valid,
        )


async def _other_id(
    conn: Connection, room: VerifiedRoom, row: ContentsRow, event: Event
) -> Finding:
    """Report bytes that have another id: by another room version, or by none."""
    version = version_of_id(event.raw, row.event_id)
    if version is None:
        return await _unreadable(conn, room, row, "another event id")
    return room.finding(
        "event_ids", [row.event_id], f"the id in room version {version}", event.event_id
    )


async def _unreadable(
    conn: Connection, room: VerifiedRoom, row: ContentsRow, reason: str
) -> Finding:
    """Report bytes that are not of the id of their row: one of the two is damaged.

    It is the bytes if another row has the same, under their id.
    """
    own = id_of_bytes(row.json, room.row.room_id, room.row.room_version)
    if own is None or await EventLoader(room).load_ids(conn, [own]):
        return room.finding("bytes", [row.event_id], reason, "bytes of this event")
    return room.finding("event_ids", [row.event_id], "an id that its bytes do not have", own)


def _censored(room: VerifiedRoom, row: ContentsRow, raw: bytes) -> Iterator[Finding]:
    """Check that only redacted events are censored, and hold just the redacted form.

    The content hash says nothing about such an event.
    """
    if row.redacted_by is None and not row.redacted_form:
        yield room.finding("bytes", [row.event_id], "censored", "not redacted")
    version = version_of(room.row.room_version)
    if raw != canonical(redact(read_trusted(raw, strict=version.strict_canonical_json), version)):
        yield room.finding(
            "bytes", [row.event_id], "censored", "the canonical JSON of the redacted form"
        )


def _columns(
    room: VerifiedRoom, row: ContentsRow, event: Event, ids: Mapping[int, str]
) -> Iterator[Finding]:
    key_type = None if event.state_key is None else row.type_nid
    is_member = row.type_nid == TYPE_MEMBER and event.state_key is not None
    expected = {
        "room_id": (room.row.room_id, event.room_id),
        "type": (row.type, event.type),
        "sender": (row.sender, event.sender),
        "state_key": ((row.state_key, row.key_type_nid), (event.state_key, key_type)),
        "depth": (row.depth, _int8(event.depth)),
        "origin_server_ts": (row.origin_server_ts, _int8(event.origin_server_ts)),
        "membership": (
            row.membership,
            membership_code(event.content.get("membership")) if is_member else None,
        ),
        "has_url": (row.has_url, True if "url" in event.content else None),
        "describes_room": (row.describes_room, describes_room(event)),
        "prev_events": (
            [ids[nid] for nid in row.prev_events],
            [] if row.outlier else list(dict.fromkeys(event.prev_event_ids)),
        ),
        "auth_events": (
            [ids[nid] for nid in row.auth_events],
            _auth_events(row, event, ids),
        ),
    }
    for column, (found, right) in expected.items():
        if found != right:
            yield room.finding("columns", [row.event_id], f"{column} {found}", right)


def _auth_events(row: ContentsRow, event: Event, ids: Mapping[int, str]) -> list[str]:
    """Return the right auth events, as ``ids`` names them.

    A rejected event may cite events of another room, which may be purged.
    """
    if row.is_out_of_band:
        return []
    listed: list[str] = list(dict.fromkeys(event.auth_event_ids))
    if row.is_rejected and len(listed) == len(row.auth_events):
        return [
            ids[nid] if ids[nid] == unknown(nid) else listed_id
            for nid, listed_id in zip(row.auth_events, listed, strict=True)
        ]
    return listed


def _relation(room: VerifiedRoom, row: ContentsRow, event: Event) -> Iterator[Finding]:
    found, right = (row.relates_to, row.rel_type, row.replaces), relation_columns(event)
    if found != right:
        yield room.finding("relations", [row.event_id], found, right)


def relation_columns(event: Event) -> tuple[int | None, str | None, bool | None]:
    """Return the relation's target (by key), its type, and whether it may replace the target.

    Return three None if the event relates to nothing.
    """
    relation = relation_of(event)
    return (
        (None, None, None)
        if relation is None
        else (target_key(relation.event_id), relation.rel_type, relation.replaces)
    )


def _int8(number: int) -> int:
    return max(-INT8_MAX - 1, min(number, INT8_MAX))


# --------------------------------------------------------------------------------------------------
# Check which redaction took effect on which event, and which redactions wait for a target.

SQL_REDACTIONS: Final[LiteralString] = fill("""
SELECT event_nid, event_id, state_group_before, origin_server_ts, ineffective
FROM (SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier OFFSET 0) AS e
WHERE type_nid = {TYPE_REDACTION} AND rejected IS NULL AND NOT soft_failed
ORDER BY event_nid
""")

SQL_TARGETS: Final[LiteralString] = """
SELECT e.event_id, p.name AS sender, e.refused IS NOT NULL AS is_refused,
    (e.rejected IS NULL AND NOT e.soft_failed)
        OR (e.encoding = 1 AND NOT e.redacted_form) AS accepted
FROM unnest($1::text[]) AS one (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = one.id OFFSET 0) AS e
CROSS JOIN LATERAL (
    SELECT name FROM principals WHERE principal_nid = e.sender_nid OFFSET 0
) AS p
WHERE e.room_nid = $2::int AND NOT e.outlier
"""

SQL_REDACTED: Final[LiteralString] = """
SELECT e.event_id, r.event_id AS redaction_id, e.redacted_by
FROM events e
LEFT JOIN LATERAL (
    SELECT * FROM events WHERE event_nid = e.redacted_by OFFSET 0
) AS r ON true
-- a purge removed the redaction
LEFT JOIN LATERAL (
    SELECT event_nid FROM purge_retained_events
    WHERE room_nid = e.room_nid AND event_nid = r.event_nid AND r.outlier
    OFFSET 0
) AS l ON true
WHERE e.room_nid = $1::int AND NOT e.outlier AND l.event_nid IS NULL
    -- a subquery, because Postgres hashes it and would not hash an array parameter
    AND (e.redacted_by IS NOT NULL OR e.event_id IN (SELECT unnest($2::text[])))
"""

TEMPLATE_INEFFECTIVE: Final[LiteralString] = """
SELECT e.event_id
FROM {events} AS e
WHERE e.ineffective AND (e.type_nid <> {TYPE_REDACTION} OR e.outlier
    OR e.rejected IS NOT NULL OR e.soft_failed)
"""

SQL_INEFFECTIVE: Final[LiteralString] = fill(
    TEMPLATE_INEFFECTIVE,
    events=PART_ROOM_EVENTS,
)

SQL_WAITING: Final[LiteralString] = """
SELECT redaction_nid, target_event_id
FROM waiting_redactions
WHERE room_nid = $1::int
"""

TOGETHER: Final = 500


class RedactionRow(NamedTuple):
    """A redaction that is neither an outlier, rejected nor soft-failed."""

    event_nid: int
    event_id: str
    state_group_before: int
    origin_server_ts: int
    ineffective: bool


class TargetRow(NamedTuple):
    """The target of a redaction, if it is in the timeline of the same room.

    ``accepted`` is also true if an earlier release redacted it and it was censored since.
    """

    event_id: str
    sender: str
    is_refused: bool
    accepted: bool


class NamedRedactionRow(NamedTuple):
    """An event with the redaction in its column."""

    event_id: str
    redaction_id: str | None
    redacted_by: int | None


class WaitingRow(NamedTuple):
    """A redaction that waits for its target."""

    redaction_nid: int
    target_event_id: str


class ExpectedRedactions(NamedTuple):
    """The correct result: target -> rank and id of the effective redaction; waiting nid -> target.

    ``mistaken`` are the redactions whose flag is wrong: id -> whether the redaction is ineffective.
    """

    effective: dict[str, tuple[int, str]]
    waiting: dict[int, str]
    mistaken: dict[str, bool]


async def check_redactions(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the earliest of the allowed redactions takes effect ("redacted_by").

    A redaction waits while its target is missing or refused ("waiting_redactions"). One without
    effect is marked ("ineffective").
    """
    expected = await redactions(conn, room)
    for event_id, (found, right) in (await misnamed(conn, room, expected)).items():
        yield room.finding("redacted_by", [event_id], found, right)
    for event_id in await conn.fetchvals(SQL_INEFFECTIVE, room.nid):
        yield room.finding("ineffective", [event_id], "ineffective", "no redaction in force")
    for event_id, ineffective in expected.mistaken.items():
        yield room.finding("ineffective", [event_id], not ineffective, ineffective)
    waiting = dict(await conn.fetch(SQL_WAITING, room.nid, row=WaitingRow))
    ids = await event_ids(conn, waiting.keys() | expected.waiting.keys())
    for nid in sorted(waiting.keys() | expected.waiting.keys()):
        if waiting.get(nid) != expected.waiting.get(nid):
            pair = waiting.get(nid, "does not wait"), expected.waiting.get(nid, "does not wait")
            yield room.finding("waiting_redactions", [ids[nid]], *pair)


async def misnamed(
    conn: Connection, room: VerifiedRoom, expected: ExpectedRedactions
) -> dict[str, tuple[str | None, str | None]]:
    """Return events whose stored redaction is wrong: id -> (stored, expected)."""
    rows = await conn.fetch(SQL_REDACTED, room.nid, list(expected.effective), row=NamedRedactionRow)
    pairs = {
        row.event_id: (_named(row), expected.effective.get(row.event_id, (0, None))[1])
        for row in rows
    }
    return {event_id: pair for event_id, pair in pairs.items() if pair[0] != pair[1]}


def _named(row: NamedRedactionRow) -> str | None:
    return row.redaction_id or (None if row.redacted_by is None else f"nid {row.redacted_by}")


async def redactions(conn: Connection, room: VerifiedRoom) -> ExpectedRedactions:
    """Return the effects of a room's redactions."""
    contents = EventLoader(room)
    rows = await conn.fetch(SQL_REDACTIONS, room.nid, row=RedactionRow)
    result = ExpectedRedactions({}, {}, {})
    for start in range(0, len(rows), TOGETHER):
        batch = rows[start : start + TOGETHER]
        events = await contents.load(conn, (row.event_nid for row in batch))
        targets = await _targets(
            conn,
            room,
            {
                stored.event.redacts
                for stored in events.values()
                if stored.event.redacts is not None
            },
        )
        for row in batch:
            stored = events.get(row.event_nid)
            if stored is None:
                continue
            names_itself = stored.event.redacts == stored.event.event_id
            target_id = None if names_itself else stored.event.redacts
            target = targets.get(target_id or "")
            applies = (
                target is not None
                and target.accepted
                and redaction_allowed(
                    stored.event,
                    target.sender,
                    await _auth_state(conn, room, contents, stored.event, row.state_group_before),
                    room.row.room_version,
                )
            )
            if target is not None and applies:
                rank = (row.origin_server_ts, stored.event.event_id)
                result.effective[target.event_id] = min(
                    rank, result.effective.get(target.event_id, rank)
                )
            is_hidden = target is None or target.is_refused
            if is_hidden and target_id is not None:
                result.waiting[row.event_nid] = target_id
            purged = (
                target is None
                and row.event_nid in result.waiting
                and room.row.purged_below is not None
            )
            if row.ineffective == applies and not (purged and not row.ineffective):
                result.mistaken[row.event_id] = not applies
    return result


async def _targets(conn: Connection, room: VerifiedRoom, ids: set[str]) -> Mapping[str, TargetRow]:
    rows = await conn.fetch(SQL_TARGETS, list(ids), room.nid, row=TargetRow)
    return {row.event_id: row for row in rows}


async def _auth_state(
    conn: Connection, room: VerifiedRoom, contents: EventLoader, event: Event, state_group: int
) -> dict[StateKey, Event]:
    """Return the entries of a state that authorise the event."""
    group = (await room.states.load(conn, [state_group])).get(state_group)
    keys = keys_needed(event)
    numbers = await contents.load_key_nids(conn, keys)
    nids = {} if group is None else {key: group.entries.get(numbers[key] or 0) for key in keys}
    stored = await contents.load(conn, (nid for nid in nids.values() if nid is not None))
    return {key: stored[nid].event for key, nid in nids.items() if nid in stored}
