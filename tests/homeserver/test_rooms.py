"""The room directory, spaces, threads, single events and sliding sync of the example."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio

from tests.conftest import _fresh_database
from tests.homeserver.processes import ErrorResponse, User, example, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("homeserver"),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass
class Users:
    """Two users of one server."""

    alice: User
    bob: User


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def users(
    server_dsn: str,
    template_name: str,
    worker_id: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Users]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        dsn = await enter(_fresh_database(server_dsn, template_name, f"{worker_id}_rooms"))
        folder = tmp_path_factory.mktemp("rooms")
        server = await enter(running(example(folder / "ours", dsn)))
        session = await enter(aiohttp.ClientSession())
        yield Users(await server.user(session, "alice"), await server.user(session, "bob"))


async def space_of(user: User, name: str, *children: str, **given: Any) -> str:
    space = await user.create_room(name=name, creation_content={"type": "m.space"}, **given)
    for number, child in enumerate(children):
        content = {"via": [user.server], "order": str(number), "suggested": number == 0}
        await user.state(space, "m.space.child", content, child)
    return space


async def names(user: User, space: str, **query: Any) -> list[str]:
    found = await user.call("GET", f"/rooms/{space}/hierarchy", api=API_V1, **query)
    return [one["name"] for one in found["rooms"]]


API_V1 = "/_matrix/client/v1"


async def test_directory_and_spaces(users: Users) -> None:
    alice, bob = users.alice, users.bob
    deep = await alice.create_room(name="deep", preset="public_chat")
    listed = await alice.create_room(name="listed", preset="public_chat", visibility="public")
    secret = await alice.create_room(name="secret", preset="private_chat")
    inner = await space_of(alice, "inner", deep, preset="public_chat")
    space = await space_of(alice, "outer", inner, secret, listed, preset="public_chat")
    await alice.state(inner, "m.space.child", {"via": [alice.server]}, space)  # a circle

    assert await names(alice, space) == ["outer", "inner", "deep", "secret", "listed"]
    assert await names(bob, space) == ["outer", "inner", "deep", "listed"]
    assert await names(bob, space, max_depth=1) == ["outer", "inner", "listed"]
    assert await names(bob, space, suggested_only="true") == ["outer", "inner", "deep"]
    page = await bob.call("GET", f"/rooms/{space}/hierarchy", api=API_V1, limit=3)
    assert [one["room_id"] for one in page["rooms"]] == [space, inner, deep]
    assert [one["state_key"] for one in page["rooms"][0]["children_state"]] == [
        inner,
        secret,
        listed,
    ]
    assert await names(bob, space, limit=3, **{"from": page["next_batch"]}) == ["listed"]
    with pytest.raises(ErrorResponse, match="403"):
        await names(bob, secret)

    await bob.join(listed)
    [shown] = (await bob.call("GET", "/publicRooms"))["chunk"]
    assert (shown["room_id"], shown["name"]) == (listed, "listed")
    assert (shown["num_joined_members"], shown["join_rule"]) == (2, "public")
    assert (await bob.call("POST", "/publicRooms", {}))["chunk"] == [shown]

    other = await alice.create_room(name="other", preset="public_chat", visibility="public")
    page = await bob.call("GET", "/publicRooms", limit=1)
    rest = await bob.call("POST", "/publicRooms", {"since": page["next_batch"]})
    assert [one["room_id"] for one in (*page["chunk"], *rest["chunk"])] == [listed, other]
    assert "next_batch" not in rest


async def test_single_events(users: Users) -> None:
    alice, bob = users.alice, users.bob
    room = await alice.create_room(preset="private_chat")
    sent = await alice.send(room, "hello")
    path = f"/rooms/{room}/event/{quote(sent, safe='')}"
    event = await alice.call("GET", path)
    assert event["content"]["body"] == "hello"
    assert event["unsigned"]["membership"] == "join"
    assert event["unsigned"]["transaction_id"]
    for user, wrong in ((bob, path), (alice, path.replace(room, "!other:s"))):
        with pytest.raises(ErrorResponse, match="404"):
            await user.call("GET", wrong)


async def test_history_of_a_room_for_a_stranger(users: Users) -> None:
    """It is refused, unless anybody may read it."""
    alice, bob = users.alice, users.bob
    content = {"history_visibility": "world_readable"}
    anybody = {"type": "m.room.history_visibility", "state_key": "", "content": content}
    closed = await alice.create_room(preset="public_chat")
    readable = await alice.create_room(preset="public_chat", initial_state=[anybody])
    for room in (closed, readable):
        await alice.send(room, "hello")
    with pytest.raises(ErrorResponse, match="403"):
        await bob.call("GET", f"/rooms/{closed}/messages", dir="b")
    page = await bob.call("GET", f"/rooms/{readable}/messages", dir="b")
    assert page["chunk"][0]["content"]["body"] == "hello"
    page = await bob.call("GET", f"/rooms/{readable}/messages", dir="f", limit=100)
    at_end = {"from": page["end"], "dir": "f"}
    assert (await bob.call("GET", f"/rooms/{readable}/messages", **at_end))["chunk"] == []


async def test_state_that_is_no_visible_history(users: Users) -> None:
    """It is in the state of /context, and not an answer to /event."""
    alice, bob = users.alice, users.bob
    content = {"history_visibility": "joined"}
    hidden = {"type": "m.room.history_visibility", "state_key": "", "content": content}
    room = await alice.create_room(preset="public_chat", initial_state=[hidden], topic="early")
    await bob.join(room)
    sent = quote(await alice.send(room, "hello"), safe="")
    state = (await bob.call("GET", f"/rooms/{room}/context/{sent}"))["state"]
    [topic] = (one for one in state if one["type"] == "m.room.topic")
    path = f"/rooms/{room}/event/{quote(topic['event_id'], safe='')}"
    assert (await alice.call("GET", path))["content"]["topic"] == "early"
    with pytest.raises(ErrorResponse, match="404"):
        await bob.call("GET", path)


async def test_threads(users: Users) -> None:
    alice, bob = users.alice, users.bob
    room = await alice.create_room(preset="public_chat")
    await bob.join(room)
    roots = [await alice.send(room, f"root {number}") for number in range(3)]
    for number, (user, root) in enumerate([(alice, roots[1]), (bob, roots[0]), (alice, roots[2])]):
        relation = {"rel_type": "m.thread", "event_id": root}
        body = {"msgtype": "m.text", "body": f"reply {number}", "m.relates_to": relation}
        await user.call("PUT", f"/rooms/{room}/send/m.room.message/{number}", body)

    async def ids(user: User, **query: Any) -> list[str]:
        found = await user.call("GET", f"/rooms/{room}/threads", api=API_V1, **query)
        return [one["event_id"] for one in found["chunk"]]

    assert await ids(bob) == [roots[2], roots[0], roots[1]]
    assert await ids(bob, include="participated") == [roots[0]]
    page = await bob.call("GET", f"/rooms/{room}/threads", api=API_V1, limit=1)
    [root] = page["chunk"]
    thread = root["unsigned"]["m.relations"]["m.thread"]
    assert (thread["count"], thread["latest_event"]["content"]["body"]) == (1, "reply 2")
    assert await ids(bob, **{"from": page["next_batch"]}) == [roots[0], roots[1]]


async def test_a_user_who_left_gets_no_later_members(users: Users) -> None:
    alice, bob = users.alice, users.bob
    room = await alice.create_room(preset="public_chat")
    await bob.join(room)
    await bob.act(room, "leave")
    profile = {"membership": "join", "displayname": "later"}
    await alice.state(room, "m.room.member", profile, alice.user_id)
    found = (await bob.call("GET", f"/rooms/{room}/members"))["chunk"]
    assert "later" not in {one["content"].get("displayname") for one in found}
    found = (await alice.call("GET", f"/rooms/{room}/members"))["chunk"]
    assert {one["content"].get("displayname") for one in found} == {"later", None}


STABLE = "/_matrix/client/v4"
UNSTABLE = "/_matrix/client/unstable/org.matrix.simplified_msc3575"


async def test_both_forms_of_sliding_sync(users: Users) -> None:
    alice, bob = users.alice, users.bob
    room = await alice.create_room(name="The pantry", preset="public_chat")
    invited = await alice.create_room(preset="private_chat", invite=[bob.user_id])
    await bob.join(room)
    await alice.send(room, "hello")
    lists = {"all": {"timeline_limit": 1, "range": [0, 9], "required_state": {"include": [{}]}}}
    extensions = {"to_device": {"enabled": True}}
    body: dict[str, Any] = {"lists": lists, "extensions": extensions}
    stable = await bob.call("POST", "/sync", body, api=STABLE)
    known = (await bob.call("GET", "/sync"))["rooms"]
    assert stable["lists"] == {"all": {"count": len(known["join"]) + len(known["invite"])}}
    shown = stable["rooms"][room]
    assert [one["content"]["body"] for one in shown["timeline"]] == ["hello"]
    assert (shown["name"], shown["membership"], shown["joined_count"]) == ("The pantry", "join", 2)
    assert "m.room.power_levels" in {one["type"] for one in shown["required_state"]}
    assert stable["rooms"][invited]["membership"] == "invite"
    assert stable["rooms"][invited]["stripped_state"]

    await alice.call("PUT", "/sendToDevice/m.dummy/1", {"messages": {bob.user_id: {"*": {}}}})
    await alice.send(room, "again")
    later = await bob.call("POST", "/sync", body | {"pos": stable["pos"]}, api=STABLE)
    assert later["rooms"].keys() == {room}
    [message] = later["extensions"]["to_device"]["events"]
    assert message["sender"] == alice.user_id
    for since, expected in (
        (None, [message]),
        (later["extensions"]["to_device"]["next_batch"], []),
    ):
        given = {"extensions": {"to_device": {"enabled": True, "since": since}}}
        anew = await bob.call("POST", "/sync", given, api=STABLE)
        assert anew["extensions"]["to_device"]["events"] == expected

    old = {"all": {"timeline_limit": 1, "ranges": [[0, 0]], "required_state": [["*", "*"]]}}
    body = {"lists": old, "conn_id": "other"}
    unstable = await bob.call("POST", "/sync", body, api=UNSTABLE)
    assert unstable["rooms"].keys() == {room}
    assert [one["content"]["body"] for one in unstable["rooms"][room]["timeline"]] == ["again"]
    again = await bob.call("POST", "/sync", body, api=UNSTABLE, pos=unstable["pos"], timeout=10)
    assert again["rooms"] == {}
    with pytest.raises(ErrorResponse, match=r"400.*M_UNKNOWN_POS"):
        await bob.call("POST", "/sync", body, api=UNSTABLE, pos=stable["pos"])
    versions = await bob.call("GET", "/versions", api="/_matrix/client")
    assert versions["unstable_features"]["org.matrix.simplified_msc3575"]
