"""The table `dictionaries`, and the dictionaries that rows need to be decoded (`storage.codec`).

A connection registers them: after each statement whose rows have a `StoredBytes`, it loads those
that this process does not know. So a process meets a new dictionary, as of a writer that has
learned of it earlier, without an error, and no read is repeated. A dictionary is committed before
rows use it, so each snapshot that has the row has the dictionary.

    class ContentRow(NamedTuple):
        event_id: str
        json: StoredBytes | None    # row_types.stored_fields(ContentRow) == (1,)
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, LiteralString, NamedTuple, Protocol, TypeVar

from zstandard import ZstdError

from storage.codec import (
    Dictionary,
    dictionaries_of,
    has_references,
    register,
    unknown_headers,
)
from storage.database.archived_bytes import ArchiveAccess, resolve
from storage.database.prepared import prepare_ahead

logger: logging.Logger = logging.getLogger(__name__)

R = TypeVar("R", bound=NamedTuple)

SQL_DICTIONARIES: Final[LiteralString] = """
SELECT dictionary_id, data
FROM dictionaries
WHERE dictionary_id = ANY($1::int[])
"""

SQL_NEWEST: Final[LiteralString] = """
SELECT dictionary_id, data
FROM dictionaries
ORDER BY trained_ts DESC, dictionary_id
"""
prepare_ahead(SQL_NEWEST, writes=True)


class DictionaryRow(NamedTuple):
    """A dictionary and the number that stored bytes name it by."""

    dictionary_id: int
    data: bytes


class RowQueries(Protocol):
    """A connection of `storage.database.connection`."""

    async def fetch(self, sql: str, /, *args: object, row: type[R]) -> list[R]:
        """Return all rows."""

    @property
    def archive(self) -> ArchiveAccess:
        """Return what the session knows of the archive (`storage.database.archived_bytes`)."""


async def load_dictionaries(conn: RowQueries, dictionary_ids: Iterable[int]) -> None:
    """Register these dictionaries. Leave out those that are not stored, or damaged."""
    for row in await conn.fetch(SQL_DICTIONARIES, list(dictionary_ids), row=DictionaryRow):
        register_row(row)


async def load_for(conn: RowQueries, records: list[Any], positions: Sequence[int]) -> list[Any]:
    """Return rows that can be decoded; ``positions`` are their columns of bytes.

    Register the dictionaries that they need. Decoding raises `MissingDictionary` with the event id
    for one that is left out. Replace references to the archive by the bytes.
    """
    for at in positions:
        headers = unknown_headers([record[at] for record in records])
        if has_references(headers):
            records = await resolve(conn, records, positions)
            headers = unknown_headers([record[at] for record in records])
        if unknown := dictionaries_of(headers):
            await load_dictionaries(conn, unknown)
    return records


async def newest_dictionary(conn: RowQueries) -> Dictionary | None:
    """Return the dictionary that was trained last, registered. None: there is none."""
    dictionaries = map(register_row, await conn.fetch(SQL_NEWEST, row=DictionaryRow))
    return next(filter(None, dictionaries), None)


def register_row(row: DictionaryRow) -> Dictionary | None:
    """Register the dictionary of a row; return None if it is damaged."""
    try:
        dictionary = Dictionary(row.data)
    except ZstdError:
        dictionary = None
    if dictionary is None or dictionary.id != row.dictionary_id:
        logger.error("the stored dictionary %s is damaged", row.dictionary_id)
        return None
    register(dictionary)
    return dictionary
