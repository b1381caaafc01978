"""Keys of other servers: which one counts, for how long, and what happens if it cannot be had."""

import asyncio
import base64
import time
from typing import Any

import pytest
from signedjson.key import encode_verify_key_base64
from signedjson.sign import sign_json

from storage import InvalidSignature
from storage.event import Event, event_id, parse, sign
from storage.federation import ReceiverLimits, RemoteError
from storage.federation import keys as keys_module
from storage.federation.keys import (
    FOREVER,
    KEYS_MAX,
    RESPONSE_MAX,
    SIGNATURES_MAX,
    VALIDITY_MS_MAX,
    KeyRing,
    PublishedKeys,
    read_server_keys,
)
from storage.ids import ServerName
from storage.testing import KEY_ID, RoomBuilder, signing_key, verify_key
from storage.testing.assembly import foreign_signing_key
from tests.federation.hanging import hang
from tests.federation.peers import Homeserver, Json, NetworkRemote, fail, published_keys
from tests.federation.rooms import agree, outcomes, shared_room
from tests.turns import LoopTurns

S1 = ServerName("s1.test")
NOW = 1_800_000_000_000
OTHER_KEY = encode_verify_key_base64(verify_key("other.test"))


def test_a_published_key_counts_until_it_expires_and_seven_days_at_most() -> None:
    soon = read_server_keys(S1, published_keys(S1, valid_until_ts=NOW + 5), NOW)
    late = read_server_keys(S1, published_keys(S1, valid_until_ts=NOW * 2), NOW)
    assert soon == {KEY_ID: (verify_key(S1), NOW + 5)}
    assert late == {KEY_ID: (verify_key(S1), NOW + VALIDITY_MS_MAX)}


def test_a_retired_key_counts_for_events_before_its_end() -> None:
    retired = {
        "ed25519:old": {"key": OTHER_KEY, "expired_ts": 7},
        "ed25519:endless": {"key": OTHER_KEY},
        "rsa:1": {"key": OTHER_KEY, "expired_ts": 7},
    }
    found = read_server_keys(S1, published_keys(S1, old_verify_keys=retired), NOW)
    assert set(found) == {KEY_ID, "ed25519:old"}
    assert found["ed25519:old"][1] == 7


@pytest.mark.parametrize(
    "change",
    [
        {"server_name": "s2.test"},
        {"verify_keys": {}},
        {"verify_keys": {KEY_ID: {"key": OTHER_KEY}}},
        {"verify_keys": {KEY_ID: {"key": "no key"}}},
        {"verify_keys": {KEY_ID: {"key": base64.b64encode(b"short").decode()}}},
        {"verify_keys": [KEY_ID]},
        {"valid_until_ts": "tomorrow"},
        {"old_verify_keys": {"ed25519:2": 5}, "server_name": None},
    ],
)
def test_a_response_that_proves_nothing_is_refused(change: Json) -> None:
    with pytest.raises(RemoteError):
        read_server_keys(S1, published_keys(S1, **change), NOW)


def test_a_response_that_another_has_changed_is_refused() -> None:
    for changed in (
        published_keys(S1) | {"valid_until_ts": NOW},
        published_keys(S1) | {"signatures": []},
        {key: value for key, value in published_keys(S1).items() if key != "signatures"},
    ):
        with pytest.raises(RemoteError):
            read_server_keys(S1, changed, NOW)


class KeyServer(NetworkRemote):
    """It answers requests for keys only; ``responses`` are taken in turn."""

    def __init__(self, *responses: Json | Exception) -> None:
        self.asked: list[str] = []
        self._responses = list(responses)

    async def server_keys(self, server: ServerName) -> Json:
        self.asked.append(server)
        response = self._responses.pop(0) if self._responses else published_keys(server)
        if isinstance(response, Exception):
            raise response
        return response


def ring(remote: KeyServer, **limits: Any) -> KeyRing:
    return KeyRing(remote, ReceiverLimits(**limits), None)


def built(version: str, *, servers: tuple[str, ...] = ("s1.test",)) -> RoomBuilder:
    room = RoomBuilder(version, servers=servers, seed=1)
    room.start(room.user(1))
    return room


def events_of(room: RoomBuilder) -> list[Event]:
    return [parse(pdu, room.version) for pdu in room.pdus]


async def test_a_server_is_asked_once_for_all_its_events() -> None:
    remote = KeyServer()
    keys = ring(remote)
    events = events_of(built("11"))
    assert await asyncio.gather(*(keys.check(events, 60.0) for _ in range(3))) == [{}, {}, {}]
    assert remote.asked == ["s1.test"]


