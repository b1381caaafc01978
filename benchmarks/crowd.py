"""A homeserver's rooms, of skewed sizes: their ids, members, activity and events.

Event ids and content hashes are correct; signatures are placeholders. benchmarks/crowd_build.py
writes them to a database.
"""

import random
from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from storage.event.hashes import canonical, redacted_content
from storage.event.versions import version_of
from storage.testing import assembly

VERSION: Final = "11"
SERVER: Final = "s1.test"
REMOTES: Final = 100  # other servers
MEMBERS_MIN: Final = 10
HALL_MEMBERS: Final = 5_000
SPEAKERS: Final = 8  # members of a room who send messages
VISIBILITIES: Final = (
    "shared",
    "shared",
    "shared",
    "shared",
    "joined",
    "shared",
    "invited",
    "shared",
    "shared",
    "world_readable",
)
FIRST_MS: Final = 1_700_000_000_000
STEP_MS: Final = 100
DEPTH_MS: Final = 10_000_000  # state events are dated before, messages from here on
URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
SIGNATURE: Final = "x" * 86

EVERYWHERE: Final = f"@everywhere:{SERVER}"
"""In all rooms; their creator."""
MANY: Final = f"@many:{SERVER}"
"""In 1,000 rooms, or in all if there are fewer."""
HUNDRED: Final = f"@hundred:{SERVER}"
"""In 100 rooms of ten members."""
FEW: Final = f"@few:{SERVER}"
"""In 10 rooms."""
KNOWN: Final = {EVERYWHERE: 1_000_000, MANY: 1_000, HUNDRED: 100, FEW: 10}


