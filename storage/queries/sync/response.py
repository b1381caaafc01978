"""The response of /sync from its parts, within one snapshot."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, LiteralString, NamedTuple

import orjson

from storage import arguments as args
from storage.config import Config
from storage.database.connection import Connection
from storage.database.names import INVITE, JOIN, MEMBERSHIPS
from storage.database.placeholders import compose
from storage.database.prepared import prepare_ahead
from storage.errors import InputError, InvalidToken, ResyncNeeded
from storage.ids import RoomId, StateKey, UserId
from storage.queries.events import StoredEvent
from storage.queries.filters import ANY_ROOM, SyncFilter
from storage.queries.sync.changed_rooms import ChangeSnapshot, SyncMemory, covered, events_of, where
from storage.queries.sync.rooms import ChangedRoom, SyncRange, rooms, rooms_and_writers
from storage.queries.sync.state import (
    RoomState,
    ShownKey,
    StateRequest,
    SyncedRoom,
    SyncedUser,
    later_values,
    states,
    stripped,
)
from storage.queries.sync.types import (
    InvitedRoom,
    JoinedRoom,
    KnockedRoom,
    LeftRoom,
    Sync,
    Timeline,
)
from storage.queries.unread import UnreadRequest, unread
from storage.streams import PaginationToken, RoomsToken, SyncToken, VectorPosition
from storage.streams.positions import LARGEST_POSITION
from storage.streams.reads import parts
from storage.streams.receipts import ReceiptRow
from storage.streams.tokens import is_rooms_token
from storage.turns import in_turns

# --------------------------------------------------------------------------------------------------
# The parts of a sync beside events: receipts, account data, to-device messages, unread counts.
#
# They are read in the snapshot of the response, by two statements at most: one for the facts of the
# three streams, one for the counts (storage/queries/unread.py). The first is left out where these
# streams have not moved since the token. A room that is whole in the response has all its receipts
# and account data, another one those that are new. A room that the user left has account data
# alone: all of it where the client was not in the room, else what is new.
#
# New receipts are looked up by their position if few are new on this server, else room by room.

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


KNOCK: Final = MEMBERSHIPS["knock"]
MEMBER: Final = "m.room.member"
SYNC_CURSOR_TOPOLOGICAL: Final = LARGEST_POSITION - 1
"""Above the topological ordering of every event, also of one that moves up later.

See storage/graph/topological_ordering.py."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A request to /sync with parsed tokens and checked limits."""

    user_id: UserId
    since: SyncToken | None
    part: RoomsToken | None
    timeline_limit: int
    rooms_limit: int | None
    full_state: bool
    deployment: str
    ignored: list[UserId] | None = None
    filter: SyncFilter = ANY_ROOM
    rows_max: int = 20_000
    defined: frozenset[str] = frozenset()
    """The streams that the process has defined."""
    include: Include = NOTHING

    @property
    def text(self) -> str:
        """Return the token as the caller gave it: a token has one text only."""
        token = self.since or self.part
        return "" if token is None else token.print(self.deployment)

    @property
    def token(self) -> SyncToken | None:
        """Return the token of ``since``, or of the parts of an initial sync."""
        return self.since if self.part is None else self.part.upto

    def covered(self, reached: SyncToken) -> SyncToken:
        """Return the part of these positions that a response of this process covers."""
        return covered(reached, self.defined, self.token)

    def next_batch(self, reached: SyncToken) -> str:
        """Return the text of `covered`."""
        return self.covered(reached).print(self.deployment)

    @classmethod
    def of(
        cls,
        user_id: str,
        since: str | None,
        *,
        timeline_limit: int,
        rooms_limit: int | None,
        full_state: bool,
        ignored: list[UserId] | None = None,
        filter: SyncFilter = ANY_ROOM,  # noqa: A002  # as the client-server API calls it
        server_name: str,
        deployment: str,
        config: Config,
        defined: frozenset[str] = frozenset(),
        include: Include = NOTHING,
    ) -> "SyncRequest":
        """Return the request for these arguments.

        `InvalidIdentifier`, `InvalidToken`, `InputError`.
        """
        part = (
            None
            if since is None or not is_rooms_token(since)
            else RoomsToken.parse(since, deployment)
        )
        token = None if since is None or part is not None else SyncToken.parse(since, deployment)
        if rooms_limit is not None:
            rooms_limit = args.limit(rooms_limit, config.page_limit_max, "rooms_limit")
        if part is not None and rooms_limit is None:
            raise InvalidToken(since or "", "a next_rooms token goes with rooms_limit")
        limit = args.limit(timeline_limit, config.page_limit_max, "timeline_limit")
        user = args.local_user(user_id, server_name)
        rows_max = config.traversal_rows_max
        return cls(
            user,
            token,
            part,
            limit,
            rooms_limit,
            full_state,
            deployment,
            ignored,
            filter,
            rows_max,
            defined,
            include,
        )


