"""The published vectors that touch this layer. Where we differ from one, the test says why."""

import json
from typing import Any

import pytest
from signedjson.key import decode_signing_key_base64, decode_verify_key_base64, get_verify_key
from signedjson.sign import sign_json

from storage.errors import InvalidEvent, InvalidSignature
from storage.event import (
    content_hash,
    event_id,
    parse,
    redact,
    reference_hash,
    required_signers,
    sign,
    verify,
)
from storage.event.hashes import canonical, unpadded
from storage.event.reading import read
from tests.vectors import vectors

GMSL_JSON = vectors("gomatrixserverlib/canonical_json.json")
GMSL_SIGNED = vectors("gomatrixserverlib/event_signatures.json")
SPEC_JSON = vectors("matrix-spec/canonical_json.json")
SPEC_SIGNED = vectors("matrix-spec/signing.json")
POLICY = vectors("tuwunel/policy_server_signature_vectors.json")
TEST_KEY = decode_signing_key_base64("ed25519", "1", SPEC_SIGNED["seed"])


def canonical_of(text: str, *, strict: bool) -> str:
    """Through our reader, which takes objects only: other values are wrapped."""
    return canonical(read(b'{"_":' + text.encode() + b"}", strict=strict).value).decode()[
        len('{"_":') : -1
    ]


# --------------------------------------------------------------------------------------------------
# canonical JSON


def gmsl_pairs() -> list[tuple[str, str]]:
    pairs = [(case["input"], case["canonical"]) for case in GMSL_JSON["canonical"]]
    pairs += [
        (case["input"], case["want"])
        for case in GMSL_JSON["testSortJSON"] + GMSL_JSON["testCompactJSON"]
    ]
    return pairs + [
        (case["input"], case["canonical"])
        for case in vectors("python-canonicaljson/canonical_json.json")
    ]


@pytest.mark.parametrize("text,wanted", gmsl_pairs())
def test_canonical_json(text: str, wanted: str) -> None:
    assert canonical_of(text, strict=False) == wanted


@pytest.mark.parametrize("case", GMSL_JSON["invalid"], ids=lambda case: case["name"])
def test_what_canonical_json_forbids_is_refused_from_version_6(case: dict[str, str]) -> None:
    with pytest.raises(InvalidEvent, match="number"):
        read(case["input"].encode(), strict=True)


@pytest.mark.parametrize("case", GMSL_JSON["valid"], ids=lambda case: case["name"])
def test_canonical_json_is_read_and_written_unchanged(case: dict[str, str]) -> None:
    assert canonical(read(case["input"].encode(), strict=True).value) == case["input"].encode()


@pytest.mark.parametrize("case", SPEC_JSON[:-1])
def test_canonical_json_of_the_specification(case: dict[str, str]) -> None:
    assert canonical(read(case["input"].encode(), strict=True).value).decode() == case["canonical"]


def test_the_last_example_of_the_specification_is_read_as_python_servers_read_it() -> None:
    # `-0` and `1e10`: the appendix normalises them to 0 and 10000000000. canonicaljson, which the
    # servers hash with, does not turn a float into an integer, and versions 1 to 5 must hash as the
    # servers do; from version 6 it is refused.
    case = SPEC_JSON[-1]
    assert case["canonical"] == '{"a":0,"b":10000000000}'
    assert (
        canonical(read(case["input"].encode(), strict=False).value) == b'{"a":0,"b":10000000000.0}'
    )
    with pytest.raises(InvalidEvent, match="number"):
        read(case["input"].encode(), strict=True)


# ------------------------------------------------------------------------------------------------
# ids, hashes, redaction


@pytest.mark.parametrize(
    "case", vectors("gomatrixserverlib/event_ids.json"), ids=lambda case: case["event_id"]
)
def test_event_ids(case: dict[str, Any]) -> None:
    version, pdu = case["room_version"], case["event"]
    assert event_id(pdu, version) == case["event_id"]
    event = parse(json.dumps(pdu, indent=2).encode(), version)
    assert event.event_id == case["event_id"]
    assert event.content_hash_valid


def test_reference_hashes_that_events_cite() -> None:
    events = {
        pdu["event_id"]: pdu
        for pdu in vectors("gomatrixserverlib/v1_room_with_reference_hashes.json")
    }
    cited = 0
    for pdu in events.values():
        assert content_hash(pdu) == pdu["hashes"]["sha256"]
        for cited_id, hashes in pdu["prev_events"] + pdu["auth_events"]:
            assert unpadded(reference_hash(events[cited_id], "1")) == hashes["sha256"]
            cited += 1
        event = parse(pdu, "1")
        assert event.content_hash_valid
        assert event.prev_event_ids == tuple(pair[0] for pair in pdu["prev_events"])
        assert required_signers(event) == {"baba.is.you"}
    assert cited == 8


