"""Invitations that answer an `m.room.third_party_invite`.

The identity server's signature replaces the power level check.

Source: room versions 1 to 12, authorization rules, membership `invite` with `third_party_invite`.
"""

from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any, Final

from canonicaljson import encode_canonical_json
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey
from unpaddedbase64 import decode_base64

from storage.auth.state_keys import THIRD_PARTY_INVITE, denied
from storage.event import Event
from storage.ids import StateKey

VERIFICATIONS_MAX: Final = 1000
"""Pairs of key and signature to try, about 60 ms.

Two events of 64 KiB could otherwise require half a million verifications.
"""


def check_third_party_invite(
    event: Event, target: str, auth_state: Mapping[StateKey, Event]
) -> None:
    """Raise AuthDenied unless the signed token names the target and a third-party invite allows it.

    That invite has the same sender, and a key that fits a signature of the token.
    """
    third_party = event.content["third_party_invite"]
    signed = third_party.get("signed") if isinstance(third_party, dict) else None
    if not isinstance(signed, dict):
        raise denied(event, "member.third_party.signed", "no `signed` object")
    if "mxid" not in signed or "token" not in signed:
        raise denied(event, "member.third_party.fields", f"`signed` has only {sorted(signed)}")
    if signed["mxid"] != target:
        raise denied(
            event, "member.third_party.mxid", f"signed for {signed['mxid']!r}, invited is {target}"
        )
    token = signed["token"]
    invite = auth_state.get((THIRD_PARTY_INVITE, token)) if isinstance(token, str) else None
    if invite is None:
        raise denied(
            event, "member.third_party.token", f"no third-party invite under token {token!r}"
        )
    if event.sender != invite.sender:
        raise denied(
            event,
            "member.third_party.sender",
            f"sender {event.sender}, third-party invite by {invite.sender}",
        )
    if not _any_signature_fits(signed, invite.content):
        raise denied(
            event, "member.third_party.signature", f"no signature fits a key of {invite.event_id}"
        )


def _any_signature_fits(signed: Mapping[str, Any], invite: Mapping[str, Any]) -> bool:
    try:
        message = encode_canonical_json(
            {k: v for k, v in signed.items() if k not in ("signatures", "unsigned")}
        )
    except (ValueError, TypeError):  # such as NaN, or a lone surrogate: nothing can have signed it
        return False
    pairs = product(_keys(invite), sorted(set(_signatures(signed))))
    return any(
        _fits(message, key, signature) for key, signature in islice(pairs, VERIFICATIONS_MAX)
    )


def _signatures(signed: Mapping[str, Any]) -> Iterator[str]:
    servers = signed.get("signatures")
    for by_key in servers.values() if isinstance(servers, dict) else ():
        for key_id, signature in by_key.items() if isinstance(by_key, dict) else ():
            if key_id.startswith("ed25519:") and isinstance(signature, str):
                yield signature


def _keys(invite: Mapping[str, Any]) -> list[str]:
    """Return `public_key`, then those of `public_keys`; each once, in the order of the event."""
    listed = invite.get("public_keys")
    entries = [invite, *(listed if isinstance(listed, list) else ())]
    keys = [entry.get("public_key") for entry in entries if isinstance(entry, dict)]
    return list(dict.fromkeys(key for key in keys if isinstance(key, str)))


def _fits(message: bytes, key: str, signature: str) -> bool:
    try:
        VerifyKey(decode_base64(key)).verify(message, decode_base64(signature))
    except (BadSignatureError, ValueError):  # not base64 (ValueError), or of another length
        return False
    return True
