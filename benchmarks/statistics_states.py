"""One big room in databases whose statistics mislead the planner: `STATES`.

The rows of a read or a write must not depend on what Postgres believes about its tables. So tests
and benchmarks run each statement in each state, with rooms of two sizes. In most states 200 small
rooms stand beside the big one, as on a homeserver.

A `StatesServer` fills few databases and copies them. Autovacuum is off, because it would end a
state at any time:

    begun       all rooms, 100 messages in the big one
    grown       begun, never analysed or analysed then, and the other messages
    a state     grown, with settings, analysed, and perhaps half of the big room purged

Messages of the big room form threads of about 20. Only the number of threads grows with the room.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Final, Literal, LiteralString, NamedTuple
from urllib.parse import urlsplit

import asyncpg

import storage
from benchmarks.crowd import (
    EVERYWHERE,
    SERVER,
    Crowd,
    Pen,
    append_all,
    beginnings,
    connected,
    copy_messages,
)
from benchmarks.harness import with_database
from storage.config import Config
from storage.database.connection import Database
from storage.maintenance.purge import purge_history

OTHERS: Final = 200
OTHERS_MESSAGES: Final = 30  # of each small room, about
SMALL: Final = 100
LAST: Final = 60  # messages after the last changes of the state
MEMBERS: Final = 40
THREAD: Final = 200  # the first of so many messages has 20 replies among them
CONFIG: Final = Config(statement_timeout_ms=3_600_000)
MEMBER: Final = f"@inhabitant:{SERVER}"
"""A member of the big room and of no other."""

SQL_TABLES: Final[LiteralString] = """
SELECT oid::regclass::text
FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
ORDER BY oid
"""
SQL_NOT_RESTORED: Final[LiteralString] = """
UPDATE deployment SET incarnation = NULL
"""  # else the positions of a copy go on far above those of the original
SQL_MESSAGE: Final[LiteralString] = """
SELECT event_id, origin_server_ts AS ts
FROM events
WHERE room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
    AND topological_ordering <= $2::bigint AND type_nid = 8
ORDER BY topological_ordering DESC
LIMIT 1
"""

Analysed = Literal["never", "small", "now"]


class StatisticsState(NamedTuple):
    """What Postgres knows about its tables.

    ``analysed``: never, when the big room had 100 events, or now. ``purged``: half of the big room
    was purged after that. ``settings`` are those of the database, as an operator sets them.
    """

    name: str
    analysed: Analysed = "now"
    others: int = OTHERS
    purged: bool = False
    settings: Mapping[str, str] = MappingProxyType({})


STATES: Final = (
    StatisticsState("never-analysed", "never"),
    StatisticsState("never-analysed-alone", "never", others=0),
    StatisticsState("analysed-small", "small"),
    StatisticsState("analysed-small-alone", "small", others=0),
    StatisticsState("among-small-rooms"),
    StatisticsState("alone", others=0),
    StatisticsState("half-purged", purged=True),
    StatisticsState("target-1", settings={"default_statistics_target": "1"}),
    StatisticsState("target-1000", settings={"default_statistics_target": "1000"}),
    StatisticsState("page-cost-1", settings={"random_page_cost": "1"}),
    StatisticsState("page-cost-4", settings={"random_page_cost": "4"}),
    StatisticsState("jit", settings={"jit": "on", "jit_above_cost": "0"}),
)
BY_NAME: Final[Mapping[str, StatisticsState]] = {state.name: state for state in STATES}


@dataclass(frozen=True, slots=True)
class LopsidedCrowd(Crowd):
    """A big room, number 0, and small ones."""

    is_growing: bool = False
    """Only the big room gets messages."""

    def members(self, number: int) -> list[str]:
        """Return a room's members in the order in which they join; the first creates it."""
        remote = f"@r{number}:h{number % 9}.test"
        if number:
            return [EVERYWHERE, remote, f"@u{number % MEMBERS}:{SERVER}"]
        return [EVERYWHERE, MEMBER, remote, *(f"@u{n}:{SERVER}" for n in range(MEMBERS))]

    def activity(self) -> list[float]:
        """Return the relative activity of each room."""
        others = [0.0 if self.is_growing else 1.0] * (self.rooms - 1)
        return [1.0 if self.is_growing else SMALL / OTHERS_MESSAGES, *others]


@dataclass(frozen=True, slots=True)
class BigRoom:
    """A database in a state, and its big room, of ``events`` messages.

    ``pen`` writes further events. ``root_id`` is the first event of the latest whole thread.
    ``middle_id`` is far from both ends of the room in each state, and has this origin_server_ts.
    """

    dsn: str
    state: StatisticsState
    room_id: str
    events: int
    pen: Pen
    root_id: str
    middle_id: str
    middle_ts: int


class StateMessageRow(NamedTuple):
    """A message."""

    event_id: str
    ts: int


class FilledDatabase(NamedTuple):
    """A filled database, and the pen of its big room."""

    database: str
    pen: Pen


