"""A store with exactly the events of a Synapse, in the order in which Synapse stored them.

Synapse runs on SQLite: its database file has them. The store has the name of Synapse's server, so
that the users of Synapse are local users of the store. Both have the same users, rooms and events,
and neither knows of the other.
"""

import json
import sqlite3
from dataclasses import dataclass
from typing import Any, Final

from storage import Store
from storage.ids import RoomId, UserId
from tests.homeserver.processes import ServerProcess, User

SQL_STORED: Final = """
SELECT e.stream_ordering, e.event_id, r.room_version, j.json
FROM events e
JOIN rooms r USING (room_id)
JOIN event_json j USING (event_id)
WHERE e.stream_ordering > ? AND NOT e.outlier
ORDER BY e.stream_ordering
"""


@dataclass
class SynapseMirror:
    """``last`` is the position of Synapse up to which the store has its events."""

    server: ServerProcess
    store: Store
    last: int = 0

    async def follow(self) -> None:
        """Append what Synapse has stored since the last call."""
        for position, event_id, version, text in self._stored():
            [result] = await self.store.append([json.loads(text)], room_version=version)
            assert (result.event_id, result.outcome) == (event_id, "stored"), result
            self.last = position

    def _stored(self) -> list[Any]:
        connection = sqlite3.connect(self.server.folder / "synapse.db", timeout=30)
        try:
            return connection.execute(SQL_STORED, (self.last,)).fetchall()
        finally:
            connection.close()

    async def account(self, user: User, kind: str, content: Any, room: str | None = None) -> None:
        """Set account data on both."""
        within = "" if room is None else f"/rooms/{room}"
        path = f"/user/{user.user_id}{within}/account_data/{kind}"
        await user.call("PUT", path, content)
        await self.store.account_data.set(
            UserId(user.user_id), kind, content, room_id=None if room is None else RoomId(room)
        )
