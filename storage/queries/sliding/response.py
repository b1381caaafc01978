"""The response of a sliding sync from its parts, within one snapshot.

`look` reads it: the positions and the connection; the list of rooms; the timelines; the state; the
unread counts; the extensions. Each is one statement at most, and is left out where there is nothing
to read. The result is a draft: it has no `pos` yet, because a change of the connection's state is
written once, when a response is returned.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from storage.database.connection import Connection
from storage.errors import UnknownPos
from storage.ids import RoomId
from storage.queries.sliding.choice import (
    Choice,
    PreparedRequest,
    Window,
    choose,
    forgotten_rooms,
    wanted_rooms,
)
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
from storage.queries.sliding.room_lists import RoomList
from storage.queries.sliding.situation import Situation
from storage.queries.sliding.timelines import ReadRooms, read_rooms
from storage.queries.sliding.types import SlidingListResult, SlidingRoom, SlidingSync
from storage.queries.sliding.user_rooms import ListedRoom
from storage.queries.sync.changed_rooms import (
    ACCOUNT_DATA,
    CONNECTION,
    SQL_POSITIONS_OF_CONNECTION,
    News,
    NewsRow,
    WriterRow,
    events_of,
)
from storage.streams import SyncToken, VectorPosition
from storage.streams.tokens import PosToken
from storage.turns import pause_if_long

EXPIRED: Final = "the connection has expired, or the device has begun another one"


@dataclass(frozen=True, slots=True)
class Draft:
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
        found = self.extensions
        return not (self.rooms or found.to_device or found.account_data or found.receipts)

    def response(self, pos: str) -> SlidingSync:
        return SlidingSync(
            pos,
            {name: SlidingListResult(count) for name, count in self.counts.items()},
            self.rooms,
            self.extensions.to_device,
            self.extensions.account_data,
            self.extensions.receipts,
        )


async def look(conn: Connection, request: PreparedRequest, memory: SlidingMemory) -> Draft:
    """Return the response, by at most four statements where the list of rooms is cached.

    Unread counts are one more. ``conn`` is in a REPEATABLE READ transaction: one snapshot.
    `UnknownPos`.
    """
    news, row = await memory.news(conn, request)
    state = None
    if request.pos is not None:
        if row is None:
            raise UnknownPos(request.text, EXPIRED)
        state = _state_of(request.pos, row)
    since = _since(request, news)
    sent = NO_ROOMS if state is None else await memory.connections.rooms(conn, state)
    room_list = await memory.lists.of(conn, request.user_id, news)
    personal = await room_list.personal(conn)
    request = request.with_ignored(personal.ignored)
    windows = {
        name: await room_list.window(conn, one.filters, one.ranges, sent, request.ignored or ())
        for name, one in request.body.lists.items()
    }
    situation = Situation(request, memory, news, state, since, sent, room_list, personal.direct)
    await pause_if_long(*(listed for _, listed in windows.values()))
    choice = _choice(situation, windows)
    await pause_if_long(list(choice.reasons))
    rooms = await read_rooms(conn, situation, choice)
    await add_unread(conn, request, rooms.shown)
    asked, found = extension_request(situation, choice, rooms), Extensions()
    if not asked.is_empty:
        found = await read_extensions(conn, request.user_id, asked, set(extended(choice)))
    return _draft(situation, choice, rooms, found)


def _state_of(pos: PosToken, row: NewsRow) -> ConnectionState:
    last, *unconfirmed = row.numbers or (0,)
    columns = ConnectionColumnsRow(row.position or 0, last, unconfirmed, row.room_ids or ())
    return ConnectionState(pos.connection, pos.number, row.seen or 0, columns)


def expect_nothing(request: PreparedRequest, memory: SlidingMemory) -> Draft | None:
    """Return an empty response, as far as this process has followed. None: there may be news."""
    if request.pos is None:
        return None
    state = ConnectionState(request.pos.connection, request.pos.number, 0)
    sent = memory.connections.cached(state.nid, state.number)
    news = memory.expected_news(request.user_id)
    room_list = None if news is None else memory.lists.cached(request.user_id, news)
    if sent is None or news is None or room_list is None:
        return None
    since = events_of(request.pos.upto.bound(news.positions))
    if _is_behind(request.pos, news) or _has_news(room_list, sent, since):
        return None
    personal, windows = room_list.cached_personal(), _cached_windows(request, room_list, sent)
    if personal is None or windows is None:
        return None
    request = request.with_ignored(personal.ignored)
    situation = Situation(request, memory, news, state, since, sent, room_list, personal.direct)
    choice = _choice(situation, windows)
    rooms = ReadRooms()
    has_rooms = bool(choice.reasons or choice.left_behind)
    if has_rooms or not extension_request(situation, choice, rooms).is_empty:
        return None
    return _draft(situation, choice, rooms, Extensions())


def _has_news(room_list: RoomList, sent: ClientRooms, since: VectorPosition) -> bool:
    """Return whether the room that changed last is one of the client, without a look at others."""
    first = next(room_list.changed_since(since), None)
    return first is not None and first.room_nid in sent


def _is_behind(pos: PosToken, news: News) -> bool:
    """Return whether the process has not followed the events up to the `pos`."""
    return not events_of(pos.upto) <= events_of(news.token)


def _cached_windows(
    request: PreparedRequest, room_list: RoomList, sent: ClientRooms
) -> dict[str, Window] | None:
    windows: dict[str, Window] = {}
    for name, one in request.body.lists.items():
        window = room_list.cached_window(one.filters, one.ranges, sent, request.ignored or ())
        if window is None:
            return None
        windows[name] = window
    return windows


async def confirmed(
    conn: Connection, request: PreparedRequest, memory: SlidingMemory, draft: Draft
) -> Draft | None:
    """Return an expected response with the positions of the database, by one statement.

    None: there are commits that this process has not seen. `UnknownPos`.
    """
    if request.pos is None:
        return None
    state = request.pos.connection, request.pos.number
    rows = await conn.fetch(SQL_POSITIONS_OF_CONNECTION, *state, *request.key, row=WriterRow)
    found = next((row for row in rows if row.kind == CONNECTION), None)
    if found is None:
        raise UnknownPos(request.text, EXPIRED)
    news = memory.confirmed_news(request.user_id, [row for row in rows if row is not found])
    if news is None or not _covers(draft.upto, news.token, request.body.extensions):
        return None
    _since(request, news)
    upto = request.covered(news.token)
    extensions_upto = covered_by_extensions(request, upto, Extensions())
    used = ConnectionState(*state, found.position)
    return replace(draft, upto=upto, extensions_upto=extensions_upto, state=used)


def _covers(expected: SyncToken, reached: SyncToken, extensions: Collection[str]) -> bool:
    """Return whether the expectation has what the database has, in the streams of the response."""
    return all(
        (reached.position(name) or VectorPosition())
        <= (expected.position(name) or VectorPosition())
        for name in ("events", ACCOUNT_DATA, *extensions)
    )


def _since(request: PreparedRequest, news: News) -> VectorPosition | None:
    """Return the position of the `pos`. `UnknownPos` if events after it are purged."""
    if request.pos is None:
        return None
    since = events_of(request.pos.upto.bound(news.positions))
    if since.min < news.purged_upto:
        raise UnknownPos(request.text, "what happened since then is not kept any more")
    return since


def _choice(situation: Situation, windows: Mapping[str, Window]) -> Choice:
    """Return which rooms the response may have."""
    sent, room_list = situation.sent, situation.room_list
    request = situation.request
    wanted = wanted_rooms(request.body, windows, room_list, sent, timeline_max=request.timeline_max)
    changed: dict[int, ListedRoom] = {}
    if situation.since is not None:
        changed = {room.room_nid: room for room in room_list.changed_since(situation.since)}
        wanted |= forgotten_rooms(room_list, situation.since, sent)
    purged_upto = situation.news.purged_upto
    choice = choose(wanted, sent, changed, situation.direct, purged_upto=purged_upto)
    choice.counts.update({name: count for name, (count, _) in windows.items()})
    return choice


def _draft(situation: Situation, choice: Choice, rooms: ReadRooms, found: Extensions) -> Draft:
    upto = situation.request.covered(situation.news.token)
    return Draft(
        situation.state,
        situation.sent,
        marked(situation, choice, rooms, found),
        upto,
        covered_by_extensions(situation.request, upto, found),
        choice.counts,
        rooms.shown,
        found,
        situation.room_list,
        situation.request.user_id,
    )
