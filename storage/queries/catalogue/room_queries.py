"""The rooms of the catalogue and their members."""

from collections.abc import Mapping
from typing import Any, Final

from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.ids import EventId, RoomId, UserId
from storage.queries import member_ids, members, room_info, sharing, space_children, state
from storage.queries import visible_events as visibility_queries
from storage.queries.catalogue.query import CatalogueQuery
from storage.queries.room_position import NOW
from storage.queries.sync.positions import events_of, positions
from storage.streams import SyncToken


async def _current_state(conn: Connection, given: Any) -> object:
    return await state.current_state(conn, RoomId(given.room))


async def _rooms_of(conn: Connection, given: Any) -> object:
    return await state.rooms_of(conn, UserId(given.user))


async def _visible_to_user(conn: Connection, given: Any) -> object:
    return await visibility_queries.visible_to_user(
        conn, UserId(given.user), [EventId(given.event)]
    )


async def _membership(conn: Connection, given: Any) -> object:
    return await members.membership(conn, RoomId(given.room), UserId(given.user), NOW)


async def _members(conn: Connection, given: Any) -> object:
    return await members.members(conn, RoomId(given.room), NOW, wanted=JOIN, unwanted=None)


async def _member_ids(conn: Connection, given: Any) -> object:
    return await member_ids.member_ids(conn, RoomId(given.room), JOIN, None)


async def _room_info(conn: Connection, given: Any) -> object:
    return await room_info.rooms(conn, [RoomId(given.room)])


async def _space_children(conn: Connection, given: Any) -> object:
    return await space_children.space_children(conn, RoomId(given.room))


async def _users_sharing(conn: Connection, given: Any) -> object:
    return await sharing.users_sharing(conn, UserId(given.user))


async def _sharing_changes(conn: Connection, given: Any) -> object:
    since = events_of(SyncToken.parse(given.since, given.deployment))
    now = (await positions(conn))["events"]
    return await sharing.sharing_changes(conn, UserId(given.user), since, now, text=given.since)


QUERIES: Final[Mapping[str, CatalogueQuery]] = {
    "current-state": CatalogueQuery("the current state of a room", ("room",), _current_state),
    "room-info": CatalogueQuery("a room as its state describes it", ("room",), _room_info),
    "space-children": CatalogueQuery("the children of a space", ("room",), _space_children),
    "membership": CatalogueQuery(
        "the membership of a user in a room", ("room", "user"), _membership
    ),
    "members": CatalogueQuery("the events of the joined members of a room", ("room",), _members),
    "member-ids": CatalogueQuery("the joined members of a room", ("room",), _member_ids),
    "users-sharing": CatalogueQuery("the users who share a room", ("user",), _users_sharing),
    "sharing-changes": CatalogueQuery(
        "the users who share a room since a token", ("user", "since"), _sharing_changes
    ),
    "rooms-of": CatalogueQuery("the rooms that a user is in", ("user",), _rooms_of),
    "visible-to-user": CatalogueQuery(
        "whether a user may see an event", ("user", "event"), _visible_to_user
    ),
}
