"""Calls that read the state of rooms: at events, and now."""

from collections.abc import Iterable

from storage import arguments as args
from storage.database.connection import Connection
from storage.database.names import MEMBERSHIPS
from storage.ids import EventId, RoomId, ServerName, StateKey, UserId, server_name_of
from storage.observability.instrument import measured
from storage.queries import gaps as partial
from storage.queries import members as id_queries
from storage.queries import members as queries
from storage.queries import members as server_queries
from storage.queries import room_info as room_queries
from storage.queries import sharing, state_at
from storage.queries import space_walk as space_queries
from storage.queries.events import StoredEvent
from storage.queries.gaps import PartialRoom
from storage.queries.room_info import RoomInfo, RoomPosition, position_at
from storage.queries.sharing import SharingChanges
from storage.queries.space_walk import SpaceChild
from storage.queries.state_at import StateMap
from storage.queries.sync import changed_rooms
from storage.queries.sync.changed_rooms import events_of
from storage.store.core import StoreCore
from storage.streams.caches import FORGOTTEN, RoomsOf, Ticket
from storage.streams.invalidate_caches import INSTANCE_NAME, invalidate_caches, register_writer
from storage.streams.position_poller import follow_writer
from storage.streams.tokens import is_sync_token, read_positions

# --------------------------------------------------------------------------------------------------
# Calls about the members of rooms: who is in a room, and which servers and users to inform.


@measured("membership")
async def membership(
    store: StoreCore, room_id: str, user_id: str, *, at: str | None = None
) -> str | None:
    """Return the membership of a user of any server: ban, invite, join, knock or leave.

    None: there is none. It is that of the room's state; of a local user also an invite, a knock or
    a leave out of band. ``at`` is a token of sync or messages, and gives the membership there.

    `UnknownRoom`, `InvalidToken`, `ResyncNeeded` for a token from before purged state changes.
    """
    room, user, position = args.room(room_id), args.user(user_id), _position(store, at)
    return await store.reads.run(
        lambda conn: queries.membership(conn, room, user, position), tokens=(at,)
    )


@measured("member_ids")
async def member_ids(store: StoreCore, room_id: str, membership: str = "join") -> list[UserId]:
    """Return the users with this membership in the room's current state, in no order.

    `UnknownRoom`.
    """
    room, code = args.room(room_id), MEMBERSHIPS[args.membership(membership)]
    cache = store.caches.members
    entry = cache.get(room, membership)
    cached = None if isinstance(entry, Ticket) else entry
    member_list = await store.reads.run(
        lambda conn: id_queries.member_ids(conn, room, code, cached)
    )
    if member_list is not cached:
        cache.fill(
            entry if isinstance(entry, Ticket) else cache.ticket(room, membership), member_list
        )
    return list(member_list.user_ids)


@measured("members")
async def members(
    store: StoreCore,
    room_id: str,
    *,
    at: str | None = None,
    membership: str | None = None,
    not_membership: str | None = None,
    reader: str | None = None,
) -> list[StoredEvent]:
    """Return the member events of a room's state, in no order; client-server API, /members.

    ``at`` is a token of sync or messages: the state there, also before a `Timeline.prev_batch`.
    ``membership`` picks one membership, ``not_membership`` leaves one out. ``reader`` is the user
    of the request: one who has left the room gets no later members than those of that moment. There
    are none if state changes of that time are purged. Check first that they may see the members.

    `UnknownRoom`, `InvalidToken`, `ResyncNeeded` for a token from before purged state changes.
    """
    room, position = args.room(room_id), _position(store, at)
    user = None if reader is None else args.user(reader)
    code = None if membership is None else MEMBERSHIPS[args.membership(membership)]
    unwanted = (
        None
        if not_membership is None
        else MEMBERSHIPS[args.membership(not_membership, "not_membership")]
    )
    return await store.reads.run(
        lambda conn: queries.members(
            conn, room, position, membership=code, unwanted=unwanted, reader=user
        ),
        tokens=(at,),
    )


@measured("state_at_leave")
async def state_at_leave(store: StoreCore, user_id: str, room_id: str) -> list[StoredEvent]:
    """Return the state of a room when a user left it, or was removed, in no order.

    A later invite or ban shows no more. It is empty for a user who is joined, was never in the room
    or has forgotten it, and if state changes of that time are purged. `UnknownRoom`.

    Source: client-server API, /rooms/{roomId}/state of a user who has left.
    """
    user, room = args.user(user_id), args.room(room_id)
    return await store.reads.run(lambda conn: queries.state_at_leave(conn, user, room))


@measured("memberships_of")
async def memberships_of(
    store: StoreCore, user_id: str, memberships: Iterable[str] = ("join",)
) -> dict[RoomId, str]:
    """Return the rooms in which a user has one of these memberships, each with it.

    Of a local user this has invites, knocks and leaves out of band, and not the rooms that they
    have forgotten. Of another user it has the rooms of which this server stores a state.
    """
    user, names = args.user(user_id), args.memberships(memberships)
    codes, is_local = (
        [MEMBERSHIPS[name] for name in names],
        server_name_of(user) == store.server_name,
    )
    return await store.reads.run(
        lambda conn: queries.memberships_of(conn, user, codes, is_local=is_local)
    )


