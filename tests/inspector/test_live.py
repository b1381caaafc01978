"""Live pages: new events arrive, a dead database is a message, and pages recover by themselves."""

import asyncio
import re
from collections.abc import AsyncIterator
from urllib.parse import urlencode

import pytest

import storage
from storage import Config, Store
from storage.testing import RoomBuilder
from tests.database.test_roles import Logins, logins
from tests.inspector.browser import Browser, in_browser
from tests.inspector.served import Served, served
from tests.maintenance.rooms import SERVER
from tests.mortal import Mortal, mortal_postgres

ALICE = f"@alice:{SERVER}"
__all__ = ["logins"]  # a fixture


def started(seed: int = 1) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed)
    room.start(ALICE)
    return room


async def stream_of(site: Served, *rooms: str, since: str | None = None) -> AsyncIterator[str]:
    """Yield the names of the events of a stream, and its comments."""
    given = [("room", room) for room in rooms] + ([("since", since)] if since else [])
    address = f"{site.url}/live?{urlencode(given)}"
    async with site.session.get(address) as answer:
        assert answer.content_type == "text/event-stream"
        yield "open"
        async for line in answer.content:
            text = line.decode().strip()
            if text.startswith(("event:", "data:", ":")):
                yield text


async def next_event(stream: AsyncIterator[str]) -> tuple[str, str]:
    """Return the next event of a stream and its data; comments are left out."""
    while (line := await anext(stream)) == ": beat":
        continue
    return line, await anext(stream)


async def test_a_stream_has_news_of_its_rooms_only(store: Store, site: Served) -> None:
    mine, other = started(1), started(2)
    await store.append(mine.pdus)
    await store.append(other.pdus)
    stream = stream_of(site, mine.room_id)
    assert await anext(stream) == "open"
    assert await anext(stream) == ": beat"  # nothing is new at the beginning
    await store.append([other.message(ALICE).pdu])
    await store.append([mine.message(ALICE).pdu])
    data = f'data: {{"rooms": ["{mine.room_id}"]}}'
    assert await next_event(stream) == ("event: news", data)
    assert site.inspector.streams == 1
    await stream.aclose()  # type: ignore[attr-defined]  # it is a generator


async def test_a_stream_begins_where_its_page_was_read(store: Store, site: Served) -> None:
    """News between a page and its stream is not lost, nor while a page is hidden."""
    room, other = started(1), started(2)
    await store.append(room.pdus)
    since = await now(site, room)
    await store.append([room.message(ALICE).pdu])
    await store.append(other.pdus)
    data = f'data: {{"rooms": ["{room.room_id}"]}}'
    stream = stream_of(site, room.room_id, since=since)
    assert await anext(stream) == "open"
    assert await next_event(stream) == ("event: news", data)
    assert await anext(stream) == ": beat"  # it is news once
    quiet = stream_of(site, other.room_id, since=await now(site, room))
    assert [await anext(quiet), await anext(quiet)] == ["open", ": beat"]
    assert (await site.get("/live", room=room.room_id, since="x")).status == 400


async def now(site: Served, room: RoomBuilder) -> str:
    """Return the position of a page that is read now."""
    page = await site.get("/room", id=room.room_id)
    [since] = re.findall('data-since="([^"]+)"', page.text)
    return str(since)


async def test_a_stream_of_too_many_rooms_is_refused(site: Served) -> None:
    rooms = "&".join(f"room=!{number}:a" for number in range(101))
    assert (await site.send("GET", f"{site.url}/live?{rooms}")).status == 400
    assert (await site.send("GET", f"{site.url}/live?room=x")).status == 400


async def test_streams_end_with_the_inspector(store: Store) -> None:
    room = started()
    await store.append(room.pdus)
    async with served(store) as site:
        stream = stream_of(site, room.room_id)
        assert await anext(stream) == "open"
        await site.inspector.close()
        rest = [line async for line in stream]
        assert {line for line in rest if line != ": beat"} == set()


@in_browser
async def test_new_events_appear(store: Store, site: Served, browser: Browser) -> None:
    room = started()
    await store.append(room.pdus)
    await browser.open(site.address("/room", id=room.room_id))
    await browser.wait("return document.body.dataset.listening")
    new = room.message(ALICE)
    await store.append([new.pdu])
    await browser.wait(
        "return document.querySelector('#graph .row').dataset.event === given[0]",
        new.event_id,
    )
    assert await browser.faults() == []
    await browser.open(site.url)
    await browser.wait("return document.body.dataset.listening")
    await store.append([room.message(ALICE).pdu])
    await browser.wait("return document.querySelector('tr.fresh')")


