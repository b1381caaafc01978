"""The tables of a mirror.

Each file of a table has a range of the table's ``key`` in the log, so a pass finds the files that
it has to rewrite. ``key`` is a number: `arrived` for events, which never changes, and the room for
the others. Only these ranges are in the log, no text of an event.
"""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from storage.errors import InputError

SCHEMA_VERSION: Final = 1
"""Grows with each change of the columns. A mirror of another version is refused."""


@dataclass(frozen=True, slots=True)
class MirrorTable:
    """A table: the columns in its files, without that of the partition."""

    name: str
    columns: pa.Schema
    key: str
    by_day: bool = False

    @property
    def schema(self) -> pa.Schema:
        return self.columns.append(pa.field("day", pa.date32())) if self.by_day else self.columns


EVENTS: Final = MirrorTable(
    "events",
    pa.schema(
        [
            ("arrived", pa.int64()),
            ("event_nid", pa.int64()),
            ("room_nid", pa.int64()),
            ("digest", pa.int64()),
            ("event_id", pa.string()),
            ("room_id", pa.string()),
            ("room_version", pa.string()),
            ("type", pa.string()),
            ("state_key", pa.string()),
            ("sender", pa.string()),
            ("origin", pa.string()),
            ("stream_ordering", pa.int64()),
            ("topological_ordering", pa.int64()),
            ("depth", pa.int64()),
            ("prev_count", pa.int64()),
            ("origin_server_ts", pa.int64()),
            ("received_ts", pa.int64()),
            ("audience", pa.int64()),
            ("soft_failed", pa.bool_()),
            ("refused", pa.string()),
            ("rejected", pa.string()),
            ("redacted", pa.bool_()),
            ("redacted_by", pa.string()),
            ("erased", pa.bool_()),
            ("pdu", pa.binary()),
        ]
    ),
    key="arrived",
    by_day=True,
)
STATE_CHANGES: Final = MirrorTable(
    "state_changes",
    pa.schema(
        [
            ("room_nid", pa.int64()),
            ("room_id", pa.string()),
            ("stream_ordering", pa.int64()),
            ("type", pa.string()),
            ("state_key", pa.string()),
            ("event_id", pa.string()),
            ("prev_event_id", pa.string()),
        ]
    ),
    key="room_nid",
)
MEMBERSHIPS: Final = MirrorTable(
    "memberships",
    pa.schema(
        [
            ("room_nid", pa.int64()),
            ("room_id", pa.string()),
            ("user_id", pa.string()),
            ("membership", pa.string()),
            ("event_id", pa.string()),
        ]
    ),
    key="room_nid",
)
VISIBILITY: Final = MirrorTable(
    "visibility",
    pa.schema(
        [
            ("room_nid", pa.int64()),
            ("room_id", pa.string()),
            ("principal", pa.string()),
            ("first_audience", pa.int64()),
            ("end_audience", pa.int64()),
            ("last_join_topological", pa.int64()),
        ]
    ),
    key="room_nid",
)
ROOMS: Final = MirrorTable(
    "rooms",
    pa.schema(
        [
            ("room_nid", pa.int64()),
            ("room_id", pa.string()),
            ("room_version", pa.string()),
            ("joined_count", pa.int64()),
            ("invited_count", pa.int64()),
            ("forward_extremities", pa.int64()),
            ("last_stream_ordering", pa.int64()),
            ("max_topological_ordering", pa.int64()),
            ("is_partial", pa.bool_()),
            ("write_version", pa.int64()),
            ("removals", pa.int64()),
        ]
    ),
    key="room_nid",
)
TABLES: Final = {
    table.name: table for table in (EVENTS, STATE_CHANGES, MEMBERSHIPS, VISIBILITY, ROOMS)
}
"""In the order of a round. `rooms` is last: its numbers say which rooms the others have read."""


def chosen_tables(names: tuple[str, ...]) -> tuple[MirrorTable, ...]:
    """Return the tables of these names, or of "all", and `rooms`. Raise `InputError`."""
    unknown = [name for name in names if name not in TABLES and name != "all"]
    if unknown or not names:
        raise InputError(
            f"a mirror has no table {', '.join(unknown) or 'without a name'}:"
            f" give all, or some of {', '.join(TABLES)}"
        )
    wanted = set(TABLES) if "all" in names else {*names, ROOMS.name}
    return tuple(table for name, table in TABLES.items() if name in wanted)
