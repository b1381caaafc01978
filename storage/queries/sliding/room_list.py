"""The rooms of a user, latest activity first, and windows on them.

A list has the rooms that the user is in, is invited to, or knocks at. It has rooms that the user
was banned or kicked from, if the user was ever in the room. A room that the user left is in a list
only where the connection was sent the room before. Forgotten rooms are in no list.
"""

from collections.abc import Collection, Container, Iterator
from typing import Final, LiteralString, NamedTuple

import orjson

from storage.database.connection import Connection
from storage.database.names import INVITE, JOIN, MEMBERSHIPS
from storage.ids import RoomId, UserId
from storage.queries.sliding.types import ALL_ROOMS, SlidingFilter
from storage.queries.sync.changed_rooms import News
from storage.streams import VectorPosition

SQL_LISTED: Final[LiteralString] = """
SELECT m.room_nid, r.room_id, m.membership::int AS membership,
    COALESCE(CASE WHEN m.membership = 5 THEN r.last_stream_ordering ELSE m.stream_ordering END, 0)
        AS activity,
    m.event_nid AS member_nid, m.membership < 3 AND e.sender_nid <> m.principal_nid AS was_kicked,
    m.membership = 5 OR v.last_join_topological IS NOT NULL AS was_joined
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
JOIN events e ON e.event_nid = m.event_nid
LEFT JOIN visibility v ON v.room_nid = m.room_nid AND v.principal_nid = m.principal_nid
WHERE p.name = $1::text AND NOT (m.forgotten AND m.membership < 3)
"""

SQL_DIRECT: Final[LiteralString] = """
SELECT a.content
FROM principals p
JOIN account_data a USING (principal_nid)
JOIN event_types t USING (type_nid)
WHERE p.name = $1::text AND a.room_nid = 0 AND t.type = 'm.direct'
"""

LEAVE: Final = MEMBERSHIPS["leave"]
BAN: Final = MEMBERSHIPS["ban"]


class ListedRoom(NamedTuple):
    """A room of a user.

    ``activity`` is the position of its latest event. Where the user is not in the room, it is that
    of the membership. ``was_kicked``: another user ended the membership. ``was_joined``: the user
    is in the room, or was there once.
    """

    room_nid: int
    room_id: RoomId
    membership: int
    activity: int
    member_nid: int
    was_kicked: bool
    was_joined: bool

    def is_in_list(self, sent: Container[int]) -> bool:
        """Return whether a list has the room, on a connection that was ``sent`` these rooms."""
        if self.membership > LEAVE or self.room_nid in sent:
            return True
        return self.was_joined and (self.membership == BAN or self.was_kicked)


class RoomList:
    """The rooms of a user in one snapshot."""

    def __init__(self, rooms: Collection[ListedRoom], direct: frozenset[str]) -> None:
        self._rooms = sorted(rooms, key=lambda room: (room.activity, room.room_nid), reverse=True)
        self._by_id = {room.room_id: room for room in self._rooms}
        self._by_nid = {room.room_nid: room for room in self._rooms}
        self._direct = direct

    def get(self, room_id: str) -> ListedRoom | None:
        """Return a room, whatever the membership. None: the user has none."""
        return self._by_id.get(RoomId(room_id))

    def by_nid(self, room_nid: int) -> ListedRoom | None:
        """Return a room by its nid, as `get`."""
        return self._by_nid.get(room_nid)

    def joined(self) -> Iterator[RoomId]:
        """Yield the rooms that the user is in, in no order."""
        return (room.room_id for room in self._rooms if room.membership == JOIN)

    def changed_since(self, position: VectorPosition) -> Iterator[ListedRoom]:
        """Yield the rooms that may have events or a membership after a position, latest first."""
        for room in self._rooms:
            if room.activity <= position.min:
                return
            yield room

    async def window(
        self,
        conn: Connection,
        filters: SlidingFilter,
        ranges: Collection[tuple[int, int]] | None,
        sent: Container[int],
    ) -> tuple[int, list[ListedRoom]]:
        """Return the number of rooms that pass a filter, and those of them in the ranges."""
        del conn  # for facts of the rooms that are not cached
        return self._window(filters, ranges, sent)

    def cached_window(
        self,
        filters: SlidingFilter,
        ranges: Collection[tuple[int, int]] | None,
        sent: Container[int],
    ) -> tuple[int, list[ListedRoom]] | None:
        """Return `window` without a statement. None: it takes one."""
        return self._window(filters, ranges, sent)

    def _window(
        self,
        filters: SlidingFilter,
        ranges: Collection[tuple[int, int]] | None,
        sent: Container[int],
    ) -> tuple[int, list[ListedRoom]]:
        rooms = [
            room
            for room in self._rooms
            if room.is_in_list(sent) and (filters == ALL_ROOMS or self._passes(room, filters))
        ]
        if ranges is None:
            return len(rooms), rooms
        indexes = sorted(
            {index for first, last in ranges for index in range(first, min(last + 1, len(rooms)))}
        )
        return len(rooms), [rooms[index] for index in indexes]

    def _passes(self, room: ListedRoom, filters: SlidingFilter) -> bool:
        return filters.is_invited in (None, room.membership == INVITE) and filters.is_dm in (
            None,
            room.room_id in self._direct,
        )

    async def direct(self, conn: Connection) -> frozenset[str]:
        """Return the ids in the account data m.direct of the user."""
        del conn  # where they are not cached
        return self._direct

    def cached_direct(self) -> frozenset[str] | None:
        """Return `direct` without a statement. None: it takes one."""
        return self._direct


class RoomLists:
    """The room lists of the users of a process."""

    async def of(self, conn: Connection, user_id: UserId, news: News) -> RoomList:
        """Return the list of a user in the snapshot of ``conn``, whose positions are ``news``."""
        del news
        rooms = await conn.fetch(SQL_LISTED, user_id, row=ListedRoom)
        return RoomList(rooms, direct_rooms(await conn.fetchval(SQL_DIRECT, user_id)))

    def cached(self, user_id: UserId, news: News) -> RoomList | None:
        """Return `of` without a statement. None: it takes one."""
        del user_id, news
        return None


def direct_rooms(content: bytes | None) -> frozenset[str]:
    """Return the room ids in a content of m.direct, which a client may have set to anything."""
    direct = None if content is None else orjson.loads(content)
    if not isinstance(direct, dict):
        return frozenset()
    lists = (rooms for rooms in direct.values() if isinstance(rooms, list))
    return frozenset(room for rooms in lists for room in rooms if isinstance(room, str))
