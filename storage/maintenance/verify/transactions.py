"""Check the transactions of local users by their events."""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom

SQL_TRANSACTIONS: Final[LiteralString] = """
SELECT t.event_nid, t.event_id, e.event_id AS stored_id
FROM local_transactions t
JOIN events e USING (event_nid)
WHERE t.room_nid = $1::int
    AND (e.event_id <> t.event_id OR e.room_nid <> t.room_nid OR e.sender_nid <> t.sender_nid)
ORDER BY t.event_nid
"""


class MistakenTransactionRow(NamedTuple):
    """A transaction whose event is another one, or of another user or room."""

    event_nid: int
    event_id: str
    stored_id: str


async def check_transactions(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that each transaction names an event of its user ("local_transactions").

    An event that was purged is not compared.
    """
    for row in await conn.fetch(SQL_TRANSACTIONS, room.nid, row=MistakenTransactionRow):
        found = f"event nid {row.event_nid}, which is {row.stored_id}"
        yield room.finding("local_transactions", [row.event_id], found, "an event of its user")