async def sync(conn: Connection, request: SyncRequest, *, memory: SyncMemory | None = None) -> Sync:
    """Return the response, by at most three statements.

    ``conn`` is in a REPEATABLE READ transaction: one snapshot.

    ``memory`` has the rooms that can have changed. Without it all rooms of the user are read.
    """
    return await _respond(conn, request, await _snapshot(conn, request, memory))


async def poll(
    conn: Connection, request: SyncRequest, memory: SyncMemory, *, reread: bool
) -> tuple[Sync, ChangeSnapshot | None]:
    """Return the response as `sync`, and the snapshot of changes, if it was read.

    ``reread``: also read the rooms that the user is in, instead of taking them from the cache.
    """
    snapshot = await _snapshot(conn, request, memory, reread=reread)
    return await _respond(conn, request, snapshot), snapshot


async def _snapshot(
    conn: Connection, request: SyncRequest, memory: SyncMemory | None, *, reread: bool = False
) -> ChangeSnapshot | None:
    """Return what the caches know of changes. None: it makes no difference."""
    if memory is None or request.since is None or request.full_state:
        return None
    return await memory.snapshot(conn, request.user_id, reread=reread)


async def _respond(conn: Connection, request: SyncRequest, snapshot: ChangeSnapshot | None) -> Sync:
    reached, purged_upto = (
        await where(conn) if snapshot is None else (snapshot.token, snapshot.purged_upto)
    )
    _refuse_purged(request, purged_upto)
    current = reached.positions()
    upto = reached if request.part is None else request.part.upto.bound(current)
    since = None if request.since is None else request.since.bound(current)
    since_events = None if since is None else events_of(since)
    room_nids = (
        None if snapshot is None or since_events is None else snapshot.candidates(since_events)
    )
    if (since_events == events_of(upto) and not request.full_state) or room_nids == []:
        return await _included(conn, request, _inclusion(request, since, upto, []), [])
    below = None if request.part is None else (request.part.activity, request.part.room)
    limit = request.rooms_limit if since is None else None
    of_all = (
        request.timeline_limit,
        limit,
        below,
        request.full_state,
        request.ignored,
        room_nids,
        request.filter,
        request.rows_max,
    )
    changed = await rooms(conn, request.user_id, SyncRange(since_events, events_of(upto), *of_all))
    joined = [room for room in changed if room.row.membership == JOIN]
    more = limit is not None and len(joined) > limit
    if more:
        changed.remove(joined[-1])
        joined = joined[:-1]
    inclusion = _inclusion(request, since, upto, changed)
    last = joined[-1] if more and joined else None
    return await _included(conn, request, inclusion, changed, last=last)


async def _included(
    conn: Connection,
    request: SyncRequest,
    inclusion: Inclusion,
    changed: list[ChangedRoom],
    *,
    last: ChangedRoom | None = None,
) -> Sync:
    """Return the response with these rooms, and with the parts to include.

    ``last`` is the last room where more follow. All parts of an initial sync cover the same
    positions, so the first one decides how far the to-device messages go.
    """
    response = await _fill(conn, request, changed, Sync(""))
    response, upto = await add_included(conn, inclusion, response)
    next_rooms = (
        None if last is None else _next_rooms(request.covered(upto), last).print(request.deployment)
    )
    return replace(response, next_batch=request.next_batch(upto), next_rooms=next_rooms)


