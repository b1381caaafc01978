"""Numbers: one reading for every server, and its limits by room version."""

import hashlib
import json

import pytest
from unpaddedbase64 import encode_base64

from storage.errors import InvalidEvent
from storage.event import load, parse
from storage.event.hashes import canonical, unpadded
from tests.event.building import LENIENT, STRICT, encoded, signed_pdu, unsigned_pdu

# lexeme -> as canonicaljson writes what Python's json reads
READINGS = {
    "1e2": "100.0",
    "1E5": "100000.0",
    "1.0": "1.0",
    "1.10": "1.1",
    "-0": "0",
    "-0.0": "-0.0",
    "0.1e1": "1.0",
    "1e-400": "0.0",
    "1e16": "1e+16",
    "9007199254740993": "9007199254740993",
    "9223372036854775808": "9223372036854775808",
    "18446744073709551615": "18446744073709551615",
    "18446744073709551616": "18446744073709551616",
    "-9223372036854775809": "-9223372036854775809",
    "123456789012345678901234567890": "123456789012345678901234567890",
    "1" * 400: "1" * 400,
    "1" * 4_300: "1" * 4_300,
}


@pytest.mark.parametrize("version", LENIENT)
@pytest.mark.parametrize("lexeme", READINGS)
def test_before_version_6_numbers_hash_as_python_servers_read_them(
    version: str, lexeme: str
) -> None:
    pdu = unsigned_pdu(
        version, content={"n": "@n@"}, unsigned={"n": "@n@"}, signatures={}, hashes={}
    )
    covered = canonical(
        {k: v for k, v in pdu.items() if k not in ("unsigned", "signatures", "hashes")}
    )
    covered = covered.replace(b'"@n@"', READINGS[lexeme].encode())
    pdu["hashes"] = {"sha256": encode_base64(hashlib.sha256(covered).digest())}
    raw = encoded(pdu, n=lexeme)
    event = parse(raw, version)
    assert event.content_hash_valid
    assert event.raw == raw
    assert canonical(event.content) == b'{"n":' + READINGS[lexeme].encode() + b"}"
    loaded = load(raw, version, event.event_id)
    assert canonical(loaded.json) == canonical(event.json)
    assert canonical(event.json) == canonical(json.loads(raw))


@pytest.mark.parametrize("version", STRICT)
@pytest.mark.parametrize(
    "lexeme", [*READINGS, "9007199254740992", "-9007199254740992", "0.5", "-0e0"]
)
@pytest.mark.parametrize("where", ["content", "unknown"])
def test_from_version_6_only_integers_of_53_bits_written_plainly(
    version: str, lexeme: str, where: str
) -> None:
    raw = encoded({**signed_pdu(version), where: {"deep": [{"n": "@n@"}]}}, n=lexeme)
    with pytest.raises(InvalidEvent):
        parse(raw, version)


@pytest.mark.parametrize("version", STRICT)
def test_from_version_6_the_largest_and_the_smallest_integer(version: str) -> None:
    pdu = signed_pdu(
        version, content={"n": [2**53 - 1, -(2**53) + 1, 0, "-0", "1e5", "-0,", True, None]}
    )
    assert parse(encoded(pdu), version).content_hash_valid


@pytest.mark.parametrize("version", [*LENIENT, *STRICT])
@pytest.mark.parametrize(
    "lexeme",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "-1e400",
        "01",
        "+1",
        "1.",
        ".5",
        "0x10",
        "1" * 4_301,
        "1" * 500_000,
    ],
)
def test_what_is_no_number_in_any_version(version: str, lexeme: str) -> None:
    with pytest.raises(InvalidEvent):
        parse(encoded(signed_pdu(version, content={"n": "@n@"}), n=lexeme), version)


@pytest.mark.parametrize("version", LENIENT)
@pytest.mark.parametrize("lexeme", ["7.0", "1e2", "9223372036854775807", "99999999999999999999"])
def test_depth_is_an_integer_below_its_limit_in_every_version(version: str, lexeme: str) -> None:
    with pytest.raises(InvalidEvent, match="depth"):
        parse(encoded({**signed_pdu(version), "depth": "@n@"}, n=lexeme), version)


def test_the_reason_quotes_a_long_number_in_part() -> None:
    for count, shown in (
        (300, "99999999999999999999… (300 characters)"),
        (41, "99999999999999999999… (41 characters)"),
        (40, "9" * 40),
    ):
        reason = f"content.n: the number {shown} is not allowed in canonical JSON"
        assert refusal("9" * count) == reason


REASONS = {
    "-0": "the number -0 is not allowed in canonical JSON",
    "9007199254740992": "the number 9007199254740992 is not allowed in canonical JSON",
    "-9007199254740992": "the number -9007199254740992 is not allowed in canonical JSON",
    "1.5": "the number 1.5 is not an integer",
}


def refusal(lexeme: str, version: str = "11") -> str:
    """Return why an event with this number is refused."""
    with pytest.raises(InvalidEvent) as caught:
        parse(encoded(signed_pdu(version, content={"n": "@n@"}), n=lexeme), version)
    return caught.value.reason


@pytest.mark.parametrize("lexeme", REASONS)
def test_the_reason_says_what_is_wrong_with_a_number(lexeme: str) -> None:
    assert refusal(lexeme) == f"content.n: {REASONS[lexeme]}"


def test_the_reason_of_the_second_reader() -> None:
    assert refusal("1e400", "5") == "content.n: the number 1e400 is out of range"
    assert refusal("NaN", "5") == refusal("NaN") == "content.n: NaN is not JSON"
    assert (
        refusal('"\\ud800"', "5")
        == refusal('"\\ud800"')
        == ("content.n: a string holds a lone surrogate")
    )


def test_unpadded_is_the_base64_of_the_servers() -> None:
    assert all(
        unpadded(bytes([n]) * size) == encode_base64(bytes([n]) * size)
        for n in range(256)
        for size in (1, 2, 3, 32)
    )
