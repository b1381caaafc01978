"""Requests over HTTP: paths, bodies, signatures, and responses that are errors."""

import time
from collections.abc import Mapping
from typing import Any, Final

import pytest

from storage import EventId, InvalidSignature, RoomId, ServerName, UserId
from storage.federation import HttpRemote, JsonObject, RemoteError, published_keys
from storage.federation.requests import read_authorization
from storage.testing import KEY_ID, signing_key
from tests.federation.peers import Homeserver

Json = dict[str, Any]
SERVER, ROOM = ServerName("s2.test"), RoomId("!room/a:s1.test")
EVENT, USER = EventId("$a/b"), UserId("@user:s1.test")
IN_PATH: Final = {ROOM: "%21room%2Fa%3As1.test", EVENT: "%24a%2Fb", USER: "%40user%3As1.test"}


class OtherEnd:
    """Another server: what was sent to it, and its response."""

    def __init__(self) -> None:
        self.sent: tuple[str, str, Mapping[str, str], JsonObject | None] = ("", "", {}, None)
        self.response: tuple[int, Any] = 200, {"pdus": []}
        self.responses: list[tuple[int, Any]] = []
        """Others, which come first."""
        self.remote = HttpRemote("s1.test", signing_key("s1.test"), self.request)

    async def request(
        self,
        server: str,
        method: str,
        uri: str,
        headers: Mapping[str, str],
        body: JsonObject | None,
    ) -> tuple[int, Any]:
        assert server == SERVER
        self.sent = method, uri, headers, body
        return self.responses.pop(0) if self.responses else self.response


async def test_each_request_has_the_path_of_the_specification() -> None:
    server = OtherEnd()
    remote, pdu = server.remote, {"type": "m.room.member"}
    room, event, user = IN_PATH.values()
    between = {"earliest": [EVENT], "latest": [], "limit": 7, "min_depth": 1}
    body = {"earliest_events": [EVENT], "latest_events": [], "limit": 7, "min_depth": 1}
    expected = (
        (remote.event(SERVER, EVENT), "GET", f"v1/event/{event}", None),
        (remote.state_ids(SERVER, ROOM, EVENT), "GET", f"v1/state_ids/{room}?event_id={event}", 0),
        (remote.state(SERVER, ROOM, EVENT), "GET", f"v1/state/{room}?event_id={event}", None),
        (
            remote.backfill(SERVER, ROOM, [EVENT, EventId("$b"), EVENT], limit=3),
            "GET",
            f"v1/backfill/{room}?v={event}&v=%24b&limit=3",
            None,
        ),
        (remote.event_auth(SERVER, ROOM, EVENT), "GET", f"v1/event_auth/{room}/{event}", None),
        (
            remote.get_missing_events(SERVER, ROOM, **between),  # type: ignore[arg-type]
            "POST",
            f"v1/get_missing_events/{room}",
            body,
        ),
        (
            remote.make_join(SERVER, ROOM, USER, versions=["11", "12"]),
            "GET",
            f"v1/make_join/{room}/{user}?ver=11&ver=12",
            None,
        ),
        (
            remote.make_knock(SERVER, ROOM, USER, versions=["12"]),
            "GET",
            f"v1/make_knock/{room}/{user}?ver=12",
            None,
        ),
        (remote.make_leave(SERVER, ROOM, USER), "GET", f"v1/make_leave/{room}/{user}", None),
        (remote.send_join(SERVER, ROOM, EVENT, pdu), "PUT", f"v2/send_join/{room}/{event}", pdu),
        (remote.send_knock(SERVER, ROOM, EVENT, pdu), "PUT", f"v1/send_knock/{room}/{event}", pdu),
        (remote.send_leave(SERVER, ROOM, EVENT, pdu), "PUT", f"v2/send_leave/{room}/{event}", pdu),
        (remote.invite(SERVER, ROOM, EVENT, pdu), "PUT", f"v2/invite/{room}/{event}", pdu),
    )
    for sending, method, path, content in expected:
        await sending
        found_method, uri, headers, found = server.sent
        assert (found_method, uri) == (method, f"/_matrix/federation/{path}")
        assert found == (content or None)
        assert headers["Authorization"].startswith("X-Matrix origin=")
    await remote.server_keys(SERVER)
    assert server.sent == ("GET", "/_matrix/key/v2/server", {}, None)


