"""Refuse to rely on a corrupt index."""

from collections.abc import Collection

from storage.database.connection import Database
from storage.errors import StorageCorrupt
from storage.maintenance.indexes.compare import Lie, lies
from storage.observability.progress import Report, silent


async def prove_indexes(
    database: Database,
    work: str,
    tables: Collection[str] | None = None,
    *,
    report: Report = silent,
) -> None:
    """Compare the indexes of these tables, or of all, with the rows.

    ``work`` names the operation that would begin, as in "a purge". Each table is read once in full,
    and each of its indexes twice. Raise `StorageCorrupt` if an index is corrupt: the error names
    the indexes, and nothing has changed.
    """
    found = await lies(database, tables, report=report)
    if found:
        raise refusal(work, found)


def refusal(work: str, found: Collection[Lie]) -> StorageCorrupt:
    """Return the error that names the corrupt indexes and how to mend them."""
    named = ", ".join(f"{lie.name} of {lie.table_name} ({lie.found})" for lie in found)
    mend = "; ".join(f"REINDEX INDEX CONCURRENTLY {lie.name}" for lie in found)
    reason = (
        f"{work} would go by an index that does not agree with its table: {named}."
        f" Nothing was changed. Run {mend}; then `room-storage verify`"
    )
    error = StorageCorrupt(reason)
    error.ids = {"indexes": [lie.name for lie in found]}  # the text ends with what to run
    return error