@in_browser
async def test_a_scrolled_graph_stays(store: Store, site: Served, browser: Browser) -> None:
    room = started()
    for _ in range(150):
        room.message(ALICE)
    await store.append(room.pdus)
    await browser.open(site.address("/room", id=room.room_id))
    await browser.wait("return document.body.dataset.listening")
    await browser.run("document.getElementById('graph').scrollTop = 1500")
    new = room.message(ALICE)
    await store.append([new.pdu])
    await browser.wait("return !document.getElementById('newest').hidden")
    assert await browser.run("return document.getElementById('graph').scrollTop") == 1500
    await browser.run("document.getElementById('newest').click()")
    await browser.wait(
        "return document.querySelector('#graph .row').dataset.event === given[0]",
        new.event_id,
    )


@pytest.fixture
async def mortal() -> AsyncIterator[tuple[Mortal, Store]]:
    """A store on a Postgres that a test may stop."""
    with mortal_postgres() as server:
        dsn = await asyncio.to_thread(server.start)
        config = Config(pool_acquire_timeout_ms=2_000, connect_timeout_ms=2_000)
        async with storage.open(dsn, server_name=SERVER, migrate=True, config=config) as store:
            yield server, store
            await asyncio.to_thread(server.start)  # a store closes with its database


@in_browser
async def test_a_dead_database(mortal: tuple[Mortal, Store], browser: Browser) -> None:
    """A message, then recovery: by a browser that nobody touches, and by a stream."""
    server, store = mortal
    room = started()
    await store.append(room.pdus)
    async with served(store) as site:
        stream = stream_of(site, room.room_id)
        assert await anext(stream) == "open"
        await browser.open(site.address("/room", id=room.room_id))
        await browser.wait("return document.body.dataset.listening")
        await asyncio.to_thread(server.stop)
        await browser.wait("return !document.getElementById('database').hidden")
        assert await next_event(stream) == ("event: database", 'data: {"up": false}')
        await browser.open(site.address("/event", id=room.events[-1].event_id))
        await browser.wait(
            "return document.querySelector('#failure')?.dataset.status === '503'"
            " && document.querySelector('h1').textContent === 'The database does not answer'"
        )
        answer = await site.get("/room", id=room.room_id)
        assert (answer.status, answer.headers["Refresh"]) == (503, "2")
        await asyncio.to_thread(server.start)
        await browser.wait("return document.getElementById('event')")
        assert await browser.texts("#failure") == []
        assert await next_event(stream) == ("event: database", 'data: {"up": true}')
        answer = await site.get("/room", id=room.room_id)
        assert answer.status == 200
        assert "Refresh" not in answer.headers


async def test_a_role_that_only_reads(store: Store, logins: Logins) -> None:
    """All pages work in transactions that only read, as on a standby, and for the reader's role."""
    room = started()
    await store.append(room.pdus)
    event_id = room.events[-1].event_id
    async with storage.open(logins.reader, read_only=True) as reader, served(reader) as site:
        pages: list[tuple[str, dict[str, str]]] = [
            ("/", {}),
            ("/room", {"id": room.room_id}),
            ("/room/changes", {"id": room.room_id}),
            ("/room/gaps", {"id": room.room_id}),
            ("/room/growth", {"id": room.room_id}),
            ("/room/outliers", {"id": room.room_id}),
            ("/event", {"id": event_id, "content": "1"}),
            ("/why", {"event": event_id, "reader": ALICE}),
            ("/state", {"room": room.room_id}),
            ("/resolution", {"room": room.room_id}),
            ("/user", {"id": ALICE, "sync": "1"}),
            ("/growth", {}),
            ("/streams", {}),
            ("/operations", {}),
            ("/explain", {"query": "sync", "user": ALICE}),
            ("/search", {"q": "nothing"}),
        ]
        for path, given in pages:
            answer = await site.get(path, **given)
            assert answer.status == 200, (path, answer.text)
        stream = stream_of(site, room.room_id)
        assert await anext(stream) == "open"
        assert await anext(stream) == ": beat"
        await store.append([room.message(ALICE).pdu])
        assert (await next_event(stream))[0] == "event: news"
