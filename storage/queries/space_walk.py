"""The rooms of a space that a user may see, depth first, for /hierarchy.

A level of the space takes two statements: one for its rooms, one for the children of its spaces. So
rooms and spaces are read ahead of the walk, in its order. How many are read ahead begins with the
limit of the page and doubles: a space may have thousands of children that are not stored here.

Source: client-server API, "Querying rooms in a space".
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, LiteralString, NamedTuple

from storage import arguments as args
from storage.database.connection import Connection, require_room
from storage.database.placeholders import fill
from storage.errors import StorageCorrupt
from storage.event.versions import version_of
from storage.ids import RoomId, ServerName
from storage.queries.events import PART_ROOM_EVENT, RoomEventRow, StoredEvent, event_of_room
from storage.queries.room_info import RoomInfo, rooms
from storage.turns import in_turns

# --------------------------------------------------------------------------------------------------
# The children of a space, in the order of the client-server API ("Spaces").
#
# The current state of a room has a state group. The statement reads the group without its members,
# so a space of 50,000 members costs as much as a small one.

TEMPLATE_SPACE_CHILDREN: Final[LiteralString] = """
SELECT r.room_id, k.state_key, e.origin_server_ts, r.room_version,
    {event}
FROM rooms r
CROSS JOIN LATERAL state_but_members(r.current_state_group) AS entry
LEFT JOIN state_keys k USING (state_key_nid)
LEFT JOIN event_types t USING (type_nid)
LEFT JOIN events e USING (event_nid)
WHERE r.room_id = ANY($1::text[]) AND (t.type = 'm.space.child' OR entry.event_nid IS NULL)
"""

SQL_SPACE_CHILDREN: Final[LiteralString] = fill(TEMPLATE_SPACE_CHILDREN, event=PART_ROOM_EVENT)


class SpaceChildRow(NamedTuple):
    """An m.space.child event. All is None but the version if rows of the state are lost."""

    room_id: str
    state_key: str | None
    origin_server_ts: int | None
    room_version: str
    event: RoomEventRow | None


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
    children = (await children_of(conn, [room_id]))[room_id]
    if not children:
        await require_room(conn, room_id)
    return children


async def children_of(
    conn: Connection, room_ids: Iterable[RoomId]
) -> dict[RoomId, list[SpaceChild]]:
    """Return the children of each of these spaces, in order. `StorageCorrupt`."""
    by_space: dict[RoomId, list[SpaceChild]] = {room_id: [] for room_id in room_ids}
    rows = await conn.fetch(SQL_SPACE_CHILDREN, list(by_space), row=SpaceChildRow)
    async for row in in_turns(rows):
        space = RoomId(row.room_id)
        if (child := _child(space, row)) is not None:
            by_space[space].append(child)
    return {space: sorted(children, key=_in_order) for space, children in by_space.items()}


def _in_order(child: SpaceChild) -> tuple[bool, str, int, str]:
    return child.order is None, child.order or "", child.origin_server_ts, child.room_id


def _child(space: RoomId, row: SpaceChildRow) -> SpaceChild | None:
    """Return the child of an event; None if it names no room or no server to join by."""
    if row.event is None or row.state_key is None:
        raise StorageCorrupt("the state of a space cannot be read", room_id=space)
    event = event_of_room(space, row.room_version, row.event)
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
    if not isinstance(via, list) or not all(server and args.is_text(server) for server in via):
        return ()
    return tuple(map(ServerName, via))


ROOMS_MAX: Final = 1_000
"""Rooms of one statement."""
SPACES_MAX: Final = 50
"""Spaces whose children are read in one statement."""


class WalkRequest(NamedTuple):
    """A walk from a room, for at most so many rooms. ``own``: the user's joined and invited."""

    room_id: RoomId
    own: Mapping[RoomId, str]
    limit: int
    depth_max: int
    suggested_only: bool


class SpaceRoom(NamedTuple):
    """A room of the walk, with its children if it is a space."""

    room: RoomInfo
    children: list[SpaceChild]


