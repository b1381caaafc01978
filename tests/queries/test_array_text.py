"""Arrays as text: Postgres reads what went in, whatever it holds."""

import pytest

from storage import Store
from storage.database.placeholders import long_int_array, text_array

TEXTS = [
    "$plain",
    'a"b',
    "back\\slash",
    '\\"',
    "two\nlines",
    "{a,b}",
    "NULL",
    "",
    " ",
    "\u00e9\U0001f600",
    "'",
    "\x01",
]


@pytest.mark.parametrize(
    "texts",
    [
        [],
        [""],
        ["NULL"],
        ["$a", "$b"],
        TEXTS,
        *([text] for text in TEXTS),
        *(["$a", text] for text in TEXTS),
    ],
)
async def test_texts(store: Store, texts: list[str]) -> None:
    async with store.database.connection() as conn:
        assert await conn.fetchval("SELECT $1::text::text[]", text_array(texts)) == texts


@pytest.mark.parametrize("numbers", [[], [0], [-1, 2**63 - 1, 7]])
async def test_numbers(store: Store, numbers: list[int]) -> None:
    async with store.database.connection() as conn:
        assert await conn.fetchval("SELECT $1::text::bigint[]", long_int_array(numbers)) == numbers