def _inclusion(
    request: SyncRequest, since: SyncToken | None, upto: SyncToken, changed: Iterable[ChangedRoom]
) -> Inclusion:
    """Return the request for the parts that the response includes."""
    end = PaginationToken(SYNC_CURSOR_TOPOLOGICAL, 0, live=events_of(upto).furthest())
    rows = [room.row for room in changed]
    left = (row for row in rows if row.membership not in (JOIN, INVITE, KNOCK))
    return Inclusion(
        user_id=request.user_id,
        include=request.include,
        since=since,
        now=upto,
        filter=request.filter,
        ignored=request.ignored,
        is_first=request.part is None,
        whole=[row.room_nid for row in rows if row.membership == JOIN and row.whole],
        left=[row.room_nid for row in left if row.whole or not row.was_joined],
        prev_batch=end.print(request.deployment),
        rows_max=request.rows_max,
    )


def has_no_changes(request: SyncRequest, memory: SyncMemory) -> bool:
    """Return whether nothing is new as far as this process has followed. Then try `no_changes`."""
    return (
        request.since is not None
        and not request.full_state
        and memory.has_no_changes(request.user_id, events_of(request.since))
    )


async def no_changes(
    conn: Connection, request: SyncRequest, memory: SyncMemory
) -> tuple[Sync, ChangeSnapshot] | None:
    """Return an empty response, by one statement without a transaction, and the snapshot.

    None: there may be changes.
    """
    snapshot = await memory.positions_only(conn, request.user_id)
    if snapshot is None:
        return None
    upto = snapshot.token
    token = (request.since or SyncToken()).bound(upto.positions())
    since = events_of(token)
    if since.min < snapshot.purged_upto or request.include.has_changed(token, upto):
        return None
    if since == events_of(upto) or snapshot.candidates(since) == []:
        return Sync(request.next_batch(upto)), snapshot
    return None


def is_timeline_only(request: SyncRequest, memory: SyncMemory) -> bool:
    """Return whether only timelines have new events, as far as this process has followed.

    Then try `timeline_only`.
    """
    if request.since is None or request.full_state or request.filter.lazy_load_members:
        return False
    if "unread" in request.include.parts:
        return False
    return not memory.has_state(request.user_id, events_of(request.since))


async def timeline_only(
    conn: Connection, request: SyncRequest, memory: SyncMemory
) -> tuple[Sync, ChangeSnapshot] | None:
    """Return a response with timelines alone, and the snapshot, by one statement.

    It takes no transaction. The statement reads the rooms that have changed as far as this process
    has followed, and the positions of the streams. None: these are further than that, or there is
    state to return, or the caches do not reach back so far.
    """
    seen = memory.seen_positions(request.user_id)
    upto, since = seen.upto, events_of(request.since or SyncToken()).meet(seen.upto)
    room_nids = seen.candidates(since)
    if room_nids is None:
        return None
    limit, rows_max = request.timeline_limit, request.rows_max
    sync_range = SyncRange(
        since,
        upto,
        limit,
        ignored=request.ignored,
        room_nids=room_nids,
        filter=request.filter,
        rows_max=rows_max,
    )
    changed, writers = await rooms_and_writers(conn, request.user_id, sync_range)
    snapshot = seen.confirmed(writers)
    if (
        snapshot is None
        or events_of(snapshot.token) != upto
        or since.min < snapshot.purged_upto
        or snapshot.candidates(since) != room_nids
        or request.include.has_changed(request.since or SyncToken(), snapshot.token)
    ):
        return None
    if any(room.row.whole or room.row.has_state or room.row.membership != JOIN for room in changed):
        return None
    return await _fill(conn, request, changed, Sync(request.next_batch(snapshot.token))), snapshot


