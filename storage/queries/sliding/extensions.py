"""The extensions of a response, by one statement: to-device messages, account data, receipts.

Each has a position of its own in the `pos`, which stays where no request has the extension.
Receipts and the account data of rooms are for the wanted rooms. A room that is sent and not wanted
now keeps the position from which it has to be read later.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.database.placeholders import compose
from storage.ids import RoomId, UserId
from storage.queries.sliding.connection import ClientRoom, ClientRooms
from storage.queries.sliding.request_context import RequestContext
from storage.queries.sliding.selection import PreparedRequest, RequestedRoom, Selection
from storage.queries.sliding.timelines import ReadRooms
from storage.queries.sliding.types import SlidingRoom
from storage.queries.sync.changed_rooms import ACCOUNT_DATA, OTHER_STREAMS, RECEIPTS, TO_DEVICE
from storage.queries.unread import UnreadRequest, unread
from storage.streams import SyncToken, VectorPosition
from storage.streams.account_data import AccountDataRow
from storage.streams.receipts import ReceiptRow
from storage.streams.to_device import MessageRow

SQL_EXTENSIONS: Final[LiteralString] = compose(
    """
WITH
reader AS MATERIALIZED (
    SELECT principal_nid FROM principals WHERE name = :user_id
),
message AS (
    SELECT d.stream_id, d.content
    FROM reader
    CROSS JOIN LATERAL (
        SELECT d.stream_id, d.content
        FROM to_device d
        JOIN writers w USING (writer_nid)
        LEFT JOIN unnest(:to_device_writers, :to_device_positions) AS a (instance_name, stream_id)
            USING (instance_name)
        WHERE d.principal_nid = reader.principal_nid AND d.device_id = :device_id
            -- compared as rows, so that only the index by device fits
            AND (d.principal_nid, d.device_id, d.stream_id)
                > (reader.principal_nid, :device_id, :to_device_after)
            AND d.stream_id > COALESCE(a.stream_id, :to_device_after)
        ORDER BY d.principal_nid, d.device_id, d.stream_id
        LIMIT :messages_max
    ) AS d
),
data AS (
    SELECT a.*
    FROM reader
    JOIN account_data a USING (principal_nid)
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest(:data_writers, :data_positions) AS s (instance_name, stream_id)
        USING (instance_name)
    WHERE a.stream_id > :data_after AND a.stream_id > COALESCE(s.stream_id, :data_after)
        AND (a.room_nid = 0 OR :data_live) AND a.room_nid <> ALL(:data_rooms)
    UNION ALL
    SELECT a.*
    FROM reader
    CROSS JOIN unnest(:data_rooms, :data_rooms_after) AS n (room_nid, after)
    CROSS JOIN LATERAL (
        SELECT * FROM account_data
        WHERE principal_nid = reader.principal_nid AND room_nid = n.room_nid
            AND stream_id > n.after
        OFFSET 0
    ) AS a
),
receipt AS (
    SELECT c.*
    FROM unnest(:receipt_rooms) AS n (room_nid)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid AND stream_id > :receipts_after
        OFFSET 0
    ) AS c
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest(:receipts_writers, :receipts_positions) AS s (instance_name, stream_id)
        USING (instance_name)
    WHERE c.stream_id > COALESCE(s.stream_id, :receipts_after)
    UNION ALL
    SELECT c.*
    FROM unnest(:late_receipt_rooms, :late_receipts_after) AS n (room_nid, after)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid AND stream_id > n.after
        OFFSET 0
    ) AS c
    UNION ALL  -- of rooms that are new to the client: on its events, and those of the user
    SELECT c.*
    FROM reader
    CROSS JOIN unnest(:new_receipt_rooms) AS n (room_nid)
    CROSS JOIN LATERAL (
        SELECT * FROM receipts
        WHERE room_nid = n.room_nid
            AND (principal_nid = reader.principal_nid OR event_id = ANY(:event_ids))
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
WHERE c.receipt_type <> 'm.read.private' OR p.name = :user_id
ORDER BY 2
""",
    user_id="text",
    device_id="text",
    to_device_after="bigint",
    to_device_writers="text[]",
    to_device_positions="bigint[]",
    messages_max="bigint",
    data_after="bigint",
    data_writers="text[]",
    data_positions="bigint[]",
    data_live="boolean",
    data_rooms="int[]",
    data_rooms_after="bigint[]",
    receipts_after="bigint",
    receipts_writers="text[]",
    receipts_positions="bigint[]",
    receipt_rooms="int[]",
    late_receipt_rooms="int[]",
    late_receipts_after="bigint[]",
    new_receipt_rooms="int[]",
    event_ids="text[]",
).sql


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
    lagging: dict[str, set[int]] = field(default_factory=dict)
    """By stream, the rooms with facts that are not in the response: these are not wanted."""


async def read_extensions(
    conn: Connection, user_id: UserId, request: ExtensionRequest, room_nids: Collection[int]
) -> Extensions:
    """Return the facts of all extensions; those of rooms for ``room_nids``."""
    rows = await conn.fetch(SQL_EXTENSIONS, *_arguments(user_id, request), row=ExtensionRow)
    extensions = Extensions()
    for row in rows:
        if row.room_nid is not None and row.room_nid not in room_nids:
            extensions.lagging.setdefault(row.kind, set()).add(row.room_nid)
        elif row.kind == "account_data":
            data = AccountDataRow(row.stream_id, row.room_id, row.type or "", row.content)
            extensions.account_data.append(data)
        elif row.kind == "receipts":
            extensions.receipts.setdefault(RoomId(row.room_id or ""), []).append(_receipt(row))
        else:
            extensions.to_device.append(MessageRow(row.stream_id, row.content))
    extensions.has_more = len(extensions.to_device) > request.messages_max
    del extensions.to_device[request.messages_max :]
    return extensions


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


# --------------------------------------------------------------------------------------------------
# Which facts of the extensions a response needs, and up to where the client has them then.


def extension_request(
    context: RequestContext, selection: Selection, rooms: ReadRooms
) -> ExtensionRequest:
    """Return what to read. It is empty where the process knows that nothing is new."""
    request, sent = context.request, context.sent
    to_read = ExtensionRequest(request.key.device_id, messages_max=request.body.to_device_limit)
    requested = extended(selection)
    if TO_DEVICE in request.body.extensions and context.concerns_user(TO_DEVICE):
        to_read.to_device = request.extension_position(TO_DEVICE)
    if ACCOUNT_DATA in request.body.extensions:
        is_changed = context.concerns_user(ACCOUNT_DATA)
        to_extend = _rooms(ACCOUNT_DATA, requested, sent, rooms.whole)
        to_extend.live = list(sent) if is_changed else []
        to_read.account_data_rooms = to_extend
        if is_changed or to_extend.after or to_extend.new:
            to_read.account_data = request.extension_position(ACCOUNT_DATA)
    if RECEIPTS in request.body.extensions:
        joined = (nid for nid, room in requested.items() if room.listed.membership == JOIN)
        to_extend = _rooms(RECEIPTS, joined, sent, rooms.whole)
        to_extend.live = _rooms_with_receipts(context, rooms.whole)
        to_read.receipt_rooms = to_extend
        if to_extend.live or to_extend.after or to_extend.new:
            to_read.receipts = request.extension_position(RECEIPTS)
            shown = rooms.shown.values()
            to_read.event_ids = [event.event_id for room in shown for event in room.timeline]
    return to_read


def extended(selection: Selection) -> dict[int, RequestedRoom]:
    """Return the wanted rooms that the extensions have as well."""
    return {nid: room for nid, room in selection.rooms.items() if room.is_extended}


def _rooms(
    stream: str, nids: Iterable[int], sent: ClientRooms, whole: Collection[int]
) -> RoomsToExtend:
    """Return the wanted rooms that do not follow the `pos`."""
    to_extend = RoomsToExtend()
    for nid in nids:
        client_room = sent.get(nid)
        upto = None if client_room is None else _upto(client_room, stream)
        if nid in whole:
            to_extend.new.append(nid)
        elif upto is not None:
            to_extend.after[nid] = upto
    return to_extend


def _rooms_with_receipts(context: RequestContext, whole: Collection[int]) -> list[int]:
    """Return the rooms that follow the `pos` and may have receipts after it."""
    sent, room_list = context.sent, context.room_list
    if not len(sent):
        return []
    keys = context.changed_keys(RECEIPTS)
    listed = (
        (room_list.by_nid(nid) for nid in sent)
        if keys is None
        else (room_list.get(key) for key in keys)
    )
    return [
        room.room_nid
        for room in listed
        if room is not None
        and room.membership == JOIN
        and room.room_nid not in whole
        and (client_room := sent.get(room.room_nid)) is not None
        and client_room.receipts_upto is None
    ]


def marked(
    context: RequestContext, selection: Selection, rooms: ReadRooms, extensions: Extensions
) -> dict[int, ClientRoom]:
    """Return the changed rows, with the positions up to which the client has facts of a room."""
    changes, sent = dict(rooms.changes), context.sent
    for stream in (RECEIPTS, ACCOUNT_DATA):
        for nid, value in _positions(context, selection, rooms, extensions, stream).items():
            row = changes.get(nid) or sent.get(nid)
            if row is not None and _upto(row, stream) != value:
                changes[nid] = _with_upto(row, stream, value)
    return changes


def _positions(
    context: RequestContext,
    selection: Selection,
    rooms: ReadRooms,
    extensions: Extensions,
    stream: str,
) -> dict[int, int | None]:
    """Return, by room, up to where the client has the facts of a stream. None: up to the `pos`."""
    request, requested, sent = context.request, extended(selection), context.sent
    if stream not in request.body.extensions:
        has_position = request.extension_position(stream) != VectorPosition()
        return dict.fromkeys(rooms.whole, 0) if has_position else {}
    position = request.extension_position(stream).min
    lagging = (nid for nid in extensions.lagging.get(stream, ()) if nid in sent)
    return {
        **{nid: position for nid in lagging if _upto(sent[nid], stream) is None},
        **dict.fromkeys(rooms.whole.difference(requested), 0),
        **dict.fromkeys(requested),
    }


def _upto(room: ClientRoom, stream: str) -> int | None:
    return room.receipts_upto if stream == RECEIPTS else room.account_data_upto


def _with_upto(room: ClientRoom, stream: str, value: int | None) -> ClientRoom:
    if stream == RECEIPTS:
        return room._replace(receipts_upto=value)
    return room._replace(account_data_upto=value)


def covered_by_extensions(
    request: PreparedRequest, upto: SyncToken, extensions: Extensions
) -> SyncToken:
    """Return the positions of the extensions that are not those of the response."""
    positions: dict[str, VectorPosition] = {}
    for stream in OTHER_STREAMS:
        reached = upto.position(stream) or VectorPosition()
        at = reached
        if stream not in request.body.extensions:
            at = request.extension_position(stream).meet(reached)
        elif stream == TO_DEVICE and extensions.has_more:
            at = VectorPosition(extensions.to_device[-1].stream_id).meet(reached)
        if at != reached:
            positions[stream] = at
    return SyncToken.of(positions)


# --------------------------------------------------------------------------------------------------
# The unread counts of the joined rooms of a response, by one statement.


async def add_unread(
    conn: Connection, request: PreparedRequest, shown: dict[RoomId, SlidingRoom]
) -> None:
    joined = [room_id for room_id, room in shown.items() if room.membership == "join"]
    if not request.body.unread or not joined:
        return
    unread_request = UnreadRequest(ignored=list(request.ignored or ()), rows_max=request.rows_max)
    counts = await unread(conn, request.user_id, room_ids=joined, request=unread_request)
    for room_id in joined:
        shown[room_id] = replace(shown[room_id], unread=counts.get(room_id))
