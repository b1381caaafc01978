"""What has been written since a look, by the transactions that wrote it: rows with `age(xmin) <= age(horizon)` may be new, all others were seen.

For tables whose rows have no position that grows, such as outliers and state groups: their numbers come in blocks, and gaps give theirs back.
Rows that were only changed since are among them, and so are all that a transaction wrote which was under way during the look.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection

SQL_HORIZON: Final[LiteralString] = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::xid::text
"""


async def xmin_horizon(conn: Connection) -> str:
    """The oldest transaction (xid) that this snapshot may lack rows of.

    To be taken before, or in the snapshot of, what looks.
    """
    return str(await conn.fetchval(SQL_HORIZON))
