"""One answer of /sync out of its parts, within one snapshot."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from storage import arguments as args
from storage.config import Config
from storage.database.connection import Connection
from storage.database.names import INVITE, JOIN, MEMBERSHIPS
from storage.errors import InvalidToken, ResyncNeeded
from storage.ids import UserId
from storage.queries.filters import ANY_ROOM, SyncFilter
from storage.queries.sync.changed_rooms import News, SyncMemory
from storage.queries.sync.positions import events_of, where
from storage.queries.sync.rooms import ChangedRoom, SyncRange, rooms, rooms_and_writers
from storage.queries.sync.state import RoomState, StateRequest, SyncedRoom, SyncedUser, states
from storage.queries.sync.stripped_state import stripped
from storage.queries.sync.types import (
    InvitedRoom,
    JoinedRoom,
    KnockedRoom,
    LeftRoom,
    Sync,
    Timeline,
)
from storage.streams import PaginationToken, RoomsToken, SyncToken
from storage.streams.positions import LARGEST_POSITION
from storage.streams.tokens import is_rooms_token

KNOCK: Final = MEMBERSHIPS["knock"]
BESIDE_TIMELINE: Final = LARGEST_POSITION - 1
"""A topological ordering above that of every event, also of one that moves up later (storage/graph/topological_ordering.py)."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A question to /sync, its tokens read and its limits checked."""

    user_id: UserId
    since: SyncToken | None
    part: RoomsToken | None
    timeline_limit: int
    rooms_limit: int | None
    full_state: bool
    deployment: str
    ignored: tuple[UserId, ...] = ()
    filter: SyncFilter = ANY_ROOM
    rows_max: int = 20_000

    @property
    def text(self) -> str:
        """The token as the caller gave it; a token has one text only."""
        given = self.since or self.part
        return "" if given is None else given.print(self.deployment)

    @property
    def token(self) -> SyncToken | None:
        """Where the user is: of ``since``, or of the parts of an initial sync."""
        return self.since if self.part is None else self.part.upto

    @classmethod
    def of(
        cls,
        user_id: str,
        since: str | None,
        *,
        timeline_limit: int,
        rooms_limit: int | None,
        full_state: bool,
        ignored: Iterable[UserId] = (),
        filter: SyncFilter = ANY_ROOM,  # noqa: A002  # as the client-server API calls it
        server_name: str,
        deployment: str,
        config: Config,
    ) -> "SyncRequest":
        """From what the caller gave; `InvalidIdentifier`, `InvalidToken`, `InputError`."""
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
            tuple(ignored),
            filter,
            rows_max,
        )


async def sync(conn: Connection, asked: SyncRequest, *, memory: SyncMemory | None = None) -> Sync:
    """The answer, in at most three statements.

    ``conn`` is in a REPEATABLE READ transaction: one snapshot.

    ``memory`` tells where to look for what is new; without it all rooms of the user are looked at.
    """
    return await _answer(conn, asked, await _news(conn, asked, memory))


async def look(
    conn: Connection, asked: SyncRequest, memory: SyncMemory, *, anew: bool
) -> tuple[Sync, News | None]:
    """As `sync`, with what is known there, if anything; ``anew``: the rooms that the user is in are read along, rather than remembered."""
    news = await _news(conn, asked, memory, anew=anew)
    return await _answer(conn, asked, news), news


async def _news(
    conn: Connection, asked: SyncRequest, memory: SyncMemory | None, *, anew: bool = False
) -> News | None:
    """What is known of where something can have happened. None: it makes no difference."""
    if memory is None or asked.since is None or asked.full_state:
        return None
    return await memory.news(conn, asked.user_id, anew=anew)


