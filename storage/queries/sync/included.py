"""The parts of a sync beside events: receipts, account data, to-device messages, unread counts.

They are read in the snapshot of the response, by two statements at most: one for the facts of the
three streams, one for the counts (storage/queries/unread.py). The first is left out where these
streams have not moved since the token. A room that is whole in the response has all its receipts
and account data, another one those that are new. A room that the user left has account data
alone: all of it where the client was not in the room, else what is new.

New receipts are looked up by their position if few are new on this server, else room by room.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, LiteralString, NamedTuple

import orjson

from storage import arguments as args
from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.database.placeholders import compose
from storage.database.prepared import prepare_ahead
from storage.errors import InputError
from storage.ids import RoomId, UserId
from storage.queries.filters import SyncFilter
from storage.queries.sync.types import JoinedRoom, LeftRoom, Sync, Timeline
from storage.queries.unread import UnreadRequest, unread
from storage.streams import SyncToken, VectorPosition
from storage.streams.reads import parts
from storage.streams.receipts import ReceiptRow

Included = Literal["receipts", "account_data", "to_device", "unread"]

INCLUDED: Final = ("receipts", "account_data", "to_device", "unread")
BY_POSITION: Final = 2_000
"""So many new receipts on the server are read by position."""

SQL_INCLUDED: Final[LiteralString] = compose(
    """
WITH
reader AS MATERIALIZED (
    SELECT principal_nid FROM principals WHERE name = :user_id
),
new_receipt AS (
    SELECT c.*
    FROM receipts c
    WHERE :receipts_way = 'by position' AND c.stream_id > :receipts_after
    UNION ALL
    SELECT c.*
    FROM reader u
    JOIN memberships m USING (principal_nid)
    CROSS JOIN LATERAL (
        -- compared as rows, so that only the index by room fits
        SELECT c.* FROM receipts c
            WHERE c.room_nid = m.room_nid
                AND (c.room_nid, c.stream_id) > (m.room_nid, :receipts_after)
            OFFSET 0
    ) AS c
    WHERE :receipts_way = 'by room' AND m.membership = {JOIN}
),
receipt AS (
    SELECT c.*
    FROM new_receipt c
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest(:receipts_writers, :receipts_positions) AS a (instance_name, after)
        USING (instance_name)
    WHERE c.stream_id > COALESCE(a.after, :receipts_after) AND c.room_nid <> ALL(:whole_rooms)
    UNION ALL
    SELECT c.*
    FROM receipts c
    WHERE :reads_receipts AND c.room_nid = ANY(:whole_rooms)
),
new_data AS (
    SELECT d.*
    FROM reader u
    CROSS JOIN LATERAL (
        SELECT d.* FROM account_data d
            WHERE d.principal_nid = u.principal_nid AND d.stream_id > :data_after OFFSET 0
    ) AS d
    JOIN writers w USING (writer_nid)
    LEFT JOIN unnest(:data_writers, :data_positions) AS a (instance_name, after)
        USING (instance_name)
    WHERE :reads_account_data AND d.stream_id > COALESCE(a.after, :data_after)
),
data AS (
    SELECT * FROM new_data
    WHERE CASE WHEN room_nid = 0 THEN :of_no_room
        ELSE :has_since AND room_nid <> ALL(:whole_rooms || :left_rooms) END
    UNION ALL
    SELECT d.*
    FROM reader u
    JOIN account_data d USING (principal_nid)
    WHERE :reads_account_data AND d.room_nid = ANY(:whole_rooms || :left_rooms)
),
message AS (
    SELECT d.stream_id, d.content
    FROM reader u
    CROSS JOIN LATERAL (
        SELECT d.stream_id, d.content
        FROM to_device d
        JOIN writers w USING (writer_nid)
        LEFT JOIN unnest(:messages_writers, :messages_positions) AS a (instance_name, after)
            USING (instance_name)
        WHERE d.principal_nid = u.principal_nid AND d.device_id = :device_id
            -- compared as rows, so that only the index by device fits
            AND (d.principal_nid, d.device_id, d.stream_id)
                > (u.principal_nid, :device_id, :messages_after)
            AND d.stream_id > COALESCE(a.after, :messages_after)
        ORDER BY d.principal_nid, d.device_id, d.stream_id
        LIMIT :messages_max
    ) AS d
    WHERE :of_no_room
),
fact AS (
    SELECT 'receipt' AS kind, c.room_nid, c.stream_id, c.receipt_type AS name, o.name AS user_id,
        NULLIF(c.thread_id, '') AS thread_id, c.event_id, c.data AS content
    FROM receipt c
    CROSS JOIN reader u
    JOIN principals o ON o.principal_nid = c.principal_nid
    WHERE c.principal_nid = u.principal_nid
        OR (:reads_receipts AND c.receipt_type <> 'm.read.private')
    UNION ALL
    SELECT 'account_data', d.room_nid, d.stream_id, t.type, NULL, NULL, NULL, d.content
    FROM data d
    JOIN event_types t USING (type_nid)
    UNION ALL
    SELECT 'to_device', 0, stream_id, '', NULL, NULL, NULL, content
    FROM message
)
SELECT f.kind, r.room_id, m.membership::int AS membership, f.stream_id, f.name, f.user_id,
    f.thread_id, f.event_id, f.content
