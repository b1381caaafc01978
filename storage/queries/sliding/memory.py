"""The caches of a process for its sliding syncs."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from storage.database.connection import Connection
from storage.ids import UserId
from storage.queries.sliding.connection import Connections
from storage.queries.sliding.room_lists import RoomLists
from storage.queries.sliding.room_state import RoomFactsCache
from storage.queries.sliding.selection import PreparedRequest
from storage.queries.sync.changed_rooms import (
    WRITER,
    ChangeSnapshot,
    ChangeSnapshotRow,
    SyncMemory,
    WriterRow,
)
from storage.streams.caches import Cache
from storage.streams.positions import VectorPosition

Counted = RoomLists | RoomFactsCache | Cache[Any]

NOT_EXPECTED: Final = ("backfill",)


class FollowedStreams(Protocol):
    """The streams as far as a process has followed them (`storage.streams.notifier`)."""

    def positions(self) -> Iterable[tuple[str, str, int]]:
        """Return stream, writer and position up to which the process has followed."""
        ...

    def changed_since(
        self, stream_name: str, after: VectorPosition, upto: VectorPosition
    ) -> set[str] | None:
        """Return the keys with facts in a range of a stream. None: unknown."""
        ...


class SlidingMemory(NamedTuple):
    """The caches: changes, lists of rooms, states of connections, and keys of facts."""

    changes: SyncMemory
    lists: RoomLists
    connections: Connections
    followed: FollowedStreams

    def forget(self) -> None:
        """Forget everything, including reads in progress: the database was replaced."""
        self.lists.restart()
        self.connections.forget()

    def counted(self) -> dict[str, Counted]:
        """Return everything that counts hits and misses, by name."""
        return {**self.lists.counted(), "sliding_connections": self.connections.states}

    async def snapshot(
        self, conn: Connection, request: PreparedRequest
    ) -> tuple[ChangeSnapshot, ChangeSnapshotRow | None]:
        """Return the positions of the snapshot, and the connection if its state is valid."""
        pos = (0, 0) if request.pos is None else (request.pos.connection, request.pos.number)
        return await self.changes.snapshot_of_connection(conn, pos, request.key)

    def expected_snapshot(self, user_id: UserId) -> ChangeSnapshot | None:
        """Return the positions that this process has followed, as if they were a snapshot."""
        rows = [
            WriterRow(WRITER, *position)
            for position in self.followed.positions()
            if position[0] not in NOT_EXPECTED
        ]
        return self.confirmed_snapshot(user_id, rows)

    def confirmed_snapshot(
        self, user_id: UserId, rows: Sequence[WriterRow]
    ) -> ChangeSnapshot | None:
        """Return the snapshot of changes with these positions.

        None: there are commits that this process has not seen.
        """
        return self.changes.seen_positions(user_id).confirmed(rows)