async def test_a_key_must_have_been_valid_at_the_time_of_the_event() -> None:
    """From room version 5 on."""
    for version, refused in (("4", False), ("5", True)):
        events = events_of(built(version))
        latest = max(event.origin_server_ts for event in events)
        remote = KeyServer(published_keys(S1, valid_until_ts=latest - 1))
        found = await ring(remote).check(events, 60.0)
        late = {one.event_id for one in events if one.origin_server_ts == latest}
        assert set(found) == (late if refused else set())


async def test_a_server_that_fails_is_asked_again_after_the_pause() -> None:
    events = events_of(built("11"))
    remote = KeyServer(RemoteError("503"), RemoteError("503"))
    keys = ring(remote, key_retry_seconds=3600.0)
    for _ in range(2):
        found = await keys.check(events, 60.0)
        assert len(found) == len(events)
        assert "the keys of s1.test cannot be had: 503" in str(found[events[0].event_id].reason)
    assert len(remote.asked) == 1
    remote = KeyServer(RemoteError("503"))
    keys = ring(remote, key_retry_seconds=0.000_001)
    assert len(await keys.check(events, 60.0)) == len(events)
    assert await keys.check(events, 60.0) == {}


async def test_an_expired_key_is_requested_again_and_kept_if_that_fails() -> None:
    events = events_of(built("11"))
    first = min(event.origin_server_ts for event in events)
    remote = KeyServer(published_keys(S1, valid_until_ts=first), RemoteError("503"))
    keys = ring(remote, key_retry_seconds=0.000_001)
    assert len(await keys.check(events, 60.0)) == len(events) - 1
    again = await keys.check(events, 60.0)
    assert len(again) == len(events) - 1
    assert await keys.check(events, 60.0) == {}
    assert len(remote.asked) == 3


async def test_a_slow_server_does_not_hold_up_the_keys_of_others() -> None:
    room = built("11", servers=("s1.test", "s2.test", "s3.test"))
    for number in (2, 3):
        room.join(room.user(number))

    class Slow(KeyServer):
        async def server_keys(self, server: ServerName) -> Json:
            return await hang({}) if server == "s2.test" else await super().server_keys(server)

    keys = ring(Slow(), key_servers_at_once=1)
    events = events_of(room)
    found = await keys.check(events, 60.0)
    assert {event.sender for event in events if event.event_id in found} == {"@user2:s2.test"}
    assert "no answer" in str(found.popitem()[1].reason)


async def test_keys_are_not_requested_when_the_time_is_over() -> None:
    remote = KeyServer()
    events = events_of(built("11"))
    found = await ring(remote).check(events, 0.0)
    assert len(found) == len(events)
    assert "not requested in time" in str(found.popitem()[1].reason)
    assert remote.asked == []


async def test_few_servers_are_kept_in_memory() -> None:
    servers = tuple(f"s{number}.test" for number in range(1, 6))
    room = built("11", servers=servers)
    for number in range(2, 6):
        room.join(room.user(number))
    keys = ring(KeyServer(), key_servers_cached=2)
    for event in events_of(room):
        assert await keys.check([event], 60.0) == {}
    assert len(keys._published_keys) == 2


async def test_the_own_key_needs_no_request() -> None:
    remote = KeyServer()
    keys = KeyRing(
        remote, ReceiverLimits(), (S1, PublishedKeys({KEY_ID: (verify_key(S1), FOREVER)}, 0.0))
    )
    assert await keys.check(events_of(built("11")), 60.0) == {}
    assert remote.asked == []


async def test_a_forged_signature_is_refused() -> None:
    events = events_of(built("11"))
    forged = dict(events[-1].json, signatures={})
    forged = sign(forged, "11", S1, foreign_signing_key(S1))
    [refusal] = (await ring(KeyServer()).check([parse(forged, "11")], 60.0)).values()
    assert refusal.outcome == "invalid"
    assert refusal.event_id == event_id(forged, "11")


