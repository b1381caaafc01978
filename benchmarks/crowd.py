"""A homeserver's rooms, of skewed sizes, and a database of them: millions of events in minutes.

Event ids and content hashes are correct; signatures are placeholders. The engine appends every
event that changes a state. Messages write only their own row and the forward extremities of their
room, so they are loaded by COPY. They come with all rooms mixed, so that a room's events are
scattered in the table. The order of arrival:

1. every room begins, and its members join          appended
2. most messages                                    COPY, the indexes made afterwards
3. some of the members change, or leave             appended
4. the rest of the messages                         COPY
"""

import random
import time
from binascii import b2a_base64
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import Any, Final, NamedTuple

import storage
from benchmarks.harness import stored
from storage import Store
from storage.config import Config
from storage.database.connection import Connection, Database
from storage.database.deployment import now_ms
from storage.event.hashes import canonical, redacted_content
from storage.event.model import target_key
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


TOGETHER: Final = 1_000
COPIED: Final = 100_000
LATE: Final = 0.1  # the share of messages that come after the changes
CHANGES: Final = 3  # per room

THREAD_NID: Final = 22

MEMORY: Final = "SET maintenance_work_mem = '512MB'"

EVENT_COLUMNS: Final = (
    *(
        "event_nid",
        "stream_ordering",
        "topological_ordering",
        "depth",
        "origin_server_ts",
        "received_ts",
        "state_group_before",
        "audience",
        "in_order_ts",
    ),
    *(
        "room_nid",
        "sender_nid",
        "type_nid",
        "encoding",
        "writer_nid",
        "outlier",
        "backfilled",
        "soft_failed",
        "redacted_form",
        "relates_to",
        "rel_type_nid",
    ),
    *("event_id", "prev_events", "auth_events", "json"),
)

SQL_INDEXES: Final = """
SELECT i.indexrelid::regclass::text AS name,
    COALESCE(pg_get_constraintdef(c.oid), '') AS constraint_definition,
    pg_get_indexdef(i.indexrelid) AS definition
FROM pg_index i LEFT JOIN pg_constraint c ON c.conindid = i.indexrelid AND c.conrelid = i.indrelid
WHERE i.indrelid = 'events'::regclass
"""
SQL_ROOMS: Final = """
SELECT r.room_id, r.room_nid, r.current_state_group, g.audience, r.forward_extremities[1] AS tip,
    r.in_order_ts
FROM rooms r JOIN state_groups g ON g.state_group = r.current_state_group
"""
SQL_STATE: Final = """
SELECT e.event_id, e.event_nid, e.sender_nid
FROM unnest($1::text[]) AS named (event_id)
JOIN events e USING (event_id)
"""  # a join: there is no index on the events when this is asked first
SQL_ENDS: Final = """
UPDATE rooms r
SET write_version = r.write_version + 1, last_stream_ordering = i.stream,
    max_topological_ordering = i.topological,
    forward_extremities = ARRAY[i.tip],
    in_order_ts = i.in_order_ts
FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[]) AS i (room_nid,
    stream, topological, tip, in_order_ts)
WHERE r.room_nid = i.room_nid
"""
SQL_FIRST: Final = """
SELECT nextval('event_nids') AS event_nid, nextval('events_stream') AS stream_ordering,
    (SELECT writer_nid FROM writers) AS writer_nid
"""
SQL_LAST: Final = """
SELECT setval('event_nids', $1::bigint), setval('events_stream', $2::bigint)
"""
SQL_POSITION: Final = (
    "UPDATE stream_positions SET stream_id = $1::bigint WHERE stream_name = 'events'"
)


class DroppedIndexRow(NamedTuple):
    """An index of events."""

    name: str
    constraint_definition: str
    definition: str


class CrowdRoomRow(NamedTuple):
    """The columns of a room that its messages need."""

    room_id: str
    room_nid: int
    state_group: int
    audience: int
    tip: int
    in_order_ts: int


class CrowdStateRow(NamedTuple):
    """The nids of a state event."""

    event_id: str
    event_nid: int
    sender_nid: int


class FirstRow(NamedTuple):
    """The first numbers."""

    event_nid: int
    stream_ordering: int
    writer_nid: int


class Speaker(NamedTuple):
    """A user who sends messages, with the auth events of these."""

    user: str
    nid: int
    auth_ids: tuple[str, ...]
    auth_nids: list[int]


