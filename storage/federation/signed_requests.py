"""Signatures of requests between servers: the header `Authorization`, and the published keys.

Source: server-server API, "Request Authentication", "Publishing Keys".
"""

import re
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from signedjson.key import encode_verify_key_base64, get_verify_key
from signedjson.sign import sign_json
from signedjson.types import SigningKey

from storage import arguments as args
from storage.errors import InvalidSignature
from storage.event.signatures import read_old_keys
from storage.federation.remote import JsonObject

SCHEME: Final = re.compile(r"X-Matrix\s+", re.IGNORECASE)
PARAMETER: Final = re.compile(r'(?<!\w)(\w++)\s*+=\s*+(?:"([^"]*+)"|([^",\s]++))')
"""A name and its value. It reads each character once: anybody may send a long header."""


class SignedHeader(NamedTuple):
    """The header `Authorization` of a request. ``destination`` is "" in requests of old servers."""

    origin: str
    key_id: str
    signature: str
    destination: str


def claim_of(
    method: str, uri: str, origin: str, destination: str, content: JsonObject | None
) -> dict[str, Any]:
    """Return the object that is signed for a request. ``content`` is None without a body."""
    claim = {"method": method, "uri": uri, "origin": origin, "destination": destination}
    return claim if content is None else {**claim, "content": content}


def authorization(claim: dict[str, Any], key: SigningKey) -> str:
    origin, key_id = claim["origin"], f"{key.alg}:{key.version}"
    signature = sign_json(claim, origin, key)["signatures"][origin][key_id]
    return (
        f'X-Matrix origin="{origin}",destination="{claim["destination"]}",'
        f'key="{key_id}",sig="{signature}"'
    )


def read_authorization(header: str | None) -> SignedHeader:
    """Return the parts of a header `Authorization`. `InvalidSignature` if one is missing."""
    if header is None:
        raise InvalidSignature("the request has no header Authorization")
    scheme = SCHEME.match(args.text(header))
    found = PARAMETER.findall(header[scheme.end() :]) if scheme else []
    given = {name.lower(): quoted or token for name, quoted, token in found}
    try:
        parts = given["origin"], given["key"], given["sig"], given.get("destination", "")
    except KeyError as error:
        raise InvalidSignature(f"the header Authorization has no {error}") from error
    return SignedHeader(*parts)


def published_keys(
    server_name: str,
    key: SigningKey,
    *,
    old_signing_keys: Mapping[str, Mapping[str, Any]] | None = None,
    valid_ms: int = 3_600_000,
) -> dict[str, Any]:
    """Return the response of /_matrix/key/v2/server. It is valid for ``valid_ms`` from now.

    ``old_signing_keys`` are those of `storage.open`. `InputError`.
    """
    name = args.own_server(server_name)
    verify_key = encode_verify_key_base64(get_verify_key(args.signing_key(key)))
    keys = {
        "server_name": name,
        "verify_keys": {f"{key.alg}:{key.version}": {"key": verify_key}},
        "old_verify_keys": {
            key_id: {"key": encode_verify_key_base64(old.verify_key), "expired_ts": old.expired_ts}
            for key_id, old in read_old_keys(old_signing_keys or {}).items()
        },
        "valid_until_ts": time.time_ns() // 1_000_000 + args.whole(valid_ms, "valid_ms"),
    }
    return dict(sign_json(keys, name, key))
