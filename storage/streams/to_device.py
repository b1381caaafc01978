"""To-device messages: an inbox per device of a local user; the stream "to_device".

Source: client-server API, send-to-device messaging.
"""

from collections.abc import Mapping
from typing import Any, Final, LiteralString, NamedTuple, TypeVar

from storage import arguments as args
from storage.database.connection import Connection
from storage.ids import UserId
from storage.streams.feed import StreamRow
from storage.streams.positions import LARGEST_POSITION, VectorPosition
from storage.streams.reads import parts, vector
from storage.streams.stream_writer import StreamWriter, WrittenRows

SQL_SEND: Final[LiteralString] = """
WITH
message AS (
    SELECT u.name, u.device_id, u.content, u.ordinal
    FROM unnest($1::text[], $2::text[], $3::bytea[]) WITH ORDINALITY AS u (name, device_id, content,
        ordinal)
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), m.name
    FROM (SELECT DISTINCT name FROM message) AS m
    WHERE NOT EXISTS (SELECT FROM principals p WHERE p.name = m.name)
    RETURNING principal_nid, name
),
fact AS (
    INSERT INTO to_device (stream_id, principal_nid, device_id, content, writer_nid)
    SELECT nextval('to_device_stream'), o.principal_nid, o.device_id, o.content, $4::smallint
    FROM (
        SELECT COALESCE(p.principal_nid, n.principal_nid) AS principal_nid, m.device_id, m.content
        FROM message m
        LEFT JOIN principals p ON p.name = m.name
        LEFT JOIN new_principal n ON n.name = m.name
        ORDER BY m.ordinal
    ) AS o
    RETURNING stream_id, principal_nid, device_id
),
position AS (
    UPDATE stream_positions
    SET stream_id = GREATEST(stream_positions.stream_id, (SELECT max(fact.stream_id) FROM fact))
    WHERE stream_name = 'to_device' AND instance_name = $5::text AND epoch = $6::int
        AND EXISTS (SELECT FROM fact)
    RETURNING stream_positions.stream_id
)
SELECT f.stream_id, COALESCE(p.name, n.name) AS user_id, f.device_id, CASE
        WHEN EXISTS (SELECT FROM position) THEN (SELECT count(*)::int FROM stream_positions
            WHERE stream_name = 'to_device')
        ELSE refuse_old_writer($5::text)::int
    END AS writers
FROM fact f
LEFT JOIN principals p USING (principal_nid)
LEFT JOIN new_principal n USING (principal_nid)
"""

SQL_INBOX: Final[LiteralString] = """
SELECT d.stream_id, d.content
FROM principals p
CROSS JOIN LATERAL (
    SELECT d.stream_id, d.content
    FROM to_device d
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($4::text[], $5::bigint[]) AS a (instance_name, stream_id) USING (instance_name)
    LEFT JOIN unnest($7::text[], $8::bigint[]) AS u (instance_name, stream_id) USING (instance_name)
    WHERE d.principal_nid = p.principal_nid AND d.device_id = $2::text
        -- compared as rows, so that only the index by device fits
        AND (d.principal_nid, d.device_id, d.stream_id) > (p.principal_nid, $2::text, $3::bigint)
        AND (d.principal_nid, d.device_id, d.stream_id) <= (p.principal_nid, $2::text, $9::bigint)
        AND d.stream_id > COALESCE(a.stream_id, $3::bigint)
        AND d.stream_id <= COALESCE(u.stream_id, $6::bigint)
    ORDER BY d.principal_nid, d.device_id, d.stream_id
    LIMIT $10::bigint
) AS d
WHERE p.name = $1::text
ORDER BY d.stream_id
"""

SQL_DELETE: Final[LiteralString] = """
WITH
covered AS MATERIALIZED (
    SELECT d.stream_id
    FROM principals p
    JOIN to_device d USING (principal_nid)
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($4::text[], $5::bigint[]) AS u (instance_name, stream_id) USING (instance_name)
    WHERE p.name = $1::text AND d.device_id = $2::text
        -- compared as rows, so that only the index by device fits
        AND (d.principal_nid, d.device_id, d.stream_id) <= (p.principal_nid, $2::text, $6::bigint)
        AND d.stream_id <= COALESCE(u.stream_id, $3::bigint)
),
deleted AS (
    DELETE FROM to_device
    WHERE stream_id = ANY(ARRAY(SELECT stream_id FROM covered))
    RETURNING stream_id
)
SELECT count(*)
FROM deleted
"""

