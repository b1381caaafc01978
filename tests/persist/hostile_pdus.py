"""PDUs that a hostile or odd server may send, written on purpose, where `mutated_pdus` mutates.

Each function returns bytes, or a dict, made of a good event. The good event is not stored.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from storage.event import content_hash
from storage.testing.assembly import number_of

Json = dict[str, Any]
Form = Callable[[random.Random, Json, str, Sequence[str]], bytes | Json]

UNSIGNED: Final = (
    "null",
    "[]",
    '{"age":1.5}',
    '{"age":-0}',
    '{"age":1e400}',
    '{"age":NaN}',
    '{"age":9007199254740992}',
    '{"a":"\\ud800"}',
    '{"a":' + "[" * 600 + "]" * 600 + "}",
    '{"a":' + "[" * 20_000 + "]" * 20_000 + "}",
    '{"pad":"' + "x" * 70_000 + '"}',
    '{"]":"}"}',
)
LONG: Final = ("é" * 128, "日" * 255, "é" * 255, "x" * 256)
NO_USERS: Final = ("", "bob", "@", "@bob", "@bob:", ":s1.test", "@" + "é" * 130 + ":s1.test")


def hashed(pdu: Json) -> Json:
    return {**pdu, "hashes": {"sha256": content_hash(pdu)}}


def bad_unsigned(rng: random.Random, pdu: Json, *_: object) -> bytes:
    """Return the good event with an `unsigned` that must not decide."""
    text = json.dumps({key: value for key, value in pdu.items() if key != "unsigned"})
    return (text[:-1] + ', "unsigned": ' + rng.choice(UNSIGNED) + "}").encode()


def of_itself(rng: random.Random, pdu: Json, version: str, _: Sequence[str]) -> Json:
    """Redact itself, relate to itself, or be its own parent."""
    own = str(pdu.get("event_id", "$own"))
    reference: Any = [own, {"sha256": "x"}] if number_of(version) < 3 else own
    redacts = {"redacts": own} if number_of(version) >= 11 else {}
    redaction = {"type": "m.room.redaction", "redacts": own, "content": redacts}
    form = rng.choice(
        (
            redaction,
            redaction,
            redaction,
            {"content": {"m.relates_to": {"rel_type": "m.replace", "event_id": own}}},
            {"content": {"m.relates_to": {"rel_type": "m.thread", "event_id": own}}},
            {"prev_events": [reference]},
            {"auth_events": [*pdu["auth_events"], reference]},
        )
    )
    return hashed({**pdu, **form})


def of_another(rng: random.Random, pdu: Json, version: str, ids: Sequence[str]) -> Json:
    """Redact an event that has been sent or will be."""
    other = rng.choice(ids)
    content = {"redacts": other} if number_of(version) >= 11 else {}
    return hashed({**pdu, "type": "m.room.redaction", "redacts": other, "content": content})


def borrowed_id(rng: random.Random, pdu: Json, version: str, ids: Sequence[str]) -> Json:
    """Take the id of another event, in versions 1 and 2."""
    return hashed({**pdu, "event_id": rng.choice(ids)} if number_of(version) < 3 else pdu)


def long_key(rng: random.Random, pdu: Json, _: str, __: Sequence[str]) -> Json:
    """Have a type or a state key of more than 255 bytes."""
    text = rng.choice(LONG)
    form = rng.choice(({"type": text}, {"state_key": text}, {"type": text, "state_key": text}))
    return hashed({**pdu, **form})


def no_user(rng: random.Random, pdu: Json, _: str, __: Sequence[str]) -> Json:
    """Be the membership of a member that is no user."""
    content = {"membership": rng.choice(("invite", "join", "ban", "leave", "knock"))}
    if rng.random() < 0.3:
        content["join_authorised_via_users_server"] = rng.choice(NO_USERS)
    return hashed(
        {**pdu, "type": "m.room.member", "state_key": rng.choice(NO_USERS), "content": content}
    )


def second_create(rng: random.Random, pdu: Json, _: str, __: Sequence[str]) -> Json:
    """Be a second create event, of any version."""
    content = {"room_version": rng.choice(("1", "6", "11", "12", "99", 5)), "creator": "@x:s9.test"}
    form = {"type": "m.room.create", "state_key": "", "content": content}
    changed = {**pdu, **form, "prev_events": [], "auth_events": []}
    if rng.random() < 0.2:
        changed.pop("room_id", None)
    return hashed(changed)


def many_edges(rng: random.Random, pdu: Json, version: str, ids: Sequence[str]) -> Json:
    """Cite many events, of other rooms too."""
    chosen = [rng.choice(ids) for _ in range(rng.randint(1, 20))]
    name = rng.choice(("prev_events", "auth_events"))
    is_pair = number_of(version) < 3
    return hashed({**pdu, name: [[one, {"sha256": "x"}] if is_pair else one for one in chosen]})


def odd_numbers(rng: random.Random, pdu: Json, _: str, __: Sequence[str]) -> Json:
    """Claim times and depths at the ends of their range."""
    value = rng.choice((0, -1, 1, 2**53 - 1, -(2**53) + 1, 2**62, 2**63 - 2, -(2**63)))
    return hashed({**pdu, rng.choice(("depth", "origin_server_ts")): value})


FORMS: Final[tuple[Form, ...]] = (
    bad_unsigned,
    of_itself,
    of_itself,
    of_another,
    borrowed_id,
    long_key,
    no_user,
    second_create,
    many_edges,
    odd_numbers,
)


def hostile(
    rng: random.Random, base: Json, name: str, version: str, ids: Sequence[str]
) -> bytes | Json:
    """Return a hostile PDU made of ``base``; ``name`` is its id in versions 1 and 2."""
    pdu = {**base, "event_id": name} if "event_id" in base else dict(base)
    return rng.choice(FORMS)(rng, pdu, version, ids)
