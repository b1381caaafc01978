"""JSON that servers send each other, rule by rule, wherever it comes in.

Source: MSC4458, and the specification's appendix "Canonical JSON".
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson
import pytest

from storage import InvalidSignature, ServerName, responses
from storage.event import event_id, sign
from storage.event.hashes import canonical
from storage.federation import HttpRemote, JsonObject, Receiver, RemoteError
from storage.federation.requests import authorization, claim_of
from storage.ids import EventId, RoomId
from storage.testing import signing_key
from tests.federation.peers import QUICK, Homeserver, published_keys
from tests.federation.rooms import shared_room


class Rule(NamedTuple):
    """A member of an object as it is received; ``value`` is what counts, None: it is refused."""

    member: bytes
    value: Any = None


RULES: Final = {
    "the last of duplicate keys counts": Rule(b'"x":1,"x":2', 2),
    "a key that is escaped is the same key": Rule(b'"x":1,"\\u0078":2', 2),
    "duplicates deeper inside": Rule(b'"x":[{"a":1,"b":0,"a":2}]', [{"a": 2, "b": 0}]),
    "a pair of surrogates is one character": Rule(b'"x":"\\ud83d\\uDE00"', "\U0001f600"),
    "four bytes are that character": Rule(b'"x":"\xf0\x9f\x98\x80"', "\U0001f600"),
    "an escape is its character": Rule(b'"x":"\\u00e9\\/\\u0001"', "é/\x01"),
    "a non-character": Rule(b'"x":"\\uffff"', "\uffff"),
    "the largest integers": Rule(
        b'"x":[9007199254740991,-9007199254740991]', [2**53 - 1, 1 - 2**53]
    ),
    "true, false and null": Rule(b'"x":[true,false,null]', [True, False, None]),
    "spaces": Rule(b' "x"\t:\r\n[ ]', []),
    "half a pair, the first": Rule(b'"x":"\\ud83d"'),
    "half a pair, the second": Rule(b'"x":"\\ude00"'),
    "a pair in the other order": Rule(b'"x":"\\ude00\\ud83d"'),
    "half a pair in a key": Rule(b'"x":{"\\ud83d":1}'),
    "half a pair in bytes": Rule(b'"x":"\xed\xa0\xbd"'),
    "a pair in bytes": Rule(b'"x":"\xed\xa0\xbd\xed\xb8\x80"'),
    "no UTF-8": Rule(b'"x":"\xff"'),
    "a longer form of a character": Rule(b'"x":"\xc0\xaf"'),
    "beyond the largest integer": Rule(b'"x":9007199254740992'),
    "below the smallest": Rule(b'"x":-9007199254740992'),
    "a fraction": Rule(b'"x":1.0'),
    "an exponent": Rule(b'"x":1e2'),
    "a negative zero": Rule(b'"x":-0'),
    "beyond a double": Rule(b'"x":1e400'),
    "NaN": Rule(b'"x":NaN'),
    "infinity": Rule(b'"x":-Infinity'),
    "a leading zero": Rule(b'"x":01'),
    "a comma at the end": Rule(b'"x":[1,]'),
    "a comment": Rule(b'"x":1/**/'),
    "a control character": Rule(b'"x":"\x01"'),
}
"""MSC4458: data types (rule 1), duplicate keys (rule 2), surrogates (rule 3)."""
ZERO: Final = 0
"""A reader of JSON makes it of a negative zero, before the library gets an object."""


class SentRequest(NamedTuple):
    """An event as it is sent."""

    event_id: EventId
    room_id: RoomId
    raw: bytes
    version: str


async def sent(one: Homeserver, room_id: RoomId, member: bytes, value: Any) -> SentRequest:
    """An event of the server that has the member in its content, and is signed with the value."""
    content, version = {"x": value}, await one.version(room_id)
    template = await one.store.template(room_id, one.user(), "m.test", content)
    pdu = sign(template, version, one.name, signing_key(one.name))
    whole, plain = canonical(pdu), canonical(content)[1:-1]
    assert whole.count(plain) == 1
    return SentRequest(
        EventId(event_id(pdu, version)), room_id, whole.replace(plain, member), version
    )


def decoded(text: bytes) -> Any:
    """What the homeserver gets from a reader of JSON; None where that refuses the text."""
    try:
        return json.loads(text.decode())
    except ValueError:
        return None


async def by_append(_: Homeserver, other: Homeserver, event: SentRequest) -> None:
    await other.store.append([event.raw])


async def by_receiver(one: Homeserver, other: Homeserver, event: SentRequest) -> None:
    await other.receiver.transaction(one.name, [event.raw])


async def by_responder(one: Homeserver, other: Homeserver, event: SentRequest) -> None:
    body = decoded(b'{"pdus":[%s]}' % event.raw)
    if body is not None:
        await other.responder.transaction(one.name, body)


async def by_http_remote(one: Homeserver, other: Homeserver, event: SentRequest) -> None:
    """The event is missing below another one, and fetched."""
    child = await one.store.template(event.room_id, one.user(), "m.test", {})
    child |= {"prev_events": [event.event_id], "depth": child["depth"] + 1}
    pdu = sign(child, event.version, one.name, signing_key(one.name))

    async def request(
        server: str, _method: str, uri: str, _headers: Mapping[str, str], _body: JsonObject | None
    ) -> tuple[int, Any]:
        if "/key/" in uri:
            return 200, published_keys(server)
        name = b"events" if "missing" in uri else b"pdus"
        found = None if "state" in uri else decoded(b'{"%s":[%s]}' % (name, event.raw))
        return (404, {"errcode": "M_NOT_FOUND"}) if found is None else (200, found)

    remote = HttpRemote(other.name, signing_key(other.name), request)
    await Receiver(other.store, remote, limits=QUICK).transaction(one.name, [pdu])


TEXT: Final = (by_append, by_receiver)
OBJECTS: Final = (by_responder, by_http_remote)


@pytest.mark.parametrize("name", RULES)
async def test_each_rule(two: list[Homeserver], name: str) -> None:
    """What is refused is not stored; what counts is in the event, its hashes and each response."""
    one, other = two
    room_id, rule = await shared_room(one, other), RULES[name]
    for way in (*TEXT, *OBJECTS):
        value = ZERO if way in OBJECTS and name == "a negative zero" else rule.value
        event = await sent(one, room_id, rule.member, "@@" if value is None else value)
        await way(one, other, event)
        stored = await other.store.event(event.event_id)
        if value is None:
            assert stored is None, way
            continue
        assert stored is not None, way
        assert (stored.soft_failed, stored.rejected) == (False, None), way
        served = await other.responder.event(one.name, event.event_id)
        [shown] = served["pdus"]
        assert stored.content == shown["content"] == {"x": value}, way
        assert canonical(shown).count(b'"x":') == 1


@pytest.mark.parametrize("name", RULES)
async def test_the_body_of_a_request(two: list[Homeserver], name: str) -> None:
    """Its signature is of what was read: a body that has no canonical JSON has none."""
    one, other = two
    rule = RULES[name]
    body = decoded(b"{%s}" % rule.member)
    if body is None:
        return
    claim = claim_of("PUT", "/path", one.name, other.name, {"x": rule.value})
    header = authorization(claim, signing_key(one.name))
    check = other.receiver.check_request("PUT", "/path", header, body)
    if rule.value is None:
        with pytest.raises(InvalidSignature):
            await check
    else:
        assert await check == one.name


@pytest.mark.parametrize("text", ["\ud83d", "\ude00\ud83d", "a\0b"])
async def test_an_error_in_a_response_can_be_passed_on(two: list[Homeserver], text: str) -> None:
    """Its text reaches logs, clients and the database."""
    one, other = two
    room_id = await shared_room(one, other)
    parent = await sent(one, room_id, b'"x":1', 1)

    async def request(*_: Any) -> tuple[int, Any]:
        return 403, {"errcode": f"M_{text}", "error": text}

    remote = HttpRemote(other.name, signing_key(other.name), request)
    with pytest.raises(RemoteError) as caught:
        await remote.event(ServerName(one.name), parent.event_id)
    orjson.dumps(responses.error(caught.value))