EVERYTHING: Final = LARGEST_POSITION


class SentRow(NamedTuple):
    """A message that was put into an inbox."""

    stream_id: int
    user_id: str
    device_id: str
    writers: int


class MessageRow(NamedTuple):
    """A message that waits for its device; ``content`` is the JSON as received."""

    stream_id: int
    content: bytes


User = TypeVar("User", bound=str)


class ToDevice:
    """The store of to-device messages (``store.to_device``)."""

    def __init__(self, writer: StreamWriter, server_name: str) -> None:
        self._writer = writer
        self._server_name = server_name

    async def send(self, messages: Mapping[User, Mapping[str, Mapping[str, Any]]]) -> int:
        """Put messages (local user -> device -> message) into their inboxes, all or none.

        Return the position of the last one. Raise `InputError` for malformed arguments.
        """
        flat = [
            (
                args.local_user(user, self._server_name),
                args.text(device),
                args.content(content, "a message"),
            )
            for user, devices in args.mapping(messages, "messages").items()
            for device, content in args.mapping(devices, "the messages of a user").items()
        ]

        async def write(conn: Connection) -> WrittenRows:
            users, devices, contents = (
                [message[column] for message in flat] for column in range(3)
            )
            writer = self._writer
            rows = await conn.fetch(SQL_SEND, users, devices, contents, *writer.author, row=SentRow)
            stream_rows = [
                StreamRow(row.stream_id, writer.instance_name, [row.user_id, row.device_id])
                for row in rows
            ]
            return WrittenRows(stream_rows, rows[0].writers)

        return await self._writer.write(write) if flat else 0

    async def inbox(
        self,
        user_id: str,
        device_id: str,
        *,
        after: int | VectorPosition = 0,
        upto: int | VectorPosition = EVERYTHING,
        limit: int | None = None,
    ) -> list[MessageRow]:
        """Return the waiting messages of a device with ``after < position <= upto``, oldest first.

        Return all of them, or the first ``limit``. A vector position, as ``Store.positions_of``
        returns it, is exact for each writer. To serve a sync of a device:

            reached = store.positions_of(since)["to_device"]  # of the token that the client brings
            await store.to_device.delete(user_id, device_id, reached)  # so it has these
            answer = await store.sync(user_id, since=since)
            reached = store.positions_of(answer.next_batch)["to_device"]
            messages = await store.to_device.inbox(user_id, device_id, upto=reached)

        ``next_batch`` covers all of these messages. With a ``limit`` it may cover more than is
        returned. Then delete up to ``VectorPosition(messages[-1].stream_id).meet(reached)``. A
        ``stream_id`` alone may pass a message that another process is still writing.
        `InvalidIdentifier`, `InputError`.
        """
        inbox, most = (
            self._inbox(user_id, device_id),
            None if limit is None else args.position(limit, "limit"),
        )
        low, high = vector(after, "after"), vector(upto, "upto")
        arguments = *parts(low), *parts(high), high.furthest(), most
        return await self._writer.reads.of_primary(
            lambda conn: conn.fetch(SQL_INBOX, *inbox, *arguments, row=MessageRow)
        )

    async def delete(self, user_id: str, device_id: str, upto: int | VectorPosition) -> int:
        """Delete the messages of a device up to a position that it acknowledged; return how many.

        See `inbox` for which position that is: a number only if one process writes to the stream.
        `InvalidIdentifier`, `InputError`.
        """
        inbox, high = self._inbox(user_id, device_id), vector(upto, "upto")
        with self._writer.reads.writing():
            async with self._writer.database.connection() as conn:
                return int(await conn.fetchval(SQL_DELETE, *inbox, *parts(high), high.furthest()))

    def _inbox(self, user_id: str, device_id: str) -> tuple[UserId, str]:
        return args.local_user(user_id, self._server_name), args.text(device_id)