async def test_a_transaction_has_the_events_as_json(two: list[Homeserver]) -> None:
    one, _ = two
    room_id = await one.store.create_room(one.user())
    said = await one.say(room_id, "hello")
    events = await one.store.events(await one.store.forward_extremities(room_id))
    server = OtherEnd()
    await server.remote.send(SERVER, "5", list(events.values()))
    method, uri, _, body = server.sent
    assert (method, uri) == ("PUT", "/_matrix/federation/v1/send/5")
    assert body is not None
    assert (body["origin"], body["pdus"]) == ("s1.test", [said])


@pytest.mark.parametrize(
    "response, status, errcode",
    [
        ((403, {"errcode": "M_FORBIDDEN", "error": "no"}), 403, "M_FORBIDDEN"),
        ((500, "<html>"), 500, None),
        ((404, {"errcode": ["M_NOT_FOUND"]}), 404, None),
        ((200, [{}]), 200, None),
        ((200, None), 200, None),
    ],
)
async def test_an_error_is_raised_with_its_status(
    response: tuple[int, Any], status: int, errcode: str | None
) -> None:
    server = OtherEnd()
    server.response = response
    with pytest.raises(RemoteError) as failed:
        await server.remote.event(SERVER, EVENT)
    assert (failed.value.status, failed.value.errcode) == (status, errcode)


@pytest.mark.parametrize("status", [400, 404])
async def test_an_old_server_is_asked_by_v1_in_a_room_of_an_old_version(status: int) -> None:
    room, event, _ = IN_PATH.values()
    pdu = {"type": "m.room.member", "event_id": EVENT}
    shown = [{"type": "m.room.create"}]
    invite = {"event": pdu, "room_version": "1", "invite_room_state": shown}
    in_v1 = pdu | {"unsigned": {"invite_room_state": shown}}
    answer = {"event": pdu}
    server = OtherEnd()
    remote = server.remote
    for ask, name, body, old in (
        (remote.invite, "invite", invite, in_v1),
        (remote.send_join, "send_join", pdu, pdu),
        (remote.send_leave, "send_leave", pdu, pdu),
    ):
        server.responses = [(status, {"errcode": "M_UNRECOGNIZED"}), (200, [200, answer])]
        assert await ask(SERVER, ROOM, EVENT, body) == answer
        path = f"/_matrix/federation/v1/{name}/{room}/{event}"
        assert (server.sent[0], server.sent[1], server.sent[3]) == ("PUT", path, old)
        refusals = [(status, {"errcode": "M_FIRST"}), (404, {"errcode": "M_UNRECOGNIZED"})]
        server.responses = list(refusals)  # it lacks v1
        with pytest.raises(RemoteError) as refused:
            await ask(SERVER, ROOM, EVENT, body)
        assert (refused.value.status, refused.value.errcode) == (status, "M_FIRST")
        server.responses = [refusals[1], (403, {"errcode": "M_FORBIDDEN"})]
        with pytest.raises(RemoteError) as refused:
            await ask(SERVER, ROOM, EVENT, body)
        assert (refused.value.status, refused.value.errcode) == (403, "M_FORBIDDEN")
        server.responses = [(500, {})]
        with pytest.raises(RemoteError):
            await ask(SERVER, ROOM, EVENT, body)
        new = {key: value for key, value in pdu.items() if key != "event_id"}
        server.responses = list(refusals)
        with pytest.raises(RemoteError):
            await ask(SERVER, ROOM, EVENT, new if name != "invite" else invite | {"event": new})
        assert (len(server.responses), server.sent[1]) == (1, path.replace("v1", "v2"))
        server.responses = []


async def test_the_version_of_a_room_that_is_not_known_here_is_kept() -> None:
    server = OtherEnd()
    form = {"errcode": "M_INCOMPATIBLE_ROOM_VERSION", "room_version": "org.new"}
    server.response = 400, form
    with pytest.raises(RemoteError) as refused:
        await server.remote.make_join(SERVER, ROOM, USER, versions=["12"])
    assert refused.value.room_version == "org.new"