@dataclass(frozen=True, slots=True)
class Crowd:
    """Rooms with a given number of events in all.

    The largest room has ``members_max`` members; half of the rooms have hardly more than ten. One
    room, the `hall`, has 5,000 members (or the largest's, if there are fewer), and is the busiest.
    """

    rooms: int
    events: int
    members_max: int
    body: int = 120
    """Characters of a message."""
    seed: int = 1
    thread: int = 0
    """Of so many messages of a room, the first is replied to by a tenth of the others; 0: none."""

    @property
    def name(self) -> str:
        """Return the name of its database."""
        return f"crowd_{self.rooms}_{self.events}_{self.members_max}_{self.body}_{self.seed}"

    @property
    def hall(self) -> int:
        """Return the index of the room of 5,000 members."""
        return 0 if self.members_max <= HALL_MEMBERS else 5

    def size(self, number: int) -> int:
        """Return the number of local members of a room."""
        if number == self.hall:
            return min(HALL_MEMBERS, self.members_max)
        return max(MEMBERS_MIN, int(self.members_max / (number + 1) ** 1.25))

    def members(self, number: int) -> list[str]:
        """Return a room's members in the order in which they join; the first creates it."""
        rng = random.Random(f"{self.seed} {number}")
        chosen = [user for user in KNOWN if self.has(number, user)]
        others = rng.sample(range(self.members_max), self.size(number) - len(chosen))
        remote = [f"@r{number}:h{server}.test" for server in rng.sample(range(REMOTES), 2)]
        return [*chosen, *remote, *(f"@u{other}:{SERVER}" for other in others)]

    def has(self, number: int, user: str) -> bool:
        """Return whether one of the `KNOWN` users is in a room."""
        first = self.rooms // 2 if user == HUNDRED else 0  # rooms from there on are small
        step = max((self.rooms - first) // KNOWN[user], 1)
        return (
            number >= first
            and (number - first) % step == 0
            and (number - first) // step < KNOWN[user]
        )

    def rooms_of(self, user: str) -> list[int]:
        """Return the indexes of the rooms that one of the `KNOWN` users is in."""
        return [number for number in range(self.rooms) if self.has(number, user)]

    def activity(self) -> list[float]:
        """Return the relative activity of each room: the hall first, others in random order."""
        ranks = list(range(1, self.rooms))
        random.Random(self.seed).shuffle(ranks)
        ranks.insert(self.hall, 0)
        return [(rank + 20) ** -0.7 for rank in ranks]


def room_id(number: int) -> str:
    """Return the id of a room."""
    return f"!crowd{number}:{SERVER}"


@dataclass(slots=True)
class Pen:
    """A room being written, without forks: each event follows the last one."""

    number: int
    room_id: str
    tip: str | None = None
    depth: int = 0
    auth: dict[tuple[str, str], str] = field(default_factory=dict)
    """The ids of the state from which auth events are taken."""
    root: str | None = None
    """The first event of the current thread."""

    @classmethod
    def of(cls, number: int) -> "Pen":
        """Return the pen of a room before its first event."""
        return cls(number, room_id(number))

    def begun(self, creator: str) -> list[bytes]:
        """Return the events with which the room begins."""
        return [
            self.state(creator, "m.room.create", assembly.create(VERSION, creator, {})),
            self.join(creator),
            self.state(
                creator, "m.room.power_levels", assembly.power_levels(VERSION, [creator], None)
            ),
            self.state(creator, "m.room.join_rules", assembly.join_rules("public", ())),
            self.state(
                creator,
                "m.room.history_visibility",
                {"history_visibility": VISIBILITIES[self.number % len(VISIBILITIES)]},
                cited=False,
            ),
            self.state(creator, "m.room.name", {"name": f"Room {self.number}"}, cited=False),
        ]

    def join(self, user: str, more: Mapping[str, Any] | None = None) -> bytes:
        """Return a join, or another profile."""
        return self.state(user, "m.room.member", {"membership": "join", **(more or {})}, user)

    def leave(self, user: str) -> bytes:
        """Return a leave."""
        return self.state(user, "m.room.member", {"membership": "leave"}, user)

    def state(
        self,
        sender: str,
        kind: str,
        content: Mapping[str, Any],
        state_key: str = "",
        *,
        cited: bool = True,
        prev: Sequence[str] = (),
    ) -> bytes:
        """Return a state event; ``cited``: later events may name it as auth event."""
        wanted = [("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.member", sender)]
        if kind == "m.room.member":
            wanted += [("m.room.join_rules", "")] if content["membership"] == "join" else []
        auth = (
            []
            if kind == "m.room.create"
            else [self.auth[key] for key in wanted if key in self.auth]
        )
        full, kept = (
            canonical(content).decode(),
            canonical(redacted_content(kind, dict(content), version_of(VERSION))).decode(),
        )
        event_id, raw = self.write(
            sender,
            kind,
            auth,
            (full, kept),
            ts=FIRST_MS + self.depth,
            key=f'"state_key":"{state_key}",',
            prev=prev,
        )
        if cited:
            self.auth[kind, state_key] = event_id
        return raw

    def write(
        self,
        sender: str,
        kind: str,
        auth: Sequence[str],
        content: tuple[str, str],
        *,
        ts: int,
        key: str = "",
        prev: Sequence[str] = (),
    ) -> tuple[str, bytes]:
        """Return the id and the bytes of any event.

        ``content``: whole, and as redacted; both canonical JSON. ``key``: the state key, if any.
        ``prev``: its parents, if not the last event.
        """
        self.depth += 1
        cited = '","'.join(auth)
        start = (
            f'{{"auth_events":["{cited}"],"content":' if auth else '{"auth_events":[],"content":'
        )
        parents = ",".join(f'"{one}"' for one in prev or filter(None, [self.tip]))
        depth = f',"depth":{self.depth},'
        middle = (
            f'"origin_server_ts":{ts},"prev_events":[{parents}],'
            f'"room_id":"{self.room_id}","sender":"{sender}",'
        )
        end = f'{key}"type":"{kind}"}}'
        digest = b2a_base64(
            sha256(f"{start}{content[0]}{depth}{middle}{end}".encode()).digest(), newline=False
        )[:-1].decode()
        middle = f'{depth}"hashes":{{"sha256":"{digest}"}},{middle}'
        reference = sha256(f"{start}{content[1]}{middle}{end}".encode()).digest()
        self.tip = "$" + b2a_base64(reference, newline=False)[:-1].translate(URL_SAFE).decode()
        server = sender[sender.index(":") + 1 :]
        return (
            self.tip,
            (
                f'{start}{content[0]}{middle}"signatures":{{"{server}":'
                f'{{"ed25519:1":"{SIGNATURE}"}}}},{end}'
            ).encode(),
        )
