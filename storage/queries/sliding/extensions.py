"""The extensions of a response, by one statement: to-device messages, account data, receipts.

Each has a position of its own in the `pos`, which stays where no request has the extension.
Receipts and the account data of rooms are for the wanted rooms. A room that is sent and not wanted
now keeps the position from which it has to be read later.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import RoomId, UserId
from storage.streams import VectorPosition
from storage.streams.account_data import AccountDataRow
from storage.streams.receipts import ReceiptRow
from storage.streams.to_device import MessageRow

SQL_EXTENSIONS: Final[LiteralString] = """
WITH
reader AS MATERIALIZED (
    SELECT principal_nid FROM principals WHERE name = $1::text
),
message AS (
    SELECT d.stream_id, d.content
    FROM reader
    CROSS JOIN LATERAL (
        SELECT d.stream_id, d.content
        FROM to_device d
        JOIN writers w USING (writer_nid)
        LEFT JOIN unnest($4::text[], $5::bigint[]) AS a (instance_name, stream_id)
            USING (instance_name)
        WHERE d.principal_nid = reader.principal_nid AND d.device_id = $2::text
            -- compared as rows, so that only the index by device fits
            AND (d.principal_nid, d.device_id, d.stream_id)
                > (reader.principal_nid, $2::text, $3::bigint)
            AND d.stream_id > COALESCE(a.stream_id, $3::bigint)
        ORDER BY d.principal_nid, d.device_id, d.stream_id
        LIMIT $6::bigint
    ) AS d
),
data AS (
    SELECT a.*
    FROM reader
    JOIN account_data a USING (principal_nid)
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($8::text[], $9::bigint[]) AS s (instance_name, stream_id)
        USING (instance_name)
    WHERE a.stream_id > $7::bigint AND a.stream_id > COALESCE(s.stream_id, $7::bigint)
        AND (a.room_nid = 0 OR $10::boolean) AND a.room_nid <> ALL($11::int[])
    UNION ALL
    SELECT a.*
    FROM reader
    CROSS JOIN unnest($11::int[], $12::bigint[]) AS n (room_nid, after)
    CROSS JOIN LATERAL (
        SELECT * FROM account_data
        WHERE principal_nid = reader.principal_nid AND room_nid = n.room_nid
            AND stream_id > n.after
        OFFSET 0
    ) AS a
),
receipt AS (
    SELECT c.*
    FROM unnest($16::int[]) AS n (room_nid)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid AND stream_id > $13::bigint
        OFFSET 0
    ) AS c
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest($14::text[], $15::bigint[]) AS s (instance_name, stream_id)
        USING (instance_name)
    WHERE c.stream_id > COALESCE(s.stream_id, $13::bigint)
    UNION ALL
    SELECT c.*
    FROM unnest($17::int[], $18::bigint[]) AS n (room_nid, after)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid AND stream_id > n.after
        OFFSET 0
    ) AS c
    UNION ALL  -- of rooms that are new to the client: on its events, and those of the user
    SELECT c.*
    FROM reader
    CROSS JOIN unnest($19::int[]) AS n (room_nid)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid
            AND (principal_nid = reader.principal_nid OR event_id = ANY($20::text[]))
        OFFSET 0
    ) AS c
)
SELECT 'message' AS kind, stream_id, NULL::int AS room_nid, NULL AS room_id, NULL AS type,
    NULL AS user_id, NULL AS thread_id, NULL AS event_id, content
FROM message
UNION ALL
SELECT 'account_data', d.stream_id, NULLIF(d.room_nid, 0), r.room_id, t.type, NULL, NULL, NULL,
    d.content
FROM data d
JOIN event_types t USING (type_nid)
-- one by one: a join could hash all rooms, and below all principals
LEFT JOIN LATERAL (
    SELECT room_id FROM rooms WHERE room_nid = d.room_nid OFFSET 0
) AS r ON true
UNION ALL
SELECT 'receipts', c.stream_id, c.room_nid, r.room_id, c.receipt_type, p.name,
    NULLIF(c.thread_id, ''), c.event_id, c.data
