"""The two readers of JSON: the choice between them, the limits of both, and their error texts."""

from typing import Any

import pytest

from storage.errors import InvalidEvent
from storage.event import parse
from storage.event.reading import _LENIENT, MAX_NESTING, MAX_RAW_BYTES, Read, _read_lexemes, read
from tests.event.building import encoded, signed_pdu

LARGEST = 2**53 - 1
LONG = b"1" * 400  # orjson refuses it


@pytest.mark.parametrize(
    "lexeme,exact",
    [
        (0, True),
        (LARGEST, True),
        (LARGEST + 1, False),
        (-LARGEST, True),
        (-LARGEST - 1, False),
        (1.5, False),
    ],
)
def test_before_version_6_numbers_are_exact_up_to_53_bits(lexeme: float, *, exact: bool) -> None:
    raw = f'{{"a":[{lexeme}],"b":"x"}}'.encode()
    assert read(raw, strict=False) == Read({"a": [lexeme], "b": "x"}, exact=exact, raw=raw)


def test_from_version_6_all_numbers_are_exact() -> None:
    assert read(b'{"a":0,"b":"-0"}', strict=True) == Read(
        {"a": 0, "b": "-0"}, exact=True, raw=b'{"a":0,"b":"-0"}'
    )


def test_an_object_that_was_glanced_at_is_not_read_again() -> None:
    assert read(b"anything", strict=True, header={"a": 1}) == Read(
        {"a": 1}, exact=True, raw=b"anything"
    )
    pdu = signed_pdu("11")
    assert parse(b"anything", "11", header=pdu).json == pdu


def test_bytes_are_not_copied() -> None:
    raw = encoded(signed_pdu("11"))
    assert parse(raw, "11").raw is raw


def reason(raw: bytes, *, strict: bool) -> str:
    with pytest.raises(InvalidEvent) as caught:
        read(raw, strict=strict)
    return caught.value.reason


@pytest.mark.parametrize(
    "raw,strict,told",
    [
        (b"[]", True, "not a JSON object"),
        (b"[]", False, "not a JSON object"),
        (b"[" + LONG + b"]", False, "not a JSON object"),
        (b'{"type":"\xff"}', False, "not UTF-8"),
        (b" " * (MAX_RAW_BYTES - 1) + b"{}", True, "1048577 bytes, more than 1048576"),
    ],
)
def test_what_is_no_object_is_refused(raw: bytes, told: str, *, strict: bool) -> None:
    assert reason(raw, strict=strict) == told


def test_the_largest_text_is_read() -> None:
    raw = b" " * (MAX_RAW_BYTES - 2) + b"{}"
    assert read(raw, strict=True) == Read({}, exact=True, raw=raw)


def nested(levels: int, opening: bytes, closing: bytes) -> bytes:
    """Return an object of so many levels around a number that only the second reader takes."""
    return b'{"a":' + opening * (levels - 1) + LONG + closing * (levels - 1) + b"}"


def test_the_second_reader_is_for_objects_that_are_not_too_deep() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        assert read(nested(MAX_NESTING, opening, closing), strict=False).exact is False
        assert reason(nested(MAX_NESTING + 1, opening, closing), strict=False).startswith(
            "not JSON: "
        )


def test_the_second_reader_on_a_deep_stack() -> None:
    with pytest.raises(InvalidEvent) as caught:
        _read_lexemes(b"[" * 100_000, _LENIENT)
    assert caught.value.reason == "nested too deeply"


def test_as_many_references_as_are_allowed() -> None:
    ids: list[Any] = ["$" + "a" * 43] * 20
    event = parse(signed_pdu("11", prev_events=ids, auth_events=ids[:10]), "11")
    assert (len(event.prev_event_ids), len(event.auth_event_ids)) == (20, 10)


def test_the_smallest_depth() -> None:
    assert parse(signed_pdu("5", depth=-(2**63)), "5").depth == -(2**63)
    with pytest.raises(InvalidEvent) as caught:
        parse(signed_pdu("5", depth=-(2**63) - 1), "5")
    assert caught.value.reason == "depth -9223372036854775809 is out of range"


def test_a_create_event_of_version_12_has_no_room_id() -> None:
    with pytest.raises(InvalidEvent) as caught:
        parse(signed_pdu("12", type="m.room.create", state_key=""), "12")
    assert caught.value.reason == "room_id is in a create event, whose own id names the room"