class SpaceWalk:
    """The rows that were read, and the rooms that the walk comes to, the next one last."""

    def __init__(self, conn: Connection, request: WalkRequest) -> None:
        self._conn, self._request = conn, request
        self._stack = [(request.room_id, 0)]
        self._rooms: dict[RoomId, RoomInfo | None] = {}
        self._children: dict[RoomId, list[SpaceChild]] = {}
        self._left = request.limit
        self._read_limit = min(request.limit, ROOMS_MAX)

    async def run(self) -> list[SpaceRoom]:
        walked, seen = list[SpaceRoom](), set[RoomId]()
        while self._stack and self._left > 0:
            here, depth = self._stack.pop()
            room = None if here in seen else await self._room(here)
            seen.add(here)
            if room is None:
                continue
            goes_on = depth < self._request.depth_max
            children = await self._children_of(room, with_rooms=goes_on)
            walked.append(SpaceRoom(room, children))
            self._left -= 1
            if goes_on:
                self._stack += [(child.room_id, depth + 1) for child in reversed(children)]
        return walked

    def _coming(self) -> Iterable[RoomId]:
        """Yield the rooms that the walk comes to, in order, as far as they are known."""
        seen, stack = set[RoomId](), self._stack.copy()
        while stack:
            room_id, depth = stack.pop()
            if room_id in seen:
                continue
            seen.add(room_id)
            yield room_id
            if depth < self._request.depth_max:
                children = self._children.get(room_id, ())
                stack += [(child.room_id, depth + 1) for child in reversed(children)]

    async def _room(self, room_id: RoomId) -> RoomInfo | None:
        """Return a room; None if it is not stored, or not visible."""
        if room_id not in self._rooms:
            await self._read_rooms(chain([room_id], self._coming()))
        return self._rooms[room_id]

    async def _read_rooms(self, room_ids: Iterable[RoomId]) -> None:
        unread = list(dict.fromkeys(islice(self._unknown(room_ids), self._read_limit)))
        if not unread:
            return
        self._read_limit = min(2 * self._read_limit, ROOMS_MAX)
        infos = await rooms(self._conn, unread)
        for room_id in unread:
            room = infos.get(room_id)
            self._rooms[room_id] = room if room and may_see(room, self._request.own) else None

    def _unknown(self, room_ids: Iterable[RoomId]) -> Iterable[RoomId]:
        """Yield those that are not read, until enough rooms of the page are known."""
        left = self._left
        for room_id in room_ids:
            if room_id not in self._rooms:
                yield room_id
            elif self._rooms[room_id] is not None:
                left -= 1
            if left <= 0:
                return

    async def _children_of(self, room: RoomInfo, *, with_rooms: bool) -> list[SpaceChild]:
        if room.type != "m.space":
            return []
        if room.room_id not in self._children:
            await self._read_children(room.room_id)
            if with_rooms:
                own = (child.room_id for child in self._children[room.room_id])
                await self._read_rooms(chain(own, self._coming()))
        return self._children.pop(room.room_id)

    async def _read_children(self, room_id: RoomId) -> None:
        others = (other for other in self._coming() if other != room_id and self._is_unread(other))
        spaces = [room_id, *islice(others, min(self._left, SPACES_MAX) - 1)]
        for space, children in (await children_of(self._conn, spaces)).items():
            self._children[space] = [
                child for child in children if child.suggested or not self._request.suggested_only
            ]

    def _is_unread(self, room_id: RoomId) -> bool:
        room = self._rooms.get(room_id)
        return room is not None and room.type == "m.space" and room_id not in self._children


def may_see(room: RoomInfo, own: Mapping[RoomId, str]) -> bool:
    """Return whether a user may see a room in a space: they are in it, or may enter or read it."""
    if room.room_id in own or room.visibility == "world_readable":
        return True
    if (
        any(own.get(allowed) == "join" for allowed in room.allowed_rooms)
        or room.join_rule == "public"
    ):
        return True
    return room.join_rule is not None and version_of(room.version).may_knock(room.join_rule)


async def space_walk(conn: Connection, request: WalkRequest) -> list[SpaceRoom]:
    """Return the visible rooms of a space, each once. `StorageCorrupt`."""
    return await SpaceWalk(conn, request).run()
