"""Stream ids from the sequences of Postgres."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, LiteralString

from storage.database.connection import Database

SQL_ALLOCATE: Final[LiteralString] = """
SELECT nextval($1::text::regclass)
FROM generate_series(1, $2::int)
"""


def allocator(database: Database, sequence: str) -> Callable[[int], Awaitable[Sequence[int]]]:
    """Return the function that takes n ids from a sequence, for `IdGenerator`."""

    async def allocate(count: int) -> Sequence[int]:
        async with database.connection() as conn:
            return await conn.fetchvals(SQL_ALLOCATE, sequence, count)

    return allocate
