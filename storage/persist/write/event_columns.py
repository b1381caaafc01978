"""New events as the parameters of the statements that insert them."""

from collections.abc import Sequence
from typing import Any

from storage.database.array_text import EMPTY_ARRAY, array_of_int_arrays, array_text
from storage.persist.model.rows import EventRow


def event_columns(rows: Sequence[EventRow]) -> list[str]:
    """New events as columns, from their nids to their auth events, in the order in which statements that insert them take these."""
    if not rows:
        return [EMPTY_ARRAY] * 21
    column: Any = EventRow._make(zip(*rows, strict=True))  # of each field all values
    return [
        array_text(column.event_nid),
        array_text(column.topological_ordering),
        array_text(column.depth),
        array_text(column.origin_server_ts),
        array_text(column.state_group_before),
        array_text(column.state_group_after),
        array_text(column.audience),
        array_text(column.redacted_by),
        array_text(column.room_nid),
        array_text(column.sender_nid),
        array_text(column.type_nid),
        array_text(column.state_key_nid),
        array_text(column.membership),
        array_text(column.outlier),
        array_text(column.backfilled),
        array_text(column.soft_failed),
        array_text(column.redacted_form),
        array_text(column.event_id),
        array_text(column.rejected),
        array_of_int_arrays(column.prev_events),
        array_of_int_arrays(column.auth_events),
    ]
