"""No statement on one room reads the events of all rooms.

The indexes of `events` by room are partial: one has outliers, the others have the timeline. So a
statement on both names both, and reads two indexes:

    WHERE room_nid = $1::int AND (outlier OR NOT outlier)

Otherwise a job over all rooms, such as `verify`, would read the whole table for each room.
"""

import re

import asyncpg

from tests.source.sql import Statement, statements

OF_A_ROOM = re.compile(r"\bevents\b.*\broom_nid = \$\d", re.DOTALL)
PARAMETER = re.compile(r"\$(\d+)")
WHOLE_TABLE = re.compile(r"Seq Scan on events\b")


async def plan(connection: asyncpg.Connection, sql: str) -> str:
    """The generic plan; it has a sequential scan only where nothing else serves."""
    count = max(map(int, PARAMETER.findall(sql)))
    await connection.execute(f"PREPARE planned AS {sql}")
    rows = await connection.fetch(f"EXPLAIN EXECUTE planned ({', '.join(['NULL'] * count)})")
    await connection.execute("DEALLOCATE planned")
    return "\n".join(row[0] for row in rows)


async def test_a_statement_on_a_room_uses_an_index(dsn: str) -> None:
    chosen: list[Statement] = [one for one in statements() if OF_A_ROOM.search(one.sql)]
    connection = await asyncpg.connect(dsn)
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    await connection.execute("SET enable_seqscan = off")
    whole = [
        f"{one.module}.{one.name}"
        for one in chosen
        if WHOLE_TABLE.search(await plan(connection, one.sql))
    ]
    assert whole == []
    assert len(chosen) > 50
    naive = "SELECT count(*) FROM events WHERE room_nid = $1::int"
    assert WHOLE_TABLE.search(await plan(connection, naive))
    await connection.close()
