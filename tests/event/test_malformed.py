"""PDUs that are refused: text that is no JSON, nesting, sizes, numbers, and dicts that are none."""

import json
from typing import Any

import pytest

from storage.errors import InvalidEvent
from storage.event import content_hash, event_id, parse, sign
from storage.event.hashes import canonical
from storage.event.hashes import encoded as encode
from tests.event.building import (
    KEY,
    LENIENT,
    SERVER,
    STRICT,
    VERSIONS,
    encoded,
    signed_pdu,
    unsigned_pdu,
)


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b"",
            b" ",
            b"\xff\xfe",
            b"null",
            b"[]",
            b"5",
            b'"text"',
            b"{",
            b"{}{}",
            b"{}",
            b'{"a":}',
            b'{"a":1,}',
            b"{'a':1}",
            b"{a:1}",
        ),
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b'{"type":"\xc3\x28"}',
        b'{"type":"\n"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 1_000_000 + b"]" * 1_000_000,
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_refused_bytes(version: str, raw: bytes) -> None:
    with pytest.raises(InvalidEvent):
        parse(raw, version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("where", ["content", "state_key", "type"])
def test_lone_surrogates_are_refused_everywhere(version: str, where: str) -> None:
    value: Any = "@x@" if where in ("state_key", "type") else {"@x@": "@x@"}
    raw = encoded({**signed_pdu(version), where: value}, x='"\\ud800"')
    with pytest.raises(InvalidEvent):
        parse(raw, version)
    with pytest.raises(InvalidEvent, match="surrogate"):
        parse(
            {**signed_pdu(version), where: "\ud800" if isinstance(value, str) else {"a": "\ud800"}},
            version,
        )
    # The second reader must refuse it as well.
    with pytest.raises(InvalidEvent):
        parse(
            encoded(
                {**signed_pdu(version), "content": {"n": "@n@", "s": "@x@"}},
                n="1" * 400,
                x='"\\udc00"',
            ),
            version,
        )


@pytest.mark.parametrize("version", VERSIONS)
def test_nesting_is_limited_and_its_limit_does_not_depend_on_the_stack(version: str) -> None:
    def pdu(levels: int) -> bytes:  # of the whole event: the event is one, content another
        return encoded(signed_pdu(version)).replace(
            b'"hello"', b"[" * (levels - 2) + b"]" * (levels - 2)
        )

    assert not parse(pdu(500), version).content_hash_valid
    with pytest.raises(InvalidEvent, match="nested more than 500"):
        parse(pdu(501), version)
    wide = signed_pdu(version, content={"many": [[]] * 5_000})
    assert parse(wide, version).content_hash_valid


@pytest.mark.parametrize("version", LENIENT)
def test_nesting_is_limited_for_the_second_reader(version: str) -> None:
    raw = encoded(signed_pdu(version)).replace(b'"hello"', b"[" * 600 + b"1.5" + b"]" * 600)
    with pytest.raises(InvalidEvent, match="nested"):
        parse(raw, version)
    with pytest.raises(InvalidEvent, match="not JSON"):
        parse(raw.replace(b"1.5", b"1" * 400), version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_size_limit_counts_canonical_bytes(version: str) -> None:
    def sized(size: int) -> dict[str, Any]:
        pdu = signed_pdu(version, content={"pad": ""})
        content = {"pad": "x" * (size - len(canonical(pdu)))}
        return sign({**pdu, "content": content, "hashes": {}}, version, SERVER, KEY)

    fits = sized(65_536)
    assert len(parse(fits, version).raw) == 65_536
    with pytest.raises(InvalidEvent, match="65537 bytes") as caught:
        parse(sized(65_537), version)
    assert caught.value.event_id is None
    # Spaces and escapes do not count, up to the limit of what is read at all.
    assert parse(json.dumps(fits, indent=10).encode() + b" " * 10_000, version).content_hash_valid
    with pytest.raises(InvalidEvent, match="more than 1048576"):
        parse(canonical(fits) + b" " * 1_000_000, version)


def test_floats_that_grow_in_canonical_json_count_as_they_are_written() -> None:
    raw = canonical(signed_pdu("5", content={"n": ["@n@"] * 10_000})).replace(
        b'"@n@"', b"1e15"
    )  # 4 bytes, canonical 18
    assert len(raw) < 65_536
    with pytest.raises(InvalidEvent, match="bytes of canonical JSON"):
        parse(raw, "5")


@pytest.mark.parametrize("version", VERSIONS)
def test_depth_and_time_have_the_range_of_their_column(version: str) -> None:
    def outcome(key: str, value: int) -> bool:
        try:
            return bool(
                getattr(
                    parse(
                        {**unsigned_pdu(version), "hashes": {}, "signatures": {}, key: value},
                        version,
                    ),
                    key,
                )
                == value
            )
        except InvalidEvent:
            return False

    largest = 2**53 - 1 if version in STRICT else 2**63 - 2
    assert outcome("depth", largest)
    assert outcome("depth", 0)
    assert outcome("depth", -largest)
    assert not outcome("depth", largest + 1)
    assert outcome("origin_server_ts", largest)
    assert not outcome("origin_server_ts", largest + 2)


def test_an_error_names_the_event_where_it_can() -> None:
    pdu = signed_pdu("11")
    with pytest.raises(InvalidEvent) as caught:
        parse({**pdu, "depth": "x"}, "11")
    assert caught.value.event_id == event_id({**pdu, "depth": "x"}, "11")
    assert caught.value.reason == "depth is not an integer"
    assert str(caught.value) == f"{caught.value.event_id}: depth is not an integer"
    with pytest.raises(InvalidEvent) as caught:
        parse({**signed_pdu("1"), "event_id": 5}, "1")
    assert caught.value.event_id is None


def test_an_id_is_missing_or_not_a_string() -> None:
    with pytest.raises(InvalidEvent) as caught:
        event_id({}, "1")
    assert caught.value.reason == "event_id is missing"
    with pytest.raises(InvalidEvent) as caught:
        event_id({"event_id": 5}, "2")
    assert caught.value.reason == "event_id is not a string"


def test_what_cannot_be_written_as_canonical_json_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value, reason in (
        (["\ud800"], "0: a string holds a lone surrogate"),
        ("\ud800", "a string holds a lone surrogate"),
        (deep, "nested too deeply"),
    ):
        with pytest.raises(InvalidEvent) as caught:
            canonical(value)
        assert caught.value.reason == reason


def test_both_encoders_write_the_same() -> None:
    nested: list[Any] = [1]
    for _ in range(300):
        nested = [nested]
    for value in ({"b": "é", "a": [1, None]}, {"deep": nested}):
        assert encode(value, exact=True) == encode(value, exact=False) == canonical(value)
    assert encode({"float": 1e16}, exact=False) == b'{"float":1e+16}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object(), b"bytes"])
def test_a_dict_that_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(InvalidEvent, match="not JSON"):
        parse({**signed_pdu("11"), "content": {"a": value}}, "11")
    with pytest.raises(InvalidEvent, match="not JSON"):
        content_hash({"a": value})


def test_a_dict_that_holds_itself_is_refused() -> None:
    pdu = signed_pdu("11")
    pdu["content"]["self"] = pdu
    with pytest.raises(InvalidEvent):
        parse(pdu, "11")


def test_a_dict_nested_beyond_python_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidEvent, match="nested too deeply"):
        parse({**signed_pdu("11"), "content": {"a": deep}}, "11")


@pytest.mark.parametrize("pdu", ["{}", 5, None])
def test_what_is_neither_bytes_nor_dict_is_a_programming_error(pdu: Any) -> None:
    with pytest.raises(TypeError):
        parse(pdu, "11")
