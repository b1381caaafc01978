"""Compare every index with its table, in one snapshot, and refuse to delete by an index that lies.

An index lies if it lacks rows of its table, has entries of other rows, or has its entries in
another order than Postgres expects now (a collation that changed with the system). Reads through it
then miss rows without an error, and whoever deletes what nothing refers to deletes what is in use.

catalogue    the indexes of the schema, and the statements that read each, and its table
compare      both read and compared
proof        the refusal: `prove_indexes` raises `StorageCorrupt`

An index is read from its first entry to its last, twice: the keys that it has (an index-only scan),
and the rows that it leads to. Both must be in order, and be those of the table, which is read by a
sequential scan. Damage to the inner pages of an index alone, by which a search goes astray, is not
found: that takes `bt_index_parent_check` of the extension amcheck.
"""

from storage.maintenance.indexes.compare import Lie, lies, lies_in_snapshot
from storage.maintenance.indexes.proof import prove_indexes

__all__ = ["Lie", "lies", "lies_in_snapshot", "prove_indexes"]
