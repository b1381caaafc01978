"""Signing keys of invented servers.

A server's key is derived from its name alone. So rooms of different seeds have the same keys, and
no key uses the system's randomness. These keys protect nothing: anybody can derive them.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import nacl.signing
from signedjson.key import decode_signing_key_base64, get_verify_key
from signedjson.types import SigningKey, VerifyKey
from unpaddedbase64 import encode_base64

KEY_VERSION: Final = "1"
KEY_ID: Final = f"ed25519:{KEY_VERSION}"


@lru_cache(maxsize=4096)
def signing_key(server_name: str) -> SigningKey:
    """Return the ed25519 signing key of a server; its id is always ``ed25519:1``."""
    secret = hashlib.sha256(b"room-event-storage testing key of " + server_name.encode()).digest()
    return decode_signing_key_base64("ed25519", KEY_VERSION, encode_base64(secret))


@lru_cache(maxsize=4096)
def verify_key(server_name: str) -> VerifyKey:
    """Return the public half of `signing_key`."""
    return get_verify_key(signing_key(server_name))


def verify_keys(server_names: Iterable[str]) -> dict[tuple[str, str], VerifyKey]:
    """Return (server name, key id) -> verify key, as ``store.append(verify_keys=…)`` takes it."""
    return {(name, KEY_ID): verify_key(name) for name in server_names}


def foreign_signing_key(server_name: str) -> SigningKey:
    """Return a false ``ed25519:1`` key of `server_name`: signatures made with it are bad."""
    secret = nacl.signing.SigningKey(
        hashlib.sha256(b"not the key of " + server_name.encode()).digest()
    )
    return decode_signing_key_base64("ed25519", KEY_VERSION, encode_base64(bytes(secret)))
