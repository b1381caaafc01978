"""A database of a crowd (benchmarks/crowd.py): millions of events in minutes.

The engine appends every event that changes a state. Messages write only their own row and the
forward extremities of their room, so they are loaded by COPY. They come with all rooms mixed, so
that a room's events are scattered in the table. The order of arrival:

1. every room begins, and its members join          appended
2. most messages                                    COPY, the indexes made afterwards
3. some of the members change, or leave             appended
4. the rest of the messages                         COPY
"""

import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import storage
from benchmarks.crowd import DEPTH_MS, FIRST_MS, SERVER, SPEAKERS, STEP_MS, VERSION, Crowd, Pen
from storage import Store
from storage.config import Config
from storage.database.connection import Connection, Database
from storage.database.deployment import now_ms
from storage.event.model import target_key

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
        results = await store.append(batch, room_version=VERSION)
        wrong = [result for result in results if result.outcome != "stored"]
        if wrong:
            raise RuntimeError(f"not stored: {wrong[:3]}")
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
