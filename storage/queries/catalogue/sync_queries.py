"""The syncs of the catalogue."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from storage.database.connection import Connection
from storage.ids import UserId, server_name_of
from storage.queries.catalogue.query import CatalogueQuery
from storage.queries.filters import ANY_ROOM, SyncFilter
from storage.queries.sliding.connection import Connections
from storage.queries.sliding.memory import SlidingMemory
from storage.queries.sliding.prepared import PreparedRequest
from storage.queries.sliding.response import look
from storage.queries.sliding.room_lists import RoomLists
from storage.queries.sliding.types import SlidingList, SlidingSyncRequest
from storage.queries.sync import SyncMemory, SyncRequest, brief, sync
from storage.queries.sync.changed_rooms import rooms_of
from storage.streams import SyncToken, VectorPosition, startup
from storage.streams.caches import Cache, LastChange, RoomsOf, Ticket

CHANGED: Final = 10  # rooms that have changed, in the caches
ROOMS: Final = 10_000  # limit of a list


def _request(given: Any, wanted: SyncFilter = ANY_ROOM) -> SyncRequest:
    return SyncRequest.of(
        given.user,
        given.since,
        timeline_limit=given.limit,
        rooms_limit=None,
        full_state=False,
        filter=wanted,
        server_name=server_name_of(given.user),
        deployment=given.deployment,
        config=given.config,
    )


async def _sync(conn: Connection, given: Any) -> object:
    return await sync(conn, _request(given))


async def _lazy_sync(conn: Connection, given: Any) -> object:
    return await sync(conn, _request(given, SyncFilter(lazy_load_members=True)))


async def _sync_some(conn: Connection, given: Any) -> object:
    """Run the sync of a process that has followed the streams up to the token.

    The first statement is not a part of it: it reads the positions.
    """
    since = SyncToken.parse(given.since, given.deployment).position("events") or VectorPosition()
    seen = dict(await startup.positions(conn))
    seen["events"] = {writer: min(at, since.min) for writer, at in seen["events"].items()}
    return await sync(
        conn,
        _request(given),
        memory=SyncMemory(
            lambda name: seen[name], Cache("rooms_of", 1), LastChange(1, 0), LastChange(1, 0)
        ),
    )


async def _sync_timelines(conn: Connection, given: Any) -> object:
    """Run the sync of a process that has followed all, with messages in some of the user's rooms.

    The first two statements are not a part of it: they read the positions and the rooms.
    """
    seen = await startup.positions(conn)
    joined = await rooms_of(conn, UserId(given.user))
    remembered: Cache[RoomsOf] = Cache("rooms_of", 1)
    ticket = remembered.get(given.user)
    if isinstance(ticket, Ticket):
        remembered.fill(ticket, joined._replace(moved=0))
    changes = LastChange(CHANGED, 0)
    for room_id in list(joined.joined)[:CHANGED]:
        changes.note(room_id, max(seen["events"].values(), default=0))
    return await brief(
        conn,
        _request(given),
        SyncMemory(lambda name: seen[name], remembered, changes, LastChange(1, 0)),
    )


class NothingFollowed:
    """The streams of a process that has just started."""

    def positions(self) -> Iterable[tuple[str, str, int]]:
        return ()

    def changed_since(
        self, stream_name: str, after: VectorPosition, upto: VectorPosition
    ) -> set[str] | None:
        """Return None: any key may have facts in this range."""


async def _sliding_sync(conn: Connection, given: Any) -> object:
    """Run the first request of a connection, in a process that has cached nothing."""
    caches = SyncMemory(lambda _: {}, Cache("rooms_of", 1), LastChange(1, 0), LastChange(1, 0))
    lists = RoomLists(lambda _: {}, rooms_max=ROOMS, facts_max=ROOMS, changes_max=CHANGED)
    memory = SlidingMemory(caches, lists, Connections(ROOMS), NothingFollowed())
    rooms = SlidingList([(0, given.limit - 1)], required_state=[("m.room.name", "")])
    request = PreparedRequest.of(
        given.user,
        SlidingSyncRequest(lists={"rooms": rooms}, unread=True),
        device_id="DEVICE",
        pos=None,
        ignored=None,
        server_name=server_name_of(given.user),
        deployment=given.deployment,
        config=given.config,
        defined=frozenset(),
    )
    return await look(conn, request, memory)


QUERIES: Final[Mapping[str, CatalogueQuery]] = {
    "sync": CatalogueQuery("what is new to a user since a token", ("user", "since"), _sync),
    "sync-remembered": CatalogueQuery(
        "the same, where the caches have the rooms that can have changed",
        ("user", "since"),
        _sync_some,
    ),
    "sync-timelines": CatalogueQuery(
        "the same, where only some timelines have new events", ("user", "since"), _sync_timelines
    ),
    "initial-sync": CatalogueQuery("everything of a user", ("user",), _sync),
    "lazy-sync": CatalogueQuery(
        "what is new to a user since a token, with the members that matter only",
        ("user", "since"),
        _lazy_sync,
    ),
    "initial-lazy-sync": CatalogueQuery(
        "everything of a user, with the members that matter only", ("user",), _lazy_sync
    ),
    "sliding-sync": CatalogueQuery(
        "the first rooms of a list, in a process without caches", ("user",), _sliding_sync
    ),
}