async def test_a_signed_request_is_accepted_by_its_destination_alone(
    three: list[Homeserver],
) -> None:
    one, other, third = three
    server = OtherEnd()
    body: Json = {"pdus": [], "ä": 1}
    await server.remote.invite(SERVER, ROOM, EVENT, body)
    method, uri, headers, _ = server.sent
    header = headers["Authorization"]
    check = other.receiver.check_request
    assert await check(method, uri, header, body) == one.name
    assert await check(method, uri, header.replace("X-Matrix ", "x-matrix  "), body) == one.name
    assert await check(method, uri, header.replace(",", " , "), body) == one.name
    without = header.replace('destination="s2.test",', "")
    assert await check(method, uri, without, body) == one.name
    for receiver in (third.receiver, one.receiver):
        with pytest.raises(InvalidSignature, match=r"it is for s2\.test"):
            await receiver.check_request(method, uri, header, body)
    with pytest.raises(InvalidSignature):
        await third.receiver.check_request(method, uri, without, body)
    deep: Any = body
    for _ in range(5_000):
        deep = {"a": deep}
    false_ones: list[tuple[str, str, str | None, Json | None]] = [
        ("GET", uri, header, body),
        (method, uri, None, body),
        (method, uri, header, deep),
        (method, uri + "?", header, body),
        (method, uri, header, None),
        (method, uri, header, {**body, "pdus": [1]}),
        (method, uri, header.replace("s1.test", "s3.test"), body),
        (method, uri, header.replace("X-Matrix", "Bearer"), body),
        (method, uri, header.replace("sig=", "signature="), body),
        (method, uri, header.replace(KEY_ID, "ed25519:9"), body),
        (method, uri, "", body),
    ]
    for false in false_ones:
        with pytest.raises(InvalidSignature):
            await check(*false)


@pytest.mark.parametrize("part", ["a", "a ", "a=", 'a="', " ", "a=b "])
def test_a_long_header_is_read_in_a_short_time(part: str) -> None:
    """Anybody may send one, and it is read before any signature."""
    began = time.perf_counter()
    with pytest.raises(InvalidSignature):
        read_authorization("X-Matrix " + part * 30_000)
    assert time.perf_counter() - began < 5


async def test_published_keys_are_those_that_the_receiver_reads(two: list[Homeserver]) -> None:
    _, other = two
    keys = published_keys("s1.test", signing_key("s1.test"))
    assert keys["verify_keys"].keys() == {KEY_ID}

    async def answer(_: Json) -> Json:
        return keys

    other.network.faults["s1.test", "server_keys"] = answer
    server = OtherEnd()
    await server.remote.event(SERVER, EVENT)
    method, uri, headers, _ = server.sent
    check = other.receiver.check_request
    assert await check(method, uri, headers["Authorization"], None) == "s1.test"


@pytest.mark.parametrize(
    "name", ["s2.test/admin?x=:1", "s2.test#:1", "user@s2.test", "s2.test:x", "[::1", "s2.test\n"]
)
async def test_a_name_that_is_no_host_is_not_asked(name: str) -> None:
    """The sender of an event is @user:name, with any name."""
    server = OtherEnd()
    with pytest.raises(RemoteError, match="not a server name"):
        await server.remote.server_keys(ServerName(name))
    with pytest.raises(RemoteError, match="not a server name"):
        await server.remote.send(ServerName(name), "1", [])
    assert server.sent == ("", "", {}, None)


async def test_members_are_omitted_on_request() -> None:
    server = OtherEnd()
    remote = HttpRemote("s1.test", signing_key("s1.test"), server.request, omit_members=True)
    await remote.send_join(SERVER, ROOM, EVENT, {})
    room, event, _ = IN_PATH.values()
    path = f"/_matrix/federation/v2/send_join/{room}/{event}"
    assert server.sent[1] == path + "?omit_members=true"
    await server.remote.send_join(SERVER, ROOM, EVENT, {})
    assert server.sent[1] == path
