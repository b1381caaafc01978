"""Third-party invites: keys and signatures of every odd shape, and a bound on the work."""

from typing import Any

import pytest
from signedjson.key import generate_signing_key, get_verify_key
from signedjson.sign import sign_json
from unpaddedbase64 import encode_base64

from storage.auth import check
from storage.auth.membership import VERIFICATIONS_MAX
from storage.errors import AuthDenied
from storage.event import Event
from tests.auth.events import CREATOR, make_create, make_event, state_of

KEY = generate_signing_key("1")
PUBLIC = encode_base64(get_verify_key(KEY).encode())
OTHER = encode_base64(get_verify_key(generate_signing_key("2")).encode())
TARGET = "@guest:b"


def signed(**more: Any) -> dict[str, Any]:
    result: dict[str, Any] = sign_json({"mxid": TARGET, "token": "token"} | more, "id.example", KEY)
    return result


def invite(signed_object: Any) -> Event:
    content = {"membership": "invite", "third_party_invite": {"signed": signed_object}}
    return make_event("10", "$invite", "m.room.member", CREATOR, TARGET, content)


def accepted(signed_object: Any, keys: dict[str, Any]) -> bool:
    """Whether a signature fits; any other reason to refuse is an error here."""
    state = state_of(
        make_create("10"),
        make_event("10", "$third", "m.room.third_party_invite", CREATOR, "token", keys),
    )
    try:
        check(invite(signed_object), state, "10")
    except AuthDenied as denial:
        if denial.rule != "member.third_party.signature":
            raise
        return False
    return True


@pytest.mark.parametrize(
    "keys",
    [
        {"public_key": PUBLIC},
        {"public_key": PUBLIC + "="},
        {"public_keys": [{"public_key": PUBLIC}]},
        {"public_key": OTHER, "public_keys": [{"public_key": OTHER}, {"public_key": PUBLIC}]},
        {
            "public_key": "not base64 !",
            "public_keys": [None, {}, {"public_key": 5}, {"public_key": PUBLIC}],
        },
    ],
)
def test_a_key_fits(keys: dict[str, Any]) -> None:
    assert accepted(signed(), keys)
    assert accepted(signed(unsigned={"age": 1}) | {"unsigned": {"age": 2}}, keys)


@pytest.mark.parametrize(
    "keys",
    [{}, {"public_key": OTHER}, {"public_key": None}, {"public_keys": "x"}, {"public_key": "AAAA"}],
)
def test_no_key_fits(keys: dict[str, Any]) -> None:
    assert not accepted(signed(), keys)


@pytest.mark.parametrize(
    "signatures",
    [
        None,
        "x",
        {"id.example": None},
        {"id.example": {"ed25519:1": 5}},
        {"id.example": {"ed25519:1": "AAAA"}},
        {"id.example": {"curve25519:1": signed()["signatures"]["id.example"]["ed25519:1"]}},
    ],
)
def test_no_signature_fits(signatures: Any) -> None:
    assert not accepted(signed() | {"signatures": signatures}, {"public_key": PUBLIC})


@pytest.mark.parametrize("more", [{"x": 1}, {"x": float("nan")}, {"x": "\ud800"}])
def test_what_was_not_signed(more: dict[str, Any]) -> None:
    assert not accepted(signed() | more, {"public_key": PUBLIC})


def test_the_work_is_bounded() -> None:
    """More pairs than are tried, the one that fits far behind: refused, not searched for."""
    many_keys = [{"public_key": encode_base64(bytes([n]) * 32)} for n in range(100)]
    many = {
        f"s{n}": {"ed25519:1": encode_base64(bytes([n]) * 64)}
        for n in range(VERIFICATIONS_MAX // 100 + 1)
    }
    fitting = signed()
    assert accepted(fitting, {"public_keys": [*many_keys, {"public_key": PUBLIC}]})
    crowded = fitting | {"signatures": fitting["signatures"] | many}
    assert not accepted(crowded, {"public_keys": [*many_keys, {"public_key": PUBLIC}]})


@pytest.mark.parametrize("token", [5, None, [], {}, "other"])
def test_a_token_without_a_third_party_invite(token: object) -> None:
    third = make_event(
        "10", "$third", "m.room.third_party_invite", CREATOR, "token", {"public_key": PUBLIC}
    )
    with pytest.raises(AuthDenied) as denial:
        check(invite({**signed(), "token": token}), state_of(make_create("10"), third), "10")
    assert (denial.value.rule, denial.value.reason) == (
        "member.third_party.token",
        f"no third-party invite under token {token!r}",
    )
