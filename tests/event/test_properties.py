"""Properties of every event, checked with hypothesis."""

import contextlib
import json
from typing import Any

import pytest
from canonicaljson import encode_canonical_json
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import InvalidEvent
from storage.event import (
    ROOM_VERSIONS,
    content_hash,
    event_id,
    load,
    parse,
    redact,
    reference_hash,
    verify,
)
from storage.event.hashes import canonical, content_hash_fits, hashed
from storage.event.hashes import encoded as encoded_exactly
from tests.event.building import SERVER, STRICT, VERIFY_KEY, VERSIONS, encoded, signed_pdu

quick = settings(deadline=None, max_examples=200)

text = st.text(st.characters(codec="utf-8"), max_size=12)
strict_numbers = st.integers(-(2**53) + 1, 2**53 - 1)
values = st.recursive(
    st.none() | st.booleans() | strict_numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=10,
)
objects = st.dictionaries(text, values, max_size=4)
versions = st.sampled_from(VERSIONS)
event_types = st.sampled_from(
    [*ROOM_VERSIONS["1"].redaction_content, "m.room.redaction", "m.room.message"]
)
content_keys = st.sampled_from(
    [
        "membership",
        "creator",
        "join_rule",
        "allow",
        "aliases",
        "users",
        "invite",
        "redacts",
        "third_party_invite",
        "history_visibility",
    ],
)
contents = st.dictionaries(
    content_keys | text, values | st.dictionaries(st.just("signed"), values), max_size=5
)
extras = st.dictionaries(
    text | st.sampled_from(["origin", "membership", "prev_state", "redacts", "age_ts"]),
    values,
    max_size=2,
)


@st.composite
def signed(draw: st.DrawFn, version: str | None = None) -> tuple[str, dict[str, Any]]:
    """(room version, a signed PDU of it) with any content and any further keys."""
    chosen = version or draw(versions)
    pdu = signed_pdu(chosen)  # its keys win over the extra ones
    changes: dict[str, Any] = {
        key: value
        for key, value in draw(extras).items()
        if key not in pdu and key not in ("state_key", "unsigned")
    }
    changes.update(
        type=draw(event_types), content=draw(contents), depth=draw(st.integers(0, 2**53 - 1))
    )
    if draw(st.booleans()):
        changes["state_key"] = draw(text.filter(lambda key: "\0" not in key))
    if chosen == "12" and changes["type"] == "m.room.create":
        changes["room_id"] = ...
    return chosen, signed_pdu(chosen, **changes)


@quick
@given(signed())
def test_what_is_signed_verifies_and_parses(case: tuple[str, dict[str, Any]]) -> None:
    version, pdu = case
    verify(pdu, version, SERVER, VERIFY_KEY)
    verify(redact(pdu, version), version, SERVER, VERIFY_KEY)
    raw = encoded(pdu)
    event = parse(raw, version)
    assert event.raw == raw
    assert event.json == pdu
    assert event.content_hash_valid
    assert load(raw, version, event.event_id) == event
    assert parse(canonical(pdu), version).event_id == event.event_id == event_id(pdu, version)


@quick
@given(signed(), objects, objects)
def test_unsigned_and_signatures_are_no_part_of_what_an_event_is(
    case: tuple[str, dict[str, Any]],
    unsigned: dict[str, Any],
    signatures: dict[str, Any],
) -> None:
    version, pdu = case
    other = {**pdu, "unsigned": unsigned, "signatures": signatures}
    assert event_id(other, version) == event_id(pdu, version)
    assert content_hash(other) == content_hash(pdu)
    assert parse(other, version).content_hash_valid
    assert parse(other, version).event_id == parse(pdu, version).event_id


@quick
@given(signed())
def test_redaction_is_idempotent_and_keeps_id_and_signature(
    case: tuple[str, dict[str, Any]],
) -> None:
    version, pdu = case
    redacted = redact(pdu, version)
    assert redact(redacted, version) == redacted
    assert reference_hash(redacted, version) == reference_hash(pdu, version)
    assert event_id(redacted, version) == event_id(pdu, version)
    assert all(redacted[key] == pdu[key] for key in redacted if key != "content")
    assert redacted["content"].keys() <= pdu["content"].keys()


