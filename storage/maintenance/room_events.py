"""All events of a room, outliers and others, as the source of a statement.

Each index by room has either the outliers or the others. Postgres combines both only by a bitmap.
Without statistics, a plan with bitmaps reads too much elsewhere, so a session has none
(`storage.database.session`). A condition for both would then read the events of all rooms.

OFFSET 0 keeps the order of the outer statement away: else Postgres could read the events of all
rooms in that order, by another index.
"""

from typing import Final, LiteralString

PART_ROOM_EVENTS: Final[LiteralString] = """
(
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
)
"""

PART_AUTHORISED_EVENTS: Final[LiteralString] = """
(
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier AND NOT is_out_of_band(events)
    OFFSET 0
)
"""
"""Without memberships that arrived out of band, which are not authorised yet."""
