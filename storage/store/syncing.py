"""/sync: read what is new, and wait where nothing is."""

import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from time import perf_counter

from storage import arguments as args
from storage.database.connection import Connection
from storage.errors import ResyncNeeded, UnknownPos
from storage.ids import RoomId
from storage.observability.instrument import measured
from storage.persistent_map import changed
from storage.queries import state_at
from storage.queries import sync as queries
from storage.queries import unread as unread_queries
from storage.queries.filters import ANY_ROOM, SyncFilter
from storage.queries.sliding import response as sliding_queries
from storage.queries.sliding.connection import (
    USED_PRECISION_MS,
    ConnectionState,
    note_use,
    open_connection,
    write_state,
)
from storage.queries.sliding.response import EXPIRED, PendingResponse
from storage.queries.sliding.selection import PreparedRequest
from storage.queries.sliding.types import SlidingSync, SlidingSyncRequest
from storage.queries.sync import PollResult, Sync, SyncRequest, poll_until_changed
from storage.queries.sync.changed_rooms import ACCOUNT_DATA, OTHER_STREAMS, ChangeSnapshot
from storage.queries.sync.included import Include, Included
from storage.queries.unread import COUNT_MAX, UNREAD_TYPES, Unread, UnreadRequest
from storage.store.core import StoreCore
from storage.streams import SyncToken, VectorPosition
from storage.streams.tokens import PosToken, read_positions


@measured("sync", timed=False)
async def sync(
    store: StoreCore,
    user_id: str,
    *,
    since: str | None = None,
    timeline_limit: int = 10,
    rooms_limit: int | None = None,
    full_state: bool = False,
    timeout_ms: int = 0,
    ignored: args.Ignored = args.ACCOUNT_DATA,
    filter: SyncFilter = ANY_ROOM,  # noqa: A002  # as the client-server API calls it
    device_id: str | None = None,
    include: Collection[Included] | None = None,
    to_device_limit: int | None = None,
) -> Sync:
    """Return what is new to a local user since a token; None asks for everything.

    ``timeline_limit`` is the largest number of events in the timeline of a room. ``rooms_limit`` is
    for an initial sync: it returns the rooms with the latest activity, and `Sync.next_rooms` as
    ``since`` returns the next ones. ``full_state`` adds the whole state of each joined room.
    ``timeout_ms`` waits until something is new.

    Events of ``ignored`` users are left out, except for state, and so are their invites. By
    default the users are those of the account data m.ignored_user_list.
    ``filter`` picks rooms, events, and members (`storage.SyncFilter`).

    A timeline that is `limited` is incomplete. This is also so where history is missing, or where
    too few of the last `Config.traversal_rows_max` events pass the filter or are visible. Page on
    from its `prev_batch`.

    ``include`` adds "receipts", "account_data", "to_device" (messages to ``device_id``) and
    "unread" (counts), as of the same snapshot. A room where only these are new is in `Sync.join`.
    None adds all four where there is a ``device_id``, and nothing where there is none: then no
    statement is sent for it. To-device messages stay stored until you delete them
    (`storage.streams.to_device.ToDevice.delete`). ``to_device_limit`` is the largest number of
    them: `Sync.next_batch` covers those that are returned, and the next sync has the next ones.

    `InvalidToken`, `ResyncNeeded`, `InputError`.
    """
    wait_ms = args.limit(timeout_ms, args.LARGEST, "timeout_ms")
    request = SyncRequest.of(
        user_id,
        since,
        timeline_limit=timeline_limit,
        rooms_limit=rooms_limit,
        full_state=args.flag(full_state, "full_state"),
        ignored=args.ignored(ignored),
        filter=args.instance(filter, SyncFilter, "filter"),
        server_name=store.server_name,
        deployment=store.deployment_id,
        config=store.database.config,
        defined=store.defined_streams.covered,
        include=Include.of(include, device_id, to_device_limit),
    )
    await store.defined_streams.ready()
    response = await queries.poll_until_changed(
        lambda: poll(store, request, waits=wait_ms > 0),
        store.notifier,
        lambda answer: SyncToken.parse(answer.next_batch, store.deployment_id),
        request.since,
        timeout_ms=wait_ms,
        ending=(*OTHER_STREAMS, *request.defined),
    )
    if filter.lazy_load_members and not filter.include_redundant_members and device_id is not None:
        response = store.sent_members.leave_out((request.user_id, device_id), since, response)
    by_thread = filter.unread_thread_notifications
    return replace(response, unread_thread_notifications=by_thread, ignored=ignored)


