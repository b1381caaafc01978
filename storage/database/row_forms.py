"""Which forms of rows writers use, in a database that an earlier release may still serve."""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.migrate import (
    DISTANCES_REVISION,
    ENCODED_REVISION,
    INLINE_LINKS_REVISION,
    NARROW_EVENTS_REVISION,
    NARROW_GROUPS_REVISION,
    SPARSE_REVISION,
)
from storage.database.prepared import prepare_ahead

SQL_CODE_REVISION: Final[LiteralString] = """
SELECT code_revision
FROM schema_compatibility
"""
prepare_ahead(SQL_CODE_REVISION, writes=True)


class RowForms(NamedTuple):
    """Which forms every live process can read. A form stays in use for good."""

    distances: bool = False
    """`events.prev_distance` (storage/persist/write/event_edges.py)."""
    encoded: bool = False
    """Encoded bytes in `events.json` (storage/persist/write/stored_form.py)."""
    narrow_groups: bool = False
    """`state_groups.path` (storage/state/rows.py)."""
    inline_links: bool = False
    """`auth_chains.link_1` (storage/graph/chain_rows.py)."""
    narrow_events: bool = False
    """NULL in `events.depth` and `in_order_ts` (storage/persist/write/event_columns.py)."""
    sparse: bool = False
    """NULL for false in `audiences.continued` (storage/persist/write/visibility.py)."""


async def row_forms(conn: Connection, known: RowForms | None = None) -> RowForms:
    """Return the forms that are in use; without a query if ``known`` has all of them."""
    if known is not None and all(known):
        return known
    revision: str = await conn.fetchval(SQL_CODE_REVISION)
    return RowForms(
        revision >= DISTANCES_REVISION,
        revision >= ENCODED_REVISION,
        revision >= NARROW_GROUPS_REVISION,
        revision >= INLINE_LINKS_REVISION,
        revision >= NARROW_EVENTS_REVISION,
        revision >= SPARSE_REVISION,
    )