FROM fact f
CROSS JOIN reader u
LEFT JOIN rooms r ON r.room_nid = f.room_nid
LEFT JOIN LATERAL (  -- one by one: a join could read all memberships of the user
    SELECT membership, forgotten
    FROM memberships
    WHERE principal_nid = u.principal_nid AND room_nid = f.room_nid
    OFFSET 0
) AS m ON f.room_nid <> 0
WHERE f.room_nid = 0 OR (
    CASE WHEN m.membership < {KNOCK} THEN f.kind = 'account_data' AND NOT m.forgotten
        ELSE m.membership = {JOIN} END
    AND (:rooms IS NULL OR r.room_id = ANY(:rooms)) AND r.room_id <> ALL(:not_rooms)
)
ORDER BY f.stream_id
""",
    user_id="text",
    device_id="text",
    reads_receipts="boolean",
    reads_account_data="boolean",
    receipts_after="bigint",
    receipts_writers="text[]",
    receipts_positions="bigint[]",
    receipts_way="text",
    whole_rooms="int[]",
    of_no_room="boolean",
    has_since="boolean",
    data_after="bigint",
    data_writers="text[]",
    data_positions="bigint[]",
    messages_after="bigint",
    messages_writers="text[]",
    messages_positions="bigint[]",
    rooms="text[]",
    not_rooms="text[]",
    left_rooms="int[]",
    messages_max="bigint",
).sql
"""`:reads_receipts`: those of others. `:of_no_room`: facts of no room, too.

