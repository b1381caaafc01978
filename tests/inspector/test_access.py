"""Who gets in, what is logged, and the headers of every answer."""

import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import HTTPConnection

import storage
from storage import InputError, Store
from storage.inspector import Viewer, application
from storage.inspector.access import TokenAccess
from storage.inspector.application import bound, hosts_of
from storage.inspector.pages import PAGES
from storage.testing import RoomBuilder
from tests.inspector.served import Served, mounted, served
from tests.maintenance.rooms import SERVER

ALICE = f"@alice:{SERVER}"
LOOKS = "storage.inspector.rendering"


@pytest.fixture
async def room(store: Store) -> RoomBuilder:
    made = RoomBuilder("11", seed=1)
    made.start(ALICE, name="The secret garden")
    made.message(ALICE, "a secret")
    await store.append(made.pdus)
    return made


@pytest.fixture
async def guarded(store: Store) -> AsyncIterator[tuple[Served, TokenAccess]]:
    """An inspector behind a token."""
    access = TokenAccess(Viewer("token"), port=1)
    async with served(store, access=access) as running:
        yield running, access


async def test_without_the_token_nothing_is_shown(
    guarded: tuple[Served, TokenAccess], room: RoomBuilder
) -> None:
    site, access = guarded
    for path in [*PAGES, "/live", "/actions"]:
        for token in (None, "", "wrong", access.token[:-1]):
            given = {} if token is None else {"token": token}
            answer = await site.get(path, id=room.room_id, **given)
            assert answer.status == (404 if path == "/actions" else 403), path
            assert room.room_id not in answer.text
    cookie = {"room-storage-inspector-1": "wrong"}
    assert (await site.send("GET", site.url + "/", cookies=cookie)).status == 403


async def test_the_token_becomes_a_cookie_and_leaves_the_address(
    guarded: tuple[Served, TokenAccess],
) -> None:
    site, access = guarded
    answer = await site.get("/room", id="!a b", token=access.token)
    assert answer.status == 303
    assert answer.headers["Location"] == "/room?id=%21a+b"
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert (await site.get("/")).status == 200  # the session keeps the cookie


async def test_another_host_is_refused(store: Store) -> None:
    listening = bound("127.0.0.1", 0)
    port = listening.getsockname()[1]
    listening.close()
    access = TokenAccess(Viewer("token"), port=port, hosts=hosts_of("127.0.0.1", port))
    async with served(store, access=access) as site:
        url = site.address("/", token=access.token)
        refused = await site.send("GET", url, headers={"Host": "evil.test"})
        assert refused.status == 403
        accepted = await site.send("GET", url, headers={"Host": f"localhost:{port}"})
        assert accepted.status == 303


def headers_of(path: str, answer_headers: object) -> None:
    headers = dict(answer_headers)  # type: ignore[call-overload]
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'"), path
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store" or path.startswith("/static/")
    assert "Server" not in headers


async def test_every_answer_has_the_headers(site: Served, room: RoomBuilder) -> None:
    event_id = room.events[-1].event_id
    seen = set()
    for path in PAGES:
        answer = await site.get(path, id=room.room_id, event=event_id, query="rooms-of", content=1)
        headers_of(path, answer.headers)
        if answer.headers["Content-Type"].startswith("text/html"):
            [nonce] = set(re.findall(r'nonce="([^"]+)"', answer.text)) or {""}
            assert not nonce or f"'nonce-{nonce}'" in answer.headers["Content-Security-Policy"]
            assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", answer.text)
            seen.add(nonce)
    assert len(seen) > len(PAGES) / 2  # a new one for each answer
    page = (await site.get("/")).text
    for address in re.findall(r'(?:src|href)="([^"]*/static/[^"]+)"', page):
        answer = await site.send("GET", site.url + address)
        assert answer.status == 200
        headers_of(address[address.index("/static") :], answer.headers)
    for missing in ("/static/x/nothing.js", "/static/x/../access.py", "/nothing"):
        assert (await site.send("GET", site.url + missing)).status == 404


