"""New events, by server-sent events: rooms with news, and whether the database answers.

    event: news        data: {"rooms": ["!room:example.org"]}
    event: database    data: {"up": false}

The notifier of the store wakes the stream: nothing is polled for news. It has no event that arrived
before the stream began. Every few seconds the stream asks whether the database answers, so that a
page can say that it is dead, and load again when it is back. A stream has no content of events.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, LiteralString

from starlette.responses import Response, StreamingResponse

from storage import arguments as args
from storage.errors import InputError, StorageClosed, StorageError
from storage.ids import RoomId
from storage.inspector.headers import data_headers
from storage.inspector.visit import Page, Visit
from storage.store.facade import Store
from storage.streams import SyncToken, VectorPosition

ROOMS_MAX: Final = 100
STREAMS_MAX: Final = 64
BEAT_MS: Final = 2_000
"""Longest time between two looks at the database."""

SQL_ALIVE: Final[LiteralString] = "VALUES (1)"


async def live(visit: Visit) -> Response:
    """Return a stream of news of the rooms in the parameters ``room``."""
    inspector = visit.inspector
    rooms = [args.room(one) for one in visit.request.query_params.getlist("room")]
    if len(rooms) > ROOMS_MAX:
        raise InputError(f"a live page has at most {ROOMS_MAX} rooms")
    if inspector.streams >= STREAMS_MAX:
        return Response("too many live pages\n", 503, data_headers(), "text/plain")
    body = _stream(visit, rooms)
    return StreamingResponse(body, 200, data_headers(), "text/event-stream")


LIVE: Final[Mapping[str, Page]] = {"/live": live}


async def _stream(visit: Visit, rooms: Sequence[RoomId]) -> AsyncIterator[bytes]:
    inspector = visit.inspector
    inspector.streams += 1
    try:
        yield b"retry: 2000\n\n"
        up = True
        since = _now(visit.store)
        while not inspector.closing.is_set():
            has_news = await _wait(visit, rooms, since)
            if has_news:
                token, since = since, _now(visit.store)
                changed = [room for room in rooms if _has_changed(visit.store, room, token)]
                yield _event("news", {"rooms": changed or list(rooms)})
            was_up, up = up, await _is_up(visit.store)
            yield _event("database", {"up": up}) if up != was_up else b": beat\n\n"
    except StorageClosed:
        return
    finally:
        inspector.streams -= 1


async def _wait(visit: Visit, rooms: Sequence[RoomId], since: VectorPosition) -> bool:
    """Wait for news of a room, for at most a beat, or until the inspector closes."""
    after = SyncToken.of({"events": since})
    news = asyncio.ensure_future(visit.store.notifier.wait(rooms, after=after, timeout_ms=BEAT_MS))
    closing = asyncio.ensure_future(visit.inspector.closing.wait())
    try:
        await asyncio.wait({news, closing}, return_when=asyncio.FIRST_COMPLETED)
        return news.done() and news.result()
    finally:
        for one in (news, closing):
            one.cancel()
        await asyncio.gather(news, closing, return_exceptions=True)


def _now(store: Store) -> VectorPosition:
    return store.notifier.position("events")


def _has_changed(store: Store, room_id: RoomId, since: VectorPosition) -> bool:
    return store.notifier.was_told([room_id], {"events": since})


async def _is_up(store: Store) -> bool:
    """Return whether the database answers."""
    try:
        await store.reads.run(lambda conn: conn.fetchval(SQL_ALIVE))
    except StorageError:
        return False
    return True


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
