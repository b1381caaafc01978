"""Refusing to go by an index that lies."""

from collections.abc import Collection

from storage.database.connection import Database
from storage.errors import StorageCorrupt
from storage.maintenance.indexes.compare import Lie, lies


async def prove_indexes(
    database: Database, work: str, tables: Collection[str] | None = None
) -> None:
    """Compare the indexes of these tables, or of all, with the rows.

    ``work`` is what shall begin, as in "a purge".

    Each table is read to its end once, and each of its indexes twice. `StorageCorrupt` if an index
    lies: it names the indexes, and nothing has changed.
    """
    found = await lies(database, tables)
    if found:
        raise refusal(work, found)


def refusal(work: str, found: Collection[Lie]) -> StorageCorrupt:
    """The error that says which indexes lie, and how to mend them."""
    told = ", ".join(f"{lie.name} of {lie.table_name} ({lie.found})" for lie in found)
    mend = "; ".join(f"REINDEX INDEX CONCURRENTLY {lie.name}" for lie in found)
    reason = f"{work} would go by an index that does not agree with its table: {told}. Nothing was changed. Run {mend}; then `room-storage verify`"
    return StorageCorrupt(reason, indexes=[lie.name for lie in found])
