"""The rooms of a space that a user may see, depth first, for /hierarchy.

A level of the space takes two statements: one for its rooms, one for the children of its spaces. So
rooms and spaces are read ahead of the walk, in its order. How many are read ahead begins with the
limit of the page and doubles: a space may have thousands of children that are not stored here.

Source: client-server API, "Querying rooms in a space".
"""

from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Final, NamedTuple

from storage.database.connection import Connection
from storage.event.versions import version_of
from storage.ids import RoomId
from storage.queries.room_info import RoomInfo, rooms
from storage.queries.space_children import SpaceChild, children_of

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
        self._ahead = min(request.limit, ROOMS_MAX)

    async def run(self) -> list[SpaceRoom]:
        found, seen = list[SpaceRoom](), set[RoomId]()
        while self._stack and self._left > 0:
            here, depth = self._stack.pop()
            room = None if here in seen else await self._room(here)
            seen.add(here)
            if room is None:
                continue
            goes_on = depth < self._request.depth_max
            children = await self._children_of(room, with_rooms=goes_on)
            found.append(SpaceRoom(room, children))
            self._left -= 1
            if goes_on:
                self._stack += [(one.room_id, depth + 1) for one in reversed(children)]
        return found

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
                known = self._children.get(room_id, ())
                stack += [(one.room_id, depth + 1) for one in reversed(known)]

    async def _room(self, room_id: RoomId) -> RoomInfo | None:
        """Return a room; None if it is not stored, or not visible."""
        if room_id not in self._rooms:
            await self._read_rooms(chain([room_id], self._coming()))
        return self._rooms[room_id]

    async def _read_rooms(self, room_ids: Iterable[RoomId]) -> None:
        wanted = list(dict.fromkeys(islice(self._unknown(room_ids), self._ahead)))
        if not wanted:
            return
        self._ahead = min(2 * self._ahead, ROOMS_MAX)
        found = await rooms(self._conn, wanted)
        for one in wanted:
            room = found.get(one)
            self._rooms[one] = room if room and may_see(room, self._request.own) else None

    def _unknown(self, room_ids: Iterable[RoomId]) -> Iterable[RoomId]:
        """Yield those that are not read, until enough rooms of the page are known."""
        left = self._left
        for one in room_ids:
            if one not in self._rooms:
                yield one
            elif self._rooms[one] is not None:
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
        others = (one for one in self._coming() if one != room_id and self._is_unread(one))
        spaces = [room_id, *islice(others, min(self._left, SPACES_MAX) - 1)]
        for space, children in (await children_of(self._conn, spaces)).items():
            self._children[space] = [
                one for one in children if one.suggested or not self._request.suggested_only
            ]

    def _is_unread(self, room_id: RoomId) -> bool:
        room = self._rooms.get(room_id)
        return room is not None and room.type == "m.space" and room_id not in self._children


def may_see(room: RoomInfo, own: Mapping[RoomId, str]) -> bool:
    """Return whether a user may see a room in a space: they are in it, or may enter or read it."""
    if room.room_id in own or room.visibility == "world_readable":
        return True
    if any(own.get(one) == "join" for one in room.allowed_rooms) or room.join_rule == "public":
        return True
    return room.join_rule is not None and version_of(room.version).may_knock(room.join_rule)


async def space_walk(conn: Connection, request: WalkRequest) -> list[SpaceRoom]:
    """Return the visible rooms of a space, each once. `StorageCorrupt`."""
    return await SpaceWalk(conn, request).run()
