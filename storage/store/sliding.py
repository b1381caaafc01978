"""Sliding sync: read what a client wants and does not have, and wait where nothing is new."""

import time
from dataclasses import replace
from time import perf_counter

from storage import arguments as args
from storage.errors import ResyncNeeded, UnknownPos
from storage.observability.instrument import measured
from storage.persistent_map import changed
from storage.queries.sliding import response as queries
from storage.queries.sliding.connection import ConnectionState
from storage.queries.sliding.connection_writes import (
    USED_PRECISION_MS,
    note_use,
    open_connection,
    write_state,
)
from storage.queries.sliding.prepared import PreparedRequest
from storage.queries.sliding.response import EXPIRED, Draft
from storage.queries.sliding.types import SlidingSync, SlidingSyncRequest
from storage.queries.sync import Look, until_news
from storage.queries.sync.positions import ACCOUNT_DATA
from storage.store.core import StoreCore
from storage.streams.tokens import PosToken


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
        draft = await until_news(
            lambda: _look(store, prepared, waits=waits),
            store.notifier,
            lambda one: one.upto,
            prepared.upto,
            timeout_ms=wait_ms if waits else 0,
            ending=prepared.defined,
            included=sorted({ACCOUNT_DATA, *prepared.body.extensions}),
        )
        return replace(draft.response(await _pos(store, prepared, draft)), ignored=ignored)


async def _look(store: StoreCore, request: PreparedRequest, *, waits: bool) -> Look[Draft]:
    """Read once what is new, and time it. A request that waits looks several times."""
    began = perf_counter()
    try:
        draft = await _look_within_an_era(store, request)
    finally:
        kind = "sliding_sync" if request.pos is not None else "first_sliding_sync"
        store.measures.call(kind).add(perf_counter() - began)
    return Look(draft, draft.keys if waits and draft.is_empty else ())


async def _look_within_an_era(store: StoreCore, request: PreparedRequest) -> Draft:
    """Look again if the database was replaced meanwhile, so that one database answers.

    `UnknownPos` if the `pos` covers positions that the present database has lost.
    """
    while True:
        era = store.database.era
        if store.streams.lost and request.upto is not None:
            try:
                store.streams.refuse_lost(request.text, request.upto)
            except ResyncNeeded as error:
                raise UnknownPos(request.text, error.reason) from error
        draft = await _look_once(store, request)
        if era == store.database.era:
            return draft


async def _look_once(store: StoreCore, request: PreparedRequest) -> Draft:
    if expected := queries.expect_nothing(request, store.sliding):
        async with store.database.connection() as conn:
            if draft := await queries.confirmed(conn, request, store.sliding, expected):
                return draft
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        return await queries.look(conn, request, store.sliding)


async def _pos(store: StoreCore, request: PreparedRequest, draft: Draft) -> str:
    """Write the new state of the connection, if there is one, and return the next `pos`."""
    nid, number = await _written(store, request, draft)
    rooms = changed(draft.sent, draft.changes)
    store.sliding.connections.keep(nid, number, rooms)
    return PosToken(nid, number, draft.upto, draft.extensions_upto).print(store.deployment_id)


async def _written(store: StoreCore, request: PreparedRequest, draft: Draft) -> tuple[int, int]:
    """Return the connection and the number of its state, after the write that it needs."""
    state, now = draft.state, time.time_ns() // 1_000_000
    if state is None:
        most = store.database.config.sliding_connections_max
        nid = await store.database.run(
            lambda conn: open_connection(
                conn, request.key, draft.changes, now_ms=now, connections_max=most
            )
        )
        return nid, 1
    if not draft.changes:
        await _note_use(store, state, now)
        return state.nid, state.number
    number = await store.database.run(
        lambda conn: write_state(conn, state, draft.changes, now_ms=now)
    )
    if number is None:
        raise UnknownPos(request.text, EXPIRED)
    return state.nid, number


async def _note_use(store: StoreCore, state: ConnectionState, now_ms: int) -> None:
    """Record, once an hour, that a connection is in use."""
    if state.used_ts < now_ms - USED_PRECISION_MS:
        async with store.database.connection() as conn:
            await note_use(conn, state.nid, now_ms)
