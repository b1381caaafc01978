"""Events of the shapes that homeservers store, to train dictionaries on and to measure codecs with.

The generated rooms have short names (``@user1:s1.test``), which compress too well. So servers,
users, rooms and keys get names of the usual length, and the events are hashed and signed again.
"""

import random
import re
import string
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import orjson
from signedjson.key import decode_signing_key_base64
from unpaddedbase64 import encode_base64

from storage.event import ROOM_VERSIONS, event_id, sign
from storage.event.hashes import canonical
from storage.ids import server_name_of
from storage.testing import SHAPES, stream_room

SEED_KEY: Final = "YJDBA9Xnr2sVqXD9Vj7XVUnmFZcZrlw8Md7kMW+3XA1"
"""The published test key: the signatures have the form of real ones, of other bytes each."""
SHAPES_USED: Final = (
    "small_chat",
    "direct_chat",
    "big_room",
    "join_leave_storm",
    "busy_federation",
)
FIRST_NAMES: Final = (
    *("anna", "bea", "carlos", "dmitri", "elif", "farid", "greta", "hiro", "ines", "jonas"),
    *("kofi", "lena", "marek", "nadia", "olu", "petra", "quentin", "rosa", "sven", "tarik"),
)
HOSTS: Final = ("matrix.org", "chat.{}.example", "matrix.{}.example.org", "{}.example.net")
DRIFT_MS: Final = 700_000_000_000
_NAMES: Final = re.compile(rb"@user(\d+):s(\d+)\.test|s(\d+)\.test|!room(\d+)|User(\d+)")
_TIMES: Final = re.compile(rb"\b1700\d{9}\b")


class RealEvent(NamedTuple):
    """The bytes of an event, and its ids."""

    raw: bytes
    event_id: str
    room_id: str


def real_shaped(shape: str, count: int, *, seed: int, version: str = "11") -> Iterator[RealEvent]:
    """Yield events of a generated room with names of the usual length."""
    names = _Names(seed)
    room = stream_room(SHAPES[shape], count, seed=seed, version=version, sign=False)
    for event in room:
        try:
            pdu = orjson.loads(names.in_bytes(event.pdu))
        except orjson.JSONDecodeError:  # some shapes deliver bytes that are no event
            continue
        yield _signed(pdu, version, names)


def mixed(count: int, *, seed: int, version: str = "11") -> list[RealEvent]:
    """Return as many events of all shapes, from many rooms, in the order of the rooms."""
    rooms = 4
    each = count // (rooms * len(SHAPES_USED))
    return [
        event
        for at, shape in enumerate(SHAPES_USED)
        for room in range(rooms)
        for event in real_shaped(shape, each, seed=seed + 100 * at + room, version=version)
    ]


def _signed(pdu: dict[str, Any], version: str, names: "_Names") -> RealEvent:
    if pdu["type"] == "m.room.encrypted":
        pdu["content"] = _encrypted(pdu["content"], names)
    pdu.pop("signatures", None)
    pdu.pop("hashes", None)
    server = server_name_of(pdu["sender"])
    signed = sign(
        pdu, version, server, decode_signing_key_base64("ed25519", names.key(server), SEED_KEY)
    )
    room_id = signed.get("room_id", "!" + event_id(signed, ROOM_VERSIONS[version])[1:])
    return RealEvent(canonical(signed), event_id(signed, version), room_id)


def _encrypted(content: dict[str, Any], names: "_Names") -> dict[str, Any]:
    """Return the content with base64 of random bytes, as a client sends it."""
    ciphertext = names.base64(content["ciphertext"], len(content["ciphertext"]))
    own = {key: names.base64(content[key], 43) for key in ("sender_key", "session_id")}
    return {**content, "ciphertext": ciphertext, **own}


class _Names:
    """Names of the usual length in place of the short ones, the same name each time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def in_bytes(self, pdu: bytes) -> bytes:
        """Return the event with the other names and times."""
        shift = self._random("time").randrange(DRIFT_MS // 10)
        return _TIMES.sub(
            lambda found: b"%d" % (int(found[0]) + shift), _NAMES.sub(self._name, pdu)
        )

    def key(self, server: str) -> str:
        """Return the version of the signing key of a server, as Synapse chooses it."""
        return "a_" + "".join(self._random(server).choices(string.ascii_letters, k=4))

    def base64(self, name: str, length: int) -> str:
        """Return so many characters of base64, the same for the same name."""
        return encode_base64(self._random(name).randbytes(length))[:length]

    def _name(self, found: re.Match[bytes]) -> bytes:
        user, host, alone, room, shown = (
            None if one is None else one.decode() for one in found.groups()
        )
        if user is not None:
            return f"@{self._user(user)}:{self._host(host)}".encode()
        if alone is not None:
            return self._host(alone).encode()
        if room is not None:
            letters = self._random(f"room{room}").choices(string.ascii_letters, k=18)
            return ("!" + "".join(letters)).encode()
        return self._user(shown).title().encode()

    def _user(self, number: str | None) -> str:
        rng = self._random(f"user{number}")
        return f"{rng.choice(FIRST_NAMES)}{rng.choice(['', '_', '.', '-'])}{rng.randrange(10_000)}"

    def _host(self, number: str | None) -> str:
        rng = self._random(f"host{number}")
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(4, 12)))
        return HOSTS[0] if number == "1" else rng.choice(HOSTS[1:]).format(word)

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")
