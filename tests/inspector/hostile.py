"""Rooms whose every text attacks the reader: markup, scripts, hidden and oversize characters."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any, Final

from storage.event import content_hash
from storage.ids import EventId, RoomId
from storage.testing import RoomBuilder

ADMIN: Final = "@admin:s1.test"
PIECES: Final = (
    "<script>window.pwned=1</script>",
    '"><img src=x onerror=window.pwned=1>',
    "'><svg onload=window.pwned=1>",
    "</pre></textarea><iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<style>*{display:none!important}</style>",
    "<base href=//evil.test/><meta http-equiv=refresh content=0>",
    "javascript:window.pwned=1",
    "';window.pwned=1;//",
    "`${window.pwned=1}`",
    "{{ 7*7 }}{% for x in y %}",
    "&lt;b&gt;&#60;i&#62;&amp;",
    "<!-- ]]> -->",
    "\u202e\u2066evil\u200f",
    "\u200b\u2060\ufeff\u00ad",
    "e" + "\u0301" * 300,
    "\ufdfd" * 60,
    "\U0001242b" * 40,
    "W" * 400,
    "\n" * 80,
    "\t" * 40,
    "\u05d0\u05d1 \u0661\u0662 abc",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f",
    "../../../etc/passwd",
    "%00%0d%0aSet-Cookie:a=b",
    "\x1b[31m\x07\x08\x7f",
    "\u2028\u2029",
    "https://evil.test/?q=<b>",
    "",
)
ID_BYTES_MAX: Final = 255


class Attacker:
    """Makes texts and contents of these pieces; the same seed makes the same."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def text(self, most: int = 3) -> str:
        return "".join(self._random.choices(PIECES, k=self._random.randint(1, most)))

    def name(self) -> str:
        """A text for a type, a state key, or a part of an id: short, and without NUL."""
        raw = self.text(2).encode()[: self._random.choice((20, 60, 190))]
        return raw.decode("utf-8", "ignore") or "x"

    def value(self, depth: int = 3) -> Any:
        kind = self._random.randrange(7 if depth else 4)
        if kind < 2:
            return self.text()
        if kind == 2:
            return self._random.choice((None, True, 2**53 - 1, -1))
        if kind == 3:
            return "x" * self._random.choice((1, 3_000))
        if kind == 4:
            return [self.value(depth - 1) for _ in range(self._random.randrange(4))]
        return {self.name(): self.value(depth - 1) for _ in range(self._random.randrange(4))}

    def content(self) -> dict[str, Any]:
        keys = ["body", "name", "topic", "displayname", "url", self.name()]
        return {key: self.value() for key in self._random.sample(keys, 3)}

    def chance(self, share: float) -> bool:
        return self._random.random() < share


def hostile_room(count: int, seed: int = 1) -> RoomBuilder:
    """A room of so many hostile events: messages, state, and members with hostile ids."""
    attacker = Attacker(seed)
    room = RoomBuilder("11", seed=seed, sign=False, checked=False, exact=False)
    room.start(ADMIN, name=PIECES[0])
    senders = [ADMIN]
    while len(room.events) < count:
        if attacker.chance(0.02) and len(senders) < 50:
            user = f"@{attacker.name().replace(':', '')}:s1.test"
            if user not in senders and len(user.encode()) <= ID_BYTES_MAX:
                room.join(user, displayname=attacker.text())
                senders.append(user)
        elif attacker.chance(0.1):
            room.send(ADMIN, attacker.name(), attacker.content(), state_key=attacker.name())
        else:
            sender = senders[len(room.events) % len(senders)]
            room.send(sender, attacker.name(), attacker.content())
    return room


def hostile_ids(seed: int = 2) -> Iterator[tuple[EventId, bytes]]:
    """A room of version 1, where creators choose room ids, and senders choose event ids."""
    room = RoomBuilder("1", seed=seed, sign=False, checked=False)
    room.start(ADMIN)
    attacker = Attacker(seed)
    room_id = f"!{PIECES[1]}\u202e:s1.test"
    for _ in range(12):
        room.message(ADMIN)
    for number, event in enumerate(room.events):
        pdu = json.loads(event.pdu)
        pdu["room_id"] = room_id
        if number >= 6:  # the last ones are cited by nobody but the next, as a parent
            pdu["event_id"] = f"${number}{attacker.name().replace(':', '')}:s1.test"
            parent = EventId(room.events[5].event_id)
            pdu["prev_events"] = [[parent, {"sha256": "x"}]]
        pdu["hashes"] = {"sha256": content_hash(pdu)}
        yield EventId(pdu["event_id"]), json.dumps(pdu, ensure_ascii=False).encode()


HOSTILE_ROOM_ID: Final = RoomId(f"!{PIECES[1]}\u202e:s1.test")