def _refuse_purged(request: SyncRequest, purged_upto: int) -> None:
    """Raise `ResyncNeeded` for a token from before the purged events."""
    token = request.token
    if token is not None and events_of(token).min < purged_upto:
        raise ResyncNeeded(
            token.print(request.deployment), "what happened since then is not kept any more"
        )


def _next_rooms(upto: SyncToken, last: ChangedRoom) -> RoomsToken:
    return RoomsToken(upto, last.row.activity or 0, last.row.room_nid)


async def _fill(
    conn: Connection, request: SyncRequest, changed: list[ChangedRoom], response: Sync
) -> Sync:
    """Add the rooms with their states to the response."""
    shown = [room for room in changed if room.row.membership in (INVITE, KNOCK)]
    inside = [room for room in changed if room.row.membership not in (INVITE, KNOCK)]
    members = _members(inside, request) if request.filter.lazy_load_members else None
    state_requests = [
        _state_request(room, request.timeline_limit) async for room in in_turns(inside)
    ]
    outside = [SyncedUser(_of(room), room.row.member_nid) async for room in in_turns(shown)] + [
        SyncedUser(_of(room), room.row.member_nid, room.row.member_key_nid)
        for room in filter(_may_have_ended, inside)
    ]
    state_of = await states(
        conn,
        request.user_id,
        state_requests,
        members=members,
        picked=request.filter.state,
        shown=outside,
    )
    later: dict[int, set[StateKey]] = defaultdict(set)
    shown_keys = [
        key
        async for room in in_turns(inside)
        for key in _unchanged_keys(room, state_of[room.row.room_nid], request.timeline_limit)
    ]
    for row in await later_values(conn, shown_keys):
        later[row.room_nid].add((row.type, row.state_key))
    async for room in in_turns(inside):
        room_id = room.row.room_id
        joined_room = _room(room, state_of[room.row.room_nid], request, later[room.row.room_nid])
        if room.row.membership != JOIN:
            _add_end(joined_room.timeline, state_of[room.row.room_nid])
            response.leave[room_id] = LeftRoom(
                joined_room.timeline,
                joined_room.state,
                joined_room.state_after,
                joined_room.state_removed,
            )
        elif (
            room.row.whole
            or joined_room.timeline.events
            or joined_room.timeline.limited
            or joined_room.state_after
            or joined_room.state
            or joined_room.state_removed
            or joined_room.summary
        ):
            response.join[room_id] = joined_room
    async for room in in_turns(shown):
        state = state_of[room.row.room_nid]
        events = stripped(state.shown, next(iter(state.own), None), state.brought)
        if room.row.membership == INVITE:
            response.invite[room.row.room_id] = InvitedRoom(events)
        else:
            response.knock[room.row.room_id] = KnockedRoom(events)
    return response


def _may_have_ended(room: ChangedRoom) -> bool:
    """Return whether this may be an invite or a knock that ended out of band."""
    return (
        room.row.membership != JOIN
        and not room.row.was_joined
        and not room.events
        and room.row.member_nid != 0
    )


def _add_end(timeline: Timeline, state: RoomState) -> None:
    """Add the event that ended an invite or a knock out of band.

    It is in no timeline. The user gets it as the last event of one.
    """
    timeline.events.extend(event for event in state.own if event.outlier)


def _members(rooms: Iterable[ChangedRoom], request: SyncRequest) -> list[tuple[int, str]]:
    """Return pairs of a room and a user whose membership is part of the response.

    These are the senders of the timeline, those whose membership it changes, and the user: once,
    with the whole room.
    """
    members: dict[tuple[int, str], None] = {}
    is_repeated = request.filter.include_redundant_members
    for room in rooms:
        users: list[str] = [request.user_id]
        if room.row.was_joined:
            for event in _latest(room, request.timeline_limit):
                users.append(event.sender)
                if event.type == MEMBER and event.state_key is not None:
                    users.append(event.state_key)
        is_new = is_repeated or room.row.whole or not room.row.was_joined
        for user in users:
            if is_new or user != request.user_id:
                members[room.row.room_nid, user] = None
    return list(members)