async def _answer(conn: Connection, asked: SyncRequest, news: News | None) -> Sync:
    reached, purged_upto = await where(conn) if news is None else (news.token, news.purged_upto)
    _refuse_purged(asked, purged_upto)
    current = reached.positions()
    upto = reached if asked.part is None else asked.part.upto.bound(current)
    since = None if asked.since is None else asked.since.bound(current)
    known = None if since is None else events_of(since)
    among = None if news is None or known is None else news.candidates(known)
    if (known == events_of(upto) and not asked.full_state) or among == []:
        return Sync(upto.print(asked.deployment))
    below = None if asked.part is None else (asked.part.activity, asked.part.room)
    limit = asked.rooms_limit if since is None else None
    of_all = (
        asked.timeline_limit,
        limit,
        below,
        asked.full_state,
        asked.ignored,
        among,
        asked.filter,
        asked.rows_max,
    )
    found = await rooms(conn, asked.user_id, SyncRange(known, events_of(upto), *of_all))
    joined = [room for room in found if room.row.membership == JOIN]
    more = limit is not None and len(joined) > limit
    if more:
        found.remove(joined[-1])
        joined = joined[:-1]
    next_rooms = _next_rooms(upto, joined[-1]).print(asked.deployment) if more and joined else None
    return await _fill(
        conn, asked, found, Sync(upto.print(asked.deployment), next_rooms=next_rooms)
    )


def is_quiet(asked: SyncRequest, memory: SyncMemory) -> bool:
    """Whether nothing is new as far as this process has heard: then `quiet` is worth asking."""
    return (
        asked.since is not None
        and not asked.full_state
        and memory.is_quiet(asked.user_id, events_of(asked.since))
    )


async def quiet(
    conn: Connection, asked: SyncRequest, memory: SyncMemory
) -> tuple[Sync, News] | None:
    """The answer that nothing is new, in one statement, which needs no transaction; with what is known there. None: something may be."""
    news = await memory.still(conn, asked.user_id)
    if news is None:
        return None
    upto = news.token
    since = events_of((asked.since or SyncToken()).bound(upto.positions()))
    if since.min < news.purged_upto:
        return None
    if since == events_of(upto) or news.candidates(since) == []:
        return Sync(upto.print(asked.deployment)), news
    return None


def is_brief(asked: SyncRequest, memory: SyncMemory) -> bool:
    """Whether only timelines have gone on as far as this process has heard: then `brief` is worth asking."""
    if asked.since is None or asked.full_state or asked.filter.lazy_load_members:
        return False
    return not memory.has_state(asked.user_id, events_of(asked.since))


async def brief(
    conn: Connection, asked: SyncRequest, memory: SyncMemory
) -> tuple[Sync, News] | None:
    """The answer that only timelines have gone on, in one statement, which needs no transaction; with what is known there.

    It asks for the rooms that have changed as far as this process has heard, and along with that how far the streams are. None: further than
    was heard, or there is state to tell, or it is not remembered what has changed.
    """
    known = memory.known(asked.user_id)
    upto, since = known.upto, events_of(asked.since or SyncToken()).meet(known.upto)
    among = known.candidates(since)
    if among is None:
        return None
    limit, rows_max = asked.timeline_limit, asked.rows_max
    stretch = SyncRange(
        since,
        upto,
        limit,
        ignored=asked.ignored,
        room_nids=among,
        filter=asked.filter,
        rows_max=rows_max,
    )
    found, writers = await rooms_and_writers(conn, asked.user_id, stretch)
    news = known.confirmed(writers)
    if (
        news is None
        or events_of(news.token) != upto
        or since.min < news.purged_upto
        or news.candidates(since) != among
    ):
        return None
    if any(room.row.whole or room.row.has_state or room.row.membership != JOIN for room in found):
        return None
    return await _fill(conn, asked, found, Sync(news.token.print(asked.deployment))), news


def _refuse_purged(asked: SyncRequest, purged_upto: int) -> None:
    """`ResyncNeeded` for a token from before what was thrown away."""
    token = asked.token
    if token is not None and events_of(token).min < purged_upto:
        raise ResyncNeeded(
            token.print(asked.deployment), "what happened since then is not kept any more"
        )


def _next_rooms(upto: SyncToken, last: ChangedRoom) -> RoomsToken:
    return RoomsToken(upto, last.row.activity or 0, last.row.room_nid)


