"""Find rows written since an earlier read, by the transactions that wrote them.

Rows with `age(xmin) <= age(horizon)` may be new; all others were visible to the read. This is for
tables whose rows have no position that grows, such as outliers and state groups. Their numbers come
in blocks, and released blocks are reused. The result also includes rows that were only updated
since, and rows of transactions that were running during the read.
"""

from typing import Final, LiteralString

from storage.database.connection import Connection

SQL_HORIZON: Final[LiteralString] = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::xid::text
"""


async def xmin_horizon(conn: Connection) -> str:
    """Return the oldest transaction (xid) whose rows this snapshot may lack.

    Call it before the read, or in its snapshot.
    """
    return str(await conn.fetchval(SQL_HORIZON))
