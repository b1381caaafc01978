"""New events, by server-sent events: rooms with news, and whether the database answers.

    id: s…    event: news        data: {"rooms": ["!room:example.org"]}
              event: database    data: {"up": false}

The notifier of the store wakes the stream: nothing is polled for news. A stream begins at the
position of its page (``since``), or where a broken one ended (``Last-Event-ID``). So it also has
what arrived before it could begin. Every few seconds the stream asks whether the database answers,
so that a page can say that it is dead, and load again when it is back. A stream has no content of
events.
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
from storage.inspector.visit import EVENTS, Page, Visit
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
    given = visit.request.headers.get("Last-Event-ID") or visit.text("since")
    since = visit.position if given is None else visit.read_position(given)
    body = _stream(visit, rooms, since)
    return StreamingResponse(body, 200, data_headers(), "text/event-stream")


LIVE: Final[Mapping[str, Page]] = {"/live": live}


async def _stream(
    visit: Visit, rooms: Sequence[RoomId], since: VectorPosition
) -> AsyncIterator[bytes]:
    inspector = visit.inspector
    inspector.streams += 1
    try:
        yield b"retry: 2000\n\n"
        up = True
        while not inspector.closing.is_set():
            has_news = await _wait(visit, rooms, since)
            if has_news:
                token, since = since, visit.position
                changed = [room for room in rooms if _has_changed(visit.store, room, token)]
                news = _event("news", {"rooms": changed or list(rooms)})
                yield f"id: {visit.print_position(since)}\n".encode() + news
            was_up, up = up, await _is_up(visit.store)
            yield _event("database", {"up": up}) if up != was_up else b": beat\n\n"
    except StorageClosed:
        return
    finally:
        inspector.streams -= 1


async def _wait(visit: Visit, rooms: Sequence[RoomId], since: VectorPosition) -> bool:
    """Wait for news of a room, for at most a beat, or until the inspector closes."""
    after = SyncToken.of({EVENTS: since})
    news = asyncio.ensure_future(visit.store.notifier.wait(rooms, after=after, timeout_ms=BEAT_MS))
    closing = asyncio.ensure_future(visit.inspector.closing.wait())
    try:
        await asyncio.wait({news, closing}, return_when=asyncio.FIRST_COMPLETED)
        return news.done() and news.result()
    finally:
        for one in (news, closing):
            one.cancel()
        await asyncio.gather(news, closing, return_exceptions=True)


def _has_changed(store: Store, room_id: RoomId, since: VectorPosition) -> bool:
    return store.notifier.was_told([room_id], {EVENTS: since})


async def _is_up(store: Store) -> bool:
    """Return whether the database answers."""
    try:
        await store.reads.run(lambda conn: conn.fetchval(SQL_ALIVE))
    except StorageError:
        return False
    return True


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