@quick
@given(signed(), contents)
def test_another_content_is_found_by_the_content_hash(
    case: tuple[str, dict[str, Any]], content: dict[str, Any]
) -> None:
    version, pdu = case
    event = parse({**pdu, "content": content}, version)
    assert event.content_hash_valid == (canonical(content) == canonical(pdu["content"]))
    if not event.content_hash_valid:
        assert event.json == redact({**pdu, "content": content}, version)


# One encoding for both hashes must give what two give, also where contents imitate the pieces it is
# cut at.
imitations = st.sampled_from(
    [
        {"depth": 7, "hashes": {"sha256": "x"}, "origin_server_ts": 1},
        {"a": [1], "content": {}},
        {"auth_events": ["],", '],"content":'], "content": {"depth": 7}},
        {'],"content":': '],"content":', "z": ',"depth":7,"hashes":{"sha256":"x"},'},
    ],
)
given_hashes = st.sampled_from(
    [
        {"sha256": "x"},
        {"sha256": 'x"},"a":{"b":"c'},
        {"sha256": "\\"},
        {"sha256": "é"},
        {"sha256": "\n"},
        {"sha256": "x", "md5": "y"},
        {},
        {"sha256": 1},
    ],
)


@quick
@given(
    signed(),
    given_hashes | st.none(),
    st.lists(imitations, max_size=2),
    imitations | contents,
    st.sampled_from([7, 8]),
)
def test_orjson_gives_the_hashes_of_canonicaljson(
    case: tuple[str, dict[str, Any]],
    hashes: dict[str, Any] | None,
    inside: list[dict[str, Any]],
    content: dict[str, Any],
    depth: int,
) -> None:
    version, pdu = case
    pdu = {**pdu, "depth": depth, "content": {**content, "inside": inside}}
    pdu["hashes"] = {"sha256": content_hash(pdu)} if hashes is None else hashes
    if hashes is None:
        pdu["content"]["own"] = {"a": 1, "depth": depth, "hashes": pdu["hashes"], "x": 1}
    for exact in (True, False):
        found = hashed(pdu, ROOM_VERSIONS[version], exact=exact)
        assert found[:2] == (content_hash_fits(pdu), event_id(pdu, version))
        assert found.signed in {None, _signed(pdu, version)}
        assert (found.signed is None) == (version in {"1", "2"} or "event_id" in pdu)


def _signed(pdu: dict[str, Any], version: str) -> bytes:
    """Return what the signatures of a PDU cover, as the specification says."""
    covered = redact(pdu, version)
    covered.pop("signatures", None)
    return canonical(covered)


everything = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
integers = st.integers(-(2**53) + 1, 2**53 - 1) | st.sampled_from([0, -1, 2**53 - 1, -(2**53) + 1])
written = st.recursive(
    st.none() | st.booleans() | integers | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=20), inner, max_size=8)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=20), written, max_size=8))
def test_orjson_writes_the_bytes_of_canonicaljson(value: dict[str, Any]) -> None:
    assert encoded_exactly(value, exact=True) == encode_canonical_json(value)


def test_orjson_escapes_and_sorts_every_character_as_canonicaljson_does() -> None:
    keys: dict[str, Any] = {"text": everything, **dict.fromkeys(everything, 0)}
    assert encoded_exactly(keys, exact=True) == encode_canonical_json(keys)


@pytest.mark.parametrize("levels", [100, 253, 254, 255, 499])
def test_what_is_nested_too_deeply_for_orjson_is_written_all_the_same(levels: int) -> None:
    value = json.loads('{"a":' * levels + "{}" + "}" * levels)
    assert encoded_exactly(value, exact=True) == encode_canonical_json(value)


def test_a_lone_surrogate_is_refused_by_both() -> None:
    for exact in (True, False):
        with pytest.raises(InvalidEvent, match="surrogate"):
            encoded_exactly({"a": "\ud800"}, exact=exact)


