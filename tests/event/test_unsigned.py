"""`unsigned` never decides whether an event is valid: no hash and no signature covers it."""

import json
from typing import Any, Final

import pytest

from storage.errors import InvalidEvent
from storage.event import load, parse, peek
from storage.event.hashes import canonical
from storage.event.reading import MAX_RAW_BYTES
from tests.event.building import LENIENT, STRICT, VERSIONS, encoded, signed_pdu

DEEP: Final = "[" * 600 + "]" * 600
BAD: Final = {
    "surrogate": '{"a":"\\ud800"}',
    "surrogate as key": '{"\\udfff":1}',
    "out of range": '{"age":1e400}',
    "digits": '{"age":' + "9" * 5_000 + "}",
    "deep": '{"a":' + DEEP + "}",
    "very deep": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep objects": '{"a":' * 3_000 + "1" + "}" * 3_000,
    "large": '{"pad":"' + "x" * 70_000 + '"}',
    "brackets in text": '{"a":"]}\\"[{","age":1e400}',
    "null": "null",
    "list": "[[{}]]",
    "number": "5",
    "text": '"unsigned"',
    "nan": '{"age":NaN}',
}
STRICTLY_BAD: Final = {
    "float": '{"age":1.5}',
    "exponent": '{"age":1e2}',
    "large integer": '{"age":9007199254740992}',
    "minus zero": '{"age":-0}',
}
PLACES: Final = ("first", "last", "middle", "twice", "escaped")


def with_unsigned(pdu: dict[str, Any], text: str, where: str = "last") -> bytes:
    """Return the PDU with this text as `unsigned`."""
    own = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pdu.items()]
    member = f'"unsigned" :{text}'
    if where == "twice":
        return ("{" + ", ".join([member, *own, '"unsigned":{"age":5}', member]) + "}").encode()
    if where == "escaped":
        member = f'"\\u0075nsigned": {text} '
    at = {"first": 0, "middle": len(own) // 2}.get(where, len(own))
    return ("{" + ", ".join([*own[:at], member, *own[at:]]) + "}").encode()


@pytest.mark.parametrize("text", [*BAD.values(), *STRICTLY_BAD.values()], ids=[*BAD, *STRICTLY_BAD])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_bad_one_is_dropped(version: str, text: str) -> None:
    """The event is the one without it, and so are its bytes but for space."""
    if text in STRICTLY_BAD.values() and version in LENIENT:
        pytest.skip("these are numbers of versions 1 to 5")
    pdu = signed_pdu(version, content={"unsigned": "mine", "list": [["unsigned"], {"a": "}"}]})
    expected = parse(pdu, version)
    for place in PLACES:
        event = parse(with_unsigned(pdu, text, place), version)
        assert event.event_id == expected.event_id
        assert event.content_hash_valid
        assert event.json == pdu
        assert json.loads(event.raw) == pdu
        assert load(event.raw, version, event.event_id).json == pdu


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_peek_finds_the_room(text: str) -> None:
    raw = with_unsigned(signed_pdu("11"), text)
    glanced = peek(raw)
    assert glanced is not None
    assert glanced["room_id"] == "!room:example.org"
    assert parse(raw, "11", header=glanced) == parse(raw, "11")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "value",
    [1.5, -0.0, 2**53, 10**30, float("nan"), "\ud800", {"\udfff": 1}, object(), "x" * 70_000],
    ids=["float", "-0", "2^53", "10^30", "nan", "surrogate", "surrogate key", "object", "long"],
)
def test_a_dict_with_a_bad_one(version: str, value: Any) -> None:
    pdu = signed_pdu(version)
    event = parse({**pdu, "unsigned": {"age": value}}, version)
    assert event.event_id == parse(pdu, version).event_id
    if version in STRICT or not isinstance(value, int | float) or value != value:
        assert "unsigned" not in event.json
    assert parse({**pdu, "unsigned": None}, version).json == pdu


@pytest.mark.parametrize("version", VERSIONS)
def test_a_good_one_stays(version: str) -> None:
    pdu = {**signed_pdu(version), "unsigned": {"age": 0, "a": [None, {"b": "-0"}]}}
    raw = json.dumps(pdu, indent=2).encode()
    event = parse(raw, version)
    assert event.raw == raw
    assert event.json == pdu


@pytest.mark.parametrize("version", VERSIONS)
def test_a_large_event_with_a_small_one(version: str) -> None:
    """Without it the event has the largest size; one byte more is too large for either."""
    pdu = signed_pdu(version, content={"pad": ""})
    size = 65_536 - len(canonical(pdu))
    fits, large = (signed_pdu(version, content={"pad": "x" * count}) for count in (size, size + 1))
    event = parse({**fits, "unsigned": {"age": 1}}, version)
    assert len(event.raw) == 65_536
    with pytest.raises(InvalidEvent, match="65537 bytes"):
        parse({**large, "unsigned": {"age": 1}}, version)
    with pytest.raises(InvalidEvent, match=f"more than {MAX_RAW_BYTES}"):
        parse(with_unsigned(fits, '{"pad":"' + "x" * MAX_RAW_BYTES + '"}'), version)


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b'{"unsigned":{}',
        b'{"unsigned":1}}',
        b'{"unsigned":1}{}',
        b'[{"unsigned":1}]',
        b'x{"unsigned":1}',
        b'{"a":1 "unsigned":NaN}',
        b'{"unsigned":NaN, x}',
        b'{"a":[}, "unsigned":NaN}',
        b'{"unsigned":"',
        b'{"unsigned',
    ],
)
@pytest.mark.parametrize("version", ["1", "11"])
def test_what_is_no_object_is_refused(version: str, raw: bytes) -> None:
    with pytest.raises(InvalidEvent):
        parse(raw, version)
    assert peek(raw) is None or peek(raw) == {"unsigned": None}


@pytest.mark.parametrize("version", STRICT)
def test_the_reason_is_that_of_the_rest(version: str) -> None:
    raw = encoded(
        {**signed_pdu(version), "depth": "@n@", "unsigned": {"n": "@m@"}}, n="1.5", m="-0"
    )
    with pytest.raises(InvalidEvent, match=r"1\.5"):
        parse(raw, version)
