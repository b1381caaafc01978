"""Placeholders become numbers, and values are bound by the same declaration."""

from typing import Any, NamedTuple

import pytest

from storage.database import Database
from storage.database.columns import Table
from storage.database.placeholders import (
    ColumnList,
    InputRows,
    InputValue,
    SharedCondition,
    by_column,
    compose,
)

PEOPLE = Table("people", ("person_nid",), person_nid="bigint", friends="int[]", name="text")
PERSON = PEOPLE.rows("person", age="int")
PHOTO = InputRows.own("photo", image="bytea")
NOW = InputValue("now", "bigint")


class PersonRow(NamedTuple):
    person_nid: int
    friends: list[int] | None
    name: str | None
    now: int


class OneRow(NamedTuple):
    person_nid: int
    friends: list[int] | None
    name: str | None
    ages: list[int]


class OrderedRow(NamedTuple):
    person_nid: int
    friends: str | None
    name: str | None
    age: int | None
    ordinal: int


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "FROM :person.rows AS i",
            (
                "FROM (SELECT unnest($1::text::bigint[]) AS person_nid, unnest($2::text::text[]) AS"
                " friends, unnest($3::text::text[]) AS name, unnest($4::text::int[]) AS age"
                " WHERE $1::text <> '{}') AS i"
            ),
        ),
        (
            ":photo.ordered",
            (
                "(SELECT unnest($1::bytea[]) AS image,"
                " generate_subscripts($1::bytea[], 1) AS ordinal WHERE $1::bytea[] <> '{}')"
            ),
        ),
        (  # a column may be sent as an empty array, so the key tells whether there are rows
            ":person.* FROM :person.rows(age, name) AS i",
            (
                "{all} FROM (SELECT unnest($4::text::int[]) AS age, unnest($3::text::text[]) AS"
                " name WHERE $1::text <> '{}') AS i"
            ),
        ),
        (":person.* :person.columns", "{all} person_nid, friends, name"),
        (":person.* :person.values", "{all} i.person_nid, i.friends::int[], i.name"),
        (":person.* :person.of(e)", "{all} e.person_nid, e.friends, e.name"),
        (":person.* :person.others(e)", "{all} e.friends, e.name"),
        (":person.* :person.update(s)", "{all} friends = s.friends::int[], name = s.name"),
        (":person.* :person.age", "{all} $4::text::int[]"),
        (":person.age :person.*", "$4::text::int[] {all}"),
    ],
)
def test_what_stands_for_a_placeholder(text: str, expected: str) -> None:
    every = "$1::text::bigint[], $2::text::text[], $3::text::text[], $4::text::int[]"
    inputs = (PHOTO,) if "photo" in text else (PERSON,)
    assert compose(text, *inputs).sql == expected.replace("{all}", every)


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "FROM :person.rows AS i",
            (
                "FROM (SELECT $1::bigint AS person_nid, $2::int[] AS friends, $3::text AS name,"
                " $4::int AS age) AS i"
            ),
        ),
        (
            ":person.ordered",
            (
                "(SELECT $1::bigint AS person_nid, $2::int[] AS friends, $3::text AS name,"
                " $4::int AS age, 1 AS ordinal)"
            ),
        ),
        (
            ":person.* :person.rows(age)",
            "$1::bigint, $2::int[], $3::text, $4::int (SELECT $4::int AS age)",
        ),
        (":person.age :person.*", "ARRAY[$4::int] $1::bigint, $2::int[], $3::text, $4::int"),
    ],
)
def test_what_stands_for_a_placeholder_of_one_row(text: str, expected: str) -> None:
    assert compose(text, PERSON.one_row()).sql == expected


def test_inputs_are_numbered_in_the_order_of_the_text() -> None:
    id_ = InputRows.own("id", nid="bigint")
    composed = compose("x'::y' a[1:2] :now :id.nid :now", id_, NOW)
    assert composed.sql == "x'::y' a[1:2] $1::bigint $2::text::bigint[] $1::bigint"
    assert composed.bind({"id": {"nid": [7]}, "now": 5}) == [5, "{7}"]


@pytest.mark.parametrize(
    "text, inputs",
    [
        ("SELECT :then", (NOW,)),
        ("SELECT :now.x", (NOW,)),
        ("SELECT 1", (NOW,)),
        ("SELECT :now, $2", (NOW,)),
        ("SELECT :person.x", (PERSON,)),
        ("SELECT :person.age", (PERSON,)),
        ("SELECT :person.of", (PERSON,)),
        ("SELECT :person.rows(e)", (PERSON,)),
        (":person.* :person.rows(age, height)", (PERSON,)),
        (":person.rows(age)", (PERSON,)),  # nothing takes the other columns
        ("SELECT :list.*", (ColumnList("list", ("a",)),)),
        ("SELECT * FROM :list.rows", (ColumnList("list", ("a",)),)),
    ],
)
def test_a_text_that_does_not_fit_its_inputs_is_refused(text: str, inputs: Any) -> None:
    with pytest.raises(ValueError, match=r"placeholder|no place|numbers"):
        compose(text, *inputs)


