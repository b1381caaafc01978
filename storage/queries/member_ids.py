"""The ids of the members of a room with one membership.

A room may have 50,000 of them, and their names are in another table. So the statement looks the
names up by an array of their numbers, which reads each page of the index once. It returns them as
one text, because the driver takes as long for a row of each as the look-up.

The current state of a room has a state group, and the content of a group never changes. A process
remembers the ids with their group, and gets no names as long as the room has the same group.
"""

from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import UnknownRoom
from storage.ids import RoomId
from storage.streams.caches import MemberIds

SQL_MEMBER_IDS: Final[LiteralString] = """
SELECT r.current_state_group AS state_group, member.id_count, member.user_ids
FROM rooms r
CROSS JOIN LATERAL (
    SELECT count(*) AS id_count, string_agg(k.state_key, E'\\n') AS user_ids
    FROM state_keys k
    WHERE r.current_state_group IS DISTINCT FROM $3::bigint AND k.state_key_nid = ANY(ARRAY(
        SELECT c.state_key_nid
        FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = $2::smallint
    ))
) AS member
WHERE r.room_id = $1::text
"""

SQL_MEMBER_IDS_APART: Final[LiteralString] = """
SELECT k.state_key
FROM rooms r
JOIN current_state c USING (room_nid)
JOIN state_keys k USING (state_key_nid)
WHERE r.room_id = $1::text AND c.membership = $2::smallint
"""


class MemberIdsRow(NamedTuple):
    """The state group of the current state, and the ids, one a line.

    There are none if the group is the one that the caller knows.
    """

    state_group: int | None
    id_count: int
    user_ids: str | None


async def member_ids(
    conn: Connection, room_id: RoomId, membership: int, known: MemberIds | None
) -> MemberIds:
    """Return the users with this membership in the room's current state, in no order.

    The result is ``known`` where that is still right. `UnknownRoom`.
    """
    group = None if known is None else known.state_group
    row = await conn.fetchrow(SQL_MEMBER_IDS, room_id, membership, group, row=MemberIdsRow)
    if row is None:
        raise UnknownRoom(room_id)
    if known is not None and row.state_group == known.state_group:
        return known
    ids: list[Any] = row.user_ids.split("\n") if row.user_ids else []
    if len(ids) != row.id_count:  # an id has a line break
        return MemberIds(None, await conn.fetchvals(SQL_MEMBER_IDS_APART, room_id, membership))
    return MemberIds(row.state_group, ids)
