"""Signing, verifying and who has to sign."""

from typing import Any

import pytest
from signedjson.key import generate_signing_key, get_verify_key

from storage.errors import InvalidEvent, InvalidSignature
from storage.event import (
    content_hash,
    parse,
    redact,
    required_signers,
    sign,
    signatures,
    verify,
    verify_event,
)
from tests.event.building import KEY, PAIRED, SERVER, VERIFY_KEY, VERSIONS, signed_pdu, unsigned_pdu


@pytest.mark.parametrize("version", VERSIONS)
def test_a_signature_survives_redaction_and_not_a_change(version: str) -> None:
    pdu = signed_pdu(version)
    verify(pdu, version, SERVER, VERIFY_KEY)
    verify(redact(pdu, version), version, SERVER, VERIFY_KEY)
    verify({**pdu, "unsigned": {"age": 5}}, version, SERVER, VERIFY_KEY)
    with pytest.raises(InvalidSignature):
        verify({**pdu, "depth": 8}, version, SERVER, VERIFY_KEY)


def test_signing_again_keeps_the_other_signatures_and_the_argument() -> None:
    other = generate_signing_key("2")
    pdu = {**unsigned_pdu("11"), "hashes": {"sha512": "other"}}
    first = sign(pdu, "11", SERVER, KEY)
    second = sign(first, "11", "b.org", other)
    third = sign(second, "11", SERVER, other)
    assert pdu == {**unsigned_pdu("11"), "hashes": {"sha512": "other"}}
    assert first["hashes"] == {"sha512": "other", "sha256": content_hash(pdu)}
    assert set(first["signatures"]) == {SERVER}
    assert set(first["signatures"][SERVER]) == {"ed25519:1"}
    assert set(third["signatures"][SERVER]) == {"ed25519:1", "ed25519:2"}
    for server, key in ((SERVER, KEY), ("b.org", other), (SERVER, other)):
        verify(third, "11", server, get_verify_key(key))


@pytest.mark.parametrize("version", PAIRED)
def test_versions_1_and_2_keep_the_event_id_they_are_given(version: str) -> None:
    pdu = signed_pdu(version, event_id="$mine:b.org")
    assert pdu["event_id"] == "$mine:b.org"
    with pytest.raises(InvalidSignature):
        verify({**pdu, "event_id": "$other:b.org"}, version, SERVER, VERIFY_KEY)


@pytest.mark.parametrize(
    "signatures",
    [..., None, [], {}, {SERVER: None}, {SERVER: {}}, {SERVER: {"ed25519:1": 5}},
     {SERVER: {"ed25519:1": "?"}}, {SERVER: {"ed25519:1": "é"}}, {SERVER: {"ed25519:1": "AAAA"}},
     {SERVER: {"ed25519:1": "A" * 86}}, {SERVER: {"ed25519:2": "A" * 86}}],
)  # fmt: skip
def test_broken_signatures(signatures: object) -> None:
    pdu = {**signed_pdu("11"), "signatures": signatures}
    with pytest.raises(InvalidSignature) as caught:
        verify(
            {key: value for key, value in pdu.items() if value is not ...}, "11", SERVER, VERIFY_KEY
        )
    assert caught.value.event_id is not None
    assert caught.value.server_name == SERVER


