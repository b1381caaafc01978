"""Account data: data that a local user's clients store, global or per room.

Its stream is "account_data". Source: client-server API, client config.
"""

from collections.abc import Mapping
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage import arguments as args
from storage.database.connection import Connection, require_room
from storage.errors import UnknownRoom
from storage.streams.feed import StreamRow
from storage.streams.stream_writer import StreamWriter, WrittenIdRow, WrittenRows

SQL_SET: Final[LiteralString] = """
WITH
room AS (
    SELECT 0 AS room_nid WHERE $2::text IS NULL
    UNION ALL
    SELECT room_nid FROM rooms WHERE room_id = $2::text
),
known_principal AS (
    SELECT principal_nid FROM principals WHERE name = $1::text
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), $1::text
        WHERE NOT EXISTS (SELECT FROM known_principal) AND EXISTS (SELECT FROM room)
    RETURNING principal_nid
),
known_type AS (
    SELECT type_nid FROM event_types WHERE type = $3::text
),
new_type AS (
    INSERT INTO event_types (type_nid, type)
    SELECT nextval('type_nids'), $3::text
        WHERE NOT EXISTS (SELECT FROM known_type) AND EXISTS (SELECT FROM room)
    RETURNING type_nid
),
fact AS (
    INSERT INTO account_data (stream_id, principal_nid, room_nid, type_nid, writer_nid, content)
    SELECT nextval('account_data_stream'), p.principal_nid, r.room_nid, t.type_nid, $5::smallint,
        $4::bytea
    FROM (SELECT * FROM known_principal UNION ALL SELECT * FROM new_principal) AS p
    CROSS JOIN (SELECT * FROM known_type UNION ALL SELECT * FROM new_type) AS t
    CROSS JOIN room r
    ON CONFLICT (principal_nid, room_nid, type_nid) DO UPDATE
        SET stream_id = EXCLUDED.stream_id, writer_nid = EXCLUDED.writer_nid,
            content = EXCLUDED.content
    RETURNING stream_id
),
position AS (
    UPDATE stream_positions
    SET stream_id = GREATEST(stream_positions.stream_id, fact.stream_id)
    FROM fact
    WHERE stream_name = 'account_data' AND instance_name = $6::text AND epoch = $7::int
    RETURNING stream_positions.stream_id
)
SELECT stream_id, CASE
        WHEN EXISTS (SELECT FROM position) THEN (SELECT count(*)::int FROM stream_positions
            WHERE stream_name = 'account_data')
        ELSE refuse_old_writer($6::text)::int
    END AS writers
FROM fact
"""

SQL_GET: Final[LiteralString] = """
SELECT a.stream_id, r.room_id, t.type, a.content
FROM principals p
JOIN account_data a USING (principal_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN rooms r USING (room_nid)
WHERE p.name = $1::text AND a.stream_id > $2::bigint AND a.stream_id <= $3::bigint
ORDER BY a.stream_id
"""

SQL_OF_SCOPE: Final[LiteralString] = """
WITH
scope AS (
    SELECT 0 AS room_nid WHERE $2::text IS NULL
    UNION ALL
    SELECT room_nid FROM rooms WHERE room_id = $2::text
)
SELECT t.type, a.content
FROM principals p
CROSS JOIN scope
-- one scope: a join could read the account data of all rooms of the user
CROSS JOIN LATERAL (
    SELECT * FROM account_data
        WHERE principal_nid = p.principal_nid AND room_nid = scope.room_nid OFFSET 0
) AS a
JOIN event_types t USING (type_nid)
WHERE p.name = $1::text
ORDER BY a.stream_id
"""
"""$2: a room; NULL: the global account data."""

EVERYTHING: Final = (1 << 63) - 1


class AccountDataRow(NamedTuple):
    """One piece of account data. ``room_id`` None: global."""

    stream_id: int
    room_id: str | None
    type: str
    content: bytes


class OwnContentRow(NamedTuple):
    """The content of one type, in one place."""

    type: str
    content: bytes


class AccountData:
    """The store of account data (``store.account_data``)."""

    def __init__(self, writer: StreamWriter, server_name: str) -> None:
        self._writer = writer
        self._server_name = server_name

    async def set(
        self,
        user_id: str,
        type_: str,
        content: Mapping[str, Any],
        *,
        room_id: str | None = None,
    ) -> int:
        """Replace the content of a local user's type; return the position of the fact.

        Raise `UnknownRoom`, `InvalidIdentifier` or `InputError`.
        """
        user, kind = args.local_user(user_id, self._server_name), args.text(type_)
        room, packed = (
            None if room_id is None else args.room(room_id),
            args.content(content, "content"),
        )

        async def write(conn: Connection) -> WrittenRows:
            writer = self._writer
            row = await conn.fetchrow(
                SQL_SET, user, room, kind, packed, *writer.author, row=WrittenIdRow
            )
            if row is None:
                raise UnknownRoom(str(room))
            return WrittenRows(
                [StreamRow(row.stream_id, writer.instance_name, [user, room, kind])], row.writers
            )

        return await self._writer.write(write)

    async def get(self, user_id: str, *, room_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the contents by type: the global ones, or those of a room.

        Raise `UnknownRoom` or `InvalidIdentifier`.
        """
        user = args.local_user(user_id, self._server_name)
        room = None if room_id is None else args.room(room_id)
        rows = await self._writer.reads.of_primary(
            lambda conn: conn.fetch(SQL_OF_SCOPE, user, room, row=OwnContentRow)
        )
        if room is not None and not rows:
            await self._writer.reads.of_primary(lambda conn: require_room(conn, room))
        return {row.type: orjson.loads(row.content) for row in rows}

    async def changes(
        self, user_id: str, *, after: int = 0, upto: int = EVERYTHING
    ) -> list[AccountDataRow]:
        """Return the current account data that changed with ``after < position <= upto``.

        It is in stream order. Raise `InputError` for malformed arguments.
        """
        user = args.local_user(user_id, self._server_name)
        between = args.position(after, "after"), args.position(upto, "upto")
        return await self._writer.reads.of_primary(
            lambda conn: conn.fetch(SQL_GET, user, *between, row=AccountDataRow)
        )
