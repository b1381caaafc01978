"""Arrays as text: Postgres reads what was meant, whatever the texts hold."""

from collections.abc import Sequence

import pytest

from storage.database import Database
from storage.database.placeholders import array_of_int_arrays, array_text

TEXTS = (
    "",
    "plain",
    "null",
    "NULL",
    '"',
    "\\",
    '\\"',
    "\n\t\x01",
    "{1,2}",
    "a,b",
    " ",
    "'",
    "\\n",
    "é\U0001f600",
    None,
)
INTEGERS = (0, -1, 2**63 - 1, -(2**63), None)


@pytest.mark.parametrize(
    "kind, values",
    [
        ("text", TEXTS),
        ("text", (None,)),
        ("text", ()),
        ("bigint", INTEGERS),
        ("bigint", ()),
        ("boolean", (True, False, None)),
    ],
)
async def test_postgres_reads_the_values_back(
    dsn: str, kind: str, values: Sequence[object]
) -> None:
    async with await Database.open(dsn) as database, database.connection() as conn:
        assert await conn.fetchvals(
            f"SELECT unnest($1::text::{kind}[])", array_text(values)
        ) == list(values)


async def test_arrays_of_different_lengths(dsn: str) -> None:
    rows = ((1, 2), (), (-3,))
    async with await Database.open(dsn) as database, database.connection() as conn:
        assert await conn.fetchvals(
            "SELECT one::bigint[] FROM unnest($1::text::text[]) AS one", array_of_int_arrays(rows)
        ) == [list(row) for row in rows]
        assert (
            await conn.fetchvals(
                "SELECT one::bigint[] FROM unnest($1::text::text[]) AS one", array_of_int_arrays(())
            )
            == []
        )