@measured("unread")
async def unread(
    store: StoreCore,
    user_id: str,
    room_ids: Iterable[str] | None = None,
    *,
    types: Collection[str] = UNREAD_TYPES,
    count_max: int = COUNT_MAX,
    ignored: args.Ignored = args.ACCOUNT_DATA,
) -> dict[RoomId, Unread]:
    """Return the unread counts of rooms that a local user has joined; by default of all.

    Visible events of others after the receipts of the user count, if they are of these ``types``
    and came while the user was joined. The main timeline and each thread have their own counts; an
    event that relates to one of a thread is in that thread. A message of the user is a receipt for
    its own one. Without a receipt, all since the last join are unread. Redacted events, edits, and
    events of ``ignored`` users do not count. A count is at most ``count_max``. One statement, and
    up to four where unread events relate to others.
    `InvalidIdentifier`, `InputError`.
    """
    user = args.local_user(user_id, store.server_name)
    rooms = None if room_ids is None else args.rooms(room_ids)
    request = UnreadRequest(
        types=args.texts(types, "types"),
        count_max=args.limit(count_max, args.LARGEST, "count_max"),
        ignored=args.ignored(ignored),
        rows_max=store.database.config.traversal_rows_max,
    )
    return await store.reads.run(
        lambda conn: unread_queries.unread(conn, user, room_ids=rooms, request=request)
    )


def positions_of(store: StoreCore, token: str) -> dict[str, VectorPosition]:
    """Return the position of a `Sync.next_batch`, or a `SlidingSync.pos`, in each stream.

    The streams are events, account_data, receipts, to_device, and those of `define_stream`. New
    facts are above `VectorPosition.min`. A stream that is absent came with an upgrade, or was
    defined later: read it from 0. `InvalidToken`.
    """
    return read_positions(token, store.deployment_id).positions()


async def poll(store: StoreCore, request: SyncRequest, *, waits: bool) -> PollResult[Sync]:
    """Read once what is new, and time it. A sync that waits polls several times."""
    began = perf_counter()
    try:
        return await _poll_within_a_generation(store, request, waits=waits)
    finally:
        kind = "sync" if request.since is not None else "first_sync"
        store.measures.call(kind).add(perf_counter() - began)


async def _poll_within_a_generation(
    store: StoreCore, request: SyncRequest, *, waits: bool
) -> PollResult[Sync]:
    """Poll again if the database was replaced meanwhile, so that one database answers.

    `ResyncNeeded` if the token covers positions that the present database has lost.
    """
    while True:
        connection_generation = store.database.connection_generation
        if store.streams.lost and request.token is not None:
            store.streams.refuse_lost(request.text, request.token)
        result = await _poll_once(store, request, waits=waits)
        if connection_generation == store.database.connection_generation:
            return result


async def _poll_once(store: StoreCore, request: SyncRequest, *, waits: bool) -> PollResult[Sync]:
    was_unchanged, tokens = queries.has_no_changes(request, store.memory), (request.text or None,)
    if was_unchanged or queries.is_timeline_only(request, store.memory):
        short_query = queries.no_changes if was_unchanged else queries.timeline_only

        async def read_briefly(conn: Connection) -> PollResult[Sync] | None:
            short = await short_query(conn, request, store.memory)
            return None if short is None else await _with_keys(conn, request, *short, waits=waits)

        result = await store.reads.run(read_briefly, tokens=tokens)
        if result is not None:
            return result

    async def read(conn: Connection) -> PollResult[Sync]:
        answer, snapshot = await queries.poll(
            conn, request, store.memory, reread=waits and was_unchanged
        )
        return await _with_keys(conn, request, answer, snapshot, waits=waits)

    return await store.reads.run(read, tokens=tokens, snapshot=True)


async def _with_keys(
    conn: Connection,
    request: SyncRequest,
    answer: Sync,
    snapshot: ChangeSnapshot | None,
    *,
    waits: bool,
) -> PollResult[Sync]:
    """Add the keys to wait for: the user and their rooms, which ``snapshot`` may know already."""
    if not (waits and answer.is_empty):
        return PollResult(answer, ())
    cached = None if snapshot is None else snapshot.room_ids
    room_ids = await state_at.rooms_of(conn, request.user_id) if cached is None else cached
    return PollResult(answer, (request.user_id, *room_ids))


# --------------------------------------------------------------------------------------------------
# Sliding sync: read what a client wants and does not have, and wait where nothing is new.


