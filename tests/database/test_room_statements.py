"""No statement on one room reads the events of all rooms.

The indexes of `events` by room are partial: one has outliers, the others have the timeline. So a
statement on both names both, and reads two indexes:

    WHERE room_nid = $1::int AND (outlier OR NOT outlier)

Otherwise a job over all rooms, such as `verify`, would read the whole table for each room.
"""

import json
import re
from typing import Any

import asyncpg

from tests.source.sql import Statement, statements

OF_A_ROOM = re.compile(r"\bevents\b.*\broom_nid = \$\d", re.DOTALL)
PARAMETER = re.compile(r"\$(\d+)")
SCANS = {"Seq Scan", "Index Scan", "Index Only Scan"}


async def reads_all(connection: asyncpg.Connection, sql: str) -> bool:
    """Return whether the generic plan reads `events`, or an index of it, from end to end."""
    count = max(map(int, PARAMETER.findall(sql)))
    await connection.execute(f"PREPARE planned AS {sql}")
    found = await connection.fetchval(
        f"EXPLAIN (FORMAT JSON) EXECUTE planned ({', '.join(['NULL'] * count)})"
    )
    await connection.execute("DEALLOCATE planned")
    return _is_whole(json.loads(found)[0]["Plan"])


def _is_whole(node: dict[str, Any]) -> bool:
    is_scan = node["Node Type"] in SCANS and node.get("Relation Name") == "events"
    return (is_scan and "Index Cond" not in node) or any(map(_is_whole, node.get("Plans", ())))


async def test_a_statement_on_a_room_uses_an_index(dsn: str) -> None:
    chosen: list[Statement] = [one for one in statements() if OF_A_ROOM.search(one.sql)]
    connection = await asyncpg.connect(dsn)
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    for way in ("seqscan", "mergejoin", "hashjoin"):  # each may read all of an empty table
        await connection.execute(f"SET enable_{way} = off")
    whole = [f"{one.module}.{one.name}" for one in chosen if await reads_all(connection, one.sql)]
    assert whole == []
    assert len(chosen) > 50
    naive = "SELECT count(*) FROM events WHERE room_nid = $1::int"
    assert await reads_all(connection, naive)
    assert await reads_all(
        connection, naive.replace("count(*)", "event_nid") + " ORDER BY event_nid"
    )
    await connection.close()