async def _fill(
    conn: Connection, asked: SyncRequest, found: list[ChangedRoom], answer: Sync
) -> Sync:
    """The rooms, with their states, into the answer."""
    shown = [room for room in found if room.row.membership in (INVITE, KNOCK)]
    told = [room for room in found if room.row.membership not in (INVITE, KNOCK)]
    members = _members(told, asked) if asked.filter.lazy_load_members else None
    wanted = [_wanted(room, asked.timeline_limit) for room in told]
    strange = [
        SyncedUser(_of(room), room.row.member_nid)
        for room in (*shown, *filter(_may_have_ended, told))
    ]
    held = await states(
        conn, asked.user_id, wanted, members=members, picked=asked.filter.state, shown=strange
    )
    for room in told:
        room_id = room.row.room_id
        one = _room(room, held[room.row.room_nid], asked)
        if room.row.membership != JOIN:
            _tell_end(one.timeline, held[room.row.room_nid])
            answer.leave[room_id] = LeftRoom(
                one.timeline, one.state, one.state_after, one.state_removed
            )
        elif (
            room.row.whole
            or one.timeline.events
            or one.timeline.limited
            or one.state_after
            or one.state
            or one.state_removed
            or one.summary
        ):
            answer.join[room_id] = one
    for room in shown:
        state = held[room.row.room_nid]
        seen = stripped(state.shown, next(iter(state.own), None), state.brought)
        if room.row.membership == INVITE:
            answer.invite[room.row.room_id] = InvitedRoom(seen)
        else:
            answer.knock[room.row.room_id] = KnockedRoom(seen)
    return answer


def _may_have_ended(room: ChangedRoom) -> bool:
    """Whether a room may be one of an invite or knock that ended out of band."""
    return (
        room.row.membership != JOIN
        and not room.row.was_joined
        and not room.events
        and room.row.member_nid != 0
    )


def _tell_end(timeline: Timeline, state: RoomState) -> None:
    """What ended an invite or knock out of band is in no timeline; the user is shown it as the last event of one."""
    timeline.events.extend(event for event in state.own if event.outlier)


def _members(told: Iterable[ChangedRoom], asked: SyncRequest) -> list[tuple[int, str]]:
    """Whose membership matters in which room: of the timeline's senders, of those it is about, and the user's own."""
    found: dict[tuple[int, str], None] = {}
    for room in told:
        found[room.row.room_nid, asked.user_id] = None
        if not room.row.was_joined:
            continue
        for event in room.events[-asked.timeline_limit :] if asked.timeline_limit else ():
            found[room.row.room_nid, event.sender] = None
            if event.type == "m.room.member" and event.state_key is not None:
                found[room.row.room_nid, event.state_key] = None
    return list(found)


def _wanted(room: ChangedRoom, timeline_limit: int) -> StateRequest:
    """The state to ask for.

    Who has not been in the room since the last sync is told of their own membership only.
    """
    row = room.row
    only = None if row.was_joined else row.member_key_nid
    start = _start(room, timeline_limit)
    has_first = bool(timeline_limit and room.events)
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


def _start(room: ChangedRoom, timeline_limit: int) -> int:
    """The stream ordering directly before the timeline; its end if it is empty."""
    timeline = room.events[-timeline_limit:] if timeline_limit else []
    return (timeline[0].stream_ordering or 0) - 1 if timeline else room.row.upper


def _room(room: ChangedRoom, state: RoomState, asked: SyncRequest) -> JoinedRoom:
    limit = asked.timeline_limit
    before = PaginationToken(BESIDE_TIMELINE, 0, live=_start(room, limit)).print(asked.deployment)
    limited = room.cut or len(room.events) > limit or room.is_visit
    timeline = Timeline(room.events[-limit:] if limit else [], limited, before)
    return JoinedRoom(
        timeline, state.at_start, state.at_end, state.removed, next(iter(state.summary), None)
    )
