"""The table `dictionaries`, and the dictionaries that rows need to be decoded (`storage.codec`).

A connection registers them: after each statement whose rows have a `StoredBytes`, it loads those
that this process does not know. So a process meets a new dictionary, as of a writer that has
learned of it earlier, without an error, and no read is repeated. A dictionary is committed before
rows use it, so each snapshot that has the row has the dictionary.

    class ContentRow(NamedTuple):
        event_id: str
        json: StoredBytes | None    # stored_fields(ContentRow) == (1,)
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, LiteralString, NamedTuple, Protocol, TypeVar, get_args

from zstandard import ZstdError

from storage.codec import Dictionary, StoredBytes, register, unknown_dictionaries
from storage.errors import StorageCorrupt

R = TypeVar("R", bound=NamedTuple)

SQL_DICTIONARIES: Final[LiteralString] = """
SELECT dictionary_id, data
FROM dictionaries
WHERE $1::int[] IS NULL OR dictionary_id = ANY($1::int[])
"""

SQL_NEWEST: Final[LiteralString] = """
SELECT dictionary_id, data
FROM dictionaries
ORDER BY trained_ts DESC, dictionary_id
LIMIT 1
"""


class DictionaryRow(NamedTuple):
    """A dictionary and the number that stored bytes name it by."""

    dictionary_id: int
    data: bytes


class RowQueries(Protocol):
    """A connection of `storage.database.connection`."""

    async def fetch(self, sql: str, /, *args: object, row: type[R]) -> list[R]:
        """Return all rows."""


@cache
def stored_fields(row: type[NamedTuple]) -> tuple[int, ...]:
    """Return the positions of the fields of a row type that are stored bytes of events."""
    kinds = row.__annotations__
    return tuple(
        at
        for at, name in enumerate(row._fields)
        if kinds[name] is StoredBytes or StoredBytes in get_args(kinds[name])
    )


async def load_dictionaries(conn: RowQueries, dictionary_ids: Iterable[int] | None = None) -> None:
    """Register these dictionaries, or all. One that is not stored is left out.

    Raise `StorageCorrupt` for one that is damaged.
    """
    wanted = None if dictionary_ids is None else list(dictionary_ids)
    for row in await conn.fetch(SQL_DICTIONARIES, wanted, row=DictionaryRow):
        register(dictionary_of(row))


async def load_for(conn: RowQueries, records: Sequence[Any], positions: Iterable[int]) -> None:
    """Register the dictionaries that rows need; ``positions`` are their columns of bytes."""
    for at in positions:
        if unknown := unknown_dictionaries([record[at] for record in records]):
            await load_dictionaries(conn, unknown)


async def newest_dictionary(conn: RowQueries) -> Dictionary | None:
    """Return the dictionary that was trained last, registered. None: none was trained."""
    for row in await conn.fetch(SQL_NEWEST, row=DictionaryRow):
        dictionary = dictionary_of(row)
        register(dictionary)
        return dictionary
    return None


def dictionary_of(row: DictionaryRow) -> Dictionary:
    """Return the dictionary of a row. Raise `StorageCorrupt` if its bytes are not those trained."""
    try:
        dictionary = Dictionary(row.data)
    except ZstdError:
        dictionary = None
    if dictionary is None or dictionary.id != row.dictionary_id:
        raise StorageCorrupt("a dictionary is damaged", dictionary_id=row.dictionary_id)
    return dictionary
