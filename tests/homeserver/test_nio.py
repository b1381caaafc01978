"""matrix-nio, a client that others wrote, on the example: two users chat."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import nio
import pytest
from nio.api import RelationshipType

import storage
from storage.maintenance.purge import purge_room
from tests.homeserver.processes import SECRET, ServerProcess, User, example, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("homeserver")]

Response = TypeVar("Response", bound=nio.Response)
PUBLIC = nio.RoomPreset.public_chat


@pytest.fixture
async def server(dsn: str, tmp_path: Path) -> AsyncIterator[ServerProcess]:
    async with running(example(tmp_path / "ours", dsn)) as started:
        yield started


@asynccontextmanager
async def logged_in(server: ServerProcess, name: str) -> AsyncIterator[nio.AsyncClient]:
    """A new user, with a client that has made its first sync."""
    client = nio.AsyncClient(server.url, f"@{name}:{server.name}")
    try:
        done(await client.register(name, SECRET), nio.RegisterResponse)
        done(await client.login(SECRET), nio.LoginResponse)
        await synced(client)
        yield client
    finally:
        await client.close()


def done(response: Any, kind: type[Response]) -> Response:
    assert isinstance(response, kind), response
    return response


async def synced(client: nio.AsyncClient, timeout_ms: int = 0) -> nio.SyncResponse:
    return done(await client.sync(timeout=timeout_ms), nio.SyncResponse)


def texts(room: nio.RoomInfo) -> list[str]:
    return [one.body for one in room.timeline.events if isinstance(one, nio.RoomMessageText)]


async def say(client: nio.AsyncClient, room: str, text: str, txn: str | None = None) -> str:
    content = {"msgtype": "m.text", "body": text}
    sent = await client.room_send(room, "m.room.message", content, tx_id=txn)
    return str(done(sent, nio.RoomSendResponse).event_id)


async def test_two_users_chat(server: ServerProcess) -> None:
    async with logged_in(server, "alice") as alice, logged_in(server, "bob") as bob:
        made = await alice.room_create(name="The pantry", preset=PUBLIC, invite=[bob.user_id])
        room = done(made, nio.RoomCreateResponse).room_id
        assert room in (await synced(bob)).rooms.invite
        done(await bob.join(room), nio.JoinResponse)
        assert room in (await synced(bob)).rooms.join
        assert bob.rooms[room].name == "The pantry"
        assert set(bob.rooms[room].users) == {alice.user_id, bob.user_id}
        await synced(alice)

        waiting = asyncio.create_task(synced(bob, 60_000))
        first = await say(alice, room, "hello", txn="t1")
        assert texts((await asyncio.wait_for(waiting, 60)).rooms.join[room]) == ["hello"]
        assert await say(alice, room, "hello", txn="t1") == first
        await _page(alice, bob, room)
        await _redact_and_react(alice, bob, room, first)
        await _leave_and_rejoin(alice, bob, room)


async def _page(alice: nio.AsyncClient, bob: nio.AsyncClient, room: str) -> None:
    """Bob pages back through what did not fit into his sync, and sees each message once."""
    for number in range(25):
        await say(alice, room, f"message {number}")
    latest = (await synced(bob)).rooms.join[room]
    assert latest.timeline.limited
    found, start = texts(latest)[::-1], latest.timeline.prev_batch
    while start:
        page = done(await bob.room_messages(room, start, limit=7), nio.RoomMessagesResponse)
        found += [one.body for one in page.chunk if isinstance(one, nio.RoomMessageText)]
        start = page.end
    assert found == [*(f"message {number}" for number in reversed(range(25))), "hello"]


async def _redact_and_react(
    alice: nio.AsyncClient, bob: nio.AsyncClient, room: str, target: str
) -> None:
    relation = {"m.relates_to": {"rel_type": "m.annotation", "event_id": target, "key": "+"}}
    sent = await bob.room_send(room, "m.reaction", relation)
    reaction = done(sent, nio.RoomSendResponse).event_id
    relations = alice.room_get_event_relations(room, target, RelationshipType.annotation)
    assert [one.event_id async for one in relations] == [reaction]
    done(await bob.update_receipt_marker(room, reaction), nio.UpdateReceiptMarkerResponse)

    refused = await bob.room_redact(room, target, "not mine")
    assert isinstance(refused, nio.RoomRedactError), refused
    assert refused.status_code == "M_FORBIDDEN"
    done(await alice.room_redact(room, target, "a slip"), nio.RoomRedactResponse)
    around = done(await bob.room_context(room, target, limit=4), nio.RoomContextResponse)
    assert isinstance(around.event, nio.RedactedEvent)
    assert (around.event.redacter, around.event.reason) == (alice.user_id, "a slip")
    assert len(around.events_before + around.events_after) >= 4
    news = (await synced(alice)).rooms.join[room]
    assert [type(one) for one in news.timeline.events[-2:]] == [
        nio.ReactionEvent,
        nio.RedactionEvent,
    ]
    [receipts] = news.ephemeral
    assert isinstance(receipts, nio.ReceiptEvent)
    assert [(one.event_id, one.user_id) for one in receipts.receipts] == [(reaction, bob.user_id)]


async def _leave_and_rejoin(alice: nio.AsyncClient, bob: nio.AsyncClient, room: str) -> None:
    await synced(bob)
    done(await bob.room_leave(room), nio.RoomLeaveResponse)
    assert room in (await synced(bob)).rooms.leave
    await say(alice, room, "while he is away")
    assert room not in (await synced(bob)).rooms.join
    refused = await bob.room_send(room, "m.room.message", {"msgtype": "m.text", "body": "?"})
    assert isinstance(refused, nio.RoomSendError)
    done(await bob.join(room), nio.JoinResponse)
    again = (await synced(bob)).rooms.join[room]
    assert "while he is away" in texts(again)
    assert set(bob.rooms[room].users) == {alice.user_id, bob.user_id}


async def test_facts_that_are_no_events(server: ServerProcess) -> None:
    async with aiohttp.ClientSession() as session, logged_in(server, "bob") as bob:
        alice = await server.user(session, "alice")
        room = await alice.create_room(preset="public_chat")
        own = f"/user/{alice.user_id}"
        await alice.call("PUT", f"{own}/account_data/m.direct", {bob.user_id: [room]})
        await alice.call("PUT", f"{own}/rooms/{room}/account_data/m.tag", {"tags": {}})
        answer = await alice.call("GET", "/sync")
        assert [one["type"] for one in answer["account_data"]["events"]] == ["m.direct"]
        of_room = answer["rooms"]["join"][room]["account_data"]["events"]
        assert of_room == [{"type": "m.tag", "content": {"tags": {}}}]
        assert await alice.call("GET", f"{own}/rooms/{room}/account_data/m.tag") == {"tags": {}}

        message = nio.ToDeviceMessage("m.room_key_request", alice.user_id, "*", {"a": 1})
        done(await bob.to_device(message), nio.ToDeviceResponse)
        answer = await alice.call("GET", "/sync", since=answer["next_batch"], timeout=60_000)
        [got] = answer["to_device"]["events"]
        assert got["sender"] == bob.user_id
        answer = await alice.call("GET", "/sync", since=answer["next_batch"])
        assert answer["to_device"]["events"] == []


async def test_what_is_refused(server: ServerProcess) -> None:
    async with aiohttp.ClientSession() as session:
        alice, bob = [await server.user(session, name) for name in ("alice", "bob")]
        room = await alice.create_room()
        await alice.send(room, "private")
        for path in ("/state", "/members", "/messages"):
            assert await status(bob, "GET", f"/rooms/{room}{path}") == 403
        assert await status(bob, "PUT", f"/rooms/{room}/send/m.room.message/1", {}) == 403
        assert await status(bob, "POST", f"/join/{room}", {}) == 403
        assert await status(alice, "GET", "/nothing") == 404
        assert await status(User(session, bob.url, bob.user_id, "x"), "GET", "/sync") == 401
        assert await status(alice, "GET", f"/user/{bob.user_id}/account_data/m.direct") == 403


async def test_a_browser_may_send_requests(server: ServerProcess) -> None:
    async with aiohttp.ClientSession() as session:
        for method, expected in (("OPTIONS", 200), ("GET", 401)):
            url = f"{server.url}/_matrix/client/v3/sync"
            async with session.request(method, url) as response:
                assert response.status == expected
                assert response.headers["Access-Control-Allow-Origin"] == "*"
                assert "Authorization" in response.headers["Access-Control-Allow-Headers"]


async def test_requests_of_servers_must_be_signed(server: ServerProcess) -> None:
    forged = f'X-Matrix origin="{server.name}",key="ed25519:a1",sig="AAAA"'
    async with aiohttp.ClientSession() as session:
        for header in ("", "X-Matrix origin=a", forged):
            url = f"{server.url}/_matrix/federation/v1/event/$one"
            async with session.get(url, headers={"Authorization": header}) as response:
                assert (response.status, (await response.json())["errcode"]) == (
                    401,
                    "M_UNAUTHORIZED",
                )


async def status(user: User, method: str, path: str, body: Any = None) -> int:
    """The status of a response."""
    url, headers = user.url + "/_matrix/client/v3" + path, {"Authorization": f"Bearer {user.token}"}
    async with user.session.request(method, url, json=body, headers=headers) as response:
        return response.status


async def test_a_client_goes_on_after_a_purge(server: ServerProcess, dsn: str) -> None:
    """Its token is from before the purge. It would send it again and again."""
    async with logged_in(server, "alice") as alice:
        made = await alice.room_create(name="The pantry", preset=PUBLIC)
        room = done(made, nio.RoomCreateResponse).room_id
        await synced(alice)
        made = await alice.room_create(name="The cellar", preset=PUBLIC)
        gone = done(made, nio.RoomCreateResponse).room_id
        async with storage.open(dsn, server_name=server.name, instance_name="purge") as store:
            await purge_room(store.database, gone, server_name=server.name, force=True)
        for text in ("after", "once more"):
            await say(alice, room, text)
            assert texts((await synced(alice)).rooms.join[room])[-1:] == [text]
