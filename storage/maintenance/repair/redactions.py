"""Repair which redaction took effect on which event, and which redactions wait, from the events."""

from typing import Final, LiteralString

from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.maintenance.verify.redactions import SQL_INEFFECTIVE, misnamed, redactions
from storage.maintenance.verify.room import VerifiedRoom

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
