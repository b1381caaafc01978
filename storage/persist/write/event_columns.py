"""New events as columns, for the statements that insert them.

The columns that the planner knows are the fields of `EventRow`, the others those of
`StoredColumns`; so a new one needs no line here. The rows are turned into columns at once: an
append binds each column by one call, not each value.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_view import StoredColumns
from storage.persist.model.rows import EventRow
from storage.persist.write.event_edges import edge_columns, sparse
from storage.persist.write.stored_form import new_bytes

SET_BY_STATEMENT = "stream_ordering"
"""The field of `EventRow` that has no value before the write."""


def new_event_columns(change_set: ChangeSet) -> dict[str, Sequence[Any]]:
    columns = new_columns_but_bytes(change_set)
    return columns | {"json": new_bytes(change_set)} if columns else columns


def new_columns_but_bytes(change_set: ChangeSet) -> dict[str, Sequence[Any]]:
    """Return the columns of the new events without `json`; empty if there is none."""
    new = change_set.events.new_events
    if not new:
        return {}
    rows, _, stored = zip(*new.values(), strict=True)
    columns: dict[str, Sequence[Any]] = dict(
        zip(EventRow._fields, zip(*rows, strict=True), strict=True)
    )
    del columns[SET_BY_STATEMENT]
    for name, column in zip(StoredColumns._fields, zip(*stored, strict=True), strict=True):
        columns[name] = sparse(column)
    columns |= edge_columns(
        columns["event_nid"],
        columns["prev_events"],
        columns["auth_events"],
    )
    columns["depth"] = depth_column(rows)
    columns["after_gap"] = after_gap_column(change_set, new)
    columns["in_order_ts"] = in_order_column(change_set, new)
    return columns


def after_gap_column(change_set: ChangeSet, nids: Iterable[int]) -> Sequence[Any]:
    return sparse([nid in change_set.events.after_gaps or None for nid in nids])


def depth_column(rows: Iterable[EventRow]) -> Sequence[Any]:
    """Return the column `depth` of these events: None where it is the topological ordering."""
    return sparse([None if row.depth == row.topological_ordering else row.depth for row in rows])


def in_order_column(change_set: ChangeSet, nids: Iterable[int]) -> Sequence[Any]:
    return sparse([change_set.events.out_of_order.get(nid) for nid in nids])
