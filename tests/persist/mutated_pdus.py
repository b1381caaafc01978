"""PDUs with one or more changed values.

They hold values that fit no table, number or text, fields of other types, and bytes that are not
JSON.
"""

import json
import math
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

from storage.errors import InvalidEvent
from storage.event import content_hash

Json = dict[str, Any]

TEXTS: Final = (
    "", "\0", "a\0b", "$\0", "!\0:s1.test", "@\0:s1.test", "\ud800", "x\udfff", "$\ud800",
    "!\ud800:s1.test", "😀" * 80, "x" * 256, "y" * 70_000, "$" + "e" * 254, "$x", "!", "@", "@a",
    ":", "@a:", "!unknown:s9.test", "@nobody:s9.test", "\u202e", "null", "__proto__",
    "*everybody",
)  # fmt: skip
NUMBERS: Final = (
    0,
    -1,
    1,
    2**31,
    2**53 - 1,
    2**53,
    2**63 - 2,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    10**30,
    1e2,
    -0.0,
    1e308,
    math.nan,
    math.inf,
)
OTHERS: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    [1],
    {"": ""},
    {"\0": "\0"},
    {"\ud800": 1},
    ["$\0"],
    [["$x", {}]],
    [["$x"]],
)
FIELDS: Final = (
    "room_id", "sender", "type", "state_key", "content", "depth", "origin_server_ts",
    "prev_events", "auth_events", "hashes", "signatures", "unsigned", "redacts", "event_id",
    "origin", "\0", "\ud800",
)  # fmt: skip
CONTENT: Final = (
    "membership", "room_version", "users", "events", "users_default", "state_default", "ban",
    "kick", "invite", "redact", "notifications", "history_visibility", "join_rule", "allow",
    "join_authorised_via_users_server", "third_party_invite", "creator", "additional_creators",
    "predecessor", "m.federate", "redacts", "url", "body", "m.relates_to", "m.new_content",
    "displayname", "name", "alias", "type", "\0",
)  # fmt: skip
TYPES: Final = (
    "m.room.create", "m.room.member", "m.room.power_levels", "m.room.join_rules",
    "m.room.history_visibility", "m.room.third_party_invite", "m.room.redaction",
    "m.room.message", "m.room.name", "m.room.aliases", "m.room.server_acl", "m.room.encrypted",
    "org.example.\0", "",
)  # fmt: skip


def mutant(rng: random.Random, base: Json, name: str) -> bytes | Json:
    """Return ``base`` with some places changed.

    ``name`` makes an event id for versions that send it.
    """
    pdu: Json = json.loads(json.dumps(base))
    if "event_id" in pdu:
        pdu["event_id"] = name
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(CHANGES)(rng, pdu)
    if rng.random() < 0.5:
        _hash(pdu)
    if rng.random() < 0.1:
        return pdu
    raw = json.dumps(pdu, ensure_ascii=True).encode()
    return _damaged(rng, raw) if rng.random() < 0.15 else raw


def _value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.01:
        return _deep(rng.choice((10, 499, 600, 900)))
    return deepcopy(rng.choice(TEXTS if kind < 0.5 else NUMBERS if kind < 0.75 else OTHERS))


def _deep(levels: int) -> Any:
    value: Any = {}
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def _field(rng: random.Random, pdu: Json) -> None:
    pdu[rng.choice(FIELDS)] = _value(rng)


def _lost(rng: random.Random, pdu: Json) -> None:
    pdu.pop(rng.choice(FIELDS), None)


def _content(rng: random.Random, pdu: Json) -> None:
    if isinstance(pdu.get("content"), dict):
        pdu["content"][rng.choice(CONTENT)] = _value(rng)


def _nested(rng: random.Random, pdu: Json) -> None:
    """Change a nested value that the engine reads.

    It is in relations, power levels, a third-party invite or an allow rule.
    """
    value, other = _value(rng), _value(rng)
    name = value if isinstance(value, str) else "@a:s1.test"
    content: Json = pdu["content"] if isinstance(pdu.get("content"), dict) else {}
    content |= rng.choice(
        (
            {"m.relates_to": {"rel_type": value, "event_id": other}},
            {"m.relates_to": {"rel_type": "m.thread", "event_id": other}, "m.new_content": value},
            {"m.relates_to": {"rel_type": value, "event_id": "$x"}},
            {"users": {name: other}},
            {"events": {name: other}},
            {
                "third_party_invite": {
                    "signed": {"mxid": value, "token": other, "signatures": value}
                }
            },
            {
                "third_party_invite": {
                    "signed": {
                        "mxid": "@a:s1.test",
                        "token": other,
                        "signatures": {name: {name: other}},
                    }
                },
                "membership": "invite",
            },
            {"allow": [{"type": "m.room_membership", "room_id": value}], "join_rule": "restricted"},
            {"membership": "join", "join_authorised_via_users_server": value},
            {"public_keys": [{"public_key": value}], "public_key": other},
            {"creator": value, "additional_creators": [other]},
            {"room_version": value, "predecessor": {"room_id": other}},
        )
    )
    pdu["content"] = content


def _kind(rng: random.Random, pdu: Json) -> None:
    pdu["type"] = rng.choice(TYPES)
    if rng.random() < 0.7:
        pdu["state_key"] = rng.choice(("", "@a:s1.test", pdu.get("sender"), _value(rng)))


def _references(rng: random.Random, pdu: Json) -> None:
    key = rng.choice(("prev_events", "auth_events"))
    given = pdu.get(key)
    if not isinstance(given, list):
        return
    pdu[key] = rng.choice(
        (
            [*given, *given],
            [*given, _value(rng)],
            given[:-1],
            [],
            given * 20,
            [*given, ["$x", {"sha256": _value(rng)}]],
            [given],
        )
    )


def _signatures(rng: random.Random, pdu: Json) -> None:
    pdu["signatures"] = {
        rng.choice(("s1.test", "\0", "")): {rng.choice(("ed25519:1", "\0", "")): _value(rng)}
    }
    pdu["hashes"] = {"sha256": _value(rng)}


CHANGES: Final[tuple[Callable[[random.Random, Json], None], ...]] = (
    _field, _field, _lost, _content, _content, _nested, _nested, _kind, _references, _signatures,
)  # fmt: skip


def _hash(pdu: Json) -> None:
    """Make the content hash right, where there can be one, so that the content is not redacted."""
    try:
        pdu["hashes"] = {"sha256": content_hash(pdu)}
    except (InvalidEvent, RecursionError):
        return


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return rng.choice(
        (
            raw[:at],
            raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
            b"\xef\xbb\xbf" + raw,
            raw * 2,
            b"",
            b"[]",
            b"nul",
            b"{",
            raw + b"\0",
            b"[" * 5_000,
            b'{"a":' * 5_000,
        )
    )