@dataclass(slots=True)
class StatesServer:
    """Creates databases with a big room on a server; `close` drops all of them.

    ``template`` is an empty, migrated database. ``prefix`` begins the names of the databases.
    """

    server_dsn: str
    template: str
    prefix: str
    _begun: dict[int, FilledDatabase] = field(default_factory=dict)
    _grown: dict[tuple[bool, int, int], FilledDatabase] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    async def create(self, state: StatisticsState, events: int) -> BigRoom:
        """Create the database of a state with a big room of about so many messages."""
        grown = await self._grow(state, events)
        name = await self._clone(grown.database)
        dsn = with_database(self.server_dsn, name)
        await self._set(name, state)
        if state.analysed == "now":
            await _analyse(dsn)
        room = await _described(dsn, state, events, copy.deepcopy(grown.pen))
        if state.purged:
            half = await _message(dsn, room.room_id, room.pen.depth // 2)
            async with await Database.open(dsn, config=CONFIG) as database:
                await purge_history(
                    database,
                    room.room_id,
                    server_name=SERVER,
                    before_event_id=half.event_id,
                    local=True,
                    indexes_compared=True,
                )
        return room

    async def copied(self, room: BigRoom) -> BigRoom:
        """Return a copy of a state's database, for writes that must not change the original."""
        name = await self._clone(_name_of(room.dsn))
        await self._set(name, room.state)
        dsn = with_database(self.server_dsn, name)
        return replace(room, dsn=dsn, pen=copy.deepcopy(room.pen))

    async def drop(self, room: BigRoom) -> None:
        name = _name_of(room.dsn)
        self._names.remove(name)
        await self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    async def close(self) -> None:
        """Drop all databases."""
        while self._names:
            await self._execute(f"DROP DATABASE IF EXISTS {self._names.pop()} WITH (FORCE)")

    async def _grow(self, state: StatisticsState, events: int) -> FilledDatabase:
        """Return the whole big room, which was analysed at its beginning, or never."""
        key = state.analysed == "small", state.others, events
        if key not in self._grown:
            begun = await self._begin(state.others)
            name, pen = await self._clone(begun.database), copy.deepcopy(begun.pen)
            dsn = with_database(self.server_dsn, name)
            if state.analysed == "small":
                await _analyse(dsn)
            await _grow(dsn, pen, events - SMALL)
            self._grown[key] = FilledDatabase(name, pen)
        return self._grown[key]

    async def _begin(self, others: int) -> FilledDatabase:
        if others not in self._begun:
            name = await self._clone(self.template)
            dsn = with_database(self.server_dsn, name)
            crowd = LopsidedCrowd(1 + others, 0, 0, body=40, thread=THREAD)
            pens = [Pen.of(number) for number in range(crowd.rooms)]
            async with await Database.open(dsn) as database, database.connection() as conn:
                for table in await conn.fetchvals(SQL_TABLES):
                    await conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
            async with storage.open(dsn, server_name=SERVER) as store:
                await append_all(store, beginnings(crowd, pens))
            async with connected(dsn) as conn:
                await copy_messages(conn, crowd, pens, SMALL + others * OTHERS_MESSAGES, 1)
            self._begun[others] = FilledDatabase(name, pens[0])
        return self._begun[others]

    async def _clone(self, template: str) -> str:
        name = f"{self.prefix}_{next(self._numbers)}"
        await self._execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
        self._names.append(name)
        async with connected(with_database(self.server_dsn, name)) as conn:
            await conn.execute(SQL_NOT_RESTORED)
        return name

    async def _set(self, name: str, state: StatisticsState) -> None:
        """Set the settings of a database, which are no part of its template."""
        for setting, value in state.settings.items():
            await self._execute(f"ALTER DATABASE {name} SET {setting} = '{value}'")

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.server_dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


def _name_of(dsn: str) -> str:
    return urlsplit(dsn).path.removeprefix("/")


async def _analyse(dsn: str) -> None:
    """Analyse with the settings of the database: those of the store may be others."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("ANALYZE")
    finally:
        await connection.close()


async def _grow(dsn: str, pen: Pen, messages: int) -> None:
    """Add messages to the big room, and changes of its state near the end."""
    crowd = LopsidedCrowd(1, 0, 0, body=40, thread=THREAD, is_growing=True)
    async with connected(dsn) as conn:
        await copy_messages(conn, crowd, [pen], messages - LAST, 2)
    async with storage.open(dsn, server_name=SERVER) as store:
        await append_all(store, _changes(pen))
    async with connected(dsn) as conn:
        await copy_messages(conn, crowd, [pen], LAST, 3)


def _changes(pen: Pen) -> Iterator[bytes]:
    """Yield leaves, changed profiles, joins and names."""
    for number in range(5):  # of members who send no messages
        yield pen.leave(f"@u{20 + number}:{SERVER}")
        yield pen.join(f"@u{30 + number}:{SERVER}", {"displayname": f"User {number}"})
        yield pen.join(f"@new{number}:{SERVER}")
        name = {"name": f"Room of {number}"}
        yield pen.state(EVERYWHERE, "m.room.name", name, cited=False)


async def _described(dsn: str, state: StatisticsState, events: int, pen: Pen) -> BigRoom:
    last_root = (pen.depth - LAST - THREAD) // THREAD * THREAD
    middle = await _message(dsn, pen.room_id, pen.depth * 3 // 4)
    root = await _message(dsn, pen.room_id, last_root)
    return BigRoom(dsn, state, pen.room_id, events, pen, root.event_id, middle.event_id, middle.ts)


async def _message(dsn: str, room_id: str, order: int) -> StateMessageRow:
    """Return the last message up to a topological position."""
    async with connected(dsn) as conn:
        row = await conn.fetchrow(SQL_MESSAGE, room_id, order, row=StateMessageRow)
        assert row is not None
        return row