@dataclass(slots=True)
class Floor:
    """A room while messages are written to it."""

    pen: Pen
    row: CrowdRoomRow
    tip: int
    stream: int
    in_order_ts: int
    speakers: list[Speaker]

    def out_of_order(self, ts: int) -> int | None:
        """Return the column `in_order_ts` of the next message."""
        reached, self.in_order_ts = self.in_order_ts, max(self.in_order_ts, ts)
        return None if ts > reached else reached


# ------------------------------------------------------------------------------------------------
# the whole


async def build(dsn: str, crowd: Crowd, *, told: bool = True) -> None:
    """Fill an empty, migrated database and analyse it; print progress and durations."""
    begun = time.perf_counter()

    def say(what: str) -> None:
        if told:
            print(f"{crowd.name}: {time.perf_counter() - begun:.0f} s, {what}", flush=True)

    pens = [Pen.of(number) for number in range(crowd.rooms)]
    async with storage.open(dsn, server_name=SERVER) as store:
        appended = await append_all(store, beginnings(crowd, pens))
    say(f"{appended} events appended")
    changes = crowd.rooms * CHANGES
    messages = crowd.events - appended - changes
    async with _without_indexes(dsn) as conn:
        await copy_messages(conn, crowd, pens, int(messages * (1 - LATE)), 1)
        say("most messages copied")
    say("indexes made")
    async with storage.open(dsn, server_name=SERVER) as store:
        await append_all(store, _changes(crowd, pens))
    say("changes appended")
    async with connected(dsn) as conn:
        await copy_messages(conn, crowd, pens, messages - int(messages * (1 - LATE)), 2)
        await conn.execute("VACUUM ANALYZE")
        await conn.execute("CHECKPOINT")
    say("done")


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connection]:
    """Yield a connection whose statements may take an hour."""
    hour = Config(statement_timeout_ms=3_600_000, pool_size_max=1)
    async with await Database.open(dsn, config=hour) as database, database.connection() as conn:
        await conn.execute(MEMORY)
        yield conn


@asynccontextmanager
async def _without_indexes(dsn: str) -> AsyncIterator[Connection]:
    """Yield a connection; create the indexes of events again at the end."""
    async with connected(dsn) as conn:
        indexes = await conn.fetch(SQL_INDEXES, row=DroppedIndexRow)
        for one in indexes:
            drop = (
                f"ALTER TABLE events DROP CONSTRAINT {one.name}"
                if one.constraint_definition
                else f"DROP INDEX {one.name}"
            )
            await conn.execute(drop)
        yield conn
        for one in indexes:
            add = f"ALTER TABLE events ADD CONSTRAINT {one.name} {one.constraint_definition}"
            await conn.execute(add if one.constraint_definition else one.definition)
        await conn.execute("ANALYZE events")


# ------------------------------------------------------------------------------------------------
# appended


def beginnings(crowd: Crowd, pens: Sequence[Pen]) -> Iterator[bytes]:
    """Yield the first events of every room, and the joins of its members."""
    for pen in pens:
        members = crowd.members(pen.number)
        yield from pen.begun(members[0])
        for member in members[1:]:
            yield pen.join(member)


def _changes(crowd: Crowd, pens: Sequence[Pen]) -> Iterator[bytes]:
    """Yield for every room a leave, a changed profile, and a join."""
    for pen in pens:
        last = crowd.members(pen.number)[-2:]
        yield pen.leave(last[0])
        yield pen.join(last[1], {"displayname": f"User of {pen.number}"})
        yield pen.join(f"@new{pen.number}:{SERVER}")


async def append_all(store: Store, pdus: Iterator[bytes]) -> int:
    """Append all of them, a thousand at a time."""
    count = 0
    while batch := list(islice(pdus, TOGETHER)):
        await stored(store, batch, room_version=VERSION)
        count += len(batch)
    return count


# ------------------------------------------------------------------------------------------------
# copied


