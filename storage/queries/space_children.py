"""The children of a space, in the order of the client-server API ("Spaces").

The current state of a room has a state group. The statement reads the group without its members, so
a space of 50,000 members costs as much as a small one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

from storage import arguments as args
from storage.codec import StoredBytes
from storage.database.connection import Connection
from storage.database.rooms import require_room
from storage.errors import StorageCorrupt
from storage.ids import RoomId, ServerName
from storage.queries.events import StoredEvent, event_of_room
from storage.turns import in_turns

SQL_SPACE_CHILDREN: Final[LiteralString] = """
SELECT r.room_id, k.state_key, e.origin_server_ts, r.room_version, e.event_id, e.stream_ordering,
    e.topological_ordering,
    (SELECT b.event_id FROM events b WHERE b.event_nid = e.redacted_by) AS redacted_by,
    e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.json
FROM rooms r
CROSS JOIN LATERAL state_but_members(r.current_state_group) AS entry
LEFT JOIN state_keys k USING (state_key_nid)
LEFT JOIN event_types t USING (type_nid)
LEFT JOIN events e USING (event_nid)
WHERE r.room_id = ANY($1::text[]) AND (t.type = 'm.space.child' OR entry.event_nid IS NULL)
"""


class SpaceChildRow(NamedTuple):
    """An m.space.child event. All is None but the version if rows of the state are lost."""

    room_id: str
    state_key: str | None
    origin_server_ts: int | None
    room_version: str
    event_id: str | None
    stream_ordering: int | None
    topological_ordering: int | None
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool | None
    outlier: bool | None
    redacted_form: bool | None
    json: StoredBytes | None


EVENT: Final = SpaceChildRow._fields.index("event_id")
"""The first column of the event."""

ORDER: Final[re.Pattern[str]] = re.compile(r"[\x20-\x7e]{1,50}")
"""A valid `order`; a child with another one is sorted as if it had none."""


@dataclass(frozen=True, slots=True)
class SpaceChild:
    """A child of a space. `store.rooms` describes it, as far as its room is stored here.

    ``via`` are the servers to join by. ``event`` is the m.space.child event, for /hierarchy.
    """

    room_id: RoomId
    via: tuple[ServerName, ...]
    suggested: bool
    order: str | None
    origin_server_ts: int
    event: StoredEvent


async def space_children(conn: Connection, room_id: RoomId) -> list[SpaceChild]:
    """Return the children of a space in order. `UnknownRoom`, `StorageCorrupt`.

    First by `order`, then those without one by `origin_server_ts`; ties by room id.
    """
    found = (await children_of(conn, [room_id]))[room_id]
    if not found:
        await require_room(conn, room_id)
    return found


async def children_of(
    conn: Connection, room_ids: Iterable[RoomId]
) -> dict[RoomId, list[SpaceChild]]:
    """Return the children of each of these spaces, in order. `StorageCorrupt`."""
    found: dict[RoomId, list[SpaceChild]] = {room_id: [] for room_id in room_ids}
    rows = await conn.fetch(SQL_SPACE_CHILDREN, list(found), row=SpaceChildRow)
    async for row in in_turns(rows):
        space = RoomId(row.room_id)
        if (child := _child(space, row)) is not None:
            found[space].append(child)
    return {space: sorted(children, key=_in_order) for space, children in found.items()}


def _in_order(child: SpaceChild) -> tuple[bool, str, int, str]:
    return child.order is None, child.order or "", child.origin_server_ts, child.room_id


def _child(space: RoomId, row: SpaceChildRow) -> SpaceChild | None:
    """Return the child of an event; None if it names no room or no server to join by."""
    if row.event_id is None or row.state_key is None:
        raise StorageCorrupt("the state of a space cannot be read", room_id=space)
    event = event_of_room(space, row.room_version, row[EVENT:])
    via = _servers(event.content.get("via"))
    if not via or not row.state_key.startswith("!"):
        return None
    order = event.content.get("order")
    return SpaceChild(
        room_id=RoomId(row.state_key),
        via=via,
        suggested=event.content.get("suggested") is True,
        order=order if isinstance(order, str) and ORDER.fullmatch(order) else None,
        origin_server_ts=row.origin_server_ts or 0,
        event=event,
    )


def _servers(via: Any) -> tuple[ServerName, ...]:
    if not isinstance(via, list) or not all(one and args.is_text(one) for one in via):
        return ()
    return tuple(map(ServerName, via))
