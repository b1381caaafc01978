"""The response of a sliding sync from its parts, within one snapshot.

`poll` reads it: the positions and the connection; the list of rooms; the timelines; the state; the
unread counts; the extensions. Each is one statement at most, and is left out where there is nothing
to read. The result is pending: it has no `pos` yet, because a change of the connection's state is
written once, when a response is returned.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from storage.database.connection import Connection
from storage.errors import UnknownPos
from storage.ids import RoomId
from storage.queries.sliding.connection import (
    NO_ROOMS,
    ClientRoom,
    ClientRooms,
    ConnectionColumnsRow,
    ConnectionState,
)
from storage.queries.sliding.extensions import (
    Extensions,
    add_unread,
    covered_by_extensions,
    extended,
    extension_request,
    marked,
    read_extensions,
)
from storage.queries.sliding.memory import SlidingMemory
from storage.queries.sliding.request_context import RequestContext
from storage.queries.sliding.room_lists import RoomList
from storage.queries.sliding.selection import (
    PreparedRequest,
    Selection,
    Window,
    forgotten_rooms,
    requested_rooms,
    select_rooms,
)
from storage.queries.sliding.timelines import ReadRooms, read_rooms
from storage.queries.sliding.types import SlidingListResult, SlidingRoom, SlidingSync
from storage.queries.sliding.user_rooms import ListedRoom
from storage.queries.sync.changed_rooms import (
    ACCOUNT_DATA,
    CONNECTION,
    SQL_POSITIONS_OF_CONNECTION,
    ChangeSnapshot,
    ChangeSnapshotRow,
    WriterRow,
    events_of,
)
from storage.streams import SyncToken, VectorPosition
from storage.streams.tokens import PosToken
from storage.turns import pause_if_long

EXPIRED: Final = "the connection has expired, or the device has begun another one"


@dataclass(frozen=True, slots=True)
class PendingResponse:
    """A response without its `pos`. ``state`` None: the connection is new.

    ``changes`` are the rooms whose rows the response changes.
    """

    state: ConnectionState | None
    sent: ClientRooms
    changes: Mapping[int, ClientRoom]
    upto: SyncToken
    extensions_upto: SyncToken
    counts: Mapping[str, int] = field(default_factory=dict)
    rooms: Mapping[RoomId, SlidingRoom] = field(default_factory=dict)
    extensions: Extensions = field(default_factory=Extensions)
    room_list: RoomList | None = None
    user_id: str = ""

    @property
    def keys(self) -> Iterable[str]:
        """Return the keys to wait for: the user, and the rooms of the user."""
        rooms = () if self.room_list is None else self.room_list.joined()
        return (self.user_id, *rooms)

    @property
    def is_empty(self) -> bool:
        extensions = self.extensions
        return not (
            self.rooms or extensions.to_device or extensions.account_data or extensions.receipts
        )

    def with_pos(self, pos: str) -> SlidingSync:
        return SlidingSync(
            pos,
            {name: SlidingListResult(count) for name, count in self.counts.items()},
            self.rooms,
            self.extensions.to_device,
            self.extensions.account_data,
            self.extensions.receipts,
        )


async def poll(
    conn: Connection, request: PreparedRequest, memory: SlidingMemory
) -> PendingResponse:
    """Return the response, by at most four statements where the list of rooms is cached.

    Unread counts are one more. ``conn`` is in a REPEATABLE READ transaction: one snapshot.
    `UnknownPos`.
    """
    snapshot, row = await memory.snapshot(conn, request)
    state = None
    if request.pos is not None:
        if row is None:
            raise UnknownPos(request.text, EXPIRED)
        state = _state_of(request.pos, row)
    since = _since(request, snapshot)
    sent = NO_ROOMS if state is None else await memory.connections.rooms(conn, state)
    room_list = await memory.lists.of(conn, request.user_id, snapshot)
    personal = await room_list.personal(conn)
    request = request.with_ignored(personal.ignored)
    windows = {
        name: await room_list.window(
            conn, config.filters, config.ranges, sent, request.ignored or ()
        )
        for name, config in request.body.lists.items()
    }
    context = RequestContext(
        request, memory, snapshot, state, since, sent, room_list, personal.direct
    )
    await pause_if_long(*(listed for _, listed in windows.values()))
    selection = _selection(context, windows)
    await pause_if_long(list(selection.why_included))
    rooms = await read_rooms(conn, context, selection)
    await add_unread(conn, request, rooms.shown)
    to_read, extensions = extension_request(context, selection, rooms), Extensions()
    if not to_read.is_empty:
        extensions = await read_extensions(conn, request.user_id, to_read, set(extended(selection)))
    return _pending(context, selection, rooms, extensions)


def _state_of(pos: PosToken, row: ChangeSnapshotRow) -> ConnectionState:
    last, *unconfirmed = row.numbers or (0,)
    columns = ConnectionColumnsRow(row.position or 0, last, unconfirmed, row.room_ids or ())
    return ConnectionState(pos.connection, pos.number, row.seen or 0, columns)


def expect_nothing(request: PreparedRequest, memory: SlidingMemory) -> PendingResponse | None:
    """Return an empty response, as far as this process has followed. None: there may be news."""
    if request.pos is None:
        return None
    state = ConnectionState(request.pos.connection, request.pos.number, 0)
    sent = memory.connections.cached(state.nid, state.number)
    snapshot = memory.expected_snapshot(request.user_id)
    room_list = None if snapshot is None else memory.lists.cached(request.user_id, snapshot)
    if sent is None or snapshot is None or room_list is None:
        return None
    since = events_of(request.pos.upto.bound(snapshot.positions))
    if _is_not_followed(request.pos, snapshot) or _has_changes(room_list, sent, since):
        return None
    personal, windows = room_list.cached_personal(), _cached_windows(request, room_list, sent)
    if personal is None or windows is None:
        return None
    request = request.with_ignored(personal.ignored)
    context = RequestContext(
        request, memory, snapshot, state, since, sent, room_list, personal.direct
    )
    selection = _selection(context, windows)
    rooms = ReadRooms()
    has_rooms = bool(selection.why_included or selection.outside_windows)
    if has_rooms or not extension_request(context, selection, rooms).is_empty:
        return None
    return _pending(context, selection, rooms, Extensions())


def _has_changes(room_list: RoomList, sent: ClientRooms, since: VectorPosition) -> bool:
    """Return whether the room that changed last is one of the client, without a look at others."""
    first = next(room_list.changed_since(since), None)
    return first is not None and first.room_nid in sent


def _is_not_followed(pos: PosToken, snapshot: ChangeSnapshot) -> bool:
    """Return whether the process has not followed the events up to the `pos`."""
    return not events_of(pos.upto) <= events_of(snapshot.token)


def _cached_windows(
    request: PreparedRequest, room_list: RoomList, sent: ClientRooms
) -> dict[str, Window] | None:
    windows: dict[str, Window] = {}
    for name, config in request.body.lists.items():
        window = room_list.cached_window(config.filters, config.ranges, sent, request.ignored or ())
        if window is None:
            return None
        windows[name] = window
    return windows


async def confirmed(
    conn: Connection, request: PreparedRequest, memory: SlidingMemory, expected: PendingResponse
) -> PendingResponse | None:
    """Return an expected response with the positions of the database, by one statement.

    None: there are commits that this process has not seen. `UnknownPos`.
    """
    if request.pos is None:
        return None
    state = request.pos.connection, request.pos.number
    rows = await conn.fetch(SQL_POSITIONS_OF_CONNECTION, *state, *request.key, row=WriterRow)
    connection = next((row for row in rows if row.kind == CONNECTION), None)
    if connection is None:
        raise UnknownPos(request.text, EXPIRED)
    snapshot = memory.confirmed_snapshot(
        request.user_id, [row for row in rows if row is not connection]
    )
    if snapshot is None or not _covers(expected.upto, snapshot.token, request.body.extensions):
        return None
    _since(request, snapshot)
    upto = request.covered(snapshot.token)
    extensions_upto = covered_by_extensions(request, upto, Extensions())
    used = ConnectionState(*state, connection.position)
    return replace(expected, upto=upto, extensions_upto=extensions_upto, state=used)


def _covers(expected: SyncToken, reached: SyncToken, extensions: Collection[str]) -> bool:
    """Return whether the expectation has what the database has, in the streams of the response."""
    return all(
        (reached.position(name) or VectorPosition())
        <= (expected.position(name) or VectorPosition())
        for name in ("events", ACCOUNT_DATA, *extensions)
    )


def _since(request: PreparedRequest, snapshot: ChangeSnapshot) -> VectorPosition | None:
    """Return the position of the `pos`. `UnknownPos` if events after it are purged."""
    if request.pos is None:
        return None
    since = events_of(request.pos.upto.bound(snapshot.positions))
    if since.min < snapshot.purged_upto:
        raise UnknownPos(request.text, "what happened since then is not kept any more")
    return since


def _selection(context: RequestContext, windows: Mapping[str, Window]) -> Selection:
    """Return which rooms the response may have."""
    sent, room_list = context.sent, context.room_list
    request = context.request
    requested = requested_rooms(
        request.body, windows, room_list, sent, timeline_max=request.timeline_max
    )
    changed: dict[int, ListedRoom] = {}
    if context.since is not None:
        changed = {room.room_nid: room for room in room_list.changed_since(context.since)}
        requested |= forgotten_rooms(room_list, context.since, sent)
    purged_upto = context.snapshot.purged_upto
    selection = select_rooms(requested, sent, changed, context.direct, purged_upto=purged_upto)
    selection.counts.update({name: count for name, (count, _) in windows.items()})
    return selection


def _pending(
    context: RequestContext, selection: Selection, rooms: ReadRooms, extensions: Extensions
) -> PendingResponse:
    upto = context.request.covered(context.snapshot.token)
    return PendingResponse(
        context.state,
        context.sent,
        marked(context, selection, rooms, extensions),
        upto,
        covered_by_extensions(context.request, upto, extensions),
        selection.counts,
        rooms.shown,
        extensions,
        context.room_list,
        context.request.user_id,
    )
