"""Calls about the members of rooms: who is in a room, and which servers and users to inform."""

from collections.abc import Iterable

from storage import arguments as args
from storage.database.names import MEMBERSHIPS
from storage.ids import RoomId, ServerName, UserId, server_name_of
from storage.observability.instrument import measured
from storage.queries import joined_servers as server_queries
from storage.queries import member_ids as id_queries
from storage.queries import members as queries
from storage.queries import partial_rooms as partial
from storage.queries import sharing
from storage.queries.events import StoredEvent
from storage.queries.partial_rooms import PartialRoom
from storage.queries.room_position import RoomPosition, position_at
from storage.queries.sharing import SharingChanges
from storage.queries.sync.positions import events_of
from storage.store.core import StoreCore
from storage.streams.caches import FORGOTTEN, Ticket
from storage.streams.invalidate_caches import INSTANCE_NAME, invalidate_caches, register_writer
from storage.streams.position_poller import follow_writer
from storage.streams.tokens import is_sync_token, read_positions


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
    known = None if isinstance(entry, Ticket) else entry
    found = await store.reads.run(lambda conn: id_queries.member_ids(conn, room, code, known))
    if found is not known:
        cache.fill(entry if isinstance(entry, Ticket) else cache.ticket(room, membership), found)
    return list(found.user_ids)


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
    wanted = None if membership is None else MEMBERSHIPS[args.membership(membership)]
    unwanted = (
        None
        if not_membership is None
        else MEMBERSHIPS[args.membership(not_membership, "not_membership")]
    )
    return await store.reads.run(
        lambda conn: queries.members(
            conn, room, position, wanted=wanted, unwanted=unwanted, reader=user
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
    codes, is_local = [MEMBERSHIPS[one] for one in names], server_name_of(user) == store.server_name
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
    earlier, later = map(events_of, tokens)
    return await store.reads.run(
        lambda conn: sharing.sharing_changes(conn, user, earlier, later, text=since),
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