FROM receipt c
CROSS JOIN LATERAL (SELECT room_id FROM rooms WHERE room_nid = c.room_nid OFFSET 0) AS r
CROSS JOIN LATERAL (
    SELECT name FROM principals WHERE principal_nid = c.principal_nid OFFSET 0
) AS p
WHERE c.receipt_type <> 'm.read.private' OR p.name = $1::text
ORDER BY 2
"""


class ExtensionRow(NamedTuple):
    """A message, a piece of account data, or a receipt."""

    kind: str
    stream_id: int
    room_nid: int | None
    room_id: str | None
    type: str | None
    user_id: str | None
    thread_id: str | None
    event_id: str | None
    content: bytes


@dataclass(slots=True)
class RoomsToExtend:
    """The rooms to read of one stream.

    ``live``: from the position of the `pos`. ``after``: from a position of the room. ``new``: rooms
    that the client does not have.
    """

    live: list[int] = field(default_factory=list)
    after: dict[int, int] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)


@dataclass(slots=True)
class ExtensionRequest:
    """The facts to read. A position is None where the extension is not read."""

    device_id: str
    to_device: VectorPosition | None = None
    messages_max: int = 0
    account_data: VectorPosition | None = None
    account_data_rooms: RoomsToExtend = field(default_factory=RoomsToExtend)
    receipts: VectorPosition | None = None
    receipt_rooms: RoomsToExtend = field(default_factory=RoomsToExtend)
    event_ids: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to read."""
        return self.to_device is None and self.account_data is None and self.receipts is None


@dataclass(slots=True)
class Extensions:
    """The facts that were read. ``has_more``: there are more messages than these."""

    to_device: list[MessageRow] = field(default_factory=list)
    has_more: bool = False
    account_data: list[AccountDataRow] = field(default_factory=list)
    receipts: dict[RoomId, list[ReceiptRow]] = field(default_factory=dict)
    behind: dict[str, set[int]] = field(default_factory=dict)
    """By stream, the rooms with facts that are not in the response: these are not wanted."""


async def read_extensions(
    conn: Connection, user_id: UserId, request: ExtensionRequest, wanted: Collection[int]
) -> Extensions:
    """Return the facts of all extensions; those of rooms for the ``wanted`` ones."""
    rows = await conn.fetch(SQL_EXTENSIONS, *_arguments(user_id, request), row=ExtensionRow)
    found = Extensions()
    for row in rows:
        if row.room_nid is not None and row.room_nid not in wanted:
            found.behind.setdefault(row.kind, set()).add(row.room_nid)
        elif row.kind == "account_data":
            data = AccountDataRow(row.stream_id, row.room_id, row.type or "", row.content)
            found.account_data.append(data)
        elif row.kind == "receipts":
            found.receipts.setdefault(RoomId(row.room_id or ""), []).append(_receipt(row))
        else:
            found.to_device.append(MessageRow(row.stream_id, row.content))
    found.has_more = len(found.to_device) > request.messages_max
    del found.to_device[request.messages_max :]
    return found


def _receipt(row: ExtensionRow) -> ReceiptRow:
    kind, user_id, event_id = row.type or "", row.user_id or "", row.event_id or ""
    return ReceiptRow(row.stream_id, kind, user_id, row.thread_id, event_id, row.content)


def _arguments(user_id: UserId, request: ExtensionRequest) -> Sequence[object]:
    data, receipts = request.account_data_rooms, request.receipt_rooms
    own = {**dict.fromkeys(data.new, 0), **data.after} if request.account_data is not None else {}
    reads_receipts = request.receipts is not None
    return (
        user_id,
        None if request.to_device is None else request.device_id,
        *_vector(request.to_device),
        request.messages_max + 1,
        *_vector(request.account_data),
        bool(data.live),
        list(own),
        list(own.values()),
        *_vector(request.receipts),
        receipts.live if reads_receipts else [],
        list(receipts.after) if reads_receipts else [],
        list(receipts.after.values()) if reads_receipts else [],
        receipts.new if reads_receipts else [],
        request.event_ids,
    )


def _vector(position: VectorPosition | None) -> tuple[int | None, list[str], list[int]]:
    """Return a position as arguments. None of a stream that is not read: nothing is after it."""
    if position is None:
        return None, [], []
    return (
        position.min,
        [writer for writer, _ in position.items],
        [number for _, number in position.items],
    )
