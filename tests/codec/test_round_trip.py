"""Whatever bytes an event has, the stored form gives the same bytes."""

import json
import os
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codec import encode, format_compact
from storage.event import ROOM_VERSIONS, redact
from storage.event.hashes import canonical
from storage.testing import SHAPES
from tests.codec.stored import (
    DICTIONARY,
    Own,
    columns_of,
    length,
    restored,
    room_events,
    unusual,
)
from tests.event.building import SERVER, signed_pdu
from tests.vectors import vectors, vectors_folder

examples = settings(deadline=None, max_examples=int(os.environ.get("STORAGE_EXAMPLES", "100")))

text = st.text(max_size=20) | st.sampled_from(
    ["\x01", "\x02\x03", '"', "\\", "$" + "a" * 43, '","depth":7,', '"hashes":{"sha256":"', "}},"]
)
keys = text | st.sampled_from(["event_id", "hashes", "signatures", "unsigned", "depth", "redacts"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(keys, values, max_size=4)
columns = st.builds(Own, text, text)


@pytest.mark.parametrize("version", ROOM_VERSIONS)
def test_every_event_of_every_version(version: str) -> None:
    create, *others = [restored(raw, own) for raw, own in room_events("small_chat", 60, version)]
    assert create == (1 if version == "12" else 2)
    assert set(others) == {1 if version in {"1", "2"} else 2}


@pytest.mark.parametrize("shape", SHAPES)
def test_events_of_every_shape(shape: str) -> None:
    for raw, own in room_events(shape, 80, "11"):
        assert restored(raw, own) in {1, 2}


@examples
@given(st.sampled_from([*ROOM_VERSIONS]), objects, objects, objects, st.booleans(), st.booleans())
def test_hostile_contents(
    version: str,
    content: dict[str, Any],
    unsigned: dict[str, Any],
    more: dict[str, Any],
    is_canonical: bool,
    wrong_hash: bool,
) -> None:
    changes = {key: value for key, value in more.items() if key not in ALWAYS}
    pdu = {**signed_pdu(version, content=content, **changes), "unsigned": unsigned}
    if wrong_hash:
        pdu["hashes"] = {"sha256": "x" * 43}
    own = Own("$e:a", pdu["room_id"])
    restored(canonical(pdu) if is_canonical else json.dumps(pdu).encode(), own)


ALWAYS = {"event_id", "hashes", "signatures", "unsigned", "depth"}


@examples
@given(st.binary(max_size=300), columns)
def test_any_bytes_and_any_columns(raw: bytes, own: Own) -> None:
    restored(raw, own)


@examples
@given(columns)
def test_columns_that_belong_to_another_event(own: Own) -> None:
    raw, _ = room_events("small_chat", 9, "11")[-1]
    restored(raw, own)


def test_mutated_events() -> None:
    """Events with bytes replaced, inserted and removed, and with the marks of the format."""
    rng = random.Random(5)
    events = room_events("small_chat", 60, "11") + room_events("busy_federation", 60, "6")
    for _ in range(int(os.environ.get("STORAGE_EXAMPLES", "4000"))):
        raw, own = rng.choice(events)
        restored(mutated(raw, rng), own)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data.insert(at, rng.choice(b'\x01\x02\x03\x04\x05{}[]",:$A'))
            case 2:
                del data[at : at + rng.randrange(1, 5)]
            case _:
                end = at + rng.randrange(1, 60)
                data[at:at] = data[at:end]
    return bytes(data)


def test_published_examples() -> None:
    for path in sorted(vectors_folder().rglob("*.json")):
        for pdu in objects_in(json.loads(path.read_text("utf-8"))):
            own = Own("$a", str(pdu.get("room_id")))
            restored(json.dumps(pdu).encode(), own)
            restored(json.dumps(pdu, sort_keys=True, separators=(",", ":")).encode(), own)


def objects_in(value: Any) -> list[dict[str, Any]]:
    """All objects of a document, the inner ones too."""
    if isinstance(value, list):
        return [one for item in value for one in objects_in(item)]
    if isinstance(value, dict):
        return [value, *(one for item in value.values() for one in objects_in(item))]
    return []


def test_published_events_of_version_1() -> None:
    named = vectors("gomatrixserverlib/v1_room_with_reference_hashes.json")
    found = [one for one in objects_in(named) if {"room_id", "sender"} <= one.keys()]
    assert found
    for pdu in found:
        raw = canonical(pdu)
        assert restored(raw, columns_of(raw, "1")) == (1 if pdu["auth_events"] else 2)


def test_a_redacted_form_is_compact_with_its_hash() -> None:
    raw, own = room_events("small_chat", 40, "11")[-1]
    redacted = canonical(redact(json.loads(raw), "11"))
    assert restored(redacted, own) == 2


def test_a_content_hash_with_bits_beyond_its_bytes_is_kept_as_text() -> None:
    """Base64 has four ways to write the last character; only one of them is binary again."""
    pdu = signed_pdu("11", prev_events=[], auth_events=[])
    own = columns_of(canonical(pdu), "11")
    for last in "ABCDE":
        pdu["hashes"] = {"sha256": "a" * 42 + last}
        assert restored(canonical(pdu), own) == (2 if last in "AE" else 1)


@pytest.mark.parametrize("key,most", [("auth_events", 21), ("prev_events", 127)])
def test_more_references_than_the_format_counts_are_compressed(key: str, most: int) -> None:
    """No room version allows as many. The encoder must not fail all the same."""
    own = Own("$a", "!room:example.org")
    pdu = signed_pdu("11", prev_events=[], auth_events=[])
    for count, form in ((most, 2), (most + 1, 1), (300, 1)):
        pdu[key] = ["$" + f"{number:042}A" for number in range(count)]
        assert restored(canonical(pdu), own) == form


def test_more_ids_than_the_format_counts_are_compressed() -> None:
    for count, form in ((253, 2), (254, 1)):
        ids = ["$" + f"{number:042}A" for number in range(count)]
        raw = canonical(signed_pdu("11", prev_events=[], auth_events=[], content={"ids": ids}))
        assert restored(raw, columns_of(raw, "11")) == form


@pytest.mark.parametrize(
    "changes,form",
    [
        ({"content": {"m.relates_to": {"event_id": "$" + "r" * 42 + "A", "key": "+1"}}}, 2),
        ({"content": {"m.relates_to": {"event_id": "$" + "r" * 43, "key": "+1"}}}, 1),
        ({"content": {"replaced": "@alice:example.org"}, "state_key": "@alice:example.org"}, 2),
        ({"origin": SERVER, "prev_state": [], "redacts": "$" + "r" * 43}, 2),
        ({"depth": 0, "origin_server_ts": 0}, 2),
        ({"prev_events": [], "auth_events": []}, 2),
        ({"content": {}, "state_key": ""}, 2),
    ],
)
def test_forms_that_real_events_have(changes: dict[str, Any], form: int) -> None:
    pdu = {**signed_pdu("11", **{"prev_events": [], "auth_events": [], **changes})}
    raw = canonical(pdu)
    assert restored(raw, columns_of(raw, "11")) == form
    raw = canonical({**pdu, "unsigned": {"age_ts": pdu["origin_server_ts"]}})
    assert restored(raw, columns_of(raw, "11")) == form


@pytest.mark.parametrize("other", [".", "é", " ", "="])
@pytest.mark.parametrize("letters", [0, 2, 3, 39, 41])
def test_ids_in_the_content_that_are_no_base64(other: str, letters: int) -> None:
    """Base64 passes over other characters, so that less than an id is left of each."""
    named = "$" + "a" * letters + other * (43 - letters)
    pdu = signed_pdu("11", prev_events=[], auth_events=[], content={"ids": [named] * 4})
    raw = canonical(pdu)
    restored(raw, columns_of(raw, "11"))


def test_other_bytes_than_canonical_json_are_compressed() -> None:
    raw, own = unusual(content={"body": "hello " * 20})
    assert restored(raw, own) == 1


@pytest.mark.parametrize("server", ["a.example", "other.example"])
def test_two_signatures_are_compact(server: str) -> None:
    """One server is before the sender's in the order of canonical JSON, one after it."""
    pdu = signed_pdu("11", prev_events=[], auth_events=[])
    pdu["signatures"][server] = {"ed25519:1": "A" * 86}
    raw = canonical(pdu)
    assert restored(raw, columns_of(raw, "11")) == 2


def test_an_event_without_a_signature_is_compressed() -> None:
    pdu = {**signed_pdu("11", prev_events=[], auth_events=[]), "signatures": {}}
    raw = canonical(pdu)
    assert restored(raw, columns_of(raw, "11")) == 1


def test_a_value_too_long_to_be_remembered_is_compressed() -> None:
    for count, form in ((800, 2), (1_100, 1)):
        pdu = signed_pdu("11", prev_events=[], auth_events=[], redacts="x" * count)
        raw = canonical(pdu)
        assert restored(raw, columns_of(raw, "11")) == form


def test_bytes_that_do_not_get_shorter_stay() -> None:
    assert restored(b"{}", Own("$a", "!a")) == 0


def test_a_compact_event_is_much_shorter() -> None:
    events = room_events("small_chat", 300, "11")
    before = sum(len(raw) for raw, _ in events)
    after = sum(length(encode(raw, *own, DICTIONARY)) for raw, own in events)
    assert after < 0.45 * before


def test_threads_share_a_dictionary() -> None:
    events = room_events("small_chat", 200, "11")
    failures: list[object] = []

    def work() -> None:
        failures.extend(raw for raw, own in events * 3 if restored(raw, own) == 0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_defect_of_the_format_costs_space_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding decodes what it has made: it falls back where the bytes differ."""
    raw, own = room_events("small_chat", 9, "11")[-1]
    assert restored(raw, own) == 2
    monkeypatch.setattr(format_compact, "_list", lambda *_: b"")
    assert restored(raw, own) == 1
