"""Calls that read the state of rooms: at events, and now."""

from collections.abc import Iterable

from storage import arguments as args
from storage.database.connection import Connection
from storage.ids import EventId, RoomId, StateKey, UserId
from storage.observability.instrument import measured
from storage.queries import state, state_at
from storage.queries.state_entries import StateMap
from storage.queries.sync import changed_rooms
from storage.store.core import StoreCore
from storage.streams.caches import RoomsOf


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
    ids, pairs, wanted = await args.many(args.events, event_ids), args.keys(keys), _types(types)
    return await store.reads.run(
        lambda conn: state_at.states_at(
            conn, ids, after=after, types=wanted, keys=pairs, remembered=store.caches.states
        )
    )


def _types(types: Iterable[str] | None) -> list[str] | None:
    return None if types is None else args.texts(types, "types")


@measured("current_state")
async def current_state(
    store: StoreCore, room_id: str, *, types: Iterable[str] | None = None
) -> StateMap:
    """Return the current state of a room, or its entries of some ``types``. `UnknownRoom`."""
    room, wanted = args.room(room_id), _types(types)
    if wanted is None and store.database.config.cache_reads:
        cache = store.caches.current_state
        found = await cache.many([room], lambda ids: _load_current_states(store, ids))
        return dict(found[room])
    return await store.reads.run(lambda conn: state.current_state(conn, room, types=wanted))


async def _load_current_states(store: StoreCore, room_ids: list[RoomId]) -> dict[RoomId, StateMap]:

    async def read(conn: Connection) -> dict[RoomId, StateMap]:
        return {room_id: await state.current_state(conn, room_id) for room_id in room_ids}

    return await store.reads.run(read)


async def forward_extremities(store: StoreCore, room_id: str) -> set[EventId]:
    """Return the events that the next event of the room will have as prev_events. `UnknownRoom`."""
    room = args.room(room_id)
    return await store.reads.run(lambda conn: state.forward_extremities(conn, room))


async def backward_extremities(store: StoreCore, room_id: str) -> set[EventId]:
    """Return the ids of the missing events that stored events have as parents. `UnknownRoom`."""
    room = args.room(room_id)
    return await store.reads.run(lambda conn: state.backward_extremities(conn, room))


async def rooms_of(store: StoreCore, user_id: str) -> list[RoomId]:
    """Return the rooms that a local user is joined to.

    `InvalidIdentifier`, also for a user of another server.
    """
    user = args.local_user(user_id, store.server_name)
    if store.database.config.cache_reads:
        cache = store.caches.rooms_of
        found = await cache.many([user], lambda ids: _load_rooms_of(store, ids))
        return sorted(map(RoomId, found[user].joined))
    return await store.reads.run(lambda conn: state.rooms_of(conn, user))


async def _load_rooms_of(store: StoreCore, user_ids: list[UserId]) -> dict[UserId, RoomsOf]:

    async def read(conn: Connection) -> dict[UserId, RoomsOf]:
        return {user_id: await changed_rooms.rooms_of(conn, user_id) for user_id in user_ids}

    return await store.reads.run(read)