`:left_rooms` are rooms that the user left, with all of their account data.
"""
prepare_ahead(SQL_INCLUDED)


class IncludedRow(NamedTuple):
    """A fact: `kind` is "receipt", "account_data" or "to_device". `name` is its type.

    `membership` is that of the user in the room.
    """

    kind: str
    room_id: str | None
    membership: int | None
    stream_id: int
    name: str
    user_id: str | None
    thread_id: str | None
    event_id: str | None
    content: bytes


@dataclass(frozen=True, slots=True)
class Include:
    """The parts to include in a sync, and the device whose messages are among them."""

    parts: frozenset[str] = frozenset()
    device_id: str | None = None
    to_device_limit: int | None = None

    @classmethod
    def of(
        cls,
        parts: Collection[str] | None,
        device_id: str | None,
        to_device_limit: int | None = None,
    ) -> "Include":
        """Return the parts for these arguments. `InputError`, `InvalidIdentifier`.

        None: all parts for a device, and none without a device.
        """
        if parts is None:
            parts = () if device_id is None else INCLUDED
        requested = frozenset(args.texts(parts, "include"))
        if unknown := sorted(requested.difference(INCLUDED)):
            raise InputError(f"include holds {unknown}: known are {', '.join(INCLUDED)}")
        if device_id is not None:
            args.text(device_id)
        elif "to_device" in requested:
            raise InputError("include holds to_device: give the device_id")
        if to_device_limit is not None:
            to_device_limit = args.limit(to_device_limit, args.LARGEST - 1, "to_device_limit")
            if to_device_limit == 0:
                raise InputError("to_device_limit is 0: at least 1 is wanted")
        return cls(requested, device_id, to_device_limit)

    @property
    def streams(self) -> list[str]:
        """Return the streams that the parts are facts of. Unread counts follow from receipts."""
        named = {"receipts" if part == "unread" else part for part in self.parts}
        return sorted(named)

    def has_changed(self, since: SyncToken, now: SyncToken) -> bool:
        """Return whether one of the streams has moved between two tokens."""
        before, after = since.positions(), now.positions()
        return any(
            before.get(name, VectorPosition()) != after.get(name, VectorPosition())
            for name in self.streams
        )


NOTHING: Final = Include()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inclusion:
    """The request of one response: since which token (None: all), and the whole rooms."""

    user_id: UserId
    include: Include
    since: SyncToken | None
    now: SyncToken
    filter: SyncFilter
    ignored: list[UserId] | None
    is_first: bool
    """The first or only part of a response: it has the facts of no room."""
    whole: Collection[int]
    left: Collection[int]
    """Rooms that the user left, and of which the client has no account data."""
    prev_batch: str
    """For rooms that have nothing else new."""
    rows_max: int


async def add_included(
    conn: Connection, inclusion: Inclusion, response: Sync
) -> tuple[Sync, SyncToken]:
    """Return the response with the parts to include, and the positions that it covers."""
    covers = inclusion.now
    if not inclusion.include.parts:
        return response, covers
    is_due = inclusion.since is None or inclusion.include.has_changed(
        inclusion.since, inclusion.now
    )
    if is_due or inclusion.whole or inclusion.left:
        facts, covers = _limited(inclusion, await _facts(conn, inclusion))
        response = _with_facts(inclusion, response, facts)
    if "unread" not in inclusion.include.parts or not response.join:
        return response, covers
    request = UnreadRequest(ignored=inclusion.ignored, rows_max=inclusion.rows_max)
    counts = await unread(conn, inclusion.user_id, room_ids=response.join.keys(), request=request)
    joined = {
        room_id: replace(room, unread=counts.get(room_id))
        for room_id, room in response.join.items()
    }
    return replace(response, join=joined), covers


def _limited(inclusion: Inclusion, facts: list[IncludedRow]) -> tuple[list[IncludedRow], SyncToken]:
    """Return the facts without the messages above the limit, and the positions they cover.

    Messages are in the order of their positions, but each writer has its own: the position of the
    last message is not above what the snapshot has of any writer.
    """
    limit = inclusion.include.to_device_limit
    messages = [row.stream_id for row in facts if row.kind == "to_device"]
    if limit is None or len(messages) <= limit:
        return facts, inclusion.now
    last = messages[limit - 1]
    reached = inclusion.now.positions()
    reached["to_device"] = VectorPosition(last).meet(reached["to_device"])
    kept = [row for row in facts if row.kind != "to_device" or row.stream_id <= last]
    return kept, SyncToken.of(reached)


async def _facts(conn: Connection, inclusion: Inclusion) -> list[IncludedRow]:
    """Return the new facts, and all of the whole rooms."""
    included, limit = inclusion.include.parts, inclusion.include.to_device_limit
    since = {} if inclusion.since is None else inclusion.since.positions()
    after = {name: since.get(name, VectorPosition()) for name in inclusion.include.streams}
    receipts, data, messages = (
        parts(after.get(name, VectorPosition()))
        for name in ("receipts", "account_data", "to_device")
    )
    return await conn.fetch(
        SQL_INCLUDED,
        inclusion.user_id,
        inclusion.include.device_id if "to_device" in included else None,
        "receipts" in included,
        "account_data" in included,
        *receipts,
        _way(inclusion, after),
        list(inclusion.whole),
        inclusion.is_first,
        inclusion.since is not None,
        *data,
        *messages,
        None if inclusion.filter.rooms is None else list(inclusion.filter.rooms),
        list(inclusion.filter.not_rooms),
        list(inclusion.left),
        None if limit is None else limit + 1,
        row=IncludedRow,
    )


def _way(inclusion: Inclusion, after: Mapping[str, VectorPosition]) -> str:
    """Return how to look up new receipts."""
    if inclusion.since is None or "receipts" not in after:
        return "none"
    now = inclusion.now.position("receipts") or VectorPosition()
    few = now.furthest() - after["receipts"].min <= BY_POSITION
    return "by position" if few else "by room"


def _with_facts(inclusion: Inclusion, response: Sync, facts: Collection[IncludedRow]) -> Sync:
    """Return the response with these facts, and with the rooms that have nothing else new."""
    join, leave = dict(response.join), dict(response.leave)
    everywhere: dict[str, dict[str, object]] = {}
    messages: list[dict[str, object]] = []
    for row in facts:
        if row.kind == "to_device":
            messages.append(orjson.loads(row.content))
        elif row.room_id is None:
            everywhere[row.name] = orjson.loads(row.content)
        else:
            room_id, nothing = RoomId(row.room_id), Timeline([], False, inclusion.prev_batch)
            room = (
                join.setdefault(room_id, JoinedRoom(nothing, [], [], []))
                if row.membership == JOIN
                else leave.setdefault(room_id, LeftRoom(nothing, [], [], []))
            )
            _add(room, row, with_receipts="receipts" in inclusion.include.parts)
    return replace(response, join=join, leave=leave, account_data=everywhere, to_device=messages)


def _add(room: JoinedRoom, row: IncludedRow, *, with_receipts: bool) -> None:
    if row.kind == "account_data":
        room.account_data[row.name] = orjson.loads(row.content)
    elif with_receipts:
        room.receipts.append(
            ReceiptRow(
                row.stream_id,
                row.name,
                row.user_id or "",
                row.thread_id,
                row.event_id or "",
                row.content,
            )
        )
