"""Worlds with wrong clocks, in a copied database: purges by date take what the oracle says.

The oracle knows when each event arrived, and whether the clock was right then. An event that
arrived by a wrong clock counts as arrived with the next one by a right clock.
"""

import os
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from storage.database import deployment
from storage.database.connection import Connection, Database
from storage.ids import EventId, RoomId
from storage.maintenance.purge import cut_point, purge_history
from storage.maintenance.purge.cut_point import SQL_ROOM, PurgedRoomRow, before_time
from storage.maintenance.purge.references import SQL_SINCE, KeptRow, References
from tests.oracle.example_databases import ExampleDatabases
from tests.oracle.facts import Audience
from tests.oracle.machine import AbsenceMachine, run_machine
from tests.oracle.store_subject import StoreSubject
from tests.oracle.worlds import SERVERS, USERS

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "3"))
SERVER = "s2.test"
LOCAL = tuple(user for user in USERS if user.endswith(f":{SERVER}"))
DAY = 86_400_000
TODAY = 20_000
"""The first day of a world, in days since 1970."""
WRONG = (0, 9_131, 47_117)
"""Days of wrong clocks: in 1970, 1995 and 2099."""


class Arrival(NamedTuple):
    """The day of an arrival, and whether the clock was right."""

    day: int
    is_right: bool


class ClockedSubject(StoreSubject):
    """A store whose database can be copied, and purged by date."""

    def live(self, room_id: RoomId) -> list[EventId]:
        return self.run(self._live(room_id))

    async def _live(self, room_id: RoomId) -> list[EventId]:
        async with self.store.database.connection() as conn:
            found: list[EventId] = await conn.fetchvals(
                "SELECT e.event_id FROM events e JOIN rooms r USING (room_nid)"
                " WHERE r.room_id = $1::text AND NOT e.outlier AND NOT e.backfilled"
                " ORDER BY e.stream_ordering",
                room_id,
            )
        return found

    def cut(self, room_id: RoomId, before_ts: int, now_ts: int) -> int | None:
        """Return the stream position of the cut."""
        return self.run(self._cut(room_id, before_ts, now_ts))

    async def _cut(self, room_id: RoomId, before_ts: int, now_ts: int) -> int | None:
        async with self.store.database.connection() as conn:
            room = await conn.fetchrow(SQL_ROOM, room_id, row=PurgedRoomRow)
            assert room is not None
            found = await before_time(conn, room_id, room, before_ts, now_ts)
        return None if found is None else found.stream

    def copy_and_purge(self, room_id: RoomId, before_ts: int) -> None:
        self.run(self._copy_and_purge(room_id, before_ts))

    async def _copy_and_purge(self, room_id: RoomId, before_ts: int) -> None:
        async with self.store.database.connection() as conn:
            await conn.execute("UPDATE deployment SET incarnation = 'another'")
        await purge_history(
            self.store.database, room_id, server_name=SERVER, before_ts=before_ts, local=True
        )


