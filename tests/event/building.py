"""PDUs for the tests of this folder."""

import json
from typing import Any

from signedjson.key import decode_signing_key_base64, get_verify_key

from storage.event import ROOM_VERSIONS, sign

SERVER = "example.org"
KEY = decode_signing_key_base64(
    "ed25519", "1", "YJDBA9Xnr2sVqXD9Vj7XVUnmFZcZrlw8Md7kMW+3XA1"
)  # the published test seed
VERIFY_KEY = get_verify_key(KEY)
VERSIONS = tuple(ROOM_VERSIONS)
PAIRED = ("1", "2")
LENIENT = ("1", "2", "3", "4", "5")
STRICT = tuple(v for v in VERSIONS if v not in LENIENT)


def unsigned_pdu(version: str, /, **changes: Any) -> dict[str, Any]:
    """A message before it is hashed and signed; a change to `...` takes the key away."""
    ids: list[Any] = ["$parent:example.org" if version in PAIRED else "$" + "p" * 43]
    if version in PAIRED:
        ids = [[each, {"sha256": "x" * 43}] for each in ids]
    pdu: dict[str, Any] = {
        "type": "m.room.message",
        "room_id": "!room:example.org",
        "sender": "@alice:example.org",
        "content": {"body": "hello", "msgtype": "m.text"},
        "depth": 7,
        "origin_server_ts": 1_700_000_000_000,
        "prev_events": ids,
        "auth_events": ids,
    }
    if version in PAIRED:
        pdu["event_id"] = "$own:example.org"
    pdu.update(changes)
    return {key: value for key, value in pdu.items() if value is not ...}


def signed_pdu(version: str, /, **changes: Any) -> dict[str, Any]:
    """A message with its hash and a signature of example.org."""
    return sign(unsigned_pdu(version, **changes), version, SERVER, KEY)


def encoded(pdu: dict[str, Any], **lexemes: str) -> bytes:
    """Return JSON as no canonical encoder writes it.

    `lexemes` replaces each string value "@name@" by a lexeme, verbatim.
    """
    text = json.dumps(pdu, indent=1)
    for name, lexeme in lexemes.items():
        text = text.replace(f'"@{name}@"', lexeme)
    return text.encode()
