"""Rows of several tables in one result: how their columns are packed, and unpacked again.

The statements of `storage.persist.load.prefetch_rows` return rows of every kind in the same
columns. Each kind puts its texts into one array and its numbers into another; flags become 0 and 1.
The SQL that packs a row and the function that unpacks it follow from the types that
`storage.database.columns` declares.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, LiteralString, NamedTuple

from storage.codec import StoredBytes
from storage.database.columns import Table
from storage.database.placeholders import LoadedColumns

PART_COLUMNS: Final[LiteralString] = """
SELECT NULL::text AS kind, NULL::text[] AS texts, NULL::bigint[] AS numbers,
    NULL::bigint[] AS longs_1, NULL::bigint[] AS longs_2,
    NULL::int[] AS ints_1, NULL::int[] AS ints_2, NULL::int[] AS ints_3, NULL::bytea AS data
WHERE false
"""
"""The beginning of a statement: the names and types of the columns, and no row."""


class PackedRow(NamedTuple):
    """A row of any kind."""

    kind: str
    texts: list[Any]
    numbers: list[Any]
    longs_1: list[int] | None
    longs_2: list[int] | None
    ints_1: list[int] | None
    ints_2: list[int] | None
    ints_3: list[int] | None
    data: StoredBytes
    """The bytes of an event; NULL for other kinds."""


ARRAY_FIELDS: Final = PackedRow._fields[3:8]


@dataclass(frozen=True)
class PackedColumns(LoadedColumns):
    """Columns of a table in the form of a `PackedRow`: `:name.packed`, `:name.packed(alias)`."""

    types: dict[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The columns that go into the array of texts."""
        return [name for name in self.columns if self.types[name] in ("text", "int8multirange")]

    @property
    def numbers(self) -> list[str]:
        """The columns that go into the array of numbers."""
        kinds = ("bigint", "int", "smallint", "boolean")
        return [name for name in self.columns if self.types[name] in kinds]

    @property
    def arrays(self) -> dict[str, str]:
        """The columns that are arrays, by the field of `PackedRow` that each has."""
        of_type = {
            "longs": [name for name in self.columns if self.types[name] == "bigint[]"],
            "ints": [name for name in self.columns if self.types[name] == "int[]"],
        }
        return {
            f"{prefix}_{number}": name
            for prefix, names in of_type.items()
            for number, name in enumerate(names, 1)
        }

    @property
    def data(self) -> str | None:
        """The column of bytes, of which there is one at most."""
        return next((name for name in self.columns if self.types[name] == "bytea"), None)

    def text(self, member: str, alias: str) -> str | None:
        """Return what stands for a placeholder."""
        if member != "packed":
            return super().text(member, alias)
        prefix = f"{alias}." if alias else ""
        arrays = [
            prefix + self.arrays[field] if field in self.arrays else "NULL"
            for field in ARRAY_FIELDS
        ]
        lists = [self._list(names, prefix) for names in (self.texts, self.numbers)]
        data = "NULL" if self.data is None else prefix + self.data
        return ", ".join([*lists, *arrays, data])

    def _list(self, names: Sequence[str], prefix: str) -> str:
        casts = {"int8multirange": "::text", "boolean": "::int"}
        values = [f"{prefix}{name}{casts.get(self.types[name], '')}" for name in names]
        return f"ARRAY[{', '.join(values)}]" if values else "NULL"

    def unpacker(self) -> Callable[[PackedRow], list[Any]]:
        """Return the function that takes a row apart: its values in the order of the columns."""
        arrays = [self.arrays.get(field) for field in ARRAY_FIELDS]
        flat = [*self.texts, *self.numbers, *arrays, self.data]
        take = itemgetter(*(flat.index(name) for name in self.columns))
        flags = [at for at, name in enumerate(self.columns) if self.types[name] == "boolean"]

        def unpack(row: PackedRow) -> list[Any]:
            values = list(take((*(row.texts or ()), *(row.numbers or ()), *row[3:])))
            for at in flags:
                values[at] = bool(values[at])
            return values

        return unpack


def packed(name: str, table: Table, columns: Sequence[str]) -> PackedColumns:
    loaded = table.loaded(name, columns)
    return PackedColumns(
        name,
        loaded.columns,
        functions=loaded.functions,
        types={column: table.types[column] for column in columns},
    )