class ClockMachine(AbsenceMachine):
    """Days pass between the deliveries, and the clock is wrong at some of them."""

    audience = Audience(LOCAL, SERVERS)
    syncing = LOCAL
    subject: ClockedSubject
    day, clock_day = TODAY, TODAY

    @initialize(seed=st.integers(0, 1 << 16))
    def set_clock(self, seed: int) -> None:
        self.random.seed(seed)

    @property
    def random(self) -> random.Random:
        """Which clocks are wrong; a world begins before the clock is set."""
        chance: random.Random = self.__dict__.setdefault("_random", random.Random(0))
        return chance

    def _pass_days(self) -> None:
        """The first event of the store arrives by a right clock."""
        self.day += self.random.choice([0, 0, 1, 3])
        wrong = self.random.choice([None, None, *WRONG]) if self.arrivals else None
        self.clock_day = self.day if wrong is None else wrong

    @property
    def arrivals(self) -> dict[EventId, Arrival]:
        """When each event was stored first, in the order of the deliveries."""
        found: dict[EventId, Arrival] = self.__dict__.setdefault("_arrivals", {})
        return found

    def _append(self, *given: Any, **how: Any) -> None:
        self._pass_days()
        super()._append(*given, **how)
        for event_id in self.oracle.held:
            self.arrivals.setdefault(event_id, Arrival(self.day, self.clock_day == self.day))

    def close_subject(self, subject: Any) -> None:
        try:
            self._purge_by_date()
        finally:
            self.close_at_last(subject)

    def close_at_last(self, subject: Any) -> None:
        """Free what it holds."""

    def _purge_by_date(self) -> None:
        """Compare the cut of each day in each room; then purge the last one, in a copy."""
        for room_id in sorted(self.oracle.versions):
            live = self.subject.live(room_id)
            for day in range(TODAY, self.day + 1):
                found = self.subject.cut(room_id, day * DAY, (self.day + 1) * DAY - 1)
                if not live:
                    assert found is None
                    continue
                positions = self.subject.positions(room_id)
                first = min(self._first_kept(live, day), len(live) - 1)
                assert found == positions[live[first]][1] - 1, (room_id, day)
            self.clock_day = self.day
            kept = live[self._first_kept(live, self.day) :] or live[-1:]
            self.subject.copy_and_purge(room_id, self.day * DAY)
            assert set(kept) <= set(self.subject.live(room_id))

    def _first_kept(self, live: list[EventId], day: int) -> int:
        """Return the index of the first event that did not arrive before a day for certain.

        An event may be stored before it enters the timeline. It does not say when it entered.
        """
        first = latest = 0
        for index, event_id in enumerate(live):
            arrival = self.arrivals[event_id]
            if arrival.is_right and arrival.day >= latest:
                latest = arrival.day
                if latest >= day:
                    break
                first = index + 1
        return first


class HastyMachine(ClockMachine):
    """Compares nothing but the purges."""

    syncing = ()

    def compare(self, room_id: RoomId) -> None:
        """Nothing."""


def run(
    databases: ExampleDatabases,
    monkeypatch: pytest.MonkeyPatch,
    machine: type[ClockMachine],
    *,
    examples: int,
    **more: Any,
) -> None:
    class Machine(machine):  # type: ignore[misc, valid-type]  # a base that is given
        def open_subject(self) -> ClockedSubject:
            opened = ClockedSubject(databases.open(), server_name=SERVER)
            clock = SimpleNamespace(time_ns=lambda: self.clock_day * DAY * 1_000_000 + 1)
            monkeypatch.setattr(deployment, "time", clock)
            return opened

        def close_at_last(self, subject: Any) -> None:
            subject.close()
            databases.close()

    run_machine(Machine, examples=examples, steps=15, **more)


@pytest.mark.timeout(0)
def test_wrong_clocks(databases: ExampleDatabases, monkeypatch: pytest.MonkeyPatch) -> None:
    run(databases, monkeypatch, ClockMachine, examples=EXAMPLES)


async def bisected(
    conn: Connection, room_nid: int, floor_ts: int, before_ts: int, now_ts: int
) -> tuple[int, int]:
    """As if times grew with the positions."""
    del now_ts
    rows = [
        tuple(row)
        for row in await conn._driver.fetch(
            "SELECT stream_ordering, received_ts FROM events WHERE room_nid = $1 AND NOT outlier"
            " AND NOT backfilled ORDER BY 1",
            room_nid,
        )
    ]
    low, high = 0, len(rows)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if rows[middle][1] < before_ts else (low, middle)
    return (rows[low - 1][0] if low else cut_point.NONE_YET), floor_ts


async def stepping(references: References, database: Database) -> None:
    """By numbers, as if all of them had events."""
    steps = range(references.arrived_upto, references.position, 50_000)
    assert len(steps) < 1_000, "this does not end"
    for start in steps:
        async with database.connection() as conn:
            await conn.fetch(SQL_SINCE, references.room_nid, start, start + 50_000, row=KeptRow)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "of, name, mistake",
    [
        (cut_point, "_arrived_before", bisected),
        (References, "_read_later", stepping),
    ],
)
def test_the_worlds_notice(
    databases: ExampleDatabases,
    monkeypatch: pytest.MonkeyPatch,
    of: object,
    name: str,
    mistake: Callable[..., Awaitable[Any]],
) -> None:
    monkeypatch.setattr(of, name, mistake)
    with pytest.raises(AssertionError):
        run(
            databases,
            monkeypatch,
            HastyMachine,
            examples=30,
            phases=[Phase.generate],
            derandomize=True,
            report_multiple_bugs=False,
        )
