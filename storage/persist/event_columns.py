"""New events as the parameters of the statements that insert them."""

from collections.abc import Sequence
from typing import Any

from storage.persist.columns import EMPTY, arrays, text
from storage.persist.rows import EventRow


def event_columns(rows: Sequence[EventRow]) -> list[str]:
    """New events as columns, from their nids to their auth events, in the order in which statements that insert them take these."""
    if not rows:
        return [EMPTY] * 21
    column: Any = EventRow._make(zip(*rows, strict=True))  # of each field all values
    return [
        text(column.event_nid),
        text(column.topological_ordering),
        text(column.depth),
        text(column.origin_server_ts),
        text(column.state_group_before),
        text(column.state_group_after),
        text(column.audience),
        text(column.redacted_by),
        text(column.room_nid),
        text(column.sender_nid),
        text(column.type_nid),
        text(column.state_key_nid),
        text(column.membership),
        text(column.outlier),
        text(column.backfilled),
        text(column.soft_failed),
        text(column.redacted_form),
        text(column.event_id),
        text(column.rejected),
        arrays(column.prev_events),
        arrays(column.auth_events),
    ]