async def copy_messages(
    conn: Connection, crowd: Crowd, pens: Sequence[Pen], count: int, part: int
) -> None:
    """Copy messages to rooms by their activity."""
    floors = await _floors(conn, crowd, pens)
    first = await conn.fetchrow(SQL_FIRST, row=FirstRow)
    assert first is not None
    rng = random.Random(f"{crowd.seed} {part}")
    records = _messages(crowd, _chosen(floors, crowd.activity(), count, rng), first)
    while batch := list(islice(records, COPIED)):
        await conn.copy_in("events", EVENT_COLUMNS, batch)
    blocks = -(-count // 1_000)
    last = first.stream_ordering + count - 1
    await conn.execute(SQL_LAST, first.event_nid + (blocks - 1) * 1_000, last)
    await conn.execute(SQL_POSITION, last)
    ends = [
        (one.row.room_nid, one.stream, one.pen.depth, one.tip, one.in_order_ts)
        for one in floors
        if one.stream
    ]
    await conn.execute(SQL_ENDS, *map(list, zip(*ends, strict=True)))


def _chosen(
    floors: Sequence[Floor], activity: Sequence[float], count: int, rng: random.Random
) -> Iterator[tuple[Floor, Speaker]]:
    sums = [0.0]
    for one in activity:
        sums.append(sums[-1] + one)
    for start in range(0, count, COPIED):
        for floor in rng.choices(floors, cum_weights=sums[1:], k=min(COPIED, count - start)):
            yield floor, floor.speakers[int(rng.random() * len(floor.speakers))]


def _messages(
    crowd: Crowd, chosen: Iterable[tuple[Floor, Speaker]], first: FirstRow
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of messages in the order in which they arrive, all of them now."""
    received_ts = now_ms()
    text = ("the quick brown fox jumps over the lazy dog " * (crowd.body // 40 + 1))[: crowd.body]
    for index, (floor, speaker) in enumerate(chosen):
        nid, stream, ts = (
            first.event_nid + index,
            first.stream_ordering + index,
            FIRST_MS + DEPTH_MS + STEP_MS * (first.event_nid + index),
        )
        pen, row = floor.pen, floor.row
        root = _replied_to(crowd, pen)
        relation = f'"m.relates_to":{{"event_id":"{root}","rel_type":"m.thread"}},' if root else ""
        content = f'{{"body":"{index} {text}",{relation}"msgtype":"m.text"}}'
        event_id, raw = pen.write(
            speaker.user, "m.room.message", speaker.auth_ids, (content, "{}"), ts=ts
        )
        orders = (nid, stream, pen.depth, pen.depth, ts, received_ts, row.state_group, row.audience)
        late = floor.out_of_order(ts)
        flags = (False, False, False, False)
        names = (row.room_nid, speaker.nid, 8, 0, first.writer_nid, *flags)
        related = (target_key(root), THREAD_NID) if root else (None, None)
        yield (*orders, late, *names, *related, event_id, [floor.tip], speaker.auth_nids, raw)
        floor.tip, floor.stream = nid, stream


def _replied_to(crowd: Crowd, pen: Pen) -> str | None:
    """Return the first event of the thread of which the next message is a part, if it is."""
    if not crowd.thread:
        return None
    if pen.depth % crowd.thread == 0:
        pen.root = pen.tip
    return pen.root if pen.depth % 10 == 5 else None


async def _floors(conn: Connection, crowd: Crowd, pens: Sequence[Pen]) -> list[Floor]:
    """Return the rooms as they are in the database."""
    rows = {row.room_id: row for row in await conn.fetch(SQL_ROOMS, row=CrowdRoomRow)}
    speakers = {
        pen.number: [
            name for name in crowd.members(pen.number)[: SPEAKERS + 2] if name.endswith(SERVER)
        ]
        for pen in pens
    }
    wanted = [pen.auth[key] for pen in pens for key in _cited(speakers[pen.number])]
    state = {row.event_id: row for row in await conn.fetch(SQL_STATE, wanted, row=CrowdStateRow)}
    floors = []
    for pen in pens:
        row = rows[pen.room_id]
        common = [state[pen.auth["m.room.create", ""]], state[pen.auth["m.room.power_levels", ""]]]
        talking = []
        for user in speakers[pen.number]:
            own = state[pen.auth["m.room.member", user]]
            auth = [*common, own]
            talking.append(
                Speaker(
                    user,
                    own.sender_nid,
                    tuple(one.event_id for one in auth),
                    [one.event_nid for one in auth],
                )
            )
        floors.append(Floor(pen, row, row.tip, 0, row.in_order_ts, talking))
    return floors


def _cited(users: Iterable[str]) -> list[tuple[str, str]]:
    return [
        ("m.room.create", ""),
        ("m.room.power_levels", ""),
        *(("m.room.member", user) for user in users),
    ]
