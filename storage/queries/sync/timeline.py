"""Timelines of rooms: the parts that the statements of sync and sliding sync share, and their rows.

A timeline is in stream order: the latest visible live events of the room, and one beyond the limit,
which shows that there are more. It never has backfilled events. A range of a room's stream is
written as a range of (room, position), and ordered so. Then only an index by room fits. The index
over all rooms would be slow for a quiet room. `BETWEEN` shows the planner that the range is of one
room. It takes a range between two rows for a ninth of the table, and would read the whole room by
time.

A timeline begins after the last gap: with the last event that arrived before one of its parents.
Then it is limited. The missing events come by paging back, also those that are backfilled by then.
At most `rows_max` events of a room are read. A timeline that finds too few visible ones among them
is limited as well; pages skip the hidden ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, Generic, LiteralString, Protocol, TypeVar

from storage.ids import RoomId
from storage.queries.events import StoredEvent, event_of_room, served_at_once
from storage.turns import in_turns, parts

TEMPLATE_LATEST: Final[LiteralString] = """
    SELECT {columns}
    FROM events e
    WHERE (e.room_nid, e.stream_ordering) > ({room}.room_nid, {after})
        AND (e.room_nid, e.stream_ordering) <= ({room}.room_nid, {upto})
        AND e.room_nid BETWEEN {room}.room_nid AND {room}.room_nid
        AND {which}
    ORDER BY e.room_nid DESC, e.stream_ordering DESC
    LIMIT {limit}
"""
"""The latest events of a range of a room's stream."""

PART_LIVE: Final[LiteralString] = "NOT e.outlier AND NOT e.backfilled"
"""Whether the event `e` arrived as new: backfilled history is in no timeline."""

TEMPLATE_TIMELINE_COLUMNS: Final[LiteralString] = """
    e.room_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.redacted_by,
    e.redacted_form, e.json, row_number() OVER () AS number,
    user_sees(e, v.joined_since, v.own_audiences, v.shared_audiences, v.world_audiences,
        v.shared_before, v.reader_nid, v.unread)
        AND {is_wanted} AS is_shown,
    NOT was_there(e, v.joined_since, v.joined_audiences)
        AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
        AND NOT was_there_before(e, v.reader_nid, v.unread) AS withheld
"""

TEMPLATE_TIMELINE: Final[LiteralString] = """
    SELECT e.*, e.number = {rows_max} AS is_last
    FROM visibility_of(r.room_nid, r.principal_nid) AS v
    {filter}
    CROSS JOIN LATERAL (
        SELECT *
        FROM ({latest}) AS e  -- at most so many are read
        WHERE e.is_shown OR e.number = {rows_max}
        ORDER BY e.room_nid DESC, e.stream_ordering DESC
        LIMIT {limit} + 1
    ) AS e
"""
"""The latest visible events of the room `r`, and one more if there are more.

With all columns of an event: to look it up by number would be three more descents each. `latest` is
made of `TEMPLATE_TIMELINE_COLUMNS`.
"""

TEMPLATE_HAS_STATE: Final[LiteralString] = """
    EXISTS (
        SELECT
        FROM state_deltas d
        WHERE d.room_nid = r.room_nid AND d.stream_ordering > r.lower
            AND d.stream_ordering <= {upto}
    )
"""

PART_NO_EVENT: Final[LiteralString] = """
    NULL::boolean AS is_last, NULL AS event_id, NULL::bigint AS stream_ordering,
    NULL::bigint AS topological_ordering, NULL AS redacted_by, NULL::boolean AS redacted_form,
    NULL::boolean AS withheld, NULL::bytea AS json
"""
"""The columns of `PART_EVENT` in a row that has no event."""

PART_EVENT: Final[LiteralString] = """
    t.is_last, t.event_id, t.stream_ordering, t.topological_ordering,
    CASE WHEN t.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = t.redacted_by) END,
    t.redacted_form, t.withheld, t.json
"""
"""The columns of an event of the timeline `t`."""

ROOM: Final = "room"
EVENT: Final = "event"
LIMIT: Final = "limit"


class TimelineRoom(Protocol):
    """The columns of a room that its events need."""

    @property
    def room_id(self) -> RoomId: ...

    @property
    def room_version(self) -> str: ...


R = TypeVar("R", bound=TimelineRoom)


@dataclass(slots=True)
class RoomTimeline(Generic[R]):
    """A room, and the events of its timeline: oldest first, perhaps one beyond the limit.

    ``cut``: there may be more visible events before the first one. A gap lies there, or those
    events were not read.
    """

    row: R
    cut: bool
    events: list[StoredEvent] = field(default_factory=list)

    def add(self, columns: Sequence[Any]) -> None:
        is_last, event_id, stream, topological, redacted_by, redacted_form, withheld, raw = columns
        self.cut = self.cut or is_last
        event = (event_id, stream, topological, redacted_by, None, False, False, redacted_form, raw)
        self.events.append(
            event_of_room(self.row.room_id, self.row.room_version, event, withheld=withheld)
        )

    async def shorten(self) -> None:
        """Leave out the oldest events if all of them have too many values (`served_at_once`)."""
        served = await served_at_once(self.events[::-1])
        if served < len(self.events):
            self.events, self.cut = self.events[-served:], True


T = TypeVar("T", bound=RoomTimeline[Any])


async def timelines_of(
    records: Sequence[Any], columns: slice, timeline: Callable[[Any], T]
) -> dict[int, T]:
    """Return the rooms of these rows by nid. ``columns`` are those of the event.

    ``timeline`` makes an empty one of a row of kind "room". A row of kind "limit" cuts its room.
    """
    found = dict[int, T]()
    async for part in parts(records):
        found |= {record[1]: timeline(record) for record in part if record[0] == ROOM}
    async for part in parts(records):
        for record in part:
            if record[0] == EVENT:
                found[record[1]].add(record[columns])
            elif record[0] == LIMIT:
                found[record[1]].cut = True
    async for one in in_turns(found.values()):
        one.events.sort(key=attrgetter("stream_ordering"))
        await one.shorten()
    return found