def test_a_tampered_event_reads_as_its_redacted_form() -> None:
    power, valid, tampered, redacted = vectors("gomatrixserverlib/v1_parse_hash_redacted.json")[
        "events"
    ]
    assert parse(power, "1").content_hash_valid
    assert parse(valid, "1").json == valid
    event = parse(tampered, "1")
    assert not event.content_hash_valid
    assert event.json == redacted
    assert event.content == {}
    assert event.raw == canonical(tampered)
    assert parse(redacted, "1").json == redacted


@pytest.mark.parametrize("case", vectors("gomatrixserverlib/redactions.json"))
def test_redactions(case: dict[str, Any]) -> None:
    assert redact(case["input"], case["room_version"]) == case["redacted"]
    assert redact(case["redacted"], case["room_version"]) == case["redacted"]


# --------------------------------------------------------------------------------------------------
# signatures


@pytest.mark.parametrize("pdu", GMSL_SIGNED["verify_ok"])
def test_signatures_that_fit(pdu: dict[str, Any]) -> None:
    verify(pdu, GMSL_SIGNED["room_version"], GMSL_SIGNED["server_name"], get_verify_key(TEST_KEY))


@pytest.mark.parametrize("case", GMSL_SIGNED["verify_not_ok"], ids=lambda case: case["reason"])
def test_signatures_that_do_not_fit(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidSignature) as caught:
        verify(
            case["event"],
            GMSL_SIGNED["room_version"],
            GMSL_SIGNED["server_name"],
            get_verify_key(TEST_KEY),
        )
    assert caught.value.event_id == case["event"]["event_id"]
    assert (caught.value.server_name, caught.value.key_id) == ("domain", "ed25519:1")


@pytest.mark.parametrize("case", GMSL_SIGNED["sign"] + SPEC_SIGNED["event_signing"])
def test_signing_events(case: dict[str, Any]) -> None:
    before = json.dumps(case["input"])
    assert sign(case["input"], "1", "domain", TEST_KEY) == case["signed"]
    assert json.dumps(case["input"]) == before


@pytest.mark.parametrize("case", SPEC_SIGNED["json_signing"])
def test_signing_json(case: dict[str, Any]) -> None:
    assert sign_json(dict(case["input"]), "domain", TEST_KEY) == case["signed"]


@pytest.mark.parametrize("case", POLICY["vectors"], ids=lambda case: case["room_version"])
def test_policy_server_signatures(case: dict[str, Any]) -> None:
    key = decode_verify_key_base64("ed25519", "policy_server", POLICY["public_key"])
    pdu = {
        **case["pdu"],
        "signatures": {
            **case["pdu"]["signatures"],
            POLICY["via"]: {"ed25519:policy_server": case["signature"]},
        },
    }
    verify(pdu, case["room_version"], POLICY["via"], key)
    # The signature is over the PDU without an event_id: with one in it, it is another object.
    with pytest.raises(InvalidSignature):
        verify(
            {**pdu, "event_id": POLICY["negative_event_id"]},
            case["room_version"],
            POLICY["via"],
            key,
        )
    assert event_id(pdu, case["room_version"]) != POLICY["negative_event_id"]
    assert event_id(
        {**pdu, "event_id": POLICY["negative_event_id"]}, case["room_version"]
    ) == event_id(pdu, case["room_version"])


# --------------------------------------------------------------------------------------------------
# shapes of the spec


def example(name: str) -> dict[str, Any]:
    """A PDU example with its `$ref` and `allOf` put together."""
    return resolved(vectors(f"matrix-spec/pdu_examples/{name}"))


def resolved(pdu: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for part in pdu.pop("allOf", []):
        result.update(resolved(part))
    if "$ref" in pdu:
        result.update(example(pdu.pop("$ref")))
    return {**result, **pdu}


@pytest.mark.parametrize(
    "name,version",
    [
        ("pdu_v1.json", "1"),
        ("pdu_v1.json", "2"),
        ("pdu_v3.json", "3"),
        ("pdu_v4.json", "4"),
        ("pdu_v4.json", "10"),
        ("pdu_v4_join_membership.json", "9"),
        ("pdu_v11.json", "11"),
        ("pdu_v12.json", "12"),
    ],
)
def test_example_pdus_parse_in_redacted_form(name: str, version: str) -> None:
    # Their hashes and signatures are made up, so the content hash cannot fit.
    pdu = example(name)
    event = parse(pdu, version)
    assert not event.content_hash_valid
    assert event.json == redact(pdu, version)
    assert (event.sender, event.type, event.depth) == (pdu["sender"], pdu["type"], 12)
    assert event.prev_event_ids
    assert event.room_id == pdu["room_id"]


def test_required_signers_of_the_restricted_join_example() -> None:
    event = parse(example("pdu_v4_join_membership.json"), "9")
    assert required_signers(event) == {"example.com", "resident.example.com"}


def test_a_minimal_pdu_is_no_event() -> None:
    with pytest.raises(InvalidEvent, match="missing"):
        parse(example("minimal_pdu.json"), "11")