GIVEN: dict[str, Any] = {"person_nid": [1], "friends": [[2]], "name": ["n"], "age": [3]}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"person": GIVEN, "now": 1},
        {"person": {**GIVEN, "height": [4]}},
        {"person": {"person_nid": [1]}},
    ],
)
def test_a_missing_or_surplus_name_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="lacks"):
        compose("unnest(:person.*)", PERSON).bind(given)


async def test_postgres_reads_what_was_bound(dsn: str) -> None:
    composed = compose(
        "SELECT :person.values, :now FROM :person.rows AS i ORDER BY age",
        PERSON,
        NOW,
    )
    rows = [(2, 30, None, "b"), (1, 20, (), 'a"\\'), (3, 40, (-1, 2), None)]
    given = by_column(("person_nid", "age", "friends", "name"), rows)
    async with await Database.open(dsn) as database, database.connection() as conn:
        found = await conn.fetch(
            composed.sql, *composed.bind({"person": given, "now": 9}), row=PersonRow
        )
        nothing = await conn.fetch(
            composed.sql, *composed.bind({"person": {}, "now": 9}), row=PersonRow
        )
    assert found == [(1, [], 'a"\\', 9), (2, None, "b", 9), (3, [-1, 2], None, 9)]
    assert nothing == []


async def test_postgres_reads_one_row(dsn: str) -> None:
    composed = compose(
        "SELECT :person.values, :person.age FROM :person.ordered AS i", PERSON.one_row()
    )
    rows = [(1, 20, [4], 'a"\\'), (2, 30, None, "b")]
    async with await Database.open(dsn) as database, database.connection() as conn:
        found = [
            await conn.fetch(composed.sql, *composed.bind({"person": given}), row=OneRow)
            for given in (
                by_column(("person_nid", "age", "friends", "name"), [row]) for row in rows
            )
        ]
    assert found == [[(1, [4], 'a"\\', [20])], [(2, None, "b", [30])]]
    empty = {"person_nid": [5], "friends": (), "name": ["b"], "age": ()}
    assert composed.bind({"person": empty}) == [5, None, "b", None]
    with pytest.raises(ValueError, match="lacks"):
        composed.bind({"person": {}})
    with pytest.raises(ValueError, match="person takes one row"):
        composed.bind({"person": empty | {"person_nid": [5, 6], "name": ["b", "c"]}})


async def test_rows_are_in_order_and_padded(dsn: str) -> None:
    """An empty array stands for a column without values, unless it is the first one."""
    composed = compose("SELECT * FROM :person.ordered AS i ORDER BY ordinal", PERSON)
    given = {"person_nid": [5, 3], "friends": [], "name": ["b", "a"], "age": []}
    async with await Database.open(dsn) as database, database.connection() as conn:
        found = await conn.fetch(composed.sql, *composed.bind({"person": given}), row=OrderedRow)
        nothing = await conn.fetch(composed.sql, *composed.bind({"person": {}}), row=OrderedRow)
    assert found == [(5, None, "b", None, 1), (3, None, "a", None, 2)]
    assert nothing == []


def test_rows_become_columns() -> None:
    assert by_column(("a", "b"), [(1, 2), (3, 4)]) == {"a": (1, 3), "b": (2, 4)}
    assert by_column(("a", "b"), []) == {}
    with pytest.raises(ValueError, match="longer"):
        by_column(("a",), [(1, 2)])


def test_single_values_are_numbered_as_they_are_declared() -> None:
    text = "SELECT :limit FROM t WHERE a = :room_id AND b = ANY(:ids) AND c = {JOIN} AND d > :limit"
    statement = compose(text, room_id="text", ids="text[]", limit="bigint")
    assert statement.sql == (
        "SELECT $3::bigint FROM t WHERE a = $1::text AND b = ANY($2::text[]) AND c = 5 /* JOIN */"
        " AND d > $3::bigint"
    )
    assert statement.bind({"limit": 1, "room_id": "!a", "ids": []}) == ["!a", [], 1]
    with pytest.raises(ValueError, match="no place"):
        compose(text, room_id="text", ids="text[]", limit="bigint", server_name="text")


def test_a_shared_condition_takes_an_alias() -> None:
    known = SharedCondition("known", (), condition="f(e, {row}.a) AND {row}.b")
    assert compose("SELECT :known.of(v)", known).sql == "SELECT f(e, v.a) AND v.b"
    with pytest.raises(ValueError, match="no such placeholder"):
        compose("SELECT :known.columns", known)
