"""Rebuild the relations of events, from their bytes."""

from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import parse
from storage.maintenance.verify.event_columns import CONTENTS, SQL_NIDS, relation_columns
from storage.maintenance.verify.room import VerifiedRoom

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
