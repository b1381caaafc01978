"""The room under verification: its row, the local server, and batches of its events."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.ids import RoomId
from storage.maintenance.room_states import RoomStates
from storage.maintenance.verify.finding import Finding

SQL_ROOM: Final[LiteralString] = """
SELECT room_nid, room_id, room_version, next_audience, current_state_group, last_stream_ordering,
    max_topological_ordering,
    forward_extremities, current_audience,
    (SELECT max(j.topological_cut) FROM purge_jobs j
        WHERE j.room_nid = rooms.room_nid) AS purged_below,
    is_partial, completed_at, in_order_ts
FROM rooms
WHERE room_id = $1::text
"""

SQL_TIMELINE: Final[LiteralString] = compose(
    """
SELECT event_nid, event_id, stream_ordering, topological_ordering, state_group_before,
    state_group_after,
    state_key_nid, soft_failed, rejected, :prev_nids.call AS prev_events
FROM events
WHERE room_nid = $1::int
    AND NOT outlier
    AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
ORDER BY topological_ordering, stream_ordering
LIMIT $4::bigint
""",
    PREV_NIDS,
).sql

SQL_EVENT_IDS: Final[LiteralString] = """
SELECT event_nid, event_id
FROM events
WHERE event_nid = ANY($1::bigint[])
UNION
SELECT event_nid, event_id
FROM missing_events
WHERE event_nid = ANY($1::bigint[])
"""

BATCH: Final = 1_000  # events read together
BEFORE_ALL: Final = -(1 << 63)


class VerifiedRoomRow(NamedTuple):
    """A row of `rooms`.

    ``purged_below``: the topological ordering below which history was purged, else None.
    """

    room_nid: int
    room_id: str
    room_version: str
    next_audience: int
    current_state_group: int | None
    last_stream_ordering: int | None
    max_topological_ordering: int
    forward_extremities: list[int]
    current_audience: int
    purged_below: int | None
    is_partial: bool
    completed_at: int | None
    in_order_ts: int


class TimelineRow(NamedTuple):
    """A timeline event without its content."""

    event_nid: int
    event_id: str
    stream_ordering: int
    topological_ordering: int
    state_group_before: int
    state_group_after: int | None
    state_key_nid: int | None
    soft_failed: bool
    rejected: str | None
    prev_events: list[int]

    @property
    def after(self) -> int:
        """Return the state group after it."""
        return self.state_group_after or self.state_group_before


class NidRow(NamedTuple):
    """The id behind a nid."""

    event_nid: int
    event_id: str


@dataclass(frozen=True, slots=True)
class VerifiedRoom:
    """The input of every check. ``server_name``: its users are local.

    ``row.room_version`` is the version to check by, ``stored_version`` the one in the table.
    ``said_version`` is that of the create event ``create_id`` where it differs from the table's.
    """

    row: VerifiedRoomRow
    server_name: str
    states: RoomStates = field(default_factory=RoomStates)
    stored_version: str = ""
    said_version: str | None = None
    create_id: str = ""

    @property
    def nid(self) -> int:
        return self.row.room_nid

    def finding(
        self, check: str, subject: Iterable[object], found: object, expected: object
    ) -> Finding:
        """Return a difference in this room."""
        return Finding(
            check, RoomId(self.row.room_id), tuple(map(str, subject)), str(found), str(expected)
        )


async def timeline(
    conn: Connection, room_nid: int, batch: int = BATCH
) -> AsyncIterator[list[TimelineRow]]:
    """Yield pages of the room's events that are no outliers, in topological order."""
    at = (BEFORE_ALL, BEFORE_ALL)
    while rows := await conn.fetch(SQL_TIMELINE, room_nid, *at, batch, row=TimelineRow):
        yield rows
        at = (rows[-1].topological_ordering, rows[-1].stream_ordering)


async def event_ids(conn: Connection, event_nids: Iterable[int]) -> dict[int, str]:
    """Return the ids of stored or missing events, by nid; for an unknown nid such as 7 "nid 7"."""
    wanted = list(set(event_nids))
    known = dict(await conn.fetch(SQL_EVENT_IDS, wanted, row=NidRow)) if wanted else {}
    return {nid: known.get(nid, unknown(nid)) for nid in wanted}


def unknown(event_nid: int) -> str:
    """Return the name of an event that is neither stored nor missing."""
    return f"nid {event_nid}"