@measured("forget")
async def forget(store: StoreCore, user_id: str, room_id: str) -> None:
    """Forget a room that a local user has left, or is banned from. Client-server API, /forget.

    The user reads the room from then on as one who was never in it: only world-readable events.
    `memberships_of` leaves it out. Both syncs still return the leave once, to a client that does
    not have it yet, so that no other device keeps the room. A join, an invite or a knock undoes it.

    `UnknownRoom`, `InputError` for a user who is joined, invited or knocking.
    """
    user, room = args.local_user(user_id, store.server_name), args.room(room_id)
    with store.reads.writing():
        await register_writer(store.database)
        async with store.database.transaction() as conn:
            await queries.forget(conn, user, room)
            # the room leaves the lists of sliding sync
            await invalidate_caches(conn, FORGOTTEN, (room, user))
        async with store.database.connection() as conn:
            # so that syncs of this process see no commit that is new to them
            await follow_writer(conn, store.streams, "caches", INSTANCE_NAME)


@measured("partial_rooms")
async def partial_rooms(store: StoreCore) -> list[PartialRoom]:
    """Return the rooms joined with the members omitted, until these are stored.

    The one that waits longest is first. `federation.Receiver.complete_partial_rooms` fetches them.
    """
    return await store.reads.of_primary(partial.partial_rooms)


@measured("shared_rooms")
async def shared_rooms(store: StoreCore, user_a: str, user_b: str) -> set[RoomId]:
    """Return the rooms to which both users are joined, of any servers."""
    users = args.user(user_a), args.user(user_b)
    return await store.reads.run(lambda conn: sharing.shared_rooms(conn, *users))


@measured("users_sharing")
async def users_sharing(store: StoreCore, user_id: str) -> set[UserId]:
    """Return the other users who are joined to a room to which this user of any server is joined.

    They are to be informed of changes of the user's devices, keys and presence.
    """
    user = args.user(user_id)
    return await store.reads.run(lambda conn: sharing.users_sharing(conn, user))


@measured("sharing_changes")
async def sharing_changes(store: StoreCore, user_id: str, since: str, to: str) -> SharingChanges:
    """Return the users whom a local user began or ceased to share a room with, for `device_lists`.

    ``gained`` share a room at ``to``, and shared none at ``since`` or at some time in between: one
    who left and joined again is among them. ``lost`` share none at ``to`` any more.

    `InvalidToken`, `ResyncNeeded` for a token from before purged state changes.
    """
    user = args.local_user(user_id, store.server_name)
    tokens = [read_positions(text, store.deployment_id) for text in (since, to)]
    for text, token in zip((since, to), tokens, strict=True):
        if store.streams.lost:
            store.streams.refuse_lost(text, token)
    start, end = map(events_of, tokens)
    return await store.reads.run(
        lambda conn: sharing.sharing_changes(conn, user, start, end, text=since),
        tokens=(since, to),
    )


@measured("joined_servers")
async def joined_servers(
    store: StoreCore, room_id: str, *, at_event: str | None = None
) -> set[ServerName]:
    """Return the servers with a joined user: now, or in the state before an event of the room.

    The servers before an event are those to send it to. A user's leave or ban goes to their server
    too. The own server is among them if a local user is joined.

    `UnknownRoom`; `UnknownEvent`, also for an event of another room; `StateUnknown` for an outlier.
    """
    room, event = args.room(room_id), None if at_event is None else args.event(at_event)
    return await store.reads.run(
        lambda conn: (
            server_queries.joined_servers(conn, room)
            if event is None
            else server_queries.joined_servers_at(conn, room, event)
        )
    )


def _position(store: StoreCore, at: str | None) -> RoomPosition:
    """Return the position of a token. `ResyncNeeded` for one of facts that a restore removed."""
    position = position_at(at, store.deployment_id)
    if at is not None and store.streams.lost and is_sync_token(at):
        store.streams.refuse_lost(at, read_positions(at, store.deployment_id))
    return position


async def state_before(
    store: StoreCore,
    event_id: str,
    *,
    types: Iterable[str] | None = None,
    keys: Iterable[StateKey] | None = None,
) -> StateMap:
    """Return the state before an event. Filters and errors are those of `states_before`."""
    return (await states_before(store, [event_id], types=types, keys=keys))[EventId(event_id)]


async def state_after(
    store: StoreCore,
    event_id: str,
    *,
    types: Iterable[str] | None = None,
    keys: Iterable[StateKey] | None = None,
) -> StateMap:
    """Return the state after an event. Only an accepted state event changes the state."""
    return (await states_after(store, [event_id], types=types, keys=keys))[EventId(event_id)]


