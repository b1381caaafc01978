"""The comparison of two stores reads every column, or says why not."""

import asyncpg

from tests.persist.whole_rows import uncovered


async def test_every_column_is_compared_or_has_a_reason(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        assert await uncovered(connection) == set()
    finally:
        await connection.close()
