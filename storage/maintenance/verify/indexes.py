"""Report corrupt indexes as findings, and decide which checks may still run."""

from collections.abc import Iterable
from typing import Final

from storage.maintenance.indexes import Lie
from storage.maintenance.verify.finding import Finding

APART: Final = frozenset(
    {
        "account_data",
        "alembic_version",
        "archive_garbage",
        "background_jobs",
        "cache_invalidations",
        "cursors",
        "defined_streams",
        "deployment",
        "gap_failures",
        "import_events",
        "lost_positions",
        "published_facts",
        "purged_streams",
        "receipts",
        "schema_compatibility",
        "stream_positions",
        "to_device",
        "writers",
    }
)
"""Tables that no check of a room reads: their corrupt indexes do not prevent checks of rooms."""


def finding_of(lie: Lie) -> Finding:
    """Return the finding that names a corrupt index ("indexes")."""
    left_out = "positions and sequences" if lie.table_name in APART else "everything else"
    expected = (
        f"the rows of {lie.table_name}: run REINDEX INDEX CONCURRENTLY {lie.name},"
        f" then verify again; {left_out} was not checked"
    )
    return Finding("indexes", None, (lie.name,), lie.found, expected)


def hide_facts(lying: Iterable[Lie]) -> bool:
    """Return whether a check of a room would read through one of these indexes."""
    return any(lie.table_name not in APART for lie in lying)