@measured("sliding_sync", timed=False)
async def sliding_sync(
    store: StoreCore,
    user_id: str,
    request: SlidingSyncRequest,
    *,
    device_id: str,
    pos: str | None = None,
    timeout_ms: int = 0,
    ignored: args.Ignored = args.ACCOUNT_DATA,
) -> SlidingSync:
    """Return the rooms of a ``request`` that are new to a connection, MSC4186.

    A local user has connections by ``device_id`` and `SlidingSyncRequest.conn_id`. ``pos`` is the
    one of the last response that the client has processed; None begins a new connection. A
    request may be repeated with the same ``pos``, also with another body. With a ``pos``,
    ``timeout_ms`` waits until something is new.

    Events of ``ignored`` users are left out, except for state, and so are their invites. By
    default the users are those of the account data m.ignored_user_list.

    `UnknownPos` for a connection that has expired: begin without ``pos``. `InvalidToken`,
    `InputError`.
    """
    wait_ms = args.limit(timeout_ms, args.LARGEST, "timeout_ms")
    prepared = PreparedRequest.of(
        user_id,
        request,
        device_id=device_id,
        pos=pos,
        ignored=args.ignored(ignored),
        server_name=store.server_name,
        deployment=store.deployment_id,
        config=store.database.config,
        defined=store.defined_streams.covered,
    )
    with store.reads.writing():  # the state of the connection
        await store.defined_streams.ready()
        waits = wait_ms > 0 and prepared.pos is not None
        response = await poll_until_changed(
            lambda: _poll_sliding(store, prepared, waits=waits),
            store.notifier,
            lambda pending: pending.upto,
            prepared.upto,
            timeout_ms=wait_ms if waits else 0,
            ending=prepared.defined,
            included=sorted({ACCOUNT_DATA, *prepared.body.extensions}),
        )
        return replace(response.with_pos(await _pos(store, prepared, response)), ignored=ignored)


async def _poll_sliding(
    store: StoreCore, request: PreparedRequest, *, waits: bool
) -> PollResult[PendingResponse]:
    """Read once what is new, and time it. A request that waits polls several times."""
    began = perf_counter()
    try:
        response = await _sliding_within_a_generation(store, request)
    finally:
        kind = "sliding_sync" if request.pos is not None else "first_sliding_sync"
        store.measures.call(kind).add(perf_counter() - began)
    return PollResult(response, response.keys if waits and response.is_empty else ())


async def _sliding_within_a_generation(
    store: StoreCore, request: PreparedRequest
) -> PendingResponse:
    """Poll again if the database was replaced meanwhile, so that one database answers.

    `UnknownPos` if the `pos` covers positions that the present database has lost.
    """
    while True:
        connection_generation = store.database.connection_generation
        if store.streams.lost and request.upto is not None:
            try:
                store.streams.refuse_lost(request.text, request.upto)
            except ResyncNeeded as error:
                raise UnknownPos(request.text, error.reason) from error
        response = await _sliding_once(store, request)
        if connection_generation == store.database.connection_generation:
            return response


async def _sliding_once(store: StoreCore, request: PreparedRequest) -> PendingResponse:
    if expected := sliding_queries.expect_nothing(request, store.sliding):
        async with store.database.connection() as conn:
            if response := await sliding_queries.confirmed(conn, request, store.sliding, expected):
                return response
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        return await sliding_queries.poll(conn, request, store.sliding)


async def _pos(store: StoreCore, request: PreparedRequest, response: PendingResponse) -> str:
    """Write the new state of the connection, if there is one, and return the next `pos`."""
    nid, number = await _written(store, request, response)
    rooms = changed(response.sent, response.changes)
    store.sliding.connections.keep(nid, number, rooms)
    return PosToken(nid, number, response.upto, response.extensions_upto).print(store.deployment_id)


async def _written(
    store: StoreCore, request: PreparedRequest, response: PendingResponse
) -> tuple[int, int]:
    """Return the connection and the number of its state, after the write that it needs."""
    state, now = response.state, time.time_ns() // 1_000_000
    if state is None:
        most = store.database.config.sliding_connections_max
        nid = await store.database.run(
            lambda conn: open_connection(
                conn, request.key, response.changes, now_ms=now, connections_max=most
            )
        )
        return nid, 1
    if not response.changes:
        await _note_use(store, state, now)
        return state.nid, state.number
    number = await store.database.run(
        lambda conn: write_state(conn, state, response.changes, now_ms=now)
    )
    if number is None:
        raise UnknownPos(request.text, EXPIRED)
    return state.nid, number


async def _note_use(store: StoreCore, state: ConnectionState, now_ms: int) -> None:
    """Record, once an hour, that a connection is in use."""
    if state.used_ts < now_ms - USED_PRECISION_MS:
        async with store.database.connection() as conn:
            await note_use(conn, state.nid, now_ms)
