"""Calls that describe rooms: for room lists, the room directory and spaces."""

from collections.abc import Iterable

from storage import arguments as args
from storage.ids import RoomId
from storage.observability.instrument import measured
from storage.queries import room_info as room_queries
from storage.queries import space_children as space_queries
from storage.queries.room_info import RoomInfo
from storage.queries.space_children import SpaceChild
from storage.store.core import StoreCore


@measured("rooms")
async def rooms(store: StoreCore, room_ids: Iterable[str]) -> dict[RoomId, RoomInfo]:
    """Return what the current state of each stored room says: name, topic, counts, and so on.

    One statement serves any number of ``room_ids``. The result is in their order, and lacks the
    rooms of which nothing is stored. Malformed content is None, never an error. Check first who may
    see a room. `InvalidIdentifier`.
    """
    wanted = await args.many(args.rooms, room_ids)
    return await store.reads.run(lambda conn: room_queries.rooms(conn, wanted))


@measured("space_children")
async def space_children(store: StoreCore, room_id: str) -> list[SpaceChild]:
    """Return the children of a space, in the order of the client-server API.

    These are first those with a valid `order`, by it, then the others by `origin_server_ts`, and
    then by room id. A child without `via`, or with a malformed one, is left out. A child may be a
    space, and may be its own ancestor: end a walk at rooms that it has visited. `UnknownRoom`.
    """
    room = args.room(room_id)
    return await store.reads.run(lambda conn: space_queries.space_children(conn, room))
