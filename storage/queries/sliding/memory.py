"""The caches of a process for its sliding syncs."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from storage.database.connection import Connection
from storage.ids import UserId
from storage.queries.sliding.connection import Connections
from storage.queries.sliding.prepared import PreparedRequest
from storage.queries.sliding.room_facts import RoomFactsCache
from storage.queries.sliding.room_lists import RoomLists
from storage.queries.sync.changed_rooms import News, NewsRow, SyncMemory
from storage.queries.sync.positions import WRITER, WriterRow
from storage.streams.caches import Cache
from storage.streams.notifier import Notifier

Counted = RoomLists | RoomFactsCache | Cache[Any]

NOT_EXPECTED: Final = ("backfill",)


class SlidingMemory(NamedTuple):
    """The caches: changes, lists of rooms, states of connections, and keys of facts."""

    changes: SyncMemory
    lists: RoomLists
    connections: Connections
    notifier: Notifier

    def forget(self) -> None:
        """Forget everything, including reads in progress: the database was replaced."""
        self.lists.restart()
        self.connections.forget()

    def counted(self) -> dict[str, Counted]:
        """Return everything that counts hits and misses, by name."""
        return {**self.lists.counted(), "sliding_connections": self.connections.states}

    async def news(self, conn: Connection, request: PreparedRequest) -> tuple[News, NewsRow | None]:
        """Return the positions of the snapshot, and the connection if its state is valid."""
        pos = (0, 0) if request.pos is None else (request.pos.connection, request.pos.number)
        return await self.changes.news_of_connection(conn, pos, request.key)

    def expected_news(self, user_id: UserId) -> News | None:
        """Return the positions that this process has followed, as if they were a snapshot."""
        streams = (name for name in self.notifier.streams if name not in NOT_EXPECTED)
        rows = [
            WriterRow(WRITER, name, writer, position)
            for name in streams
            for writer, position in self.notifier.streams[name].positions().items()
        ]
        return self.confirmed_news(user_id, rows)

    def confirmed_news(self, user_id: UserId, rows: Sequence[WriterRow]) -> News | None:
        """Return the news of a snapshot with these positions.

        None: there are commits that this process has not seen.
        """
        return self.changes.known(user_id).confirmed(rows)