@measured("state")
async def states_before(
    store: StoreCore,
    event_ids: Iterable[str],
    *,
    types: Iterable[str] | None = None,
    keys: Iterable[StateKey] | None = None,
) -> dict[EventId, StateMap]:
    """Return the states before many events in one statement.

    ``types`` picks event types, ``keys`` pairs of type and state key. Only one of the two may be
    given. `UnknownEvent`, `StateUnknown` for an outlier, `StorageCorrupt` for a state that cannot
    be read, `InputError`.
    """
    return await _states(store, event_ids, types, keys, after=False)


@measured("state")
async def states_after(
    store: StoreCore,
    event_ids: Iterable[str],
    *,
    types: Iterable[str] | None = None,
    keys: Iterable[StateKey] | None = None,
) -> dict[EventId, StateMap]:
    """Return the states after many events in one statement. See `states_before`."""
    return await _states(store, event_ids, types, keys, after=True)


async def _states(
    store: StoreCore,
    event_ids: Iterable[str],
    types: Iterable[str] | None,
    keys: Iterable[StateKey] | None,
    *,
    after: bool,
) -> dict[EventId, StateMap]:
    ids, pairs, type_set = await args.many(args.events, event_ids), args.keys(keys), _types(types)
    return await store.reads.run(
        lambda conn: state_at.states_at(
            conn, ids, after=after, types=type_set, keys=pairs, remembered=store.caches.states
        )
    )


def _types(types: Iterable[str] | None) -> list[str] | None:
    return None if types is None else args.texts(types, "types")


@measured("current_state")
async def current_state(
    store: StoreCore, room_id: str, *, types: Iterable[str] | None = None
) -> StateMap:
    """Return the current state of a room, or its entries of some ``types``. `UnknownRoom`."""
    room, type_set = args.room(room_id), _types(types)
    if type_set is None and store.database.config.cache_reads:
        cache = store.caches.current_state
        by_room = await cache.many([room], lambda ids: _load_current_states(store, ids))
        return dict(by_room[room])
    return await store.reads.run(lambda conn: state_at.current_state(conn, room, types=type_set))


async def _load_current_states(store: StoreCore, room_ids: list[RoomId]) -> dict[RoomId, StateMap]:

    async def read(conn: Connection) -> dict[RoomId, StateMap]:
        return {room_id: await state_at.current_state(conn, room_id) for room_id in room_ids}

    return await store.reads.run(read)


async def forward_extremities(store: StoreCore, room_id: str) -> set[EventId]:
    """Return the events that the next event of the room will have as prev_events. `UnknownRoom`."""
    room = args.room(room_id)
    return await store.reads.run(lambda conn: state_at.forward_extremities(conn, room))


async def backward_extremities(store: StoreCore, room_id: str) -> set[EventId]:
    """Return the ids of the missing events that stored events have as parents. `UnknownRoom`."""
    room = args.room(room_id)
    return await store.reads.run(lambda conn: state_at.backward_extremities(conn, room))


async def rooms_of(store: StoreCore, user_id: str) -> list[RoomId]:
    """Return the rooms that a local user is joined to.

    `InvalidIdentifier`, also for a user of another server.
    """
    user = args.local_user(user_id, store.server_name)
    if store.database.config.cache_reads:
        cache = store.caches.rooms_of
        by_user = await cache.many([user], lambda ids: _load_rooms_of(store, ids))
        return sorted(map(RoomId, by_user[user].joined))
    return await store.reads.run(lambda conn: state_at.rooms_of(conn, user))


async def _load_rooms_of(store: StoreCore, user_ids: list[UserId]) -> dict[UserId, RoomsOf]:

    async def read(conn: Connection) -> dict[UserId, RoomsOf]:
        return {user_id: await changed_rooms.rooms_of(conn, user_id) for user_id in user_ids}

    return await store.reads.run(read)


# --------------------------------------------------------------------------------------------------
# Calls that describe rooms: for room lists, the room directory and spaces.


@measured("rooms")
async def rooms(store: StoreCore, room_ids: Iterable[str]) -> dict[RoomId, RoomInfo]:
    """Return what the current state of each stored room says: name, topic, counts, and so on.

    One statement serves any number of ``room_ids``. The result is in their order, and lacks the
    rooms of which nothing is stored. Malformed content is None, never an error. Check first who may
    see a room. `InvalidIdentifier`.
    """
    requested = await args.many(args.rooms, room_ids)
    return await store.reads.run(lambda conn: room_queries.rooms(conn, requested))


@measured("space_children")
async def space_children(store: StoreCore, room_id: str) -> list[SpaceChild]:
    """Return the children of a space, in the order of the client-server API.

    These are first those with a valid `order`, by it, then the others by `origin_server_ts`, and
    then by room id. A child without `via`, or with a malformed one, is left out. A child may be a
    space, and may be its own ancestor: end a walk at rooms that it has visited. `UnknownRoom`.
    """
    room = args.room(room_id)
    return await store.reads.run(lambda conn: space_queries.space_children(conn, room))