async def test_a_signed_object_is_checked_with_a_key_that_is_valid_now() -> None:
    request = {"method": "PUT", "uri": "/x", "origin": S1, "destination": "s2.test"}
    signed = sign_json(dict(request), S1, signing_key(S1))
    remote = KeyServer()
    keys = ring(remote)
    await keys.check_signed(S1, signed, 60.0)
    await keys.check_signed(S1, signed, 60.0)
    assert remote.asked == [S1]
    for changed in (
        {**signed, "uri": "/y"},
        request,
        {**request, "signatures": {S1: {KEY_ID: 5}}},
        {**request, "signatures": [S1]},
        sign_json(dict(request), S1, foreign_signing_key(S1)),
        sign_json(dict(request), "s2.test", signing_key("s2.test")),
    ):
        with pytest.raises(InvalidSignature, match="it is not signed by s1"):
            await keys.check_signed(S1, changed, 60.0)
    expired = ring(KeyServer(published_keys(S1, valid_until_ts=NOW // 2)))
    with pytest.raises(InvalidSignature, match="no signature fits a valid key"):
        await expired.check_signed(S1, signed, 60.0)
    with pytest.raises(InvalidSignature, match="503"):
        await ring(KeyServer(RemoteError("503"))).check_signed(S1, signed, 60.0)


async def test_the_receiver_checks_the_signature_of_a_request(three: list[Homeserver]) -> None:
    one, other, _ = three
    request = {"method": "GET", "uri": "/x", "origin": one.name, "destination": other.name}
    signed = sign_json(request, one.name, signing_key(one.name))
    await other.receiver.check_signed(one.name, signed)
    with pytest.raises(InvalidSignature):
        await other.receiver.check_signed(one.name, signed | {"method": "PUT"})


async def test_events_of_a_server_without_keys_are_refused_and_others_stored(
    three: list[Homeserver],
) -> None:
    one, other, third = three
    room_id = await shared_room(one, other, third)
    for server in (one, other, third):
        await server.fill(room_id)
    left = await one.say(room_id, "one")
    right = await third.say(room_id, "third")
    other.receiver = type(other.receiver)(other.store, other.remote)
    one.network.faults["s3.test", "server_keys"] = fail
    results = await other.receive(one, [left, right])
    assert results[_id(left)].outcome == "stored"
    assert results[_id(right)].outcome == "invalid"
    assert "cannot be had" in str(results[_id(right)].reason)
    one.network.faults.clear()
    other.receiver = type(other.receiver)(other.store, other.remote)
    assert await outcomes(other, third, right) == ["stored"]
    await one.receive(third, [right])
    await third.receive(one, [left])
    await agree(room_id, one, other, third)


def _id(pdu: Json) -> Any:
    return event_id(pdu, "12")


def test_the_signature_of_the_keys_is_that_of_a_current_key() -> None:
    body = {key: value for key, value in published_keys(S1).items() if key != "signatures"}
    signed = sign_json(body, S1, signing_key("other.test"))
    with pytest.raises(RemoteError):
        read_server_keys(S1, signed, NOW)


def test_a_response_with_many_keys_takes_no_longer_than_one_with_a_few() -> None:
    """A server chooses how large its response is. The check does not yield to other tasks."""
    keys = published_keys(S1)
    many = {f"ed25519:k{number}": {**keys["verify_keys"][KEY_ID]} for number in range(300)}
    keys["verify_keys"] = many
    keys["signatures"] = {S1: dict.fromkeys(many, "A" * 86)}
    began = time.perf_counter()
    with pytest.raises(RemoteError, match="not signed"):
        read_server_keys(S1, keys, NOW)
    assert time.perf_counter() - began < 5


def test_a_response_with_too_many_keys_is_refused() -> None:
    """Decoding 100,000 keys would stop the event loop for more than a second."""
    retired = {
        f"ed25519:{number}": {"key": OTHER_KEY, "expired_ts": 7} for number in range(100_000)
    }
    changes: list[Json] = [
        {"old_verify_keys": retired},
        {"verify_keys": retired},
        {"a": [[] for _ in range(RESPONSE_MAX)]},
        {"a": "x" * RESPONSE_MAX},
        {"a": {"x" * RESPONSE_MAX: 1}},
    ]
    for change in changes:
        with pytest.raises(RemoteError, match="more than 65536"):
            read_server_keys(S1, published_keys(S1) | change, NOW)


def test_a_large_response_is_not_looked_at_as_a_whole() -> None:
    class Watched(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("it is looked at")

    with pytest.raises(RemoteError, match="more than 65536"):
        read_server_keys(S1, published_keys(S1) | {"a": Watched([1] * RESPONSE_MAX)}, NOW)


def test_the_first_keys_of_a_response_are_read() -> None:
    retired = {
        f"ed25519:{number}": {"key": OTHER_KEY, "expired_ts": 7} for number in range(KEYS_MAX + 1)
    }
    found = read_server_keys(S1, published_keys(S1, old_verify_keys=retired), NOW)
    assert found.keys() == {KEY_ID, *list(retired)[:KEYS_MAX]}


async def test_ten_signatures_of_an_object_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a pass over the object, and other tasks run in between."""
    ids = [f"ed25519:k{number}" for number in range(50)]
    published = published_keys(S1)
    key = published["verify_keys"][KEY_ID]
    listed = published_keys(S1, verify_keys={KEY_ID: key, **dict.fromkeys(ids, key)})
    signed = {"a": 1, "signatures": {S1: dict.fromkeys(ids, "A" * 86)}}
    async with LoopTurns() as turns:
        turns.watch(monkeypatch, keys_module, "_is_signed")
        with pytest.raises(InvalidSignature):
            await ring(KeyServer(listed)).check_signed(S1, signed, 60.0)
    assert turns.total == SIGNATURES_MAX + 1  # and that of the keys
    assert turns.most == 1