async def test_only_get_is_answered(site: Served, room: RoomBuilder) -> None:
    for path in [*PAGES, "/actions", "/actions/run", "/actions/confirm", "/live"]:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await site.send(method, site.address(path, id=room.room_id), data={"a": "b"})
            assert answer.status in {404, 405}, (method, path)


async def test_content_is_hidden_until_asked_for_and_each_look_is_logged(
    site: Served, room: RoomBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOOKS)
    message = room.events[-1].event_id
    pages: list[tuple[str, dict[str, Any]]] = [
        ("/", {}),
        ("/room", {"id": room.room_id}),
        ("/room/rows", {"id": room.room_id}),
        ("/event", {"id": message}),
        ("/state", {"room": room.room_id}),
        ("/state", {"event": message}),
        ("/user", {"id": ALICE, "sync": 1}),
        ("/search", {"q": "!"}),
        ("/room/changes", {"id": room.room_id}),
    ]
    for path, given in pages:
        caplog.clear()
        hidden = await site.get(path, **given)
        assert hidden.status in {200, 303}
        assert "secret" not in hidden.text, path
        assert not any(getattr(record, "content", False) for record in caplog.records)
        [record] = [one for one in caplog.records if one.name == LOOKS]
        assert record.message == f"tester looks at {path}"
        assert record.viewer == "tester"  # type: ignore[attr-defined]
        if path in {"/", "/room", "/room/rows", "/event", "/state"}:
            shown = await site.get(path, **given, content=1)
            expected = "a secret" if "event" in path or "room" in path else "The secret garden"
            assert expected in shown.text, path
            looks = [one for one in caplog.records if getattr(one, "content", False)]
            assert [one.message for one in looks] == [
                f"tester reads the content of events at {path}"
            ]


async def test_bytes_are_a_file_and_count_as_content(
    site: Served, room: RoomBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOOKS)
    event = room.events[-1]
    assert (await site.get("/event/raw", id=event.event_id)).status == 403
    answer = await site.get("/event/raw", id=event.event_id, content=1)
    assert answer.text.encode() == event.pdu
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="event.json"'
    assert "sandbox" in answer.headers["Content-Security-Policy"]
    assert any(getattr(record, "content", False) for record in caplog.records)


async def test_a_hostile_id_writes_no_line_of_the_log(
    site: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOOKS)
    await site.get("/room", id="!a\n2026 INFO storage: forged\u202e")
    [record] = [one for one in caplog.records if one.name == LOOKS]
    assert record.parameters == "id=!a⟦U+000A⟧2026 INFO storage: forged⟦U+202E⟧"  # type: ignore[attr-defined]


async def test_the_homeserver_decides(store: Store, room: RoomBuilder) -> None:
    """Mounted below a path: by the header of a proxy that has authenticated the operator."""

    async def access(connection: HTTPConnection) -> Viewer | None:
        name = connection.headers.get("x-operator")
        return None if name is None else Viewer(name, content=name == "chief")

    async with mounted(store, "/admin/rooms", access) as site:
        page = site.address("/admin/rooms/room", id=room.room_id)
        assert (await site.send("GET", page)).status == 403
        clerk = await site.send("GET", page, headers={"X-Operator": "clerk"})
        assert clerk.status == 200
        assert "Show content" not in clerk.text
        addresses = re.findall(r'(?:href|src|action|data-live|data-rows)="(/[^"]*)"', clerk.text)
        assert addresses
        assert [one for one in addresses if not one.startswith("/admin/rooms/")] == []
        refused = await site.send("GET", f"{page}&content=1", headers={"X-Operator": "clerk"})
        assert refused.status == 403
        assert "a secret" not in refused.text
        chief = await site.send("GET", f"{page}&content=1", headers={"X-Operator": "chief"})
        assert "a secret" in chief.text
        [script] = [one for one in addresses if one.endswith("/inspector.js")]
        assert (await site.send("GET", site.url + script)).status == 200


async def nobody(_: HTTPConnection) -> Viewer | None:
    return None


async def test_read_write_needs_a_store_that_writes(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER):
        pass
    async with storage.open(dsn, read_only=True) as reader:
        application(reader, access=nobody)
        with pytest.raises(InputError, match="opened to write"):
            application(reader, access=nobody, read_write=True)
