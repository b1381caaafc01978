"""Row types whose fields are row types themselves."""

from typing import NamedTuple

from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.database.row_types import columns_of, maker, span, stored_fields


class InnerRow(NamedTuple):
    number: int
    json: StoredBytes | None


class MiddleRow(NamedTuple):
    inner: InnerRow
    text: str | None


class OuterRow(NamedTuple):
    before: int
    first: InnerRow | None
    between: int
    middle: MiddleRow | None
    after: int | None


COLUMNS: tuple[object, ...] = (1, 2, b"3", 4, 5, b"6", "7", 8)
WHOLE = OuterRow(
    1, InnerRow(2, StoredBytes(b"3")), 4, MiddleRow(InnerRow(5, StoredBytes(b"6")), "7"), 8
)


def test_a_row_is_made_of_the_columns_of_its_fields() -> None:
    assert maker(OuterRow)(COLUMNS) == WHOLE
    assert [name for name, _ in columns_of(OuterRow)] == [
        *("before", "number", "json", "between", "number", "json", "text", "after")
    ]
    assert stored_fields(OuterRow) == (2, 5)
    assert (COLUMNS[span(OuterRow, "first")], COLUMNS[span(OuterRow, "after")]) == ((2, b"3"), (8,))
    assert maker(InnerRow) == InnerRow._make


def test_a_field_that_may_be_missing_is_none_where_its_first_column_is() -> None:
    assert maker(OuterRow)((1, None, b"3", 4, 5, None, None, 8)) == OuterRow(
        1, None, 4, MiddleRow(InnerRow(5, None), None), 8
    )
    assert maker(OuterRow)((1, 2, None, 4, None, None, "7", None)) == OuterRow(
        1, InnerRow(2, None), 4, None, None
    )
    assert maker(MiddleRow)((None, None, None)).inner is not None


async def test_the_rows_of_a_statement_are_made_so(conn: Connection) -> None:
    sql = (
        "SELECT 1, 2, 'a'::bytea, 4, 5, NULL::bytea, '7', NULL::int UNION ALL SELECT 1, NULL::int,"
    )
    sql += " NULL, 4, NULL, NULL, NULL, 8 ORDER BY 8 NULLS FIRST"
    first = OuterRow(1, InnerRow(2, StoredBytes(b"a")), 4, MiddleRow(InnerRow(5, None), "7"), None)
    assert await conn.fetch(sql, row=OuterRow) == [first, OuterRow(1, None, 4, None, 8)]
    assert await conn.fetchrow(sql, row=OuterRow) == first
