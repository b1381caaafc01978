"""The account data of a user that lists depend on: direct chats, tags, and ignored users.

Client-server API: m.direct is a map from users to room ids, m.tag of a room has its tags, and
m.ignored_user_list has an object with the ignored users as keys. Clients can store anything there.
A process keeps the data with the list of the user, and reads only what was stored since.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage import arguments as args
from storage.database.connection import Connection
from storage.ids import UserId
from storage.queries.sliding.user_rooms import DIRECT, IGNORED, ListChanges
from storage.queries.sync.changed_rooms import ChangeSnapshot, vector
from storage.streams import VectorPosition

STREAM: Final = "account_data"

SQL_PERSONAL_DATA: Final[LiteralString] = """
SELECT t.type, r.room_id, a.content
FROM principals p
JOIN account_data a USING (principal_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN rooms r USING (room_nid)
WHERE p.name = $1::text AND a.stream_id > $2::bigint AND CASE
    WHEN a.room_nid = 0 THEN t.type IN ('m.direct', 'm.ignored_user_list') ELSE t.type = 'm.tag' END
"""


class PersonalDataRow(NamedTuple):
    """A piece of account data. ``room_id`` None: global, or the room is gone."""

    type: str
    room_id: str | None
    content: bytes


@dataclass(frozen=True, slots=True)
class PersonalData:
    """The direct chats, the tags of each room that has some, and the ignored users.

    ``position``: that of the stream "account_data" in the snapshot. ``time``: on the clock of the
    process before it.
    """

    direct: frozenset[str]
    tags: Mapping[str, frozenset[str]]
    ignored: frozenset[UserId]
    position: VectorPosition
    time: int

    def is_right_for(
        self,
        user_id: UserId,
        snapshot: ChangeSnapshot,
        changes: ListChanges,
        seen: Mapping[str, int],
    ) -> bool:
        """Return whether the data are certainly the same in this snapshot.

        ``seen``: up to which position this process has followed each writer of the stream.
        """
        now = snapshot.positions.get(STREAM, VectorPosition())
        if self.position == now:
            return True
        since, last_changes = min(self.time, snapshot.time), changes.account_data
        is_seen = now <= vector(seen)
        return is_seen and since >= last_changes.floor and last_changes.last(user_id) <= since


NO_DATA: Final = PersonalData(frozenset(), {}, frozenset(), VectorPosition(), 0)


async def read_personal_data(
    conn: Connection, user_id: UserId, cached: PersonalData, snapshot: ChangeSnapshot
) -> PersonalData:
    """Return the data in this snapshot. ``cached`` are those of another one."""
    now = snapshot.positions.get(STREAM, VectorPosition())
    if not cached.position <= now:
        cached = NO_DATA
    after = cached.position.min
    rows = await conn.fetch(SQL_PERSONAL_DATA, user_id, after, row=PersonalDataRow)
    return _with(cached, rows, now, snapshot.time)


def _with(
    cached: PersonalData, rows: Iterable[PersonalDataRow], position: VectorPosition, time: int
) -> PersonalData:
    """Return the data with these rows. Unchanged parts stay the same objects."""
    direct, tags, ignored = cached.direct, dict(cached.tags), cached.ignored
    for row in rows:
        if row.type == DIRECT:
            direct = direct_rooms(row.content)
        elif row.type == IGNORED:
            ignored = ignored_users(row.content)
        elif row.room_id is not None:
            tags[row.room_id] = tags_in(row.content)
    return PersonalData(
        cached.direct if direct == cached.direct else direct,
        cached.tags if tags == cached.tags else tags,
        ignored,
        position,
        time,
    )


def direct_rooms(content: bytes) -> frozenset[str]:
    """Return the room ids in a content of m.direct."""
    direct = orjson.loads(content)
    if not isinstance(direct, dict):
        return frozenset()
    lists = (rooms for rooms in direct.values() if isinstance(rooms, list))
    return frozenset(room for rooms in lists for room in rooms if isinstance(room, str))


def ignored_users(content: bytes) -> frozenset[UserId]:
    """Return the users in a content of m.ignored_user_list."""
    content_of: Any = orjson.loads(content)
    users = content_of.get("ignored_users") if isinstance(content_of, dict) else None
    listed = users if isinstance(users, dict) else ()
    return frozenset(UserId(user) for user in listed if args.is_text(user))


def tags_in(content: bytes) -> frozenset[str]:
    content_of: Any = orjson.loads(content)
    tags = content_of.get("tags") if isinstance(content_of, dict) else None
    return frozenset(tags) if isinstance(tags, dict) else frozenset()