def _state_request(room: ChangedRoom, timeline_limit: int) -> StateRequest:
    """Return the state to read.

    A user who was not in the room since the last sync gets their own membership only.
    """
    row = room.row
    only = None if row.was_joined else row.member_key_nid
    timeline = _latest(room, timeline_limit)
    start, has_first = _start(room, timeline), bool(timeline)
    return StateRequest(
        _of(room),
        row.whole,
        only,
        row.lower,
        start + 1 if has_first else start,
        row.upper,
        row.membership == JOIN,
        has_first,
        row.has_state,
    )


def _of(room: ChangedRoom) -> SyncedRoom:
    return SyncedRoom(room.row.room_nid, room.row.room_id, room.row.room_version)


def _start(room: ChangedRoom, timeline: Sequence[StoredEvent]) -> int:
    """Return the stream ordering just before the timeline, or the end of an empty one."""
    return (timeline[0].stream_ordering or 0) - 1 if timeline else room.row.upper


def _unchanged_keys(room: ChangedRoom, state: RoomState, limit: int) -> Iterator[ShownKey]:
    """Yield the keys of the timeline of which the state that was read has no value."""
    last = {
        (event.type, event.state_key): event.stream_ordering or 0
        for event in _latest(room, limit)
        if event.state_key is not None
    }
    if last:
        # no content is read of what came before the timeline: that may be a large state
        first = min(last.values())
        read = {
            (event.type, event.state_key)
            for event in itertools.chain(state.throughout, state.at_end)
            if (event.stream_ordering or 0) >= first
        }
        for key in last.keys() - read:
            yield ShownKey(room.row.room_nid, *key, last[key], room.row.upper)


def _room(
    room: ChangedRoom, state: RoomState, request: SyncRequest, later: Collection[StateKey]
) -> JoinedRoom:
    events = _latest(room, request.timeline_limit)
    start = _seen_before(events, [*state.throughout, *state.at_end], later)
    shown = events[start:]
    before = PaginationToken(SYNC_CURSOR_TOPOLOGICAL, 0, live=_start(room, shown)).print(
        request.deployment
    )
    is_visit = room.is_visit and request.since is not None
    limited = room.cut or len(room.events) > len(shown) or is_visit
    return JoinedRoom(
        Timeline(shown, limited, before),
        [*state.throughout, *_leading_to(shown, state)],
        [*state.throughout, *state.at_end],
        state.removed,
        next(iter(state.summary), None),
    )


def _latest(room: ChangedRoom, limit: int) -> list[StoredEvent]:
    return room.events[-limit:] if limit else []


def _seen_before(
    events: Sequence[StoredEvent], at_end: Sequence[StoredEvent], later: Collection[StateKey]
) -> int:
    """Return how many of these events come before the timeline.

    A key may change while the user is away, after a change that is in the timeline. A client would
    keep that one. So the timeline begins after it. The later change may be older in the graph, and
    the value at the start as well. ``later``: keys with such a value that is not in ``at_end``.
    """
    first = min((event.stream_ordering or 0 for event in events), default=0)
    # no content is read of what came before the timeline: that may be a large state
    changed = [event for event in at_end if (event.stream_ordering or 0) > first]
    if not (events and (changed or later)):
        return 0
    end_positions = {(event.type, event.state_key): event.stream_ordering or 0 for event in changed}
    indexes = {(event.type, event.state_key): index for index, event in enumerate(events)}
    outdated = (
        index + 1
        for key, index in indexes.items()
        if key in later or end_positions.get(key, 0) > (events[index].stream_ordering or 0)
    )
    return max(outdated, default=0)


def _leading_to(timeline: Iterable[StoredEvent], state: RoomState) -> list[StoredEvent]:
    """Return the values at the start, or the last ones of keys of which it has no event."""
    if not (state.at_start or state.at_end):
        return []
    shown = {(event.type, event.state_key) for event in timeline}
    return [event for event in state.at_start if (event.type, event.state_key) in shown] + [
        event for event in state.at_end if (event.type, event.state_key) not in shown
    ]