@pytest.mark.parametrize(
    "hashes,inside",
    [
        # The piece that is looked for stands in the content as well; only in the content, as a
        # second hash follows; only in the content, as a quote or a backslash is escaped where the
        # hash stands.
        ({"sha256": "x"}, {"a": 1, "depth": 7, "hashes": {"sha256": "x"}, "z": 1}),
        ({"sha256": "x", "sha512": "y"}, {"a": 1, "depth": 7, "hashes": {"sha256": "x"}, "z": 1}),
        (
            {"sha256": 'x"},"i":{"c":"d'},
            {"a": 1, "depth": 7, "hashes": {"sha256": "x"}, "i": {"c": "d"}, "z": 1},
        ),
        ({"sha256": "a\\b"}, {"a": 1, "depth": 7, "hashes": {"sha256": "a\b"}, "z": 1}),
    ],
)
def test_a_content_that_imitates_an_event_is_hashed_like_any_other(
    hashes: dict[str, Any], inside: dict[str, Any]
) -> None:
    pdu = {**signed_pdu("11"), "content": {"x": inside}, "hashes": hashes}
    found = hashed(pdu, ROOM_VERSIONS["11"], exact=True)
    assert found == (False, event_id(pdu, "11"), _signed(pdu, "11"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("extra", [{}, {"display_name": "d"}])
def test_a_content_that_redaction_shortens_inside_is_hashed_in_its_redacted_form(
    version: str, extra: dict[str, Any]
) -> None:
    invite = {"membership": "invite", "third_party_invite": {"signed": {"token": "t"}, **extra}}
    pdu = signed_pdu(version, type="m.room.member", state_key="@b:c", content=invite)
    found = hashed(pdu, ROOM_VERSIONS[version], exact=True)
    assert found[:2] == (True, event_id(pdu, version))


# --------------------------------------------------------------------------------------------------
# hostile input


def outcome(raw: bytes, version: str) -> None:
    """Either an event that holds what came in, or InvalidEvent: anything else fails the test."""
    try:
        event = parse(raw, version)
    except InvalidEvent:
        return
    assert event.raw == raw or ("unsigned" not in event.json and b"nsigned" in raw)
    assert load(event.raw, version, event.event_id, redacted=not event.content_hash_valid) == event


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=200), versions)
def test_arbitrary_bytes(raw: bytes, version: str) -> None:
    outcome(raw, version)


any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["$a:b", "@a:b", "!a:b", "$a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
near_events = st.fixed_dictionaries(
    {}, optional=dict.fromkeys([*signed_pdu("1"), "state_key", "unsigned", "redacts"], any_json)
)


@settings(deadline=None, max_examples=500)
@given(near_events, versions)
def test_arbitrary_objects(pdu: dict[str, Any], version: str) -> None:
    outcome(json.dumps(pdu).encode(), version)
    outcome(json.dumps({**signed_pdu(version), **pdu}).encode(), version)


@settings(deadline=None, max_examples=300)
@given(versions, st.sampled_from([*signed_pdu("1"), "state_key", "unsigned", "redacts"]), any_json)
def test_one_arbitrary_value_in_a_good_event(version: str, key: str, value: object) -> None:
    outcome(json.dumps({**signed_pdu(version), key: value}).encode(), version)
    with contextlib.suppress(InvalidEvent):
        parse({**signed_pdu(version), key: value}, version)


@settings(deadline=None, max_examples=300)
@given(versions, st.integers(0, 10_000), st.binary(max_size=4), st.integers(0, 8))
def test_a_good_event_with_bytes_overwritten(
    version: str, place: int, patch: bytes, length: int
) -> None:
    raw = encoded(signed_pdu(version, state_key="", content={"n": 1, "s": "\\u00e9"}))
    place %= len(raw)
    outcome(raw[:place] + patch + raw[place + length :], version)


numbers = st.from_regex(
    r"-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,4})?([eE][+-]?[0-9]{1,3})?", fullmatch=True
)


@settings(deadline=None, max_examples=500)
@given(numbers)
@pytest.mark.parametrize("version", ["5", "6"])
def test_any_number_is_read_as_python_reads_it_or_refused(version: str, lexeme: str) -> None:
    raw = encoded({**signed_pdu(version), "signatures": {"n": "@n@"}}, n=lexeme)
    plain = lexeme.lstrip("-").isdigit() and abs(int(lexeme)) < 2**53 and lexeme != "-0"
    try:
        event = parse(raw, version)
    except InvalidEvent:
        assert not plain
        assert version in STRICT or "e" in lexeme.lower()  # out of the range of a double
        return
    assert plain or version not in STRICT
    read = event.json["signatures"]["n"]
    assert (type(read), repr(read)) == (type(json.loads(lexeme)), repr(json.loads(lexeme)))
