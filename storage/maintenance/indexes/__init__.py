"""Compare every index with its table in one snapshot; refuse to delete by a corrupt index.

An index is corrupt if it lacks rows of its table, has entries of other rows, or has entries in
another order than Postgres expects now. The last happens when the system's collation changes. Reads
through such an index miss rows without an error. A job that deletes unreferenced rows would then
delete rows that are in use.

  catalogue    the indexes of the schema, and the statements that read each, and its table
  compare      reads both and compares them
  block_ranges the same for an index that has a summary of each range of blocks, and no entries
  proof        the refusal: `refuse_corrupt_indexes` raises `StorageCorrupt`

Each index is read from its first entry to its last, twice: its keys (an index-only scan), and the
rows that it points to. Both must be in order and equal those of the table, which is read by a
sequential scan. An index of block ranges has no entries, so it is searched for the rows of each
period. Damage to the inner pages of an index, by which a search fails, is not found. That takes
`bt_index_parent_check` of the extension amcheck.
"""

from storage.maintenance.indexes.compare import (
    IndexMismatch,
    index_mismatches,
    mismatches_in_snapshot,
    refuse_corrupt_indexes,
)

__all__ = ["IndexMismatch", "index_mismatches", "mismatches_in_snapshot", "refuse_corrupt_indexes"]
