"""Fill the pages of indexes that grow at their ends, and turn those by the numbers of chains.

The numbers of chains fall. An index that has them in rising order grows at its first page, which
leaves half of each page empty. All its columns fall now, so that a scan from its end to its
beginning is in rising order, as `verify` reads indexes.

From here on `audiences.continued` is NULL for false, because its byte takes eight. Pages and rows
that are there stay as they are.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0039"
down_revision: Final = "0038"
phase: Final[Phase] = "post"

FULL: Final = (
    "audiences_pkey",
    "auth_chains_pkey",
    "events_room_stream_idx",
    "events_room_topological_idx",
    "principals_pkey",
    "state_deltas_pkey",
    "state_groups_pkey",
    "state_keys_pkey",
)
POSITIONS: Final = (
    "Serves: the events of a range of a chain, without its first event. Most chains have no other."
)
LINKS: Final = (
    "Serves: the positions that reach a given one (linking_to). Most links lead to few targets, "
    "and equal keys share their bytes."
)
NUMBERS_FALL: Final = " The numbers of chains fall, so it grows at its last page."


def upgrade() -> None:
    _build("DESC", " WITH (fillfactor = 100)")
    _swap(POSITIONS + NUMBERS_FALL)
    for name in FULL:
        op.execute(f"ALTER INDEX {name} SET (fillfactor = 100)")
    op.execute("ALTER TABLE audiences ALTER COLUMN continued DROP NOT NULL")
    op.execute(
        "COMMENT ON COLUMN audiences.continued IS"
        " 'The line has further numbers after this one. NULL: it has none.'"
    )


def downgrade() -> None:
    _build("ASC", "")
    _swap(POSITIONS)
    for name in FULL:
        op.execute(f"ALTER INDEX {name} RESET (fillfactor)")
    op.execute("UPDATE audiences SET continued = false WHERE continued IS NULL")
    op.execute("ALTER TABLE audiences ALTER COLUMN continued SET NOT NULL")
    op.execute(
        "COMMENT ON COLUMN audiences.continued IS 'The line has further numbers after this one.'"
    )


def _build(order: str, fill: str) -> None:
    """Build the indexes by chain under other names, with the numbers of chains in this order."""
    index_concurrently(
        "auth_chains_position_new_key",
        f"ON auth_chains (chain_nid {order}, sequence_number {order}){fill}"
        " WHERE chain_nid IS NOT NULL",
        unique=True,
    )
    for link in ("link_1", "link_2"):
        index_concurrently(
            f"auth_chains_{link}_new_idx",
            f"ON auth_chains ((({link} >> 32) - event_nid) {order},"
            f" (({link} & 4294967295)) {order}) WHERE {link} IS NOT NULL",
        )


def _swap(comment: str) -> None:
    """Put them in the place of those that are there."""
    for name in ("position_key", "link_1_idx", "link_2_idx"):
        kind, _, ending = name.rpartition("_")
        op.execute(f"DROP INDEX auth_chains_{name}")
        op.execute(f"ALTER INDEX auth_chains_{kind}_new_{ending} RENAME TO auth_chains_{name}")
    op.execute(f"COMMENT ON INDEX auth_chains_position_key IS '{comment}'")
    op.execute(f"COMMENT ON INDEX auth_chains_link_1_idx IS '{LINKS}'")
    op.execute("COMMENT ON INDEX auth_chains_link_2_idx IS 'Serves: the same.'")