def test_verifying_what_is_not_json() -> None:
    pdu = signed_pdu("11")
    pdu["depth"] = float("nan")
    with pytest.raises(InvalidSignature, match="not JSON") as caught:
        verify(pdu, "11", SERVER, VERIFY_KEY)
    assert caught.value.event_id is None
    with pytest.raises(InvalidEvent):
        sign(pdu, "11", SERVER, KEY)
    with pytest.raises(InvalidEvent):
        sign({**unsigned_pdu("11"), "hashes": {"sha512": float("nan")}}, "11", SERVER, KEY)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"content": {"body": "é\u2028\x7f", "deep": [[[0]]]}},
        {"unsigned": {"age": 5}},
        {"zzz": -0},
        {"event_id": "$covered:example.org"},
    ],
)
def test_an_event_that_was_read_verifies_as_its_dict_does(
    version: str, change: dict[str, Any]
) -> None:
    pdu = signed_pdu(version, **change)
    verify_event(parse(pdu, version), SERVER, VERIFY_KEY)
    redacted = parse({**pdu, "content": {"body": "another"}}, version)
    assert not redacted.content_hash_valid
    verify_event(redacted, SERVER, VERIFY_KEY)
    with pytest.raises(InvalidSignature, match="Signature was forged"):
        verify_event(parse({**pdu, "depth": 8}, version), SERVER, VERIFY_KEY)
    with pytest.raises(InvalidSignature) as caught:
        verify_event(parse(pdu, version), "b.org", VERIFY_KEY)
    assert caught.value.reason == "missing"


def test_a_good_signature_is_not_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow path is for values that do not fit, and where the reference hash covers others."""
    asked: list[str] = []
    monkeypatch.setattr(
        signatures, "verify", lambda _, version, *__: asked.append(version.identifier)
    )
    for version in VERSIONS:
        verify_event(parse(signed_pdu(version), version), SERVER, VERIFY_KEY)
    assert asked == ["1", "2"]
    named = signed_pdu("11", event_id="$covered:example.org")
    verify_event(parse(named, "11"), SERVER, VERIFY_KEY)
    assert asked == ["1", "2", "11"]


@pytest.mark.parametrize("signature", ["?", "é", "AAAA", "A" * 86, 5, None, []])
def test_a_broken_signature_of_an_event_that_was_read(signature: object) -> None:
    pdu = {**signed_pdu("11"), "signatures": {SERVER: {"ed25519:1": signature}}}
    with pytest.raises(InvalidSignature):
        verify_event(parse(pdu, "11"), SERVER, VERIFY_KEY)


def signers(version: str, **changes: Any) -> set[str]:
    return set(required_signers(parse(signed_pdu(version, **changes), version)))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_sender_signs_and_in_versions_1_and_2_the_event_id(version: str) -> None:
    own = {"event_id": "$own:id.org"} if version in PAIRED else {}
    ids = {"id.org"} if version in PAIRED else set()
    assert signers(version, **own) == {"example.org"} | ids
    assert signers(version, sender="@a:b.org:8448", **own) == {"b.org:8448"} | ids
    invite = {
        "type": "m.room.member",
        "state_key": "@b:c.org",
        "content": {"membership": "invite", "third_party_invite": {}},
    }
    assert signers(version, **invite, **own) == ids
    assert signers(version, **{**invite, "type": "m.room.message"}, **own) == {"example.org"} | ids
    assert (
        signers(
            version,
            **{**invite, "content": {"membership": "join", "third_party_invite": {}}},
            **own,
        )
        == {"example.org"} | ids
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_server_that_authorises_a_restricted_join_signs(version: str) -> None:
    content: dict[str, Any] = {"membership": "join", "join_authorised_via_users_server": "@b:c.org"}
    change = {"type": "m.room.member", "state_key": "@alice:example.org", "content": content}
    assert ("c.org" in signers(version, **change)) == (int(version) >= 8)
    content["membership"] = "leave"
    assert signers(version, **change) == {"example.org"}
    content.update(membership="join", join_authorised_via_users_server=5)
    assert signers(version, **change) == {"example.org"}


def test_who_signs_is_read_before_a_wrong_content_hash_redacts() -> None:
    content = {"membership": "invite", "third_party_invite": {"signed": {}}}
    pdu = signed_pdu("10", type="m.room.member", state_key="@b:c.org", content=content)
    event = parse({**pdu, "content": {**content, "reason": "changed"}}, "10")
    assert not event.content_hash_valid
    assert "third_party_invite" not in event.content
    assert required_signers(event) == set()
