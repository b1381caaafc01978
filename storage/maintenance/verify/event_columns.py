"""Check the received bytes, and the columns derived from them."""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.connection import Connection
from storage.database.names import TYPE_MEMBER, membership_code
from storage.database.placeholders import compose
from storage.database.sql_template import fill
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import Event, parse, redact, relation_of
from storage.event.hashes import canonical
from storage.event.reading import read_trusted
from storage.event.relation import target_key
from storage.event.room_description import describes_room
from storage.event.versions import version_of
from storage.maintenance.censor import AS_RECEIVED, CENSORED
from storage.maintenance.room_events import PART_ROOM_EVENTS
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom, event_ids, unknown
from storage.maintenance.verify.version import version_of_id

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

    An id that follows from the bytes by the rules of another room version is reported apart
    ("event_ids").
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
                yield room.finding("bytes", [row.event_id], error.reason, "bytes of this event")
                continue
            for finding in (
                *_bytes(room, row, event),
                *_columns(room, row, event, ids),
                *_relation(room, row, event),
            ):
                yield finding


def _bytes(room: VerifiedRoom, row: ContentsRow, event: Event) -> Iterator[Finding]:
    if event.event_id != row.event_id:
        yield _other_id(room, row, event)
    if row.encoding == CENSORED:
        yield from _censored(room, row, event.raw)
    elif row.encoding != AS_RECEIVED:
        yield room.finding(
            "bytes", [row.event_id], f"encoding {row.encoding}", f"{AS_RECEIVED} or {CENSORED}"
        )
    elif event.content_hash_valid == row.redacted_form:
        yield room.finding(
            "bytes",
            [row.event_id],
            f"redacted_form {row.redacted_form}",
            not event.content_hash_valid,
        )


def _other_id(room: VerifiedRoom, row: ContentsRow, event: Event) -> Finding:
    """Report bytes that have another id: by another room version, or by none."""
    version = version_of_id(event.raw, row.event_id)
    if version is None:
        return room.finding(
            "bytes", [row.event_id], "another event id", f"bytes of {event.event_id}"
        )
    return room.finding(
        "event_ids", [row.event_id], f"the id in room version {version}", event.event_id
    )


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
    for column, (found, wanted) in expected.items():
        if found != wanted:
            yield room.finding("columns", [row.event_id], f"{column} {found}", wanted)


def _auth_events(row: ContentsRow, event: Event, ids: Mapping[int, str]) -> list[str]:
    """Return the right auth events, as ``ids`` names them.

    A rejected event may cite events of another room, which may be purged.
    """
    if row.is_out_of_band:
        return []
    listed: list[str] = list(dict.fromkeys(event.auth_event_ids))
    if row.is_rejected and len(listed) == len(row.auth_events):
        return [
            ids[nid] if ids[nid] == unknown(nid) else one
            for nid, one in zip(row.auth_events, listed, strict=True)
        ]
    return listed


def _relation(room: VerifiedRoom, row: ContentsRow, event: Event) -> Iterator[Finding]:
    found, wanted = (row.relates_to, row.rel_type, row.replaces), relation_columns(event)
    if found != wanted:
        yield room.finding("relations", [row.event_id], found, wanted)


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
